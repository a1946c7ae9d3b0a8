"""Ranks as tasks of another package's scheduler: the task, a meeting point, the collection of results.

The function is sent as bytes and unpickled only after all ranks have joined. So a function that cannot be
unpickled ends the world at once, and no rank waits for another.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pickle
import queue
import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import shmring

GRACE_S = 5.0  # after a failure, time for the other ranks to raise RankFailed
_POLL_S = 1.0
_FIRST_PORT, _LAST_PORT = 20000, 29999  # below those that kernels give to outgoing connections


class Future(Protocol):
    """The methods that futures of concurrent.futures, loky and Dask share."""

    def add_done_callback(self, function: Callable[[Any], Any], /) -> Any: ...
    def cancel(self) -> Any: ...
    def exception(self) -> Any: ...
    def result(self) -> Any: ...


def be_rank(function: bytes, world: shmring.World, rank: int, timeout_s: float | None, *args: Any) -> Any:
    """Run one rank: join the world and call the function."""
    with shmring.init(world, rank, timeout=timeout_s) as comm:
        return pickle.loads(function)(comm, *args)


def pack(function: Callable[..., Any]) -> bytes:
    """Return the pickled function. Raises TypeError if it is not callable or cannot be pickled."""
    if not callable(function):
        raise TypeError(f"fn is {function!r}; it must be callable as fn(comm, *args)")
    try:
        from cloudpickle import dumps  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        dumps = pickle.dumps
    try:
        return bytes(dumps(function))
    except Exception as error:  # whatever __reduce__ raises
        raise TypeError(f"{function!r} cannot be sent to the ranks: {error}") from error


def free_port() -> int:
    """Return a TCP port of this host that is free now."""
    while True:
        port = random.randint(_FIRST_PORT, _LAST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def collect(
    futures: Sequence[Future], places: Sequence[str], lost: Callable[[], Iterable[int]] = tuple
) -> list[Any]:
    """Return the results by rank, or raise the failure that is most likely the first cause, as `spawn` does.

    places: by rank its location, for the note. lost: called periodically; returns ranks whose task cannot
    end.
    """
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    waiting = dict(enumerate(futures))
    for rank, future in waiting.items():
        future.add_done_callback(partial(_note_end, ended, rank))
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    gone: dict[int, BaseException]
    until = float("inf")
    try:
        while waiting and time.monotonic() < until:
            try:
                rank = ended.get(timeout=_POLL_S)
            except queue.Empty:
                gone = {rank: _ended(rank, places[rank]) for rank in lost() if rank in waiting}
            else:
                results[rank], failure = _outcome(waiting.pop(rank))
                gone = {} if failure is None else {rank: failure}
            if gone and not failures:
                until = time.monotonic() + GRACE_S
            failures |= gone
            for rank in gone.keys() & waiting.keys():
                waiting.pop(rank).cancel()
    finally:
        for future in waiting.values():
            future.cancel()  # a running task cannot be stopped; it ends when it next needs another rank
    if failures:
        raise first_cause(failures, places)
    return [results[rank] for rank in range(len(futures))]


def _note_end(ended: queue.SimpleQueue[int], rank: int, _: object) -> None:
    ended.put(rank)


def _outcome(future: Future) -> tuple[Any, BaseException | None]:
    try:
        failure = future.exception()
        return (None, failure) if failure is not None else (future.result(), None)
    except concurrent.futures.CancelledError as error:
        return None, error


def _ended(rank: int, place: str) -> shmring.RankFailed:
    return shmring.RankFailed(f"rank {rank} ended: {place} is gone", rank=rank, cause=f"{place} is gone")


def first_cause(failures: dict[int, BaseException], places: Sequence[str]) -> BaseException:
    """Return the failure that most likely caused the others, with its rank and a note."""
    rank = min(failures, key=lambda rank: (_tier(failures[rank], rank), rank))
    failure = failures[rank]
    if isinstance(failure, concurrent.futures.BrokenExecutor):
        failure.add_note(f"One of {len(places)} ranks ended with its process, and the pool with it.")
        return failure
    if not isinstance(failure, shmring.Error) or failure.rank is None:
        with contextlib.suppress(AttributeError, TypeError):  # the exception's class has __slots__
            failure.rank = rank  # type: ignore[attr-defined, union-attr, unused-ignore]
    failure.add_note(f"Raised in rank {rank} of {len(places)}, on {places[rank]}.")
    return failure


def _tier(failure: BaseException, rank: int) -> int:
    """Return 0 for a rank's own exception, 1 for an error that all ranks get, 2 for another rank's error."""
    if isinstance(failure, (shmring.RankFailed, shmring.Aborted)) and failure.rank != rank:
        return 2
    return 1 if isinstance(failure, shmring.Error) else 0
