"""From the abort word and the flight records to the exception that every rank raises.

May know: errors, liveness; it is handed an engine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from . import liveness
from .errors import Aborted, Error, Mismatch, RankFailed, Timeout

if TYPE_CHECKING:
    from ._engine import Engine

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "all_reduce_many")
ROOTED = ("reduce", "broadcast", "scatter", "gather", "scatter_v", "gather_v")
_NOTHING = "nothing yet"
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


def describe_late(engine: Engine, rank: int, seq: int, timeout_s: float) -> str:
    """What became of a rank that call `seq` waited for in vain, and what it did last."""
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


def raise_aborted(engine: Engine) -> NoReturn:
    """Raises what the abort word says: the same on every rank."""
    report = engine.abort_report()
    if report is None:
        raise Error(f"the communicator stopped without saying why; {_OVER}", rank=engine.rank)
    cause, culprit, failed_seq, reason = report
    number = engine.number_of(failed_seq)
    own = engine.record_of(engine.rank, failed_seq) if number > 0 else None  # else no collective failed
    op = own["kind"] if own else None
    if cause == "mismatch":
        raise _mismatch(engine, culprit, failed_seq, number, op)
    if cause == "failed":
        host = socket.gethostname()
        text = f"rank {culprit} on {host} failed: {reason}; {_OVER}"
        raise RankFailed(text, rank=culprit, op=op, seq=number, host=host, cause=reason)
    if cause == "timed out":
        text = f"rank {culprit} {reason}; {_OVER}; to wait longer set timeout= or SHMRING_TIMEOUT (seconds)"
        raise Timeout(text, rank=culprit, op=op, seq=number)
    text = f"rank {culprit} gave up: {reason}; {_OVER}"
    raise Aborted(text, rank=culprit, op=op, seq=number, reason=reason)


def _mismatch(engine: Engine, culprit: int, seq: int, number: int, op: str | None) -> Mismatch:
    calls = tuple(describe_call(engine.record_of(rank, seq)) for rank in range(engine.size))
    callers: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        callers.setdefault(call, []).append(rank)
    told = "; ".join(f"{_named(ranks)} {_did(call)}" for call, ranks in callers.items())
    if len(callers) == 1:
        told += ", but with arrays of other shapes or dtypes"
    must = "every rank has to make the same calls in the same order"
    text = f"the ranks' calls do not match in call #{number}: {told}; {must}"
    return Mismatch(text, rank=culprit, op=op, seq=number, calls=calls)


def _did(call: str) -> str:
    return "had not come yet" if call == _NOTHING else f"called {call}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
