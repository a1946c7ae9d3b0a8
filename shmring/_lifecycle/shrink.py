"""Make a new communicator of the survivors of a failed one.

`shrink` takes the parts of the failed communicator.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .._bootstrap.world import World
from .._system.deadline import Deadline
from ..errors import Error, RankFailed, Timeout
from .membership import Agreement, View, left_behind
from .startup import CommParts, join_and_begin

if TYPE_CHECKING:
    from .._bootstrap.fd_passing import LocalSockets
    from .._bootstrap.host_map import Place
    from .._config.settings import Settings
    from .._engine.engine import Engine
    from .internode import InterNodeLinks

_MOST_ATTEMPTS = 8  # attempts to start with the same ranks
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01


class FailedComm(NamedTuple):
    """Parts of a failed communicator, and the ranks that its error names as late."""

    engine: Engine
    place: Place | LocalSockets
    internode: InterNodeLinks | None
    settings: Settings
    suspects: frozenset[int]


class OldRanks:
    """The ranks of a communicator that others may replace; implements `membership.Ballot`."""

    def __init__(self, engine: Engine, place: Place | LocalSockets, internode: InterNodeLinks | None) -> None:
        self._engine, self._internode = engine, internode
        self.rank, self.size = place.rank, place.size
        local_ranks = place.ranks_of_host[place.host]
        self._local = {rank: at for at, rank in enumerate(local_ranks)}
        self._pause_s = _SHORTEST_PAUSE_S

    def is_local(self, rank: int) -> bool:
        return rank in self._local

    def notify(self, view: View) -> None:
        packed = view.pack()
        self._engine.publish_view(packed)
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
    """Meetings of the survivors: this rank listens if it is the lowest, else it connects to the lowest."""

    def __init__(self, failed: FailedComm, ranks: OldRanks, timeout_s: float) -> None:
        self._failed = failed
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None

    def invite(self, view: View) -> str:
        """Return the id of a new world, and its address if the members are on several hosts."""
        self.close()
        if all(self._ranks.is_local(rank) for rank in view.members(self._ranks.size)):
            return secrets.token_hex(16)
        assert self._failed.internode is not None
        self._listener, (world_id, address) = self._failed.internode.listen(self._failed.settings.ports)
        return f"{world_id} {address}"

    def begin(self, view: View, check: Callable[[], None]) -> CommParts:
        """Collective over the members of the view: return the parts of their communicator."""
        failed, members = self._failed, view.members(self._ranks.size)
        lowest = self._ranks.view_of(members[0])
        if lowest is None or not lowest.invitation:
            raise RankFailed("the lowest of the survivors has given up", rank=0)
        world_id, _, address = lowest.invitation.partition(" ")
        if address and failed.internode is not None:
            address = failed.internode.address_here(address)
        key = failed.engine.key() if failed.internode is None else failed.internode.key
        listener, self._listener = self._listener, None
        parts = None
        try:
            with listener or contextlib.nullcontext():
                parts = join_and_begin(
                    World(world_id, key, len(members), address or None),
                    members.index(self._ranks.rank),
                    failed.settings,
                    failed.engine.timeout_s,
                    deadline=Deadline(self._timeout_s),
                    check=check,
                    listener=listener,
                )
                return parts
        except BaseException:
            if parts is not None:
                parts.engine.abandon(parts)
            raise

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def shrink(failed: FailedComm, timeout_s: float) -> tuple[CommParts, tuple[int, ...]]:
    """Collective over the survivors: return the parts of their communicator, and their old ranks.

    `timeout_s` limits the wait for a live rank, and starts again whenever the view loses a rank.
    """
    ranks = OldRanks(failed.engine, failed.place, failed.internode)
    meetings = _Meetings(failed, ranks, timeout_s)
    agreement = Agreement(ranks, timeout_s, meetings.invite, failed.suspects)
    prepared: tuple[View, CommParts] | None = None
    attempts: collections.Counter[int] = collections.Counter()
    try:
        while True:
            view = agreement.settle()
            if agreement.done is None:
                if prepared is not None:  # the view has changed: no rank will report these parts done
                    prepared[1].engine.abandon(prepared[1])
                    prepared = None
                attempts[view.out] += 1
                parts = _begin(meetings, agreement, ranks.size)
                if parts is None and attempts[view.out] < _MOST_ATTEMPTS:
                    continue
                if parts is None:
                    raise Error(f"the survivors could not begin a communicator in {_MOST_ATTEMPTS} attempts")
                prepared = view, parts
                if not agreement.commit():
                    continue
            elif prepared is None or not prepared[0].matches(agreement.done):
                raise left_behind(ranks.rank)
            else:
                agreement.confirm()
            members = tuple(view.members(ranks.size))
            meetings.close()
            # After this line no signal handler runs before the caller has the result.
            result, prepared = prepared[1], None
            return result, members
    except BaseException:
        try:
            agreement.withdraw()
        finally:
            try:
                meetings.close()
            finally:
                if prepared is not None:
                    prepared[1].engine.abandon(prepared[1])
        raise


def _begin(meetings: _Meetings, agreement: Agreement, size: int) -> CommParts | None:
    """Start a communicator of the view. Return None if that failed; the agreement has then moved on."""
    view = agreement.view

    def check() -> None:
        if agreement.poll():  # the meeting reports this error to the ranks in it
            gone = [at for at, rank in enumerate(view.members(size)) if agreement.view.leaves_out(rank)]
            text = "a survivor has failed while the survivors met"
            raise RankFailed(text, rank=gone[0] if gone else None)

    try:
        return meetings.begin(view, check)
    except (RankFailed, Timeout) as error:
        if agreement.done is None and agreement.view == view:
            late = error.rank if isinstance(error, Timeout) else None
            agreement.try_again(None if late is None else view.members(size)[late])
        return None
