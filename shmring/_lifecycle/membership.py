"""Agreement of the survivors of a failed communicator on the members of the next one.

Every rank that wants to continue sends its *view* to all others each time that the view changes: the ranks
that it leaves out, and its phase. A view only loses members: a rank that receives a view also leaves out the
ranks that are out of it. Once all members of a view have sent the same view, they start a new communicator
and report that they are *ready*. Once all are ready, they report *done*. A rank that receives done is done
too: all members were ready. If it has moved on to a smaller view meanwhile, it returns to the view that is
done, and a rank that is done never sends the smaller one. Therefore no death splits the survivors. After
D. Skeen, "Nonblocking commit protocols", SIGMOD 1981.

`grow` uses the same views in its live communicator, to agree that all ranks go on with the larger one or none
does (`all_go_on`). An Agreement sends and receives views through a Ballot.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from .._system.deadline import Clock
from ..errors import Error, RankFailed

NBYTES = 640  # of a packed view; layout.h reserves as many

_OUT_NBYTES = 512
_HEAD = struct.Struct(f"<II{_OUT_NBYTES}s")
_MOST_INVITATION_NBYTES = NBYTES - _HEAD.size
_MOST_ATTEMPTS = 1 << 31
_GRACE_S = 1.0  # for a rank that a Timeout named: it may still come once the others have
_AGAIN_S = 0.5  # interval of resending the view, which may have been lost


class Phase(enum.IntEnum):
    """Progress of a rank with its view."""

    AWAY = 0  # the rank does not take part
    COMING = 1
    READY = 2
    DONE = 3


@dataclass(frozen=True)
class View:
    """Message of a rank: the ranks left out (one bit each), the number of the attempt, and the phase.

    `invitation` tells the others how to reach the lowest rank of the view. Only that rank sends one.
    """

    attempt: int = 0
    phase: Phase = Phase.AWAY
    out: int = 0
    invitation: str = ""

    def leaves_out(self, rank: int) -> bool:
        return bool(self.out >> rank & 1)

    def members(self, size: int) -> list[int]:
        return [rank for rank in range(size) if not self.leaves_out(rank)]

    def matches(self, other: View) -> bool:
        """True if both are in the same attempt with the same ranks."""
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
            raise Error(f"a survivor reports phase {phase} of attempt {attempt}, which do not exist")
        invitation = packed[_HEAD.size :].rstrip(b"\0").decode(errors="replace")
        return cls(attempt, Phase(phase), int.from_bytes(out, "little"), invitation)


class Ballot(Protocol):
    """The ranks of a communicator, and the exchange of views between them."""

    rank: int
    size: int

    def notify(self, view: View) -> None:
        """Send the view to all others. It replaces the previous one."""

    def poll(self) -> None:
        """Receive the others' views. `view_of` and `has_gone` return what was received."""

    def view_of(self, rank: int) -> View | None:
        """Return the last view of a rank; None if it has sent none."""

    def has_gone(self, rank: int) -> bool:
        """True if a rank has ended, left, or cannot be reached any more. It never becomes False again."""

    def pause(self) -> None:
        """Wait briefly for news."""


