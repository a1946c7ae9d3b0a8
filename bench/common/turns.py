"""Measure several ways to do the same on one communicator, in turn: the base of the methods' benchmarks.

Rounds alternate between the ways, and each round begins with another way. The figure of a round is the
slowest rank's. Quote only ratios between ways of one run, with the round trip that `state_of` reports. Uses
shmring's public API.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

import shmring

SAMPLE_S = 0.02


def pin(comm: shmring.Comm) -> None:
    """Bind this rank to the least shared CPU, also counting ranks of stand-in hosts."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[comm.rank % len(cpus)]})


def seconds(comm: shmring.Comm, way: Callable[[], object], loops: int) -> float:
    """Return the seconds of one call on the slowest rank."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(loops):
        way()
    took = np.array([(time.perf_counter() - begin) / loops])
    comm.all_reduce(took, "max")
    return float(took[0])


def in_turn(
    comm: shmring.Comm, ways: Mapping[str, Callable[[], object]], rounds: int, sample_s: float = SAMPLE_S
) -> dict[str, float]:
    """Return the seconds of one call of each way: the median over rounds, the same on every rank.

    A quarter of the calls are made first and not timed. They bring the caches, and the time that ranks wait
    for each other, back to this way's own state: four ranks on two cores need 10 us at 1 KiB just after
    another algorithm, and 3 us a little later.
    """
    shortest = {name: min(seconds(comm, way, 2) for _ in range(3)) for name, way in ways.items()}
    loops = {name: max(1, int(sample_s / shortest[name])) for name in ways}
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds(comm, ways[name], -(-loops[name] // 4))
            found[name].append(seconds(comm, ways[name], loops[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def state_of(comm: shmring.Comm) -> str:
    """Return the facts to show with every figure: number of ranks, their places, the distance of cores."""
    state = comm.stats()
    hosts = "" if comm.num_nodes == 1 else f" on {comm.num_nodes} hosts"
    return f"{comm.size} ranks{hosts}, {state['distance']}, round trip {state['round_trip_ns']} ns"
