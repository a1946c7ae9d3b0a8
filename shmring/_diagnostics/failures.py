"""Build the exception that every rank raises, from the abort word and the flight records.

Functions take an engine.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .._system import ended_ranks, procfs
from ..errors import WAIT_LONGER, Aborted, Error, Mismatch, RankFailed, Timeout
from . import describe
from .describe import describe_call

if TYPE_CHECKING:
    from .._engine.engine import Engine

CLOSED_IT = "it returned, or closed the communicator, without making this call"
CONNECTION_ENDED = "its connection was closed: it ended, or its host did"
DAMAGED = "it sent data that no rank of this version of shmring sends: use one version, or check the network"
_ELSEWHERE = "on another host"
_LOOK_ALIKE = ", but with arrays of other shapes or dtypes, another wire=, group_size= or priority="
_COUNT = re.compile(r"\[\d+\]")
# The beginning of most errors.
_NAMED = re.compile(r"rank (\d+) (?:on (.+?) failed: ([^;]*))?")
_REMOTE_CALL = re.compile(r"rank (\d+) called (.*?)(?=; rank \d+ called |$)")
_OVER = "this communicator is over: its shrink() goes on with the survivors"

_has_rehearsed = False  # in this process, or in one that it was forked from


def late_in_the_end(engine: Engine, awaited: int) -> int:
    """Follow the published waits from `awaited` to the last rank. Return `awaited` if they form a cycle."""
    followed = {engine.rank}
    rank = awaited
    while rank < engine.size and rank not in followed:
        followed.add(rank)
        wait = describe.wait_of(engine.flight.sight_of(rank), 0.0)
        # A rank whose wait is over is late itself: it may be in a signal handler. The message that a stopped
        # rank waited for may have arrived, so the stopped rank is the late one.
        if (
            wait is None
            or wait["awaited"] is None
            or wait["is_over"]
            or procfs.state(*engine.flight.liveness_of(rank)) == "stopped"
        ):
            return rank
        rank = wait["awaited"]
    return awaited if rank in followed else rank


def describe_late(engine: Engine, rank: int, seq: int, timeout_s: float) -> str:
    """Describe a rank that call `seq` waited for until the timeout, and the last call of that rank."""
    if engine.host_of(rank) is not None:
        return f"sent nothing more within {timeout_s:g} s; {describe_doing(engine, rank)}"
    last = engine.last_seq_of(rank)
    number, awaited = engine.number_of(last), engine.number_of(seq)
    call = f"call #{awaited}" if awaited > 0 else "the start"
    missed = f"did not come to {call}" if number < awaited else f"came to {call} but did not go on"
    return f"{missed} within {timeout_s:g} s; {describe_doing(engine, rank)}"


def describe_doing(engine: Engine, rank: int) -> str:
    """Describe the last call of a rank, and its host or process state, as far as this rank knows them."""
    host = engine.host_of(rank)
    if host is not None:
        found = engine.remote_call(rank)
        if found is None or found[0] <= 0 or found[1] is None:
            return f"it runs on {host}"
        return f"its last reported call was {describe_call(found[1])} #{found[0]}; it runs on {host}"
    last = engine.last_seq_of(rank)
    number = engine.number_of(last)
    if number <= 0:
        did = "it has made no collective yet"
    else:
        did = f"its last call was {describe_call(engine.flight.record_of(rank, last))} #{number}"
    wait = describe.wait_of(engine.flight.sight_of(rank))
    if wait is not None and wait["where"] != "call":
        did += f"; it waits in {wait['where']} for {describe.awaited(wait, engine.name_of)}"
    return f"{did}; it is {procfs.state(*engine.flight.liveness_of(rank))}"


def describe_unreadable(rank: int, error: int) -> str:
    """Say why this rank could not read an array directly from another rank's memory, and what to do."""
    return (
        f"it could not read the array of rank {rank}: {os.strerror(error)} (process_vm_readv); "
        "set SHMRING_SINGLE_COPY=off to avoid such reads"
    )


def describe_lost(error: int) -> str:
    """Say why the connection to a rank of another host has ended. error: its errno; 0: it was closed."""
    if error == errno.EBADMSG:
        return DAMAGED
    return os.strerror(error) if error else CONNECTION_ENDED


def describe_remote_mismatch(
    engine: Engine,
    rank: int,
    ours: Mapping[str, Any] | None,
    theirs: Mapping[str, Any] | None,
    number: int | None,
) -> str:
    """Describe two calls of different hosts that do not match. number: theirs, if it differs from ours."""
    own = describe_call(ours)
    if theirs is None or (number is not None and number <= 0):  # a call of the engine itself
        other = "something else, or a call before or after it"
    else:
        other = describe_call(theirs) + (f" as call #{number}" if number is not None else "")
    text = f"rank {engine.world_rank(engine.rank)} called {own}; rank {rank} called {other}"
    are_elections = ours is not None and theirs is not None and ours["kind"] == theirs["kind"] == "election"
    return text + (_LOOK_ALIKE if own == other or are_elections else "")


def prepare_abort_error(engine: Engine, *, beside: bool = False) -> Error:
    """Report the abort word to other hosts, make this rank's arrays private, and return the error to raise.

    beside: the calling thread may not be that of the collectives. This function may be called again.
    """
    error = _error_of(engine, engine.flight.abort_report())
    error.attach_snapshot(_snapshot(engine))
    ended_ranks.note_error(error, engine.world_rank(engine.rank))
    engine.notify_others(error)
    if (warning := engine.end_sharing(beside=beside)) is not None:
        error.add_note(warning)
    return error


