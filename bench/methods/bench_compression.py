"""A gradient reduced as it is, narrowed by `wire=`, and by each compressor: time, bytes, and which pays.

    shmrun -n 2 bench/methods/bench_compression.py --nbytes 16M       one host
    python bench/internode/on_hosts.py --hosts 2 -n 1 --rate-gbit 1 \
        bench/methods/bench_compression.py                          two, with a link between

A program of ranks. The gradient is a matrix of random numbers, twice as wide as high, which is written anew
for each call; all times include this. All formats run with feedback, except with stochastic rounding. Bytes
over the wire are those of all ranks together, for one call.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: stand-ins for hosts share the CPUs

import numpy as np

import shmring
from shmring.methods.compression import BF16, FP16, ErrorFeedback, Int8, PowerSGD, TopK

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import parse_size
from bench.common.turns import in_turn, pin, state_of

PLAIN = "all_reduce"
COMPRESSORS = {
    "FP16": lambda: ErrorFeedback(FP16()),
    "BF16": lambda: ErrorFeedback(BF16()),
    "Int8": lambda: ErrorFeedback(Int8()),
    "Int8 stochastic": lambda: Int8(stochastic=True),
    "TopK 1 %": lambda: ErrorFeedback(TopK(0.01)),
    "PowerSGD rank 2": lambda: ErrorFeedback(PowerSGD(2)),
    "PowerSGD rank 8": lambda: ErrorFeedback(PowerSGD(8)),
}


def ways_of(comm: shmring.Comm, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return the ways to reduce a gradient, by name."""
    height = max(1, math.isqrt(nbytes // 8))
    given = np.random.default_rng(comm.rank).standard_normal((height, nbytes // 4 // height), np.float32)
    calls = {PLAIN: functools.partial(comm.all_reduce, op="avg")}
    if comm.num_nodes > 1:
        for wire in ("bf16", "int8"):
            calls[f"wire={wire}"] = functools.partial(comm.all_reduce, op="avg", wire=wire)
    for name, make in COMPRESSORS.items():
        calls[name] = functools.partial(make().all_reduce, comm)
    return {name: functools.partial(write_and_reduce, given, given.copy(), call)
            for name, call in calls.items()}


def write_and_reduce(given: np.ndarray, x: np.ndarray, call: Callable[[np.ndarray], object]) -> None:
    np.copyto(x, given)
    call(x)


def crossing_nbytes(comm: shmring.Comm, way: Callable[[], object]) -> int:
    """Return the bytes that one call sends to other hosts, of all ranks together."""
    before = comm.stats()["bytes_over_wire"]
    way()
    crossed = np.array([comm.stats()["bytes_over_wire"] - before])
    comm.all_reduce(crossed)
    return int(crossed[0])


def table_of(times: dict[str, float], crossing: dict[str, int]) -> Iterator[str]:
    yield f"| way | ms | beside {PLAIN} | MB over the wire | pays |"
    yield "|---|---|---|---|---|"
    for name, time_s in times.items():
        gain = times[PLAIN] / time_s
        pays = "" if name == PLAIN else "yes" if gain > 1 else "no"
        yield f"| {name} | {time_s * 1e3:.2f} | {gain:.2f}x | {crossing[name] / 1e6:.2f} | {pays} |"


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--nbytes", type=parse_size, default="16M", help="of the gradient (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-s", type=float, default=0.2, help="how long one way is timed (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with shmring.init() as comm:
        if comm.num_nodes == 1:  # stand-ins for hosts would all begin with the first CPU
            pin(comm)
        ways = ways_of(comm, options.nbytes)
        crossing = {name: crossing_nbytes(comm, way) for name, way in ways.items()}
        times = in_turn(comm, ways, options.rounds, options.sample_s)
        if comm.rank != 0:
            return
        print(f"{options.nbytes} B, {state_of(comm)}\n", *table_of(times, crossing), sep="\n", flush=True)
        if options.json:
            found = {name: {"s": times[name], "bytes_over_wire": crossing[name]} for name in ways}
            result = {"nbytes": options.nbytes, "state": state_of(comm), "ways": found}
            options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
