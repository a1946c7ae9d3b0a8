"""The rendezvous of ranks of several hosts: all connect to rank 0 over TCP, which sends everyone's address.

Only the world's tag is public. No other data are used before both sides have proven that they hold the
world's key.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from .._config.settings import parse_address
from .._system.limits import NO_DESCRIPTOR, explain
from ..errors import WAIT_LONGER, Error, Timeout
from . import handshake, host_map
from .acceptor import Gathering
from .connector import Connector
from .coordinator import Coordinator
from .framed_socket import Address, FramedSocket, connect, listen, watch_link
from .handshake import BadFrame, Hello
from .host_map import Endpoint, Place, Row
from .world import JoinRequest

_CONNECT_S = 5.0  # limit of one attempt: the kernel's pauses between its own attempts keep growing
_LONGEST_PAUSE_S = 0.25
_LOOKUP_S = 5.0  # a name is looked up again after this time: its host may start again with another address
_LOOKUP_SHARE = 0.1  # of the time, at most: a lookup blocks, for up to 30 s if the resolver does not answer
_OTHER_PORT = "choose another port (SHMRING_PORT, or shmrun's --rdzv)"

_log = logging.getLogger("shmring")


@dataclass
class Found:
    """The result of the rendezvous: the coordinator, this rank's place, and the addresses of all ranks."""

    coordinator: Coordinator
    place: Place
    endpoints: list[Endpoint]
    nonce: bytes  # unique to this start of the world; its id may be reused
    scope_id: int  # the interface to link-local IPv6 addresses
    listener: socket.socket
    machines: Sequence[int] = ()  # by rank; equal if two hosts are on one machine

    def is_near(self, rank: int) -> bool:
        """Return whether a rank of another host is on this machine."""
        return bool(self.machines) and self.machines[rank] == self.machines[self.place.rank]


def connect_ranks(request: JoinRequest, ports: tuple[int, int] | None) -> Found:
    """Connect all ranks of a world with an address to rank 0. Each rank has a listener when this returns."""
    if request.rank == 0:
        return _gather(request)
    connector = _TcpConnector(request, ports)
    try:
        sock = connector.connect()
        return connector.found(sock)
    except BaseException:
        connector.close()
        raise


def _gather(request: JoinRequest) -> Found:
    assert request.world.address is not None
    listener = request.listener or listen_at(request.world.address)
    try:
        with contextlib.closing(_TcpGathering(request, listener)) as gathering:
            coordinator = Coordinator(0, request.world.nprocs, gathering.gather())
            rows = gathering.rows
            place = host_map.place_of(0, [row.host for row in rows])
            endpoints, machines = [row.endpoint for row in rows], [row.machine for row in rows]
            return Found(coordinator, place, endpoints, gathering.nonce, 0, listener, machines)
    except BaseException:
        listener.close()
        raise


class _TcpGathering(Gathering):
    """Rank 0's side."""

    def __init__(self, request: JoinRequest, listener: socket.socket) -> None:
        self.rows: list[Row] = []
        self.nonce = os.urandom(host_map.NONCE_NBYTES)
        self._identities = {0: request.identity}
        host, port, *_ = listener.getsockname()
        self._endpoints = {0: Endpoint(host, port)}
        super().__init__(request, listener, range(1, request.world.nprocs), handshake.COORDINATOR)

    def _take_in(self, hello: Hello, sock: FramedSocket) -> None:
        super()._take_in(hello, sock)
        self._identities[hello.rank] = hello.identity
        watch_link(sock.connection, is_always_read=True)

    def _handle_frame(self, rank: int, packet: bytes) -> None:
        if rank in self._endpoints or handshake.kind_of(packet) != handshake.ENDPOINT:
            return super()._handle_frame(rank, packet)
        self._endpoints[rank] = host_map.unpack_endpoint(packet)

    def _is_complete(self) -> bool:
        return len(self._endpoints) == len(self._awaited) + 1

    def _missing(self) -> list[int]:
        return [rank for rank in self._awaited if rank not in self._endpoints]

    def _conclude(self, socks: dict[int, FramedSocket]) -> None:
        """Number the hosts and send the table to all ranks."""
        ranks = range(self._request.world.nprocs)
        identities = [self._identities[rank] for rank in ranks]
        numbers, machines = host_map.number_hosts(identities), host_map.number_machines(identities)
        self.rows = [Row(numbers[rank], self._endpoints[rank], machines[rank]) for rank in ranks]
        for page in host_map.pack_table(self.rows, self.nonce):
            for rank, sock in list(socks.items()):
                if not sock.send(page):
                    raise self._lose(rank)


