"""Every algorithm of all_reduce, in turn: which is fastest, by size and number of ranks.

    python bench/engine/bench_algorithms.py --ranks 2,4,8 --sizes 1K,64K,1M --json FILE --plot algorithms.png
    python bench/internode/on_hosts.py --hosts 4 -n 1 --rate-gbit 1 \
        bench/engine/bench_algorithms.py --sizes 1K,64K,1M

Arrays are private, float32, reduced in place. A figure is the median over rounds of the slowest rank's time
for one call; only ratios within a row are to be quoted. The chart names the fastest of the published
algorithms, and says how long "auto" takes beside it. Alone, it starts its ranks itself; as a program of ranks
it takes those that it is one of. Over several hosts the published ones go by messages (methods.stepwise).
Knows turns and shmring's public API.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import shmring
from shmring._config.optional_deps import need
from shmring.methods.stepwise import Stepwise

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.tables import format_bytes, format_us
from bench.common.turns import SAMPLE_S, in_turn, pin, state_of

SHMRING_S = ("auto", "direct")
COLOURS = {"ring": "#4e79a7", "bidirectional_ring": "#a0cbe8", "halving_doubling": "#59a14f",
           "tree": "#f28e2b", "double_tree": "#ffbe7d", "master": "#b07aa1"}
Row = dict[str, Any]


def measure(comm: shmring.Comm, options: argparse.Namespace) -> list[Row]:
    """Return a row for each size, the same on every rank."""
    pin(comm)
    if comm.num_nodes == 1:
        reducers: dict[str, Any] = dict.fromkeys(options.algorithms, comm.all_reduce)
        return measure_with(comm, reducers, options)
    with Stepwise(comm) as steps:
        own = {"auto": comm.all_reduce} if "auto" in options.algorithms else {}
        theirs = {name: steps.all_reduce for name in options.algorithms if name in COLOURS}
        return measure_with(comm, own | theirs, options)


def measure_with(comm: shmring.Comm, reducers: dict[str, Any], options: argparse.Namespace) -> list[Row]:
    """Measure every size with each of `reducers`: by algorithm, the all_reduce that runs it."""
    rows = []
    for nbytes in options.sizes:
        x = np.zeros(nbytes // 4, "f4")
        ways = {name: partial(all_reduce, x, algorithm=name) for name, all_reduce in reducers.items()}
        times = in_turn(comm, ways, options.rounds, options.sample_s)
        rows.append({"ranks": comm.size, "nbytes": nbytes, "state": state_of(comm),
                     "us": {name: 1e6 * times[name] for name in ways}})
    return rows


def fastest(row: Row) -> str:
    """Return the fastest published algorithm that was measured, or the fastest of all if none was."""
    us = row["us"]
    return min([name for name in us if name in COLOURS] or us, key=us.__getitem__)


def table(rows: list[Row]) -> str:
    """Format as Markdown, in µs per call."""
    names = list(rows[0]["us"])
    lines = ["| ranks | bytes | " + " | ".join(names) + " | fastest published |",
             "|---:|---:|" + "---:|" * len(names) + "---|"]
    for row in rows:
        cells = [str(row["ranks"]), format_bytes(row["nbytes"]), *map(format_us, row["us"].values())]
        lines.append("| " + " | ".join([*cells, fastest(row)]) + " |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw a field for each size and number of ranks, in the colour of its fastest algorithm."""
    need("matplotlib", "plot", "--plot").use("Agg")
    pyplot = need("matplotlib.pyplot", "plot", "--plot")
    sizes, ranks = (sorted({row[what] for row in rows}) for what in ("nbytes", "ranks"))
    figure, axes = pyplot.subplots(figsize=(2 + 1.5 * len(sizes), 1.2 + 0.9 * len(ranks)))
    for row in rows:
        name, us = fastest(row), row["us"]
        x, y = sizes.index(row["nbytes"]), ranks.index(row["ranks"])
        colour = COLOURS.get(name, "#bab0ac")
        axes.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
        beside = f"\nauto {us['auto'] / us[name]:.2f}x" if "auto" in us else ""
        axes.text(x, y, name.replace("_", "\n") + beside, ha="center", va="center", size=8)
    axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(-0.5, len(ranks) - 0.5), ylabel="ranks",
             title="The fastest published algorithm, and the time of \"auto\" beside it")
    axes.set_xticks(range(len(sizes)), [format_bytes(nbytes) for nbytes in sizes])
    axes.set_yticks(range(len(ranks)), [str(n) for n in ranks])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    every = [*SHMRING_S, *COLOURS]
    add("--ranks", type=comma_separated(int), default="2,4,8", help="that it starts: %(default)s")
    add("--sizes", type=comma_separated(parse_size), default="1K,8K,64K,512K,4M", help="bytes: %(default)s")
    add("--algorithms", type=comma_separated(str, every), default=",".join(every), help="%(default)s")
    add("--rounds", type=int, default=11, help="%(default)s")
    add("--sample-s", type=float, default=SAMPLE_S, help="that a round of one algorithm takes: %(default)s")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="the chart, as PNG, SVG or PDF; needs matplotlib")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    with shmring.init() as comm:
        if comm.size > 1:
            rows = measure(comm, options)
            if comm.rank == 0:
                report(rows, options)
            return
    report([row for ranks in options.ranks for row in shmring.spawn(measure, ranks, (options,))[0]], options)


def report(rows: list[Row], options: argparse.Namespace) -> None:
    print(table(rows), *{row["ranks"]: row["state"] for row in rows}.values(), sep="\n", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot is not None:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
