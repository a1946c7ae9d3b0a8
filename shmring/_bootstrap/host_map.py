"""The host and the address of every rank, and the frames in which ranks exchange them.

A host is the set of ranks that can share memory: ranks of one kernel, namespaces and user.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import handshake
from .handshake import BadFrame

NONCE_NBYTES = 16

_KIND = struct.Struct("!8sB")
_ENDPOINT = struct.Struct("!B16sH")  # 4 or 6, address, port
_PAGE = struct.Struct(f"!8sB{NONCE_NBYTES}sHH")  # magic, kind, the table's nonce, first rank, count
_ROW = struct.Struct("!HH" + _ENDPOINT.format[1:])  # host, machine, endpoint
_MACHINE_CHARACTERS = 16  # of an identity
_PAGE_ROWS = (handshake.FRAME_NBYTES - _PAGE.size) // _ROW.size
_FAMILIES = {4: (socket.AF_INET, 4), 6: (socket.AF_INET6, 16)}  # family, bytes of an address


class Endpoint(NamedTuple):
    """The address where a rank listens: a numeric address and a port."""

    address: str
    port: int


class Row(NamedTuple):
    """The row of a rank in rank 0's table."""

    host: int
    endpoint: Endpoint
    machine: int = 0  # one machine may have several hosts that share no memory, such as containers


@dataclass(frozen=True)
class Place:
    """The place of a rank among all ranks, and among the ranks of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int
    num_hosts: int
    ranks_of_host: tuple[tuple[int, ...], ...]


def place_of(rank: int, hosts: Sequence[int]) -> Place:
    """Return the place of `rank`. hosts: the host of every rank."""
    ranks_of_host: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for other, host in enumerate(hosts):
        ranks_of_host[host].append(other)
    own = ranks_of_host[hosts[rank]]
    return Place(
        rank,
        len(hosts),
        own.index(rank),
        len(own),
        hosts[rank],
        len(ranks_of_host),
        tuple(map(tuple, ranks_of_host)),
    )


def number_hosts(identities: Sequence[str]) -> list[int]:
    """Return the host of every rank. Hosts are numbered in the order of their lowest ranks.

    identities: by rank, the identity of its host.
    """
    numbers: dict[str, int] = {}
    return [numbers.setdefault(identity, len(numbers)) for identity in identities]


def number_machines(identities: Sequence[str]) -> list[int]:
    """Return the machine of every rank, numbered as in `number_hosts`."""
    return number_hosts([identity[:_MACHINE_CHARACTERS] for identity in identities])


def identity(name: str) -> str:
    """Return a text that is equal for two ranks if and only if they can share memory and have the same name.

    Its first 16 characters are equal if the ranks are on the same machine.
    """
    boot = _read("/proc/sys/kernel/random/boot_id")
    parts = (
        boot,
        _inode("/proc/self/ns/net"),  # for abstract Unix sockets
        _inode("/proc/self/ns/pid"),  # ranks check each other by pid
        str(os.geteuid()),
        name,
    )
    return _digest(boot)[:_MACHINE_CHARACTERS] + _digest("\n".join(parts))[_MACHINE_CHARACTERS:]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def pack_endpoint(endpoint: Endpoint) -> bytes:
    """Return the frame in which a proven rank sends its address to rank 0."""
    return _KIND.pack(handshake.MAGIC, handshake.ENDPOINT) + _ENDPOINT.pack(*_packed(endpoint))


def unpack_endpoint(packet: bytes) -> Endpoint:
    if len(packet) != _KIND.size + _ENDPOINT.size or handshake.kind_of(packet) != handshake.ENDPOINT:
        raise BadFrame(packet)
    return _unpacked(packet, *_ENDPOINT.unpack_from(packet, _KIND.size))


def pack_table(rows: Sequence[Row], nonce: bytes) -> list[bytes]:
    """Return the frames of rank 0's table of all ranks. nonce: unique to this start of the world."""
    pages = []
    for first in range(0, len(rows), _PAGE_ROWS):
        some = rows[first : first + _PAGE_ROWS]
        head = _PAGE.pack(handshake.MAGIC, handshake.TABLE, nonce, first, len(some))
        packed = (_ROW.pack(row.host, row.machine, *_packed(row.endpoint)) for row in some)
        pages.append(head + b"".join(packed))
    return pages


def unpack_page(packet: bytes, rows: Sequence[Row], nprocs: int) -> tuple[bytes, list[Row]]:
    """Return (the table's nonce, the rows of this page, which follow `rows`). nprocs: length of the table."""
    if len(packet) < _PAGE.size or handshake.kind_of(packet) != handshake.TABLE:
        raise BadFrame(packet)
    _, _, nonce, first, count = _PAGE.unpack_from(packet)
    fits = len(packet) == _PAGE.size + count * _ROW.size and 1 <= count <= nprocs - len(rows)
    if first != len(rows) or not fits:
        raise BadFrame(packet, f"a page of {count} ranks from rank {first} on, which was not expected")
    page = []
    num_hosts = max((row.host for row in rows), default=-1) + 1
    for host, machine, *endpoint in _ROW.iter_unpack(packet[_PAGE.size :]):
        if host > num_hosts:  # hosts are numbered in the order of their lowest ranks
            raise BadFrame(packet, f"a table with host {host} before host {num_hosts}")
        num_hosts = max(num_hosts, host + 1)
        page.append(Row(host, _unpacked(packet, *endpoint), machine))
    return nonce, page


def _packed(endpoint: Endpoint) -> tuple[int, bytes, int]:
    version = 6 if ":" in endpoint.address else 4
    address = endpoint.address.partition("%")[0]  # the interface is valid on its own host only
    return version, socket.inet_pton(_FAMILIES[version][0], address), endpoint.port


def _unpacked(packet: bytes, version: int, address: bytes, port: int) -> Endpoint:
    if version not in _FAMILIES:
        raise BadFrame(packet, f"an address of IP version {version}")
    family, nbytes = _FAMILIES[version]
    return Endpoint(socket.inet_ntop(family, address[:nbytes]), port)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return _unknown(path)


def _inode(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return _unknown(path)


def _unknown(path: str) -> str:
    # If a part is not readable, the host's name distinguishes hosts.
    return f"{path} of {socket.gethostname()}"
