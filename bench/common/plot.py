"""Plot latency, bandwidth and the copy limit against size as a PNG. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path

from bench.common.tables import HEADINGS, format_bytes
from bench.peers.targets import Group, Medians

COLOURS = {"mpich": "tab:purple", "openmpi": "tab:orange", "intel": "tab:blue", "gloo": "tab:gray",
           "shmring": "tab:red", "copy": "black"}
LEAST_GB_PER_S = 0.01  # lower bandwidths are off the plot; the latency panel shows them
STYLES = {"persistent": ":", "plan": ":", "zero-copy": "--"}
LABELS = {"persistent": "{peer}, persistent", "plan": "shmring, plan", "zero-copy": "shmring, zero-copy"}


class NoMatplotlib(Exception):
    """matplotlib is not installed; the message says how to install it."""


def copy_limit_us(medians: Medians) -> dict[int, float]:
    """Return by size the faster of the two ways to copy."""
    limit: dict[int, float] = {}
    for (nbytes, contestant, _), median in medians.items():
        if contestant == "copy":
            limit[nbytes] = min(median.us, limit.get(nbytes, median.us))
    return limit


def curves(medians: Medians) -> dict[tuple[str, str], dict[int, float]]:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for (nbytes, contestant, variant), median in medians.items():
        if contestant != "copy":
            found.setdefault((contestant, variant), {})[nbytes] = median.us
    order = list(HEADINGS)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else 99))


def draw(by_group: dict[Group, Medians], path: Path, subtitle: str) -> None:
    """Draw a row of two panels for each group."""
    try:
        import matplotlib
    except ImportError:
        raise NoMatplotlib("the plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(by_group), 2, figsize=(13, 4.8 * len(by_group)), squeeze=False)
    for (latency, bandwidth), (group, medians) in zip(panels, by_group.items(), strict=True):
        where = f"{group.ranks} ranks, {group.distance}, input {group.input}"
        lines = [(_label(*who), COLOURS.get(who[0], "tab:green"), STYLES.get(who[1], "-"), points)
                 for who, points in curves(medians).items()]
        lines.append(("copy limit", "black", "-.", copy_limit_us(medians)))
        for label, colour, style, points in lines:
            sizes = sorted(points)
            look = {"label": label, "color": colour, "linestyle": style, "marker": "."}
            latency.plot(sizes, [points[nbytes] for nbytes in sizes], **look)
            bandwidth.plot(sizes, [1e-3 * nbytes / points[nbytes] for nbytes in sizes], **look)
        sizes = sorted({key[0] for key in medians})
        for axes, unit in ((latency, "µs a call"), (bandwidth, "GB/s (bytes of the input / time)")):
            axes.set(xscale="log", yscale="log", ylabel=unit, title=where)
            axes.set_xticks(sizes, [format_bytes(nbytes) for nbytes in sizes])
            axes.minorticks_off()
            axes.grid(True, alpha=0.3)
        bandwidth.set_ylim(bottom=LEAST_GB_PER_S)
        bandwidth.legend(fontsize=7)
    figure.suptitle("all_reduce, float32 sum; " + subtitle, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.1 / len(by_group)))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(contestant: str, variant: str) -> str:
    peer = HEADINGS.get((contestant, {"persistent": "blocking"}.get(variant, variant)), contestant)
    return LABELS.get(variant, "{peer}").format(peer=peer)
