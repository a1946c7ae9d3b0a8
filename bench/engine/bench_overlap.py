"""Compute and all-reduce together beside one after the other, in turn: python bench/engine/bench_overlap.py

A step is a few layers. Each layer computes for a while and then has a gradient to reduce. "after" reduces
each gradient when its layer is done. "together" reduces it in the background and waits at the end of the
step, as training does. Either all ranks compute equally long ("even"), or one rank, a different one each
time, computes longer than the others ("uneven", as cache misses, garbage collection or another process cause
it). If each rank has only one CPU, copying and adding take CPU time from computing, so overlap can save only
the waiting. Quote only the ratio: a median over rounds of the slowest rank's time.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shmring

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size

LAYERS = 8


def compute(seconds: float, a: np.ndarray, b: np.ndarray) -> None:
    """Compute without the GIL, as NumPy and torch do."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        np.matmul(a, b)


def seconds_of(comm: shmring.Comm, step: Callable[[int], None], steps: int) -> float:
    """Return the seconds of one step on the slowest rank."""
    comm.barrier()
    begin = time.perf_counter()
    for turn in range(steps):
        step(turn)
    took = np.array([(time.perf_counter() - begin) / steps])
    comm.all_reduce(took, "max")
    return float(took[0])


def measure(comm: shmring.Comm, nbytes: int, rounds: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if comm.size <= len(cpus):
        os.sched_setaffinity(0, {cpus[comm.rank]})
    gradients = [np.ones(nbytes // 4, "f4") for _ in range(LAYERS)]
    a, b = np.ones((64, 64)), np.ones((64, 64))
    layer_s = seconds_of(comm, lambda _: comm.all_reduce(gradients[0]), 10)  # as long as a reduction

    def duration(turn: int, uneven: bool) -> float:
        if not uneven:
            return layer_s
        return layer_s * (2.5 if turn % comm.size == comm.rank else 0.5)

    def after(turn: int, uneven: bool) -> None:
        for layer, gradient in enumerate(gradients):
            compute(duration(turn + layer, uneven), a, b)
            comm.all_reduce(gradient, "max")

    def together(turn: int, uneven: bool) -> None:
        works = []
        for layer, gradient in enumerate(gradients):
            compute(duration(turn + layer, uneven), a, b)
            works.append(comm.all_reduce(gradient, "max", async_op=True))
        for work in works:
            work.wait()

    for uneven in (False, True):
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for step, found in zip((after, together), times, strict=True):
                found.append(seconds_of(comm, functools.partial(step, uneven=uneven), 3) * 1e6)
        one_after_the_other, at_once = map(statistics.median, times)
        if comm.rank == 0:
            state = comm.stats()
            print(f"{comm.size} ranks, {LAYERS} gradients of {nbytes} B, {'uneven' if uneven else 'even':6}: "
                  f"after {one_after_the_other:9.1f} us, together {at_once:9.1f} us, "
                  f"{one_after_the_other / at_once:5.2f}x; computing alone {LAYERS * layer_s * 1e6:9.1f} us; "
                  f"{state['distance']}, round trip {state['round_trip_ns']} ns", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=comma_separated(int), default="2")
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="64K,1M,16M")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    for ranks in options.ranks:
        for nbytes in options.sizes:
            shmring.spawn(measure, ranks, (nbytes, options.rounds))


if __name__ == "__main__":
    main()
