"""all_reduce under pyperf: python bench/engine/bench_all_reduce.py -o FILE, then
python -m pyperf compare_to A B

Each worker process of pyperf starts the ranks once, hands the number of loops to all of them at one time and
takes the slowest rank's time; results are checked outside the timing. Owns the options and the metadata.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyperf

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.peers import install_peers
from bench.peers.contestants import shmring
from bench.peers.crew import Crew
from bench.peers.probe import Probe, compile_probe

LISTS = {"ranks": "2", "sizes": "8,4K,64K,1M", "dtypes": "float32", "variants": "private,plan,zero-copy"}
PASSED_ON = ("XDG_CACHE_HOME", "CC")


@dataclass(frozen=True)
class Case:
    """One benchmark: everything that its name states."""

    ranks: int
    nbytes: int
    dtype: str
    variant: str
    algorithm: str | None
    written: bool

    @property
    def name(self) -> str:
        words = ["all_reduce", self.variant, self.dtype, f"{self.nbytes} B", f"{self.ranks} ranks"]
        words += [self.algorithm] if self.algorithm else []
        return " ".join(words + (["written"] if self.written else []))


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=comma_separated(int), default=LISTS["ranks"], help="%(default)s")
    add("--sizes", type=comma_separated(parse_size), default=LISTS["sizes"], help="bytes: %(default)s")
    add("--dtypes", type=comma_separated(str), default=LISTS["dtypes"], help="%(default)s")
    add("--variants", type=comma_separated(str, ["private", "plan", "zero-copy"]), default=LISTS["variants"],
        help="%(default)s")
    add("--algorithm", help="as all_reduce takes it (default: its own choice)")
    add("--written", action="store_true", help="write the input before every call; the writing is timed too")


def pass_options_on(command: list[str], options: argparse.Namespace) -> None:
    """Pass the options on to the workers: pyperf runs this program again, and knows only its own options."""
    for name in LISTS:
        command += [f"--{name}", ",".join(map(str, getattr(options, name)))]
    command += ["--algorithm", options.algorithm] if options.algorithm else []
    command += ["--written"] if options.written else []


def cases(options: argparse.Namespace) -> Iterator[Case]:
    lists = (options.ranks, options.sizes, options.dtypes, options.variants)
    for ranks, nbytes, dtype, variant in product(*lists):
        yield Case(ranks, nbytes, dtype, variant, options.algorithm, options.written)


class Bench:
    """One case in a worker process: its ranks, which start once, and the facts about them."""

    def __init__(self, case: Case, crew: Crew, round_trip_ns: float) -> None:
        self.case, self.crew, self.round_trip_ns = case, crew, round_trip_ns
        keywords = {"algorithm": case.algorithm} if case.algorithm else {}
        crew.prepare(case.variant, case.nbytes, written=case.written, dtype=case.dtype, keywords=keywords)
        self.time_loops(1)

    def time_loops(self, loops: int) -> float:
        slowest_s = self.crew.timed("run", loops).slowest_s
        self.crew.check()
        return slowest_s

    def metadata(self) -> dict[str, Any]:
        """Return the metadata that pyperf stores with the values."""
        facts = self.crew.facts()
        return {"n": self.case.ranks, "bytes": self.case.nbytes, "dtype": self.case.dtype,
                "variant": self.case.variant, "algorithm": self.case.algorithm or "auto",
                "path": str(facts.get("path", "unknown")), "isa": str(facts.get("isa", "unknown")),
                "core_round_trip_ns": round(self.round_trip_ns, 1)}


def run_in_worker(runner: Any, case: Case) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    library = compile_probe(install_peers.default_folder())
    round_trip_ns = Probe(library).round_trip_ns(cpus[:case.ranks])
    with Crew(shmring(), case.ranks, cpus, library) as crew:
        bench = Bench(case, crew, round_trip_ns)
        runner.bench_time_func(case.name, bench.time_loops, metadata=bench.metadata())


def main() -> None:
    runner = pyperf.Runner(add_cmdline_args=pass_options_on)
    add_options(runner.argparser)
    options = runner.parse_args()
    shmring_variables = [name for name in os.environ if name.startswith("SHMRING_")]
    options.inherit_environ = [*(options.inherit_environ or []), *PASSED_ON, *shmring_variables]
    for index, case in enumerate(cases(options)):
        if options.worker and options.worker_task == index:
            run_in_worker(runner, case)
        else:
            runner.bench_time_func(case.name, float)  # never called here: the manager has workers for it


if __name__ == "__main__":
    main()
