"""Make a new communicator of the ranks of one, and of new ranks.

Rank 0 makes a world for all of them and passes it to the new ranks. All then join it as any world, so the new
ranks need nothing but `init`. The old communicator stays open until all have met: through it the old ranks
see a death at once, and agree whether all have met. If not, they go on with it, or shrink it. The new ranks
learn the result in a barrier of the larger communicator.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from .._arguments import integer
from .._bootstrap.join import World, check_nprocs, listen
from .._config.settings import parse_address
from .._system.deadline import Deadline
from ..errors import Error, RankFailed, agreed
from .groups import raise_soon
from .membership import Agreement, View
from .shrink import OldRanks
from .startup import CommParts, join_and_begin

if TYPE_CHECKING:
    from .._bootstrap.fd_passing import LocalSockets
    from .._bootstrap.host_map import Place
    from .._comm.comm import Comm
    from .._config.settings import Settings
    from .._engine.engine import Engine
    from .internode import InterNodeLinks


class Wanted(NamedTuple):
    """Arguments of `Comm.grow`, and the epoch of the new communicator."""

    nranks: int
    invite: Callable[[World, int], object]
    address: str | None
    epoch: int


class _Meeting(NamedTuple):
    """Rank 0's world, and its listener."""

    world: World
    listener: socket.socket


@functools.cache
def _listeners() -> weakref.WeakSet[socket.socket]:
    """Return the set of rank 0's listeners, which are closed in forked children.

    If invite forks, the new rank has a copy of the listener, which would keep the meeting open after rank 0
    has given up.
    """
    listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def close_all() -> None:
        for listener in list(listeners):
            listener.close()

    os.register_at_fork(after_in_child=close_all)
    return listeners


def check_arguments(count: SupportsIndex, address: str | None, size: int) -> int:
    """Return the number of new ranks."""
    number = integer("count", count)
    if number < 1:
        raise ValueError(f"count is {number}; it must be at least 1: shrink() makes a smaller communicator")
    check_nprocs(size + number)
    if address is not None:
        parse_address("address", address)
    return number


def grow(
    comm: Comm,
    engine: Engine,
    place: Place | LocalSockets,
    internode: InterNodeLinks | None,
    settings: Settings,
    wanted: Wanted,
    timeout_s: float,
) -> CommParts:
    """Collective over the old ranks: return the parts of the new communicator.

    If the ranks cannot meet, all raise. The old communicator is then usable unless one of its ranks ended.
    """
    deadline = Deadline(timeout_s)
    key = engine.key() if internode is None else internode.key
    meeting: _Meeting | None = None
    answer: tuple[str, str | None] | str | None = None
    error: Exception | None = None
    parts = None
    try:
        if comm.rank == 0:
            try:
                if not callable(wanted.invite):  # here, so that all ranks raise: the others do not use it
                    raise TypeError(
                        f"invite is {wanted.invite!r:.60}; give a function that passes a World and a rank to "
                        "a new rank"
                    )
                meeting = _meeting(comm.size, key, internode, settings, wanted)
                for rank in range(comm.size, meeting.world.nprocs):
                    wanted.invite(meeting.world, rank)
                answer = meeting.world.id, meeting.world.address
            except Exception as raised:
                error, answer = agreed(raised), _described(raised)
        # The key is not sent: all ranks have it.
        answers = comm.all_gather_object(answer, timeout=timeout_s)
        world = _world_of(answers[0], key, comm, internode, wanted, error)
        try:
            parts = _meet(comm, engine, settings, world, meeting, deadline)
        except Exception as raised:
            error = agreed(raised)
        # A rank that has met must not go on if another has not, or their communicators would differ. A rank
        # that failed at once waits here for those that wait for it until their deadline. The limit
        # is 2 * timeout_s, not the time left: an error message may state it.
        failure = None if error is None else _described(error)
        failures = comm.all_gather_object(failure, timeout=2 * timeout_s)
        if parts is None or any(failures):
            raise _with_reasons(error, failures, comm.rank)
        # If a rank ends in that call, it may complete on some ranks and raise on others. So they agree once
        # more, in a way that no death divides.
        agreement = Agreement(OldRanks(engine, place, internode), timeout_s, _no_invitation)
        if not agreement.all_go_on(functools.partial(_has_ended, engine)):
            raise_soon(engine.poll)
            # A living rank came too late. The agreement cannot be repeated, so this communicator ends.
            engine.abort("a rank was late while the larger communicator began")
            raise_soon(engine.poll)
            raise Error("a rank was late while the larger communicator began")
        if internode is not None:
            internode.deliver_view()
        return parts
    except BaseException:
        if parts is not None:
            parts.engine.abandon(parts)
        raise
    finally:
        if meeting is not None:
            meeting.listener.close()


def _has_ended(engine: Engine) -> bool:
    try:
        engine.poll()
    except Error:
        return True
    return False


def _no_invitation(view: View) -> str:
    return ""


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _with_reasons(error: Exception | None, failures: list[str | None], rank: int) -> Exception:
    """Return this rank's error, with a note for each other rank that could not join."""
    if error is None:
        error = Error("another rank could not join the larger communicator")
    for other, failure in enumerate(failures):
        if failure is not None and other != rank:
            error.add_note(f"rank {other} could not join: {failure}")
    return error


def _meeting(
    size: int, key: bytes, internode: InterNodeLinks | None, settings: Settings, wanted: Wanted
) -> _Meeting:
    """Listen for the other ranks, before any is invited: a new rank that finds no listener is too late."""
    nprocs = size + wanted.nranks
    if internode is not None and wanted.address is None:
        listener, (world_id, address) = internode.listen(settings.ports)
        world = World(world_id, key, nprocs, address, wanted.epoch)
    else:
        world = World(secrets.token_hex(16), key, nprocs, wanted.address, wanted.epoch)
        listener = listen(world)
    _listeners().add(listener)
    return _Meeting(world, listener)


def _world_of(
    answer: Any,
    key: bytes,
    comm: Comm,
    internode: InterNodeLinks | None,
    wanted: Wanted,
    error: Exception | None,
) -> World:
    """Return the world that rank 0 has announced; raise on all ranks if it could not invite others."""
    if error is not None:
        raise error
    if isinstance(answer, str):
        raise Error(f"rank 0 could not invite the new ranks: {answer}", rank=0)
    world_id, address = answer
    if internode is not None:
        address = internode.address_here(address)
    return World(world_id, key, comm.size + wanted.nranks, address, wanted.epoch)


def _meet(
    comm: Comm,
    engine: Engine,
    settings: Settings,
    world: World,
    meeting: _Meeting | None,
    deadline: Deadline,
) -> CommParts:
    listener = None if meeting is None else meeting.listener
    try:
        return join_and_begin(
            world,
            comm.rank,
            settings,
            engine.timeout_s,
            deadline=deadline,
            check=engine.poll,
            listener=listener,
        )
    except RankFailed as error:
        if error.rank is not None and error.rank < comm.size:
            raise_soon(engine.poll)  # as the old communicator's error, so that all its ranks learn of it
        raise
