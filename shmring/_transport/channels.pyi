"""A rank's channels to ranks of other hosts, as the cold paths see it."""

from collections.abc import Mapping
from socket import socket
from typing import Self

OVER: int
LEAVING: int
MOST_NBYTES: int

class Channels:
    """One rank's control channels, by the rank at the other end."""

    def __new__(cls, socks: Mapping[int, socket], ring_nbytes: int, first_seq: int) -> Self: ...
    def fileno(self) -> int:
        """A descriptor that is readable when something has come."""
    def notify(self, what: int, body: bytes) -> None:
        """Tell everyone, as far as they are there."""
    def abort_reason(self) -> tuple[int, bytes] | None:
        """Who has said that it is over, and why; None so far."""
    def notify_call(self, seq: int, fingerprint: int, count: int) -> None:
        """Tell everyone in which collective this rank waits."""
    def call_of(self, rank: int) -> tuple[int, int, int] | None:
        """(seq, fingerprint, count) of the collective in which a rank has said last that it waits."""
    def other_call(self, seq: int, fingerprint: int) -> int | None:
        """A rank that has said that it waits in the collective of that number, but in another one."""
    def await_news(self, within_s: float) -> None:
        """Return when something has come, or a little later."""
    def notify_view(self, view: bytes) -> None:
        """Say to all others which of them this rank goes on with. See membership."""

    def view_of(self, rank: int) -> bytes | None:
        """What a rank has said so last; None: nothing."""

    def poll(self, cut_s: float) -> None:
        """Take in what has come, and nothing of messages. cut_s: who does not answer for so long is gone."""

    def has_ended(self, rank: int) -> bool:
        """Whether nothing comes from a rank any more."""
    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it leaves."""
    def deliver(self, within_s: float, cut_s: float, unless_over: bool = True) -> None:
        """Wait until what was sent of messages has reached the hosts of those it is for, or cannot."""
    def close(self, within_s: float) -> None:
        """Send what was promised, and stop."""
    def disown(self) -> None:
        """In a forked child: all of it belongs to the parent."""
