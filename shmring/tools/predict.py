"""`shmring predict`: predict times of all-reduces and the efficiency of training steps by the cost model.

This file has the command line, determines alpha and beta, and prints the prediction.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import shmring

from .. import model
from . import _cli
from ._bench import plot, rank
from ._bench.calls import PING_PONG, Job
from ._bench.compare import SCHEMA as BENCH_SCHEMA
from ._bench.compare import Unusable, read

SCHEMA = 1
NINE_TENTHS = 0.9
_MOST_GRADIENT_NBYTES = 1 << 60
_MEASURED = Job("all_reduce", _cli.sizes("64:16M"), seconds=0.05)
_MEASURED_RANKS = 2
_RANKS = (2, 4, 8)

_NOTES = """\
The model: a message of n bytes takes alpha + n/bandwidth seconds, regardless of other messages. Every rank
has a full-duplex link of its own. shmring.model has the formulas (docs/methods/model.md).

alpha and bandwidth are given, or fitted to the figures of `shmring bench all_reduce --json` (or ping_pong),
or, with --measure, fitted to a run of two ranks on this machine.

parameter_server: one server, and as many workers as there are ranks.
--hosts: the ranks are spread over this many hosts. Each host has one link with --wire-alpha and
--wire-bandwidth; alpha and bandwidth apply within a host. `ring` is one ring over all hosts; `hierarchical`
reduces within each host first.
--gradient-bytes, --step-seconds: a training step computes for this time, then reduces the bytes in a ring.
"""


@dataclass(frozen=True)
class Source:
    """A link and its origin. off: the least and the greatest measured/predicted of the fitted figures."""

    link: model.Link
    what: str
    off: tuple[float, float] | None = None


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "predict",
        help="predict times of all-reduces and a training step's efficiency by the cost model",
        description="Predict how long all-reduces take, by algorithm, size and ranks",
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--alpha", type=_cli.seconds, metavar="S", help="latency of a message in seconds, as in 5e-6")
    add("--bandwidth", type=_bandwidth, metavar="B", help="bytes a second, as in 125e6 for 1 Gbit/s")
    add("--from", type=Path, dest="file", metavar="FILE", help="fit both to output of shmring bench --json")
    add("--measure", action="store_true", help="fit both to all-reduces of two ranks, measured now")
    add("--sizes", type=_cli.sizes, default="1K:64M", help="B:E, or a list, as in 8,4K,1M (%(default)s)")
    add("--ranks", type=_ranks, default=_RANKS, metavar="N,N", help="numbers of ranks (2,4,8)")
    add("--hosts", type=_cli.at_least(2), metavar="H", help="number of hosts, with equally many ranks each")
    add("--wire-alpha", type=_cli.seconds, metavar="S", help="like --alpha, for the links between hosts")
    add("--wire-bandwidth", type=_bandwidth, metavar="B", help="like --bandwidth, for a host's link")
    add("--gradient-bytes", type=_gradient_nbytes, metavar="D", help="bytes a step reduces: 553.36e6, 500M")
    add("--step-seconds", type=_cli.seconds, metavar="S", help="time that a step computes")
    add("--plot", type=Path, metavar="FILE", help="draw time against size: PNG, SVG, PDF")
    _cli.add_json(parser, "all of it, in place of the tables,")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Predict and return the exit status."""
    _check(arguments)
    try:
        report = _report(arguments, _source(arguments))
    except Unusable as error:
        _refuse(str(error))
    except (shmring.Error, MemoryError, OSError) as error:
        return _cli.complain("shmring predict", _cli.in_one_line(error))
    if arguments.plot:
        figure_of(report).savefig(arguments.plot, dpi=110)
    if arguments.json:
        _cli.print_json(report)
    else:
        print("\n\n".join(_paragraphs(report)))
    return 0


# ---- where alpha and beta come from ----------------------------------------------------------------------


def _source(arguments: argparse.Namespace) -> Source:
    if arguments.measure:
        reports = shmring.spawn(_measured, _MEASURED_RANKS, (_MEASURED,))
        return fitted(reports[0], "measured now")
    if arguments.file:
        return fitted(_loaded(arguments.file), str(arguments.file))
    return Source(model.Link(arguments.alpha, arguments.bandwidth), "given")


