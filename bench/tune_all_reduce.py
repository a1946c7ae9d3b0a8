"""Times all_reduce under other values of the tuning table: how the figures in shmring/tuning.py were found.

    python bench/tune_all_reduce.py -n 2 --sizes 64K,1M chunk_nbytes=131072 small_nbytes=4096

Each rank is pinned to a CPU. A window is some hundred microseconds of calls; the 10th percentile of the
windows is what a quiet moment gives. Compare values in turn, and look at the round trip: cores move.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np
from arguments import comma_separated, parse_size

import shmring
from shmring import tuning

WINDOW_S = 0.0005


def windows_us(comm: shmring.Comm, call: Any, seconds: float) -> list[float]:
    """Microseconds per call of each window, sorted; every rank times the same windows."""
    begin = time.perf_counter()
    for _ in range(3):
        call()
    loops = np.array([max(1, int(3 * WINDOW_S / (time.perf_counter() - begin)))])
    comm.broadcast(loops)
    found, more, end = [], np.ones(1, "i4"), time.perf_counter() + seconds
    while True:
        more[0] = time.perf_counter() < end
        comm.broadcast(more)
        if not more[0]:
            return sorted(found)
        begin = time.perf_counter()
        for _ in range(loops[0]):
            call()
        found.append((time.perf_counter() - begin) / loops[0] * 1e6)


def measure(comm: shmring.Comm, nbytes: list[int], seconds: float) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank % len(os.sched_getaffinity(0))]})
    for size in nbytes:
        x = np.ones(max(1, size // 4), "f4")
        shared = comm.copy_of(x)
        plans = {
            "private": comm.plan("all_reduce", x, out=np.empty_like(x)),
            "zero-copy": comm.plan("all_reduce", shared, out=comm.empty(x.shape, "f4")),
        }
        for name, plan in plans.items():
            found = windows_us(comm, plan, seconds)
            if comm.rank == 0:
                tenth, median = found[len(found) // 10], found[len(found) // 2]
                state = comm.stats()
                print(
                    f"{size:>9} B  {name:9}  p10 {tenth:10.3f}  median {median:10.3f} us  "
                    f"{state['distance']}, round trip {state['round_trip_ns']} ns",
                    flush=True,
                )


def main() -> None:
    sizes = comma_separated(parse_size)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--sizes", type=sizes, default="8,4K,64K,1M,64M")
    parser.add_argument("--seconds", type=float, default=0.2, help="per size and kind of array")
    parser.add_argument("values", nargs="*", metavar="NAME=NUMBER", help=f"of {', '.join(tuning.DEFAULTS)}")
    options = parser.parse_args()
    for value in options.values:
        name, _, number = value.partition("=")
        if name not in tuning.DEFAULTS or not number.isdigit():
            parser.error(f"{value}: give NAME=NUMBER with a name of {', '.join(tuning.DEFAULTS)}")
        tuning.DEFAULTS[name] = int(number)
    # Forked, so that the ranks have the values of this process.
    shmring.spawn(measure, options.n, (options.sizes, options.seconds), method="fork")


if __name__ == "__main__":
    main()
