"""`shmring ps`: print one line for each rank of every communicator of this user."""

from __future__ import annotations

import argparse
from typing import Any

from . import _attach, _cli

_HEADS = ("COMMUNICATOR", "RANK", "PID", "STATE", "WHERE")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "ps",
        help="list the ranks of all communicators of this user, their positions and waits",
        description="Print one line for each rank: communicator, rank/size, pid, state in /proc, position. "
        "Changes nothing and disturbs no rank.",
    )
    _cli.add_json(parser, "a list of communicators")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the lines and return the exit status."""
    found = [_attach.state_of(one) for one in _attach.of_processes(_attach.own_processes())]
    if arguments.json:
        _cli.print_json(found)
    elif not found:
        print("no communicators of this user on this host")
    else:
        print(_cli.table([_HEADS, *(row for one in found for row in _rows(one))]))
    return 0


def _rows(one: dict[str, Any]) -> list[tuple[str, ...]]:
    name = one["communicator"]
    if "damage" in one:
        pids = ",".join(map(str, one["pids"][:3])) + (",..." if len(one["pids"]) > 3 else "")
        return [(name, "?", pids, "", f"cannot be read: {one['damage']}")]
    rows: list[tuple[str, ...]] = [
        (name, f"{rank['rank']}/{rank['size']}", str(rank["pid"] or "-"), rank["state"], rank["where"])
        for rank in one["ranks"]
    ]
    if one["over"]:
        rows.append((name, "", "", "over", _attach.over_text(one["over"])))
    return rows
