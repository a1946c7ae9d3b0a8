"""Run one rank of the tuner: time the same calls in turn on communicators that differ in one threshold.

This file uses only the public API.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import shmring

Array = np.ndarray[Any, Any]

Call = Literal["all_reduce", "all_reduce_many", "reduce", "scan", "broadcast", "scatter", "all_gather"]

LEAST_ROUNDS = 5  # fewer say nothing
_SAMPLE_S = 0.002
_FUSED_ARRAYS = 64


@dataclass(frozen=True)
class Load:
    """A call that compares candidates. With several arrays, nbytes is the size of each.

    An all_reduce that is not in place has a separate array for its result.
    """

    call: Call
    nbytes: int
    shared: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Timed:
    """Seconds of one call on the slowest rank, by round and candidate; the distance of the cores by round.

    The distance is None if it changed within the round.
    """

    load: Load
    seconds: Array
    distances: list[str | None]


def trial(
    comm: shmring.Comm,
    worlds: Sequence[shmring.World],
    tables: Sequence[str],
    loads: Sequence[Load],
    until: float,
) -> list[Timed]:
    """Time every load on a communicator for each of `tables` (files). Collective.

    The rounds end at `until`, by time.monotonic(); each load has at least one.
    """
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[comm.rank % len(cpus)]})
    for name in [name for name in os.environ if name.startswith("SHMRING_")]:
        del os.environ[name]  # a setting would override the tuned threshold
    candidates = []
    for world, table in zip(worlds, tables, strict=True):
        os.environ["SHMRING_TUNING"] = table
        candidates.append(shmring.init(world, comm.rank))
    try:
        found = []
        for at, load in enumerate(loads):
            now = time.monotonic()
            found.append(_times(comm, candidates, load, now + (until - now) / (len(loads) - at)))
        return found
    finally:
        for candidate in candidates:
            candidate.close()


def _times(comm: shmring.Comm, candidates: Sequence[shmring.Comm], load: Load, until: float) -> Timed:
    calls = [_prepared(candidate, load) for candidate in candidates]
    loops = _agreed(comm, max(1, int(_SAMPLE_S / min(_sample(comm, call, 2) for call in calls))))
    rounds: list[list[float]] = []
    distances: list[str | None] = []
    while not rounds or _agreed(comm, int(time.monotonic() < until)):
        times, seen = [0.0] * len(calls), set()
        for turn in range(len(calls)):
            at = (turn + len(rounds)) % len(calls)  # the first candidate rotates
            times[at] = _sample(comm, calls[at], loops)
            seen.add(candidates[at].stats()["distance"])
        rounds.append(times)
        distances.append(seen.pop() if len(seen) == 1 else None)
    slowest = np.array(rounds)
    comm.all_reduce(slowest, "max")
    return Timed(load, slowest, distances)


def _prepared(comm: shmring.Comm, load: Load) -> Callable[[], object]:
    """Return a function that makes the call.

    Arrays are filled with ones: unwritten pages all map the kernel's zero page, which is fast to read.
    """
    count = max(1, load.nbytes // 4)
    if load.call == "all_reduce_many":
        arrays = [np.ones(count, "f4") for _ in range(_FUSED_ARRAYS)]
        return lambda: comm.all_reduce_many(arrays)
    x: Array = comm.zeros(count, "f4") if load.shared else np.ones(count, "f4")
    if load.call == "all_reduce" and not load.in_place:
        out: Array = comm.zeros(count, "f4") if load.shared else np.ones(count, "f4")
        return comm.plan("all_reduce", x, out=out)
    if load.call == "scatter":
        return comm.plan("scatter", np.ones((comm.size, count), "f4") if comm.rank == 0 else None, out=x)
    rows = {"out": np.ones((comm.size, count), "f4")} if load.call == "all_gather" else {}
    return comm.plan(load.call, x, **rows)


def _sample(comm: shmring.Comm, call: Callable[[], object], loops: int) -> float:
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - begin) / loops


def _agreed(comm: shmring.Comm, number: int) -> int:
    """Return rank 0's number."""
    word = np.array(number)
    comm.broadcast(word)
    return int(word)
