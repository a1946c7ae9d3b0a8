"""Memory of an array of any library: the Python interface."""

from typing import Any, Self

import numpy as np

class Memory:
    """A contiguous array in another library's memory, for use as x or out of a collective."""

    def __init__(
        self, address: int, count: int, dtype: str, *, readonly: bool = False, owner: object = None
    ) -> None: ...
    @staticmethod
    def of(x: object) -> Memory | None:
        """Return x's own memory, or None unless x is on the CPU, in C order and of one of shmring's
        dtypes.
        """

    @property
    def address(self) -> int:
        """Address of the first element."""
    @property
    def count(self) -> int:
        """Number of elements."""

    @property
    def dtype(self) -> str:
        """Name of its dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
    @property
    def shape(self) -> tuple[int]:
        """`(count,)`"""
    @property
    def readonly(self) -> bool:
        """True if a call that would write to it raises."""

    @property
    def owner(self) -> object:
        """The object that is kept alive as long as this."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the same memory as a NumPy array. TypeError if NumPy lacks the dtype."""

class Arena:
    """Shared memory for the arrays that NumPy makes in a `with` statement; `Comm.arena` makes it."""

    def __init__(self, memory: np.ndarray[Any, Any], smallest_nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int:
        """Bytes of this rank's memory."""

    @property
    def used_nbytes(self) -> int:
        """Bytes that arrays use now, in whole pages of 4 KiB."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

class FileDescriptor:
    """A file descriptor, -1 at first: set `fd`. It is closed with this object, unless `fd` is -1."""

    fd: int

def tensor_in(
    capsule: object,
) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, int, int, int, bool]:
    """Return the fields of the tensor in a capsule that `__dlpack__` has returned. The capsule owns the
    memory.
    """
