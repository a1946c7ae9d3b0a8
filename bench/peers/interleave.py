"""Rounds: every contestant in turn at every size, with the round trip measured before and after each.

Contains calibration, the order of the contestants and the making of samples. Uses crew and probe.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench.common.calls import MESSAGES, OBJECT_CALLS
from bench.peers.crew import ContestantFailed, ContestantRefused, Crew, Timing
from bench.peers.probe import Probe, distance

REPEATS = 5
REPEATS_OF_LONG_SAMPLES = 3
LONG_SAMPLE_S = 0.050
# The first calls are slow and say little, so the number of loops grows by steps.
GROWTH = 8
WARM_UP_TRIES = 12
# The least warm-up, whichever ends first. shmring chooses some paths by measurement: the first calls of a
# cell take those of the cell before, in which the input may have been written before every call.
SETTLING_CALLS = 300
SETTLING_S = 0.200
# Gloo's name for it, and the names of MPI's persistent calls.
ALL_REDUCE_ONLY = ("in place", "persistent")
ARRAYS_ONLY = ("zero-copy",)
COLLECTIVES_ONLY = ("plan",)


@dataclass(frozen=True)
class Cell:
    """One size of one call, with the input reused or written before every call."""

    nbytes: int
    written: bool
    call: str = "all_reduce"

    @property
    def input(self) -> str:
        return "written" if self.written else "reused"


@dataclass(frozen=True)
class Entry:
    contestant: str
    variant: str


@dataclass(frozen=True)
class Sample:
    """The figures of one entry in one round, in µs per call: `us` is the result, the rest explains it."""

    ranks: int
    round: int
    nbytes: int
    input: str
    contestant: str
    variant: str
    us: float
    repeats_us: tuple[float, ...]
    write_us: float
    loops: int
    round_trip_ns: tuple[float, float]
    distance: str
    facts: dict[str, Any]
    call: str = "all_reduce"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Match:
    """The crews of one number of ranks, and the samples taken of them."""

    def __init__(self, crews: dict[str, Crew], probe: Probe, report: Callable[[str], None]) -> None:
        self.crews, self.probe, self.report = dict(crews), probe, report
        some = next(iter(crews.values()))
        self.nprocs, self.cpus = some.nprocs, some.cpus[:some.nprocs]
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self._out: set[tuple[Entry, Cell]] = set()
        self._loops: dict[tuple[Entry, Cell], int] = {}

    def entries(self, cell: Cell) -> list[Entry]:
        """Return the entries at this size: all but those that failed at it."""
        everybody = [Entry(name, variant) for name, crew in self.crews.items()
                     for variant in crew.contestant.variants
                     if cell.nbytes >= crew.contestant.smallest_nbytes
                     and (cell.call == "all_reduce" or variant not in ALL_REDUCE_ONLY)
                     and (cell.call not in MESSAGES or variant not in COLLECTIVES_ONLY)
                     and (cell.call not in OBJECT_CALLS or variant not in ARRAYS_ONLY)]
        return [entry for entry in everybody if (entry, cell) not in self._out]

    def play_block(self, round_number: int, cell: Cell) -> Iterator[Sample]:
        """Take one sample of each entry; each round begins with another entry."""
        entries = self.entries(cell)
        first = round_number % max(1, len(entries))
        for entry in entries[first:] + entries[:first]:
            if entry.contestant in self.crews:
                try:
                    sample = self._sample(round_number, entry, cell)
                except ContestantFailed as failure:
                    self._exclude(entry, cell, failure)
                else:
                    self.samples.append(sample)
                    yield sample

    def _exclude(self, entry: Entry, cell: Cell, failure: ContestantFailed) -> None:
        problem = f"{entry.variant}, {cell.nbytes} bytes, input {cell.input}: {failure}"
        self.problems.append(problem)
        self.report(problem)
        self._out.add((entry, cell))
        if not isinstance(failure, ContestantRefused):
            self.crews.pop(entry.contestant).stop()

    def _sample(self, round_number: int, entry: Entry, cell: Cell) -> Sample:
        crew = self.crews[entry.contestant]
        crew.prepare(entry.variant, cell.nbytes, call=cell.call, written=cell.written)
        loops = self._warm_up(crew, entry, cell)
        before_ns = self.probe.round_trip_ns(self.cpus)
        repeats = self._repeats(crew, "run", loops)
        writes = self._repeats(crew, "write", loops) if cell.written else [0.0]
        after_ns = self.probe.round_trip_ns(self.cpus)
        crew.check()
        facts = crew.facts()
        crew.tell("release")
        write_us = statistics.median(writes)
        return Sample(
            ranks=self.nprocs, round=round_number, nbytes=cell.nbytes, input=cell.input,
            contestant=entry.contestant, variant=entry.variant, us=statistics.median(repeats) - write_us,
            repeats_us=tuple(repeats), write_us=write_us, loops=loops,
            round_trip_ns=(before_ns, after_ns), distance=distance(before_ns, after_ns), facts=facts,
            call=cell.call)

    def _warm_up(self, crew: Crew, entry: Entry, cell: Cell) -> int:
        """Call until everything is warm, and find the number of calls in a sample, which all rounds use."""
        loops = self._loops.get((entry, cell), 1)
        fitting_runs = ncalls = 0
        total_s = 0.0
        for _ in range(WARM_UP_TRIES):
            took_s = crew.timed("run", loops).slowest_s
            ncalls, total_s = ncalls + loops, total_s + took_s
            wanted = max(1, round(loops * min(GROWTH, crew.sample_s / took_s)))
            fitting_runs = fitting_runs + 1 if wanted / 2 <= loops <= 2 * wanted else 0
            if fitting_runs == 2 or took_s > LONG_SAMPLE_S:
                break
            loops = wanted
        while ncalls < SETTLING_CALLS and total_s < SETTLING_S:
            total_s += crew.timed("run", loops).slowest_s
            ncalls += loops
        self._loops[entry, cell] = loops
        return loops

    def _repeats(self, crew: Crew, what: str, loops: int) -> list[float]:
        """Return µs per call, several times. Ranks that wait for nobody are timed from the first start to the
        last end: where they share a CPU one may be done before the next begins."""
        alone = what == "write" or crew.contestant.library == "copy"

        def took_us(timing: Timing) -> float:
            return 1e6 * (timing.span_s if alone else timing.slowest_s) / loops

        first = took_us(crew.timed(what, loops))
        repeats = REPEATS if first * loops < 1e6 * LONG_SAMPLE_S else REPEATS_OF_LONG_SAMPLES
        return [first, *(took_us(crew.timed(what, loops)) for _ in range(repeats - 1))]


class Noise:
    """The CPU time of everything else: other processes, and what the hypervisor gave to other machines."""

    def __init__(self, crews: dict[str, Crew]) -> None:
        self._crews = crews
        self._start = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        """Return seconds: wall time of all CPUs, busy, stolen, and busy for the benchmark itself."""
        with open("/proc/stat", encoding="ascii") as stat:
            ticks = [int(field) for field in stat.readline().split()[1:9]]
        user, nice, system, idle, iowait, irq, softirq, steal = (ticks_ / 100 for ticks_ in ticks)
        busy_s = user + nice + system + irq + softirq
        own_s = time.process_time() + 1e-9 * sum(crew.cpu_ns() for crew in self._crews.values())
        return busy_s + idle + iowait + steal, busy_s, steal, own_s

    def shares(self) -> dict[str, float]:
        """Return the shares of the CPUs' time since the start."""
        since_start = zip(self._now(), self._start, strict=True)
        wall_s, busy_s, steal_s, own_s = (now - then for now, then in since_start)
        wall_s = max(wall_s, 0.01)
        return {"others": max(0.0, (busy_s - own_s) / wall_s), "stolen": steal_s / wall_s,
                "ours": own_s / wall_s}
