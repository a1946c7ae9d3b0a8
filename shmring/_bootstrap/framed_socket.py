"""Connections that transfer whole frames: packets on a Unix socket, a length before each frame on TCP.

This module limits the number of bytes that are read from an unproven peer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Callable

from .._system.deadline import Deadline
from .handshake import BadFrame

Check = Callable[[], None]
Address = tuple[str, int] | tuple[str, int, int, int]  # as sockets have it, for IPv4 and IPv6

POLL_S = 0.05  # the longest wait in one piece: deadlines are polled more often than Deadline requires
CHECK_S = 0.02  # a wait calls `check` at least this often
_LENGTH = struct.Struct("!H")
_BACKLOG = 1024  # length of the kernel's queue: ranks stay in it during a flood of connections
CUT_S = 20  # seconds without any packet after which a connection counts as cut
_STUCK_S = 5.0  # a peer whose kernel takes no data for this time counts as gone


class FramedSocket:
    """A non-blocking connection between two ranks, with the received part of its next frame.

    `host` is the address of a peer that has connected, for messages. It is empty on a Unix socket, and on the
    connecting side.
    """

    def __init__(self, connection: socket.socket, host: str = "") -> None:
        connection.setblocking(False)
        self.connection = connection
        self.host = host
        self._is_stream = connection.type == socket.SOCK_STREAM
        self._begun = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, frame: bytes) -> bool:
        """Send a whole frame. Return False if the other side has closed."""
        left = memoryview(_LENGTH.pack(len(frame)) + frame if self._is_stream else frame)
        while left:
            try:
                left = left[self.connection.send(left) :]
            except BlockingIOError:
                if not self._wait_for_room():
                    return False
            except OSError:
                return False
        return True

    def receive(self, most_nbytes: int) -> bytes | None:
        """Return the next frame; None if it is not complete yet; empty if the other side has closed.

        It reads no byte beyond that frame. On TCP it raises BadFrame if the frame is longer than
        `most_nbytes`; a Unix socket cuts it.
        """
        if not self._is_stream:
            return self._read(most_nbytes)
        while True:
            missing = self._missing_nbytes(most_nbytes)
            if missing == 0:
                frame = bytes(self._begun[_LENGTH.size :])
                self._begun.clear()
                return frame
            piece = self._read(missing)
            if not piece:
                return piece
            self._begun += piece

    def await_frame(self, most_nbytes: int, deadline: Deadline, poll_s: float, check: Check) -> bytes | None:
        """Return the next frame as `receive` does; None if the deadline passed."""
        while True:
            frame = self.receive(most_nbytes)
            left_s = deadline.left_s()
            if frame is not None or left_s <= 0:
                return frame
            check()
            self.wait(select.POLLIN, min(left_s, poll_s))

    def wait(self, event: int, timeout_s: float) -> bool:
        """Return whether the connection is ready or broken in time; the next call on it shows which."""
        poll = select.poll()
        poll.register(self.connection, event)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        self.connection.close()

    def _wait_for_room(self) -> bool:
        """Return False if the kernel of the other side takes nothing for _STUCK_S."""
        deadline = Deadline(_STUCK_S)
        while not self.wait(select.POLLOUT, POLL_S):
            if deadline.is_over():
                return False
        return True

    def _missing_nbytes(self, most_nbytes: int) -> int:
        if len(self._begun) < _LENGTH.size:
            return _LENGTH.size - len(self._begun)
        (nbytes,) = _LENGTH.unpack_from(self._begun)
        if not 1 <= nbytes <= most_nbytes:
            raise BadFrame(bytes(self._begun), f"the length of a frame as {nbytes} bytes")
        return int(_LENGTH.size + nbytes - len(self._begun))

    def _read(self, nbytes: int) -> bytes | None:
        try:
            return self.connection.recv(nbytes)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # The peer closed with unread data: Linux reports that once, then returns the peer's last data.
            try:
                return self.connection.recv(nbytes)
            except OSError:
                return b""
        except OSError:
            return b""


def connect(
    family: int, address: Address, deadline: Deadline, poll_s: float, check: Check
) -> socket.socket | OSError:
    """Return a non-blocking TCP connection, or the error. Exceptions of `check` are raised."""
    with contextlib.ExitStack() as undo:
        try:
            new = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            new.setblocking(False)
            code = new.connect_ex(address)
        except OSError as error:
            return error
        poll = select.poll()
        poll.register(new, select.POLLOUT)
        while code == errno.EINPROGRESS:
            left_s = deadline.left_s()
            if poll.poll(min(left_s, poll_s) * 1000):
                code = new.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                break
            if left_s <= 0:
                code = errno.ETIMEDOUT
            check()
        if code == 0 and _has_met_itself(new):
            code = errno.ECONNREFUSED
        if code:
            return OSError(code, os.strerror(code))
        undo.pop_all()
        return new


def _has_met_itself(connection: socket.socket) -> bool:
    """Return whether a socket is connected to itself.

    That happens on one host if no process listens at a port and the kernel chooses it for this socket.
    """
    try:
        return bool(connection.getsockname() == connection.getpeername())
    except OSError:  # closed again: the next call on it fails
        return False


def listen(family: int, address: Address) -> socket.socket:
    """Return a non-blocking listener at exactly this address. Raise OSError if that fails."""
    new = socket.socket(family, socket.SOCK_STREAM)
    try:
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last world's connections may exist
        if family == socket.AF_INET6:
            new.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        new.setblocking(False)
        new.bind(address)
        new.listen(_BACKLOG)
    except BaseException:
        new.close()
        raise
    return new


def watch_link(connection: socket.socket, *, is_always_read: bool) -> None:
    """Make the kernel report a cut link, or a host that went down, as an error of the connection.

    is_always_read: data must be acknowledged in time, too. If the other end reads only from time to time, a
    full buffer would count as a cut.
    """
    options = {  # an idle connection is probed every quarter of CUT_S
        socket.TCP_KEEPIDLE: max(CUT_S // 4, 1),
        socket.TCP_KEEPINTVL: max(CUT_S // 4, 1),
        socket.TCP_KEEPCNT: 3,
    }
    if is_always_read:
        options[socket.TCP_USER_TIMEOUT] = CUT_S * 1000
    with contextlib.suppress(OSError):  # best effort: without them the deadline ends a wait
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
