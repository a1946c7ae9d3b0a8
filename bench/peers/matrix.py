"""Every call at every size beside the fastest MPI, in one run, and the cells that shmring loses:
python bench/peers/matrix.py --help

A cell is the quotient of two medians over rounds: the time of the fastest MPI's blocking call, and shmring's.
Owns the choice of cells and the table; everything else is that of peers.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.calls import CALLS, OBJECT_CALLS, PING_PONG, STREAM
from bench.common.progress import Progress
from bench.common.tables import aligned, format_bytes, format_us
from bench.peers import install_peers
from bench.peers.contestants import MPI_PEERS, chosen
from bench.peers.crew import start_all
from bench.peers.interleave import Cell, Match, Noise, Sample
from bench.peers.probe import Probe, compile_probe

DEFAULT_SIZES = [8, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20]
OF_TWO_RANKS = (PING_PONG, STREAM, OBJECT_CALLS[0])
VARIANTS = ("private", "zero-copy")
LEAST = 0.97  # a cell below this is lost; the rest is noise


@dataclass(frozen=True)
class Key:
    """One cell of the matrix."""

    call: str
    input: str
    variant: str
    nbytes: int


@dataclass(frozen=True)
class Found:
    """The quotient of a cell, and what it comes from."""

    ratio: float
    us: float
    mpi: str
    mpi_us: float
    rounds: int


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="%(default)s")
    add("--calls", type=comma_separated(str, list(CALLS)), default=list(CALLS), help="default: all")
    add("--sizes", type=comma_separated(parse_size), default=DEFAULT_SIZES, help="default 8 B to 64 MiB")
    add("--input", choices=["reused", "written", "both"], default="both", help="as in peers.py")
    add("--rounds", type=int, default=7, help="rounds behind every median (%(default)s)")
    add("--least", type=float, default=LEAST, help="cells below this are lost (%(default)s)")
    add("--only", type=comma_separated(str, list(MPI_PEERS)), default=list(MPI_PEERS),
        help="the MPI libraries, where they are installed: " + ",".join(MPI_PEERS))
    add("--dir", type=Path, default=install_peers.default_folder(), help="where they lie (%(default)s)")
    add("--json", type=Path, help="write every sample there")
    return parser.parse_args(arguments)


def cells_of(call: str, options: argparse.Namespace) -> list[Cell]:
    """Return the cells of a call. Objects are pickled anew each time, so their inputs count as reused."""
    inputs = {"reused": [False], "written": [True], "both": [False, True]}[options.input]
    if call in OBJECT_CALLS:
        inputs = [False]
    return [Cell(nbytes, written, call) for nbytes in options.sizes for written in inputs]


def play(options: argparse.Namespace) -> tuple[dict[str, list[Sample]], list[str], dict[str, float]]:
    """Return the samples by call, the problems, and the shares of the CPUs' time."""
    library = compile_probe(options.dir)
    contestants = [each for each in chosen([*options.only, "shmring"], options.dir) if each.name != "copy"]
    cpus, probe = sorted(os.sched_getaffinity(0)), Probe(library)
    samples: dict[str, list[Sample]] = {}
    problems: list[str] = []
    with start_all(contestants, options.ranks, cpus, library, problems.append) as crews:
        noise = Noise(crews)
        for call in options.calls:
            if call in OF_TWO_RANKS and options.ranks != 2:
                continue
            with Progress(call) as progress:
                match = Match(crews, probe, progress.say)
                cells = cells_of(call, options)
                progress.total(options.rounds * sum(len(match.entries(cell)) for cell in cells))
                for number in range(options.rounds):
                    for cell in cells:
                        for sample in match.play_block(number, cell):
                            progress.advance(1, sample.round_trip_ns[1])
                samples[call] = match.samples
                problems += match.problems
        return samples, problems, noise.shares()


def matrix(samples: Mapping[str, Iterable[Sample]]) -> dict[Key, Found]:
    """Return the cells for which there are samples of shmring and of an MPI.

    Ranks that share CPUs may take longer to write large inputs without the calls than with them. The
    difference is then no time of a call, and there is no such cell.
    """
    us: dict[tuple[str, str, int, str, str], list[float]] = defaultdict(list)
    for call, of_call in samples.items():
        for sample in of_call:
            if sample.distance != "mixed":
                us[call, sample.input, sample.nbytes, sample.contestant, sample.variant].append(sample.us)
    found = {}
    for (call, given, nbytes, contestant, variant), own in us.items():
        rivals = {mpi: us[key] for mpi in MPI_PEERS if (key := (call, given, nbytes, mpi, "blocking")) in us}
        if contestant == "shmring" and variant in VARIANTS and rivals:
            mpi = min(rivals, key=lambda name: statistics.median(rivals[name]))
            own_us, mpi_us = statistics.median(own), statistics.median(rivals[mpi])
            rounds = min(len(own), len(rivals[mpi]))
            if min(own_us, mpi_us) <= 0:
                continue
            found[Key(call, given, variant, nbytes)] = Found(mpi_us / own_us, own_us, mpi, mpi_us, rounds)
    return found


def table(found: Mapping[Key, Found], least: float) -> str:
    """Format the quotients, a star at each lost cell."""
    sizes = sorted({key.nbytes for key in found})
    rows = [["call", "input", "arrays", *map(format_bytes, sizes)]]
    for call in CALLS:
        for variant in VARIANTS:
            for given in ("reused", "written"):
                cells = [found.get(Key(call, given, variant, nbytes)) for nbytes in sizes]
                if any(cells):
                    rows.append([call, given, variant, *(_quotient(cell, least) for cell in cells)])
    return aligned(rows)


def _quotient(cell: Found | None, least: float) -> str:
    if cell is None:
        return "-"
    return f"{cell.ratio:.2f}" + ("*" if cell.ratio < least else "")


def lost(found: Mapping[Key, Found], least: float) -> list[str]:
    """Return a line for each lost cell, the worst first."""
    worst_first = sorted(found.items(), key=lambda item: item[1].ratio)
    return [f"{cell.ratio:.2f}  {key.call} {format_bytes(key.nbytes)}, {key.variant}, {key.input}: "
            f"{format_us(cell.us)} us, {cell.mpi} {format_us(cell.mpi_us)} ({cell.rounds} rounds)"
            for key, cell in worst_first if cell.ratio < least]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(None if arguments is None else list(arguments))
    samples, problems, noise = play(options)
    found = matrix(samples)
    print(f"\nthe fastest MPI's time / shmring's, {options.ranks} ranks; *: lost, below {options.least:g}\n")
    print(table(found, options.least))
    lines = lost(found, options.least)
    print(f"\n{len(lines)} of {len(found)} cells are lost" + (":" if lines else "."))
    for line in [*lines, *(f"PROBLEM {problem}" for problem in problems)]:
        print(line)
    print(f"Meanwhile other processes took {noise['others']:.1%} of the CPUs, "
          f"other guests {noise['stolen']:.1%}.")
    if options.json:
        plain = {call: [sample.as_json() for sample in of_call] for call, of_call in samples.items()}
        cells = [{**asdict(key), **asdict(cell)} for key, cell in found.items()]
        whole = {"ranks": options.ranks, "cells": cells, "samples": plain}
        options.json.write_text(json.dumps(whole, indent=1))
    return 1 if any("shmring" in problem for problem in problems) else 0


if __name__ == "__main__":
    sys.exit(main())
