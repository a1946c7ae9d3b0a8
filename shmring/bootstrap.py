"""How the ranks of a world find each other on one host and learn to trust each other.

Rank 0 listens on an abstract Unix socket named after the world, so nothing is left in the file system.
A connection must be of the same user (SO_PEERCRED) and hold the world's key (mutual HMAC) before it is
listened to. May know: errors, settings, limits, launchers, handshake, links.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import operator
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import handshake
from .errors import Error, Mismatch, RankFailed, Timeout
from .handshake import BadFrame, Challenge, Hello
from .launchers import Job, find_job
from .limits import explain
from .links import Links
from .settings import MAX_RANKS, Settings

_HANDSHAKE_S = 5.0  # a connection that has not proven itself by then is dropped
_VERDICT_S = 0.5  # how long a rank that gives up waits for rank 0's list of the missing
_SELECT_S = 60.0  # keeps timeouts inside what the selectors can take
_PAUSE_S = (0.001, 0.020)  # between attempts to reach rank 0: first, longest


@dataclass(frozen=True)
class World:
    """A meeting that `nprocs` ranks are invited to, once: picklable, holds no descriptor.

    Whoever has it can join, so it goes only where the ranks go. `address` is for worlds of several
    hosts, which this version does not have yet.
    """

    id: str
    key: bytes = field(repr=False)
    nprocs: int
    address: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not 1 <= len(self.id.encode()) <= 512:
            raise ValueError("a world's id is a text of 1 to 512 bytes")
        if not isinstance(self.key, bytes) or len(self.key) < 16:
            raise ValueError("a world's key is at least 16 bytes")
        object.__setattr__(self, "nprocs", check_nprocs(self.nprocs))
        if self.address is not None:
            raise Error("a world with an address spans hosts: this version of shmring cannot do that yet")


def world(nprocs: int) -> World:
    """A fresh world for `nprocs` ranks; pickle it to them, each joins with its own rank."""
    return World(id=secrets.token_hex(16), key=secrets.token_bytes(32), nprocs=nprocs)


def world_from_environment(environ: Mapping[str, str] = os.environ) -> tuple[World, int] | None:
    """(world, rank) as the launcher of this process has them; None where no launcher is recognised.

    Each call stands for one more world: the n-th call of a process meets the n-th of the other ranks.
    """
    settings = Settings.from_environment(environ)
    job = find_job(settings, environ)
    if job is None:
        return None
    if job.local_size != job.size:
        raise _several_hosts(job, settings)
    _calls[job.name] += 1
    world_id = f"{job.name} #{_calls[job.name]}"
    return World(world_id, settings.key or _common_key(world_id), job.size), job.rank


_calls: collections.Counter[str] = collections.Counter()


def _common_key(world_id: str) -> bytes:
    # No secret: without one to be had, what protects a world within one host is that the kernel vouches
    # for the other side's user (SO_PEERCRED), and processes of one user trust each other anyway. The key
    # then only tells jobs apart.
    return hashlib.sha256(f"shmring {os.geteuid()} {world_id}".encode()).digest()


def _several_hosts(job: Job, settings: Settings) -> Error:
    where = f"{job.launcher} runs this job's {job.size} ranks on several hosts"
    if settings.key is None:
        return Error(
            f"{where}, and hosts trust each other only by a key: give the same one to all ranks through "
            "SHMRING_KEY, or SHMRING_KEY_FILE (a file with mode 0600). Several hosts also need a later "
            "version of shmring than this one"
        )
    return Error(f"{where}: this version of shmring cannot do that yet")


def check_nprocs(nprocs: int) -> int:
    """`nprocs` as an int, or TypeError or ValueError."""
    try:
        count = operator.index(nprocs)
    except TypeError:
        raise TypeError(f"nprocs is {nprocs!r}; it must be a whole number") from None
    if not 1 <= count <= MAX_RANKS:
        raise ValueError(f"nprocs is {count}; allowed: 1 to {MAX_RANKS}")
    return count


def join(world: World, rank: int, *, timeout_s: float, node: str | None = None) -> Links:
    """Meet the other ranks of the world; returns when all have come.

    `node` overrides SHMRING_NODE. Raises the same error on every rank that got in: Timeout names the
    ranks that never came, RankFailed one that ended meanwhile, Mismatch ranks that disagree about
    nprocs. A rank with another key, or one that comes twice, gets an Error.
    """
    rank = operator.index(rank)
    if not 0 <= rank < world.nprocs:
        raise ValueError(f"rank is {rank}; a world of {world.nprocs} has ranks 0 to {world.nprocs - 1}")
    if not timeout_s > 0:
        raise ValueError(f"the timeout is {timeout_s!r}; it must be more than 0 seconds")
    node = (Settings.from_environment().node if node is None else node) or ""
    _refuse_second_use(world, rank)
    if world.nprocs == 1:
        links = Links(0, 1, {})
    else:
        deadline = time.monotonic() + timeout_s
        if rank == 0:
            with contextlib.closing(_Host(world, node, deadline, timeout_s)) as host:
                links = host.gather()
        else:
            links = _Guest(world, rank, node, deadline, timeout_s).visit()
    _used.append((world.id, rank))
    return links


# The last worlds joined from this process: catches the common mistake of using one twice. Ranks in
# other processes are caught by the marker that rank 0 holds while the world lives.
_used: collections.deque[tuple[str, int]] = collections.deque(maxlen=1024)


def _refuse_second_use(world: World, rank: int) -> None:
    if (world.id, rank) in _used:
        raise _second_use(rank)


def _second_use(rank: int) -> Error:
    return Error(
        f"rank {rank} has joined this world before, or the world has already met: a World is single-use, "
        "make a fresh one with shmring.world(nprocs) (with SHMRING_RANK set by hand: give each job its "
        "own SHMRING_ADDR)",
        rank=rank,
    )


def _meeting_point(world: World, suffix: bytes = b"") -> bytes:
    # Hashed, so that /proc/net/unix does not show the id; with the uid, so that two users who chose
    # the same SHMRING_ADDR do not meet.
    digest = hashlib.sha256(b"shmring %d " % os.geteuid() + world.id.encode()).hexdigest()[:40]
    return b"\0shmring." + digest.encode() + suffix


def _has_met(world: World) -> bool:
    with _new_socket() as probe:
        try:
            probe.connect(_meeting_point(world, b".met"))
        except BlockingIOError:  # its queue is full of latecomers: so it is there
            return True
        except OSError:
            return False
        return True


def _new_socket() -> socket.socket:
    # Packets, not a stream: a frame arrives whole or not at all.
    try:
        new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise explain(error, "opening a socket to meet the other ranks") from error
    new.setblocking(False)
    return new


def _peer_uid_and_pid(connection: socket.socket) -> tuple[int, int]:
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return uid, pid


def _named(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


@dataclass
class _Stranger:
    """A connection that has yet to prove itself."""

    connection: socket.socket
    pid: int
    expires: float
    hello: Hello | None = None
    nonce: bytes = b""


class _Host:
    """Rank 0's side: one loop over the listener, strangers, and ranks that wait for the rest."""

    def __init__(self, world: World, node: str, deadline: float, timeout_s: float) -> None:
        self._world = world
        self._node = node
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._joined: dict[int, socket.socket] = {}
        self._turned_away: collections.deque[str] = collections.deque(maxlen=3)
        self._most_strangers = 2 * world.nprocs + 16
        self._selector = selectors.DefaultSelector()
        self._listener = _new_socket()
        self._listening = False

    def gather(self) -> Links:
        """Links to all ranks, or the error that all of them get."""
        self._listen()
        try:
            while len(self._joined) < self._world.nprocs - 1:
                self._step()
            ready = handshake.pack_frame(handshake.READY)
            for rank, connection in self._joined.items():
                self._tell(rank, connection, ready)
            links = Links(0, self._world.nprocs, dict(sorted(self._joined.items())), marker=self._mark())
        except BaseException as error:
            frame = handshake.pack_frame(handshake.FAILED, error)
            for connection in self._joined.values():
                with contextlib.suppress(OSError):
                    connection.send(frame)
            raise
        self._joined.clear()
        return links

    def close(self) -> None:
        self._selector.close()
        self._listener.close()
        for connection in (*self._strangers, *self._joined.values()):
            connection.close()

    def _listen(self) -> None:
        if _has_met(self._world):
            raise _second_use(0)
        try:
            self._listener.bind(_meeting_point(self._world))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _second_use(0) from error
            raise explain(error, "opening the meeting point of the ranks") from error
        self._listener.listen(min(self._most_strangers, 4096))

    def _mark(self) -> socket.socket:
        """A listening name that nobody answers at: it tells latecomers that the world has met."""
        marker = _new_socket()
        with contextlib.suppress(OSError):  # best effort: only a clearer error depends on it
            marker.bind(_meeting_point(self._world, b".met"))
            marker.listen(1)
        return marker

    def _hear_strangers(self) -> None:
        """Listen while there is room: a flood of silent connections fills the kernel's queue, not ours."""
        room = len(self._strangers) < self._most_strangers
        if room and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif not room and self._listening:
            self._selector.unregister(self._listener)
        self._listening = room

    def _step(self) -> None:
        now = time.monotonic()
        for stranger in [s for s in self._strangers.values() if s.expires <= now]:
            self._turn_away(stranger, f"did not say who it is within {_HANDSHAKE_S:.0f} s")
        if now >= self._deadline:
            raise self._missing(f"did not come within {self._timeout_s:g} s")
        self._hear_strangers()
        next_event = min([self._deadline, *(s.expires for s in self._strangers.values())])
        for key, _ in self._selector.select(min(next_event - now, _SELECT_S)):
            key.data()

    def _missing(self, what: str) -> Timeout:
        missing = [rank for rank in range(1, self._world.nprocs) if rank not in self._joined]
        hints = "".join(f"; {hint}" for hint in self._turned_away)
        return Timeout(f"{_named(missing)} of {self._world.nprocs} {what}{hints}", rank=missing[0])

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            raise explain(error, "accepting a rank's connection") from error
        connection.setblocking(False)
        uid, pid = _peer_uid_and_pid(connection)
        if uid != os.geteuid():
            self._turned_away.append(f"a process {pid} of another user (uid {uid}) was turned away")
            connection.close()
            return
        stranger = _Stranger(connection, pid, time.monotonic() + _HANDSHAKE_S)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(stranger))

    def _turn_away(self, stranger: _Stranger, why: str) -> None:
        self._turned_away.append(f"process {stranger.pid} {why}")
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]
        stranger.connection.close()

    def _hear(self, stranger: _Stranger) -> None:
        try:
            packet = stranger.connection.recv(handshake.UNPROVEN_NBYTES)
            if not packet:
                self._turn_away(stranger, "hung up before it had proven that it holds the world's key")
            elif stranger.hello is None:
                self._challenge(stranger, Hello.unpack(packet))
            else:
                self._admit(stranger, stranger.hello, handshake.unpack_proof(packet))
        except BadFrame as error:
            if error.version_differs:
                with contextlib.suppress(OSError):
                    stranger.connection.send(handshake.MAGIC)
            self._turn_away(stranger, f"sent {error}")
        except OSError as error:
            self._turn_away(stranger, f"was lost: {error.strerror}")

    def _challenge(self, stranger: _Stranger, hello: Hello) -> None:
        stranger.hello, stranger.nonce = hello, os.urandom(handshake.NONCE_NBYTES)
        proof = self._prove(b"rank 0", hello, stranger.nonce)
        stranger.connection.send(Challenge(self._world.nprocs, stranger.nonce, proof).pack())

    def _prove(self, role: bytes, hello: Hello, nonce: bytes) -> bytes:
        return handshake.prove(self._world.key, self._world.id, role, hello, self._world.nprocs, nonce)

    def _admit(self, stranger: _Stranger, hello: Hello, proof: bytes) -> None:
        if not handshake.proves(proof, self._prove(b"guest", hello, stranger.nonce)):
            self._turn_away(stranger, f"claimed to be rank {hello.rank} but holds another key")
            return
        error = self._objection(hello)
        if error is not None:
            with contextlib.suppress(OSError):
                stranger.connection.send(handshake.pack_frame(handshake.FAILED, error))
            raise error
        rank, connection = hello.rank, stranger.connection
        del self._strangers[connection]
        self._joined[rank] = connection
        self._selector.modify(connection, selectors.EVENT_READ, lambda: self._hear_rank(rank, connection))

    def _objection(self, hello: Hello) -> Error | None:
        """What is wrong with a rank that does belong here; ends the meeting for all."""
        rank = hello.rank
        if hello.nprocs != self._world.nprocs:
            return Mismatch(
                f"rank 0 joined a world of {self._world.nprocs} ranks, rank {rank} one of {hello.nprocs}: "
                "all must be given the same World",
                rank=rank,
            )
        if rank in self._joined or not 0 < rank < self._world.nprocs:
            return Error(f"rank {rank} joined twice: each process needs a rank of its own", rank=rank)
        if hello.node != self._node:
            return Error(
                f"rank 0 is on node {self._node!r}, rank {rank} on node {hello.node!r} (SHMRING_NODE): "
                "worlds of several nodes are not supported by this version of shmring yet",
                rank=rank,
            )
        return None

    def _hear_rank(self, rank: int, connection: socket.socket) -> None:
        """A rank that waits speaks only to give up; otherwise it is gone."""
        try:
            packet = connection.recv(handshake.FRAME_NBYTES)
        except OSError:
            packet = b""
        if packet:
            raise self._missing(f"did not come while rank {rank} would wait")
        self._lose(rank)

    def _tell(self, rank: int, connection: socket.socket, frame: bytes) -> None:
        try:
            connection.send(frame)
        except OSError:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        self._joined.pop(rank).close()
        raise _ended(rank)


