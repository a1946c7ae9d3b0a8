"""`shmring top`: show repeatedly the position, the rates and the waits of all ranks of this user.

Rates are those of the calls between two polls. Bytes are computed from a rank's last 64 calls: it records no
more.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .._diagnostics.describe import LEAST_WAIT_S
from .._diagnostics.flight_recorder import DTYPE_NBYTES, DTYPES
from . import _attach, _cli

_HEADS = ("COMMUNICATOR", "RANK", "PID", "STATE", "CALLS/S", "BYTES/S", "SINCE", "WHERE")
_NUMBERS = (4, 5, 6)  # columns that hold numbers
_NOT_WAITING = ("stopped", "traced", "dead", "ended")
_ITEM_NBYTES = dict(zip(DTYPES, DTYPE_NBYTES, strict=True))


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch each rank's position, calls and bytes a second, and the rank that others wait for",
        description="Poll the ranks of all communicators of this user, or of processes PID only, once an "
        "interval, until Ctrl-C. Changes nothing and disturbs no rank. Bytes are those of the arrays passed "
        "to calls. Shows a live view if the package rich is installed, else one table below the other.",
    )
    parser.add_argument("pids", type=int, nargs="*", metavar="PID")
    parser.add_argument(
        "--interval", type=_cli.seconds, default=1.0, metavar="S", help="seconds between polls; %(default)g"
    )
    parser.add_argument(
        "--count", type=_cli.at_least(1), metavar="N", help="number of tables to show (default: no limit)"
    )
    _cli.add_json(parser, "a line for each poll, a list of communicators,")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Watch and return the exit status."""
    wrong = next(filter(None, map(_attach.why_not, arguments.pids)), None)
    if wrong is not None:
        return _cli.complain("shmring top", wrong)
    looks = itertools.islice(_polls(arguments.pids, arguments.interval), arguments.count)
    try:
        if arguments.json:
            for found in looks:
                print(json.dumps(found), flush=True)
        else:
            _show(looks)
    except KeyboardInterrupt:
        pass
    return 0


# ---- polling ----------------------------------------------------------------------------------------------


@dataclass
class _Before:
    """A rank's state at the last poll."""

    at_s: float
    number: int = 0  # number of its last call
    since_s: float = 0.0  # when that call was first seen


def _polls(pids: list[int], interval_s: float) -> Iterator[list[dict[str, Any]]]:
    """Poll all communicators; yield from the second poll on, since a rate needs two."""
    before: dict[tuple[str, int], _Before] = {}
    next_s = time.monotonic()
    for turn in itertools.count():
        found = _attach.of_processes(pids or _attach.own_processes())
        states = [_poll(segment, before) for segment in found]
        names = {one["communicator"] for one in states}
        before = {key: seen for key, seen in before.items() if key[0] in names}
        if turn > 0:
            yield states
        next_s = max(next_s + interval_s, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))


def _poll(segment: _attach.Segment, before: dict[tuple[str, int], _Before]) -> dict[str, Any]:
    state = _attach.state_of(segment)
    if segment.flight is None:
        return state
    for local, rank in enumerate(state["ranks"]):
        seen = before.setdefault((state["communicator"], local), _Before(time.monotonic()))
        rank |= _pace(seen, rank, segment.flight.records_of(local))
    return state | {"awaited": _awaited(state["ranks"])}


