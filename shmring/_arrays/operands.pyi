"""From an array of any make to its memory, as Python sees it."""

from typing import Any

import numpy as np

class Memory:
    """A contiguous array that another library holds, as x or out of a collective: where it lies, what it is.

    address: of its first element, in this process. count: elements. dtype: the name of one of shmring's
    dtypes; an opaque dtype may be called uint8. readonly: an error where it would be written to.
    owner: kept as long as this is. Nobody can check what is told here: wrong addresses end the process.
    """

    def __init__(
        self, address: int, count: int, dtype: str, *, readonly: bool = False, owner: object = None
    ) -> None: ...
    @staticmethod
    def of(x: object) -> Memory | None:
        """x's own memory, or None where x is none that is read at once: on the CPU, in C order, of a dtype.

        x: an array of NumPy, or of a library that exchanges arrays in C (DLPack 1.2 and later; torch's
        tensors). Asks no more than where it lies: of what such a library puts off, as torch does negation,
        it knows nothing, and takes its arrays for writable.
        """

    @property
    def address(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> str:
        """Its dtype's name."""

    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int]: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def owner(self) -> object: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The same memory as NumPy's array, where NumPy itself has the dtype."""