class Agreement:
    """One rank's part in the agreement.

    `suspects` are ranks that a Timeout has already named: the others wait for them only briefly.
    `timeout_s` limits the wait for a live rank that does not come or does not continue. `invite` returns the
    invitation that this rank sends if it is the lowest.
    """

    def __init__(
        self,
        ballot: Ballot,
        timeout_s: float,
        invite: Callable[[View], str],
        suspects: frozenset[int] = frozenset(),
    ) -> None:
        self._ballot = ballot
        self._timeout_s = timeout_s
        self._invite = invite
        self._suspects = suspects
        self._clock = Clock()
        self._others = [rank for rank in range(ballot.size) if rank != ballot.rank]
        self.view = View()
        self.done: View | None = None  # the view of a member that reported done
        self._since = self._sent_s = 0.0
        self._only_suspects_since: float | None = None

    def settle(self) -> View:
        """Return the view that all its members have sent. If `done` is set, there is nothing to start."""
        if self.view.phase == Phase.AWAY:
            self._move(self._last_attempt() + 1, 0)
        while not self.done and not self._all_are_in(Phase.COMING):
            self._leave_out_the_late(Phase.COMING)
            self._pause()
            self.poll()
        return self.done or self.view

    def poll(self) -> bool:
        """Receive the others' views. Return True if that changed anything. Raise if this rank is left out."""
        attempt, out = self.view.attempt, self.view.out
        self._ballot.poll()
        for rank in self._others:
            if self.view.leaves_out(rank):
                continue
            has_gone = self._ballot.has_gone(rank)  # before view_of: done is reported before leaving
            theirs = self._ballot.view_of(rank)
            if theirs is not None and theirs.phase == Phase.DONE:
                if theirs.leaves_out(self._ballot.rank):
                    raise left_behind(self._ballot.rank)
                self.done = theirs
                return True
            if has_gone:
                out |= 1 << rank
            elif theirs is not None and theirs.phase > Phase.AWAY:
                attempt, out = max(attempt, theirs.attempt), out | theirs.out
        if out >> self._ballot.rank & 1:
            raise left_behind(self._ballot.rank)
        if (attempt, out) == (self.view.attempt, self.view.out):
            return False
        self._move(attempt, out)
        return True

    def commit(self) -> bool:
        """Report ready and wait until all members are. Return False if the view changed instead."""
        # Starting the communicator took time.
        self._since, self._only_suspects_since = self._clock.now_s(), None
        self._send(replace(self.view, phase=Phase.READY))
        while not self._all_are_in(Phase.READY):
            self._leave_out_the_late(Phase.READY)
            if self.poll():
                break
            self._pause()
        if self.done is None and self.view.phase != Phase.READY:
            return False
        if self.done is not None and not self.done.matches(self.view):
            return False
        self._send(replace(self.view, phase=Phase.DONE))
        return True

    def all_go_on(self, is_over: Callable[[], bool]) -> bool:
        """Return True on all ranks if all have called this, else False on all survivors.

        The communicator is live; `is_over` returns whether it has ended since. A rank that has not reported
        ready can go back at once: then no rank is done. A ready rank cannot know that. It waits until another
        rank has gone back, or all survivors know of the same deaths. It waits for a live rank until the
        timeout, and then leaves it out.
        """
        is_ready = False
        try:
            self._move(self._last_attempt() + 1, 0)
            attempt = self.view.attempt
            while not self.done:
                goes_back = not is_ready and (self.view.out != 0 or is_over())
                # A rank that has gone back may have begun to shrink: then its attempt is another one.
                if goes_back or self._one_is_away() or (self.view.attempt > attempt and not self.view.out):
                    self.withdraw()
                    return False
                if self._all_are_in(self.view.phase):
                    if self.view.out:
                        self.withdraw()
                        return False
                    if is_ready:
                        self._send(replace(self.view, phase=Phase.DONE))
                        return True
                    is_ready = True
                    self._since = self._clock.now_s()
                    self._send(replace(self.view, phase=Phase.READY))
                self._leave_out_the_late(self.view.phase)
                self._pause()
                self.poll()
        except BaseException:
            if not is_ready:  # else the others may go on with this rank: they will see that it has ended
                self.withdraw()
            raise
        self.confirm()
        return True

    def _one_is_away(self) -> bool:
        """Return whether another rank has taken part, and has withdrawn."""
        views = [self._ballot.view_of(rank) for rank in self._others if not self.view.leaves_out(rank)]
        return any(view is not None and view.phase == Phase.AWAY and view.attempt > 0 for view in views)

    def confirm(self) -> None:
        """Repeat another rank's done: that rank may have been killed before all received it."""
        assert self.done is not None
        self._send(replace(self.done, phase=Phase.DONE, invitation=""))

    def try_again(self, late: int | None = None) -> None:
        """Begin a new attempt after a failed one. `late`: the rank that timed out, which is left out."""
        out = self.view.out | (1 << late if late is not None else 0)
        self._move(self.view.attempt + 1, out)

    def withdraw(self) -> None:
        """Stop taking part. The rank may start again later."""
        if self.view.phase != Phase.DONE:
            self._send(replace(self.view, phase=Phase.AWAY, invitation=""))

    def _last_attempt(self) -> int:
        own = self._ballot.view_of(self._ballot.rank)
        return own.attempt if own is not None else 0

    def _move(self, attempt: int, out: int) -> None:
        self._since, self._only_suspects_since = self._clock.now_s(), None
        view = View(attempt, Phase.COMING, out)
        if view.members(self._ballot.size)[0] == self._ballot.rank:
            view = replace(view, invitation=self._invite(view))
        self._send(view)

    def _send(self, view: View) -> None:
        self.view = view
        self._sent_s = self._clock.now_s()
        self._ballot.notify(view)

    def _pause(self) -> None:
        self._ballot.pause()
        if self._clock.now_s() - self._sent_s > _AGAIN_S:
            self._send(self.view)

    def _all_are_in(self, phase: Phase) -> bool:
        return not self._missing(phase)

    def _missing(self, phase: Phase) -> list[int]:
        missing = []
        for rank in self._others:
            if not self.view.leaves_out(rank):
                theirs = self._ballot.view_of(rank)
                if theirs is None or theirs.phase < phase or not theirs.matches(self.view):
                    missing.append(rank)
        return missing

    def _is_ahead(self, rank: int) -> bool:
        """True if this rank will adopt changes from that rank's view at the next poll."""
        theirs = self._ballot.view_of(rank)
        if theirs is None or theirs.phase == Phase.AWAY:
            return False
        return theirs.attempt > self.view.attempt or bool(theirs.out & ~self.view.out)

    def _leave_out_the_late(self, phase: Phase) -> None:
        # A rank that is ahead is not late: it has left out the same ranks a moment sooner.
        now = self._clock.now_s()
        missing = [rank for rank in self._missing(phase) if not self._is_ahead(rank)]
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
