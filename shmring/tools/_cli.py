"""Input and output of the commands: arguments, text tables, JSON, one-line errors."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from .. import __version__

BAD_USAGE = 2
INTERRUPTED = 130  # as a shell reports SIGINT
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_NBYTES = 1 << 40


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, points to --help, and exits with status 2."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | keywords)
        self.add_argument("--version", action="version", version=f"shmring {__version__}")
        self.set_defaults(prog=self.prog)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown arguments in the name of this parser: argparse leaves them to the outermost."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, []

    def error(self, message: str) -> NoReturn:
        refuse(self.prog, message)


def complain(command: str, text: str, status: int = 1) -> int:
    """Print one line to stderr and return the exit status."""
    print(f"{command}: {text}", file=sys.stderr, flush=True)
    return status


def refuse(command: str, text: str) -> NoReturn:
    """Exit with status 2 after a line about wrong arguments, which points to --help."""
    raise SystemExit(complain(command, f"{text} (more with {command} --help)", BAD_USAGE))


def in_one_line(error: BaseException) -> str:
    """Return the class and the text of an error, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def positive(text: str, most: float, problem: str) -> float:
    """Parse a number above 0 and below `most`, for a parser of add_argument(type=...)."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < most:
        raise argparse.ArgumentTypeError(f"{text!r} {problem}")
    return number


def seconds(text: str) -> float:
    """Parse a number of seconds above 0, for add_argument(type=...)."""
    return positive(text, 1e6, "is not a number of seconds above 0")


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` on, for add_argument(type=...)."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse


def sizes(text: str, factor: int = 4) -> tuple[int, ...]:
    """Parse sizes for add_argument(type=...): a range B:E, as in 8:64M, or a list, as in 8,4K,1M."""
    if ":" not in text:
        return tuple(dict.fromkeys(nbytes(word) for word in text.split(",")))
    begin, end = (nbytes(word) for word in (text.split(":") if text.count(":") == 1 else [text, text]))
    if end < begin:
        raise argparse.ArgumentTypeError(f"{text} ends before it begins: give the smaller one first")
    found = [begin]
    while found[-1] * factor <= end:
        found.append(found[-1] * factor)
    return tuple(found)


def nbytes(text: str) -> int:
    """Parse one size, as in 8, 4K or 64M, for add_argument(type=...)."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not (digits.isascii() and digits.isdigit() and 0 < int(digits) * unit <= _MOST_NBYTES):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes, as in 8, 4K, 64M; several are B:E or a list with commas"
        )
    return int(digits) * unit


def in_words(nbytes: int) -> str:
    """Format a size in the largest unit that divides it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def check_writable(path: Path) -> None:
    """Raise ValueError if no file can be written at `path`."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file in an existing folder that you may write to")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flag --json, which every command has."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def print_json(found: Any) -> None:
    """Print JSON to stdout."""
    json.dump(found, sys.stdout, indent=1)
    print()


class Bar:
    """Lines on a stream, and below them a progress bar; without tqdm or a terminal only the lines."""

    def __init__(self, total: int, unit: str, stream: TextIO, **look: Any) -> None:
        self._stream, self._bar = stream, None
        with suppress(ImportError):
            bar = import_module("tqdm").tqdm(total=total, unit=unit, disable=None, **look)
            self._bar = None if bar.disable else bar

    def write_line(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True, file=self._stream)
        else:
            self._bar.write(text, file=self._stream)
            self._stream.flush()

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Format rows as aligned columns; the first row holds the heads. `right`: columns to align right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
