"""What ranks of different hosts tell each other beside their calls: that it is over and why, or that they
leave.

Every rank has a connection for it to every rank of another host, which nothing can stop up: when the one
for data ends, what was told before on this one says why. May know: errors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from . import errors
from .errors import Error

_HEAD = struct.Struct("<II")  # kind, bytes that follow
_OVER, _LEAVING = 1, 2
_MOST_NBYTES = 1 << 16
_TOLD_ATTRIBUTES = ("rank", "op", "seq", "host", "cause", "reason", "calls")


class Alarms:
    """One rank's ends of those connections, by the rank at the other one; their maker closes them."""

    def __init__(self, lines: Mapping[int, socket.socket]) -> None:
        self._lines = dict(lines)
        self._rank_of = {line.fileno(): rank for rank, line in lines.items()}
        self._heard: dict[int, bytearray] = {rank: bytearray() for rank in lines}
        self._left: set[int] = set()  # of those that said so
        self._told = False
        self._news = select.epoll()
        for line in lines.values():
            self._news.register(line, select.EPOLLIN)
        self.error: Error | None = None  # the first that was heard

    def fileno(self) -> int:
        """A descriptor that is readable when `hear` would hear something."""
        return self._news.fileno()

    def tell(self, error: Error) -> None:
        """Everyone else learns that it is over and why, once and as far as they are there."""
        if self._told:
            return
        self._told = True
        told = {name: getattr(error, name) for name in _TOLD_ATTRIBUTES if hasattr(error, name)}
        body = json.dumps({"type": type(error).__name__, "text": str(error), **told}).encode()
        self._send(_OVER, body[:_MOST_NBYTES])

    def leave(self) -> None:
        """Everyone else learns that this rank closes the communicator."""
        self._send(_LEAVING, b"")

    def hear(self) -> Error | None:
        """What others have told so far: why it is over, or None."""
        for fd, _ in self._news.poll(0):
            self._read(self._rank_of[fd])
        return self.error

    def hear_out(self, rank: int | None, within_s: float) -> Error | None:
        """What a rank has told whose other connection has ended, or anybody else meanwhile; None: anybody."""
        deadline = time.monotonic() + within_s
        while self.hear() is None and (rank is None or rank in self._heard) and time.monotonic() < deadline:
            with contextlib.suppress(InterruptedError):
                self._news.poll(min(0.02, within_s))
        return self.error

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it closes the communicator."""
        return rank in self._left

    def address_of(self, rank: int) -> str:
        """Where a rank runs, as the network has it."""
        try:
            return str(self._lines[rank].getpeername()[0])
        except (OSError, KeyError):
            return "another host"

    def close(self) -> None:
        """Stop listening."""
        self._news.close()

    def _send(self, kind: int, body: bytes) -> None:
        frame = _HEAD.pack(kind, len(body)) + body
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # who is gone, or reads nothing, finds out by itself
                line.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _read(self, rank: int) -> None:
        try:
            some = self._lines[rank].recv(_MOST_NBYTES, socket.MSG_DONTWAIT)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return
            some = b""
        if not some:
            self._forget(rank)
            return
        heard = self._heard[rank]
        heard += some
        while len(heard) >= _HEAD.size:
            kind, nbytes = _HEAD.unpack_from(heard)
            if kind not in (_OVER, _LEAVING) or nbytes > _MOST_NBYTES:
                self._forget(rank)
                return
            if len(heard) < _HEAD.size + nbytes:
                return
            body = bytes(heard[_HEAD.size : _HEAD.size + nbytes])
            del heard[: _HEAD.size + nbytes]
            if kind == _LEAVING:
                self._left.add(rank)
            elif self.error is None:
                self.error = _error_in(body, rank)

    def _forget(self, rank: int) -> None:
        self._news.unregister(self._lines[rank])
        del self._heard[rank]


def _error_in(body: bytes, rank: int) -> Error:
    try:
        told: dict[str, Any] = json.loads(body)
        kind = getattr(errors, str(told["type"]), None)
        error = kind(str(told["text"])) if isinstance(kind, type) and issubclass(kind, Error) else None
    except (ValueError, KeyError, TypeError):
        error = None
    if error is None:
        return Error(f"rank {rank} said that it is over, in words that this version does not know", rank=rank)
    for name in _TOLD_ATTRIBUTES:
        value = told.get(name)
        if hasattr(error, name):
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
