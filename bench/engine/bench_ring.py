"""shmring.Ring beside multiprocessing's Queue and Pipe: python bench/engine/bench_ring.py --help

One process sends arrays as fast as it can, another takes them. The three run in turn, round by round, so
compare only the ratios of one run. Contains the command line, the two loops and the table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shmring

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.progress import Progress

SECONDS_A_SAMPLE = 0.15
LEAST_MESSAGES = 50


def make_ring(context: Any) -> tuple[Any, str, Any, str]:
    ring = shmring.Ring()
    return ring, "put", ring, "get"


def make_queue(context: Any) -> tuple[Any, str, Any, str]:
    queue = context.Queue()
    return queue, "put", queue, "get"


def make_pipe(context: Any) -> tuple[Any, str, Any, str]:
    taking, giving = context.Pipe(duplex=False)
    return giving, "send", taking, "recv"


WAYS: dict[str, Callable[[Any], tuple[Any, str, Any, str]]] = {
    "Ring": make_ring, "Queue": make_queue, "Pipe": make_pipe,
}


def take(taker: Any, verb: str, orders: Any) -> None:
    """Run the child: take as many items as each order says, report it, and end at order 0."""
    get = getattr(taker, verb)
    while count := orders.recv():
        for _ in range(count):
            x = get()
        orders.send(int(x[-1]))


class Way:
    """One way to send from this process to a child that takes everything."""

    def __init__(self, name: str, method: str) -> None:
        context = multiprocessing.get_context(method)
        giver, give, taker, verb = WAYS[name](context)
        self.giver, self.put = giver, getattr(giver, give)
        self.orders, theirs = context.Pipe()
        self.child = context.Process(target=take, args=(taker, verb, theirs))
        self.child.start()

    def seconds(self, x: np.ndarray[Any, Any], count: int) -> float:
        """Return the seconds until the child has taken all items."""
        self.orders.send(count)
        begin = time.perf_counter()
        for number in range(count):
            x[-1] = number % 100
            self.put(x)
        last = self.orders.recv()
        took = time.perf_counter() - begin
        if last != (count - 1) % 100:
            raise RuntimeError(f"the last array holds {last}")
        return took

    def close(self) -> None:
        self.orders.send(0)
        self.child.join()
        self.giver.close()


def enough(way: Way, x: np.ndarray[Any, Any]) -> int:
    count = LEAST_MESSAGES
    while (took := way.seconds(x, count)) < SECONDS_A_SAMPLE / 4:
        count *= 4
    return max(LEAST_MESSAGES, int(count * SECONDS_A_SAMPLE / took))


def measure(sizes: list[int], rounds: int, method: str) -> dict[int, dict[str, list[float]]]:
    """Return µs per message, by size and way."""
    ways = {name: Way(name, method) for name in WAYS}
    found: dict[int, dict[str, list[float]]] = {}
    with Progress("ring") as progress:
        progress.total(len(sizes) * rounds * len(ways))
        for nbytes in sizes:
            x = np.zeros(nbytes, "u1")
            counts = {name: enough(way, x) for name, way in ways.items()}
            found[nbytes] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    found[nbytes][name].append(way.seconds(x, counts[name]) / counts[name] * 1e6)
                    progress.advance(1, -1.0)
    for way in ways.values():
        way.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=comma_separated(parse_size), default=[64, 4096, 65536, 1 << 20],
                        help="bytes of an array; default 64,4K,64K,1M")
    parser.add_argument("--rounds", type=int, default=5, help="rounds behind every median (%(default)s)")
    parser.add_argument("--method", choices=["fork", "spawn", "forkserver"], default="fork")
    options = parser.parse_args()
    columns = [*(f"{name} µs" for name in WAYS), "Queue/Ring", "Pipe/Ring"]
    print(f"{'bytes':>9} " + "".join(f"{column:>12}" for column in columns))
    for nbytes, by_way in measure(options.sizes, options.rounds, options.method).items():
        medians = {name: statistics.median(samples) for name, samples in by_way.items()}
        ratios = [medians[name] / medians["Ring"] for name in ("Queue", "Pipe")]
        print(f"{nbytes:>9} " + "".join(f"{medians[name]:>12.2f}" for name in WAYS)
              + "".join(f"{ratio:>12.1f}" for ratio in ratios))


if __name__ == "__main__":
    main()
