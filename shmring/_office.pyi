"""A rank's mail to ranks of other hosts, as the cold paths see it."""

from collections.abc import Mapping
from socket import socket

OVER: int
LEAVING: int
MOST_NBYTES: int

class Office:
    """One rank's connections for mail, by the rank at the other end."""

    def __init__(self, lines: Mapping[int, socket], ring_nbytes: int, first_seq: int) -> None: ...
    def fileno(self) -> int:
        """A descriptor that is readable when something has come."""
    def say(self, what: int, body: bytes) -> None:
        """Tell everyone, as far as they are there."""
    def hear(self) -> tuple[int, bytes] | None:
        """Who has said that it is over, and why; None so far."""
    def await_news(self, within_s: float) -> None:
        """Return when something has come, or a little later."""
    def has_ended(self, rank: int) -> bool:
        """Whether nothing comes from a rank any more."""
    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it leaves."""
    def deliver(self, within_s: float, cut_s: float) -> None:
        """Wait until what was sent of messages has reached the hosts of those it is for, or cannot."""
    def close(self, within_s: float) -> None:
        """Send what was promised, and stop."""
    def disown(self) -> None:
        """In a forked child: all of it belongs to the parent."""
