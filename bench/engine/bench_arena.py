"""all_reduce of `a * b`: in an arena, into an array of `comm.empty`, and in ordinary memory.

    python bench/engine/bench_arena.py [--ranks 2] [--sizes 64K,1M,16M,64M] [--rounds 30]

The three are timed in turn, each after each other one, from the multiplication to the sum. The figures are
medians in microseconds. The last line is the time of an empty `with` statement.
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import shmring

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import parse_size


def measure(comm, nbytes, rounds):
    count = nbytes // 8
    a, b, shared = np.ones(count), np.full(count, 2.0), comm.empty(count)
    arena = comm.arena(2 * nbytes, smallest_nbytes=min(nbytes, 1 << 16))

    def in_arena():
        with arena:
            product = a * b
        comm.all_reduce(product)

    def in_shared_array():
        np.multiply(a, b, out=shared)
        comm.all_reduce(shared)

    def in_ordinary_memory():
        product = a * b
        comm.all_reduce(product)

    taken = {way: [] for way in (in_arena, in_shared_array, in_ordinary_memory)}
    orders = list(itertools.permutations(taken))  # what a way finds in the caches depends on the way before
    for number in range(rounds + 2):
        for way in orders[number % len(orders)]:
            comm.barrier()
            begin = time.perf_counter()
            way()
            taken[way].append(time.perf_counter() - begin)
    return [statistics.median(times[2:]) * 1e6 for times in taken.values()]


def enter_and_leave(comm, rounds):
    arena, times = comm.arena(1 << 20), []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(1000):
            with arena:
                pass
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def run(comm, sizes, rounds):
    return [measure(comm, nbytes, rounds) for nbytes in sizes], enter_and_leave(comm, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="64K,1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    sizes = chosen.sizes.split(",")
    numbers = [parse_size(size) for size in sizes]
    rows, entering = shmring.spawn(run, chosen.ranks, args=(numbers, chosen.rounds))[0]
    print(f"{'bytes':>6} {'arena':>9} {'empty':>9} {'ordinary':>9} {'/ empty':>9} {'/ ordinary':>11}")
    for size, (arena, shared, ordinary) in zip(sizes, rows, strict=True):
        ratios = f"{arena / shared:9.2f} {arena / ordinary:11.2f}"
        print(f"{size:>6} {arena:9.0f} {shared:9.0f} {ordinary:9.0f} {ratios}")
    print(f"entering and leaving: {entering:.2f} us")


if __name__ == "__main__":
    main()
