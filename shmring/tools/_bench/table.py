"""Print the table of `shmring bench` line by line, with figures of other runs and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .. import _cli
from .calls import Job
from .compare import Curve, Others, curves_of

_WIDTHS = {
    "size": 10, "count": 10, "min": 9, "avg": 9, "p50": 9, "p99": 9,
    "algbw": 8, "busbw": 8, "copy": 9, "#wrong": 7,
}  # fmt: skip
_UNITS = ("B", "items", "us", "us", "us", "us", "GB/s", "GB/s", "us", "items")
_LEAST_WIDTH = 16  # of a column of others' figures


class Table:
    """Write lines to stdout, and a bar to stderr if stderr is a terminal and tqdm is installed."""

    def __init__(self, job: Job, others: Sequence[Others], *, lines: bool, bar: bool) -> None:
        self._job, self._others, self._lines, self._has_bar = job, others, lines, bar
        self._curves: list[Curve] = []
        self._bar: _cli.Bar | None = None

    def begin(self, facts: dict[str, Any]) -> None:
        """Print the facts that the figures depend on, and the heads."""
        self._curves = curves_of(self._others, facts["ranks"], facts["distance"])
        if self._has_bar:
            job = self._job
            self._bar = _cli.Bar(len(job.sizes), "size", sys.stdout, desc=job.call, leave=False)
        for line in [*head_lines(facts), *self._warnings(), *self._heads()]:
            self._say(line)

    def row(self, row: dict[str, Any]) -> None:
        """Print the line of one size."""
        self._say(row_line(row) + "".join(self._beside(row, curve) for curve in self._curves))
        if self._bar is not None:
            self._bar.advance()

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def _say(self, line: str) -> None:
        if self._lines:
            assert self._bar is not None  # of rank 0
            self._bar.write_line(line)

    def _warnings(self) -> list[str]:
        names = ", ".join(str(others.path) for others in self._others)
        if not self._others:
            return []
        return [
            f"# beside it: us in {names}, and how many times the p50 here. That is ANOTHER RUN,",
            "# with cores elsewhere and other load: a hint, no more",
        ]

    def _heads(self) -> list[str]:
        names = [name.rjust(width) for name, width in _WIDTHS.items()]
        units = [unit.rjust(width) for unit, width in zip(_UNITS, _WIDTHS.values(), strict=True)]
        names += [curve.label.rjust(_width(curve)) for curve in self._curves]
        return ["# " + " ".join(names)[2:], "# " + " ".join(units)[2:]]

    def _beside(self, row: dict[str, Any], curve: Curve) -> str:
        us, mine = curve.us.get(row["nbytes"]), row["p50_us"]
        text = "-" if us is None else f"{figure(us)} ({us / mine:.2f}x)" if mine else figure(us)
        return " " + text.rjust(_width(curve))


def _width(curve: Curve) -> int:
    return max(_LEAST_WIDTH, len(curve.label))


def head_lines(facts: dict[str, Any]) -> list[str]:
    """Return lines that say what is measured and where, each a comment for programs that parse the table."""
    cpus = ", ".join(",".join(map(str, some)) if len(some) == 1 else "any" for some in facts["cpus"][:16])
    cpus += ", ..." if len(facts["cpus"]) > 16 else ""
    hosts = f" on {facts['hosts']} hosts" if facts["hosts"] > 1 else ""
    trip = f"{facts['round_trip_ns']} ns" if facts["round_trip_ns"] else "unknown"
    crowded = "; MORE RANKS THAN CPUS" if facts["crowded"] else ""
    machine = facts["machine"]
    system = f"Linux {machine['kernel']}, Python {machine['python']}"
    return [
        f"# shmring {facts['version']}: {facts['what']}",
        f"# {facts['ranks']} ranks{hosts}, on CPUs {cpus}{crowded}",
        f"# {machine['cpu_model']}, {system}, {facts['started']}",
        f"# cores are {facts['distance']} (round trip {trip}), instruction set {facts['isa']}",
        "# times of one call on the slowest rank; only ratios within one run count",
    ]


def row_line(row: dict[str, Any]) -> str:
    """Format one size in the widths of the heads."""
    copy = "-" if row["copy_us"] is None else figure(row["copy_us"])
    cells = [
        str(row["nbytes"]),
        str(row["count"]),
        *(figure(row[f"{name}_us"]) for name in ("min", "avg", "p50", "p99")),
        *(f"{row[name]:.2f}" if row["nbytes"] else "-" for name in ("algbw_gb_s", "busbw_gb_s")),
        copy,
        "-" if row["wrong"] is None else str(row["wrong"]),
    ]
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS.values(), strict=True))


def figure(us: float) -> str:
    """Format µs with at least three significant digits."""
    return f"{us:.{0 if us >= 1000 else 1 if us >= 100 else 2 if us >= 1 else 3}f}"
