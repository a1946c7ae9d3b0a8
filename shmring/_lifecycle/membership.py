"""Who goes on when a communicator is over: how those that are left come to agree on who they are.

Every rank that wants to go on says its *view*, whole, each time that it changes: who is out, as far as it
knows, and how far it has come. Views only shrink: whoever hears of one that is out leaves it out, too. Once
all that are in it have said the same view they begin a new communicator of it, say that they are *ready*,
and once all are, that it is *done*. Whoever hears that is done, too: all had been ready, and whoever has
moved on to a smaller view meanwhile turns back, as a rank that is done never says the smaller one. So no
death divides those that are left. After D. Skeen, "Nonblocking commit protocols", SIGMOD 1981.

It is given the Ballot through which views are sent and received.
"""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import Error, RankFailed

NBYTES = 640  # of a packed view; layout.h has room for as many

_OUT_NBYTES = 512
_HEAD = struct.Struct(f"<II{_OUT_NBYTES}s")
_MOST_INVITATION_NBYTES = NBYTES - _HEAD.size
_MOST_ATTEMPTS = 1 << 31
_GRACE_S = 1.0  # for one that a Timeout has named: it may come after all, once the others have
_AGAIN_S = 0.5  # a view that was lost on its way is said again


class Phase(enum.IntEnum):
    """How far a rank has come with its view."""

    AWAY = 0  # it does not try any more
    COMING = 1
    READY = 2
    DONE = 3


