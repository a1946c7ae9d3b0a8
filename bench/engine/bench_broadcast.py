"""shmring.Broadcast beside Ring and multiprocessing's Queue: python bench/engine/bench_broadcast.py --help

Prints two tables. Rate: one process sends arrays as fast as it can, and every reader takes all of them; the
table has µs for each message and reader, beside a Ring to one reader, a Queue for each reader, and processes
that only copy (the copy limit). Wait: a message now and then, and none; the time from put to the return of
get, and the CPU time of a reader. The ways run in turn, so compare only the ratios of one run.
"""

from __future__ import annotations

import argparse
import mmap
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

FORK = multiprocessing.get_context("fork")
SECONDS_A_SAMPLE = 0.2
LEAST_MESSAGES = 20
PATIENCE_S = 60


class Way:
    """One way to send from this process to `nreaders` children. """

    def __init__(self, nreaders: int, nbytes: int) -> None:
        self.nreaders, self.x = nreaders, np.zeros(nbytes, "u1")
        self.open()
        self.pipes, self.children = [], []
        for reader in range(nreaders):
            ours, theirs = FORK.Pipe()
            child = FORK.Process(target=self.obey, args=(reader, theirs))
            child.start()
            self.pipes.append(ours)
            self.children.append(child)

    def open(self) -> None:
        """Make what the processes send through, before they start."""

    def put(self, x: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        raise NotImplementedError

    def obey(self, reader: int, pipe: Any) -> None:
        get = self.getter(reader)
        while order := pipe.recv():
            pipe.send(getattr(self, order[0])(get, *order[1:]))

    def take(self, get: Callable[[], np.ndarray[Any, Any]], count: int) -> int:
        for _ in range(count):
            x = get()
        return int(x[-1])

    def note(self, get: Callable[[], np.ndarray[Any, Any]], count: int) -> tuple[list[int], float]:
        """Return how many ns each of the messages was under way, and the CPU seconds spent."""
        begin = time.process_time()
        found = [-int(get()[:8].view("i8")[0]) + time.perf_counter_ns() for _ in range(count)]
        return found, time.process_time() - begin

    def wait(self, get: Callable[[], np.ndarray[Any, Any]]) -> float:
        """Return the CPU seconds until the one message comes."""
        begin = time.process_time()
        get()
        return time.process_time() - begin

    def order(self, *order: Any) -> None:
        for pipe in self.pipes:
            pipe.send(order)

    def answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self.pipes]

    def seconds(self, count: int) -> float:
        """Return the seconds until all children have taken all items."""
        self.order("take", count)
        begin = time.perf_counter()
        for number in range(count):
            self.x[-1] = number % 100
            self.put(self.x)
        last = self.answers()
        took = time.perf_counter() - begin
        if set(last) != {(count - 1) % 100}:
            raise RuntimeError(f"the last arrays hold {last}")
        return took

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for child in self.children:
            child.join()


class Broadcast(Way):
    def open(self) -> None:
        self.ring = shmring.Broadcast(readers=self.nreaders)

    def put(self, x: np.ndarray[Any, Any]) -> None:
        self.ring.put(x, PATIENCE_S)

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        return self.ring.get

    def close(self) -> None:
        super().close()
        self.ring.close()


class Ring(Way):
    """One ring for each reader; the table has it with one reader only."""

    def open(self) -> None:
        self.rings = [shmring.Ring() for _ in range(self.nreaders)]

    def put(self, x: np.ndarray[Any, Any]) -> None:
        for ring in self.rings:
            ring.put(x, PATIENCE_S)

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        return self.rings[reader].get

    def close(self) -> None:
        super().close()
        for ring in self.rings:
            ring.close()


class Queue(Way):
    def open(self) -> None:
        self.queues = [FORK.Queue() for _ in range(self.nreaders)]

    def put(self, x: np.ndarray[Any, Any]) -> None:
        for queue in self.queues:
            queue.put(x)

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        return self.queues[reader].get


