"""What ranks of different hosts tell each other beside their calls: that it is over and why, or that they
leave.

It goes through the control channels, which nothing blocks: when a connection for data ends, the control
channel says why.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from .. import errors
from ..errors import Error
from .channels import LEAVING, MOST_NBYTES, OVER, Channels

_SENT_ATTRIBUTES = ("rank", "op", "seq", "host", "cause", "reason", "calls")
_LAST_S = 1.0  # for what was sent and is not yet on its way when a rank leaves


class Notifications:
    """One rank's part in it, over its control channels, whose maker closes them."""

    def __init__(self, socks: Mapping[int, socket.socket], channels: Channels) -> None:
        self._addresses = {rank: _address_of(sock) for rank, sock in socks.items()}
        self._channels = channels
        self._has_notified = False
        self._notified_call: int | None = None
        self.error: Error | None = None  # the first that came

    def notify_abort(self, error: Error) -> None:
        """Everyone else learns that it is over and why, once and as far as they are there."""
        if self._has_notified:
            return
        self._channels.notify(OVER, _pack(error))
        self._has_notified = True  # last: an exception before it has this called again

    def leave(self) -> None:
        """Everyone else learns that this rank closes the communicator."""
        self._channels.notify(LEAVING, b"")

    def poll(self) -> Error | None:
        """What others have told so far: why it is over, or None."""
        reason = self._channels.abort_reason() if self.error is None else None
        if reason is not None:
            self.error = _error_in(reason[1], reason[0])
        return self.error

    def compare_calls(self, seq: int, fingerprint: int, count: int) -> int | None:
        """Of a rank that has waited for a while: who waits in another collective of that number, or None.

        Else two that wait for each other would do so until it is late: nothing comes that would tell them.
        """
        if self._notified_call != seq:
            self._notified_call = seq
            self._channels.notify_call(seq, fingerprint, count)
        return self._channels.other_call(seq, fingerprint)

    def call_of(self, rank: int) -> tuple[int, int, int] | None:
        """(seq, fingerprint, count) of the collective in which a rank has last said that it waits."""
        return self._channels.call_of(rank)

    def await_abort(self, rank: int | None, within_s: float) -> Error | None:
        """What a rank has told whose other connection has ended, or anybody else meanwhile; None: anybody."""
        deadline = time.monotonic() + within_s
        while self.poll() is None and time.monotonic() < deadline:
            if rank is not None and self._channels.has_ended(rank):
                return self.poll()
            self._channels.await_news(min(0.02, within_s))
        return self.error

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it closes the communicator."""
        return self._channels.has_left(rank)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's connection has ended, as far as `poll` has seen."""
        return self._channels.has_ended(rank)

    def address_of(self, rank: int) -> str:
        """Where a rank runs, as the network has it."""
        return self._addresses.get(rank, "another host")

    def close(self) -> None:
        """Stop listening, once what was sent is on its way."""
        self._channels.close(_LAST_S)

    def disown(self) -> None:
        """In a forked child."""
        self._channels.disown()


def _address_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # it has been closed already
        return "another host"


def _pack(error: Error) -> bytes:
    attributes = {name: getattr(error, name) for name in _SENT_ATTRIBUTES if hasattr(error, name)}
    body = json.dumps({"type": type(error).__name__, "text": str(error), **attributes}).encode()
    if len(body) > MOST_NBYTES:  # what thousands of ranks called
        body = json.dumps({"type": type(error).__name__, "text": str(error)[:2000]}).encode()
    return body


def _error_in(body: bytes, rank: int) -> Error:
    try:
        fields: dict[str, Any] = json.loads(body)
        kind = getattr(errors, str(fields["type"]), None)
        error = kind(str(fields["text"])) if isinstance(kind, type) and issubclass(kind, Error) else None
    except (ValueError, KeyError, TypeError):
        error = None
    if error is None:
        return Error(f"rank {rank} said that it is over, in words that this version does not know", rank=rank)
    for name in _SENT_ATTRIBUTES:
        value = fields.get(name)
        if hasattr(error, name):
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
