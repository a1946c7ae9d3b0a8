"""Locks in shared memory, taken by ranks, and one-sided access to a shared array under them."""

from types import TracebackType
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from .._engine.engine import Engine

LOCK_NBYTES: int

class Locks:
    """`count` locks at `address`, zeros at first; `memory` keeps them mapped."""

    def __new__(
        cls, engine: Engine, memory: object, address: int, count: int, of_stripes: bool = False
    ) -> Self: ...
    @property
    def count(self) -> int:
        """Number of locks."""

    def lock(self, number: SupportsIndex, timeout: float | None = None) -> Lock:
        """Return lock `number` as a context manager. Entering raises Timeout after `timeout` seconds."""

class Lock:
    """One lock of a shared array, made by `SharedArray.lock`. `with` takes and releases it. A forked child
    does not hold it.
    """

    def __new__(cls, locks: Locks, index: int, timeout_s: float) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

def count_for(nbytes: int) -> int:
    """Return the number of stripes of an array of `nbytes`."""

class Stripes:
    """The locks of an array's ranges of 32 KiB. Range i uses lock i modulo the number of locks."""

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
        """Copy elements to `out`, then set them to `values` or to elements op values, range by range."""
