"""Find the traceback with which a rank ended, and tell whether another rank's failure caused it.

The traceback is taken from stderr as Python writes it, so scripts need no decorator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
_CONSEQUENCE = re.compile(
    r"shmring\.[\w.]*(RankFailed|Aborted|Mismatch):"
    r"|shmring\.mpi4py\.MPI\.Exception: (the communicator was aborted|a process has failed)"
)


def traceback_tail(lines: list[str]) -> list[str]:
    """Return the last traceback that is not incidental, with its causes; else the last lines."""
    plain = [_COLOUR.sub("", line) for line in lines]
    heads = [at for at, line in enumerate(plain) if _HEAD.match(line)]
    if not heads:
        return lines[-_LAST_LINES:]
    starts = [at for at in heads if at < 2 or not plain[at - 2].startswith(_CHAIN)] or heads[:1]
    own = [at for at in starts if not (at and plain[at - 1].startswith(_INCIDENTAL))]
    return lines[own[-1] if own else starts[-1] - 1 :]


def is_consequence(words: Sequence[str]) -> bool:
    """Return whether the first exception, or each of a group, is about other ranks.

    All ranks raise the same Mismatch. A rank that raised another exception before it is the cause.
    """
    causes = _causes(words)
    return bool(causes) and all(_CONSEQUENCE.match(cause) for cause in causes)


def exception_line(words: Sequence[str]) -> str:
    """Return the line that names the exception of a traceback tail; without a traceback, the last line."""
    heads = [at for at, line in enumerate(words) if _HEAD.match(_COLOUR.sub("", line))]
    causes = _causes(words[heads[-1] :]) if heads else []
    return causes[0] if causes else words[-1]


def _causes(words: Sequence[str]) -> list[str]:
    """Return the line of the first exception, or of the first of each member of a group."""
    causes, expected = [], True
    for line in (_COLOUR.sub("", line) for line in words):
        if _NEXT_OF_GROUP.match(line):
            expected = True
            continue
        text = _MARGIN.sub("", line)
        if expected and not _NO_CAUSE.match(text) and not text.startswith(_INCIDENTAL):
            causes.append(text)
            expected = False
    return causes
