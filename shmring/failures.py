"""From the abort word and the flight records to the exception that every rank raises.

May know: errors, liveness; it is handed an engine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from . import liveness
from .errors import WAIT_LONGER, Aborted, Error, Mismatch, RankFailed, Timeout

if TYPE_CHECKING:
    from ._engine import Engine

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "all_reduce_many")
ROOTED = ("reduce", "broadcast", "scatter", "gather", "scatter_v", "gather_v")
CONNECTION_ENDED = "its connection was closed: it ended, or its host did"
_NOTHING = "nothing yet"
_ELSEWHERE = "(on another host)"
_LOOK_ALIKE = ", but with arrays of other shapes or dtypes, another wire= or another group_size="
_OVER = "this communicator is over, join a new world"


def describe_call(record: Mapping[str, Any] | None) -> str:
    """As a person would write it: all_reduce(float32[1024], sum)."""
    if record is None:
        return _NOTHING
    kind = record["kind"]
    if record["invalid"]:
        return f"{kind} with arguments that it refused"
    if kind == "barrier":
        return "barrier()"
    if kind == "split":
        return "split()"
    if kind == "group":
        return f"group({record['count']} ranks)"
    if kind in ("empty", "shared"):
        return f"{kind}({record['count']} bytes)"
    words = [f"{'rows of ' if kind.endswith('_v') else ''}{record['dtype']}[{record['count']}]"]
    if kind in REDUCTIONS:
        words.append(record["op"])
    if kind in ROOTED:
        words.append(f"root={record['root']}")
    if record["order"] == "F":
        words.append("order F")
    if record["algorithm"] != "auto":
        words.append(f"algorithm={record['algorithm']}")
    return f"{kind}({', '.join(words)})"


def describe_raised(engine: Engine, error: BaseException, said: str = "") -> str:
    """Why this rank gives up: what it raised, and what that says, if anything."""
    return f"{type(error).__name__} in rank {engine.world_rank(engine.rank)}{': ' if said else ''}{said}"


def describe_late(engine: Engine, rank: int, seq: int, timeout_s: float) -> str:
    """What became of a rank that call `seq` waited for in vain, and what it did last."""
    host = engine.host_of(rank)
    if host is not None:
        return f"sent nothing more within {timeout_s:g} s; it runs on {host}"
    last = engine.last_seq_of(rank)
    number, awaited = engine.number_of(last), engine.number_of(seq)
    call = f"call #{awaited}" if awaited > 0 else "the start"
    missed = f"did not come to {call}" if number < awaited else f"came to {call} but did not go on"
    if number <= 0:
        did = "it has called nothing yet"
    else:
        did = f"its last call was {describe_call(engine.record_of(rank, last))} #{number}"
    return f"{missed} within {timeout_s:g} s; {did}; it is {liveness.state(*engine.life_of(rank))}"


def describe_unreadable(rank: int, error: int) -> str:
    """Why this rank could not read an array straight from another's memory, and what to do."""
    return (
        f"it could not read the array of rank {rank}: {os.strerror(error)} (process_vm_readv); "
        "SHMRING_SINGLE_COPY=off does without that"
    )


def describe_parted(
    engine: Engine, rank: int, ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None
) -> str:
    """Two calls of ranks of different hosts that do not match."""
    own = describe_call(ours)
    other = describe_call(theirs) if theirs else "something else, or a call before or after it"
    told = f"rank {engine.world_rank(engine.rank)} called {own}; rank {rank} called {other}"
    return told + (_LOOK_ALIKE if own == other else "")


def raise_aborted(engine: Engine) -> NoReturn:
    """Raises what the abort word says: the same on every rank, also of other hosts."""
    error = _what_ended(engine)
    engine.tell_others(error)
    raise error


def _what_ended(engine: Engine) -> Error:
    report = engine.abort_report()
    if report is None:
        return Error(f"the communicator stopped without saying why; {_OVER}", rank=engine.rank)
    cause, culprit, failed_seq, reason = report
    if cause == "told":
        return engine.what_others_told() or Aborted(reason, reason=reason)
    number = engine.number_of(failed_seq)
    own = engine.own_call(failed_seq) if number > 0 else None  # else no collective failed
    op = own["kind"] if own else None
    if cause == "mismatch":
        return _mismatch(engine, culprit, failed_seq, number, op, reason)
    host = engine.host_of(culprit) or socket.gethostname()
    culprit = engine.world_rank(culprit)
    if cause == "failed":
        text = f"rank {culprit} on {host} failed: {reason}; {_OVER}"
        return RankFailed(text, rank=culprit, op=op, seq=number, host=host, cause=reason)
    if cause == "timed out":
        text = f"rank {culprit} {reason}; {_OVER}; {WAIT_LONGER}"
        return Timeout(text, rank=culprit, op=op, seq=number)
    text = f"rank {culprit} gave up: {reason}; {_OVER}"
    return Aborted(text, rank=culprit, op=op, seq=number, reason=reason)


def _mismatch(
    engine: Engine, culprit: int, seq: int, number: int, op: str | None, between_hosts: str
) -> Mismatch:
    must = "every rank has to make the same calls in the same order"
    called = {
        engine.world_rank(rank): describe_call(
            engine.own_call(seq) if rank == engine.rank else engine.record_of(rank, seq)
        )
        for rank in range(engine.size)
    }
    told = between_hosts or _callers(called)
    text = f"the ranks' calls do not match in call #{number}: {told}; {must}"
    calls = tuple(called.get(rank, _ELSEWHERE) for rank in range(engine.world_size))
    return Mismatch(text, rank=engine.world_rank(culprit), op=op, seq=number, calls=calls)


def _callers(called: Mapping[int, str]) -> str:
    callers: dict[str, list[int]] = {}
    for rank, call in called.items():
        callers.setdefault(call, []).append(rank)
    told = "; ".join(f"{_named(ranks)} {_did(call)}" for call, ranks in callers.items())
    return told + (_LOOK_ALIKE if len(callers) == 1 else "")


def _did(call: str) -> str:
    return "had not come yet" if call == _NOTHING else f"called {call}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
