"""The errors that a communicator raises; each says what happened, on which rank, and what to do.

All but `Closed`, `Truncated`, and `Mismatch` from a `recv`, are final for the communicator they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

WAIT_LONGER = "to wait longer give a larger timeout (timeout= or SHMRING_TIMEOUT, in seconds)"


class Error(RuntimeError):
    """Base of every error that shmring raises itself.

    Attributes: `rank`, the rank that the error is about (None: no single one); `op`, the name of the call
    in which the rank that gave up first was; `seq`, which call of the communicator that was, if it was a
    collective; `where`, of an error that ends a communicator, by rank what each was at, as this rank saw
    it: a tuple of texts such as "in all_reduce(float32[1024], sum) #12, waiting 3.2 s for rank 1" or
    "after barrier() #11".
    """

    def __init__(
        self, message: str, *, rank: int | None = None, op: str | None = None, seq: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.seq = seq
        self._where: tuple[str, ...] = ()
        self._notes: list[str] = []
        self._tell: Callable[[], tuple[tuple[str, ...], str]] | None = None

    def attach_snapshot(self, tell: Callable[[], tuple[tuple[str, ...], str]]) -> None:
        """Have tell() give `where` and a note, once somebody wants to know.

        How soon ranks raise counts, most of all where many of them share few CPUs; words can wait.
        """
        self._tell = tell

    def _be_told(self) -> None:
        if (tell := self._tell) is not None:
            self._where, note = tell()
            self._notes.insert(0, note)
            self._tell = None

    @property
    def where(self) -> tuple[str, ...]:
        """By rank what each was at; () where nobody has looked."""
        self._be_told()
        return self._where

    # Where add_note() adds to, and what a traceback shows.
    @property
    def __notes__(self) -> list[str]:
        self._be_told()
        return self._notes

    @__notes__.setter
    def __notes__(self, notes: list[str]) -> None:
        self._be_told()
        self._notes = notes

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only attributes travel as state: an exception crosses processes in `spawn`.
        self._be_told()
        state = self.__dict__ | {"_notes": list(self._notes)}  # a copy's notes are its own
        return (type(self), (self.args[0] if self.args else "",), state)


class RankFailed(Error):
    """A rank is gone: `rank` names it, `host` where it ran, `cause` how it ended."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        op: str | None = None,
        seq: int | None = None,
        host: str | None = None,
        cause: str | None = None,
    ) -> None:
        super().__init__(message, rank=rank, op=op, seq=seq)
        self.host = host
        self.cause = cause


class Timeout(Error, TimeoutError):
    """A rank did not come before the deadline: `rank` names it."""


class Mismatch(Error):
    """The ranks called different things; `calls` holds one readable call per rank."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        op: str | None = None,
        seq: int | None = None,
        calls: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, rank=rank, op=op, seq=seq)
        self.calls = calls


class Truncated(Error, ValueError):
    """A message was longer than the array that was to receive it; only that message is lost."""


class Aborted(Error):
    """A rank gave up on the communicator: `rank` names it, `reason` is what it said."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        op: str | None = None,
        seq: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, rank=rank, op=op, seq=seq)
        self.reason = reason


class Closed(Error):
    """The communicator was closed here, or belongs to the parent of a forked process."""


class OutOfMemory(Error, MemoryError):
    """Shared memory could not be had: what was wanted and what was there, in bytes."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        op: str | None = None,
        seq: int | None = None,
        wanted_nbytes: int | None = None,
        available_nbytes: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank, op=op, seq=seq)
        self.wanted_nbytes = wanted_nbytes
        self.available_nbytes = available_nbytes


def agreed(error: E) -> E:
    """Mark an error that leaves the communicator as it is, though it leaves a call of several steps.

    Either all ranks raise it in the same call, or those that do have told the others what concerns them.
    """
    error.shmring_agreed = True  # type: ignore[attr-defined]
    return error
