"""Probe the machine: make segments, measure the distance of cores, read another's memory, time copies.

The probes start ranks of their own and take about a second.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import shmring

from ..._config.settings import SEGMENTS
from ..._core import kernels
from ..._system import segments

MIB = 1 << 20
_TRIAL_NBYTES = 1 * MIB
_COPY_NBYTES = 32 * MIB
_LEAST_COPY_NBYTES = 1 * MIB
_MOST_COPIERS = 64
_ROUNDS = 5
_PING_AGAIN_S = 0.03  # ranks measure their distance again before a large call if 20 ms have passed
_LARGE = 100_000
_LIMIT_S = 30.0


def segment(kind: str) -> dict[str, Any]:
    """Return whether shared memory of this kind can be made, allocated and mapped, and how or why not."""
    try:
        fd = segments.create(_TRIAL_NBYTES, kind=kind)
    except (shmring.Error, OSError) as error:
        return {"works": False, "how": str(error)}
    try:
        segments.allocate(fd, 0, _TRIAL_NBYTES, purpose="a trial")
        mapping = segments.Mapping(fd, _TRIAL_NBYTES)
        ctypes.memset(mapping.address, 1, _TRIAL_NBYTES)
        mapping.close()
        return {"works": os.pread(fd, 1, _TRIAL_NBYTES - 1) == b"\1", "how": _made_how(fd, kind)}
    except (shmring.Error, OSError) as error:
        return {"works": False, "how": str(error)}
    finally:
        os.close(fd)


def _made_how(fd: int, kind: str) -> str:
    if kind == "memfd":
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        return "sealed" if sealed else "not sealed"
    try:
        return "unlinked at once" if "shmring-" in os.readlink(f"/proc/self/fd/{fd}") else "O_TMPFILE"
    except OSError:  # without /proc
        return "nameless"


def between(pairs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return for each pair of CPUs the round trip in ns and the distance, as the engine measures both.

    Also return whether one rank may read another's memory, and why not.
    """
    with _plain_settings():
        trips, refusals = shmring.spawn(_between, 2, (list(pairs),), timeout=_LIMIT_S)[0]
    found = [
        {"cpus": list(pair), "round_trip_ns": ns or None, "distance": distance if ns else None}
        for pair, (ns, distance) in zip(pairs, trips, strict=True)
    ]
    refused = next((why for why in refusals if why), None)
    return {"round_trips": found, "single_copy": {"works": refused is None, "why": refused}}


def copy_limit(nranks: int, room_nbytes: int | None) -> dict[str, Any]:
    """Return the GB/s that one rank, and all ranks at once, copy, by the faster of two kinds of stores."""
    nranks = min(nranks, _MOST_COPIERS)
    nbytes = _COPY_NBYTES if room_nbytes is None else min(_COPY_NBYTES, room_nbytes // (8 * nranks))
    nbytes -= nbytes % MIB
    if nbytes < _LEAST_COPY_NBYTES:
        raise MemoryError("there is too little memory left to copy")
    with _plain_settings():
        alone, together = shmring.spawn(_copy, nranks, (nbytes,), timeout=_LIMIT_S)[0]
    return {
        "nbytes": nbytes,
        "ranks": nranks,
        "alone_gb_per_s": nbytes / alone / 1e9,
        "together_gb_per_s": nranks * nbytes / together / 1e9,
    }


@contextmanager
def _plain_settings() -> Iterator[None]:
    """Remove SHMRING_* settings while the machine is measured. Wrong settings are reported elsewhere."""
    kind = next((kind for kind in SEGMENTS if segment(kind)["works"]), SEGMENTS[0])
    plain = {"SHMRING_TUNING": "none", "SHMRING_SEGMENT": kind}
    given = {name: text for name, text in os.environ.items() if name.startswith("SHMRING_")}
    for name in given:
        del os.environ[name]
    os.environ.update(plain)
    try:
        yield
    finally:
        for name in plain:
            del os.environ[name]
        os.environ.update(given)


# ---- in the ranks -----------------------------------------------------------------------------------------


def _between(
    comm: shmring.Comm, pairs: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, str]], list[str | None]]:
    refusals: list[str | None] = comm.all_gather_object(_refusal(comm))
    trips = []
    for pair in pairs:
        os.sched_setaffinity(0, {pair[comm.rank]})
        comm.barrier()
        measured = [_round_trip(comm) for _ in range(_ROUNDS)]
        trips.append(min((trip for trip in measured if trip[0]), default=(0, "unknown")))
    return trips, refusals


def _round_trip(comm: shmring.Comm) -> tuple[int, str]:
    time.sleep(_PING_AGAIN_S)
    for _ in range(2):  # the first call measures the distance, the second call uses it
        comm.all_reduce(np.ones(_LARGE))
    stats = comm.stats()
    return stats["round_trip_ns"], stats["distance"]


def _refusal(comm: shmring.Comm) -> str | None:
    """Return why process_vm_readv cannot read the next rank's memory; None if it can."""
    here = np.full(64, comm.rank, "u1")
    where = comm.all_gather_object((os.getpid(), here.ctypes.data))
    next_rank = (comm.rank + 1) % comm.size
    pid, address = where[next_rank]
    there = np.full_like(here, 255)
    into, out_of = _Part(there.ctypes.data, there.nbytes), _Part(address, here.nbytes)
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    moved = libc.process_vm_readv(pid, ctypes.byref(into), one, ctypes.byref(out_of), one, no_flags)
    why = os.strerror(ctypes.get_errno()) if moved != here.nbytes else None
    comm.barrier()  # `here` must stay alive until the other rank has read it
    return why if why or (there == next_rank).all() else "it returned wrong bytes"


class _Part(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _copy(comm: shmring.Comm, nbytes: int) -> tuple[float, float]:
    """Return seconds of rank 0's copy alone, and of the slowest rank's copy while all ranks copy."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[comm.rank % len(allowed)]})
    # Fill the arrays with ones: unwritten pages all map the kernel's zero page, which is fast to read.
    source, target = np.ones(nbytes, "u1"), np.ones(nbytes, "u1")
    best = np.full(2, np.inf)
    for stream in (0, 1) * _ROUNDS:
        took = np.zeros(2)
        if comm.rank == 0:
            took[0] = kernels.copy([target], [source], kernels.isas()[0], stream)
        comm.barrier()
        took[1] = kernels.copy([target], [source], kernels.isas()[0], stream)
        comm.all_reduce(took, "max")
        best = np.minimum(best, took)
    return float(best[0]), float(best[1])
