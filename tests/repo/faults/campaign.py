"""Many kills in turn, and the tables that are made of them."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import itertools
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import shmring

from .calls import CALLS
from .worlds import C_POINTS, FAULT_KINDS, LOADED_NBYTES, POINTS, REST_S, STOPPED, Death, Outcome, Trial
from .worlds import run as run_trial

DETECTION_RANKS, DETECTION_CPUS = 4, 2
DETECTED_IN = (("all_reduce", 8), ("all_reduce", 64 << 10), ("barrier", 8), ("all_gather", 64 << 10))
LARGE_NBYTES = 2 << 30
TABLE_BEGINS, TABLE_ENDS = "<!-- table -->", "<!-- end of table -->"
SLOW_NBYTES, SLOW_SHARE = 1 << 20, 0.2
NAMES = {8: "8 B", 64 << 10: "64 KiB", 16 << 20: "16 MiB"}


def trials(arguments: argparse.Namespace) -> Iterator[Trial]:
    """Yield every cell of the matrix once, in a random order, then all again with other victims and moments.

    Trials that take seconds, large messages and deaths in init, are rarer in the repetitions. Every few
    worlds there is one in which rank after rank dies, until one is left.
    """
    rng = random.Random(arguments.seed)
    cells = [
        (ranks, call, nbytes, point)
        for ranks in arguments.ranks
        for call in arguments.calls or CALLS
        for nbytes in arguments.sizes
        for point in arguments.points or POINTS
        if point != "in shrink" or ranks > 2
    ]
    for turn in itertools.count():
        rng.shuffle(cells)
        for number, (ranks, call, nbytes, point) in enumerate(cells):
            is_slow = nbytes >= SLOW_NBYTES or point == "in init"
            if turn > 0 and is_slow and rng.random() > SLOW_SHARE:
                continue
            deaths = [Death(rank, point) for rank in rng.sample(range(ranks), ranks)]
            if point == "in shrink":
                deaths = [Death(deaths[0].victim, "any time"), *deaths[1:2]]
            elif number % arguments.every == 0 and point not in ("in init", "in close"):
                points = rng.choices((*C_POINTS, "any time", "in shrink"), k=ranks - 2)
                deaths = [deaths[0], *(Death(d.victim, p) for d, p in zip(deaths[1:], points, strict=False))]
                deaths = [
                    d
                    for d, before in zip(deaths, [None, *deaths], strict=False)
                    if before is None or {d.point, before.point} != {"in shrink"}
                ]
            else:
                deaths = deaths[:1]
            yield Trial(ranks, call, nbytes, tuple(deaths), rng.randrange(1 << 30))


def stops(arguments: argparse.Namespace) -> Iterator[Trial]:
    """Yield worlds in which one rank is stopped until the others have gone on without it."""
    rng = random.Random(arguments.seed)
    calls = list(arguments.calls or CALLS)
    for number in range(arguments.stops):
        death = Death(rng.randrange(3), STOPPED)
        nbytes = (8, 64 << 10, 1 << 20)[number % 3]
        yield Trial(3, calls[number % len(calls)], nbytes, (death,), rng.randrange(1 << 30))


def run(arguments: argparse.Namespace) -> int:
    print(f"shmring from {os.path.dirname(shmring.__file__)}", file=sys.stderr)
    with shmring.init() as comm:  # a world of one rank: late imports are then done for all forked ranks
        comm.all_reduce_many([np.zeros(1)])
        comm.all_reduce(np.zeros(1), async_op=True).wait()
    del comm
    tally = Tally()
    begin_s = time.monotonic()
    for trial in trials(arguments):
        is_late = time.monotonic() - begin_s > arguments.seconds
        if tally.kills >= (arguments.at_least if is_late else arguments.kills):
            break
        reported = tally.kills // 100
        tally.add(run_trial(trial))
        if tally.kills // 100 > reported:
            print(
                f"{tally.kills} kills, {time.monotonic() - begin_s:.0f} s, {tally.faults_printed()}",
                file=sys.stderr,
                flush=True,
            )
    for trial in stops(arguments):
        tally.add(run_trial(trial))
    lasted_s = time.monotonic() - begin_s
    figures = {
        f"{name}, and {'rests' if rests else 'goes on'}": detection(arguments, nbytes, rests)
        for name, nbytes in (("50 MiB", LOADED_NBYTES), ("2 GiB", LARGE_NBYTES))
        for rests in (True, False)
        if arguments.detection
    }
    text = tally.text(lasted_s, figures)
    print(text)
    if arguments.markdown:
        write_table(Path(arguments.markdown), text)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(tally.as_dict(figures)))
    return 1 if tally.faults else 0


def write_table(path: Path, text: str) -> None:
    """Into a page that has a place for it, else into a file of its own."""
    before, begin, rest = (path.read_text() if path.exists() else "").partition(TABLE_BEGINS)
    _, end, after = rest.partition(TABLE_ENDS)
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}" if end else text)


def detection(arguments: argparse.Namespace, resident_nbytes: int, rests: bool) -> Figures:
    """Kills at random times, for the time that it takes the others to raise."""
    rng = random.Random(arguments.seed)
    figures = Figures()
    for number in range(arguments.detection):
        call, nbytes = DETECTED_IN[number % len(DETECTED_IN)]
        death = Death(rng.randrange(DETECTION_RANKS), "any time")
        trial = Trial(DETECTION_RANKS, call, nbytes, (death,), rng.randrange(1 << 30), resident_nbytes, rests)
        figures.took_s += run_trial(trial).took_s
    return figures


@dataclasses.dataclass
class Figures:
    took_s: list[float] = dataclasses.field(default_factory=list)

    def at(self, share: float) -> float:
        ordered = sorted(self.took_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")

    def __str__(self) -> str:
        shares = " | ".join(f"{self.at(share) * 1e3:.2f}" for share in (0.5, 0.99, 1))
        return f"{shares} | {len(self.took_s)}"


class Tally:
    """The counts of all worlds together."""

    def __init__(self) -> None:
        self.kills = self.worlds = self.in_turn = self.stops = 0
        self.shrink = Figures()
        self.load = os.getloadavg()[0]
        self.by: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.faults: list[tuple[str, str, Trial]] = []
        self.took: dict[int, Figures] = collections.defaultdict(Figures)
        self.calls_checked = 0

    def add(self, outcome: Outcome) -> None:
        trial = outcome.trial
        for kind, what in outcome.faults:
            self.faults.append((kind, what, trial))
            print(f"{kind}: {trial}: {what[:1500]}", file=sys.stderr, flush=True)
        if trial.point == STOPPED:
            self.stops += 1
            return
        self.worlds += 1
        self.kills += len(trial.deaths)
        self.in_turn += len(trial.deaths) if len(trial.deaths) > 2 else 0
        for death in trial.deaths:
            self.by["call"][trial.call, death.point] += 1
        self.by["size"][trial.ranks, trial.nbytes] += len(trial.deaths)
        self.shrink.took_s += outcome.shrink_s
        self.calls_checked += sum(seen.steps for seen in outcome.seen)
        if trial.point != "in init":
            self.took[trial.ranks].took_s += outcome.took_s

    def faults_printed(self) -> str:
        counted = collections.Counter(kind for kind, _, _ in self.faults)
        return ", ".join(f"{counted[kind]} {kind}s" for kind in FAULT_KINDS)

    def text(self, lasted_s: float, figures: dict[str, Figures]) -> str:
        cpus = len(os.sched_getaffinity(0))
        lines = [
            f"{datetime.date.today()}, {cpu_model()}, {cpus} CPUs (others' load at the start: "
            f"{self.load:.1f}), Linux {platform.release().partition('-')[0]}, "
            f"Python {platform.python_version()}: {self.kills} kills in {self.worlds} worlds, "
            f"{self.in_turn} of them one after another in the same; {self.calls_checked} calls checked; "
            f"{lasted_s:.0f} s.",
            "",
            f"**{self.faults_printed()}.** {self.stops} ranks were stopped and woken.",
            "",
            "| killed in | " + " | ".join(POINTS) + " |",
            "|---|" + "---|" * len(POINTS),
            *(
                f"| {call} | " + " | ".join(str(self.by["call"][call, point]) for point in POINTS) + " |"
                for call in CALLS
                if any(self.by["call"][call, point] for point in POINTS)
            ),
            "",
        ]
        sizes = sorted({nbytes for _, nbytes in self.by["size"]})
        lines += [
            "| ranks | "
            + " | ".join(NAMES.get(n, f"{n} B") for n in sizes)
            + " | median ms | p99 | worst | survivors |",
            "|---|" + "---|" * (len(sizes) + 4),
        ]
        for ranks in sorted({ranks for ranks, _ in self.by["size"]}):
            counts = " | ".join(str(self.by["size"][ranks, nbytes]) for nbytes in sizes)
            lines.append(f"| {ranks} | {counts} | {self.took[ranks]} |")
        lines += [
            "",
            f"`shrink`: median {self.shrink.at(0.5) * 1e3:.1f} ms, p99 {self.shrink.at(0.99) * 1e3:.1f} ms, "
            f"{len(self.shrink.took_s)} times.",
        ]
        if figures:
            lines += [
                "",
                f"Detection, {DETECTION_RANKS} ranks; a rank that has raised rests for "
                f"{REST_S * 1e3:.0f} ms, or goes on to `shrink` at once, on CPUs that the others need:",
                "",
                "| resident | median ms | p99 | worst | survivors |",
                "|---|---|---|---|---|",
                *(f"| {name} | {found} |" for name, found in figures.items()),
            ]
        return "\n".join(lines) + "\n"

    def as_dict(self, figures: dict[str, Figures]) -> dict[str, object]:
        return {
            "kills": self.kills,
            "stops": self.stops,
            "faults": [(kind, what, dataclasses.asdict(trial)) for kind, what, trial in self.faults],
            "calls_checked": self.calls_checked,
            "detection_s": {name: found.took_s for name, found in figures.items()},
        }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
