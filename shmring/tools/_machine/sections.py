"""Print sections of two aligned columns, in colour if rich is installed and stdout is a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

_LEAST_ROOM = 30  # a narrower column is not wrapped


class Row(NamedTuple):
    """A label, its text, and the colour of the label."""

    label: str
    text: str = ""
    style: str = "cyan"


def show(sections: Mapping[str, Sequence[Row]]) -> None:
    """Print to stdout. Wrap lines for a terminal only, so that programs find each row on one line."""
    width = max((len(row.label) for rows in sections.values() for row in rows), default=0)
    lines: list[Row] = []
    for head, rows in sections.items():
        if lines:
            lines.append(Row(""))
        lines += [Row(head, style="bold"), *(line for row in rows for line in _lines(row, width))]
    if sys.stdout.isatty() and find_spec("rich") is not None:
        console, text = import_module("rich.console").Console(), import_module("rich.text").Text
        for line in lines:
            console.print(text.assemble((line.label, line.style), line.text), soft_wrap=True)
    else:
        print("\n".join((line.label + line.text).rstrip() for line in lines))


def _lines(row: Row, width: int) -> Iterator[Row]:
    text = _printable(row.text)
    room = shutil.get_terminal_size().columns - width - 4 if sys.stdout.isatty() else 0
    first, *more = textwrap.wrap(text, room) if room >= _LEAST_ROOM and text else [text]
    yield Row(f"  {row.label:{width}}", f"  {first}", row.style)
    for line in more:
        yield Row(" " * (width + 2), f"  {line}")


def _printable(text: str) -> str:
    """Escape characters that the terminal cannot show."""
    text = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
