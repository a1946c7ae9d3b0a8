"""Checks of arguments: integers, seconds, lists, and what the other ranks learn of a wrong one.

Any module may import them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Set
from typing import Any, SupportsFloat, SupportsIndex


def integer(what: str, number: SupportsIndex, least: str | None = None) -> int:
    """Return a number as an int. TypeError if it is not an integer, also for a float.

    least: the least number that is allowed, with its unit, as in "1 step"; ValueError for a smaller one.
    """
    try:
        found = operator.index(number)
    except TypeError:
        raise TypeError(f"{what} is {number!r}; it must be an integer") from None
    if least is not None and found < int(least.split()[0]):
        raise ValueError(f"{what} is {found}; it must be {least} or more")
    return found


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


@contextlib.contextmanager
def refusing(comm: Any, kind: str, errors: type[BaseException] = Exception) -> Iterator[None]:
    """Refuse the collective `kind`, by `Comm.refuse`, if the block raises: other ranks may wait in it."""
    try:
        yield
    except errors:
        comm.refuse(kind)
        raise
