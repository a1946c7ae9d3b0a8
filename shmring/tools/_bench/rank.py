"""Run one rank of `shmring bench`: facts of the world, then at each size arrays, check and samples.

This file uses only the public API.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from timeit import Timer
from typing import Any

import numpy as np

import shmring

from .._machine import machine
from .calls import Array, Job, Turn, count_of, dtype_named

clock = time.perf_counter_ns

SAMPLE_NS = 200_000.0  # much longer than the clock's resolution and the skew of ranks after a barrier
CROWDED_SAMPLE_NS = 5_000_000.0  # if ranks share CPUs: longer than a time slice
LEAST_SAMPLES, MOST_SAMPLES = 5, 10_000
GROWTH = 8  # most by which the number of calls grows at once: first calls are slow
# The part of the calls' time that copies get. Below the size, the call overhead of memcpy dominates.
COPY_PART, COPY_COUNTS_FROM_NBYTES = 0.25, 64 << 10
# The engine measures the distance of cores before some large calls; a busy core may not answer at once.
_LARGE_ITEMS, _TRIES, _TRY_AGAIN_S = 1 << 18, 10, 0.02


def facts(comm: shmring.Comm, job: Job) -> dict[str, Any]:
    """Return the facts that the figures depend on. Collective."""
    large = np.ones(_LARGE_ITEMS, "f4")
    for _ in range(_TRIES):
        comm.all_reduce(large, "max")
        if comm.all_reduce(comm.stats()["round_trip_ns"]):
            break
        time.sleep(_TRY_AGAIN_S)
    comm.all_reduce(large, "max")  # uses the measured distance
    places = comm.all_gather_object((comm.node, sorted(os.sched_getaffinity(0))))
    known = comm.stats()
    return {
        "version": shmring.__version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "call": job.call,
        "what": job.what,
        "dtype": job.dtype,
        "op": job.op,
        "ranks": comm.size,
        "hosts": comm.num_nodes,
        "cpus": [cpus for _, cpus in places],
        "crowded": _is_crowded(places),
        "distance": known["distance"] if known["round_trip_ns"] else "unknown",
        "round_trip_ns": known["round_trip_ns"],
        "isa": known["isa"],
    }


def _is_crowded(places: list[tuple[int, list[int]]]) -> bool:
    """Return whether a host has more ranks than CPUs for them."""
    nodes = [node for node, _ in places]
    usable = {node: {cpu for at, cpus in places if at == node for cpu in cpus} for node in nodes}
    return any(nodes.count(node) > len(cpus) for node, cpus in usable.items())


def rows(comm: shmring.Comm, job: Job, *, crowded: bool) -> Iterator[dict[str, Any]]:
    """Yield the figures of each size, the same on all ranks. Collective."""
    counts = dict.fromkeys(count_of(job, nbytes, comm.size) for nbytes in job.sizes)  # each once
    for count in counts:
        yield _row(comm, job, count, CROWDED_SAMPLE_NS if crowded else SAMPLE_NS)
        gc.collect()  # the arrays of one size may leave no room for the next


def _row(comm: shmring.Comm, job: Job, count: int, sample_ns: float) -> dict[str, Any]:
    nbytes = 0 if job.call == "barrier" else count * dtype_named(job.dtype).itemsize
    turn = Turn(comm, job, count)
    turn.call()
    path = comm.stats()["path"]
    wrong = comm.all_reduce(turn.wrong()) if job.check else None
    turn.refill()
    us, loops = _timed(comm, job, turn, sample_ns)
    if wrong is not None:
        wrong += comm.all_reduce(turn.wrong())
    del turn  # the copies below need as much memory again
    median = float(np.median(us))
    gb_s = nbytes / median * 1e-3 if median else 0.0
    return {
        "nbytes": nbytes,
        "count": 0 if job.call == "barrier" else count,
        "samples": len(us),
        "loops": loops,
        "min_us": float(np.min(us)),
        "avg_us": float(np.mean(us)),
        "p50_us": median,
        "p99_us": float(np.percentile(us, 99)),
        "algbw_gb_s": gb_s,
        "busbw_gb_s": gb_s * job.form.busbw(comm.size),
        "wrong": wrong,
        "copy_us": _copy_limit(comm, job, nbytes, sample_ns),
        "path": path,
        "round_trip_ns": comm.stats()["round_trip_ns"],
    }


def _timed(comm: shmring.Comm, job: Job, turn: Turn, sample_ns: float) -> tuple[Array, int]:
    """Return the samples of the call alone, without the time of writing its input."""
    timed = f"write(1); {turn.statement}" if job.written else turn.statement
    us, loops = _sampled(comm, job, _timer(timed, turn.names), sample_ns, job.seconds)
    if job.written:
        timer = _timer("write(1)", turn.names)
        writing, _ = _sampled(comm, job, timer, sample_ns, COPY_PART * job.seconds, alone=True)
        us = np.maximum(us - np.median(writing), 0)
    return us, loops


def _copy_limit(comm: shmring.Comm, job: Job, nbytes: int, sample_ns: float) -> float | None:
    """Return the µs in which all ranks at once copy as many bytes of private memory; None if too small."""
    if nbytes < COPY_COUNTS_FROM_NBYTES:
        return None
    names = {"copy": np.copyto, "source": np.ones(nbytes, np.uint8), "target": np.zeros(nbytes, np.uint8)}
    timer = _timer("copy(target, source)", names)
    us, _ = _sampled(comm, job, timer, sample_ns, COPY_PART * job.seconds, alone=True)
    return float(np.median(us))


# ---- samples ---------------------------------------------------------------------------------------------


def _timer(statement: str, names: dict[str, Any]) -> Timer:
    """Return a timeit loop: only counting between two calls, and no garbage collection."""
    return Timer(statement, timer=clock, globals=names)


def _sampled(
    comm: shmring.Comm, job: Job, timer: Timer, sample_ns: float, seconds: float, *, alone: bool = False
) -> tuple[Array, int]:
    """Return by sample the µs of one call on the slowest rank, and the calls in a sample.

    alone: the statement waits for no other rank. Since a rank that shares a CPU may finish before the next
    one begins, a sample then lasts until all ranks have finished.
    """
    loops, per_call_ns = _loops(comm, timer, sample_ns)
    fitting = math.ceil(seconds * 1e9 / (loops * per_call_ns))
    samples = job.samples or min(max(fitting, LEAST_SAMPLES), MOST_SAMPLES)
    took = np.empty(samples)
    for at in range(samples):
        comm.barrier()
        begin = clock()
        took[at] = timer.timeit(loops)
        if alone:
            comm.barrier()
            took[at] = clock() - begin
    comm.all_reduce(took, "max")
    return took / (1e3 * loops), loops


def _loops(comm: shmring.Comm, timer: Timer, sample_ns: float) -> tuple[int, float]:
    """Return the calls in a sample and the ns of one call, the same on all ranks, confirmed by two trials."""
    loops = 1
    fitting: list[float] = []
    while len(fitting) < 2:
        comm.barrier()
        took_ns = max(comm.all_reduce(timer.timeit(loops), "max"), 1.0)
        if took_ns > sample_ns / 2:
            fitting.append(took_ns / loops)
        else:
            fitting.clear()
            loops = max(loops + 1, round(loops * min(GROWTH, sample_ns / took_ns)))
    return loops, min(fitting)


def _machine() -> dict[str, str]:
    try:
        model = machine.model()["name"]
    except machine.Unknown:  # a container may hide it
        model = platform.machine()
    return {
        "cpu_model": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
