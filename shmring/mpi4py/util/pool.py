"""The interface of multiprocessing.pool on processes that MPI spawns; nothing is spawned here."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["ApplyResult", "AsyncResult", "MapResult", "Pool", "ThreadPool"]


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "shmring's MPI spawns no processes: use mpi4py.futures.MPICommExecutor on the ranks that run, or "
        "multiprocessing.Pool"
    )


class Pool:
    """Refused when it is made."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        _refuse()


class ThreadPool(Pool):
    """Refused when it is made."""


class AsyncResult:
    """The result of a pool's call."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        _refuse()


class ApplyResult(AsyncResult):
    """Another name of AsyncResult."""


class MapResult(AsyncResult):
    """The result of a pool's map."""
