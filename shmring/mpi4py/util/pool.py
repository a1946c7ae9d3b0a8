"""The interface of multiprocessing.pool on processes that MPI spawns; nothing is spawned here."""

from __future__ import annotations

from typing import Any

__all__ = ["ApplyResult", "AsyncResult", "MapResult", "Pool", "ThreadPool"]


class _Refused:
    """Refused when it is made."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise NotImplementedError(
            "shmring's MPI spawns no processes: use mpi4py.futures.MPICommExecutor on the ranks that run, or "
            "multiprocessing.Pool"
        )


class Pool(_Refused):
    """Refused when it is made: a pool of processes."""


class ThreadPool(Pool):
    """Refused when it is made: a pool of threads."""


class AsyncResult(_Refused):
    """The result of a pool's call."""


class ApplyResult(AsyncResult):
    """Another name of AsyncResult."""


class MapResult(AsyncResult):
    """The result of a pool's map."""
