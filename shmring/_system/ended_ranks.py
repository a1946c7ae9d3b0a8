"""The memfd in which shmrun and its ranks write how ranks have ended, with a byte for each rank of the job.

shmrun writes that a rank has ended, for the ranks that wait in init(). A rank writes that it has got an error
about another rank: its own failure may be a consequence, and shmrun names the rank that failed first.
"""

from __future__ import annotations

import contextlib
import os

from ..errors import Aborted, Error, RankFailed

_NAME = "shmrun-ended"
_ENDED, _FOLLOWS, _NEITHER = b"\1", b"\2", b"\0"

_own = (0, -1, 0)  # of this process: its id, the memfd, the rank


def create() -> int:
    """Return the descriptor of a new memfd. Only shmrun calls this."""
    return os.memfd_create(_NAME)


def write_end(fd: int, rank: int) -> None:
    """Write that a rank has ended."""
    # With ulimit -f 0 it cannot be written; ranks cannot start then, and say so.
    with contextlib.suppress(OSError):
        os.pwrite(fd, _ENDED, rank)


def first_ended(fd: int, most: int) -> int | None:
    """Return the lowest of `most` ranks that has ended; None if none has."""
    rank = os.pread(fd, most, 0).find(_ENDED)
    return None if rank < 0 else rank


def follows_another(fd: int, rank: int) -> bool:
    """Return whether a rank that has just ended had got an error about another rank, and has not gone on."""
    return os.pread(fd, 1, rank) == _FOLLOWS


def is_shmruns(fd: int) -> bool:
    """Return whether the descriptor is shmrun's. A process that a rank has started does not inherit it."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}")
    except OSError:
        return False


def belong_to(fd: int, rank: int) -> None:
    """Let `note_error` and `go_on` write for this rank. They do nothing in its child processes."""
    global _own
    _own = os.getpid(), fd, rank


def note_error(error: Error, own_rank: int) -> None:
    """Write that this rank has got an error about another rank, if it is one. own_rank: as `error` counts."""
    if isinstance(error, (RankFailed, Aborted)) and error.rank != own_rank:
        _write(_FOLLOWS)


def go_on() -> None:
    """Write that this rank goes on without the ranks that have failed."""
    _write(_NEITHER)


def _write(word: bytes) -> None:
    pid, fd, rank = _own
    if pid == os.getpid() and is_shmruns(fd):
        with contextlib.suppress(OSError):
            os.pwrite(fd, word, rank)
