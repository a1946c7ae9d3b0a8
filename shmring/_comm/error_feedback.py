"""Error feedback: keep the rounding errors of an array's transfer, and add them to the next one.

The errors belong to the array's memory and are dropped with it. Another array at the same address starts
with zeros.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

Residual = NDArray[np.float32]
_Place = tuple[int, int, int]  # address, or hash of several; and what tells uses of the same memory apart

_MOST = 4  # limit, in multiples of the memory's size: overlapping views have separate errors


class Residuals:
    """The errors of one communicator on one rank."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def of(self, x: Any, place: _Place, length: int) -> Residual | None:
        """Return `length` errors, zeros at first, for a place in x's memory; None without weak references."""
        owner, seen_nbytes = _owner_of(x)
        number = id(owner)
        # An exception of a signal handler may have kept the callback from dropping those of a dead owner.
        if number not in self._kept or not self._kept[number].is_of(owner):
            try:
                reference = weakref.ref(owner, lambda _: self._kept.pop(number, None))
            except TypeError:
                return None
            self._kept[number] = _Kept(reference, _MOST * _nbytes_of(owner, seen_nbytes))
        return self._kept[number].at(place, length)


class _Kept:
    """The errors for one owner's memory. The oldest are dropped when they exceed a limit."""

    def __init__(self, reference: weakref.ref[Any], most_nbytes: int) -> None:
        self._reference = reference  # a weak reference that is dropped calls nothing
        self._residuals: dict[_Place, Residual] = {}
        # Only the first array of a list is counted, so `at` allows more.
        self._most_nbytes = most_nbytes

    def is_of(self, owner: Any) -> bool:
        return self._reference() is owner

    def at(self, place: _Place, length: int) -> Residual:
        if place not in self._residuals:
            self._residuals[place] = np.zeros(length, np.float32)
            most_nbytes = max(self._most_nbytes, _MOST * self._residuals[place].nbytes)
            while len(self._residuals) > 1 and self._nbytes() > most_nbytes:
                del self._residuals[next(iter(self._residuals))]
        return self._residuals[place]

    def _nbytes(self) -> int:
        return sum(residual.nbytes for residual in self._residuals.values())


def _owner_of(x: Any) -> tuple[Any, int]:
    """Return the object that owns x's memory, since views are short-lived, and the bytes of its array.

    If the owner is no array, these are the bytes of the last array on the way to it; 0 if there is none.
    """
    nbytes = 0
    while isinstance(x, np.ndarray):
        nbytes = x.nbytes
        if x.base is None:
            break
        x = x.base
    return x, nbytes


def _nbytes_of(owner: Any, seen_nbytes: int) -> int:
    """Return the size of the owner's memory; seen_nbytes if the owner has neither a size nor a buffer."""
    nbytes = getattr(owner, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    try:
        return memoryview(owner).nbytes  # as of an mmap
    except (TypeError, BufferError):
        return seen_nbytes
