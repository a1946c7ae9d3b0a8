"""From a communicator that is over to a new one of the ranks that are left.

It is handed a communicator's parts.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .._bootstrap.join import join
from .._bootstrap.world import World
from ..errors import Error, RankFailed, Timeout
from .membership import Agreement, View, left_behind
from .startup import CommParts, begin_where_met

if TYPE_CHECKING:
    from .._bootstrap.fd_passing import Links
    from .._bootstrap.node_map import Place
    from .._config.settings import Settings
    from .._engine.engine import Engine
    from .internode import InterNodeLinks

_MOST_ATTEMPTS = 8  # to begin with the same ranks
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01

Drop = Callable[[CommParts], None]


class FailedComm(NamedTuple):
    """What there is of a communicator that is over, and how its error names who was late, if it does."""

    engine: Engine
    place: Place | Links
    internode: InterNodeLinks | None
    settings: Settings
    suspects: frozenset[int]


class _Survivors:
    """The ranks of the communicator that is over, as `membership.Ballot` has them."""

    def __init__(self, failed: FailedComm) -> None:
        self._engine, self._internode = failed.engine, failed.internode
        self.rank, self.size = failed.place.rank, failed.place.size
        local_ranks = failed.place.ranks_of_node[failed.place.node]
        self._local = {rank: at for at, rank in enumerate(local_ranks)}
        self._pause_s = _SHORTEST_PAUSE_S

    def is_local(self, rank: int) -> bool:
        return rank in self._local

    def notify(self, view: View) -> None:
        packed = view.pack()
        self._engine.notify_view(packed)
        if self._internode is not None:
            self._internode.notify_view(packed)
        self._pause_s = _SHORTEST_PAUSE_S

    def poll(self) -> None:
        if self._internode is not None:
            self._internode.poll_views()

    def view_of(self, rank: int) -> View | None:
        if rank in self._local:
            packed = self._engine.view_of(self._local[rank])
        else:
            assert self._internode is not None
            packed = self._internode.view_of(rank)
        return None if packed is None else View.unpack(packed)

    def has_gone(self, rank: int) -> bool:
        if rank in self._local:
            return self._engine.has_gone(self._local[rank])
        assert self._internode is not None
        return self._internode.has_gone(rank)

    def pause(self) -> None:
        if self._internode is not None:
            self._internode.await_news(self._pause_s)
        else:
            time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class _Meetings:
    """Where this rank receives the others when it is the lowest, and how it comes to whoever is."""

    def __init__(self, failed: FailedComm, ranks: _Survivors, timeout_s: float) -> None:
        self._failed = failed
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None

    def invite(self, view: View) -> str:
        """The id of a fresh world, and where it meets if that is not within one host."""
        self.close()
        if all(self._ranks.is_local(rank) for rank in view.members(self._ranks.size)):
            return secrets.token_hex(16)
        assert self._failed.internode is not None
        self._listener, (world_id, address) = self._failed.internode.listen(self._failed.settings.ports)
        return f"{world_id} {address}"

    def begin(self, view: View, check: Callable[[], None]) -> CommParts:
        """Collective over the ranks of the view: what their communicator is made of."""
        failed, members = self._failed, view.members(self._ranks.size)
        lowest = self._ranks.view_of(members[0])
        if lowest is None or not lowest.invitation:
            raise RankFailed("the lowest of the ranks that are left has given up", rank=0)
        world_id, _, address = lowest.invitation.partition(" ")
        key = failed.engine.key() if failed.internode is None else failed.internode.key
        listener, self._listener = self._listener, None
        deadline = time.monotonic() + self._timeout_s
        with listener or contextlib.nullcontext():
            meeting = join(
                World(world_id, key, len(members), address or None),
                members.index(self._ranks.rank),
                timeout_s=self._timeout_s,
                node=failed.settings.node,
                check=check,
                listener=listener,
            )
        start_s = max(deadline - time.monotonic(), 0.001)
        return begin_where_met(meeting, failed.settings, failed.engine.timeout_s, key=key, start_s=start_s)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def shrink(failed: FailedComm, timeout_s: float, drop: Drop) -> tuple[CommParts, tuple[int, ...]]:
    """Collective over the ranks that are left: what their communicator is made of, and who they are.

    `timeout_s` is how long a rank that lives is waited for, again whenever those that are left have become
    fewer; `drop` is given what was made in vain.
    """
    ranks = _Survivors(failed)
    meetings = _Meetings(failed, ranks, timeout_s)
    agreement = Agreement(ranks, timeout_s, meetings.invite, failed.suspects)
    prepared: tuple[View, CommParts] | None = None
    attempts: collections.Counter[int] = collections.Counter()
    try:
        while True:
            view = agreement.settle()
            if agreement.done is None:
                _drop(prepared, drop)  # all have moved on: nobody will be done with that
                prepared = None
                attempts[view.out] += 1
                parts = _begin(meetings, agreement, ranks.size)
                if parts is None and attempts[view.out] < _MOST_ATTEMPTS:
                    continue
                if parts is None:
                    raise Error(f"those that are left have tried {_MOST_ATTEMPTS} times to begin, in vain")
                prepared = view, parts
                if not agreement.commit():
                    continue
            elif prepared is None or not prepared[0].is_of_one_mind_with(agreement.done):
                raise left_behind(ranks.rank)
            else:
                agreement.confirm()
            members = tuple(view.members(ranks.size))
            meetings.close()
            result, prepared = (
                prepared[1],
                None,
            )  # behind this no signal handler runs before the caller has it
            return result, members
    except BaseException:
        try:
            agreement.withdraw()
        finally:
            meetings.close()
            _drop(prepared, drop)
        raise


def _drop(prepared: tuple[View, CommParts] | None, drop: Drop) -> None:
    if prepared is not None:
        drop(prepared[1])


def _begin(meetings: _Meetings, agreement: Agreement, size: int) -> CommParts | None:
    """None: it came to nothing, and the agreement has moved on."""
    view = agreement.view

    def check() -> None:
        if agreement.poll():  # what is raised here the others are told, as far as they are in the meeting
            gone = [at for at, rank in enumerate(view.members(size)) if agreement.view.leaves_out(rank)]
            text = "the ranks that are left have become fewer while they met"
            raise RankFailed(text, rank=gone[0] if gone else None)

    try:
        return meetings.begin(view, check)
    except (RankFailed, Timeout) as error:
        if agreement.done is None and agreement.view == view:
            late = error.rank if isinstance(error, Timeout) else None
            agreement.try_again(None if late is None else view.members(size)[late])
        return None
