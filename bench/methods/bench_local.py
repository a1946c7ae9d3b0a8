"""Time of a sample by how often ranks synchronise: each micro-batch, every 4, 8, 16, local SGD every 2, 4.

    shmrun -n 2 bench/methods/bench_local.py --sizes 64K,1M,16M
    python bench/internode/on_hosts.py --hosts 2 -n 1 --rate-gbit 1 bench/methods/bench_local.py --sizes 1M

A micro-batch is a forward and a backward pass through one square matrix of float32, of as many bytes as said,
and a step of SGD where there is one. A figure is the time of 16 micro-batches. Knows turns.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import shmring
from shmring.methods.local import GradientAccumulation, LocalSGD

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import in_turn, pin, state_of

CYCLE = 16   # micro-batches
ACCUMULATE, LOCAL = (1, 4, 8, 16), (2, 4)
LR = np.float32(1e-6)


class Layer:
    """x @ weights, and the gradient of the mean square of the output."""

    def __init__(self, width: int, rows: int) -> None:
        self.x = np.ones((rows, width), "f4")
        self.gradient = np.empty((width, width), "f4")
        self.y, self.step = np.empty_like(self.x), np.empty_like(self.gradient)

    def passes(self, weights: np.ndarray) -> None:
        np.matmul(self.x, weights, out=self.y)
        np.matmul(self.x.T, self.y, out=self.gradient)

    def learn(self, weights: np.ndarray, gradient: np.ndarray) -> None:
        np.multiply(gradient, LR, out=self.step)
        np.subtract(weights, self.step, out=weights)


def accumulate(comm: shmring.Comm, layer: Layer, every: int) -> Callable[[], None]:
    accumulation = GradientAccumulation(comm, [layer.gradient], every)
    weights = np.zeros_like(layer.gradient)

    def cycle() -> None:
        for _ in range(CYCLE):
            layer.passes(weights)
            if accumulation.add([layer.gradient]):
                layer.learn(weights, accumulation.gradients[0])

    return cycle


def learn_locally(comm: shmring.Comm, layer: Layer, every: int) -> Callable[[], None]:
    local = LocalSGD(comm, [np.zeros_like(layer.gradient)], every)
    (weights,) = local.params

    def cycle() -> None:
        for _ in range(CYCLE):
            layer.passes(weights)
            layer.learn(weights, layer.gradient)
            local.step()

    return cycle


def measure(comm: shmring.Comm, nbytes: int, rows: int, rounds: int) -> Iterator[dict[str, object]]:
    layer = Layer(math.isqrt(nbytes // 4), rows)
    every = {f"every {k}" if k > 1 else "each": k for k in ACCUMULATE}
    every |= {f"local SGD {k}": k for k in LOCAL}
    ways = {name: (learn_locally if name.startswith("local") else accumulate)(comm, layer, k)
            for name, k in every.items()}
    times = in_turn(comm, ways, rounds)
    for name, time_s in times.items():
        yield {"nbytes": layer.gradient.nbytes, "way": name, "synchronisations": CYCLE // every[name],
               "us_a_sample": time_s / (CYCLE * rows * comm.size) * 1e6, "to_each": time_s / times["each"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="64K,1M,16M",
                        help="of the weights, bytes (%(default)s)")
    parser.add_argument("--rows", type=int, default=32, help="samples in a rank's micro-batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="the same figures, for programs")
    options = parser.parse_args()
    with shmring.init() as comm:
        pin(comm)
        rows = [row for nbytes in options.sizes
                for row in measure(comm, nbytes, options.rows, options.rounds)]
        state = state_of(comm)
        rank = comm.rank
    if rank == 0:
        print(f"{state}\n\n| weights | reduced | synchronisations in {CYCLE} | µs a sample | / each |")
        print("|---|---|---|---|---|")
        for row in rows:
            print(f"| {row['nbytes'] / 1024:,.0f} KiB | {row['way']} | {row['synchronisations']} "
                  f"| {row['us_a_sample']:.2f} | {row['to_each']:.2f} |")
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"state": state, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