@dataclass(frozen=True)
class View:
    """What a rank says: who is out, bit by bit, in the how manieth attempt, and how far it is.

    `invitation` is how the others find the lowest rank of the view, which alone says one.
    """

    attempt: int = 0
    phase: Phase = Phase.AWAY
    out: int = 0
    invitation: str = ""

    def leaves_out(self, rank: int) -> bool:
        return bool(self.out >> rank & 1)

    def members(self, size: int) -> list[int]:
        return [rank for rank in range(size) if not self.leaves_out(rank)]

    def is_of_one_mind_with(self, other: View) -> bool:
        """Whether both are at the same attempt with the same ranks."""
        both_try = self.phase > Phase.AWAY and other.phase > Phase.AWAY
        return both_try and (self.attempt, self.out) == (other.attempt, other.out)

    def pack(self) -> bytes:
        invitation = self.invitation.encode()
        if len(invitation) > _MOST_INVITATION_NBYTES:
            raise Error(f"the address of a meeting is too long: {self.invitation!r}")
        head = _HEAD.pack(self.attempt, self.phase, self.out.to_bytes(_OUT_NBYTES, "little"))
        return (head + invitation).ljust(NBYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> View:
        attempt, phase, out = _HEAD.unpack_from(packed)
        if phase > Phase.DONE or attempt > _MOST_ATTEMPTS:
            raise Error(f"a rank that goes on is in phase {phase} of attempt {attempt}, which cannot be")
        invitation = packed[_HEAD.size :].rstrip(b"\0").decode(errors="replace")
        return cls(attempt, Phase(phase), int.from_bytes(out, "little"), invitation)


class Ballot(Protocol):
    """The ranks of the communicator that is over, and how one of them speaks to the others."""

    rank: int
    size: int

    def notify(self, view: View) -> None:
        """Say it to all others; it takes the place of what was said before."""

    def poll(self) -> None:
        """Take in what has been said: `view_of` and `has_gone` tell of it from then on."""

    def view_of(self, rank: int) -> View | None:
        """What a rank has said last; None: nothing."""

    def has_gone(self, rank: int) -> bool:
        """Whether a rank has ended, left, or cannot be reached any more: for good."""

    def pause(self) -> None:
        """Wait a little, for news."""


class Agreement:
    """One rank's part in it.

    `suspects` are ranks for which the others have waited in vain already: they are not waited for again.
    `timeout_s` is how long a rank that lives, but does not come, or does not go on, is waited for.
    `invite` gives the invitation that this rank says where it is the lowest.
    """

    def __init__(
        self,
        ranks: Ballot,
        timeout_s: float,
        invite: Callable[[View], str],
        suspects: frozenset[int] = frozenset(),
    ) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._invite = invite
        self._suspects = suspects
        self._others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        self.view = View()
        self.done: View | None = None  # a rank that is in this rank's view has said that it is done
        self._since = self._told = 0.0
        self._only_suspects_since: float | None = None

    def settle(self) -> View:
        """The view that all who are in it have said; or `done` is set: then there is nothing to begin."""
        if self.view.phase == Phase.AWAY:
            self._move(self._last_attempt() + 1, 0)
        while not self.done and not self._all_are_in(Phase.COMING):
            self._leave_out_the_late(Phase.COMING)
            self._pause()
            self.poll()
        return self.done or self.view

    def poll(self) -> bool:
        """Hear what the others say; whether something has changed by it. Raises where this rank is out."""
        attempt, out = self.view.attempt, self.view.out
        self._ranks.poll()
        for rank in self._others:
            if self.view.leaves_out(rank):
                continue
            has_gone = self._ranks.has_gone(rank)  # first: whoever leaves has said that it is done before
            theirs = self._ranks.view_of(rank)
            if theirs is not None and theirs.phase == Phase.DONE:
                if theirs.leaves_out(self._ranks.rank):
                    raise left_behind(self._ranks.rank)
                self.done = theirs
                return True
            if has_gone:
                out |= 1 << rank
            elif theirs is not None and theirs.phase > Phase.AWAY:
                attempt, out = max(attempt, theirs.attempt), out | theirs.out
        if out >> self._ranks.rank & 1:
            raise left_behind(self._ranks.rank)
        if (attempt, out) == (self.view.attempt, self.view.out):
            return False
        self._move(attempt, out)
        return True

    def commit(self) -> bool:
        """This rank has what it needs: wait until all have. False: some never will, the view has changed."""
        self._since, self._only_suspects_since = time.monotonic(), None  # what was begun took its time
        self._say(replace(self.view, phase=Phase.READY))
        while not self._all_are_in(Phase.READY):
            self._leave_out_the_late(Phase.READY)
            if self.poll():
                break
            self._pause()
        if self.done is None and self.view.phase != Phase.READY:
            return False
        if self.done is not None and not self.done.is_of_one_mind_with(self.view):
            return False
        self._say(replace(self.view, phase=Phase.DONE))
        return True

    def confirm(self) -> None:
        """Say what another has said, that it is done: it may have been killed before all had heard of it."""
        assert self.done is not None
        self._say(replace(self.done, phase=Phase.DONE, invitation=""))

    def try_again(self, late: int | None = None) -> None:
        """What was begun for this view has come to nothing; `late`: who was waited for in vain."""
        out = self.view.out | (1 << late if late is not None else 0)
        self._move(self.view.attempt + 1, out)

    def withdraw(self) -> None:
        """This rank does not try any more; it may begin anew."""
        if self.view.phase != Phase.DONE:
            self._say(replace(self.view, phase=Phase.AWAY, invitation=""))

    def _last_attempt(self) -> int:
        said = self._ranks.view_of(self._ranks.rank)
        return said.attempt if said is not None else 0

    def _move(self, attempt: int, out: int) -> None:
        self._since, self._only_suspects_since = time.monotonic(), None
        view = View(attempt, Phase.COMING, out)
        if view.members(self._ranks.size)[0] == self._ranks.rank:
            view = replace(view, invitation=self._invite(view))
        self._say(view)

    def _say(self, view: View) -> None:
        self.view = view
        self._told = time.monotonic()
        self._ranks.notify(view)

    def _pause(self) -> None:
        self._ranks.pause()
        if time.monotonic() - self._told > _AGAIN_S:
            self._say(self.view)

    def _all_are_in(self, phase: Phase) -> bool:
        return not self._missing(phase)

    def _missing(self, phase: Phase) -> list[int]:
        missing = []
        for rank in self._others:
            if not self.view.leaves_out(rank):
                theirs = self._ranks.view_of(rank)
                if theirs is None or theirs.phase < phase or not theirs.is_of_one_mind_with(self.view):
                    missing.append(rank)
        return missing

    def _is_ahead(self, rank: int) -> bool:
        """Whether a rank has said what this one will take over when it looks next."""
        theirs = self._ranks.view_of(rank)
        if theirs is None or theirs.phase == Phase.AWAY:
            return False
        return theirs.attempt > self.view.attempt or bool(theirs.out & ~self.view.out)

    def _leave_out_the_late(self, phase: Phase) -> None:
        # Who has moved on since this rank looked is not late: it has given up the same ones a moment sooner.
        now, missing = time.monotonic(), [rank for rank in self._missing(phase) if not self._is_ahead(rank)]
        if not missing or not self._suspects.issuperset(missing):
            self._only_suspects_since = None
        elif self._only_suspects_since is None:
            self._only_suspects_since = now
        has_waited = self._only_suspects_since is not None and now - self._only_suspects_since > _GRACE_S
        if missing and (has_waited or now - self._since > self._timeout_s):
            self._move(self.view.attempt + 1, self.view.out | sum(1 << rank for rank in missing))


def left_behind(rank: int) -> RankFailed:
    return RankFailed(
        f"the others have gone on without rank {rank}, which did not come in time or could not be reached: "
        "join a new world",
        rank=rank,
        cause="left behind",
    )
