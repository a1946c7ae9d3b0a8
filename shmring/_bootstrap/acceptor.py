"""The listening side while ranks connect: it accepts peers that prove to be ranks, and rejects all others.

A pending peer costs one descriptor and less than 1 KiB. Their number and their time are limited. Rejected
peers are counted, and one of each kind is logged.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._system.limits import NO_DESCRIPTOR, explain
from ..errors import WAIT_LONGER, Error, Mismatch, RankFailed, Timeout
from . import handshake
from .framed_socket import FramedSocket
from .handshake import BadFrame, Challenge, Hello
from .world import SILENCE_S, JoinRequest, named

HANDSHAKE_S = 5.0  # a connection without a proof is closed after this time
_FULL_S = 1.0  # ... or after this time if other connections wait to be accepted
_MOST_PENDING = 128  # limit of pending peers, plus twice the number of awaited ranks
_LATECOMERS_S = 0.3  # after a failed start, ranks that connect within this time get the error
_SHMRUN = "with shmrun every host needs the same --nnodes and -n, and a --node-rank of its own"

_log = logging.getLogger("shmring")
# Kinds of rejected connections that also occur without an attack: they are no warnings.
_HARMLESS = ("hung up", "another world")


class Refused(Exception):
    """A peer that holds the key is not expected here. This ends its connection, but not the start."""


@dataclass
class _PendingPeer:
    """A connection whose peer has not proven yet that it is a rank."""

    sock: FramedSocket
    who: str
    since_s: float  # by the clock of the meeting's deadline
    hello: Hello | None = None
    nonce: bytes = b""


class Acceptor:
    """Accept connections, and pass those of proven ranks to `take_in`.

    `take_in` raises Refused to close one connection, or an Error to end the start. That rank gets the text.
    """

    def __init__(
        self,
        request: JoinRequest,
        listener: socket.socket,
        purposes: Sequence[bytes],
        num_awaited: int,
        take_in: Callable[[Hello, FramedSocket], None],
    ) -> None:
        self._request = request
        self._listener = listener
        self._purposes = purposes
        self._take_in = take_in
        self._pending: dict[FramedSocket, _PendingPeer] = {}  # the oldest first
        self._most_pending = most_pending(num_awaited)
        try:
            self._selector = selectors.DefaultSelector()
        except OSError as error:
            raise explain(error, "waiting for the other ranks' connections") from error
        self._listening = False
        self._turned_away: collections.Counter[str] = collections.Counter()
        self._latest: collections.deque[str] = collections.deque(maxlen=3)

    def watch(self, sock: FramedSocket, on_frame: Callable[[], None]) -> None:
        """Call `on_frame` when data arrive from a rank that was taken in."""
        self._selector.register(sock, selectors.EVENT_READ, on_frame)

    def turn_to(self, take_in: Callable[[Hello, FramedSocket], None]) -> None:
        """Pass later ranks to `take_in`, and stop watching the ranks that were taken in."""
        self._take_in = take_in
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._listener and key.fileobj not in self._pending:
                self._selector.unregister(key.fileobj)

    def serve(self, by_s: float = float("inf")) -> None:
        """Wait for events, at most until `by_s` by the deadline's clock, and handle them."""
        now_s = self._request.now_s()
        patience_s = HANDSHAKE_S if len(self._pending) < self._most_pending else _FULL_S
        oldest = next(iter(self._pending.values()), None)
        while oldest is not None and oldest.since_s + patience_s <= now_s:
            self._turn_away(oldest, "silent", f"did not prove who it is within {patience_s:g} s")
            oldest = next(iter(self._pending.values()), None)
        self._request.check()
        self._listen(len(self._pending) < self._most_pending)
        until_s = by_s if oldest is None else min(by_s, oldest.since_s + patience_s)
        for key, _ in self._selector.select(self._request.wait_s(until_s)):
            key.data()

    def hints(self) -> str:
        """Return a text about rejected connections, for the message about missing ranks."""
        more = self._turned_away.total() - len(self._latest)
        before = f"; {more} other connections were turned away" if more else ""
        return before + "".join(f"; {hint}" for hint in self._latest)

    def close(self) -> None:
        """Close all pending connections. The caller closes the listener."""
        self._selector.close()
        self._take_in = _nobody  # break a reference cycle
        for sock in self._pending:
            sock.close()
        self._pending.clear()
        if self._turned_away:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(self._turned_away.items()))
            what = "rank %d turned away %d connections in all (%s)"
            _log.info(what, self._request.rank, self._turned_away.total(), kinds)
            self._turned_away.clear()

    def _listen(self, room: bool) -> None:
        """Listen only while there is room: a flood of silent connections then fills the kernel's queue."""
        if room and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif not room and self._listening:
            self._selector.unregister(self._listener)
        self._listening = room

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the peer has closed it again
            return
        except OSError as error:
            if error.errno in NO_DESCRIPTOR and self._pending:
                self._listen(False)  # until the descriptor of a pending peer is free again
                self._most_pending = max(1, len(self._pending))
                return
            raise explain(error, "accepting a rank's connection") from error
        is_local = connection.family == socket.AF_UNIX
        sock = FramedSocket(connection, "" if is_local else address[0])
        who = "" if is_local else f"{address[0]} port {address[1]}"
        if not who:
            uid, pid = peer_uid_and_pid(connection)
            who = f"process {pid}"
            if uid != os.geteuid():
                sock.close()
                self._count("another user", f"a process {pid} of another user (uid {uid}) was turned away")
                return
        pending = self._pending[sock] = _PendingPeer(sock, who, self._request.now_s())
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._receive(pending))

    def _count(self, kind: str, what: str) -> None:
        self._turned_away[kind] += 1
        self._latest.append(what)
        if self._turned_away[kind] == 1:
            level = logging.INFO if kind in _HARMLESS else logging.WARNING
            _log.log(level, "while the ranks met at rank %d: %s", self._request.rank, what)

    def _turn_away(self, pending: _PendingPeer, kind: str, why: str) -> None:
        self._forget(pending)
        pending.sock.close()
        self._count(kind, f"{pending.who} {why}")

    def _forget(self, pending: _PendingPeer) -> None:
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock]

    def _receive(self, pending: _PendingPeer) -> None:
        try:
            packet = pending.sock.receive(handshake.UNPROVEN_NBYTES)
            if packet is None:
                return
            if not packet:
                why = "hung up before it had proven that it holds the world's key"
                self._turn_away(pending, "hung up", why)
            elif pending.hello is None:
                self._challenge(pending, Hello.unpack(packet))
            else:
                self._admit(pending, pending.hello, handshake.unpack_proof(packet))
        except BadFrame as error:
            if error.version_differs:
                pending.sock.send(handshake.MAGIC)
            kind = "another version" if error.version_differs else "nonsense"
            self._turn_away(pending, kind, f"sent {error}")

    def _challenge(self, pending: _PendingPeer, hello: Hello) -> None:
        request, nonce = self._request, os.urandom(handshake.NONCE_NBYTES)
        if hello.tag != request.world.tag:
            # Send the tag: one port serves one world after another, so a rank may connect to the wrong one.
            pending.sock.send(Challenge(0, nonce, bytes(handshake.PROOF_NBYTES), request.world.tag).pack())
            self._turn_away(pending, "another world", "came for another world")
        elif hello.peer != request.rank or hello.purpose not in self._purposes:
            self._turn_away(pending, "misled", f"wanted something else, or another rank than {request.rank}")
        else:
            pending.hello, pending.nonce = hello, nonce
            proof = request.prove(b"accept", hello, request.world.nprocs, nonce)
            pending.sock.send(Challenge(request.world.nprocs, nonce, proof, request.world.tag).pack())

    def _admit(self, pending: _PendingPeer, hello: Hello, proof: bytes) -> None:
        expected = self._request.prove(b"connect", hello, self._request.world.nprocs, pending.nonce)
        if not handshake.proves(proof, expected):
            why = f"claimed to be rank {hello.rank} but has another key"
            self._turn_away(pending, "another key", why)
            return
        self._forget(pending)
        try:
            self._take_in(hello, pending.sock)
        except Refused as refusal:
            error = Error(f"rank {self._request.rank} refused the connection: {refusal}", rank=hello.rank)
            pending.sock.send(handshake.pack_frame(handshake.FAILED, error))
            pending.sock.close()
            self._count("refused", f"{pending.who} holds the key but was refused: {refusal}")
        except BaseException as error:
            pending.sock.send(handshake.pack_frame(handshake.FAILED, error, self._request.rank))
            pending.sock.close()
            raise


