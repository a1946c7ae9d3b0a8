"""Log a warning about a long wait: the late rank, its last call, and what it does now.

Functions take an engine.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from .._system import procfs
from . import describe, failures, stacks

if TYPE_CHECKING:
    from .._engine.engine import Engine

_log = logging.getLogger("shmring")


def warn(engine: Engine, since_ns: int) -> None:
    """Log the rank that this rank has waited for since `since_ns`."""
    waits = engine.flight.waits_of(engine.rank)
    wait = next((wait for wait in waits if wait["since_ns"] == since_ns), None)
    if wait is None or wait["awaited"] is None:  # a receive from any rank waits for no particular rank
        return
    own = describe.position_of(engine.flight.sight_of(engine.rank), engine.name_of).at
    waited = describe.seconds(describe.waited_s(wait, time.monotonic_ns()))
    late = failures.late_in_the_end(engine, wait["awaited"])
    text = f"rank {engine.world_rank(engine.rank)} has waited {waited} for {engine.name_of(late)}"
    _log.warning("%s %s%s", text, own, _what_it_does(engine, late))


def _what_it_does(engine: Engine, rank: int) -> str:
    host = engine.host_of(rank)
    if host is not None:
        return f"; it runs on {host}"
    pid, start = engine.flight.liveness_of(rank)
    name = engine.name_of(rank)
    sight = engine.flight.sight_of(rank)
    where, last = describe.position_of(sight, engine.name_of), sight.record

    def still() -> bool:  # the waiting call is blocked meanwhile and polls nothing
        is_over = engine.flight.abort_report() is not None or any(map(engine.has_gone, range(engine.size)))
        return not is_over and engine.flight.last_of(rank) == last

    answer = stacks.ask(engine.flight, [rank], still=still)[rank]
    lines = f" and does:\n{answer}" if answer.startswith("Thread") else f" {answer}"
    return f"; {name} is {where}; its process {pid} is {procfs.state(pid, start)}{lines}"
