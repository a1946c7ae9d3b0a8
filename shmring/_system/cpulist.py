"""Sets of small numbers in the kernel's format: 0,2-3."""

from __future__ import annotations

from collections.abc import Iterable


def parse(text: str) -> list[int]:
    """Return the numbers of a text such as "0,2-3", sorted and unique. Raises ValueError for other text."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        last = last if "-" in part else first
        if not all(end.isascii() and end.isdigit() and len(end) <= 6 for end in (first, last)):
            raise ValueError(f"{part!r} is neither a number nor a range such as 2-3")
        if int(first) > int(last):
            raise ValueError(f"{part!r} ends before it begins")
        numbers.update(range(int(first), int(last) + 1))
    return sorted(numbers)


def spell(numbers: Iterable[int]) -> str:
    """Return the shortest text for the numbers: 0,2-3 for [0, 2, 3]."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
