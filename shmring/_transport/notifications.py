"""Notifications between ranks of different hosts: abort with its reason, leaving, and the current call.

They use the channels, in which no message delays them: if a connection of the collectives ends, the channel
gives the reason.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from .. import errors
from ..errors import Error
from .channels import ABORT, LEAVING, MOST_NBYTES, Channels

_SENT_ATTRIBUTES = ("rank", "op", "seq", "host", "cause", "reason", "calls")


class Notifications:
    """One rank's notifications over its channels. Their creator closes the sockets."""

    def __init__(self, socks: Mapping[int, socket.socket], channels: Channels) -> None:
        self._addresses = {rank: _address_of(sock) for rank, sock in socks.items()}
        self.channels = channels
        self._has_notified = self._is_sending = False
        self._notified_call: int | None = None
        self.error: Error | None = None  # the first error received

    def notify_abort(self, error: Error) -> None:
        """Notify all reachable ranks, once, that the communicator aborted, and why."""
        if not self._has_notified:
            self.channels.notify(ABORT, _pack(error))
            self._has_notified = True  # after each step: after an exception, this is called again
        if not self._is_sending and self.channels.has_unsent():
            # A socket is full, and this rank may make no more calls.
            sender = threading.Thread(target=self.channels.send_unsent, name="shmring-abort", daemon=True)
            with contextlib.suppress(RuntimeError):  # without a thread, the ranks learn of it later
                sender.start()
        self._is_sending = True

    def leave(self) -> None:
        """Notify all other ranks that this rank closes the communicator."""
        self.channels.notify(LEAVING, b"")

    def poll(self) -> Error | None:
        """Return the error that another rank has sent, or None."""
        reason = self.channels.abort_reason() if self.error is None else None
        if reason is not None:
            self.error = _error_in(reason[1], reason[0])
        return self.error

    def compare_calls(self, seq: int, fingerprint: int, count: int) -> int | None:
        """Report the collective in which this rank waits. Return a rank that waits in another one, or None.

        Both collectives have the same number. Without this report, two ranks that wait for each other would
        wait until the timeout, since no data arrive.
        """
        if self._notified_call != seq:
            self._notified_call = seq
            self.channels.notify_call(seq, fingerprint, count)
        return self.channels.other_call(seq, fingerprint)

    def await_abort(self, rank: int | None, within_s: float) -> Error | None:
        """Wait for an error from any rank, and return it. Stop waiting when the channel to `rank` ends."""
        deadline = time.monotonic() + within_s
        while self.poll() is None and time.monotonic() < deadline:
            if rank is not None and self.channels.has_ended(rank):
                return self.poll()
            self.channels.await_news(min(0.02, within_s))
        return self.error

    def address_of(self, rank: int) -> str:
        """Return the network address of a rank."""
        return self._addresses.get(rank, "another host")


def _address_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # already closed
        return "another host"


def _pack(error: Error) -> bytes:
    fields = {name: getattr(error, name) for name in _SENT_ATTRIBUTES if hasattr(error, name)}
    fields |= {"type": type(error).__name__, "text": str(error)}
    body = json.dumps(fields).encode()
    if len(body) > MOST_NBYTES:  # for example the calls of thousands of ranks
        fields = {name: value[:1000] if isinstance(value, str) else value for name, value in fields.items()}
        body = json.dumps(fields | {"calls": ()}).encode()
    return body


def _error_in(body: bytes, rank: int) -> Error:
    try:
        fields: dict[str, Any] = json.loads(body)
        kind = getattr(errors, str(fields["type"]), None)
        error = kind(str(fields["text"])) if isinstance(kind, type) and issubclass(kind, Error) else None
    except (ValueError, KeyError, TypeError):
        error = None
    if error is None:
        return Error(f"rank {rank} ended the communicator; this version cannot read the reason", rank=rank)
    for name in _SENT_ATTRIBUTES:
        value = fields.get(name)
        if hasattr(error, name):
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