class _TcpConnector(Connector):
    """Any other rank's side."""

    longest_pause_s = _LONGEST_PAUSE_S

    def __init__(self, request: JoinRequest, ports: tuple[int, int] | None) -> None:
        super().__init__(request, 0, handshake.COORDINATOR)
        assert request.world.address is not None
        self._address = request.world.address
        self._ports = ports
        self._where: Sequence[tuple[int, Address]] = ()
        self._look_up_at_s = 0.0
        self._listener: socket.socket | None = None
        self._rows: list[Row] = []
        self._nonce = b""
        self._rank_0 = Endpoint("", 0)  # its address as seen from here; rank 0 itself may know another one
        self._scope_id = 0
        self._why = ""  # reason why the last attempt failed

    def found(self, sock: FramedSocket) -> Found:
        assert self._listener is not None
        coordinator = Coordinator(self._request.rank, self._request.world.nprocs, {0: sock})
        place = host_map.place_of(self._request.rank, [row.host for row in self._rows])
        endpoints = [row.endpoint for row in self._rows]
        endpoints[0] = self._rank_0
        machines = [row.machine for row in self._rows]
        return Found(coordinator, place, endpoints, self._nonce, self._scope_id, self._listener, machines)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _open(self) -> FramedSocket | None:
        if not self._where or self._request.now_s() >= self._look_up_at_s:
            self._look_up()
        for family, address in self._where:
            within = self._request.deadline.within(_CONNECT_S)
            there = connect(family, address, within, self._request.poll_s(), self._request.check)
            if not isinstance(there, OSError):
                watch_link(there, is_always_read=True)
                self._why = "something took the connection, but did not answer"
                return FramedSocket(there)
            if there.errno in NO_DESCRIPTOR:
                raise explain(there, "connecting to rank 0")
            if there.errno == errno.ECONNREFUSED:
                self._check_absence()
            self._why = str(there.strerror)
        return None

    def _look_up(self) -> None:
        begin_s = self._request.now_s()
        try:
            self._where = _resolve(self._address)
        except OSError as error:  # the name may become known once its host has started
            if error.errno in NO_DESCRIPTOR:
                raise explain(error, f"looking up {self._address}") from error
            self._why = f"its name is not known here: {error.strerror}"
        self._request.deadline.clock.count()  # a lookup may block for many seconds
        now_s = self._request.now_s()
        self._look_up_at_s = now_s + max(_LOOKUP_S, (now_s - begin_s) / _LOOKUP_SHARE)

    def _trying(self) -> str:
        return f" at {self._address} ({self._why})"

    def _proven(self) -> None:
        self._seen = True

    def _mistaken(self) -> None:
        self._check_absence()
        self._why = "another world is meeting there"

    def _settle(self, sock: FramedSocket) -> bool:
        self.close()
        self._rows = []
        try:
            own, (host, port, *_) = sock.connection.getsockname(), sock.connection.getpeername()
        except OSError:  # rank 0 has closed the connection
            return False
        self._rank_0 = Endpoint(host.partition("%")[0], port)
        self._scope_id = own[3] if len(own) > 3 else 0
        try:
            self._listener = listen_nearby(sock.connection.family, own, self._ports)
        except Error as error:  # send it, so that all ranks raise it
            sock.send(handshake.pack_frame(handshake.FAILED, error, self._request.rank))
            raise
        host, port, *_ = self._listener.getsockname()
        if not sock.send(host_map.pack_endpoint(Endpoint(host, port))):
            return False
        while len(self._rows) < self._request.world.nprocs:
            packet = self._await_verdict_frame(sock)
            if not packet:
                return False
            self._take_page(packet)
        return True

    def _take_page(self, packet: bytes) -> None:
        with handshake.frames_of(0):
            if handshake.kind_of(packet) == handshake.TABLE:
                self._nonce, page = host_map.unpack_page(packet, self._rows, self._request.world.nprocs)
                self._rows += page
                return
        raise handshake.unexpected(0, self._unpack(packet))

    def _wrong_answer(self, error: BadFrame) -> str:
        return (
            f"what answers at {self._address} is not rank 0 of this world (it sent {error}): if another "
            f"program listens there, {_OTHER_PORT}"
        )

    def _never_came(self) -> Timeout:
        nprocs, timeout_s = self._request.world.nprocs, self._request.timeout_s
        what = f"rank 0 of {nprocs} did not come to {self._address} within {timeout_s:g} s"
        why = f" (the last attempt to reach it there: {self._why})" if self._why else ""
        return Timeout(f"{what}{why}; {WAIT_LONGER}", rank=0)


