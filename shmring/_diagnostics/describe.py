"""Describe flight records for people: the call of a rank, its position, and the rank that it waits for.

Functions take a `Sight` or records that `flight_recorder` read from a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .._system import cpulist

if TYPE_CHECKING:
    from .flight_recorder import Sight

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "all_reduce_many")
ROOTED = ("reduce", "broadcast", "scatter", "gather", "scatter_v", "gather_v")
NOTHING = "nothing yet"
REFUSED = "with arguments that it refused"
LEAST_WAIT_S = 0.05  # shorter waits are not reported


def describe_call(record: Mapping[str, Any] | None) -> str:
    """Return a call as a person would write it: all_reduce(float32[1024], sum)."""
    if record is None:
        return NOTHING
    kind = record["kind"]
    if kind == "election":
        before = record.get("before")
        return kind if before is None else f"{kind} before {describe_call({**record, 'kind': before})}"
    if record["invalid"]:
        return f"{kind} {REFUSED}"
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
    if record["wire"] != "native":
        words.append(f"wire={record['wire']}")
    if record["group_size"]:
        words.append(f"group_size={record['group_size']}")
    if record["priority"] is not None:
        words.append(f"priority={record['priority']}")
    return f"{kind}({', '.join(words)})"


class Position(NamedTuple):
    """Position of a rank in its calls, and the rank that it waits for."""

    at: str
    awaited: str = ""  # "rank 1"
    wait_s: float = 0.0
    gave_up: bool = False

    def __str__(self) -> str:
        verb = "waited" if self.gave_up else "waiting"
        return self.at + (f", {verb} {seconds(self.wait_s)} for {self.awaited}" if self.awaited else "")


def seconds(wait_s: float) -> str:
    """Return a duration as a person would write it: 0.25 s, 3.2 s, 75 s."""
    return f"{wait_s:.2f} s" if wait_s < 1 else f"{wait_s:.1f} s" if wait_s < 10 else f"{wait_s:.0f} s"


def position_of(sight: Sight, name: Callable[[int | None], str]) -> Position:
    """Return the position of a local rank. name: returns the name of an awaited rank; None means any rank."""
    if sight.presence == "absent":
        return Position("not here yet")
    record = sight.record
    wait = wait_of(sight)
    at = _at(record, wait)
    if sight.presence == "dead":
        return Position(f"dead {at}")
    if wait is not None:
        return Position(at, awaited(wait, name), waited_s(wait, sight.at_ns), bool(wait["until_ns"]))
    return Position(f"closed {at}" if sight.presence == "closed" else at)


def wait_of(sight: Sight, least_s: float = LEAST_WAIT_S) -> dict[str, Any] | None:
    """Return the longest current wait of a rank; None if it has waited for less than `least_s`."""
    record = sight.record
    for wait in sorted(sight.waits, key=lambda wait: waited_s(wait, sight.at_ns), reverse=True):
        stale = wait["where"] == "call" and (record is None or record["seq"] != wait["seq"])
        if not stale and waited_s(wait, sight.at_ns) >= least_s:
            return wait
    return None


def waited_s(wait: Mapping[str, Any], now_ns: int) -> float:
    """Return the duration of a wait so far, or until the rank gave up."""
    until_ns: int = wait["until_ns"] or now_ns
    return max(0.0, (until_ns - int(wait["since_ns"])) * 1e-9)


def awaited(wait: Mapping[str, Any], name: Callable[[int | None], str]) -> str:
    """Return the rank that a wait is for, as `name` names it."""
    return "a message" if wait["awaited"] is None else name(wait["awaited"])


def _at(record: Mapping[str, Any] | None, wait: Mapping[str, Any] | None) -> str:
    if wait is not None and wait["where"] != "call":
        return f"in {wait['where']}" if wait["where"] != "lock" else "at a lock of a shared array"
    if record is None or (record["number"] <= 0 and record["outcome"] == "complete"):
        return "before its first collective"
    if record["number"] <= 0:
        return "at the start"
    side = "after" if record["outcome"] == "complete" else "in"
    return f"{side} {describe_call(record)} #{record['number']}"


def grouped(positions: Mapping[int, Position]) -> str:
    """Return one line with the positions of all ranks. Ranks at the same position are named together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, position in positions.items():
        groups.setdefault((position.at, position.awaited), []).append(rank)
    parts = []
    for (at, awaited), ranks in groups.items():
        longest = max(positions[rank].wait_s for rank in ranks)
        gave_up = any(positions[rank].gave_up for rank in ranks)
        parts.append(f"{named(ranks)} {Position(at, awaited, longest, gave_up)}")
    return "; ".join(parts)


def named(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    text = cpulist.spell(ranks).replace(",", ", ")
    return f"rank{'' if text.isdigit() else 's'} {text}"
