"""torch.distributed on shmring and on gloo, in turn: python bench/torch/bench_torch.py --ranks 2,4 --ddp

Contains the measurements under torch, and their targets. Each backend has ranks of its own, since the threads
that gloo leaves in a process disturb later measurements there. Uses crew, interleave, torch_runs, targets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated
from bench.common.progress import Progress
from bench.common.tables import aligned, format_bytes, format_ratio, format_us
from bench.peers import install_peers, targets
from bench.peers.contestants import Contestant
from bench.peers.crew import start_all
from bench.peers.interleave import Cell, Match, Noise, Sample
from bench.peers.peers import machine, print_noise
from bench.peers.probe import Probe, compile_probe
from bench.torch import torch_runs
from bench.torch.torch_libraries import ASYNC, BARRIER, COMM, SYNC

CHECKOUT = Path(__file__).resolve().parents[2]
BACKENDS = ("gloo", "shmring")
VARIANTS = {"gloo": (SYNC, ASYNC), "shmring": (SYNC, ASYNC, COMM)}  # COMM: Comm's own calls, on tensors
KIB, MIB = 1 << 10, 1 << 20
ONE_FLOAT = 4
SAMPLE_S = 0.030  # gloo's first calls after a pause may wait for a clock tick
QUICK_NBYTES = 64 * KIB

CELLS = [*(Cell(nbytes, written=False) for nbytes in (ONE_FLOAT, KIB, 64 * KIB, MIB, 64 * MIB)),
         Cell(ONE_FLOAT, written=False, call=BARRIER), Cell(MIB, written=False, call="broadcast")]
# By ranks, call, bytes and variant: at least so many times faster than gloo.
TARGETS = {
    (2, "all_reduce", ONE_FLOAT, SYNC): 40.0,
    (2, "all_reduce", ONE_FLOAT, ASYNC): 10.0,
    (2, "all_reduce", MIB, SYNC): 8.0,
    (2, "all_reduce", 64 * MIB, SYNC): 5.0,
    (4, "all_reduce", ONE_FLOAT, SYNC): 50.0,
}


@dataclass
class Row:
    """The results of one call, in µs by round."""

    call: str
    nbytes: int
    variant: str
    us: dict[str, list[float]] = field(default_factory=dict)

    def median_us(self, backend: str) -> float | None:
        return statistics.median(self.us[backend]) if backend in self.us else None

    def ratio(self, nprocs: int) -> targets.Ratio | None:
        gloo, shmring = map(self.median_us, BACKENDS)
        if gloo is None or shmring is None:
            return None
        target = TARGETS.get((nprocs, self.call, self.nbytes, self.variant))
        rounds = min(len(self.us[backend]) for backend in BACKENDS)
        return targets.judged(self.nbytes, self.variant, "gloo", "gloo", gloo / shmring, rounds, target)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=comma_separated(int), default=[2], help="default 2; the targets speak of 2,4")
    add("--rounds", type=int, default=7, help="rounds behind every median (%(default)s)")
    add("--only", type=comma_separated(str, list(BACKENDS)), default=list(BACKENDS), help="gloo,shmring")
    add("--ddp", action="store_true", help="also train examples/torch_ddp.py on both in turn")
    add("--widths", type=comma_separated(int), default=[16, 64, 128], help="of its network; 16,64,128")
    add("--buckets-mb", type=comma_separated(float), default=[1.0, 25.0], help="of its gradients; 1,25")
    add("--imports", type=int, default=9, help="of torch, to time what shmring adds to it (%(default)s)")
    add("--quick", action="store_true", help="one round, nothing large: does it run?")
    add("--dir", type=Path, default=install_peers.default_folder(), help="where peers.py installs torch, "
        "used where this interpreter has none (%(default)s)")
    add("--json", type=Path, help="write everything there, raw samples included")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.imports, options.widths, options.buckets_mb = 1, 1, [4], [25.0]
    return options


def python_with_torch(folder: Path) -> Path:
    if importlib.util.find_spec("torch") is not None:
        return Path(sys.executable)
    if "gloo" in install_peers.installed(folder):
        return install_peers.environment_python(folder, "gloo")
    raise SystemExit("torch is not installed: pip install torch, or peers.py --install --only gloo")


def environment() -> dict[str, str]:
    """Return an environment in which the checkout built in place comes before an installed shmring."""
    given = os.environ.get("PYTHONPATH")
    return {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{given}" if given else str(CHECKOUT)}


def contestants(options: argparse.Namespace, python: Path) -> list[Contestant]:
    return [Contestant(name, f"torch {name}", python, VARIANTS[name], environment=environment(),
                       sample_s=SAMPLE_S) for name in options.only]


def measure(nprocs: int, options: argparse.Namespace, python: Path, library: Path | None) -> dict[str, Any]:
    """Run all rounds of one number of ranks."""
    cpus, problems, taken = sorted(os.sched_getaffinity(0)), [], []
    cells = [cell for cell in CELLS if not options.quick or cell.nbytes <= QUICK_NBYTES]
    with start_all(contestants(options, python), nprocs, cpus, library, problems.append) as crews:
        if not crews:
            raise SystemExit("nobody could be started:\n" + "\n".join(problems))
        with Progress(f"{nprocs} ranks") as progress:
            match, noise = Match(crews, Probe(library), progress.say), Noise(crews)
            progress.total(options.rounds * sum(len(match.entries(cell)) for cell in cells))
            for round_number in range(options.rounds):
                for cell in cells:
                    for sample in match.play_block(round_number, cell):
                        taken.append((cell.call, sample))
                        progress.advance(1, sample.round_trip_ns[1])
        return {"ranks": nprocs, "taken": taken, "problems": problems + match.problems,
                "noise": noise.shares(), "versions": {name: crew.versions for name, crew in crews.items()}}


def rows_of(taken: list[tuple[str, Sample]]) -> list[Row]:
    """Put the samples of one variant together."""
    rows: dict[tuple[str, int, str], Row] = {}
    for call, sample in taken:
        key = (call, sample.nbytes, sample.variant)
        rows.setdefault(key, Row(*key)).us.setdefault(sample.contestant, []).append(sample.us)
    order = VARIANTS["shmring"]
    return sorted(rows.values(), key=lambda row: (order.index(row.variant), row.call != "all_reduce"))


def table(rows: list[Row], nprocs: int) -> str:
    lines = [["call", "bytes", "", *BACKENDS, "gloo / shmring", "rounds"]]
    for row in rows:
        figures = [row.median_us(backend) for backend in BACKENDS]
        ratio = row.ratio(nprocs)
        lines.append([row.call, "-" if row.call == BARRIER else format_bytes(row.nbytes), row.variant,
                      *("-" if us is None else format_us(us) for us in figures), format_ratio(ratio),
                      str(min(map(len, row.us.values())))])
    return aligned(lines)


def heading(run: dict[str, Any]) -> str:
    """Return the heading, with the round trip between the cores as shmring's own ranks measured it."""
    facts = [sample.facts for _, sample in run["taken"] if sample.contestant == "shmring"]
    trips = [fact["round_trip_ns"] for fact in facts]
    where = f", {facts[-1]['distance']}, round trip {statistics.median(trips):.0f} ns" if facts else ""
    return f"{run['ranks']} ranks of torch.distributed{where}, one thread each, float32, µs"


