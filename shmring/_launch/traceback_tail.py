"""Find the traceback with which a rank ended, and how probable it is that its failure came first.

The traceback is taken from stderr as Python writes it, so scripts need no decorator. A rank also notes
that it has got an error about another rank, see `_system/ended_ranks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .._outcome import Tier, tier_of_chain

_LAST_LINES = 10  # used if there is no traceback
_TRACEBACK = r"Traceback \(most recent call last\)"
_HEAD = re.compile(rf"{_TRACEBACK}|  \+ Exception Group {_TRACEBACK}|Fatal Python error: ")
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
# Tracebacks after these lines end a thread or a callback, not the process.
_INCIDENTAL = ("Exception ignored ", "Exception in thread ", "Error in atexit", "--- Logging error ---")
_MARGIN = re.compile(r"^ +[|+] ?")  # the margin of an exception group
_NEXT_OF_GROUP = re.compile(r"^ +\+(-\+)?-+ \S+ -+$")
_NO_CAUSE = re.compile(rf"( |$|(Exception Group )?{_TRACEBACK}|\w*ExceptionGroup: |-+$)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")  # FORCE_COLOR, from Python 3.13 on
_MISMATCH = re.compile(r"shmring\.[\w.]*Mismatch:")
_ABOUT_ANOTHER = re.compile(
    r"shmring\.[\w.]*(RankFailed|Aborted):"
    r"|shmring\.mpi4py\.MPI\.Exception: (the communicator was aborted|a process has failed)"
)


def traceback_tail(lines: list[str]) -> list[str]:
    """Return the last traceback that is not incidental, with its causes; else the last lines."""
    plain = [_COLOUR.sub("", line) for line in lines]
    heads = _heads(plain)
    if not heads:
        return lines[-_LAST_LINES:]
    starts = [at for at in heads if at < 2 or not plain[at - 2].startswith(_CHAIN)] or heads[:1]
    own = [at for at in starts if not (at and plain[at - 1].startswith(_INCIDENTAL))]
    return lines[own[-1] if own else starts[-1] - 1 :]


def tier_of(lines: Sequence[str], *, follows_another: bool = False) -> Tier:
    """Return the tier of the failure that a traceback tail shows.

    follows_another: the rank had got an error about another rank. The tail may not show it, above all if the
    program prints its errors in a form of its own (sys.excepthook).
    """
    plain = [_COLOUR.sub("", line) for line in lines]
    tracebacks = _heads(plain)
    heads = tracebacks or [0]
    ends = [*heads[1:], None]
    chain = [_tier_of_one(_causes(plain[at:end])) for at, end in zip(heads, ends, strict=True)]
    tier = tier_of_chain(chain)
    if follows_another and tier is Tier.OWN:
        return Tier.CHAINED if tracebacks else Tier.CONSEQUENCE
    return tier


def exception_line(lines: Sequence[str]) -> str:
    """Return the line that names the exception of a traceback tail; without a traceback, the last line."""
    heads = _heads([_COLOUR.sub("", line) for line in lines])
    causes = _causes(lines[heads[-1] :]) if heads else []
    return causes[0] if causes else lines[-1]


def _heads(plain: Sequence[str]) -> list[int]:
    """Return the indices of the lines with which tracebacks begin."""
    return [at for at, line in enumerate(plain) if _HEAD.match(line)]


def _tier_of_one(causes: Sequence[str]) -> Tier:
    """Return the tier of an exception, or the lowest of a group's members."""
    if causes and all(_ABOUT_ANOTHER.match(cause) for cause in causes):
        return Tier.CONSEQUENCE
    if causes and all(_ABOUT_ANOTHER.match(cause) or _MISMATCH.match(cause) for cause in causes):
        return Tier.COMMON
    return Tier.OWN


def _causes(lines: Sequence[str]) -> list[str]:
    """Return the line of the first exception, or of the first of each member of a group."""
    causes, expected = [], True
    for line in (_COLOUR.sub("", line) for line in lines):
        if _NEXT_OF_GROUP.match(line):
            expected = True
            continue
        text = _MARGIN.sub("", line)
        if expected and not _NO_CAUSE.match(text) and not text.startswith(_INCIDENTAL):
            causes.append(text)
            expected = False
    return causes
