"""`shmring dump PID`: print the state of all ranks on this host that share a communicator with a process."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from .._diagnostics.describe import describe_call, seconds
from . import _attach, _cli


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "dump",
        help="the last calls, waits and Python stacks of all ranks that share a communicator with a process",
        description="Print for each communicator of process PID why it has ended, if it has, and for each "
        "rank its position, its waits, its last calls (at most 64) and its Python stacks. Changes nothing. "
        "For stacks each rank is woken for a moment and writes them itself; --no-stacks disturbs no rank.",
    )
    parser.add_argument("pid", type=int, metavar="PID")
    parser.add_argument(
        "--all", action="store_true", help="also show the calls by which the communicator started"
    )
    parser.add_argument(
        "--no-stacks", action="store_true", help="do not ask the ranks for their Python stacks"
    )
    _cli.add_json(parser, "a list of communicators")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the state and return the exit status."""
    wrong = _attach.why_not(arguments.pid)
    if wrong is not None:
        return _fail(wrong)
    found = _attach.of_processes([arguments.pid])
    if not found:
        return _fail(f"process {arguments.pid} has no communicator, or has closed it")
    all_seen = [_seen(one, with_stacks=not arguments.no_stacks, with_start=arguments.all) for one in found]
    if arguments.json:
        _cli.print_json(all_seen)
    else:
        shown: set[int] = set()  # processes whose stacks are already printed
        print("\n".join(_text(one, shown) for one in all_seen))
    return 0


def _fail(text: str) -> int:
    return _cli.complain("shmring dump", text)


def _seen(segment: _attach.Segment, *, with_stacks: bool, with_start: bool) -> dict[str, Any]:
    state = _attach.state_of(segment)
    if segment.flight is None:
        return state
    stacks = _attach.stacks_of(segment) if with_stacks else {}
    for rank, one in enumerate(state["ranks"]):
        calls = segment.flight.records_of(rank)
        one["calls"] = [call for call in calls if with_start or call["number"] > 0]
        if with_stacks:
            one["stacks"] = _attach.printable(stacks[rank])
    return state


def _text(one: dict[str, Any], shown: set[int]) -> str:
    if "damage" in one:
        return f"communicator {one['communicator']} cannot be read: {one['damage']}\n"
    lines = [f"communicator {one['communicator']}, {len(one['ranks'])} ranks on this host"]
    if one["over"]:
        lines.append(f"over: {_attach.over_text(one['over'])}")
    for rank in one["ranks"]:
        who = f"rank {rank['rank']} of {rank['size']}, process {rank['pid'] or '-'}, {rank['state']}"
        lines.append(f"\n{who}: {rank['where']}")
        lines += [f"  waits {_wait(wait)}" for wait in rank["waits"]]
        lines.append("  last calls:")
        lines += [f"    {_call(record)}" for record in rank["calls"]] or ["    none"]
        if "stacks" in rank:
            known = rank["pid"] is not None and rank["pid"] in shown
            shown.add(rank["pid"])
            text = "(as above)" if known else rank["stacks"].rstrip("\n")
            lines += ["  stacks:", textwrap.indent(text, "    ")]
    return "\n".join(lines) + "\n"


def _wait(wait: dict[str, Any]) -> str:
    where = "at a lock" if wait["where"] == "lock" else f"in a {wait['where']}"
    awaited = "any rank" if wait["awaited"] is None else f"rank {wait['awaited']}"
    return f"{where} for {awaited}: {seconds(wait['waited_s'])}{', then gave up' if wait['until_ns'] else ''}"


def _call(record: dict[str, Any]) -> str:
    number = f"#{record['number']}" if record["number"] > 0 else "start"
    outcome = "" if record["outcome"] == "complete" else f" ({record['outcome']})"
    return f"{number} {describe_call(record)}{outcome}"
