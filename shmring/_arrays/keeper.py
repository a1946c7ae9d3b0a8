"""The process that keeps shared memory after the end of a process whose pickles have not been loaded.

It hands descriptors to processes of the same user, at a socket without a name in the file system. It ends
when everything was loaded, or when the parent of that process ends; without such a parent, after LONGEST_S.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import NoReturn

# Limit for a keeper that does not end with a parent: a shell may live for days.
LONGEST_S = 5.0
_POLL_MS = 200
_TIMEOUT_S = 5.0
_REQUEST = struct.Struct("=Q")


def listen(token: str) -> socket.socket:
    """Return the socket at which `ask` with this token connects."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(_address(token))
    server.listen(64)
    return server


def serve(
    server: socket.socket, regions: dict[int, int], is_needed: Callable[[], bool], lives_for: int | None
) -> NoReturn:
    """Hand out the descriptors of regions, by nonce, as long as they are needed, and end this process."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        watched = None if lives_for is None else os.pidfd_open(lives_for)
        _close_all_but({server.fileno(), *regions.values(), *([] if watched is None else [watched])})
        poll = select.poll()
        poll.register(server, select.POLLIN)
        if watched is not None:
            poll.register(watched, select.POLLIN)
        left_ms = LONGEST_S * 1e3
        while is_needed() and left_ms > 0:
            ready = [fd for fd, _ in poll.poll(_POLL_MS)]
            if watched in ready:
                break
            if server.fileno() in ready:
                _answer(server, regions)
            elif watched is None:
                left_ms -= _POLL_MS
    finally:
        os._exit(0)


def _answer(server: socket.socket, regions: dict[int, int]) -> None:
    connection, _ = server.accept()
    with connection:
        try:
            connection.settimeout(_TIMEOUT_S)
            if not _is_trusted(connection):
                return
            (nonce,) = _REQUEST.unpack(connection.recv(_REQUEST.size, socket.MSG_WAITALL))
            if nonce in regions:
                socket.send_fds(connection, [b"f"], [regions[nonce]])
        except (OSError, struct.error):
            pass  # the other process has ended, or is not shmring


def ask(token: str, nonce: int) -> int | None:
    """Return a descriptor of the region with this nonce; None if no process keeps it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(_address(token))
            if not _is_trusted(connection):
                return None
            connection.sendall(_REQUEST.pack(nonce))
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError:
            return None
    for fd in fds:
        os.set_inheritable(fd, False)
        return fd
    return None


def _is_trusted(connection: socket.socket) -> bool:
    """Return whether the other process is of this user, or of root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("=iII", credentials)[1] in (os.geteuid(), 0)


def _address(token: str) -> str:
    return f"\0shmring-{token}"


def _close_all_but(kept: set[int]) -> None:
    """Close what this process inherited: others wait for the end of its pipes."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        if fd not in kept:
            os.dup2(null, fd)
    begin = 3
    for fd in sorted(kept):
        os.closerange(begin, fd)
        begin = max(begin, fd + 1)
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
