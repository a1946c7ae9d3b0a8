"""all_reduce_many beside as many calls of all_reduce, in turn:
python bench/engine/bench_fusion.py --ranks 2,4

The arrays are private and lie apart ("packed"), or are consecutive views of one shared array ("views"). A
figure is the median over rounds of the slowest rank's time for all arrays once; quote only the ratio.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import shmring

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import in_turn, pin, state_of

ROUND_S = 0.003


def one_by_one(comm: shmring.Comm, arrays: list[Any]) -> None:
    for array in arrays:
        comm.all_reduce(array)


def measure(comm: shmring.Comm, count: int, nbytes: int, rounds: int) -> None:
    pin(comm)
    shared = comm.zeros((count, nbytes // 4), "f4")
    kinds = {"packed": [np.zeros(nbytes // 4, "f4") for _ in range(count)], "views": list(shared)}
    for kind, arrays in kinds.items():
        ways = {"separate": lambda a=arrays: one_by_one(comm, a),
                "fused": lambda a=arrays: comm.all_reduce_many(a)}
        times = in_turn(comm, ways, rounds, ROUND_S)
        separate, fused = times["separate"] * 1e6, times["fused"] * 1e6
        if comm.rank == 0:
            print(f"{count} arrays of {nbytes} B, {kind:6}: one by one {separate:9.1f} us, together "
                  f"{fused:9.1f} us, {separate / fused:5.1f}x; {state_of(comm)}", flush=True)


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
