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

    Parameters
    ----------
    pool : concurrent.futures.Executor
        A ProcessPoolExecutor, a loky executor, or another one on this host. Its workers must be idle, since
        ranks wait for each other.
    fn : callable
        The function.
    nprocs : int
        Number of ranks.
    *args
        Its arguments after `comm`.
    timeout : float, optional
        Seconds for the start and for each call on `comm`.

    Returns
    -------
    list
        By rank.

    Raises
    ------
    ValueError
        If the pool has fewer workers than ranks.
    TypeError
        For a function that cannot be pickled (by cloudpickle if it is installed).
    BaseException
        The exception of the first failing rank in its own type, with `.rank` and a note.

    Examples
    --------
    ::

        from concurrent.futures import ProcessPoolExecutor
        from shmring.adapters import pools

        def total(comm, factor):
            return comm.all_reduce(factor * comm.rank)

        with ProcessPoolExecutor(3) as pool:
            pools.run(pool, total, 3, 10)
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
