"""Plot figures against size, for `shmring bench --plot`: latency, bandwidth and the copy limit.

This file needs matplotlib but no display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._config import optional_deps
from .. import _cli
from .compare import Curve

_LEAST_GB_S = 0.01  # lower bandwidths are off the plot; the latency panel shows them
_MOST_TICKS = 9
_OWN = {"label": "shmring", "color": "tab:red", "zorder": 3}
_LIMIT = {"label": "copy limit", "color": "black", "linestyle": "-."}


def check(path: Path) -> None:
    """Raise ValueError if no picture can be written at `path`; exit if matplotlib is missing."""
    _cli.check_writable(path)
    endings = empty().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in endings:
        raise ValueError(f"{path} is not a picture: it must end in .{', .'.join(sorted(endings))}")


def draw(report: dict[str, Any], curves: Sequence[Curve], path: Path) -> None:
    """Write the picture in the format of the path's suffix."""
    figure_of(report, curves).savefig(path, dpi=110)


def figure_of(report: dict[str, Any], curves: Sequence[Curve]) -> Any:
    """Return a matplotlib Figure with two panels of the same curves."""
    rows = report["rows"]
    own = {row["nbytes"]: row["p50_us"] for row in rows}
    limit = {row["nbytes"]: row["copy_us"] for row in rows if row["copy_us"]}
    lines: list[tuple[dict[int, float], dict[str, Any]]] = [(own, _OWN)]
    lines += [(curve.us, {"label": curve.label, "linestyle": "--"}) for curve in curves]
    figure = empty(figsize=(13, 4.8), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    for points, look in [*lines, (limit, _LIMIT)]:
        sizes = sorted(nbytes for nbytes, us in points.items() if nbytes and us)
        if sizes:
            latency.plot(sizes, [points[nbytes] for nbytes in sizes], marker=".", **look)
            speeds = [1e-3 * nbytes / points[nbytes] for nbytes in sizes]
            bandwidth.plot(sizes, speeds, marker=".", **look)
    dress(latency, "µs a call (median)", sorted(own))
    dress(bandwidth, "GB/s (size / time)", sorted(own))
    bottom, top = bandwidth.get_ylim()
    bandwidth.set_ylim(bottom=max(bottom, min(_LEAST_GB_S, top / 10)))
    latency.legend(fontsize=8)
    machine = report["machine"]
    where = f"{report['ranks']} ranks, {machine['cpu_model']}, cores {report['distance']}"
    figure.suptitle(f"{report['what']}; {where}, {report['started']}", fontsize=9)
    return figure


def empty(**look: Any) -> Any:
    """Return an empty matplotlib Figure."""
    return optional_deps.need("matplotlib.figure", "plot", "--plot").Figure(**look)


def dress(axes: Any, unit: str, sizes: Sequence[int]) -> None:
    """Make both axes logarithmic and label the sizes with units."""
    axes.set(xscale="log", yscale="log", xlabel="size", ylabel=unit)
    axes.set_xticks(
        ticks := sizes[:: -(-len(sizes) // _MOST_TICKS)], [_cli.in_words(nbytes) for nbytes in ticks]
    )
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
