"""The cost of a trace while it runs, in turn with the same calls untraced: python bench/engine/bench_trace.py

Rounds alternate on one communicator; the figure of a round is the slowest rank's. Quote only the ratio and
the difference, as medians over rounds. bench/regress.py against a revision without traces measures what an
untraced communicator pays for them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

import shmring

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import SAMPLE_S, pin, seconds, state_of


def measure(comm: shmring.Comm, nbytes: int, rounds: int, folder: str) -> None:
    pin(comm)
    x = np.ones(nbytes // 4, "f4")

    def plain() -> None:
        comm.all_reduce(x, "max")

    loops = max(5, int(SAMPLE_S / seconds(comm, plain, 20)))
    untraced, traced = [], []
    for turn in range(rounds):
        untraced.append(seconds(comm, plain, loops) * 1e6)
        with comm.trace(Path(folder) / f"{turn}.json"):
            traced.append(seconds(comm, plain, loops) * 1e6)
    without, within = statistics.median(untraced), statistics.median(traced)
    if comm.rank == 0:
        print(f"{nbytes} B: untraced {without:9.2f} us, traced {within:9.2f} us, {within / without:5.2f}x, "
              f"{within - without:+6.2f} us; {state_of(comm)}", flush=True)


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
