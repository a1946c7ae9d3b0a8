"""A rank's channels to ranks of other hosts: the Python interface, for cold paths."""

from collections.abc import Mapping
from socket import socket
from typing import Self

OVER: int
LEAVING: int
MOST_NBYTES: int

class Channels:
    """One rank's channels, by the rank at the other end."""

    def __new__(cls, socks: Mapping[int, socket], ring_nbytes: int, first_seq: int) -> Self: ...
    def fileno(self) -> int:
        """Return a descriptor that is readable when data have arrived."""
    def notify(self, what: int, body: bytes) -> None:
        """Notify all reachable ranks."""
    def abort_reason(self) -> tuple[int, bytes] | None:
        """Return (rank, reason) of the abort that another rank has sent, or None."""
    def notify_call(self, seq: int, fingerprint: int, count: int) -> None:
        """Notify all ranks of the collective in which this rank waits."""
    def call_of(self, rank: int) -> tuple[int, int, int] | None:
        """Return (seq, fingerprint, count) of the collective that a rank last said it waits in, or None."""
    def other_call(self, seq: int, fingerprint: int) -> int | None:
        """Return a rank that reported to wait in a different collective with the same number, or None."""
    def await_news(self, within_s: float) -> None:
        """Return when data have arrived, or after `within_s`."""
    def notify_view(self, view: bytes) -> None:
        """Send this rank's view to all others. See membership."""

    def view_of(self, rank: int) -> bytes | None:
        """Return the last view of a rank; None if it has sent none."""

    def poll(self, cut_s: float) -> None:
        """Receive notifications, no messages. cut_s: a rank that does not answer for this long is gone."""

    def has_ended(self, rank: int) -> bool:
        """True if no more data will come from a rank."""
    def has_left(self, rank: int) -> bool:
        """True if a rank has notified that it leaves."""
    def deliver(self, within_s: float, cut_s: float, unless_over: bool = True) -> None:
        """Wait until sent messages and the last view have reached the hosts of their receivers."""
    def close(self, within_s: float) -> None:
        """Send pending notifications and stop."""
    def disown(self) -> None:
        """Close the inherited descriptors in a forked child."""
