"""Parse sizes and lists on the command lines of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Parse a number of bytes such as 8, 4K or 64M."""
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or int(digits) == 0 or int(digits) * unit % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive multiple of 4 bytes, as in 8, 4K, 64M")
    return int(digits) * unit


def comma_separated(convert: Callable[[str], T],
                    allowed: list[str] | None = None) -> Callable[[str], list[T]]:
    """Return a parser of lists a,b,c for add_argument(type=…), limited to the allowed values, if given."""

    def parse(text: str) -> list[T]:
        words = [word for word in text.split(",") if word]
        unknown = [word for word in words if allowed is not None and word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed or [])}")
        return [convert(word) for word in words]

    return parse