class Copies(Way):
    """Nothing is sent: this process copies into shared memory, and each child out of it into a new array."""

    def open(self) -> None:
        self.shared = np.frombuffer(mmap.mmap(-1, 4 << 20), "u1")
        self.at = 0

    def slot(self) -> np.ndarray[Any, Any]:
        nbytes = len(self.x)
        self.at = (self.at + nbytes) % (len(self.shared) - nbytes + 1) if nbytes < len(self.shared) else 0
        return self.shared[self.at : self.at + nbytes]

    def put(self, x: np.ndarray[Any, Any]) -> None:
        self.slot()[:] = x

    def getter(self, reader: int) -> Callable[[], np.ndarray[Any, Any]]:
        return lambda: self.slot().copy()

    def take(self, get: Callable[[], np.ndarray[Any, Any]], count: int) -> int:
        super().take(get, count)
        return (count - 1) % 100


def rates(sizes: list[int], readers: list[int], rounds: int) -> None:
    print(f"{'bytes':>9} {'readers':>8}{'Broadcast µs':>14}{'Ring µs':>10}{'Queue µs':>10}{'copies µs':>11}"
          f"{'/ Ring':>8}{'Queue /':>9}{'copies /':>10}")
    with Progress("broadcast") as progress:
        progress.total(len(sizes) * len(readers) * rounds * 4)
        for nbytes in sizes:
            for count in readers:
                kinds = ((Broadcast, count), (Ring, 1), (Queue, count), (Copies, count))
                ways = [kind(nreaders, nbytes) for kind, nreaders in kinds]
                messages = [enough(way) for way in ways]
                found: list[list[float]] = [[] for _ in ways]
                for _ in range(rounds):
                    for i, way in enumerate(ways):
                        took = way.seconds(messages[i])
                        found[i].append(took / messages[i] / way.nreaders * 1e6)
                        progress.advance(1, -1.0)
                for way in ways:
                    way.close()
                ours, ring, queue, copies = map(statistics.median, found)
                print(f"{nbytes:>9} {count:>8}{ours:>14.2f}{ring:>10.2f}{queue:>10.1f}{copies:>11.2f}"
                      f"{ours / ring:>8.2f}{queue / ours:>9.1f}{copies / ours:>10.2f}")


def enough(way: Way) -> int:
    count = LEAST_MESSAGES
    while (took := way.seconds(count)) < SECONDS_A_SAMPLE / 4:
        count *= 4
    return max(LEAST_MESSAGES, int(count * SECONDS_A_SAMPLE / took))


def waits(readers: list[int], rate: int, seconds: float, idle_s: float) -> None:
    print(f"\n{'':>12}{'readers':>8}{'median µs':>11}{'99 % µs':>9}{'CPU %':>7}{'idle ms':>9}"
          f"   at {rate} messages/s; idle: CPU of {idle_s:g} s")
    ways = [(Broadcast, count) for count in readers] + [(Ring, 1), (Queue, 1)]
    for kind, nreaders in ways:
        way = kind(nreaders, 64)
        way.seconds(100)
        count = int(rate * seconds)
        way.order("note", count)
        begin = time.perf_counter()
        for number in range(count):
            time.sleep(max(0, begin + (number + 1) / rate - time.perf_counter()))
            way.x[:8].view("i8")[0] = time.perf_counter_ns()
            way.put(way.x)
        noted = way.answers()
        took = time.perf_counter() - begin
        late = sorted(ns / 1e3 for found, _ in noted for ns in found)
        share = max(cpu for _, cpu in noted) / took * 100
        way.order("wait")
        time.sleep(idle_s)
        way.put(way.x)
        idle = max(way.answers()) * 1e3
        way.close()
        print(f"{kind.__name__:>12}{nreaders:>8}{statistics.median(late):>11.0f}"
              f"{late[int(len(late) * 0.99)]:>9.0f}{share:>7.2f}{idle:>9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=comma_separated(parse_size), default=[64, 4096, 65536, 1 << 20],
                        help="bytes of an array; default 64,4K,64K,1M")
    parser.add_argument("--readers", type=comma_separated(int), default=[1, 2, 4], help="default 1,2,4")
    parser.add_argument("--rounds", type=int, default=5, help="rounds behind every median (%(default)s)")
    parser.add_argument("--rate", type=int, default=100, help="messages a second, second table (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="... for so long (%(default)s)")
    parser.add_argument("--idle", type=float, default=5, help="seconds without a message (%(default)s)")
    parser.add_argument("--only", choices=["rate", "wait"], help="print only this table")
    options = parser.parse_args()
    if options.only != "wait":
        rates(options.sizes, options.readers, options.rounds)
    if options.only != "rate":
        waits(options.readers, options.rate, options.seconds, options.idle)


if __name__ == "__main__":
    main()
