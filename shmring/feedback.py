"""What rounding on the wire has lost of an array, kept to be sent with what it holds the next time.

Belongs to the array's memory and lives no longer than it: what another array later has at that place starts
from nothing. May know: nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Key = tuple[int, int, int]


class Residuals:
    """One communicator's, on one rank."""

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[weakref.ref[Any], NDArray[np.float32]]] = {}

    def of(self, x: Any, address: int, count: int) -> NDArray[np.float32] | None:
        """`count` values for the memory of x at `address`, zeros at first; None if its end will not show."""
        owner = _owner_of(x)
        key = (id(owner), address, count)
        if key not in self._kept:
            try:
                reference = weakref.ref(owner, lambda _: self._kept.pop(key, None))
            except TypeError:
                return None
            self._kept[key] = reference, np.zeros(count, np.float32)
        return self._kept[key][1]


def _owner_of(x: Any) -> Any:
    """Whose memory it is: views come and go."""
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return x
