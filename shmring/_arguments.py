"""Check of arguments that are integers. Any module may import it."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def integer(what: str, number: SupportsIndex) -> int:
    """Return a number as an int. TypeError if it is not an integer, also for a float."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{what} is {number!r}; it must be an integer") from None
