"""The cost model against this machine: fit alpha and beta to half of the sizes, predict the other half.

    shmrun --no-prefix -n 2 bench/engine/bench_model.py
    python bench/internode/on_hosts.py --hosts 2 -n 1 --rate-gbit 1 \
        bench/engine/bench_model.py --algorithms auto --sizes 8:4M --count 138360000 --bandwidth 125e6

--count: one more all-reduce, of so many float32 (138.36 M are the gradient of VGG-16), beside the prediction
of the fitted link and of a link with the bandwidth --bandwidth and no latency. A program of ranks; over hosts
the link is the one between hosts. Uses shmring's public API, its model, and turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shmring
from shmring import model

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import SAMPLE_S, in_turn, pin, seconds, state_of

LARGE_CALLS = 3


def parse_arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--algorithms", type=comma_separated(str), default="auto,ring,tree")
    parser.add_argument("--sizes", type=doubling, default="8:16M", help="bytes from B to E (%(default)s)")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--sample-s", type=float, default=SAMPLE_S, help="of calls (%(default)s)")
    parser.add_argument("--count", type=int, help="float32 of one large all-reduce")
    parser.add_argument("--bandwidth", type=float, help="bytes a second that the link is said to pass")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def doubling(text: str) -> list[int]:
    """Return 8, 16, 32 and so on."""
    begin, end = (parse_size(word) for word in text.split(":"))
    return [begin << turn for turn in range((end // begin).bit_length())]


def cost_of(comm: shmring.Comm, algorithm: str) -> Callable[[float], model.Cost]:
    if comm.num_nodes > 1:
        return lambda nbytes: model.hierarchical(nbytes, comm.num_nodes, comm.size // comm.num_nodes)[1]
    return lambda nbytes: model.ALGORITHMS["direct" if algorithm == "auto" else algorithm](nbytes, comm.size)


def way_of(comm: shmring.Comm, algorithm: str, nbytes: int) -> Callable[[], object]:
    x = np.full(nbytes // 4, 0, "f4")   # written, so that its pages are its own; no sum overflows
    return lambda: comm.all_reduce(x, algorithm=algorithm)


def measure(comm: shmring.Comm, options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Return the seconds of one call by algorithm and size."""
    measured: dict[str, dict[int, float]] = {name: {} for name in options.algorithms}
    for nbytes in options.sizes:
        ways = {name: way_of(comm, name, nbytes) for name in options.algorithms}
        for name, took_s in in_turn(comm, ways, options.rounds, options.sample_s).items():
            measured[name][nbytes] = took_s
    return measured


def compare(comm: shmring.Comm, algorithm: str, took_s: dict[int, float]) -> dict[str, Any]:
    """Fit the link to every second size, beginning with the first; predict the others."""
    cost = cost_of(comm, algorithm)
    known = list(took_s)[::2]
    link = model.fit(known, [took_s[nbytes] for nbytes in known], cost)
    rows = [{"nbytes": nbytes, "fitted": nbytes in known, "measured_s": measured_s,
             "predicted_s": cost(nbytes).seconds(link)} for nbytes, measured_s in took_s.items()]
    return {"algorithm": algorithm, "alpha_s": link.alpha_s, "beta": link.beta, "rows": rows}


def large(comm: shmring.Comm, link: model.Link, options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of one all-reduce of --count float32, and the predictions of both links."""
    cost, way = cost_of(comm, "auto")(4 * options.count), way_of(comm, "auto", 4 * options.count)
    way()
    measured_s = statistics.median(seconds(comm, way, 1) for _ in range(LARGE_CALLS))
    nominal_s = cost.seconds(model.Link(0, options.bandwidth)) if options.bandwidth else None
    return {"nbytes": 4 * options.count, "measured_s": measured_s, "predicted_s": cost.seconds(link),
            "nominal_s": nominal_s}


def show(report: dict[str, Any]) -> None:
    fits = report["algorithms"]
    print(f"{report['state']}; us, and predicted / measured; * was fitted\n")
    print("| bytes | " + " | ".join(f"{fit['algorithm']} | predicted | ratio" for fit in fits) + " |")
    print("|--:" * (1 + 3 * len(fits)) + "|")
    for rows in zip(*(fit["rows"] for fit in fits), strict=True):
        cells = [cell for row in rows for cell in cells_of(row)]
        print(f"| {rows[0]['nbytes']}{' *' * rows[0]['fitted']} | {' | '.join(cells)} |")
    print()
    for fit in fits:
        off = [row["predicted_s"] / row["measured_s"] for row in fit["rows"] if not row["fitted"]]
        typical = math.exp(statistics.fmean(abs(math.log(ratio)) for ratio in off))
        print(f"{fit['algorithm']}: alpha {1e6 * fit['alpha_s']:.2f} us, beta {fit['beta'] / 1e6:.0f} MB/s; "
              f"sizes not fitted: {min(off):.2f} to {max(off):.2f}, typically off by {typical:.2f}x")
    if call := report["large"]:
        print(f"\n{call['nbytes']} bytes: measured {call['measured_s']:.3f} s, predicted "
              f"{call['predicted_s']:.3f} s ({call['predicted_s'] / call['measured_s']:.3f})")
        if call["nominal_s"]:
            print(f"by the bandwidth alone: {call['nominal_s']:.3f} s "
                  f"({call['nominal_s'] / call['measured_s']:.3f})")


def cells_of(row: dict[str, Any]) -> list[str]:
    measured_s, predicted_s = row["measured_s"], row["predicted_s"]
    return [f"{1e6 * measured_s:.2f}", f"{1e6 * predicted_s:.2f}", f"{predicted_s / measured_s:.2f}"]


def main() -> None:
    options = parse_arguments()
    with shmring.init() as comm:
        if comm.size == 1:
            raise SystemExit("bench_model.py measures between ranks: shmrun -n 2 bench/engine/bench_model.py")
        pin(comm)
        fits = [compare(comm, name, took_s) for name, took_s in measure(comm, options).items()]
        link = model.Link(fits[0]["alpha_s"], fits[0]["beta"])
        found = large(comm, link, options) if options.count else None
        report = {"state": state_of(comm), "algorithms": fits, "large": found}
        if comm.rank == 0:
            show(report)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
