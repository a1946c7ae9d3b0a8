"""What a trace costs while it runs, in turn with the same calls untraced: python bench/bench_trace.py

Rounds alternate on one communicator; the figure of a round is the slowest rank's. Only the ratio and the
difference are to be quoted: medians over rounds. What an untraced communicator pays for being traceable is
in bench/regress.py's comparison with a revision before there were traces.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from arguments import comma_separated, parse_size

import shmring

SAMPLE_S = 0.02


def microseconds(comm: shmring.Comm, x: np.ndarray, calls: int) -> float:
    """Of one call, on the slowest rank."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(x, "max")
    took = np.array([(time.perf_counter() - begin) / calls * 1e6])
    comm.all_reduce(took, "max")
    return float(took[0])


def measure(comm: shmring.Comm, nbytes: int, rounds: int, folder: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if comm.size <= len(cpus):
        os.sched_setaffinity(0, {cpus[comm.rank]})
    x = np.ones(nbytes // 4, "f4")
    calls = max(5, int(SAMPLE_S / (microseconds(comm, x, 20) * 1e-6)))
    plain, traced = [], []
    for turn in range(rounds):
        plain.append(microseconds(comm, x, calls))
        with comm.trace(Path(folder) / f"{turn}.json"):
            traced.append(microseconds(comm, x, calls))
    without, within = statistics.median(plain), statistics.median(traced)
    if comm.rank == 0:
        state = comm.stats()
        print(f"{comm.size} ranks, {nbytes} B: untraced {without:9.2f} us, traced {within:9.2f} us, "
              f"{within / without:5.2f}x, {within - without:+6.2f} us; {state['path']}, {state['distance']}, "
              f"round trip {state['round_trip_ns']} ns", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=comma_separated(int), default="2")
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="8,4K,64K,1M,16M")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    for ranks in options.ranks:
        for nbytes in options.sizes:
            with tempfile.TemporaryDirectory() as folder:
                shmring.spawn(measure, ranks, (nbytes, options.rounds, folder))


if __name__ == "__main__":
    main()
