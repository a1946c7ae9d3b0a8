"""Checks of arguments that are integers, seconds or lists. Any module may import them."""

from __future__ import annotations

import operator
from collections.abc import ItemsView, KeysView, Mapping, Set
from typing import SupportsFloat, SupportsIndex


def integer(what: str, number: SupportsIndex) -> int:
    """Return a number as an int. TypeError if it is not an integer, also for a float."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{what} is {number!r}; it must be an integer") from None


def seconds(what: str, number: SupportsFloat | SupportsIndex) -> float:
    """Return a number of seconds as a float. TypeError if it is no number, also for a bool or a text."""
    try:
        if not isinstance(number, (bool, str, bytes, bytearray)):
            return float(number)
    except TypeError:
        pass
    raise TypeError(f"{what} is {number!r}; it must be a number of seconds, or None")


def is_no_list(given: object) -> bool:
    """Return whether a value that can be iterated over is a text, bytes, a mapping or an unordered set."""
    if isinstance(given, (KeysView, ItemsView)):  # sets that have the order of their mapping
        return False
    return isinstance(given, (str, bytes, bytearray, memoryview, Mapping, Set))
