"""Ray actors as the ranks of a world, and shmring as a backend of `ray.util.collective`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import shmring

from .._config.optional_deps import need
from .._config.settings import address_text
from ._tasks import check_wanted, collect, free_port

__all__ = ["join", "register_backend", "world"]

BACKEND = "SHMRING"


def world(actors: Sequence[Any], *, port: int | None = None, timeout: float = 60.0) -> shmring.World:
    """Return a new world with `actors[r]` as rank r. Each actor calls `shmring.init(world, rank=r)` with it.

    Actors on several nodes meet over TCP at the node of `actors[0]`.

    Parameters
    ----------
    actors : list of actor handles
        By rank.
    port : int, optional
        By default a free port. If it is given, actors on one node also meet over TCP.
    timeout : float
        Seconds for all actors to start and report their nodes.

    Returns
    -------
    World
        For `shmring.init`.

    Raises
    ------
    Timeout
        With the ranks that did not start.
    Exception
        What Ray raises for dead actors.

    Examples
    --------
    ::

        from shmring.adapters import ray as shmring_ray

        world = shmring_ray.world(actors)
        ray.get([actor.start.remote(world, rank) for rank, actor in enumerate(actors)])
    """
    places = _places(actors, timeout)
    address = None
    if port is not None or len({node for node, _, _ in places}) > 1:
        _, host, free = places[0]
        address = address_text(host, free if port is None else operator.index(port))
    return shmring.world(len(places), address=address)


def join(
    actors: Sequence[Any], *, attribute: str = "comm", port: int | None = None, timeout: float | None = None
) -> None:
    """Make a world of the actors, actors[r] as rank r, and set `self.comm` of each to its communicator.

    An existing communicator of that name is closed first, so actors can join again after a failure.

    Parameters
    ----------
    actors : list of actor handles
        By rank.
    attribute : str
        The name to set instead of "comm".
    port : int, optional
        As in `world`.
    timeout : float, optional
        Seconds for the actors to start, to join, and for each later call on the communicator.

    Raises
    ------
    Exception
        The failure that is most likely the first cause.

    Examples
    --------
    ::

        from shmring.adapters import ray as shmring_ray

        shmring_ray.join(actors)
        ray.get([actor.train.remote() for actor in actors])  # they use self.comm
    """
    meeting = world(actors, port=port) if timeout is None else world(actors, port=port, timeout=timeout)
    calls = [
        _Call(actor.__ray_call__.remote(_join, meeting, rank, attribute, timeout))
        for rank, actor in enumerate(actors)
    ]
    collect(calls, [repr(actor) for actor in actors])


def register_backend(actors: Sequence[Any] = ()) -> None:
    """Register shmring with `ray.util.collective` as backend "SHMRING", in this process and in the actors.

    Groups are then made as for other backends, `create_collective_group(..., backend="SHMRING")`, of actors
    on any nodes. Tensors are NumPy arrays or PyTorch tensors on the CPU. They must be contiguous in memory,
    except in allgather and reducescatter. Registering again does nothing.

    In Ray the NumPy arrays among an actor's arguments, and those that `ray.get` returns, are read-only, since
    processes share their memory. A call that would write to one raises ValueError: copy it, `x = x.copy()`.
    Ray's `gloo_timeout` has no effect; SHMRING_TIMEOUT limits the calls. An actor that Ray restarts has to be
    registered again, for example by calling this function in its `__init__`.

    Parameters
    ----------
    actors : list of actor handles
        The actors that will be in groups.

    Raises
    ------
    ImportError
        If this version of Ray supports no other backends.

    Examples
    --------
    ::

        from ray.util import collective
        from shmring.adapters import ray as shmring_ray

        shmring_ray.register_backend(actors)
        collective.create_collective_group(actors, len(actors), list(range(len(actors))), backend="SHMRING")
    """
    ray = need("ray", "ray", __name__)
    _register()
    ray.get([actor.__ray_call__.remote(_register) for actor in actors])


def _register(_: object = None) -> None:
    ray = need("ray", "ray", __name__)
    try:
        from ray.util.collective.backend_registry import register_collective_backend
        from ray.util.collective.collective import is_backend_available
    except ImportError as error:
        raise ImportError(
            f"ray {ray.__version__} has no register_collective_backend: pip install -U ray"
        ) from error
    from ._ray_group import Group

    if not is_backend_available(BACKEND):
        register_collective_backend(BACKEND, Group)


def _places(actors: Sequence[Any], timeout_s: float) -> list[tuple[str, str, int]]:
    """Return by rank (node, its address, a free port there)."""
    ray = need("ray", "ray", __name__)
    if not actors or len(set(actors)) < len(actors):
        raise ValueError(
            "there are no actors" if not actors else "an actor is named twice; it can be one rank"
        )
    calls = [actor.__ray_call__.remote(_place) for actor in actors]
    _, late = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    if late:
        ranks = [rank for rank, call in enumerate(calls) if call in late]
        raise shmring.Timeout(
            f"of {len(actors)} actors those for rank {', '.join(map(str, ranks))} did not answer within "
            f"{timeout_s:g} s: they are busy, or Ray has no free resources to start them (`ray status`)",
            rank=ranks[0],
        )
    return list(ray.get(calls))


def _place(_: object) -> tuple[str, str, int]:
    ray = need("ray", "ray", __name__)
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()


class _Call:
    """A call of an actor as a future. `cancel` also reaches a call that runs: it asks `_is_cancelled`."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref
        self._future = ref.future()
        self.add_done_callback, self.result = self._future.add_done_callback, self._future.result

    def cancel(self) -> None:
        need("ray", "ray", __name__).cancel(self._ref)


def _is_cancelled() -> bool:
    context = need("ray", "ray", __name__).get_runtime_context()
    try:
        return bool(context.is_canceled())
    except RuntimeError:  # asynchronous actors have no such flag
        return False


def _join(actor: object, meeting: shmring.World, rank: int, attribute: str, timeout_s: float | None) -> None:
    before = getattr(actor, attribute, None)
    if isinstance(before, shmring.Comm):
        before.close()
    comm = shmring.init(meeting, rank, timeout=timeout_s, check=check_wanted(_is_cancelled))
    setattr(actor, attribute, comm)
