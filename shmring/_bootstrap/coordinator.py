"""The coordinator, rank 0, and its TCP connections to all other ranks: agreement on errors during the start.

A rank sends its error to rank 0, which sends it to all ranks. So every rank soon raises the same error.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator, Mapping

from .._system.deadline import Deadline
from ..errors import WAIT_LONGER, Error, Timeout
from . import handshake
from .acceptor import ended
from .framed_socket import POLL_S, FramedSocket

_VERDICT_S = 0.5  # a rank waits this long for rank 0's answer to its own error


class Coordinator:
    """One rank's part in the agreement."""

    def __init__(self, rank: int, size: int, socks: Mapping[int, FramedSocket]) -> None:
        self._rank = rank
        self._size = size
        self._socks = dict(socks)
        self._rank_of = {sock.fileno(): rank for rank, sock in self._socks.items()}
        self._ready: set[int] = set()  # ranks whose READY has arrived, possibly early
        self._verdict: BaseException | None = None  # the error that all ranks raise
        self._poll = select.poll()
        for fd in self._rank_of:
            self._poll.register(fd, select.POLLIN)

    def check(self) -> None:
        """Raise the error that another rank has sent, or RankFailed if a rank has ended. Never waits."""
        self._receive(0.0)

    def all_ready(self, *, deadline: Deadline) -> None:
        """Block until every rank has called it."""
        with self.together():
            if self._rank == 0:
                # A little longer: at this deadline a late rank may send the error that explains its delay.
                self._await_ready(deadline.later(_VERDICT_S / 2))
            else:
                self._send(0, handshake.pack_frame(handshake.READY))
                self._await_ready(deadline.later(2 * _VERDICT_S))
            self._ready.clear()
            if self._rank == 0:
                for rank in self._socks:
                    self._send(rank, handshake.pack_frame(handshake.READY))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make all ranks raise an error that is raised in this block on any rank, at their next check."""
        try:
            yield
        except Error as error:
            verdict = self._give_up(error)
            if verdict is error:
                raise
            raise verdict from error
        except BaseException as error:  # such as KeyboardInterrupt: this rank raises it unchanged
            self._give_up(error)
            raise

    def close(self) -> None:
        """Close the sockets; a second call does nothing."""
        for sock in self._socks.values():
            sock.close()
        self._socks.clear()
        self._rank_of.clear()
        self._poll = select.poll()

    def _give_up(self, error: BaseException) -> BaseException:
        """Send an error of this rank. Return the error that all ranks raise."""
        if self._verdict is None:
            frame = handshake.pack_frame(handshake.FAILED, error, self._rank)
            for sock in self._socks.values():
                sock.send(frame)
            if self._rank != 0 and isinstance(error, Error):
                self._await_verdict()
            self._verdict = self._verdict or error
        return self._verdict

    def _await_verdict(self) -> None:
        deadline = Deadline(_VERDICT_S)
        with contextlib.suppress(Error):  # the verdict, or rank 0 has ended and sends none
            while (left_s := deadline.left_s()) > 0:
                self._receive(min(left_s, POLL_S))

    def _await_ready(self, deadline: Deadline) -> None:
        while len(self._ready) < len(self._socks):
            left_s = deadline.left_s()
            if left_s <= 0:
                late = min(rank for rank in self._socks if rank not in self._ready)
                text = f"rank {late} of {self._size} was not ready within the timeout; {WAIT_LONGER}"
                raise Timeout(text, rank=late)
            self._receive(min(left_s, POLL_S))

    def _send(self, rank: int, frame: bytes) -> None:
        if not self._socks[rank].send(frame):
            self.check()  # the rank may have sent its error before
            raise ended(rank)

    def _receive(self, wait_s: float) -> None:
        """Wait for frames at most `wait_s` seconds, and handle one frame of each rank."""
        for fd, _ in self._poll.poll(max(0.0, wait_s) * 1000):
            rank = self._rank_of[fd]
            with handshake.frames_of(rank):
                packet = self._socks[rank].receive(handshake.FRAME_NBYTES)
                if packet is None:
                    continue
                if not packet:
                    raise ended(rank)
                kind, failure = handshake.unpack_frame(packet)
            if failure is not None:
                self._take_verdict(failure)
            if kind != handshake.READY or rank in self._ready:
                raise handshake.unexpected(rank, kind)
            self._ready.add(rank)

    def _take_verdict(self, failure: Error) -> None:
        if self._rank != 0:
            self._verdict = failure
        raise failure
