"""shmring over several hosts beside Gloo and bare TCP, in one run: python bench/internode/bench_internode.py
--help

The hosts are network namespaces of this machine, so it needs root. Contains the command line, the scenes, the
contestants of each scene, and the order of events.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))  # for hosts

from hosts import GBIT_S, INTERFACE, Hosts, NoHosts

from bench.common.arguments import comma_separated
from bench.common.progress import Progress
from bench.internode import internode_tables
from bench.internode.internode_libraries import BLOCKING, EXCHANGE, EXCHANGE_BUFFERED, EXCHANGE_RENO, POLLING
from bench.internode.internode_tables import MIB, Scene
from bench.peers import install_peers
from bench.peers.contestants import OVERSUBSCRIBED_SAMPLE_S, Contestant
from bench.peers.contestants import gloo as gloo_here
from bench.peers.contestants import shmring as shmring_here
from bench.peers.crew import Crew, start_all
from bench.peers.interleave import Cell, Match, Noise
from bench.peers.peers import QUIET_BELOW, machine
from bench.peers.probe import Probe, compile_probe

JSON_SCHEMA = 1
EVERYBODY = ["shmring", "gloo", "sockets", "local"]
SCENES = [
    Scene("limited", hosts=2, ranks_a_host=2, rate_bit_s=GBIT_S, nbytes=64 * MIB),
    Scene("three", hosts=3, ranks_a_host=2, rate_bit_s=GBIT_S, nbytes=64 * MIB),
    Scene("unlimited", hosts=2, ranks_a_host=2, rate_bit_s=None, nbytes=64 * MIB),
    Scene("small", hosts=2, ranks_a_host=2, rate_bit_s=None, nbytes=8),
    Scene("pair", hosts=2, ranks_a_host=1, rate_bit_s=None, nbytes=8),
    Scene("idle", hosts=2, ranks_a_host=2, rate_bit_s=None, nbytes=0),
]
QUICK_NBYTES, QUICK_ROUNDS = 4 * MIB, 2
IDLE_S = 3.0
OTHERS_AND_KERNEL_BELOW = 0.10
# The error of an older shmring about the `wire` keyword: not a failure, there is just nothing to measure.
NO_WIRE_KEYWORD = "unexpected keyword argument 'wire'"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add, names = parser.add_argument, [scene.name for scene in SCENES]
    add("--only", type=comma_separated(str, names), default=names, help=",".join(names))
    add("--who", type=comma_separated(str, EVERYBODY), default=EVERYBODY, help=",".join(EVERYBODY))
    add("--rounds", type=int, help="rounds behind every median (5)")
    add("--quick", action="store_true",
        help=f"only to see it run: {QUICK_NBYTES // MIB} MiB for 64, {QUICK_ROUNDS} rounds")
    add("--dir", type=Path, default=install_peers.default_folder(), help="where the peers lie (%(default)s)")
    add("--json", type=Path, help="write everything there, raw samples included")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else 5)
    return options


def scenes_of(options: argparse.Namespace) -> list[Scene]:
    chosen = [scene for scene in SCENES if scene.name in options.only]
    if options.quick:
        return [replace(scene, nbytes=min(scene.nbytes, QUICK_NBYTES)) for scene in chosen]
    return chosen


def variants_of(scene: Scene) -> dict[str, tuple[str, ...]]:
    """Return the variants to measure by contestant. A contestant without variants is still started, and
    idles."""
    if scene.nbytes == 0:
        return {name: () for name in EVERYBODY if name != "local"}
    if scene.is_small:
        return {"shmring": ("private", "plan"), "gloo": ("in place",), "sockets": (BLOCKING, POLLING)}
    narrow = ("wire=bf16", "wire=int8") if scene.rate_bit_s and scene.hosts == 2 else ()
    found = {"shmring": ("private", "zero-copy", *narrow), "gloo": ("in place",),
             "sockets": (EXCHANGE, EXCHANGE_BUFFERED, EXCHANGE_RENO)}
    return found if scene.rate_bit_s else {**found, "local": ("private",)}


def contestants_of(scene: Scene, hosts: Hosts, options: argparse.Namespace) -> list[Contestant]:
    """Return the contestants, with their ranks on the hosts in blocks, so that rank i stays on CPU i mod
    CPUs."""
    by_rank = [host for host in hosts for _ in range(scene.ranks_a_host)]
    here = shmring_here()
    everybody = {
        "shmring": replace(here, library="shmring over hosts"),
        "gloo": gloo_here(options.dir),
        "sockets": Contestant("sockets", "sockets", Path(sys.executable), ()),
        "local": replace(here, name="local", library="shmring on each host"),
    }
    on_hosts = {"PEER_ADDRESSES": ",".join(host.address for host in by_rank)}
    found = []
    for name, variants in variants_of(scene).items():
        missing = name == "gloo" and name not in install_peers.installed(options.dir)
        if name in options.who and not missing:
            contestant = everybody[name]
            environment = {**contestant.environment, **on_hosts}
            if name == "gloo":
                environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            found.append(replace(
                contestant, variants=variants, environment=environment,
                sample_s=max(contestant.sample_s, OVERSUBSCRIBED_SAMPLE_S),
                places=tuple(tuple(host.command()) for host in by_rank)))
    return found


def idle_ms_a_second(crew: Crew) -> float:
    """Return the CPU time of one rank that has joined and does nothing, its threads included."""
    before_s = crew.idle_cpu_s()
    time.sleep(IDLE_S)
    return 1e3 * (crew.idle_cpu_s() - before_s) / IDLE_S / crew.nprocs


def measure(scene: Scene, options: argparse.Namespace, library: Path | None) -> dict[str, Any]:
    """Run all rounds of one scene, on hosts of its own."""
    cpus, probe, problems = sorted(os.sched_getaffinity(0)), Probe(library), []
    run: dict[str, Any] = {"scene": scene, "samples": [], "idle_ms_a_second": {}, "problems": problems}
    with Hosts(scene.hosts, scene.rate_bit_s) as hosts:
        contestants = contestants_of(scene, hosts, options)
        with start_all(contestants, scene.nprocs, cpus, library, problems.append) as crews, \
                Progress(scene.name) as progress:
            for problem in problems:
                progress.say(problem)
            run["versions"] = {name: crew.versions for name, crew in crews.items()}
            if not crews:
                raise SystemExit("nobody could be started:\n" + "\n".join(problems))
            match, cell = Match(crews, probe, progress.say), Cell(scene.nbytes, written=False)
            noise = Noise(match.crews)  # the crews that are still there at the end
            if scene.nbytes == 0:
                run["idle_ms_a_second"] = {name: idle_ms_a_second(crew) for name, crew in crews.items()}
            else:
                progress.total(options.rounds * len(match.entries(cell)))
                for round_number in range(options.rounds):
                    for sample in match.play_block(round_number, cell):
                        progress.advance(1, sample.round_trip_ns[1])
                problems += match.problems
                run["samples"] = match.samples
            run["noise"] = noise.shares()
    return run


def failed(problem: str) -> bool:
    """Return whether the problem is shmring's, by the contestant's name: a traceback may name our folder
    anywhere."""
    what = problem.partition("Traceback")[0]
    return any(f" {name}: " in what for name in ("shmring", "local")) and NO_WIRE_KEYWORD not in problem


def in_short(problem: str) -> str:
    """Return the first and last part of the problem, without the traceback between them."""
    what, traceback, why = problem.strip().partition("Traceback (most recent call last):")
    return what + why.splitlines()[-1] if traceback else what


def print_noise(noise: dict[str, float]) -> None:
    """Print the noise. Some of the kernel's network work is in no process's account, so it counts as the
    others'."""
    quiet = noise["others"] <= OTHERS_AND_KERNEL_BELOW and noise["stolen"] <= QUIET_BELOW
    print(f"Meanwhile other processes and the kernel took {noise['others']:.1%} of the CPUs and other guests "
          f"{noise['stolen']:.1%}{'.' if quiet else ': NOT A QUIET RUN.'}")


