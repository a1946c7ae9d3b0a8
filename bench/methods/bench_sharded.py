"""A step of a sharded optimiser beside plain data parallel, in turn, and what each keeps on a rank.

    shmrun -n 2 bench/methods/bench_sharded.py --sizes 1M,16M,64M
    python bench/internode/on_hosts.py --hosts 2 -n 1 --rate-gbit 1 bench/methods/bench_sharded.py --sizes 16M

A step is what comes after the backward pass, with Adam on float32: plain all-reduces the gradient in shared
memory and updates all weights on every rank; stages 1 and 2 are shmring.methods.sharded. Knows turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import shmring
from shmring.methods.rules import apply, scratch_for
from shmring.methods.sharded import Adam, ShardedOptimizer

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import in_turn, pin, state_of

LAYERS = 16
MIB = 1 << 20

Way = tuple[Callable[[], None], int, int]   # a step; bytes of state and of gradients on a rank


def plain(comm: shmring.Comm, count: int) -> Way:
    weights, gradient = np.zeros(count, "f4"), comm.full(count, 1, "f4")
    state, scratch, rule = [np.zeros(count, "f4") for _ in range(2)], scratch_for(weights.dtype), Adam()

    def step() -> None:
        comm.all_reduce(gradient, "avg")
        apply(rule, weights, gradient, state, scratch, 1)

    return step, sum(each.nbytes for each in state), gradient.nbytes


def sharded(comm: shmring.Comm, count: int, stage: int, bucket_nbytes: int) -> Way:
    layer = np.ones(count // LAYERS, "f4")   # as a backward pass would hand it over, one after the other
    optimizer = ShardedOptimizer(comm, [layer] * LAYERS, Adam(), stage=stage, bucket_nbytes=bucket_nbytes)
    for view in optimizer.gradients or []:
        view[...] = layer

    def step() -> None:
        for gradient in reversed(optimizer.gradients or [layer] * LAYERS):
            optimizer.add(gradient)
        optimizer.step()

    return step, optimizer.state_nbytes, optimizer.gradient_nbytes


def measure(comm: shmring.Comm, nbytes: int, bucket_nbytes: int, rounds: int) -> Iterator[dict[str, object]]:
    count = nbytes // 4 // LAYERS * LAYERS
    ways = {"plain": plain(comm, count)}
    ways |= {f"stage {stage}": sharded(comm, count, stage, bucket_nbytes) for stage in (1, 2)}
    times = in_turn(comm, {name: step for name, (step, _, _) in ways.items()}, rounds)
    for name, (_, state, gradient) in ways.items():
        yield {"nbytes": nbytes, "way": name, "step_ms": times[name] * 1e3,
               "to_plain": times[name] / times["plain"], "state_nbytes": state, "gradient_nbytes": gradient}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="1M,16M,64M",
                        help="of the weights, bytes (%(default)s)")
    parser.add_argument("--bucket", type=parse_size, default="1M", help="of stage 2, bytes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="the same figures, for programs")
    options = parser.parse_args()
    with shmring.init() as comm:
        pin(comm)
        rows = [row for nbytes in options.sizes
                for row in measure(comm, nbytes, options.bucket, options.rounds)]
        state = state_of(comm)
        rank = comm.rank
    if rank == 0:
        print(f"{state}\n\n| weights | way | a step | / plain | state of a rank | gradients of a rank |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            print(f"| {row['nbytes'] / MIB:.4g} MiB | {row['way']} | {row['step_ms']:.2f} ms "
                  f"| {row['to_plain']:.2f} | {row['state_nbytes'] / MIB:.4g} MiB "
                  f"| {row['gradient_nbytes'] / MIB:.4g} MiB |")
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"state": state, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
