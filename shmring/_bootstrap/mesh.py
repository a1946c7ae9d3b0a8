"""The connections between ranks of different hosts: for every pair one for data and one for control messages.

The higher rank connects to the listener of the lower one. A rank first makes all its connections to lower
ranks, then accepts those of higher ranks. Rank 0 only accepts, so this cannot deadlock.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass, field

from .._system.limits import NO_DESCRIPTOR, explain
from ..errors import WAIT_LONGER, Error, Timeout
from . import handshake
from .acceptor import Acceptor, Refused
from .connector import Connector
from .framed_socket import Address, FramedSocket, connect, watch_link
from .handshake import CONTROL, COORDINATOR, DATA, READY, Hello
from .tcp import Found
from .world import JoinRequest, named

_UNPACED = b"reno"  # the congestion control that every Linux has and every user may choose
_CONNECT_S = 5.0  # limit of one attempt
_REFUSED_S = 2.0  # a connection refused after this time means a firewall, not a rank that has just ended


@dataclass
class Mesh:
    """The non-blocking TCP connections of one rank, by the world rank of the other side."""

    data: dict[int, socket.socket] = field(default_factory=dict)
    control: dict[int, socket.socket] = field(default_factory=dict)

    def add(self, rank: int, purpose: bytes, connection: socket.socket, *, is_near: bool = False) -> None:
        # The kernel adapts the buffer sizes (up to tcp_rmem[2] and tcp_wmem[2]); setting them would disable
        # that. Between hosts the administrator chooses the congestion control. Within one machine the link is
        # not shared, and BBR's pacing only costs a timer for every few packets (64 MiB, 2 x 2 ranks,
        # bench/internode/bench_internode.py: 87 ms with BBR, 63 ms without).
        if is_near:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_link(connection, is_always_read=False)
        (self.data if purpose == DATA else self.control)[rank] = connection

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        for connection in (*self.data.values(), *self.control.values()):
            connection.close()
        self.data.clear()
        self.control.clear()


def connect_mesh(request: JoinRequest, found: Found) -> Mesh:
    """Return this rank's connections to all ranks of other hosts; collective over the world."""
    place, mesh = found.place, Mesh()
    local_ranks = set(place.ranks_of_host[place.host])
    try:
        for rank in range(place.rank):
            if rank not in local_ranks:
                for purpose in (DATA, CONTROL):
                    sock = _MeshConnector(request, rank, purpose, found).connect()
                    mesh.add(rank, purpose, sock.connection, is_near=found.is_near(rank))
        with contextlib.closing(_MeshAcceptor(request, found, mesh)) as acceptor:
            acceptor.accept_all()
    except BaseException:
        mesh.close()
        raise
    return mesh


class _MeshConnector(Connector):
    """The higher rank's side of a connection."""

    def __init__(self, request: JoinRequest, peer: int, purpose: bytes, found: Found) -> None:
        super().__init__(request, peer, purpose)
        host, port = found.endpoints[peer]
        self._family = found.listener.family
        self._where: Address = (host, port)
        if self._family == socket.AF_INET6:
            self._where = (host, port, 0, found.scope_id)
        self._refused_until_s = request.now_s() + _REFUSED_S

    def _open(self) -> FramedSocket | None:
        within = self._request.deadline.within(_CONNECT_S)
        there = connect(self._family, self._where, within, self._request.poll_s(), self._request.check)
        if not isinstance(there, OSError):
            return FramedSocket(there)
        if there.errno in NO_DESCRIPTOR:
            raise explain(there, f"connecting to rank {self._peer}")
        if there.errno != errno.ETIMEDOUT and self._request.now_s() > self._refused_until_s:
            raise Error(self._unreachable(str(there.strerror)), rank=self._peer)
        return None

    def _settle(self, sock: FramedSocket) -> bool:
        frame = self._request.await_frame(sock, handshake.FRAME_NBYTES)
        if frame is None:
            raise self._never_came()
        return bool(frame) and self._unpack(frame) == READY

    def _never_came(self) -> Timeout:
        why = f"no answer within {self._request.timeout_s:g} s"
        return Timeout(f"{self._unreachable(why)}; {WAIT_LONGER}", rank=self._peer)

    def _unreachable(self, why: str) -> str:
        host, port = self._where[:2]
        return (
            f"rank {self._request.rank} cannot connect to rank {self._peer} at {host} port {port}: {why}; if "
            "a firewall is between them, let SHMRING_PORTS=first-last through and set it on all hosts"
        )


class _MeshAcceptor:
    """The lower rank's side of its connections to higher ranks."""

    def __init__(self, request: JoinRequest, found: Found, mesh: Mesh) -> None:
        self._request = request
        self._found = found
        self._place = found.place
        self._mesh = mesh
        local_ranks = found.place.ranks_of_host[found.place.host]
        higher = [rank for rank in range(request.rank + 1, found.place.size) if rank not in local_ranks]
        self._awaited = {(rank, purpose) for rank in higher for purpose in (DATA, CONTROL)}
        # Rank 0 also accepts ranks that are late for the rendezvous, to send them an error.
        purposes = (DATA, CONTROL, COORDINATOR) if request.rank == 0 else (DATA, CONTROL)
        self._acceptor = Acceptor(request, found.listener, purposes, len(self._awaited), self._take_in)

    def accept_all(self) -> None:
        while self._awaited:
            if self._request.is_over():
                raise self._late()
            self._acceptor.serve()

    def close(self) -> None:
        self._acceptor.close()

    def _take_in(self, hello: Hello, sock: FramedSocket) -> None:
        if hello.nprocs != self._place.size or (hello.rank, hello.purpose) not in self._awaited:
            raise Refused(self._objection(hello))
        self._awaited.remove((hello.rank, hello.purpose))
        is_near = self._found.is_near(hello.rank)
        self._mesh.add(hello.rank, hello.purpose, sock.connection, is_near=is_near)
        sock.send(handshake.pack_frame(READY))  # if the rank has ended, the coordinator reports it

    def _objection(self, hello: Hello) -> str:
        place, rank = self._place, hello.rank
        if hello.nprocs != place.size or not 0 <= rank < place.size:
            return f"rank {rank} of {hello.nprocs} is none of this world's {place.size} ranks"
        if hello.purpose == COORDINATOR or rank in self._mesh.data or rank in self._mesh.control:
            return f"rank {rank} has joined already: each process needs a rank of its own"
        if rank in place.ranks_of_host[place.host]:
            return f"rank {rank} is on the same host: it connects through shared memory"
        return f"rank {rank} is lower: this rank connects to it"

    def _late(self) -> Timeout:
        missing = sorted({rank for rank, _ in self._awaited})
        what = f"{named(missing)} did not connect to rank {self._request.rank}"
        text = f"{what} within {self._request.timeout_s:g} s{self._acceptor.hints()}; {WAIT_LONGER}"
        return Timeout(text, rank=missing[0])
