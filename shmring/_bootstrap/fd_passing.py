"""The connections between the ranks of a host after the handshake: rank 0's socket to every other rank.

Rank 0 sends descriptors over them, or the error that explains why it sends none.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence

from .._system.deadline import Deadline
from .._system.limits import explain
from ..errors import WAIT_LONGER, Error, RankFailed, Timeout
from . import handshake
from .framed_socket import CHECK_S, Check

_BUSY = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)  # the peer has not read its messages yet


class LocalSockets:
    """One rank's end of the connections, with the attributes of a Place.

    Rank 0 has a connection to every other rank; the others have one to rank 0. No state is global to the
    process, so ranks may be threads. Calls are collective, and one thread at a time makes them. A wait
    calls `check` at least every 20 ms; it may raise.
    """

    def __init__(
        self, rank: int, size: int, peers: dict[int, socket.socket], marker: socket.socket | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = rank
        self.local_size = size
        self.host = 0
        self.num_hosts = 1
        self.ranks_of_host = (tuple(range(size)),)
        self._peers = peers
        self._marker = marker  # a listening name by which late ranks see that the world has started
        for peer in peers.values():
            peer.setblocking(False)

    def broadcast_fd(self, fd: int | None, *, check: Check, deadline: Deadline) -> int:
        """Send rank 0's descriptor to all ranks. Return `fd` on rank 0, a new one (closed on exec) elsewhere.

        Raises RankFailed, Timeout, or the error that rank 0 has sent by `fail_fd`.
        """
        if self.rank != 0:
            return self._take_fd(check, deadline)
        if fd is None:
            raise ValueError("rank 0 has to give a descriptor")
        frame = handshake.pack_frame(handshake.DESCRIPTOR)
        try:
            for rank in self._peers:
                self._send(rank, frame, fd, check, deadline)
        except BaseException as error:
            self.fail_fd(error)
            raise
        return fd

    def fail_fd(self, error: BaseException) -> None:
        """Make the other ranks raise `error` instead of waiting, as far as their connections are open.

        A rank other than 0 sends it to rank 0, which sends it to all in `all_ready`.
        """
        frame = handshake.pack_frame(handshake.FAILED, error, self.rank)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(frame)

    def all_ready(self, *, check: Check, deadline: Deadline) -> None:
        """Block until every rank has called it. If a rank has ended or sent an error, all ranks raise it.

        If a rank ends after it has sent READY, and others go on, nothing is raised here: the next step names
        it.
        """
        frame = handshake.pack_frame(handshake.READY)
        if self.rank != 0:
            with contextlib.suppress(RankFailed):  # then rank 0's last frame has the reason
                self._send(0, frame, None, check, deadline)
            self._await_ready([0], check, deadline)
            return
        try:
            self._await_ready(self._peers, check, deadline)
            gone: list[RankFailed] = []
            for rank in self._peers:
                try:
                    self._send(rank, frame, None, check, deadline)
                except RankFailed as error:
                    gone.append(error)
            if gone and len(gone) == len(self._peers):  # else those that have the frame go on
                raise gone[0]
        except BaseException as error:
            self.fail_fd(error)
            raise

    def introduce(
        self, groups: Sequence[Sequence[int]], *, check: Check, deadline: Deadline
    ) -> tuple[LocalSockets | None, Error | None]:
        """Make connections for each of the groups.

        groups: disjoint lists of ranks in their new order, the same on every rank. Return this rank's
        connections in its group (None if it is in none), and the error if they could not be made. After an
        exception these connections are out of step and must not be used any more.
        """
        if self.rank == 0:
            socks, failure = self._hand_out_socks(groups, check, deadline)
        else:
            socks, failure = self._take_socks(check, deadline)
        group = next((group for group in groups if self.rank in group), None)
        if group is None or failure is not None:
            _close(socks)
            return None, failure
        place = group.index(self.rank)
        peers = range(1, len(group)) if place == 0 else [0]
        return LocalSockets(place, len(group), dict(zip(peers, socks, strict=True))), None

    def close(self) -> None:
        """Close the connections; a second call does nothing."""
        _close(self._peers.values())
        self._peers.clear()
        if self._marker is not None:
            self._marker.close()

    def _hand_out_socks(
        self, groups: Sequence[Sequence[int]], check: Check, deadline: Deadline
    ) -> tuple[list[socket.socket], Error | None]:
        """Make all sockets on rank 0, and send their ends to the ranks. Return rank 0's own ends."""
        own: list[socket.socket] = []
        failure = None
        try:
            for ranks in _pairs_of(groups):
                failure = self._hand_out_sock(ranks, own, check, deadline)
                if failure is not None:
                    break
            # The last frame tells the others that no more sockets follow.
            last = handshake.pack_frame(handshake.READY if failure is None else handshake.FAILED, failure)
            for rank in self._peers:
                self._send(rank, last, None, check, deadline)
        except BaseException as error:
            _close(own)
            self.fail_fd(error)
            raise
        return own, failure

    def _hand_out_sock(
        self, ranks: tuple[int, int], own: list[socket.socket], check: Check, deadline: Deadline
    ) -> Error | None:
        try:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            return explain(error, "making a socket between the ranks of a group")
        kept = None
        try:
            frame = handshake.pack_frame(handshake.SOCKET)
            for rank, end in zip(ranks, ends, strict=True):
                if rank != 0:
                    self._send(rank, frame, end.fileno(), check, deadline)
            if 0 in ranks:
                own.append(ends[ranks.index(0)])
                kept = own[-1]
        finally:
            for end in ends:
                if end is not kept:
                    end.close()
        return None

    def _take_socks(self, check: Check, deadline: Deadline) -> tuple[list[socket.socket], Error | None]:
        """Return this rank's ends of sockets that rank 0 sends. After a failure, receive the rest, too."""
        socks: list[socket.socket] = []
        fds: list[int] = []
        failure: Error | None = None
        kind = handshake.SOCKET
        try:
            while kind == handshake.SOCKET:
                packet, cut = self._receive(fds, check, deadline)
                while fds:
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fds[-1])
                    fds.pop()  # the socket closes it from now on
                    socks.append(sock)
                kind, error = _unpack(packet, 0)
                failure = failure or error or (_no_room() if cut else None)
            if kind not in (handshake.READY, handshake.FAILED):
                raise handshake.unexpected(0, kind)
        except BaseException:
            _close(socks)
            _close_fds(fds)
            raise
        return socks, failure

    def _take_fd(self, check: Check, deadline: Deadline) -> int:
        fds: list[int] = []
        try:
            packet, cut = self._receive(fds, check, deadline)
            kind, failure = _unpack(packet, 0)
            if failure is not None:
                raise failure
            if kind != handshake.DESCRIPTOR or len(fds) != 1 or cut:
                raise _no_room() if cut else handshake.unexpected(0, kind)
        except BaseException:
            _close_fds(fds)
            raise
        return fds[0]

    def _await_ready(self, ranks: Iterable[int], check: Check, deadline: Deadline) -> None:
        awaited = set(ranks)
        while awaited:
            for rank in self._await_readable(awaited, check, deadline):
                fds: list[int] = []
                packet, _ = self._read(rank, fds)
                _close_fds(fds)  # a rank that is out of step may have sent some
                kind, error = _unpack(packet, rank)
                if error is not None:
                    raise error
                if kind != handshake.READY:
                    raise handshake.unexpected(rank, kind)
                awaited.remove(rank)

    def _send(self, rank: int, frame: bytes, fd: int | None, check: Check, deadline: Deadline) -> None:
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        while True:
            check()
            try:
                self._peers[rank].sendmsg([frame], rights)
                return
            except ConnectionError as error:
                raise _gone(rank) from error
            except OSError as error:
                if error.errno not in _BUSY:
                    raise explain(error, f"sending a descriptor to rank {rank}") from error
            if deadline.is_over():
                text = f"rank {rank} did not receive its descriptors within the timeout; {WAIT_LONGER}"
                raise Timeout(text, rank=rank)
            time.sleep(CHECK_S / 4)

    def _await_readable(self, ranks: set[int], check: Check, deadline: Deadline) -> list[int]:
        """Wait until sockets of the ranks are readable. Return these ranks, at least one."""
        poll = select.poll()
        rank_of = {self._peers[rank].fileno(): rank for rank in ranks}
        for sock in rank_of:
            poll.register(sock, select.POLLIN)
        while True:
            check()
            left_s = deadline.left_s()
            readable = poll.poll(min(CHECK_S, left_s) * 1000)
            if readable:
                return [rank_of[sock] for sock, _ in readable]
            if left_s <= 0:
                late = min(ranks)
                raise Timeout(f"rank {late} sent no answer within the timeout; {WAIT_LONGER}", rank=late)

    def _receive(self, fds: list[int], check: Check, deadline: Deadline) -> tuple[bytes, bool]:
        """Wait for rank 0's next packet and return it as `_read` does."""
        self._await_readable({0}, check, deadline)
        return self._read(0, fds)

    def _read(self, rank: int, fds: list[int]) -> tuple[bytes, bool]:
        """Return (a packet, True if there was no room for one of its descriptors).

        Its other descriptors are appended to fds, so the caller has them even if this raises.
        """
        # Not socket.recv_fds: it drops its flags, and the descriptor would be inherited across exec.
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        how = (handshake.FRAME_NBYTES, room, socket.MSG_CMSG_CLOEXEC)
        try:
            try:
                packet, rights, flags, _ = self._peers[rank].recvmsg(*how)
            except ConnectionResetError:  # the peer has closed; the next read returns its last frame
                packet, rights, flags, _ = self._peers[rank].recvmsg(*how)
        except OSError as error:
            raise _gone(rank) from error
        try:
            for _, kind, data in rights:
                if kind == socket.SCM_RIGHTS:
                    fds.extend(array.array("i", data))
        except MemoryError:
            _close_fds(fd for _, _, data in rights for fd in array.array("i", data))
            fds.clear()
            raise
        return packet, bool(flags & socket.MSG_CTRUNC)


def _pairs_of(groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks that get a socket, in the order in which each rank receives its own."""
    for first, *others in groups:
        for other in others:
            yield first, other


def _unpack(packet: bytes, rank: int) -> tuple[int, Error | None]:
    """Return (kind, error) of a rank's packet. Raise RankFailed if the packet is empty."""
    if not packet:
        raise _gone(rank)
    with handshake.frames_of(rank):
        return handshake.unpack_frame(packet)


def _no_room() -> Error:
    """Return the error for descriptors that the kernel dropped, since the process has no room for them."""
    return explain(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "receiving a descriptor")


def _gone(rank: int) -> RankFailed:
    return RankFailed(f"rank {rank} closed its connection: it ended", rank=rank, cause="connection closed")


def _close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _close(socks: Iterable[socket.socket]) -> None:
    for sock in socks:
        sock.close()