class _Guest:
    """Any other rank's side: find rank 0, prove, wait for its word."""

    def __init__(self, world: World, rank: int, node: str, deadline: float, timeout_s: float) -> None:
        self._world = world
        self._rank = rank
        self._node = node
        self._deadline = deadline
        self._timeout_s = timeout_s

    def visit(self) -> Links:
        """Links to rank 0 once all have come."""
        seen = False
        pause_s, longest_s = _PAUSE_S
        while True:
            connection = self._connect(seen)
            if connection is not None:
                seen = True
                try:
                    if self._introduce(connection) and self._wait(connection):
                        return Links(self._rank, self._world.nprocs, {0: connection})
                except BaseException:
                    connection.close()
                    raise
                connection.close()
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise self._never_came()
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, longest_s)

    def _connect(self, seen: bool) -> socket.socket | None:
        """A connection to rank 0; None where it is not there yet (or busy)."""
        connection = _new_socket()
        try:
            connection.connect(_meeting_point(self._world))
        except OSError as error:
            connection.close()
            if error.errno == errno.EAGAIN:  # its queue is full
                return None
            if error.errno != errno.ECONNREFUSED:
                raise explain(error, "connecting to rank 0") from error
            if _has_met(self._world):
                raise _second_use(self._rank) from error
            if seen:
                raise _ended(0) from error
            return None
        uid, pid = _peer_uid_and_pid(connection)
        if uid != os.geteuid():
            connection.close()
            raise Error(f"the meeting point of this world is held by another user (uid {uid}, process {pid})")
        return connection

    def _introduce(self, connection: socket.socket) -> bool:
        """Mutual proof; False where rank 0 hung up, which it does to those who are slow."""
        hello = Hello(self._rank, self._world.nprocs, os.urandom(handshake.NONCE_NBYTES), self._node)
        if not _sent(connection, hello.pack()):
            return False
        packet = self._receive(connection, self._deadline, handshake.UNPROVEN_NBYTES)
        if packet is None:
            raise self._never_came()
        if not packet:
            return False
        try:
            challenge = Challenge.unpack(packet)
        except BadFrame as error:
            raise Error(
                "rank 0 runs another version of shmring: install the same one for all ranks"
                if error.version_differs or packet == handshake.MAGIC
                else f"rank 0 sent {error}",
                rank=0,
            ) from error
        prove = self._prover(hello, challenge)
        if not handshake.proves(challenge.proof, prove(b"rank 0")):
            raise Error(
                f"rank {self._rank} holds another key than rank 0: give all ranks the same World "
                "(or SHMRING_KEY)",
                rank=self._rank,
            )
        return _sent(connection, handshake.pack_proof(prove(b"guest")))

    def _prover(self, hello: Hello, challenge: Challenge) -> Callable[[bytes], bytes]:
        world = self._world
        return lambda role: handshake.prove(
            world.key, world.id, role, hello, challenge.nprocs, challenge.nonce
        )

    def _wait(self, connection: socket.socket) -> bool:
        """Rank 0's word that all have come; False where it hung up."""
        packet = self._receive(connection, self._deadline, handshake.FRAME_NBYTES)
        if packet is None:
            # Rank 0 knows who is missing: give up through it, so that all ranks raise the same.
            _sent(connection, handshake.pack_frame(handshake.GIVING_UP))
            packet = self._receive(connection, time.monotonic() + _VERDICT_S, handshake.FRAME_NBYTES)
            if packet is None:
                raise Timeout(f"not all {self._world.nprocs} ranks came within {self._timeout_s:g} s")
        if not packet:
            return False
        try:
            _, failure = handshake.unpack_frame(packet)
        except BadFrame as error:
            raise Error(f"rank 0 sent {error}", rank=0) from error
        if failure is not None:
            raise failure
        return True

    def _receive(self, connection: socket.socket, deadline: float, most_nbytes: int) -> bytes | None:
        """One packet; empty where rank 0 hung up, None where the deadline passed."""
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            connection.settimeout(min(left_s, _SELECT_S))
            try:
                return connection.recv(most_nbytes)
            except TimeoutError:
                continue
            except ConnectionResetError:
                return _last_word(connection, most_nbytes)
            except OSError:
                return b""

    def _never_came(self) -> Timeout:
        return Timeout(
            f"rank 0 of {self._world.nprocs} did not come within {self._timeout_s:g} s (ranks meet only "
            "within one network namespace: containers need a common one)",
            rank=0,
        )


def _last_word(connection: socket.socket, most_nbytes: int) -> bytes:
    """What came before the peer closed without having read all: Linux tells of the closing first, once."""
    try:
        return connection.recv(most_nbytes)
    except OSError:
        return b""


def _sent(connection: socket.socket, packet: bytes) -> bool:
    try:
        connection.send(packet)
    except OSError:
        return False
    return True


def _ended(rank: int) -> RankFailed:
    return RankFailed(f"rank {rank} ended while the ranks were meeting", rank=rank, cause="connection closed")
