"""Connect the ranks of one host over an abstract Unix socket, which leaves nothing in the file system.

The lowest rank listens. A peer must be a process of the same user (SO_PEERCRED) and hold the world's key.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
from collections.abc import Sequence

from .._system.limits import explain
from ..errors import WAIT_LONGER, Error, Timeout
from . import handshake
from .acceptor import Gathering, most_pending, peer_uid_and_pid
from .connector import Connector
from .fd_passing import LocalSockets
from .framed_socket import FramedSocket
from .handshake import Hello
from .world import JoinRequest, World


def connect_ranks(request: JoinRequest, ranks: Sequence[int]) -> LocalSockets:
    """Return this rank's connections to the others of `ranks`, once all of them have connected."""
    if len(ranks) == 1:
        return LocalSockets(0, 1, {})
    if request.rank == ranks[0]:
        with contextlib.closing(_LocalGathering(request, ranks[1:])) as gathering:
            return gathering.local_sockets()
    sock = _LocalConnector(request, ranks[0], handshake.LOCAL).connect()
    return LocalSockets(ranks.index(request.rank), len(ranks), {0: sock.connection})


def listen(world: World, rank: int, num_awaited: int) -> socket.socket:
    """Return the lowest rank's listener at the meeting point of the world."""
    if _has_met(world):
        raise second_use(rank)
    listener = _new_socket()
    try:
        listener.bind(meeting_point(world))
        listener.listen(min(most_pending(num_awaited), 4096))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _error_in_use(world, rank) from error
        raise explain(error, "opening the meeting point of the ranks") from error
    except BaseException:
        listener.close()
        raise
    return listener


def meeting_point(world: World, suffix: bytes = b"") -> bytes:
    # The id is hashed, so that /proc/net/unix does not show it. The uid keeps apart two users with the same
    # SHMRING_ADDR.
    digest = hashlib.sha256(b"shmring %d " % os.geteuid() + world.id.encode()).hexdigest()[:40]
    return b"\0shmring." + digest.encode() + suffix


def second_use(rank: int, or_else: str = "") -> Error:
    return Error(
        f"rank {rank} has joined this world before, or the world has already met{or_else}: a World is "
        "single-use, make a fresh one with shmring.world(nprocs) (with SHMRING_RANK set by hand: give each "
        "job its own SHMRING_ADDR)",
        rank=rank,
    )


def held_by_another(uid: int, pid: int) -> Error:
    return Error(
        f"the meeting point of this world is held by another user (uid {uid}, process {pid}): use a fresh "
        "world (with SHMRING_RANK set by hand: another SHMRING_ADDR)"
    )


def _error_in_use(world: World, rank: int) -> Error:
    """Return the error of a lowest rank that finds the name of the meeting point in use."""
    with _new_socket() as probe:
        try:
            probe.connect(meeting_point(world))
        except OSError:  # it does not listen, or its queue is full
            return second_use(rank, ", or another user's process holds the name of its meeting point")
        uid, pid = peer_uid_and_pid(probe)
    return second_use(rank) if uid == os.geteuid() else held_by_another(uid, pid)


def _has_met(world: World) -> bool:
    with _new_socket() as probe:
        try:
            probe.connect(meeting_point(world, b".met"))
        except BlockingIOError:  # its queue is full, so it exists
            return True
        except OSError:
            return False
        return peer_uid_and_pid(probe)[0] == os.geteuid()  # another user's name is not this world's


def _new_socket() -> socket.socket:
    # Packets, not a stream: a frame arrives whole or not at all.
    try:
        new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise explain(error, "opening a socket to meet the other ranks") from error
    new.setblocking(False)
    return new


class _LocalGathering(Gathering):
    """The lowest rank's side."""

    def __init__(self, request: JoinRequest, awaited: Sequence[int]) -> None:
        self._listener = request.listener or listen(request.world, request.rank, len(awaited))
        try:
            super().__init__(request, self._listener, awaited, handshake.LOCAL)
        except BaseException:
            self._listener.close()
            raise

    def local_sockets(self) -> LocalSockets:
        """Return the connections to all others. Raise the error that all of them get."""
        marker = _new_socket()  # before the others get READY: nothing may fail after that
        try:
            socks = self.gather()
        except BaseException:
            marker.close()
            raise
        self._mark(marker)
        peers = {at: sock.connection for at, sock in enumerate(socks.values(), 1)}
        return LocalSockets(0, len(peers) + 1, peers, marker=marker)

    def close(self) -> None:
        super().close()
        self._listener.close()

    def _mark(self, marker: socket.socket) -> None:
        """Bind a listening name without an acceptor. It shows late ranks that the world has started."""
        with contextlib.suppress(OSError):  # best effort: only a clearer error depends on it
            marker.bind(meeting_point(self._request.world, b".met"))
            marker.listen(1)

    def _objection(self, hello: Hello, sock: FramedSocket) -> Error | None:
        own, error = self._request, super()._objection(hello, sock)
        if error is None and hello.identity != own.identity:
            return Error(
                f"rank {own.rank} is on host {own.identity!r}, rank {hello.rank} on host {hello.identity!r} "
                "(SHMRING_NODE): ranks of several hosts need an address to meet at, "
                "shmring.world(nprocs, address='host:port')",
                rank=hello.rank,
            )
        return error

    def _conclude(self, socks: dict[int, FramedSocket]) -> None:
        ready = handshake.pack_frame(handshake.READY)
        for rank, sock in list(socks.items()):
            if not sock.send(ready):
                raise self._lose(rank)


class _LocalConnector(Connector):
    """Any other rank's side."""

    def _open(self) -> FramedSocket | None:
        connection = _new_socket()
        try:
            connection.connect(meeting_point(self._request.world))
        except OSError as error:
            connection.close()
            if error.errno == errno.EAGAIN:  # its queue is full
                return None
            if error.errno != errno.ECONNREFUSED:
                raise explain(error, f"connecting to rank {self._peer}") from error
            if _has_met(self._request.world):
                raise second_use(self._request.rank) from error
            self._check_absence()
            return None
        self._seen = True
        uid, pid = peer_uid_and_pid(connection)
        if uid != os.geteuid():
            connection.close()
            raise held_by_another(uid, pid)
        return FramedSocket(connection)

    def _settle(self, sock: FramedSocket) -> bool:
        frame = self._await_verdict_frame(sock)
        return bool(frame) and self._unpack(frame) == handshake.READY

    def _trying(self) -> str:
        return "" if self._seen else " (it has not come yet)"

    def _never_came(self) -> Timeout:
        return Timeout(
            f"rank {self._peer} of {self._request.world.nprocs} did not come within "
            f"{self._request.timeout_s:g} s (ranks meet only within one network namespace: containers need "
            f"a common one); {WAIT_LONGER}",
            rank=self._peer,
        )
