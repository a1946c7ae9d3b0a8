"""Dask workers as the ranks of a world: `run(client, fn)` calls fn(comm) on all of them at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import shmring

from .._config.optional_deps import need
from ._tasks import be_rank, collect, free_port, join_address, pack

__all__ = ["run"]


def run(
    client: Any,
    fn: Callable[..., Any],
    *args: Any,
    workers: Iterable[str] | None = None,
    port: int | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call `fn(comm, *args)` on Dask workers, all at the same time; return the results by rank.

    Parameters
    ----------
    client : distributed.Client
        A synchronous one.
    fn : callable
        The function.
    *args
        Futures among them are resolved as in `client.submit`.
    workers : iterable of str, optional
        By rank, addresses as the scheduler reports them; by default all workers in the order of their
        addresses. Every worker needs a free thread; otherwise the others wait for it.
    port : int, optional
        The TCP port on rank 0's host where workers of several hosts meet; by default a free one. If it is
        given, workers of one host also meet over TCP.
    timeout : float, optional
        Seconds for the start and for each call on `comm`. If the start fails, a late worker stays busy for
        that long.

    Returns
    -------
    list
        By rank.

    Raises
    ------
    BaseException
        The exception of the first failing rank in its own type, with `.rank` and a note.
    RankFailed
        If a worker is gone.
    ValueError
        For an unknown worker.

    Examples
    --------
    ::

        from shmring.adapters import dask

        def total(comm, factor):
            return comm.all_reduce(factor * comm.rank)

        dask.run(client, total, 10)
    """
    need("distributed", "dask", __name__)
    if getattr(client, "asynchronous", False):
        raise TypeError("the client is asynchronous; give a synchronous distributed.Client")
    ranks = _chosen(client, workers)
    function = pack(fn)
    hosts = [_host(worker) for worker in ranks]
    address = None
    if port is not None or len(set(hosts)) > 1:
        address = join_address(hosts[0], _port_on(client, ranks[0]) if port is None else operator.index(port))
    world = shmring.world(len(ranks), address=address)
    futures = [
        client.submit(
            be_rank,
            function,
            world,
            rank,
            timeout,
            *args,
            workers=[worker],
            allow_other_workers=False,
            pure=False,  # each call makes a new world
            retries=0,
            key=f"shmring-rank-{rank}-{world.id}",
        )
        for rank, worker in enumerate(ranks)
    ]

    def lost() -> list[int]:
        there = client.nthreads()
        return [rank for rank, worker in enumerate(ranks) if worker not in there]

    return collect(futures, [f"worker {worker}" for worker in ranks], lost)


def _chosen(client: Any, workers: Iterable[str] | None) -> list[str]:
    there = sorted(client.nthreads())
    if isinstance(workers, str):
        raise TypeError(f"workers is {workers!r}; give a list of addresses")
    ranks = there if workers is None else list(workers)
    if not ranks:
        raise ValueError("there are no workers: start some, or wait with client.wait_for_workers(n)")
    strange = [worker for worker in ranks if worker not in there]
    if strange:
        raise ValueError(f"no worker has the address {strange[0]!r}; there are {', '.join(there) or 'none'}")
    if len(set(ranks)) < len(ranks):
        raise ValueError("a worker is named twice; each can be one rank")
    return ranks


def _host(worker: str) -> str:
    """Return the host of tcp://10.0.0.1:4711 or tls://[::1]:4711; "" for one process (inproc://...)."""
    scheme, _, rest = worker.partition("://")
    return "" if scheme == "inproc" else rest.rpartition(":")[0].strip("[]")


def _port_on(client: Any, worker: str) -> int:
    return int(client.submit(free_port, workers=[worker], pure=False).result())
