"""Ranks as tasks of another package's scheduler: the task, a meeting point, the collection of results.

The function is sent as bytes and unpickled only after all ranks have joined. So a function that cannot be
unpickled ends the world at once, and no rank waits for another.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import shmring

from .._config.optional_deps import cloudpickle_if_installed
from .._config.settings import FIRST_PORT, LAST_PORT
from .._outcome import Failure, first_of

GRACE_S = 5.0  # after a failure, time for the other ranks to raise RankFailed
_POLL_S = 1.0


_submitting = threading.Lock()


def submitting() -> threading.Lock:
    """Return the lock that a thread holds while it submits the ranks of a world.

    Workers take tasks in the order of submission, so all ranks of the oldest world start: worlds that threads
    start at the same time do not wait for each other's workers.
    """
    return _submitting


def _renew_lock() -> None:
    global _submitting
    _submitting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # a pool forks its workers when a rank is submitted


class Future(Protocol):
    """The methods that futures of concurrent.futures, loky and Dask share, and `ray._Call` has."""

    def add_done_callback(self, function: Callable[[Any], Any], /) -> Any: ...
    def cancel(self) -> Any: ...
    def result(self) -> Any: ...


def be_rank(
    function: bytes,
    world: shmring.World,
    rank: int,
    timeout_s: float | None,
    *args: Any,
    check: Callable[[], None] | None = None,
) -> Any:
    """Run one rank: join the world and call the function. Return its result, or a Failure.

    The failure is returned and not raised: a scheduler may fail to send an exception, may end its worker
    because of it (SystemExit), and drops the exceptions that led to it.
    """
    try:
        with shmring.init(world, rank, timeout=timeout_s, check=check) as comm:
            return pickle.loads(function)(comm, *args)
    except KeyboardInterrupt:
        raise  # joblib may run a single rank in the caller's process
    except BaseException as error:
        return Failure.of(error, rank)


def check_wanted(is_given_up: Callable[[], bool]) -> Callable[[], None]:
    """Return a check for `shmring.init`: a rank waits for the others only until its task is given up."""
    return partial(_check, is_given_up)


def _check(is_given_up: Callable[[], bool]) -> None:
    if is_given_up():
        raise shmring.Error("the launcher has given up this start: another rank could not start")


@contextlib.contextmanager
def wanting(world: shmring.World) -> Iterator[Callable[[], None]]:
    """Return a check for the ranks' `shmring.init` that raises once the block has ended. It can be pickled.

    The ranks are processes of this host. The name in the kernel ends with this process, but workers that were
    forked in the block have it too, so it is shut down.
    """
    name = f"\0shmring run {world.id}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen(0)
        try:
            yield check_wanted(partial(_refuses, name))
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _refuses(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # nobody accepts: if others have connected, this raises BlockingIOError
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False


def submit_all(submit: Callable[[int], Future], nprocs: int) -> list[Future]:
    """Return the futures of all ranks, by rank. If one cannot be submitted, cancel the others."""
    futures: list[Future] = []
    try:
        for rank in range(nprocs):
            futures.append(submit(rank))
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return futures


def pack(function: Callable[..., Any]) -> bytes:
    """Return the pickled function. Raises TypeError if it is not callable or cannot be pickled."""
    if not callable(function):
        raise TypeError(f"fn is {function!r}; it must be callable as fn(comm, *args)")
    pickler = cloudpickle_if_installed() or pickle
    try:
        return bytes(pickler.dumps(function))
    except Exception as error:  # whatever __reduce__ raises
        raise TypeError(f"{function!r} cannot be sent to the ranks: {error}") from error


def free_port() -> int:
    """Return a TCP port of this host that is free now."""
    while True:
        port = random.SystemRandom().randint(FIRST_PORT, LAST_PORT)  # not the program's random state
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def collect(
    futures: Sequence[Future], places: Sequence[str], lost: Callable[[], Iterable[int]] = tuple
) -> list[Any]:
    """Return the results by rank, or raise the failure that is most likely the first cause, as `spawn` does.

    futures: by rank. places: by rank, the name of its worker, for messages. lost: called about once a second;
    returns the ranks whose workers are gone.
    """
    outcomes: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    waiting = dict(enumerate(futures))
    for rank, future in waiting.items():
        future.add_done_callback(partial(_put_outcome, outcomes, rank))
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    until = float("inf")
    try:
        while waiting and time.monotonic() < until:
            try:
                rank, outcome = outcomes.get(timeout=_POLL_S)
            except queue.Empty:
                for rank in waiting.keys() & set(lost()):
                    outcomes.put((rank, _ended(rank, places[rank])))
                    waiting[rank].cancel()
                continue
            if waiting.pop(rank, None) is None:  # the second outcome of a lost rank: its task was cancelled
                continue
            if isinstance(outcome, Failure):
                failures[rank] = outcome
                until = min(until, time.monotonic() + GRACE_S)
            else:
                results[rank] = outcome
    finally:
        for future in waiting.values():
            # A running task cannot be stopped. It ends when it needs another rank, or by its check in `init`.
            future.cancel()
    if failures:
        raise first_cause(failures, places)
    return [results[rank] for rank in range(len(futures))]


def _put_outcome(outcomes: queue.SimpleQueue[tuple[int, Any]], rank: int, future: Future) -> None:
    # Run as a callback, in another thread: Dask's `result` waits for ever if the result is lost.
    outcome: Any
    try:
        outcome = future.result()
    except BaseException as error:  # the scheduler's, such as BrokenProcessPool
        outcome = Failure.of(error, rank)
    outcomes.put((rank, outcome))


def _ended(rank: int, place: str) -> Failure:
    error = shmring.RankFailed(f"rank {rank} ended: {place} is gone", rank=rank, cause=f"{place} is gone")
    return Failure.of(error, rank)


def first_cause(failures: Mapping[int, Failure], places: Sequence[str]) -> BaseException:
    """Return the exception that most likely caused the others, with its rank and a note."""
    rank = first_of(failures)
    error = failures[rank].error
    if isinstance(error, concurrent.futures.BrokenExecutor) and not failures[rank].traceback:  # by the pool
        error.add_note(f"One of {len(places)} ranks ended with its process, and the pool with it.")
        return error
    return failures[rank].exception(rank, f" of {len(places)}, on {places[rank]}")