def print_run(run: dict[str, Any]) -> None:
    print(f"\n{heading(run)}\n{table(rows_of(run['taken']), run['ranks'])}")
    for problem in run["problems"]:
        print("PROBLEM", problem)
    print_noise(run["noise"])


def as_json(options: argparse.Namespace, runs: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
    def of_run(run: dict[str, Any]) -> dict[str, Any]:
        rows = rows_of(run["taken"])
        ratios = {f"{row.call} {row.nbytes} {row.variant}": row.ratio(run["ranks"]) for row in rows}
        return {**run, "taken": [{"call": call, **sample.as_json()} for call, sample in run["taken"]],
                "rows": [asdict(row) for row in rows],
                "ratios": {name: asdict(ratio) for name, ratio in ratios.items() if ratio is not None}}

    return {"machine": machine(), "options": {name: str(value) for name, value in vars(options).items()},
            "runs": [of_run(run) for run in runs], **more}


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    python, library = python_with_torch(options.dir), compile_probe(options.dir)
    runs, more = [], {}
    for nprocs in options.ranks:
        runs.append(measure(nprocs, options, python, library))
        print_run(runs[-1])
    if options.imports:
        more["import_ms"] = torch_runs.import_ms(python, environment(), options.imports)
        print("\n" + torch_runs.import_lines(more["import_ms"]))
    if options.ddp:
        trainings = torch_runs.train_in_turn(python, environment(), options)
        print("\n" + torch_runs.training_table(trainings))
        more["ddp"] = [asdict(training) for training in trainings]
    if options.json:
        options.json.write_text(json.dumps(as_json(options, runs, more), indent=1))
    return 1 if any(run["problems"] for run in runs) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that everything is cleaned up
    sys.exit(main())
