"""How sizes and lists are written on the command lines of the benchmarks. Knows nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes from 8, 4K, 64M."""
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or int(digits) == 0 or int(digits) * unit % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive multiple of 4 bytes, as in 8, 4K, 64M")
    return int(digits) * unit


def comma_separated(convert: Callable[[str], T],
                    allowed: list[str] | None = None) -> Callable[[str], list[T]]:
    """For add_argument(type=…): a,b,c, each one of those allowed, if they are named."""

    def parse(text: str) -> list[T]:
        words = [word for word in text.split(",") if word]
        unknown = [word for word in words if allowed is not None and word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed or [])}")
        return [convert(word) for word in words]

    return parse
