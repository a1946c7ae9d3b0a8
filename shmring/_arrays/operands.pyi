"""Memory of an array of any library: the Python interface."""

from typing import Any

import numpy as np

class Memory:
    """A contiguous array in another library's memory, for use as x or out of a collective.

    address: of its first element, in this process. count: number of elements. dtype: the name of one of
    shmring's dtypes; an opaque dtype may be called uint8. readonly: a call that would write to it
    raises. owner: an object to keep alive as long as this. Nothing here can be verified: a wrong address
    crashes the process. The array has one dimension.
    """

    def __init__(
        self, address: int, count: int, dtype: str, *, readonly: bool = False, owner: object = None
    ) -> None: ...
    @staticmethod
    def of(x: object) -> Memory | None:
        """Return x's own memory, or None unless x is on the CPU, in C order and of one of shmring's dtypes.

        x: an array of NumPy, or of a library that exchanges arrays in C (DLPack 1.2 and later; torch's
        tensors). Only the location is read: lazy operations such as torch's negation are not applied, and
        arrays of such a library are assumed writable.
        """

    @property
    def address(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> str:
        """Name of its dtype."""

    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int]: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def owner(self) -> object: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the same memory as a NumPy array. TypeError if NumPy lacks the dtype."""
