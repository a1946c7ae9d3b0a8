"""The connecting side while ranks connect: reach a listening rank, and exchange proofs with it."""

from __future__ import annotations

import logging

from .. import __version__
from .._system.deadline import Deadline
from ..errors import WAIT_LONGER, Error, Timeout
from . import handshake
from .acceptor import does_not_wait, ended
from .framed_socket import POLL_S, FramedSocket
from .handshake import BadFrame, Challenge
from .world import SILENCE_S, JoinRequest

_log = logging.getLogger("shmring")

_VERDICT_S = 0.5  # a rank that gives up waits this long for the peer's list of missing ranks
_PAUSE_S = (0.001, 0.020)  # between attempts to connect: first, longest


class Connector:
    """The connection of one rank to the listening rank `peer`. Subclasses know its address."""

    longest_pause_s = _PAUSE_S[1]
    _seen = False  # the peer was there

    def __init__(self, request: JoinRequest, peer: int, purpose: bytes) -> None:
        self._request = request
        self._peer = peer
        self._purpose = purpose
        self._warn_at_s = request.now_s() + SILENCE_S

    def connect(self) -> FramedSocket:
        """Return a socket on which both ranks have proven themselves and the peer has accepted this rank."""
        pause_s = _PAUSE_S[0]
        while True:
            sock = self._open()
            if sock is not None:
                try:
                    if self._introduce(sock) and self._settle(sock):
                        return sock
                except BaseException:
                    sock.close()
                    raise
                sock.close()
            if self._request.is_over():
                raise self._never_came()
            if self._request.now_s() >= self._warn_at_s:
                self._warn_of_tries()
            self._request.pause(pause_s)
            pause_s = min(pause_s * 1.5, self.longest_pause_s)

    def _warn_of_tries(self) -> None:
        """Log the attempts once, so that a wrong address or a missing peer is noticed before the timeout."""
        self._warn_at_s = float("inf")
        what = "rank %d has tried for %g s to reach rank %d%s, and will try for %g s in all"
        request = self._request
        _log.warning(what, request.rank, SILENCE_S, self._peer, self._trying(), request.timeout_s)

    def _trying(self) -> str:
        """Return the address and the result of the last attempt, for a message."""
        return ""

    def _open(self) -> FramedSocket | None:
        """Return a connection to the peer; None if the peer does not listen yet, or its queue is full."""
        raise NotImplementedError

    def _check_absence(self) -> None:
        """Raise RankFailed if the peer is not there any more. Do nothing if it may not be there yet."""
        if self._seen:
            raise ended(self._peer)
        if self._request.is_invited:
            raise does_not_wait(self._peer)

    def _settle(self, sock: FramedSocket) -> bool:
        """Wait until the peer accepts this rank. Return False if it closed the connection."""
        raise NotImplementedError

    def _never_came(self) -> Timeout:
        raise NotImplementedError

    def _proven(self) -> None:
        """Note that the peer has proven itself."""

    def _mistaken(self) -> None:
        """Note that the peer belongs to another world."""

    def _introduce(self, sock: FramedSocket) -> bool:
        """Exchange proofs. Return False if the peer closed the connection, as it may if this rank is slow."""
        request = self._request
        hello = request.hello(self._peer, self._purpose)
        if not sock.send(hello.pack()):
            return False
        challenge = self._await_challenge(sock)
        if challenge is None:
            return False
        if challenge.tag != request.world.tag:
            self._mistaken()
            return False
        expected = request.prove(b"accept", hello, challenge.nprocs, challenge.nonce)
        if not handshake.proves(challenge.proof, expected):
            raise Error(
                f"rank {request.rank} has another key than rank {self._peer}: give all ranks the same "
                "World (or SHMRING_KEY)",
                rank=request.rank,
            )
        self._proven()
        proof = request.prove(b"connect", hello, challenge.nprocs, challenge.nonce)
        return sock.send(handshake.pack_proof(proof))

    def _await_challenge(self, sock: FramedSocket) -> Challenge | None:
        """Return the peer's challenge; None if it closed the connection."""
        try:
            packet = self._request.await_frame(sock, handshake.UNPROVEN_NBYTES)
            if packet is None:
                raise self._never_came()
            return Challenge.unpack(packet) if packet else None
        except BadFrame as error:
            if error.version_differs:
                text = (
                    f"rank {self._peer} runs another version of shmring than rank {self._request.rank} "
                    f"({__version__}): install the same one for all ranks"
                )
            else:
                text = self._wrong_answer(error)
            raise Error(text, rank=self._peer) from error

    def _wrong_answer(self, error: BadFrame) -> str:
        """Return the text about a peer whose answer is no frame."""
        return f"rank {self._peer} sent {error}"

    def _await_verdict_frame(self, sock: FramedSocket) -> bytes:
        """Return the peer's next frame; empty if it closed the connection.

        At the timeout, ask the peer to give up: it knows the missing ranks, so all ranks raise the same
        error.
        """
        with handshake.frames_of(self._peer):
            packet = self._request.await_frame(sock, handshake.FRAME_NBYTES)
            if packet is None:
                sock.send(handshake.pack_frame(handshake.GIVING_UP))
                within = Deadline(_VERDICT_S)
                packet = sock.await_frame(handshake.FRAME_NBYTES, within, POLL_S, self._request.check)
        if packet is None:
            nprocs, timeout_s = self._request.world.nprocs, self._request.timeout_s
            raise Timeout(f"not all {nprocs} ranks came within {timeout_s:g} s; {WAIT_LONGER}")
        return packet

    def _unpack(self, packet: bytes) -> int:
        """Return the kind of a frame that carries nothing but possibly an error. Raise the error."""
        with handshake.frames_of(self._peer):
            kind, failure = handshake.unpack_frame(packet)
        if failure is not None:
            raise failure
        return kind
