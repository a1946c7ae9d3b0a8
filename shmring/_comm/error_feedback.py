"""What rounding on the wire has lost of an array, kept to be sent with what it holds the next time.

Belongs to the array's memory and lives no longer than it: what another array later has at that place starts
from nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

Losses = NDArray[np.float32]
_Place = tuple[int, int, int]  # address, number of the dtype, elements

_MOST = 4  # times the bytes of the memory itself: views of it that overlap have losses of their own


class Residuals:
    """One communicator's, on one rank."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def of(self, x: Any, place: _Place, length: int) -> Losses | None:
        """`length` values for the memory of x at a place, zeros at first; None if its end will not show."""
        owner = _owner_of(x)
        number = id(owner)
        if number not in self._kept:
            try:
                reference = weakref.ref(owner, lambda _: self._kept.pop(number, None))
            except TypeError:
                return None
            self._kept[number] = _Kept(reference, _MOST * getattr(owner, "nbytes", 0))
        return self._kept[number].at(place, length)


class _Kept:
    """Of one owner's memory; those that were made first go where there are more than it can have in use."""

    def __init__(self, reference: weakref.ref[Any], most_nbytes: int) -> None:
        self._reference = reference
        self._losses: dict[_Place, Losses] = {}
        self._most_nbytes = most_nbytes  # 0: not known

    def at(self, place: _Place, length: int) -> Losses:
        if place not in self._losses:
            self._losses[place] = np.zeros(length, np.float32)
            while self._most_nbytes and len(self._losses) > 1 and self._nbytes() > self._most_nbytes:
                del self._losses[next(iter(self._losses))]
        return self._losses[place]

    def _nbytes(self) -> int:
        return sum(losses.nbytes for losses in self._losses.values())


def _owner_of(x: Any) -> Any:
    """Whose memory it is: views come and go."""
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return x
