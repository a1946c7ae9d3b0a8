"""Dask workers as the ranks of a world, and shared arrays between them."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

import shmring

from .._config.optional_deps import need
from .._config.settings import address_text
from ._tasks import be_rank, check_wanted, collect, free_port, pack, submit_all, submitting

__all__ = ["register_sharing", "run"]


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
        Seconds for the start and for each call on `comm`.

    Returns
    -------
    list
        By rank.

    Raises
    ------
    BaseException
        The exception of the first failing rank in its own type, with `.rank` and a note that has its
        traceback. If it cannot be pickled, a RuntimeError with its text.
    RankFailed
        If a rank raises SystemExit or KeyboardInterrupt, or its worker is gone.
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
        address = address_text(hosts[0], _port_on(client, ranks[0]) if port is None else operator.index(port))
    world = shmring.world(len(ranks), address=address)

    def submit(rank: int) -> Any:
        return client.submit(
            _be_rank,
            function,
            world,
            rank,
            timeout,
            *args,
            workers=[ranks[rank]],
            allow_other_workers=False,
            pure=False,  # each call makes a new world
            retries=0,
            key=f"shmring-rank-{rank}-{world.id}",
        )

    with submitting():
        futures = submit_all(submit, len(ranks))

    def lost() -> list[int]:
        there = client.nthreads()
        return [rank for rank, worker in enumerate(ranks) if worker not in there]

    return collect(futures, [f"worker {worker}" for worker in ranks], lost)


def _be_rank(*task: Any) -> Any:
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def is_cancelled() -> bool:
        state = worker.state.tasks.get(key)
        return state is None or state.state == "cancelled"

    return be_rank(*task, check=check_wanted(is_cancelled))


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


def register_sharing(client: Any) -> None:
    """Let Dask pass the arrays of `shmring.share` between this client and its workers as descriptors.

    This applies to arrays that Dask sends by themselves: results, what `client.scatter` sends, and what one
    worker fetches from another. An array inside an argument of `submit` is pickled with the task, as bytes:
    scatter it. The receiver maps the memory of the sender, whose process must live until then.

    Parameters
    ----------
    client : distributed.Client
        Its workers must be processes of this user on this machine, such as those of a LocalCluster. Workers
        that start later are prepared when they start.

    Raises
    ------
    ValueError
        For a worker on another machine.

    Examples
    --------
    ::

        from shmring.adapters.dask import register_sharing

        register_sharing(client)
        table = client.scatter(shmring.share(array))
        futures = [client.submit(analyse, table, part) for part in range(8)]
    """
    need("distributed", "dask", __name__)
    from distributed.diagnostics.plugin import WorkerPlugin

    own_host = shmring.host_id()
    for worker, host in client.run(shmring.host_id).items():
        if host != own_host:
            raise ValueError(
                f"worker {worker} is on another machine, where arrays of this one cannot be opened"
            )

    class Sharing(WorkerPlugin):  # type: ignore[misc, unused-ignore]
        name = "shmring-sharing"

        def setup(self, worker: Any) -> None:
            _replace_serializer()

    _replace_serializer()
    client.register_plugin(Sharing())


def _replace_serializer() -> None:
    from distributed.protocol import numpy as plain
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    def dump(array: np.ndarray[Any, Any], context: Any = None) -> Any:
        try:
            shmring.share(array, copy=False)
        except (TypeError, ValueError):
            return plain.serialize_numpy_ndarray(array, context)
        return {"shmring": True}, [ForkingPickler.dumps(array)]

    def load(header: dict[str, Any], frames: list[Any]) -> Any:
        if "shmring" not in header:
            return plain.deserialize_numpy_ndarray(header, frames)
        return pickle.loads(frames[0])

    dask_serialize.register(np.ndarray, dump)  # type: ignore[no-untyped-call, unused-ignore]
    dask_deserialize.register(np.ndarray, load)  # type: ignore[no-untyped-call, unused-ignore]
