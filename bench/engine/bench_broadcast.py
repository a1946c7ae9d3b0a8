"""shmring.Broadcast beside Ring and multiprocessing's Queue: python bench/engine/bench_broadcast.py --help

Prints two tables. Rate: one process sends arrays as fast as it can, and every reader takes all of them; the
table has µs for each message and reader, beside a Ring to one reader, a Queue for each reader, and processes
that only copy (the copy limit). Wait: a message now and then, and none; the time from put to the return of
get, and the CPU time of a reader. The ways run in turn, so compare only the ratios of one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.progress import Progress
from bench.engine.broadcast_libraries import LIBRARIES
from bench.engine.broadcast_ways import FORK, Broadcast, Copies, Queue, Ring, Way

SECONDS_A_SAMPLE = 0.2
LEAST_MESSAGES = 20


def rates(sizes: list[int], readers: list[int], beside: list[type[Way]], rounds: int) -> None:
    kinds = [Broadcast, Ring, Queue, Copies, *beside]
    print(f"{'bytes':>9} {'readers':>8}" + "".join(f"{kind.__name__ + ' µs':>14}" for kind in kinds)
          + f"{'/ Ring':>8}{'copies /':>10}"
          + "".join(f"{kind.__name__ + ' /':>13}" for kind in (Queue, *beside)))
    with Progress("broadcast") as progress:
        progress.total(len(sizes) * len(readers))
        for nbytes in sizes:
            for count in readers:
                medians = in_child(cell, kinds, nbytes, count, rounds)
                progress.advance(1, -1.0)
                ours, ring, queue, copies, *others = medians
                print(f"{nbytes:>9} {count:>8}" + "".join(f"{median:>14.2f}" for median in medians)
                      + f"{ours / ring:>8.2f}{copies / ours:>10.2f}"
                      + "".join(f"{other / ours:>13.1f}" for other in (queue, *others)))


def cell(kinds: list[type[Way]], nbytes: int, nreaders: int, rounds: int) -> list[float]:
    """Return µs for each message and reader, by way."""
    ways = [kind(1 if kind is Ring else nreaders, nbytes) for kind in kinds]
    messages = [enough(way) for way in ways]
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for i, way in enumerate(ways):
            found[i].append(way.seconds(messages[i]) / messages[i] / way.nreaders * 1e6)
    for way in ways:
        way.close()
    return list(map(statistics.median, found))


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a process of its own: some libraries do not survive that their process forks again."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=lambda: theirs.send(function(*arguments)))
    child.start()
    theirs.close()
    found = ours.recv()
    child.join()
    return found


def enough(way: Way) -> int:
    count = LEAST_MESSAGES
    while (took := way.seconds(count)) < SECONDS_A_SAMPLE / 4:
        count *= 4
    return max(LEAST_MESSAGES, int(count * SECONDS_A_SAMPLE / took))


def waits(readers: list[int], beside: list[type[Way]], rate: int, seconds: float, idle_s: float) -> None:
    print(f"\n{'':>12}{'readers':>8}{'median µs':>11}{'99 % µs':>9}{'CPU %':>7}{'idle ms':>9}"
          f"   at {rate} messages/s; idle: CPU of {idle_s:g} s")
    ways = [(Broadcast, count) for count in readers] + [(kind, 1) for kind in (Ring, Queue, *beside)]
    for kind, nreaders in ways:
        late, share, idle = in_child(wait_in, kind, nreaders, int(rate * seconds), rate, idle_s)
        print(f"{kind.__name__:>12}{nreaders:>8}{statistics.median(late):>11.0f}"
              f"{late[int(len(late) * 0.99)]:>9.0f}{share:>7.2f}{idle:>9.2f}")


def wait_in(
    kind: type[Way], nreaders: int, count: int, rate: int, idle_s: float
) -> tuple[list[float], float, float]:
    """Return the sorted times of messages in µs, and a reader's CPU: percent with messages, ms without."""
    way = kind(nreaders, 64)
    way.seconds(100)
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
    return late, share, idle


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
    parser.add_argument("--beside", type=comma_separated(str), default=[],
                        help=f"other libraries: {', '.join(LIBRARIES)}")
    options = parser.parse_args()
    if unknown := set(options.beside) - LIBRARIES.keys():
        parser.error(f"--beside {', '.join(sorted(unknown))}: choose of {', '.join(LIBRARIES)}")
    beside = [LIBRARIES[name] for name in options.beside]
    if options.only != "wait":
        rates(options.sizes, options.readers, beside, options.rounds)
    if options.only != "rate":
        waits(options.readers, beside, options.rate, options.seconds, options.idle)


if __name__ == "__main__":
    main()
