"""The sizes of x and y of each collective, and its expected result element by element.

This file runs in the ranks' interpreters and imports only numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ROOT = 0
# Not a collective: rank 0 sends x to rank 1 and receives rank 1's x into y; a round trip is one call.
PING_PONG = "ping_pong"
# Not collectives either: rank 0 sends WINDOW messages at once, and rank 1 answers when it has them all; an
# object goes there and back; and an object goes from rank 0 to all ranks. A small object is a tuple, a larger
# one has x in it.
STREAM = "stream"
OBJECT_PING_PONG = "object_ping_pong"
OBJECT_BROADCAST = "object_broadcast"
OBJECT_CALLS = (OBJECT_PING_PONG, OBJECT_BROADCAST)
MESSAGES = (PING_PONG, STREAM, *OBJECT_CALLS)
WINDOW = 16
LEAST_ARRAY_IN_OBJECT_NBYTES = 4096
# The share of the call's bytes in x and in y: all of them, or one rank's part.
PARTS: dict[str, tuple[bool, bool]] = {
    "all_reduce": (False, False), "reduce": (False, False), "scan": (False, False), "exscan": (False, False),
    "broadcast": (False, False), "reduce_scatter": (False, True), "scatter": (False, True),
    "gather": (True, False), "all_gather": (True, False), "all_to_all": (False, False),
    **dict.fromkeys(MESSAGES, (False, False)),
}
CALLS = tuple(PARTS)

# Elements repeat with a prime period, so that a shift by a chunk is noticed. They are small, so that sums are
# exact in every dtype.
BLOCK = np.array([(31 * i * i + 17 * i) % 1009 % 4 for i in range(1009)])


def counts_of(call: str, count: int, size: int) -> tuple[int, int]:
    """Return the elements of x and of y for a call whose larger array has `count` elements."""
    part = max(1, count // size)
    whole = part * size if True in PARTS[call] or call == "all_to_all" else count
    x_is_part, y_is_part = PARTS[call]
    return part if x_is_part else whole, part if y_is_part else whole


def object_with(x: Array) -> object:
    """Return the object that the benchmarks of objects send."""
    return ("step", 7, 0.5) if x.nbytes < LEAST_ARRAY_IN_OBJECT_NBYTES else ("step", 7, x)


def fill_pattern(x: Array, rank: int) -> None:
    block = (BLOCK + rank).astype(x.dtype)
    whole = len(x) - len(x) % len(block)
    x[:whole].reshape(-1, len(block))[:] = block
    x[whole:] = block[:len(x) - whole]


def arguments_of(call: str, x: Array, y: Array, rank: int) -> tuple[Array | None, Array | None]:
    """Return the x and y that a rank passes: None for an array that only the root has."""
    given = None if call == "scatter" and rank != ROOT else x
    room = None if call in ("gather", "reduce") and rank != ROOT else y
    return given, room


def wrong_elements(call: str, y: Array, count: int, rank: int, size: int, *, written: bool) -> int:
    """Count wrong elements of the result, for x of `count` elements by fill_pattern or all ones. The check
    compares repeated blocks, so it needs no array as large as y."""
    parts = _parts(call, count // size, rank, size)
    nelements = len(y) // max(1, len(parts))
    wrong = 0
    for at, (givers, first) in enumerate(parts):
        block = sum(np.ones_like(BLOCK) if written else BLOCK + giver for giver in givers)
        part = y[at * nelements:(at + 1) * nelements]
        wrong += _differing(part, np.roll(block, -first).astype(y.dtype))
    return wrong


def _differing(y: Array, block: Array) -> int:
    whole = len(y) - len(y) % len(block)
    inside = np.count_nonzero(y[:whole].reshape(-1, len(block)) != block)
    return int(inside + np.count_nonzero(y[whole:] != block[:len(y) - whole]))


def _parts(call: str, part: int, rank: int, size: int) -> list[tuple[range, int]]:
    """Return for each part of y the ranks whose x it sums, and its first element; empty if there is none."""
    if (call in ("reduce", "gather") and rank != ROOT) or (call == "exscan" and rank == 0):
        return []
    everybody, root, own = range(size), range(ROOT, ROOT + 1), rank * part
    other = range(1 - rank, 2 - rank)
    one_by_one = [range(giver, giver + 1) for giver in everybody]
    return {
        "all_reduce": [(everybody, 0)], "reduce": [(everybody, 0)], "reduce_scatter": [(everybody, own)],
        "scan": [(range(rank + 1), 0)], "exscan": [(range(rank), 0)],
        "broadcast": [(root, 0)], "scatter": [(root, own)],
        "gather": [(giver, 0) for giver in one_by_one],
        "all_gather": [(giver, 0) for giver in one_by_one],
        "all_to_all": [(giver, own) for giver in one_by_one],
        PING_PONG: [(other, 0)],
        STREAM: [(root, 0)] if rank == 1 else [],
    }[call]
