"""The errors that a communicator raises. Each says what happened, on which rank, and what to do.

Most errors end their communicator. docs/reference/errors.md lists those that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

WAIT_LONGER = "to wait longer give a larger timeout (timeout= or SHMRING_TIMEOUT, in seconds)"


class Error(RuntimeError):
    """The base class of all errors that shmring defines.

    Attributes
    ----------
    rank : int or None
        The rank that the error is about; None: no single rank.
    op : str or None
        The name of the call in which the first rank gave up.
    seq : int or None
        The number of that call on the communicator, if it was a collective.

    Examples
    --------
    >>> try:
    ...     comm.all_reduce(np.ones(3 + comm.rank), timeout=10)
    ... except shmring.Error as error:
    ...     type(error).__name__, error.op
    ('Mismatch', 'all_reduce')
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
        self._describe: Callable[[], tuple[tuple[str, ...], str]] | None = None

    def attach_snapshot(self, describe: Callable[[], tuple[tuple[str, ...], str]]) -> None:
        """Register describe(), which returns `where` and a note, to be called when one of them is first read.

        Formatting is postponed, because ranks must raise soon, above all if many of them share few CPUs.
        """
        self._describe = describe

    def _read_snapshot(self) -> None:
        if (describe := self._describe) is not None:
            self._where, note = describe()
            self._notes.insert(0, note)
            self._describe = None

    @property
    def where(self) -> tuple[str, ...]:
        """The position of each rank, by rank, as this rank saw it; () if the error does not end a
        communicator.

        A position is a text such as "in all_reduce(float32[1024], sum) #12, waiting 3.2 s for rank 1" or
        "after barrier() #11".
        """
        self._read_snapshot()
        return self._where

    # add_note() appends to this attribute, and a traceback prints it.
    @property
    def __notes__(self) -> list[str]:
        self._read_snapshot()
        return self._notes

    @__notes__.setter
    def __notes__(self, notes: list[str]) -> None:
        self._read_snapshot()
        self._notes = notes

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only attributes are pickled as state: `spawn` sends exceptions between processes.
        self._read_snapshot()
        state = self.__dict__ | {"_notes": list(self._notes)}  # a copy's notes are its own
        return (type(self), (self.args[0] if self.args else "",), state)


class RankFailed(Error):
    """A rank's process has ended.

    Attributes
    ----------
    rank : int
        Its number.
    host : str or None
        Its host.
    cause : str or None
        How it ended.
    """

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
    """A rank did not enter a call, or make progress in it, before the deadline.

    Attributes
    ----------
    rank : int or None
        Its number.
    """


class Mismatch(Error):
    """The ranks' calls differ.

    Attributes
    ----------
    calls : tuple of str
        A readable call for each rank. () on another host if the calls are too long to send there.
    """

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
    """A message was longer than the receiving array; only that message is lost."""


class Aborted(Error):
    """A rank aborted the communicator.

    Attributes
    ----------
    rank : int
        Its number.
    reason : str
        The text that it gave.
    """

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
    """The communicator was closed on this rank, or belongs to the parent of a forked process."""


class OutOfMemory(Error, MemoryError):
    """Shared memory could not be allocated.

    Attributes
    ----------
    wanted_nbytes, available_nbytes : int or None
        Bytes that were needed, and that were there.
    """

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
    """Mark an error that does not end the communicator although it ends a compound call.

    Either all ranks raise it in the same call, or the ranks that raise it have notified the others.

    Parameters
    ----------
    error : BaseException
        For a function that `Comm.run_steps` runs.

    Returns
    -------
    BaseException
        The same error.

    Examples
    --------
    >>> def halve(comm, n):
    ...     if comm.all_reduce(n, "max") % 2:
    ...         raise shmring.errors.agreed(ValueError("n is odd on a rank"))
    ...     return n // 2
    >>> comm.run_steps(halve, comm, 4)
    2
    """
    error.shmring_agreed = True  # type: ignore[attr-defined]
    return error


# Tracebacks and pickles name the public place.
for _error in (Error, RankFailed, Timeout, Mismatch, Truncated, Aborted, Closed, OutOfMemory):
    _error.__module__ = "shmring"
