"""The outcome of a rank on its way to the launcher: a result or a `Failure`, and which failure came first.

`spawn` and the adapters of pools and schedulers are launchers. `shmrun` has the stderr of its ranks, in which
`_launch/traceback_tail.py` finds the tier of a failure, and their notes of failures of other ranks.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._config.optional_deps import cloudpickle_if_installed
from .errors import Aborted, Error, RankFailed


class Tier(enum.IntEnum):
    """Kinds of failures. The lower, the more probable it is that the failure is the first cause."""

    OWN = 0  # a rank's own exception
    CHAINED = 1  # an own exception and an error that several ranks get: the first one may have been handled
    COMMON = 2  # an error that several ranks get, such as Mismatch
    CONSEQUENCE = 3  # an error about another rank


def tier_of_chain(chain: Sequence[Tier]) -> Tier:
    """Return the tier of a failure from those of its exceptions, the first one first."""
    if Tier.CONSEQUENCE in chain:
        return Tier.CONSEQUENCE
    # The first exception may have led to the last, by a collective in a `finally`, or may have been handled.
    return Tier.CHAINED if chain[0] < chain[-1] else chain[0]


def tier_of_error(error: BaseException, rank: int) -> Tier:
    """Return the tier of a rank's failure, from the exceptions that its traceback shows."""
    link: BaseException | None = error
    chain: dict[int, Tier] = {}
    while link is not None and id(link) not in chain:
        chain[id(link)] = _tier_of_one(link, rank)
        link = link.__cause__ if link.__suppress_context__ else link.__context__
    return tier_of_chain(list(chain.values())[::-1])


def _tier_of_one(link: BaseException, rank: int) -> Tier:
    if isinstance(link, BaseExceptionGroup):
        return min(_tier_of_one(member, rank) for member in link.exceptions)
    if isinstance(link, (RankFailed, Aborted)) and link.rank != rank:
        return Tier.CONSEQUENCE
    return Tier.COMMON if isinstance(link, Error) else Tier.OWN


@dataclass
class Failure:
    """The failure of a rank. Its exception may fail to be pickled or loaded; the text always arrives.

    The tier and the traceback are those in the rank, since a pickled exception loses its context.
    """

    words: str
    error: BaseException | None = None  # None: it could not be pickled or loaded
    tier: Tier = Tier.OWN
    at: float = field(default_factory=time.time)  # the clock that hosts have in common
    traceback: str = ""  # set when the failure is pickled
    ended: bool = False  # the process ended, by exit or signal: the words are the cause

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Return the failure of a rank that has raised an exception."""
        words = "".join(traceback.format_exception_only(error)).strip()
        failure = cls(words, error, tier_of_error(error, rank))
        if isinstance(error, (SystemExit, KeyboardInterrupt)):  # in the launcher these would end it
            failure.ended = True
            if isinstance(error, SystemExit):
                failure.words += " before it returned a result"
        return failure

    def __getstate__(self) -> dict[str, Any]:
        pickled = None
        with contextlib.suppress(Exception):
            pickled = pickle_value(self.error)
        return self.__dict__ | {"error": pickled, "traceback": self.traceback or _stack_text(self.error)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.error = None
        # Its class may be missing, or __init__ take other arguments. Ctrl-C must end the launcher.
        with contextlib.suppress(Exception, SystemExit):
            error = pickle.loads(state["error"])
            self.error = error if isinstance(error, BaseException) else None

    def exception(self, rank: int, where: str = "") -> BaseException:
        """Return the exception that the launcher raises. where: more about the rank, for the note."""
        error = self.error
        if self.ended:
            error = RankFailed(f"rank {rank} ended: {self.words}", rank=rank, cause=self.words)
        elif error is None:
            error = RuntimeError(
                f"rank {rank} raised an exception that cannot be unpickled here: {self.words}"
            )
        # An error of a collective already names the rank that it is about; keep that rank.
        with contextlib.suppress(Exception):  # an exception may refuse new attributes
            if not isinstance(error, Error) or error.rank is None:
                error.rank = rank  # type: ignore[attr-defined, unused-ignore]
        with contextlib.suppress(Exception):
            if self.traceback:
                error.add_note(f"\nRaised in rank {rank}{where}:\n{self.traceback}")
            elif where:
                error.add_note(f"Raised in rank {rank}{where}.")
        return error


def first_of(failures: Mapping[int, Failure]) -> int:
    """Return the rank whose failure is most probably the first cause."""
    return min(failures, key=lambda rank: (failures[rank].tier, failures[rank].at))


def pickle_value(value: Any) -> bytes:
    """Return the pickle of a result or an exception, by cloudpickle if pickle cannot do it."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:  # whatever __reduce__ raises
        cloudpickle = cloudpickle_if_installed()
        if cloudpickle is None:
            raise
        return bytes(cloudpickle.dumps(value, protocol=5))


def _stack_text(error: BaseException | None) -> str:
    """Return a traceback without the frame of the launcher's function, and without the error itself."""
    if error is None:
        return ""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    whole = traceback.TracebackException(type(error), error, frames)
    lines = list(whole.format())
    if not isinstance(error, BaseExceptionGroup):  # which is printed in another form
        lines = lines[: -len(list(whole.format_exception_only()))]
    return "".join(lines)
