"""The errors that a communicator raises; each says what happened, on which rank, and what to do.

All but `Closed`, `Truncated`, and `Mismatch` from a `recv`, are final for the communicator they come from.
May know: nothing.
"""

from __future__ import annotations

WAIT_LONGER = "to wait longer set timeout= or SHMRING_TIMEOUT (seconds)"


class Error(RuntimeError):
    """Base of every error that shmring raises itself.

    Attributes: `rank`, the rank that the error is about (None: no single one); `op`, the name of the
    collective that raised it; `seq`, that collective's sequence number in its communicator.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, op: str | None = None, seq: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.seq = seq

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only attributes travel as state: an exception crosses processes in `spawn`.
        return (type(self), (self.args[0] if self.args else "",), self.__dict__)


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
