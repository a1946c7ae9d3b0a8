"""Worlds, which ranks join: identifier, key and address; and one rank's attempt to join."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from dataclasses import dataclass, field

from .._arguments import integer
from .._config.settings import MAX_RANKS, parse_address
from .._system.deadline import Deadline
from . import handshake
from .framed_socket import CHECK_S, POLL_S, Check, FramedSocket
from .handshake import Hello

SILENCE_S = 10.0  # a wait for ranks is logged after this time, long before its timeout


@dataclass(frozen=True)
class World:
    """A world that `nprocs` ranks can join once; made by `shmring.world`. It can be pickled and holds no
    descriptor.

    Every process that has it can join, so give it only to the ranks.

    Parameters
    ----------
    id : str
        A text of 1 to 512 bytes, different for every world.
    key : bytes
        At least 16 bytes, by which the ranks authenticate each other.
    nprocs : int
        Number of ranks.
    address : str, optional
        The address at which rank 0 listens for ranks of other hosts, as "host:port", "host" or "[::1]:port".
        Without it all ranks are on one host.
    epoch : int
        `Comm.epoch` of its communicator. `Comm.grow` sets it.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument.

    Examples
    --------
    See `world`.
    """

    id: str
    key: bytes = field(repr=False, default=b"")
    nprocs: int = 0
    address: str | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) and not self.key:
            raise TypeError("a World is made by shmring.world(nprocs), which chooses its id and key")
        if not isinstance(self.id, str) or not 1 <= len(self.id.encode()) <= 512:
            raise ValueError(f"id is {self.id!r:.60}; it must be a text of 1 to 512 bytes")
        if not isinstance(self.key, bytes) or len(self.key) < 16:
            raise ValueError("key must be bytes, at least 16")
        object.__setattr__(self, "nprocs", check_nprocs(self.nprocs))
        if self.address is not None:
            parse_address("address", self.address)
        if not isinstance(self.epoch, int) or self.epoch < 0:
            raise ValueError(f"epoch is {self.epoch!r}; it must be an int of 0 or more")

    @property
    def tag(self) -> bytes:
        """A public hash by which ranks detect that they have connected to another world. It hides the id."""
        return hashlib.sha256(b"shmring tag " + self.id.encode()).digest()[: handshake.TAG_NBYTES]


def world(nprocs: int, *, address: str | None = None) -> World:
    """Return a new world for `nprocs` ranks. Pickle it to them; each joins with its own rank.

    Parameters
    ----------
    nprocs : int
        Number of ranks.
    address : str, optional
        "host:port" of rank 0's host. With it, the ranks may be on several hosts.

    Returns
    -------
    World
        Can be joined once.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument.

    Examples
    --------
    >>> w = shmring.world(1)
    >>> with shmring.init(w, rank=0) as comm:
    ...     comm.size
    1
    """
    return World(id=secrets.token_hex(16), key=secrets.token_bytes(32), nprocs=nprocs, address=address)


def check_nprocs(nprocs: int) -> int:
    """Return `nprocs` as an int. Raise TypeError or ValueError if it is invalid."""
    count = integer("nprocs", nprocs)
    if not 1 <= count <= MAX_RANKS:
        raise ValueError(f"nprocs is {count}; allowed: 1 to {MAX_RANKS}")
    return count


def nothing_to_check() -> None:
    """Check nothing: no other rank is connected yet that could report an error."""


@dataclass(frozen=True)
class JoinRequest:
    """One rank's attempt to join a world: the identity of its host, a deadline, and a check that may end it.

    A wait calls `check` at least every 20 ms; it may raise. listener: rank 0's listener, if it has one
    already. is_invited: True on other ranks in that case; if rank 0 does not listen, it does not wait for
    them any more.
    """

    world: World
    rank: int
    identity: str
    deadline: Deadline
    check: Check = nothing_to_check
    listener: socket.socket | None = None
    is_invited: bool = False

    @property
    def timeout_s(self) -> float:
        """The timeout that the caller gave."""
        return self.deadline.timeout_s

    def is_over(self) -> bool:
        return self.deadline.is_over()

    def poll_s(self) -> float:
        """Return the longest wait in one piece."""
        return POLL_S if self.check is nothing_to_check else CHECK_S

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
        """Return the next frame; empty if the other side has closed, None if the deadline has passed."""
        return sock.await_frame(most_nbytes, self.deadline, self.poll_s(), self.check)

    def hello(self, peer: int, purpose: bytes) -> Hello:
        nonce = os.urandom(handshake.NONCE_NBYTES)
        return Hello(self.rank, self.world.nprocs, nonce, self.identity, purpose, peer, self.world.tag)

    def prove(self, role: bytes, hello: Hello, nprocs: int, nonce: bytes) -> bytes:
        return handshake.prove(self.world.key, self.world.id, role, hello, nprocs, nonce)


def named(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 1, 2"; beyond 8 ranks only the number of the others."""
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
