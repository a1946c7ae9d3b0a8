"""The contestants over hosts beside Gloo: shmring on several hosts, shmring on each host alone, and bare
sockets.

Contains one class for each, with the interface of peer_libraries, which runs inside the rank processes. Ranks
are on hosts in blocks, the same number on each host: seat.addresses has the address of every rank.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.common.calls import Array, fill_pattern
from bench.peers.peer_libraries import Job, Library, Prepared, Seat, Shmring

PORT_OF_RANK_0 = 29600
SHMRING_PORT = 29555
CONNECT_TIMEOUT_S = 30.0
WIRE = "wire="
# Bare sockets: both ways at once with the system's defaults, with these buffers, or without BBR's pacing, as
# shmring does inside one machine; and 8 bytes there and back.
EXCHANGE, EXCHANGE_BUFFERED, EXCHANGE_RENO = "exchange", "exchange, 1 MiB", "exchange, Reno"
BUFFER_NBYTES = 1 << 20
BLOCKING, POLLING = "blocking", "polling"


@dataclass(frozen=True)
class Place:
    """The host of a rank, and its place there."""

    host: int
    hosts: int
    local_rank: int
    ranks_a_host: int


@dataclass(frozen=True)
class Wire:
    to_next: socket.socket
    from_last: socket.socket


def place_of(seat: Seat) -> Place:
    hosts = len(set(seat.addresses))
    ranks_a_host = seat.size // hosts
    host, local_rank = divmod(seat.rank, ranks_a_host)
    return Place(host, hosts, local_rank, ranks_a_host)


def wire_nbytes(nbytes: int, hosts: int) -> int:
    """Return the least bytes that each host must send, and receive, for an all-reduce: 2(H-1)/H of nbytes."""
    return 2 * (hosts - 1) * nbytes // hosts


class ShmringOverHosts(Shmring):
    """One world over all hosts; variants such as wire=bf16 use a narrower wire format."""

    def invitation(self) -> Any:
        return replace(super().invitation(), address=f"{self.seat.addresses[0]}:{SHMRING_PORT}")

    def prepare(self, job: Job) -> Prepared:
        if job.variant.startswith(WIRE):
            job = replace(job, keywords={"wire": job.variant.removeprefix(WIRE)})
        return super().prepare(job)

    def wrong(self, job: Job, x: Array, y: Array) -> int:
        """Count wrong elements. Sums are whole numbers and a narrow format's steps less than one, so rounding
        restores them."""
        return super().wrong(job, x, np.rint(y) if job.variant.startswith(WIRE) else y)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "num_nodes": self.comm.num_nodes}


class ShmringOnEachHost(Shmring):
    """A world for each host, all of them busy at once: the work of the hosts' CPUs without any network."""

    def invitation(self) -> Any:
        import shmring

        place = place_of(self.seat)
        return [shmring.world(place.ranks_a_host) for _ in range(place.hosts)]

    def enter(self, invitation: Any) -> None:
        place = place_of(self.seat)
        self.seat = replace(self.seat, rank=place.local_rank, size=place.ranks_a_host)
        super().enter(invitation[place.host])