def _pace(seen: _Before, rank: dict[str, Any], records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a rank's calls and bytes a second since the last poll, and the time at its position."""
    now_s = time.monotonic()
    last = rank["last_call"] or {"number": 0, "outcome": "complete"}
    ncalls = max(0, last["number"] - max(seen.number, 0)) if seen.since_s else 0
    sizes = [_nbytes(record) for record in records if record["number"] > seen.number]
    elapsed_s = max(now_s - seen.at_s, 1e-3)
    if last["number"] != seen.number or not seen.since_s:
        seen.number, seen.since_s = last["number"], now_s
    seen.at_s = now_s
    waited_s = max((wait["waited_s"] for wait in rank["waits"] if not wait["until_ns"]), default=0.0)
    is_inside = last["outcome"] == "under way"
    return {
        "calls_per_s": ncalls / elapsed_s,
        "bytes_per_s": ncalls * sum(sizes) / max(len(sizes), 1) / elapsed_s,
        "since_s": max(waited_s, now_s - seen.since_s) if is_inside or waited_s else None,
    }


def _nbytes(record: Mapping[str, Any]) -> int:
    is_made = record["kind"] in ("empty", "shared")  # these calls allocate memory and move no data
    return 0 if is_made else int(record["count"]) * _ITEM_NBYTES.get(record["dtype"], 1)


def _awaited(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the rank at the end of most chains of waits; None if no rank waits for long."""
    waits: dict[int, int] = {
        rank["rank"]: wait["awaited"]
        for rank in ranks
        if rank["state"] not in _NOT_WAITING  # their recorded waits are out of date
        for wait in rank["waits"]
        if wait["waited_s"] >= LEAST_WAIT_S and not wait["until_ns"] and wait["awaited"] is not None
    }
    ends = {rank: _end_of(waits, rank) for rank in waits}
    if not ends:
        return None
    (rank, _), *_ = collections.Counter(ends.values()).most_common(1)
    where = next((one["where"] for one in ranks if one["rank"] == rank), "on another host")
    return {"rank": rank, "by": sorted(one for one, end in ends.items() if end == rank), "where": where}


def _end_of(waits: dict[int, int], rank: int) -> int:
    for _ in waits:  # the ranks were polled one after another, so the waits may appear to form a cycle
        rank = waits.get(rank, rank)
    return rank


# ---- showing ----------------------------------------------------------------------------------------------


def _show(looks: Iterator[list[dict[str, Any]]]) -> None:
    live = _live() if sys.stdout.isatty() else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # restores the terminal on exit
    if live is None:
        for found in looks:
            print("\n".join(_lines(found)), end="\n\n", flush=True)
        return
    with live:
        for found in looks:
            live.update(_coloured(_lines(found)), refresh=True)


def _live() -> Any:
    """Return a view that redraws in place; None if rich is not installed."""
    try:
        from rich.live import Live
    except ModuleNotFoundError:
        return None
    return Live("", screen=True, auto_refresh=False)


def _coloured(lines: list[str]) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        is_wrong = any(f"  {word}  " in line for word in ("dead", "over", "stopped"))
        style = "bold" if number == 0 else "red" if is_wrong else "yellow" if " waiting " in line else ""
        text.append(line + "\n", style)
    return text


def _lines(found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return ["no communicators of this user on this host"]
    rows = [row for one in found for row in _rows(one)]
    heads, *lines = _cli.table([_HEADS, *rows], right=_NUMBERS).split("\n")
    # The summary comes first: a terminal may have room for the first lines only.
    return [heads, *(_late(one) for one in found if one.get("awaited")), *lines]


def _late(one: dict[str, Any]) -> str:
    awaited = one["awaited"]
    by = f"{len(awaited['by'])} rank{'s' if len(awaited['by']) > 1 else ''}"
    return f"{one['communicator']}: {by} waiting for rank {awaited['rank']}: {awaited['where']}"


def _rows(one: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    name = one["communicator"]
    if "damage" in one:
        yield name, "?", "", "", "", "", "", f"cannot be read: {one['damage']}"
        return
    for rank in one["ranks"]:
        yield (
            name,
            f"{rank['rank']}/{rank['size']}",
            str(rank["pid"] or "-"),
            rank["state"],
            f"{rank['calls_per_s']:,.0f}",
            _bytes(rank["bytes_per_s"]),
            "-" if rank["since_s"] is None else f"{rank['since_s']:.1f} s",
            rank["where"],
        )
    if one["over"]:
        yield name, "", "", "over", "", "", "", _attach.over_text(one["over"])


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
