"""The protocol between two ranks before and after they have proven themselves: frames, proofs, errors.

These are pure functions of bytes; framed_socket and fd_passing have the sockets. Every frame is a packet of
fixed layout, of at most 256 bytes until both sides have proven that they hold the world's key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .. import __version__
from ..errors import Aborted, Closed, Error, Mismatch, OutOfMemory, RankFailed, Timeout

# The beginning of every frame. Ranks of different versions refuse each other even if their frames are alike:
# they may choose different paths for a call, and they may lay out a segment differently.
MAGIC = b"shmr" + hashlib.sha256(f"shmring {__version__}".encode()).digest()[:4]
NONCE_NBYTES = 32
IDENTITY_NBYTES = 64
TAG_NBYTES = 16
PROOF_NBYTES = 32
UNPROVEN_NBYTES = 256  # longest frame read from a pending peer
FRAME_NBYTES = 2048  # longest frame read from a proven rank

# Kinds of frames between proven ranks.
READY, FAILED, GIVING_UP, DESCRIPTOR, SOCKET, ENDPOINT, TABLE = 1, 2, 3, 4, 5, 6, 7
# Purposes of connections: among the ranks of one host, of all ranks to rank 0, and the two between hosts.
LOCAL, COORDINATOR, DATA, CONTROL = b"local", b"coord", b"data", b"control"

_HELLO = struct.Struct(f"!8s8sIII{TAG_NBYTES}s{NONCE_NBYTES}s{IDENTITY_NBYTES}s")
_CHALLENGE = struct.Struct(f"!8sI{TAG_NBYTES}s{NONCE_NBYTES}s32s")
_PROOF = struct.Struct("!8s32s")
_FRAME = struct.Struct("!8sBBiqqH")
_TRANSCRIPT = struct.Struct(f"!8s8s8sIIII{TAG_NBYTES}s{IDENTITY_NBYTES}s{NONCE_NBYTES}s{NONCE_NBYTES}s")
_TEXT_NBYTES = 1024
_UNKNOWN = -1

# An error is sent as its index in this tuple.
_ERRORS: tuple[type[Error], ...] = (Error, RankFailed, Timeout, Mismatch, Aborted, Closed, OutOfMemory)


class BadFrame(Exception):
    """A packet is invalid. `version_differs`: it is a frame of another version."""

    def __init__(self, packet: bytes, what: str = "") -> None:
        magic = packet[: len(MAGIC)]
        self.version_differs = len(magic) == len(MAGIC) and magic[:4] == MAGIC[:4] and magic != MAGIC
        if self.version_differs:
            what = "a frame of another version of shmring"
        super().__init__(what or f"{len(packet)} bytes that are not a frame of this protocol")


@contextlib.contextmanager
def frames_of(rank: int) -> Iterator[None]:
    """Raise a BadFrame of a rank that has proven itself as an Error that names the rank."""
    try:
        yield
    except BadFrame as error:
        raise Error(f"rank {rank} sent {error}", rank=rank) from error


def unexpected(rank: int, kind: int) -> Error:
    """Return the error for a frame that a rank has sent out of turn."""
    return Error(f"rank {rank} sent a frame of kind {kind}, which was not expected", rank=rank)


@dataclass(frozen=True)
class Hello:
    """The first frame of a rank: its identity, the rank and the purpose it connects for. Not proven yet."""

    rank: int
    nprocs: int
    nonce: bytes
    identity: str  # of the rank's host
    purpose: bytes = LOCAL
    peer: int = 0
    tag: bytes = bytes(TAG_NBYTES)

    def pack(self) -> bytes:
        identity = self.identity.encode()
        return _HELLO.pack(
            MAGIC, self.purpose, self.rank, self.peer, self.nprocs, self.tag, self.nonce, identity
        )

    @classmethod
    def unpack(cls, packet: bytes) -> Hello:
        purpose, rank, peer, nprocs, tag, nonce, identity = _unpack(_HELLO, packet)
        text = identity.rstrip(b"\0").decode("utf-8", "replace")
        return cls(rank, nprocs, nonce, text, purpose.rstrip(b"\0"), peer, tag)


@dataclass(frozen=True)
class Challenge:
    """The answer to a Hello: the number of ranks, a fresh nonce, a proof, and the tag of the world."""

    nprocs: int
    nonce: bytes
    proof: bytes
    tag: bytes = bytes(TAG_NBYTES)

    def pack(self) -> bytes:
        return _CHALLENGE.pack(MAGIC, self.nprocs, self.tag, self.nonce, self.proof)

    @classmethod
    def unpack(cls, packet: bytes) -> Challenge:
        nprocs, tag, nonce, proof = _unpack(_CHALLENGE, packet)
        return cls(nprocs, nonce, proof, tag)


def pack_proof(proof: bytes) -> bytes:
    return _PROOF.pack(MAGIC, proof)


def unpack_proof(packet: bytes) -> bytes:
    (proof,) = _unpack(_PROOF, packet)
    return bytes(proof)


def prove(key: bytes, world_id: str, role: bytes, hello: Hello, nprocs: int, nonce: bytes) -> bytes:
    """Return the HMAC-SHA256 of all fields that both sides sent.

    `role` differs between the two sides, so the proof of one side is no proof for the other.
    """
    transcript = _TRANSCRIPT.pack(
        MAGIC,
        role,
        hello.purpose,
        hello.rank,
        hello.peer,
        hello.nprocs,
        nprocs,
        hello.tag,
        hello.identity.encode(),
        hello.nonce,
        nonce,
    )
    return hmac.digest(key, transcript + world_id.encode(), "sha256")


def proves(claimed: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(claimed, expected)


def pack_frame(kind: int, error: BaseException | None = None, rank: int = 0) -> bytes:
    """Return a frame of `rank` to a proven rank. A FAILED frame carries the error with its type."""
    if error is None:
        return _FRAME.pack(MAGIC, kind, 0, _UNKNOWN, _UNKNOWN, _UNKNOWN, 0)
    if type(error) not in _ERRORS:  # such as KeyboardInterrupt: it ends this rank
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error = Aborted(f"rank {rank} gave up: {reason}", rank=rank, reason=reason)
    assert isinstance(error, Error)
    text = str(error).encode("utf-8", "replace")[:_TEXT_NBYTES]
    wanted = getattr(error, "wanted_nbytes", None)
    available = getattr(error, "available_nbytes", None)
    head = _FRAME.pack(
        MAGIC,
        kind,
        _ERRORS.index(type(error)),
        _UNKNOWN if error.rank is None else error.rank,
        _UNKNOWN if wanted is None else wanted,
        _UNKNOWN if available is None else available,
        len(text),
    )
    return head + text


def kind_of(packet: bytes) -> int:
    """Return the kind of a proven rank's frame."""
    if len(packet) <= len(MAGIC) or packet[: len(MAGIC)] != MAGIC:
        raise BadFrame(packet)
    return packet[len(MAGIC)]


def unpack_frame(packet: bytes) -> tuple[int, Error | None]:
    """Return (kind, the error that it carries)."""
    if len(packet) < _FRAME.size:
        raise BadFrame(packet)
    kind, code, rank, wanted, available, text_nbytes = _unpack(_FRAME, packet[: _FRAME.size])
    text = packet[_FRAME.size :]
    if len(text) != text_nbytes or code >= len(_ERRORS):
        raise BadFrame(packet)
    if kind != FAILED:
        return kind, None
    error = _ERRORS[code](text.decode("utf-8", "replace"), rank=None if rank == _UNKNOWN else rank)
    if isinstance(error, OutOfMemory):
        error.wanted_nbytes = None if wanted == _UNKNOWN else wanted
        error.available_nbytes = None if available == _UNKNOWN else available
    return kind, error


def _unpack(layout: struct.Struct, packet: bytes) -> tuple:  # type: ignore[type-arg]
    if len(packet) != layout.size or packet[: len(MAGIC)] != MAGIC:
        raise BadFrame(packet)
    return layout.unpack(packet)[1:]
