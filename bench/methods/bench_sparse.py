"""all_reduce beside SparseAllReduce and all_reduce_pairs, by density, and where they break even.

    shmrun -n 2 bench/methods/bench_sparse.py --sizes 1M,16M      one host
    python bench/internode/on_hosts.py --hosts 2 -n 1 --rate-gbit 1 \
        bench/methods/bench_sparse.py                           two, with a link between

A program of ranks. Density of blocks: the share that is not zero on some rank, the same blocks on all. Of
pairs: the share of elements that each rank has, at places of its own; "pairs, whole" is their way by way of a
whole array. No other one falls back to that here. The break-even density is read off between the two next to
it, beside all_reduce for blocks, and for pairs beside the way by the whole array.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import shmring
from shmring.methods.sparse import SparseAllReduce, all_reduce_pairs

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import in_turn, pin, state_of

PLAIN = "all_reduce"
BLOCK = 256
NEVER = 1e9  # times the bytes of the whole


def in_blocks(comm: shmring.Comm, count: int, density: float) -> Callable[[], None]:
    nblocks = max(1, count // BLOCK)
    chosen = np.random.default_rng(1).permutation(nblocks)[: round(density * nblocks)]
    x = np.zeros(count, np.float32)
    for number in chosen:
        x[number * BLOCK : (number + 1) * BLOCK] = 1
    reduce = SparseAllReduce(comm, block=BLOCK, dense_above=1)
    return functools.partial(reduce, x, "avg")


def in_pairs(comm: shmring.Comm, count: int, density: float, dense_above: float) -> Callable[[], object]:
    chosen = np.random.default_rng(comm.rank).permutation(count)[: round(density * count)]
    indices = np.sort(chosen)
    values = np.ones(len(indices), np.float32)
    return functools.partial(all_reduce_pairs, comm, indices, values, count, dense_above=dense_above)


KINDS = {
    "blocks": in_blocks,
    "pairs": functools.partial(in_pairs, dense_above=NEVER),
    "pairs, whole": functools.partial(in_pairs, dense_above=0),
}


def break_even(densities: list[float], times_s: list[float], others_s: list[float]) -> float:
    """Return the least density at which the times reach the others', interpolated linearly; at most the last
    one."""
    gains = [other_s - time_s for time_s, other_s in zip(times_s, others_s, strict=True)]
    if gains[0] <= 0:
        return 0.0
    for number, gain in enumerate(gains):
        if gain <= 0:
            before, step = densities[number - 1], densities[number] - densities[number - 1]
            return before + step * gains[number - 1] / (gains[number - 1] - gain)
    return densities[-1]


def measure(comm: shmring.Comm, nbytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of all_reduce, the times of each kind by density, and the density at which they meet.
    """
    count, densities = nbytes // 4, options.densities
    x = np.ones(count, np.float32)
    ways: dict[Any, Callable[[], object]] = {PLAIN: functools.partial(comm.all_reduce, x, "avg")}
    for kind, make in KINDS.items():
        ways |= {(kind, density): make(comm, count, density) for density in densities}
    times = in_turn(comm, ways, options.rounds, options.sample_s)
    by_kind = {kind: [times[kind, density] for density in densities] for kind in KINDS}
    plain_s = times[PLAIN]
    meet = {"blocks": break_even(densities, by_kind["blocks"], [plain_s] * len(densities)),
            "pairs": break_even(densities, by_kind["pairs"], by_kind["pairs, whole"])}
    return {"plain_s": plain_s, "s": by_kind, "break_even": meet}


def rows_of(nbytes: int, found: dict[str, Any]) -> Iterator[str]:
    plain_s = found["plain_s"]
    for kind, times_s in found["s"].items():
        gains = " | ".join(f"{plain_s / time_s:.2f}x" for time_s in times_s)
        meet = f"{found['break_even'][kind]:.2f}" if kind in found["break_even"] else ""
        yield f"| {kind} | {nbytes} | {plain_s * 1e3:.3f} | {gains} | {meet} |"


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="1M,16M")
    parser.add_argument("--densities", type=comma_separated(float), default="0.01,0.05,0.1,0.2,0.4,0.6,0.8,1")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-s", type=float, default=0.1, help="how long one way is timed (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with shmring.init() as comm:
        if comm.num_nodes == 1:  # stand-ins for hosts would all begin with the first CPU
            pin(comm)
        found = {nbytes: measure(comm, nbytes, options) for nbytes in options.sizes}
        if comm.rank != 0:
            return
        print(f"{state_of(comm)}; times as fast as {PLAIN}, by density\n")
        print(f"| | bytes | {PLAIN} ms | {' | '.join(map(str, options.densities))} | break-even |")
        print("|---" * (4 + len(options.densities)) + "|")
        print(*(row for nbytes in found for row in rows_of(nbytes, found[nbytes])), sep="\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"state": state_of(comm), "found": found}))


if __name__ == "__main__":
    main()
