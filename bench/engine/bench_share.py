"""Arrays through pools of processes: pickled, in SharedMemory by hand, and shared by shmring.

    python bench/engine/bench_share.py [--sizes 64K,1M,16M,256M] [--rounds 5] [--joblib]

Each way is timed in turn, from the call in the parent until its result is there; the receiver reads one
value of each page. The figures are medians in milliseconds. Two calls of the same way that are not timed
precede each timed one, as in a program that makes many of its calls: where memory is kept, the timed call
uses it again. One is too few: the receiver may still have the memory of the last call.
"""

import argparse
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np

import shmring
from shmring.adapters._sharing import LEAST_NBYTES
from shmring.adapters.pools import Executor

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import parse_size

KEPT_NBYTES = 1 << 30
MANY = 64  # tasks that are submitted at once


def read(x):
    return float(x.reshape(-1)[::512].sum())


def make(nbytes):
    return np.ones(nbytes // 8)


def make_shared(nbytes, keep_nbytes=0):
    shmring.keep_shared(keep_nbytes)
    x = shmring.shared_empty(nbytes // 8)
    x[:] = 1
    return x


def make_by_hand(nbytes):
    memory = shared_memory.SharedMemory(create=True, size=nbytes)
    x = np.ndarray(nbytes // 8, buffer=memory.buf)
    x[:] = 1
    del x
    memory.close()
    return memory.name


def read_by_hand(name, nbytes):
    memory = shared_memory.SharedMemory(name)
    x = np.ndarray(nbytes // 8, buffer=memory.buf)
    found = read(x)
    del x
    memory.close()
    memory.unlink()
    return found


def double(x):
    return x + x


def ways_of(pool, keeping, auto, nbytes):
    """Return a function for each way, by name."""
    x = np.ones(nbytes // 8)
    shared = shmring.share(x)
    return {
        "argument pickled": lambda: pool.submit(read, x).result(),
        "argument shared before": lambda: pool.submit(read, shared).result(),
        "argument shared for the call": lambda: pool.submit(read, shmring.share(x)).result(),
        "argument, Executor": lambda: auto.submit(read, x).result(),
        "result pickled": lambda: read(pool.submit(make, nbytes).result()),
        "result by hand": lambda: read_by_hand(pool.submit(make_by_hand, nbytes).result(), nbytes),
        "result shared": lambda: read(pool.submit(make_shared, nbytes).result()),
        "result shared, memory kept": lambda: read(keeping.submit(make_shared, nbytes, KEPT_NBYTES).result()),
        "result, Executor": lambda: read(auto.submit(make, nbytes).result()),
        "both pickled": lambda: read(pool.submit(double, x).result()),
        "both, Executor": lambda: read(auto.submit(double, x).result()),
    }


def many_ways_of(executor, nbytes):
    """Return a function for each way in which an Executor submits small arrays; LIGHT_NBYTES chooses one."""
    x = np.ones(nbytes // 8)

    def run(light_nbytes):
        executor._light_nbytes = light_nbytes
        for future in [executor.submit(read, x) for _ in range(MANY)]:
            future.result()

    return {
        f"{MANY} tasks, copied": lambda: run(nbytes + 1),
        f"{MANY} tasks, pickled at once": lambda: run(0),
    }


def joblib_ways_of(nbytes):
    import joblib

    from shmring.adapters.joblib import register_joblib

    register_joblib()

    def run(backend):
        results = joblib.Parallel(2, backend=backend)(joblib.delayed(make)(nbytes) for _ in range(2))
        return sum(map(read, results))

    return {"two results, loky": lambda: run("loky"), "two results, shmring": lambda: run("shmring")}


def milliseconds(way):
    begin_s = time.perf_counter()
    way()
    return (time.perf_counter() - begin_s) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="8K,64K,128K,256K,1M,16M,256M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--joblib", action="store_true")
    asked = parser.parse_args()
    with (
        ProcessPoolExecutor(1) as pool,
        ProcessPoolExecutor(1) as keeping,
        Executor(1) as auto,
        Executor(1) as many,
    ):
        for size in asked.sizes.split(","):
            nbytes = parse_size(size)
            ways = ways_of(pool, keeping, auto, nbytes)
            if nbytes < LEAST_NBYTES:
                ways |= many_ways_of(many, nbytes)
            if asked.joblib:
                ways |= joblib_ways_of(nbytes)
            taken = {name: [] for name in ways}
            for _ in range(asked.rounds):
                for name, way in ways.items():
                    shmring.keep_shared(KEPT_NBYTES if "Executor" in name else 0)
                    way()
                    way()
                    taken[name].append(milliseconds(way))
            for name, times in taken.items():
                print(f"{size:>5} {name:30} {statistics.median(times):9.3f}")


if __name__ == "__main__":
    main()
