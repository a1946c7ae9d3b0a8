"""Gain and cost of a priority: a program of ranks, `shmrun -n 2 bench/engine/bench_priority.py`.

An *iteration* is a forward pass and a backward pass. The forward pass waits, layer by layer, for the
gradients of the previous iteration. The backward pass starts their reductions in the background, last layer
first. "as they come" gives no priority; "by priority" gives an earlier layer a greater one; "after all" waits
for everything before the forward pass begins. An *urgent* call of 8 bytes is made right after a large one.
*Alone* means that nothing else is in progress: it shows the cost of the ranks' agreement on the next call,
and of running the large call in parts. Figures are medians over rounds of the slowest rank's time; quote only
ratios. Uses shmring's public API and turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")   # read when numpy loads: the ranks are the parallelism

import numpy as np

import shmring

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import in_turn, pin, seconds, state_of

WAYS = "after all", "as they come", "by priority"
BLOCK = 64   # of the matrices that are multiplied to compute


class Network:
    """Layers that compute for a while, and whose gradients have given sizes."""

    def __init__(self, comm: shmring.Comm, sizes: list[int], compute_ms: float) -> None:
        self.comm = comm
        self.gradients = [np.zeros(nbytes // 4, "f4") for nbytes in sizes]
        self.works: list[shmring.Work[None] | None] = [None] * len(sizes)
        self.compute_s = compute_ms * 1e-3
        self.block = np.ones((BLOCK, BLOCK), "f4")

    def compute(self, times: int) -> None:
        """Compute without the GIL for a given wall time, whatever else runs at the same time."""
        until = time.perf_counter() + times * self.compute_s
        while time.perf_counter() < until:
            np.matmul(self.block, self.block)

    def wait(self, layer: int) -> None:
        work, self.works[layer] = self.works[layer], None
        if work is not None:
            work.wait()

    def iteration(self, priority_of: Callable[[int], int | None], after_all: bool) -> None:
        """Run one iteration. Backward takes twice as long as forward, as in training."""
        layers = range(len(self.gradients))
        for layer in layers if after_all else ():
            self.wait(layer)
        for layer in layers:
            self.wait(layer)
            self.compute(1)
        for layer in reversed(layers):
            self.compute(2)
            self.works[layer] = self.comm.all_reduce(self.gradients[layer], "max", async_op=True,
                                                     priority=priority_of(layer))

    def finish(self) -> None:
        for layer in range(len(self.works)):
            self.wait(layer)


def time_iterations(comm: shmring.Comm, options: argparse.Namespace) -> dict[str, float]:
    """Time iterations. Each sample ends with everything reduced, so no way leaves work to the next."""
    network = Network(comm, options.layers, options.compute_ms)

    def several(priority_of: Callable[[int], int | None], after_all: bool) -> Callable[[], None]:
        def run() -> None:
            for _ in range(options.iterations):
                network.iteration(priority_of, after_all)
            network.finish()
        return run

    ways = {"after all": several(lambda _: None, True), "as they come": several(lambda _: None, False),
            "by priority": several(lambda layer: -layer, False)}
    return {name: took / options.iterations for name, took in in_turn(comm, ways, options.rounds).items()}


def time_urgent(comm: shmring.Comm, options: argparse.Namespace) -> dict[str, float]:
    """Time the urgent call to its end. Whatever follows in `seconds` also waits for the large call."""
    large, urgent = np.zeros(options.behind // 4, "f4"), np.zeros(1)

    def overtake(low: int | None, high: int | None) -> None:
        comm.all_reduce(large, "max", async_op=True, priority=low)
        comm.all_reduce(urgent, "max", priority=high)

    found: dict[str, list[float]] = {"as they come": [], "by priority": []}
    for _ in range(options.rounds):
        found["as they come"].append(seconds(comm, lambda: overtake(None, None), 1))
        found["by priority"].append(seconds(comm, lambda: overtake(0, 1), 1))
    return {name: statistics.median(times) for name, times in found.items()}


def time_alone(comm: shmring.Comm, nbytes: int, options: argparse.Namespace) -> dict[str, float]:
    x = np.zeros(nbytes // 4, "f4")
    return in_turn(comm, {
        "as they come": lambda: comm.all_reduce(x, "max", async_op=True).wait(),
        "by priority": lambda: comm.all_reduce(x, "max", async_op=True, priority=0).wait(),
    }, options.rounds)


def parse_arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--layers", type=comma_separated(parse_size), default="256K,512K,1M,2M,4M,4M,8M,16M",
        help="bytes of each layer's gradient, the first layer's first (%(default)s)")
    add("--compute-ms", type=float, default=2.0,
        help="of a layer's forward pass; backward twice that (%(default)s)")
    add("--behind", type=parse_size, default="64M", help="bytes of what is overtaken (%(default)s)")
    add("--iterations", type=int, default=4, help="in a sample (%(default)s)")
    add("--rounds", type=int, default=11)
    add("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    with shmring.init() as comm:
        pin(comm)
        found = {
            "an iteration": time_iterations(comm, options),
            "an urgent call behind a large one": time_urgent(comm, options),
            "8 bytes alone": time_alone(comm, 8, options),
            "the large one alone": time_alone(comm, options.behind, options),
        }
        where, rank = state_of(comm), comm.rank
    if rank != 0:
        return
    print(f"{where}; {len(options.layers)} gradients of {sum(options.layers) / 2**20:.1f} MiB, "
          f"{options.compute_ms:g} ms of computing a layer; the large one {options.behind / 2**20:g} MiB\n")
    print("| what | after all | as they come | by priority | as they come / by priority |")
    print("|---|---|---|---|---|")
    for what, took in found.items():
        cells = [f"{took[way] * 1e6:,.1f} us" if way in took else "" for way in WAYS]
        print(f"| {what} | {' | '.join(cells)} | {took['as they come'] / took['by priority']:.2f} |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"where": where, "seconds": found}, file)


if __name__ == "__main__":
    main()
