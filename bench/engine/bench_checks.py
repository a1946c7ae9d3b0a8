"""The cost of the engine's checks: the engine beside one without any checks, in turn:
python bench/engine/bench_checks.py

Two groups of ranks make the same small calls in turn, a few thousand at a time. One runs the ordinary build,
the other a build without the checks of the abort word, liveness, deadlines and signals (src/fault.h). Quote
only the difference from one run: the median over rounds, and over the fastest rounds. Uses
tests/repo/faults/builds.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
NAMES = ("as it is", "without checks")
ALLOWED_SHARE, ALLOWED_NS = 0.05, 10.0
FASTEST_SHARE = 0.25  # of the rounds: those with the least disturbance


def serve(rank: int, text: str) -> None:
    """Run one rank: for each line read, time that many calls."""
    import numpy as np

    import shmring

    cpus = sorted(os.sched_getaffinity(0))
    world = pickle.loads(bytes.fromhex(text))
    with shmring.init(world, rank=rank, timeout=60) as comm:
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
        call = comm.plan("all_reduce", np.zeros(1))
        for line in sys.stdin:
            comm.barrier()
            begin = time.perf_counter_ns()
            for _ in range(int(line)):
                call()
            print((time.perf_counter_ns() - begin) / int(line), flush=True)


class Crew:
    """The ranks of one build."""

    def __init__(self, folder: Path, nranks: int) -> None:
        environ = {**os.environ, "PYTHONPATH": str(folder)}
        make = f"import shmring, pickle; print(pickle.dumps(shmring.world({nranks})).hex())"
        world = subprocess.check_output([sys.executable, "-c", make], env=environ, text=True).strip()
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", str(rank), world],
                env=environ,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(nranks)
        ]

    def call(self, calls: int) -> float:
        """Return the nanoseconds per call of the slowest rank."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{calls}\n")
            rank.stdin.flush()
        return max(float(rank.stdout.readline()) for rank in self.ranks if rank.stdout is not None)

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait()


@dataclasses.dataclass(frozen=True)
class Compared:
    """Nanoseconds per call by round, for each of NAMES."""

    checked: Sequence[float]
    unchecked: Sequence[float]

    def lines(self) -> list[str]:
        pairs = list(zip(self.checked, self.unchecked, strict=True))
        fastest = sorted(pairs, key=sum)[: max(1, int(FASTEST_SHARE * len(pairs)))]
        return [
            "| rounds | " + " | ".join(f"{name}, ns" for name in NAMES) + " | difference |",
            "|---|---|---|---|",
            *(self._line(name, some) for name, some in (("all", pairs), ("fastest quarter", fastest))),
        ]

    def _line(self, name: str, pairs: Sequence[tuple[float, float]]) -> str:
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        by_ns = statistics.median(a - b for a, b in pairs)
        by_share = statistics.median(a / b for a, b in pairs) - 1
        verdict = "within" if by_share <= ALLOWED_SHARE or by_ns <= ALLOWED_NS else "beyond"
        bounds = f"{verdict} {ALLOWED_SHARE:.0%} or {ALLOWED_NS:.0f} ns"
        return f"| {name} | {ours:.0f} | {theirs:.0f} | {by_ns:+.1f} ns, {by_share:+.1%}: {bounds} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=20_000, help="of a round")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(int(arguments.serve[0]), arguments.serve[1])
        return
    sys.path.append(str(CHECKOUT))
    from tests.repo.faults import builds

    crews = [Crew(builds.build(flags), arguments.ranks) for flags in (builds.CHECKED, builds.UNCHECKED)]
    took: list[list[float]] = [[], []]
    try:
        for turn in range(arguments.rounds + 2):  # the first two warm up
            for which in (0, 1) if turn % 2 else (1, 0):
                took[which].append(crews[which].call(arguments.calls))
    finally:
        for crew in crews:
            crew.close()
    rounds = f"{arguments.rounds} rounds of {arguments.calls}"
    print(f"all_reduce of 8 B as a plan, {arguments.ranks} ranks, {rounds}:\n")
    print("\n".join(Compared(took[0][2:], took[1][2:]).lines()))


if __name__ == "__main__":
    main()
