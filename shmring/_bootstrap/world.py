"""Worlds: what ranks are invited to, the address at which several hosts meet, one rank's attempt to join."""

from __future__ import annotations

import hashlib
import operator
import os
import secrets
import socket
import time
from dataclasses import dataclass, field

from .._config.settings import MAX_RANKS, parse_address
from .._system.deadline import Deadline
from . import handshake
from .framed_socket import POLL_S, Check, FramedSocket
from .handshake import Hello

SILENCE_S = 10.0  # a wait of so long for ranks to come is told in the log, long before its timeout
_CHECK_S = 0.02  # `check` is called at least this often


@dataclass(frozen=True)
class World:
    """A meeting that `nprocs` ranks are invited to, once: picklable, holds no descriptor.

    Whoever has it can join, so it goes only where the ranks go. `address` is where rank 0 listens for
    ranks on other hosts: "host:port", "host" or "[::1]:port"; without one all ranks are on one host.
    """

    id: str
    key: bytes = field(repr=False, default=b"")
    nprocs: int = 0
    address: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) and not self.key:
            raise TypeError("a World is made by shmring.world(nprocs), which chooses its id and key")
        if not isinstance(self.id, str) or not 1 <= len(self.id.encode()) <= 512:
            raise ValueError("a world's id is a text of 1 to 512 bytes")
        if not isinstance(self.key, bytes) or len(self.key) < 16:
            raise ValueError("a world's key is at least 16 bytes")
        object.__setattr__(self, "nprocs", check_nprocs(self.nprocs))
        if self.address is not None:
            parse_address("address", self.address)

    @property
    def tag(self) -> bytes:
        """Public: by it ranks notice that they came to another world; it tells nothing of the id."""
        return hashlib.sha256(b"shmring tag " + self.id.encode()).digest()[: handshake.TAG_NBYTES]


def world(nprocs: int, *, address: str | None = None) -> World:
    """A fresh world for `nprocs` ranks; pickle it to them, each joins with its own rank.

    With `address` ("host:port", the host of rank 0) the ranks may be on several hosts.
    """
    return World(id=secrets.token_hex(16), key=secrets.token_bytes(32), nprocs=nprocs, address=address)


def check_nprocs(nprocs: int) -> int:
    """`nprocs` as an int, or TypeError or ValueError."""
    try:
        count = operator.index(nprocs)
    except TypeError:
        raise TypeError(f"nprocs is {nprocs!r}; it must be a whole number") from None
    if not 1 <= count <= MAX_RANKS:
        raise ValueError(f"nprocs is {count}; allowed: 1 to {MAX_RANKS}")
    return count


def nothing_to_check() -> None:
    """There is nobody yet who could tell that the attempt is in vain."""


@dataclass(frozen=True)
class JoinRequest:
    """One rank's attempt to join a world: what it says of itself, until when, and what may end it early.

    `check` is called at least every 20 ms of a wait and may raise.
    `listener`: rank 0's, where it listens at the world's address already; `is_invited`: another, which knows
    that it does, so that its absence means that it ended.
    """

    world: World
    rank: int
    node: str
    timeout_s: float
    deadline: Deadline
    check: Check = nothing_to_check
    listener: socket.socket | None = None
    is_invited: bool = False

    def is_over(self) -> bool:
        return self.deadline.is_over()

    def poll_s(self) -> float:
        """Return the longest wait in one piece."""
        return POLL_S if self.check is nothing_to_check else _CHECK_S

    def now_s(self) -> float:
        """Return the time by the deadline's clock."""
        return self.deadline.clock.now_s()

    def wait_s(self, until_s: float) -> float:
        """Return how long to wait in one piece if the wait ends at `until_s`, by the deadline's clock."""
        return max(0.0, min(until_s - self.now_s(), self.deadline.left_s(), self.poll_s()))

    def pause(self, pause_s: float) -> None:
        until_s = self.now_s() + pause_s
        while (wait_s := self.wait_s(until_s)) > 0:
            time.sleep(wait_s)
            self.check()

    def await_frame(self, sock: FramedSocket, most_nbytes: int) -> bytes | None:
        """The socket's next frame; empty where the other side is gone, None where the deadline passed."""
        return sock.await_frame(most_nbytes, self.deadline, self.poll_s(), self.check)

    def hello(self, peer: int, purpose: bytes) -> Hello:
        nonce = os.urandom(handshake.NONCE_NBYTES)
        return Hello(self.rank, self.world.nprocs, nonce, self.node, purpose, peer, self.world.tag)

    def prove(self, role: bytes, hello: Hello, nprocs: int, nonce: bytes) -> bytes:
        return handshake.prove(self.world.key, self.world.id, role, hello, nprocs, nonce)


def named(ranks: list[int]) -> str:
    """The ranks in words: "rank 3", "ranks 1, 2 and 7 more"."""
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
