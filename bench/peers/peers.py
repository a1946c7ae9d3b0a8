"""shmring beside MPICH, Open MPI, Intel MPI, Gloo and a plain copy, in one run:
python bench/peers/peers.py --help

Owns the command line and the order of events: install, start everybody, rounds, tables, JSON, plot.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common import plot, tables
from bench.common.arguments import comma_separated, parse_size
from bench.common.calls import CALLS
from bench.common.progress import Progress
from bench.peers import install_peers, targets
from bench.peers.contestants import Contestant, chosen
from bench.peers.crew import start_all
from bench.peers.interleave import Cell, Match, Noise
from bench.peers.probe import Probe, compile_probe, label

JSON_SCHEMA = 1
EVERYBODY = ["mpich", "openmpi", "intel", "gloo", "shmring"]
# If others take more than this share of the CPUs' time, do not quote the figures.
QUIET_BELOW = 0.03
PAUSE_WHILE_WAITING_S = 1.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--install", action="store_true", help="make the peers' virtual environments first, with pip")
    add("--dir", type=Path, default=install_peers.default_folder(), help="where they lie (%(default)s)")
    add("--torch", default=install_peers.DEFAULT_TORCH, help="version of torch to install (%(default)s)")
    add("--ranks", type=comma_separated(int), default=[2, 4], help="default 2,4")
    add("--sizes", type=comma_separated(parse_size), default=[8, 4096, 65536, 1 << 20, 64 << 20],
        help="bytes; default 8,4K,64K,1M,64M")
    add("--call", choices=CALLS, default="all_reduce",
        help="the collective (%(default)s), bytes those of the larger of its arrays; or "
             "messages: ping_pong, both ways; stream, 16 at once; objects, both ways or to all")
    add("--rounds", type=int, default=7, help="rounds behind every median (%(default)s)")
    add("--only", type=comma_separated(str, EVERYBODY), default=EVERYBODY, help=",".join(EVERYBODY))
    add("--input", choices=["reused", "written", "both"], default="both",
        help="inputs left as they are, or written before every call (the writing is taken off)")
    add("--wait-for", type=comma_separated(str, ["near", "far"]), default=[],
        help="near,far: go on until every one of them has its rounds")
    add("--max-minutes", type=float, default=60, help="for each number of ranks, at most (%(default)s)")
    add("--json", type=Path, help="write everything there, raw samples included")
    add("--plot", type=Path, help="write a PNG there")
    return parser.parse_args(arguments)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    inputs = {"reused": [False], "written": [True], "both": [False, True]}[options.input]
    return [Cell(nbytes, written, options.call) for nbytes in options.sizes for written in inputs]


def rounds_taken(match: Match, cell: Cell, distance: str) -> int:
    """Return the fewest rounds of any entry at this distance."""
    counts = dict.fromkeys(match.entries(cell), 0)
    for sample in match.samples:
        for entry in counts:
            counts[entry] += ((sample.contestant, sample.variant) == (entry.contestant, entry.variant)
                              and (sample.nbytes, sample.input) == (cell.nbytes, cell.input)
                              and sample.distance == distance)
    return min(counts.values(), default=0)


def play_rounds(match: Match, cells: list[Cell], rounds: int, progress: Progress) -> None:
    for round_number in range(rounds):
        for cell in cells:
            for sample in match.play_block(round_number, cell):
                progress.advance(1, sample.round_trip_ns[1])


def play_until(match: Match, cells: list[Cell], options: argparse.Namespace, progress: Progress) -> None:
    """Play rounds until each required distance has enough of them or the time is up. Leave out what is not
    needed any more, so a machine that stays near for an hour only watches its CPUs."""
    deadline = time.monotonic() + 60 * options.max_minutes
    round_number = 0
    missing = {(cell, distance) for cell in cells for distance in options.wait_for}
    while missing and time.monotonic() < deadline:
        idle = True
        for cell in cells:
            now_ns = match.probe.round_trip_ns(match.cpus)
            if (cell, label(now_ns)) in missing:
                idle = False
                for sample in match.play_block(round_number, cell):
                    progress.advance(sample.distance in options.wait_for, sample.round_trip_ns[1])
                missing -= {(cell, distance) for distance in options.wait_for
                            if rounds_taken(match, cell, distance) >= options.rounds}
        round_number += not idle
        if idle:
            progress.advance(0, now_ns)
            time.sleep(PAUSE_WHILE_WAITING_S)


def measure(nprocs: int, contestants: list[Contestant], options: argparse.Namespace,
            library: Path | None) -> dict[str, Any]:
    """Run all rounds of one number of ranks."""
    cpus, cells, probe = sorted(os.sched_getaffinity(0)), cells_of(options), Probe(library)
    problems: list[str] = []
    with start_all(contestants, nprocs, cpus, library, problems.append) as crews:
        if not crews:
            raise SystemExit("nobody could be started:\n" + "\n".join(problems))
        waiting = bool(options.wait_for) and probe.round_trip_ns(cpus[:nprocs]) >= 0
        labels = len(options.wait_for) if waiting else 1
        with Progress(f"{nprocs} ranks") as progress:
            match, noise = Match(crews, probe, progress.say), Noise(crews)
            progress.total(labels * options.rounds * sum(len(match.entries(cell)) for cell in cells))
            for problem in problems:
                progress.say(problem)
            if waiting:
                play_until(match, cells, options, progress)
            else:
                play_rounds(match, cells, options.rounds, progress)
        return {
            "ranks": nprocs, "cpus": cpus[:nprocs], "samples": match.samples,
            "problems": problems + match.problems, "noise": noise.shares(),
            "versions": {name: crew.versions for name, crew in crews.items()},
            "idle_cpu_s": {name: crew.idle_cpu_s() for name, crew in match.crews.items()},
        }


def machine() -> dict[str, Any]:
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu_model": model, "cpus": sorted(os.sched_getaffinity(0)), "kernel": platform.release(),
            "machine": platform.machine(), "libc": " ".join(platform.libc_ver()),
            "python": platform.python_version()}


def as_json(options: argparse.Namespace, started: str, contestants: list[Contestant],
            runs: list[dict[str, Any]], by_group: dict[targets.Group, targets.Medians]) -> dict[str, Any]:
    plain_options = {key: str(value) if isinstance(value, Path) else value
                     for key, value in vars(options).items()}
    return {
        "schema": JSON_SCHEMA, "started": started, "machine": machine(), "options": plain_options,
        "notes": {contestant.name: contestant.note for contestant in contestants if contestant.note},
        "runs": [{**run, "samples": [sample.as_json() for sample in run["samples"]]} for run in runs],
        "medians": [{**asdict(group), "nbytes": nbytes, "contestant": contestant, "variant": variant,
                     **asdict(median)}
                    for group, medians in by_group.items()
                    for (nbytes, contestant, variant), median in medians.items()],
        "ratios": [{**asdict(group), **asdict(ratio)} for group, medians in by_group.items()
                   for ratio in targets.ratios(group, medians)],
    }


def print_noise(noise: dict[str, float]) -> None:
    quiet = noise["others"] + noise["stolen"] <= QUIET_BELOW
    print(f"Meanwhile other processes took {noise['others']:.1%} of the CPUs and other guests "
          f"{noise['stolen']:.1%}{'.' if quiet else ': NOT A QUIET RUN.'}")


def print_run(run: dict[str, Any], by_group: dict[targets.Group, targets.Medians]) -> None:
    mine = {group: medians for group, medians in by_group.items() if group.ranks == run["ranks"]}
    print("\n" + tables.report(mine, run["samples"], run["cpus"]))
    print_noise(run["noise"])
    for problem in run["problems"]:
        print("PROBLEM", problem)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.install:
        wanted = [peer for peer in install_peers.PACKAGES if peer in options.only]
        install_peers.install(options.dir, wanted, torch=options.torch)
    contestants = chosen(options.only, options.dir)
    absent = set(options.only) - {contestant.name for contestant in contestants}
    if absent:
        print(f"not installed in {options.dir}, so not in the table: {', '.join(sorted(absent))} (--install)")
    library = compile_probe(options.dir)
    if library is None:
        print("no C compiler (cc): the round trip is unknown and there is no copy limit")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    runs = [measure(nprocs, contestants, options, library) for nprocs in options.ranks]
    targets.choose(options.call)
    by_group = targets.medians_by_group(sample for run in runs for sample in run["samples"])
    facts = machine()
    print(f"\n{options.call}, float32; {facts['cpu_model']}, Linux {facts['kernel']}, {started}")
    for name, versions in runs[0]["versions"].items():
        note = next(contestant.note for contestant in contestants if contestant.name == name)
        print(f"  {name}: {versions['library']}" + (f" ({note})" if note else ""))
    for run in runs:
        print_run(run, by_group)
    if options.json:
        options.json.write_text(json.dumps(as_json(options, started, contestants, runs, by_group), indent=1))
    if options.plot:
        plot.draw(by_group, options.plot, f"{facts['cpu_model']}, Linux {facts['kernel']}, {started}")
    return 1 if any("shmring" in problem for run in runs for problem in run["problems"]) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that everything is cleaned up
    try:
        sys.exit(main())
    except plot.NoMatplotlib as missing:
        sys.exit(str(missing))