def _resolve(address: str) -> list[tuple[int, Address]]:
    """Return (family, address) of all addresses of the name. Raise OSError if it is not known."""
    host, port = parse_address("address", address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ours = (socket.AF_INET, socket.AF_INET6)
    return [(family, cast(Address, where)) for family, _, _, _, where in found if family in ours]


def listen_at(address: str) -> socket.socket:
    """Return rank 0's listener at the world's address."""
    try:
        known = _resolve(address)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise explain(error, f"looking up {address}") from error
        raise Error(
            f"rank 0 is to listen at {address}, whose name is not known here ({error.strerror}): give a name "
            "or an address of the host that rank 0 runs on",
            rank=0,
        ) from error
    for family, where in known:
        try:
            listener = listen(family, where)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise _cannot_listen(error, address) from error
        _warn_of_loopback(address, where[0])
        return listener
    raise Error(
        f"rank 0 is to listen at {address}, which is not an address of this host: give the address of the "
        "host that rank 0 runs on, or run rank 0 there",
        rank=0,
    )


def _cannot_listen(error: OSError, address: str) -> Error:
    if error.errno == errno.EADDRINUSE:
        text = f"the port at {address} is taken, by another program, job or rank 0: {_OTHER_PORT}"
        return Error(text, rank=0)
    if error.errno == errno.EACCES:
        return Error(f"only root may listen at {address}: {_OTHER_PORT}, above 1023", rank=0)
    return explain(error, f"listening at {address}")


def _warn_of_loopback(address: str, resolved: str) -> None:
    host, _ = parse_address("address", address)
    is_loopback = resolved.startswith("127.") or resolved == "::1"
    if is_loopback and host not in ("localhost", resolved):
        what = "%s is %s here, which no other host can reach: if there are any, give rank 0's IP address"
        _log.warning(what, host, resolved)


def listen_nearby(family: int, own: Address, ports: tuple[int, int] | None) -> socket.socket:
    """Return a rank's own listener, at the address by which it reached rank 0; loopback stays loopback."""
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return listen(family, (own[0], port, *own[2:]))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise explain(error, f"listening at {own[0]} for other ranks") from error
    if ports is None:
        raise Error(f"no port is free at {own[0]} on {os.uname().nodename}")
    raise Error(
        f"all of SHMRING_PORTS={first}-{last} are taken on {os.uname().nodename}: every rank of a host "
        "except rank 0 needs one"
    )
