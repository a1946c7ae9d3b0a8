"""One-sided access to a shared array, under striped locks."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .._engine.engine import Engine

BLOCK_NBYTES: int  # size of a block; access is atomic within a block

def count_for(nbytes: int) -> int:
    """Return the number of stripes of an array of `nbytes`."""

class Stripes:
    """The locks of an array's blocks of BLOCK_NBYTES. Block b uses lock b modulo the number of locks."""

    def __new__(cls, engine: Engine, memory: object, begin: int, locks: int, count: int) -> Self: ...
    def access(
        self,
        array: NDArray[Any],
        first: int,
        count: int,
        index: NDArray[np.intp] | None,
        values: NDArray[Any] | None,
        out: NDArray[Any] | None,
        dtype: int,
        op: int,
        timeout: float | None,
    ) -> None:
        """Copy elements to `out`, then set them to `values` or to elements op values, block by block."""
