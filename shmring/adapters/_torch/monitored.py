"""torch's monitored_barrier: rank 0 reports ranks that do not arrive, and the group stays usable."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import shmring

# Each barrier has a tag, so that messages of a failed one do not match the next.
_FIRST_TAG = 2**31 - 1 - 1000
_LEAST_S = 1e-3


def monitored_barrier(comm: shmring.Comm, number: int, limit_s: float, wait_all_ranks: bool) -> None:
    """Run the number-th monitored barrier. Collective.

    If ranks do not arrive within limit_s seconds, rank 0 raises RuntimeError, which names the first of them,
    or all of them if wait_all_ranks. The ranks that arrived raise RuntimeError, too. The communicator stays
    usable.
    """
    token = np.zeros(1, "u1")
    tag = _FIRST_TAG + number % 1000
    if comm.rank == 0:
        _watch(comm, tag, token, limit_s, wait_all_ranks)
        return
    until = time.monotonic() + limit_s
    answer = comm.irecv(np.empty(1, "u1"), 0, tag)
    try:
        for message in (comm.isend(token, 0, tag), answer):
            message.wait(max(until - time.monotonic(), _LEAST_S))
    except (TimeoutError, shmring.Error) as error:
        raise RuntimeError(
            f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. Please check rank 0 logs for faulty rank. Original exception: {error}"
        ) from error


def _watch(
    comm: shmring.Comm,
    tag: int,
    token: np.ndarray[Any, Any],
    limit_s: float,
    wait_all_ranks: bool,
) -> None:
    until = time.monotonic() + limit_s
    coming = [comm.irecv(np.empty(1, "u1"), rank, tag) for rank in range(1, comm.size)]
    missing = []
    for rank, message in enumerate(coming, 1):
        left_s = until - time.monotonic()
        if left_s <= 0 and not wait_all_ranks:
            raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {limit_s * 1e3:.0f} ms.")
        try:
            message.wait(max(left_s, _LEAST_S))
        except (TimeoutError, shmring.Error):
            missing.append(str(rank))
            if not wait_all_ranks:
                break
    if missing:
        ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise RuntimeError(f"{ranks} failed to pass monitoredBarrier in {limit_s * 1e3:.0f} ms")
    for rank in range(1, comm.size):
        comm.send(token, rank, tag)
