"""The picture of `shmring bench --plot`: latency and bandwidth against size, with the copy limit drawn in.

Needs matplotlib, and no display. May know: compare, screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import screen
from .compare import Curve

_LEAST_GB_S = 0.01  # what is slower is told by the latency
_MOST_TICKS = 9
_OWN = {"label": "shmring", "color": "tab:red", "zorder": 3}
_LIMIT = {"label": "copy limit", "color": "black", "linestyle": "-."}


def formats() -> set[str]:
    """What names of pictures may end in; ends the process where there is no matplotlib."""
    return set(_figure().canvas.get_supported_filetypes())


def draw(report: dict[str, Any], curves: Sequence[Curve], path: Path) -> None:
    """Write the picture; the format is that of the path's ending."""
    figure_of(report, curves).savefig(path, dpi=110)


def figure_of(report: dict[str, Any], curves: Sequence[Curve]) -> Any:
    """A matplotlib Figure: two panels of the same curves."""
    rows = report["rows"]
    own = {row["nbytes"]: row["p50_us"] for row in rows}
    limit = {row["nbytes"]: row["copy_us"] for row in rows if row["copy_us"]}
    lines: list[tuple[dict[int, float], dict[str, Any]]] = [(own, _OWN)]
    lines += [(curve.us, {"label": curve.label, "linestyle": "--"}) for curve in curves]
    figure = _figure(figsize=(13, 4.8), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    for points, look in [*lines, (limit, _LIMIT)]:
        sizes = sorted(nbytes for nbytes, us in points.items() if nbytes and us)
        if sizes:
            latency.plot(sizes, [points[nbytes] for nbytes in sizes], marker=".", **look)
            speeds = [1e-3 * nbytes / points[nbytes] for nbytes in sizes]
            bandwidth.plot(sizes, speeds, marker=".", **look)
    _dress(latency, "µs a call (median)", sorted(own))
    _dress(bandwidth, "GB/s (size / time)", sorted(own))
    bottom, top = bandwidth.get_ylim()
    bandwidth.set_ylim(bottom=max(bottom, min(_LEAST_GB_S, top / 10)))
    latency.legend(fontsize=8)
    machine = report["machine"]
    where = f"{report['ranks']} ranks, {machine['cpu_model']}, cores {report['distance']}"
    figure.suptitle(f"{report['what']}; {where}, {report['started']}", fontsize=9)
    return figure


def _figure(**look: Any) -> Any:
    return screen.need("matplotlib.figure", "plot", "--plot").Figure(**look)


def _dress(axes: Any, unit: str, sizes: Sequence[int]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="size", ylabel=unit)
    axes.set_xticks(ticks := sizes[:: -(-len(sizes) // _MOST_TICKS)], [_in_words(nbytes) for nbytes in ticks])
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)


def _in_words(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