def as_json(options: argparse.Namespace, started: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    plain_options = {key: str(value) if isinstance(value, Path) else value
                     for key, value in vars(options).items()}
    return {
        "schema": JSON_SCHEMA, "started": started, "machine": machine(), "options": plain_options,
        "runs": [{**run, "scene": asdict(run["scene"]),
                  "samples": [sample.as_json() for sample in run["samples"]],
                  "figures": [asdict(row) for row in internode_tables.rows(run["scene"], run["samples"])]}
                 for run in runs],
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if "gloo" in options.who and "gloo" not in install_peers.installed(options.dir):
        print(f"Gloo is not installed in {options.dir}, so not in the tables: bench/peers/peers.py --install")
    library = compile_probe(options.dir)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    facts = machine()
    print(f"all_reduce, float32, hosts are network namespaces; {facts['cpu_model']}, "
          f"Linux {facts['kernel']}, {started}")
    runs, reported = [], set()
    for scene in scenes_of(options):
        run = measure(scene, options, library)
        runs.append(run)
        for name, versions in run["versions"].items():
            if name not in reported and not reported.add(name):
                print(f"  {name}: {versions['library']}")
        print("\n" + internode_tables.report(scene, run["samples"], run["idle_ms_a_second"]), flush=True)
        for problem in run["problems"]:
            print("PROBLEM" if failed(problem) else "NOTE", in_short(problem))
        print_noise(run["noise"])
    if options.json:
        options.json.write_text(json.dumps(as_json(options, started, runs), indent=1))
    return 1 if any(failed(problem) for run in runs for problem in run["problems"]) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that everything is cleaned up
    try:
        sys.exit(main())
    except NoHosts as missing:
        sys.exit(f"no hosts to measure between: {missing}")
