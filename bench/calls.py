"""What each collective is given and should give back: sizes of x and y, and the result element by element.

Owns the definitions. Runs in the ranks' interpreters; knows numpy only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ROOT = 0
# What of the call's bytes x and y hold: all of them, or one rank's part.
PARTS: dict[str, tuple[bool, bool]] = {
    "all_reduce": (False, False), "reduce": (False, False), "scan": (False, False), "exscan": (False, False),
    "broadcast": (False, False), "reduce_scatter": (False, True), "scatter": (False, True),
    "gather": (True, False), "all_gather": (True, False), "all_to_all": (False, False),
}
CALLS = tuple(PARTS)

# Elements repeat after a prime number of them and not before, so that no shift by a chunk goes unnoticed.
# Small, so that sums are exact in every dtype.
BLOCK = np.array([(31 * i * i + 17 * i) % 1009 % 4 for i in range(1009)])


def counts_of(call: str, count: int, size: int) -> tuple[int, int]:
    """Elements of x and of y for a call of `count` elements: those of the larger of both."""
    part = max(1, count // size)
    whole = part * size if True in PARTS[call] or call == "all_to_all" else count
    x_is_part, y_is_part = PARTS[call]
    return part if x_is_part else whole, part if y_is_part else whole


def fill_pattern(x: Array, rank: int) -> None:
    block = (BLOCK + rank).astype(x.dtype)
    whole = len(x) - len(x) % len(block)
    x[:whole].reshape(-1, len(block))[:] = block
    x[whole:] = block[:len(x) - whole]


def wrong_elements(call: str, y: Array, count: int, rank: int, size: int, *, written: bool) -> int:
    """Elements of the result that are not as they should be, for x as by fill_pattern, or all ones."""
    wanted = _result(call, [_x(count, other, y.dtype, written) for other in range(size)], rank, y.dtype)
    return 0 if wanted is None else int(np.count_nonzero(y != wanted))


def _x(count: int, rank: int, dtype: np.dtype[Any], written: bool) -> Array:
    x = np.ones(count, dtype)
    if not written:
        fill_pattern(x, rank)
    return x


def _result(call: str, xs: list[Array], rank: int, dtype: np.dtype[Any]) -> Array | None:
    """None where the call leaves nothing."""
    part = len(xs[0]) // len(xs)
    mine = slice(rank * part, (rank + 1) * part)
    if (call in ("reduce", "gather") and rank != ROOT) or (call == "exscan" and rank == 0):
        return None
    if call in ("all_reduce", "reduce"):
        return sum(xs).astype(dtype)
    if call == "scan":
        return sum(xs[:rank + 1]).astype(dtype)
    if call == "exscan":
        return sum(xs[:rank]).astype(dtype)
    if call == "reduce_scatter":
        return sum(x[mine] for x in xs).astype(dtype)
    if call == "broadcast":
        return xs[ROOT]
    if call == "scatter":
        return xs[ROOT][mine]
    if call == "all_to_all":
        return np.concatenate([x[mine] for x in xs])
    return np.concatenate(xs)