class Sockets(Library):
    """The limit, not a library: the time that TCP alone takes for the bytes of a hierarchical all-reduce.

    Each rank has a connection to the rank with the same local rank on the next host; two hosts share one.
    """

    def join(self, token: str | None) -> None:
        self.place = place_of(self.seat)
        self.before = (self.seat.rank - self.place.ranks_a_host) % self.seat.size
        # One connection for each kind: the system never adjusts buffers again that were set once.
        kinds = [(EXCHANGE, None), (EXCHANGE_BUFFERED, BUFFER_NBYTES), (EXCHANGE_RENO, None)]
        self.wires = {kind: self._wire(PORT_OF_RANK_0 + number * self.seat.size, buffer_nbytes)
                      for number, (kind, buffer_nbytes) in enumerate(kinds)}
        for sock in (self.wires[EXCHANGE_RENO].to_next, self.wires[EXCHANGE_RENO].from_last):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

    def _wire(self, first_port: int, buffer_nbytes: int | None) -> Wire:
        """Connect to the next host: of two hosts, the second connects to the first."""
        hosts, host = self.place.hosts, self.place.host
        after = (self.seat.rank + self.place.ranks_a_host) % self.seat.size
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _set_buffers(listener, buffer_nbytes)  # before there is a connection: it negotiates the windows
            listener.bind((self.seat.addresses[self.seat.rank], first_port + self.seat.rank))
            listener.listen()
            listener.settimeout(CONNECT_TIMEOUT_S)
            if hosts > 2 or host == 1:
                to_next = _connected((self.seat.addresses[after], first_port + after), buffer_nbytes)
            if hosts > 2 or host == 0:
                from_last = listener.accept()[0]
        if hosts == 2:
            to_next = from_last = from_last if host == 0 else to_next
        for sock in (to_next, from_last):
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Wire(to_next, from_last)

    def versions(self) -> dict[str, str]:
        with open("/proc/sys/net/ipv4/tcp_congestion_control", encoding="ascii") as control:
            return {"library": f"bare TCP sockets ({control.read().strip()})"}

    def prepare(self, job: Job) -> Prepared:
        if job.variant in (BLOCKING, POLLING):
            return self._ping(job)
        share = wire_nbytes(job.nbytes, self.place.hosts) // self.place.ranks_a_host
        x, y = (np.empty(share // job.dtype.itemsize, job.dtype) for _ in range(2))
        wire = self.wires[job.variant]
        names = {"Thread": threading.Thread, "send": wire.to_next.sendall, "x": x,
                 "receive": wire.from_last.recv_into, "y": y, "ALL": socket.MSG_WAITALL}
        call = "sender = Thread(target=send, args=(x,)); sender.start(); receive(y, 0, ALL); sender.join()"
        return Prepared(x, y, call, names)

    def _ping(self, job: Job) -> Prepared:
        """Exchange between the first ranks of both hosts; the others do nothing."""
        x, y = job.private(self.seat.size)
        if self.place.local_rank or self.place.host > 1:
            return Prepared(x, y, "pass", {})
        wire = self.wires[EXCHANGE]
        receive = polling_receive(wire.from_last) if job.variant == POLLING else wire.from_last.recv_into
        steps = ["send(x)", "receive(y, 0, ALL)"]
        names = {"send": wire.to_next.sendall, "x": x, "receive": receive, "y": y, "ALL": socket.MSG_WAITALL}
        return Prepared(x, y, "; ".join(reversed(steps) if self.place.host else steps), names)

    def wrong(self, job: Job, x: Array, y: Array) -> int:
        """Count wrong elements: every rank that received anything has what the rank before it sent."""
        if job.variant in (BLOCKING, POLLING) and self.place.local_rank:
            return 0
        wanted = np.empty_like(y)
        fill_pattern(wanted, self.before)
        return int(np.count_nonzero(y != wanted))

    def leave(self) -> None:
        for wire in self.wires.values():
            wire.to_next.close()
            wire.from_last.close()


def _set_buffers(sock: socket.socket, nbytes: int | None) -> None:
    if nbytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


def _connected(address: tuple[str, int], buffer_nbytes: int | None) -> socket.socket:
    until = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        sock = socket.socket()
        _set_buffers(sock, buffer_nbytes)
        sock.settimeout(CONNECT_TIMEOUT_S)
        try:
            sock.connect(address)
            return sock
        except ConnectionRefusedError:  # it does not listen yet
            sock.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def polling_receive(sock: socket.socket) -> Callable[[Array, int, int], int]:
    """Return a recv_into that never sleeps. It yields, since the other side may be on the same CPU."""

    def receive(y: Array, nbytes: int, _flags: int) -> int:
        while True:
            try:
                return sock.recv_into(y, nbytes, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()

    return receive


INTERNODE_LIBRARIES: dict[str, type[Library]] = {
    "shmring over hosts": ShmringOverHosts, "shmring on each host": ShmringOnEachHost, "sockets": Sockets,
}
