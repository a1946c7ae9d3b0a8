"""One-sided access to an array that all ranks see, under striped locks."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .._engine.engine import Engine

BLOCK_NBYTES: int  # what is read, written or combined at once

def count_for(nbytes: int) -> int:
    """How many stripes an array of so many bytes has."""

class Stripes:
    """The locks of an array's blocks: block b, of BLOCK_NBYTES, has lock b modulo their number."""

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
        """out = elements of the array; then the elements = values, or elements op values, block by block."""
