"""The processes of a pool as the ranks of a world: concurrent.futures, loky and compatible pools."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import shmring

from ._tasks import be_rank, collect, pack

__all__ = ["run"]


def run(
    pool: Executor, fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float | None = None
) -> list[Any]:
    """Call `fn(comm, *args)` in `nprocs` workers of the pool at the same time; return the results by rank.

    pool: a ProcessPoolExecutor, a loky executor, or another `concurrent.futures.Executor` on this host. Its
    workers must be idle, since ranks wait for each other. timeout: seconds for the start and for each call on
    `comm`. Raises ValueError if the pool has fewer workers than ranks, TypeError for a function that cannot
    be pickled (by cloudpickle if it is installed), and the exception of the first failing rank in its own
    type, with `.rank` and a note.
    """
    world = shmring.world(nprocs)
    workers = getattr(pool, "_max_workers", None)
    if workers is not None and workers < world.nprocs:
        raise ValueError(
            f"the pool has {workers} worker(s), too few for {world.nprocs} ranks, which all run at the same "
            f"time: make it with max_workers={world.nprocs}, or use {workers} rank(s)"
        )
    function = pack(fn)
    futures = [pool.submit(be_rank, function, world, rank, timeout, *args) for rank in range(world.nprocs)]
    return collect(futures, ["a worker of the pool"] * world.nprocs)