def _measured(comm: shmring.Comm, job: Job) -> dict[str, Any]:
    """Measure in one rank; return the parts of `shmring bench`'s JSON that `fitted` reads."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[comm.rank % len(cpus)]})
    facts = rank.facts(comm, job)
    rows = list(rank.rows(comm, job, crowded=facts["crowded"]))
    return {**facts, "options": asdict(job), "rows": rows}


def _loaded(path: Path) -> Any:
    found = read(path)
    known = isinstance(found, dict) and found.get("program") == "shmring bench"
    if not known or found.get("schema") != BENCH_SCHEMA:
        raise Unusable(f"{path} is not what this version's `shmring bench --json` writes")
    return found


def fitted(report: dict[str, Any], name: str) -> Source:
    """Return the link that fits a report of `shmring bench` best. Raises Unusable if none fits."""
    try:
        call, ranks, hosts = report["call"], int(report["ranks"]), int(report["hosts"])
        algorithm = report["options"]["algorithm"] or "auto"
        figures = {row["nbytes"]: 1e-6 * row["p50_us"] for row in report["rows"] if row["nbytes"]}
    except (KeyError, TypeError, ValueError):
        raise Unusable(f"{name} is not what this version's `shmring bench --json` writes") from None

    def cost(nbytes: float) -> model.Cost:
        if call == PING_PONG:
            return model.Cost(2, 2 * nbytes, 0, nbytes)
        return model.ALGORITHMS["direct" if algorithm == "auto" else algorithm](nbytes, ranks)

    if call not in ("all_reduce", PING_PONG):
        raise Unusable(f"{name} has figures of {call}: give those of all_reduce or ping_pong")
    if algorithm not in ("auto", *model.ALGORITHMS) or algorithm == "double_tree":
        raise Unusable(f"{name} has figures of algorithm {algorithm}, to which no line can be fitted")
    if ranks < 2 or 1 < hosts < ranks:
        raise Unusable(
            f"{name} has figures of {ranks} ranks on {hosts} hosts: they are not of one kind of link"
        )
    try:
        link = model.fit(list(figures), list(figures.values()), cost)
    except ValueError as error:
        raise Unusable(f"{name}: {error}") from None
    if math.isinf(link.beta):
        raise Unusable(f"{name}: times do not grow with the size, so there is no bandwidth in them")
    off = [took_s / cost(nbytes).seconds(link) for nbytes, took_s in figures.items()]
    used = f"{call}, {ranks} ranks, {len(figures)} sizes"
    return Source(link, f"{name}: {used}", (min(off), max(off)))


# ---- the answer -------------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace, source: Source) -> dict[str, Any]:
    link, wire = source.link, None
    if arguments.hosts:
        wire = model.Link(arguments.wire_alpha, arguments.wire_bandwidth)
    return {
        "program": "shmring predict",
        "schema": SCHEMA,
        "version": shmring.__version__,
        "source": source.what,
        "measured_over_predicted": source.off,
        "link": {"alpha_s": link.alpha_s, "bandwidth": link.beta},
        "hosts": arguments.hosts or 1,
        "wire": wire and {"alpha_s": wire.alpha_s, "bandwidth": wire.beta},
        "rows": [
            {"ranks": ranks, "nbytes": nbytes, "seconds": _times(nbytes, ranks, link, wire, arguments.hosts)}
            for ranks in arguments.ranks
            for nbytes in arguments.sizes
        ],
        "crossovers": None
        if wire
        else [{"ranks": ranks, "nbytes": model.crossover(ranks, link)} for ranks in arguments.ranks],
        "training": _training(arguments, link) if arguments.gradient_bytes else None,
    }


def _times(
    nbytes: float, ranks: int, link: model.Link, wire: model.Link | None, hosts: int
) -> dict[str, float]:
    if wire is None:
        times = {name: model.seconds(name, nbytes, ranks, link) for name in model.ALGORITHMS}
        return times | {"parameter_server": model.parameter_server(nbytes, ranks).seconds(link)}
    inside, between = model.hierarchical(nbytes, hosts, ranks // hosts)
    return {
        "ring": model.seconds("ring", nbytes, ranks, wire),
        "hierarchical": inside.seconds(link) + between.seconds(wire),
    }


def _training(arguments: argparse.Namespace, link: model.Link) -> dict[str, Any]:
    step = model.Training(arguments.gradient_bytes, arguments.step_seconds)
    return {
        "gradient_nbytes": step.gradient_nbytes,
        "compute_s": step.compute_s,
        "rows": [
            {
                "ranks": ranks,
                "transfer_s": step.transfer_s(ranks, link.beta),
                "step_s": step.step_s(ranks, link.beta),
                "efficiency": step.efficiency(ranks, link.beta),
                "bandwidth_for_90_percent": step.beta_for(NINE_TENTHS, ranks),
            }
            for ranks in arguments.ranks
        ],
    }


def _paragraphs(report: dict[str, Any]) -> list[str]:
    """Format the report as paragraphs."""
    shown = [f"{_in_words(report['link'])} ({report['source']})"]
    if report["measured_over_predicted"]:
        least, most = report["measured_over_predicted"]
        shown.append(f"measured / predicted: {least:.2f} to {most:.2f}")
    if report["wire"]:
        shown.append(f"{report['hosts']} hosts, {_in_words(report['wire'])}")
    paragraphs = ["\n".join(shown)]
    for ranks in dict.fromkeys(row["ranks"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["ranks"] == ranks]
        heads = [f"{ranks} ranks", *rows[0]["seconds"]]
        cells = [[_cli.in_words(row["nbytes"]), *map(_us, row["seconds"].values())] for row in rows]
        table = _cli.table([heads, *cells], range(len(heads)))
        paragraphs.append(f"{table}\nus{_crossed(report, ranks)}")
    if report["training"]:
        paragraphs.append(_training_paragraph(report["training"]))
    return paragraphs


def _in_words(link: dict[str, float]) -> str:
    return f"alpha {1e6 * link['alpha_s']:.4g} us, bandwidth {link['bandwidth'] / 1e6:.4g} MB/s"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.4g}" if seconds < 0.01 else f"{1e6 * seconds:.0f}"


def _crossed(report: dict[str, Any], ranks: int) -> str:
    for one in report["crossovers"] or ():
        if one["ranks"] == ranks and one["nbytes"]:
            return f"; a ring is faster than a tree from {one['nbytes']:.0f} bytes on"
    return ""


def _training_paragraph(training: dict[str, Any]) -> str:
    rows = [["ranks", "transfer s", "step s", "efficiency %", "MB/s for 90 %"]]
    for row in training["rows"]:
        figures = (row["transfer_s"], row["step_s"], 100 * row["efficiency"])
        needed = row["bandwidth_for_90_percent"] / 1e6
        rows.append([str(row["ranks"]), *(f"{figure:.4g}" for figure in figures), f"{needed:.0f}"])
    shown = f"{training['compute_s']} s of computing, then a ring over {training['gradient_nbytes']} bytes"
    return f"{shown}:\n{_cli.table(rows, range(5))}"


# ---- the picture ------------------------------------------------------------------------------------------


def figure_of(report: dict[str, Any]) -> Any:
    """Return a matplotlib Figure with a panel for each number of ranks and the crossover of ring and tree."""
    counts = list(dict.fromkeys(row["ranks"] for row in report["rows"]))
    figure = plot.empty(figsize=(5.2 * len(counts), 4.8), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, ranks in zip(panels, counts, strict=True):
        rows = [row for row in report["rows"] if row["ranks"] == ranks]
        sizes = [row["nbytes"] for row in rows]
        for name in rows[0]["seconds"]:
            dashes = "--" if name == "bidirectional_ring" else "-"  # its curve coincides with the ring's
            times = [1e6 * row["seconds"][name] for row in rows]
            panel.plot(sizes, times, dashes, marker=".", label=name.replace("_", " "))
        plot.dress(panel, "µs a call (predicted)", sizes)
        panel.set_title(f"{ranks} ranks", fontsize=9)
        for one in report["crossovers"] or ():
            if one["ranks"] == ranks and sizes[0] <= one["nbytes"] <= sizes[-1]:
                label = f"ring = tree: {one['nbytes']:.0f} B"
                panel.axvline(one["nbytes"], color="black", linestyle=":", label=label)
        panel.legend(fontsize=8)
    figure.suptitle(f"{_in_words(report['link'])} ({report['source']})", fontsize=9)
    return figure


# ---- the command line ------------------------------------------------------------------------------------


def _refuse(text: str) -> NoReturn:
    _cli.refuse("shmring predict", text)


def _check(arguments: argparse.Namespace) -> None:
    given = [arguments.alpha, arguments.bandwidth]
    ways = [any(given), arguments.file is not None, arguments.measure]
    wire = [arguments.wire_alpha, arguments.wire_bandwidth]
    training = [arguments.gradient_bytes, arguments.step_seconds]
    if sum(ways) != 1 or (any(given) and not all(given)):
        _refuse("no source of the link's figures: give --alpha and --bandwidth, --from FILE, or --measure")
    if any(training) and not all(training):
        _refuse("a training step has --gradient-bytes and --step-seconds: give both")
    if any(wire) != bool(arguments.hosts) or (arguments.hosts and not all(wire)):
        _refuse("several hosts have --hosts, --wire-alpha and --wire-bandwidth: give all of them, or none")
    if arguments.hosts and any(training):
        _refuse("--gradient-bytes has no meaning with --hosts: give the bandwidth of the wire as --bandwidth")
    for ranks in arguments.ranks if arguments.hosts else ():
        if ranks % arguments.hosts:
            _refuse(f"{ranks} ranks cannot be spread alike over {arguments.hosts} hosts: give a multiple")
    if arguments.plot:
        try:
            plot.check(arguments.plot)
        except ValueError as error:
            _refuse(f"--plot {error}")


def _bandwidth(text: str) -> float:
    return _cli.positive(text, 1e18, "is not a bandwidth: give bytes a second, as in 125e6")


def _gradient_nbytes(text: str) -> int:
    """Parse a size such as 500M, or a float such as 553.36e6."""
    try:
        number = float(text)
    except ValueError:
        return _cli.nbytes(text)
    if not 1 <= number < _MOST_GRADIENT_NBYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, as in 553.36e6 or 500M")
    return round(number)


def _ranks(text: str) -> Sequence[int]:
    return tuple(dict.fromkeys(_cli.at_least(2)(word) for word in text.split(",")))
