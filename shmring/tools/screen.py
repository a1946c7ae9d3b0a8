"""What commands hear and say: arguments, tables for people, JSON for programs, a line for what went wrong.

May know: extras.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from .. import extras

BAD_USAGE = 2


class Parser(argparse.ArgumentParser):
    """Its errors are one line that says what and where to read more, and exit status 2."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | keywords)

    def error(self, message: str) -> NoReturn:
        raise SystemExit(complain(self.prog, f"{message} (more with {self.prog} --help)", BAD_USAGE))


def complain(command: str, text: str, status: int = 1) -> int:
    """One line on stderr; returns the exit status."""
    print(f"{command}: {text}", file=sys.stderr, flush=True)
    return status


def seconds(text: str) -> float:
    """For add_argument(type=...): more than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, more than 0")
    return number


def at_least(least: int) -> Callable[[str], int]:
    """For add_argument(type=...): a whole number."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
        return int(text)

    return parse


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """The flag --json, which every command has."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def print_json(found: Any) -> None:
    """For programs."""
    json.dump(found, sys.stdout, indent=1)
    print()


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns as wide as their longest cells, of which the first are heads; `right`: columns of numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def need(module: str, extra: str, purpose: str) -> Any:
    """A module of an extra, or an exit that says how to get it."""
    try:
        return extras.need(module, extra, purpose)
    except extras.Missing as error:
        raise SystemExit(complain("shmring", str(error), BAD_USAGE)) from None
