"""The star between the ranks of a world once they have met: rank 0's line to every other rank.

Descriptors travel over it, and why there will be none. May know: errors, limits, handshake.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable

from . import handshake
from .errors import Error, RankFailed, Timeout
from .limits import explain

_LOOK_S = 0.02  # `check` is called at least this often
_BUSY = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)  # the peer has not yet read what it was sent


class Links:
    """One rank's end of the star, and its place: `rank size local_rank local_size node num_nodes`.

    Rank 0 holds a connection to every other rank, the others one to rank 0. Nothing in it belongs to
    the process, so ranks may be threads. Calls are collective and come from one thread at a time.
    """

    def __init__(
        self, rank: int, size: int, peers: dict[int, socket.socket], marker: socket.socket | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = rank
        self.local_size = size
        self.node = 0
        self.num_nodes = 1
        self._peers = peers
        self._marker = marker  # says "this world has met" to whoever comes late
        for peer in peers.values():
            peer.setblocking(False)

    def broadcast_descriptor(self, fd: int | None, *, check: Callable[[], None], deadline: float) -> int:
        """Rank 0's descriptor to all: rank 0 gets `fd` back, the others a new one (closed on exec).

        `check` is called at least every 20 ms and may raise; `deadline` is a time.monotonic() value.
        Raises RankFailed, Timeout, or what rank 0 told through `fail_descriptor`.
        """
        if self.rank != 0:
            return self._receive_descriptor(check, deadline)
        if fd is None:
            raise ValueError("rank 0 has to give a descriptor")
        frame = handshake.pack_frame(handshake.DESCRIPTOR)
        try:
            for rank, peer in self._peers.items():
                self._send(rank, peer, frame, fd, check, deadline)
        except BaseException as error:
            self.fail_descriptor(error)
            raise
        return fd

    def fail_descriptor(self, error: BaseException | str) -> None:
        """Rank 0 tells the others to raise `error` in place of a descriptor, as far as they still listen."""
        reason = Error(error, rank=0) if isinstance(error, str) else error
        frame = handshake.pack_frame(handshake.FAILED, reason)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(frame)

    def close(self) -> None:
        """Close the connections; a second call does nothing."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._marker is not None:
            self._marker.close()

    def _send(
        self,
        rank: int,
        peer: socket.socket,
        frame: bytes,
        fd: int,
        check: Callable[[], None],
        deadline: float,
    ) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        while True:
            check()
            try:
                peer.sendmsg([frame], rights)
                return
            except ConnectionError as error:
                raise _gone(rank) from error
            except OSError as error:
                if error.errno not in _BUSY:
                    raise explain(error, f"sending a descriptor to rank {rank}") from error
            if time.monotonic() >= deadline:
                raise Timeout(f"rank {rank} did not take the descriptors that it was sent", rank=rank)
            time.sleep(_LOOK_S / 4)

    def _receive_descriptor(self, check: Callable[[], None], deadline: float) -> int:
        peer = self._peers[0]
        poll = select.poll()
        poll.register(peer, select.POLLIN)
        while True:
            check()
            left_s = deadline - time.monotonic()
            if poll.poll(max(0.0, min(_LOOK_S, left_s)) * 1000):
                break
            if left_s <= 0:
                raise Timeout("rank 0 did not send its descriptor in time", rank=0)
        # Not socket.recv_fds: it drops its flags, and the descriptor would be inherited across exec.
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        try:
            packet, rights, flags, _ = peer.recvmsg(handshake.FRAME_NBYTES, room, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise _gone(0) from error
        fds = array.array("i", b"".join(data for _, kind, data in rights if kind == socket.SCM_RIGHTS))
        return _take_descriptor(packet, fds.tolist(), flags)


def _take_descriptor(packet: bytes, fds: list[int], flags: int) -> int:
    if not packet:
        raise _gone(0)
    try:
        kind, failure = handshake.unpack_frame(packet)
    except handshake.BadFrame as error:
        raise Error(f"rank 0 sent {error}", rank=0) from error
    if failure is not None:
        raise failure
    if kind == handshake.DESCRIPTOR and len(fds) == 1 and not flags & socket.MSG_CTRUNC:
        return fds[0]
    for fd in fds:
        os.close(fd)
    if flags & socket.MSG_CTRUNC:  # the kernel drops what there is no room for
        raise explain(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "receiving a descriptor")
    raise Error(f"rank 0 sent a frame of kind {kind} in place of a descriptor", rank=0)


def _gone(rank: int) -> RankFailed:
    return RankFailed(f"rank {rank} closed its connection: it ended", rank=rank, cause="connection closed")