def _nobody(hello: Hello, sock: FramedSocket) -> None:
    """Ignore a rank: the acceptor is closed."""


class Gathering:
    """One rank's wait for others: it keeps the connections of proven ranks until all have connected.

    Errors are sent to the ranks that were taken in. `close` leaves open the sockets that `gather` returned.
    """

    def __init__(
        self, request: JoinRequest, listener: socket.socket, awaited: Sequence[int], purpose: bytes
    ) -> None:
        self._request = request
        self._awaited = awaited
        self._joined: dict[int, FramedSocket] = {}
        self._warn_at_s = request.now_s() + SILENCE_S
        self._acceptor = Acceptor(request, listener, (purpose,), len(awaited), self._take_in)

    def gather(self) -> dict[int, FramedSocket]:
        """Return the sockets to all awaited ranks, by rank. Raise the error that all of them get."""
        try:
            while not self._is_complete():
                if self._request.is_over():
                    raise self._late(f"did not come{self._where('to')} within {self._request.timeout_s:g} s")
                if self._request.now_s() >= self._warn_at_s:
                    self._warn_who_is_awaited()
                self._acceptor.serve(self._warn_at_s)
            self._conclude(self._joined)
        except BaseException as error:
            frame = handshake.pack_frame(handshake.FAILED, error, self._request.rank)
            for sock in self._joined.values():
                sock.send(frame)
            if isinstance(error, Error):
                self._answer_latecomers(frame, set(self._missing()) - {error.rank})
            raise
        socks, self._joined = self._joined, {}
        return dict(sorted(socks.items()))

    def _answer_latecomers(self, frame: bytes, missing: set[int]) -> None:
        """Send the error to ranks that connect late: else they would report that this rank has ended."""

        def answer(hello: Hello, sock: FramedSocket) -> None:
            sock.send(frame)
            sock.close()
            missing.discard(hello.rank)

        self._acceptor.turn_to(answer)
        until_s = self._request.now_s() + _LATECOMERS_S
        with contextlib.suppress(Error):
            while missing and self._request.now_s() < until_s and not self._request.is_over():
                self._acceptor.serve(until_s)

    def close(self) -> None:
        self._acceptor.close()
        for sock in self._joined.values():
            sock.close()

    def _is_complete(self) -> bool:
        return len(self._joined) == len(self._awaited)

    def _missing(self) -> list[int]:
        """Return the ranks that have not connected yet."""
        return [rank for rank in self._awaited if rank not in self._joined]

    def _conclude(self, socks: dict[int, FramedSocket]) -> None:
        """Finish, once all ranks have connected. Subclasses send the result to them."""

    def _objection(self, hello: Hello, sock: FramedSocket) -> Error | None:
        """Return the error of a rank that belongs to this world but must end its start, else None."""
        rank, nprocs = hello.rank, self._request.world.nprocs
        what_to_do = f" ({_SHMRUN})" if sock.host else ""
        if hello.nprocs != nprocs:
            return Mismatch(
                f"rank {self._request.rank} joined a world of {nprocs} ranks, rank {rank}{_on(sock)} one of "
                f"{hello.nprocs}: all must be given the same World{what_to_do}",
                rank=rank,
            )
        if rank in self._joined or rank not in self._awaited:
            again = f"{_on(self._joined[rank])} and{_on(sock)}" if sock.host and rank in self._joined else ""
            text = f"rank {rank} joined twice{again}: each process needs a rank of its own{what_to_do}"
            return Error(text, rank=rank)
        return None

    def _take_in(self, hello: Hello, sock: FramedSocket) -> None:
        error = self._objection(hello, sock)
        if error is not None:
            raise error
        self._joined[hello.rank] = sock
        self._acceptor.watch(sock, lambda: self._receive_from_rank(hello.rank, sock))

    def _receive_from_rank(self, rank: int, sock: FramedSocket) -> None:
        with handshake.frames_of(rank):
            packet = sock.receive(handshake.FRAME_NBYTES)
            if packet:
                self._handle_frame(rank, packet)
            elif packet is not None:
                raise self._lose(rank)

    def _handle_frame(self, rank: int, packet: bytes) -> None:
        """Raise the error of a frame: a waiting rank sends a frame only to give up."""
        _, failure = handshake.unpack_frame(packet)
        if failure is not None or self._missing():  # if none is missing, the rank is about to get READY
            raise failure or self._late(f"did not come{self._where('to')} while rank {rank} would wait")

    def _late(self, what: str) -> Timeout:
        missing, hints = self._missing(), self._acceptor.hints()
        text = f"{named(missing)} of {self._request.world.nprocs} {what}{hints}; {WAIT_LONGER}"
        return Timeout(text, rank=missing[0])

    def _warn_who_is_awaited(self) -> None:
        """Log the awaited ranks once, so that a host that was not started is noticed before the timeout."""
        self._warn_at_s = float("inf")
        missing, request = named(self._missing()), self._request
        what = "rank %d has waited %g s%s for %s of %d, and will wait %g s in all%s"
        values = (
            request.rank,
            SILENCE_S,
            self._where("at"),
            missing,
            request.world.nprocs,
            request.timeout_s,
        )
        _log.warning(what, *values, self._acceptor.hints())

    def _where(self, preposition: str) -> str:
        address = self._request.world.address
        return f" {preposition} {address}" if address else ""

    def _lose(self, rank: int) -> RankFailed:
        sock = self._joined.pop(rank)
        sock.close()
        return ended(rank, sock.host)


def ended(rank: int, host: str = "") -> RankFailed:
    text = f"rank {rank} ended while the ranks were meeting" + (f": see its output on {host}" if host else "")
    return RankFailed(text, rank=rank, host=host or None, cause="connection closed")


def does_not_wait(rank: int) -> RankFailed:
    """Return the error of a rank that was invited by `rank`, and finds that it does not listen."""
    text = f"rank {rank} does not wait for this rank any more: it has ended, or has got an error"
    return RankFailed(text, rank=rank, cause="does not wait any more")


def _on(sock: FramedSocket) -> str:
    """Return the host of a rank for a message; empty if all ranks are on this host."""
    return f" on {sock.host}" if sock.host else ""


def most_pending(num_awaited: int) -> int:
    """Return the number of pending connections that a listener keeps at once."""
    return _MOST_PENDING + 2 * num_awaited


def peer_uid_and_pid(connection: socket.socket) -> tuple[int, int]:
    """Return (uid, pid) of the process at the other end of a Unix socket, as the kernel reports them."""
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return uid, pid
