"""torch's monitored_barrier: rank 0 reports ranks that do not arrive, and the group stays usable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import shmring

from .._compiled import CallLock
from .work import Message

# Each barrier has a tag, so that messages of a failed one do not match the next.
_FIRST_TAG = 2**31 - 1 - 1000
_LEAST_S = 1e-3


def monitored_barrier(
    comm: shmring.Comm, messaging: CallLock, number: int, limit_s: float, wait_all_ranks: bool
) -> None:
    """Run the number-th monitored barrier. Collective.

    If ranks do not arrive within limit_s seconds of rank 0, it raises RuntimeError, which names the first of
    them, or all of them if wait_all_ranks. If the time was over before it looked, it names itself, as with
    gloo. It tells the other ranks, which then raise RuntimeError, too; they wait for rank 0 for the timeout
    of the communicator, as with gloo. The communicator stays usable. If a rank has ended, the error is the
    communicator's.

    messaging: the lock of calls on messages. Other threads get it in turn while this one waits.
    """
    tag, passed = _FIRST_TAG + number % 1000, np.zeros(1, "u1")

    def begin(call: Callable[..., Any], data: Any, rank: int) -> Message:
        with messaging:
            return Message(call(data, rank, tag), messaging, comm.timeout_s)

    if comm.rank == 0:
        others = range(1, comm.size)
        try:
            _watch([begin(comm.irecv, np.empty(1, "u1"), rank) for rank in others], limit_s, wait_all_ranks)
        except shmring.Error:
            raise
        except RuntimeError:
            given_up = np.ones(1, "u1")
            for rank in others:
                begin(comm.isend, given_up, rank)
            raise
        for message in [begin(comm.isend, passed, rank) for rank in others]:
            message.wait()
        return
    answer = np.empty(1, "u1")
    messages = begin(comm.isend, passed, 0), begin(comm.irecv, answer, 0)
    until = time.monotonic() + max(limit_s, comm.timeout_s)
    try:
        for message in messages:
            message.wait(max(until - time.monotonic(), _LEAST_S))
        if answer[0]:
            raise TimeoutError("rank 0 has given up the barrier")
    except shmring.Error:
        raise
    except TimeoutError as error:
        raise RuntimeError(
            f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. Please check rank 0 logs for faulty rank. Original exception: {error}"
        ) from error


def _watch(arrivals: Sequence[Message], limit_s: float, wait_all_ranks: bool) -> None:
    """Wait for the messages of ranks 1, 2, ...; raise RuntimeError if some do not come in time."""
    until = time.monotonic() + limit_s
    missing = []
    for rank, message in enumerate(arrivals, 1):
        left_s = until - time.monotonic()
        if left_s <= 0 and not wait_all_ranks:
            raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {limit_s * 1e3:.0f} ms.")
        try:
            message.wait(max(left_s, _LEAST_S))
        except shmring.Error:
            raise
        except TimeoutError:
            missing.append(str(rank))
            if not wait_all_ranks:
                break
    if missing:
        ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise RuntimeError(f"{ranks} failed to pass monitoredBarrier in {limit_s * 1e3:.0f} ms")