def rehearse(engine: Engine) -> None:
    """Build an error and discard it, once in a process, so that the first real error is not slow.

    Python takes several times longer to do something for the first time, and ranks should raise soon.
    """
    global _has_rehearsed
    if not _has_rehearsed:
        _has_rehearsed = True
        engine.flight.abort_report()
        procfs.how_it_ended(os.getppid(), -1)  # no such process: only warms up the lookup
        _error_of(engine, ("failed", engine.rank, 0, "", 0, None)).attach_snapshot(_snapshot(engine))


def _snapshot(engine: Engine) -> Callable[[], tuple[tuple[str, ...], str]]:
    """Return a function that describes the position of every rank, by rank and as one line for this host.

    The function keeps no part of the engine alive.
    """
    seen = {engine.world_rank(rank): engine.flight.sight_of(rank) for rank in range(engine.size)}
    awaited = {wait["awaited"] for sight in seen.values() for wait in sight.waits}
    names = {rank: engine.name_of(rank) for rank in awaited}
    size = engine.world_size

    def describe_ranks() -> tuple[tuple[str, ...], str]:
        positions = {rank: describe.position_of(sight, names.__getitem__) for rank, sight in seen.items()}
        elsewhere = "" if len(seen) == size else " (ranks of this host)"
        where = tuple(str(positions.get(rank, _ELSEWHERE)) for rank in range(size))
        return where, f"where they were{elsewhere}: {describe.grouped(positions)}"

    return describe_ranks


def _error_of(engine: Engine, report: tuple[str, int, int, str, int, str | None] | None) -> Error:
    if report is None:
        text = f"the communicator stopped without giving a reason; {_OVER}"
        return Error(text, rank=engine.world_rank(engine.rank))
    cause, culprit, failed_seq, reason, number, op = report
    if cause == "remote":
        # Raise a copy: raising adds a traceback, and the engine keeps the original.
        return copy.copy(engine.remote_error()) or _passed_on(reason)
    if cause == "mismatch":
        return _mismatch(engine, culprit, failed_seq, number, op, reason)
    seq = number if number > 0 else None
    host = engine.host_of(culprit) or socket.gethostname()
    culprit = engine.world_rank(culprit)
    if cause == "failed":
        text = f"rank {culprit} on {host} failed: {reason}; {_OVER}"
        return RankFailed(text, rank=culprit, op=op, seq=seq, host=host, cause=reason)
    if cause == "timed out":
        text = f"rank {culprit} {reason}; {_OVER}; {WAIT_LONGER}"
        return Timeout(text, rank=culprit, op=op, seq=seq)
    text = f"rank {culprit} gave up: {reason}; {_OVER}"
    return Aborted(text, rank=culprit, op=op, seq=seq, reason=reason)


def _passed_on(text: str) -> Error:
    """Return the error that the text describes. A rank whose own connections are lost has the text alone."""
    named = _NAMED.match(text)
    if named is None:
        return Aborted(text, reason=text)
    rank, host, cause = int(named[1]), named[2], named[3]
    if host is None:
        return Aborted(text, rank=rank, reason=text)
    return RankFailed(text, rank=rank, host=host, cause=cause)


def _mismatch(
    engine: Engine, culprit: int, seq: int, number: int, op: str | None, between_hosts: str
) -> Mismatch:
    must = "every rank has to make the same calls in the same order"
    is_own = engine.number_of(seq) == number  # with several hosts, this rank may not have reached that call
    called = {
        engine.world_rank(rank): describe_call(
            engine.own_call(seq) if rank == engine.rank and is_own else engine.flight.record_of(rank, seq)
        )
        for rank in range(engine.size)
    }
    callers = between_hosts or _callers(called)
    called |= _calls_in(between_hosts)
    if (gather := _ragged_gather(set(called.values()) - {describe.NOTHING})) is not None:
        must = f"{gather}_v takes arrays of different lengths"
    elif describe.REFUSED in callers:
        must = "the error of the rank that refused says what was wrong"
    text = f"the ranks' calls do not match in call #{number}: {callers}; {must}"
    calls = tuple(called.get(rank, f"({_ELSEWHERE})") for rank in range(engine.world_size))
    return Mismatch(text, rank=engine.world_rank(culprit), op=op, seq=number, calls=calls)


def _ragged_gather(calls: set[str]) -> str | None:
    """Return "gather" or "all_gather" if all calls are this one, and differ only in the arrays' lengths."""
    alike = {_COUNT.sub("[]", call) for call in calls}
    if len(calls) < 2 or len(alike) > 1:
        return None
    op = alike.pop().partition("(")[0]
    return op if op in ("gather", "all_gather") else None


def _calls_in(text: str) -> dict[int, str]:
    """Return the calls that `describe_remote_mismatch` put into a message, by rank."""
    return {int(rank): call for rank, call in _REMOTE_CALL.findall(text.removesuffix(_LOOK_ALIKE))}


def _callers(called: Mapping[int, str]) -> str:
    callers: dict[str, list[int]] = {}
    for rank, call in called.items():
        callers.setdefault(call, []).append(rank)
    late = callers.pop(describe.NOTHING, [])
    parts = [f"{_named(ranks)} called {call}" for call, ranks in callers.items()]
    if len(parts) == 1:
        parts[0] += _LOOK_ALIKE
    if late:
        parts.append(f"{_named(late)} had not come yet")
    return "; ".join(parts)


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
