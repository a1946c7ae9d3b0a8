"""all_reduce_many beside as many calls of all_reduce, in turn: python bench/bench_fusion.py --ranks 2,4

The arrays are private and lie apart ("packed"), or are consecutive views of one shared array ("views").
A figure is the median over rounds of the slowest rank's time for one bunch; only the ratio is to be quoted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from arguments import comma_separated, parse_size

import shmring

ROUND_S = 0.003


def seconds(comm: shmring.Comm, call: Callable[[], None], loops: int) -> float:
    """Of one call, on the slowest rank."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(loops):
        call()
    took = np.array([(time.perf_counter() - begin) / loops])
    comm.all_reduce(took, "max")
    return float(took[0])


def one_by_one(comm: shmring.Comm, arrays: list[Any]) -> None:
    for array in arrays:
        comm.all_reduce(array)


def measure(comm: shmring.Comm, count: int, nbytes: int, rounds: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[comm.rank % len(cpus)]})
    shared = comm.zeros((count, nbytes // 4), "f4")
    kinds = {"packed": [np.zeros(nbytes // 4, "f4") for _ in range(count)], "views": list(shared)}
    for kind, arrays in kinds.items():
        calls = (lambda a=arrays: one_by_one(comm, a), lambda a=arrays: comm.all_reduce_many(a))
        loops = [max(1, int(ROUND_S / seconds(comm, call, 2))) for call in calls]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for call, turns, found in zip(calls, loops, times, strict=True):
                found.append(seconds(comm, call, turns) * 1e6)
        separate, fused = map(statistics.median, times)
        if comm.rank == 0:
            state = comm.stats()
            print(f"{comm.size} ranks, {count} arrays of {nbytes} B, {kind:6}: one by one "
                  f"{separate:9.1f} us, together {fused:9.1f} us, {separate / fused:5.1f}x; "
                  f"{state['distance']}, round trip {state['round_trip_ns']} ns", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=comma_separated(int), default="2,4")
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="256", help="bytes of one array")
    parser.add_argument("--count", type=int, default=1000, help="arrays")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    for ranks in options.ranks:
        for nbytes in options.sizes:
            shmring.spawn(measure, ranks, (options.count, nbytes, options.rounds))


if __name__ == "__main__":
    main()
