"""The coordinator, rank 0, and its TCP connection to every other rank: they agree while a world begins.

Whatever goes wrong on one rank is told to rank 0, which tells all: every rank raises the same error, soon.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator, Mapping

from .._system.deadline import Deadline
from ..errors import Error, RankFailed, Timeout
from . import handshake
from .framed_socket import POLL_S, FramedSocket
from .handshake import BadFrame

_VERDICT_S = 0.5  # how long a rank waits for rank 0's word on an error of its own


class Coordinator:
    """One rank's part in it."""

    def __init__(self, rank: int, size: int, socks: Mapping[int, FramedSocket]) -> None:
        self._rank = rank
        self._size = size
        self._socks = dict(socks)
        self._rank_of = {sock.fileno(): rank for rank, sock in self._socks.items()}
        self._ready: set[int] = set()  # those whose "ready" has come, ahead of its turn or in it
        self._verdict: BaseException | None = None  # how it ended, the same on every rank
        self._poll = select.poll()
        for fd in self._rank_of:
            self._poll.register(fd, select.POLLIN)

    def check(self) -> None:
        """Raise what another rank told, or that it ended; never waits."""
        self._receive(0.0)

    def all_ready(self, error: BaseException | None = None, *, deadline: Deadline) -> None:
        """Return when every rank has come here; what one gives as its `error` all ranks raise."""
        with self.together():
            if error is not None:
                raise error
            if self._rank == 0:
                # Ranks that are late for a reason know it, and tell it at the same deadline.
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
        """What is raised within, on any rank, all ranks raise, each as soon as it looks."""
        try:
            yield
        except Error as error:
            verdict = self._give_up(error)
            if verdict is error:
                raise
            raise verdict from error
        except BaseException as error:  # such as KeyboardInterrupt: it stays what it is, here
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
        """Tell of an error of this rank's; returns what all ranks are to raise."""
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
        with contextlib.suppress(Error):  # the verdict, or rank 0 has gone and there will be none
            while (left_s := deadline.left_s()) > 0:
                self._receive(min(left_s, POLL_S))

    def _await_ready(self, deadline: Deadline) -> None:
        while len(self._ready) < len(self._socks):
            left_s = deadline.left_s()
            if left_s <= 0:
                late = min(rank for rank in self._socks if rank not in self._ready)
                raise Timeout(f"rank {late} of {self._size} was not ready in time", rank=late)
            self._receive(min(left_s, POLL_S))

    def _send(self, rank: int, frame: bytes) -> None:
        if not self._socks[rank].send(frame):
            self.check()  # it may have said why
            raise _ended(rank)

    def _receive(self, wait_s: float) -> None:
        """Take what has come within that time: a frame of each rank."""
        for fd, _ in self._poll.poll(max(0.0, wait_s) * 1000):
            rank = self._rank_of[fd]
            try:
                packet = self._socks[rank].receive(handshake.FRAME_NBYTES)
                if packet is None:
                    continue
                if not packet:
                    raise _ended(rank)
                kind, failure = handshake.unpack_frame(packet)
            except BadFrame as error:
                raise Error(f"rank {rank} sent {error}", rank=rank) from error
            if failure is not None:
                self._take_verdict(failure)
            if kind != handshake.READY or rank in self._ready:
                raise Error(f"rank {rank} sent a frame of kind {kind}, which is out of turn", rank=rank)
            self._ready.add(rank)

    def _take_verdict(self, failure: Error) -> None:
        if self._rank != 0:
            self._verdict = failure
        raise failure


def _ended(rank: int) -> RankFailed:
    return RankFailed(f"rank {rank} ended while the ranks were meeting", rank=rank, cause="connection closed")
