"""The targets of shmring, as one data table, and the ratios to compare with them.

Contains the targets, the medians and the ratios. Uses the samples' fields, not the way they were taken.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.common.calls import MESSAGES

KIB, MIB = 1 << 10, 1 << 20

# With fewer rounds than this a target is neither met nor missed.
ENOUGH_ROUNDS = 7

# Below this size a copy is a call of memcpy and no limit to anything.
COPY_COUNTS_FROM_NBYTES = 64 * KIB

# The rivals a ratio is taken against. mpi is the fastest blocking call (the rows of the targets were set
# against it); persistent is the fastest MPI-4 persistent collective, the like of a plan, without targets.
RIVALS: dict[str, list[tuple[str, str]]] = {
    "mpi": [(peer, "blocking") for peer in ("mpich", "openmpi", "intel")],
    "persistent": [(peer, "persistent") for peer in ("mpich", "openmpi", "intel")],
    "gloo": [("gloo", "in place")],
    "copy": [("copy", "plain"), ("copy", "streaming")],
}
VARIANTS = ("private", "plan", "zero-copy")


@dataclass(frozen=True)
class Target:
    """At least so many times faster than a rival; for the copy, at most so many times its time."""

    ranks: int
    nbytes: int
    variant: str
    rival: str
    near: float | None
    far: float | None


TARGETS = [
    Target(2, 8, "private", "mpi", near=3, far=2),
    Target(2, 8, "plan", "mpi", near=5, far=2.5),
    Target(2, 4 * KIB, "private", "mpi", near=1.8, far=1.8),
    Target(2, 64 * KIB, "private", "mpi", near=1.5, far=1.1),
    Target(2, 64 * KIB, "zero-copy", "mpi", near=2.7, far=2),
    Target(2, 64 * KIB, "zero-copy", "copy", near=1.8, far=None),
    Target(2, 1 * MIB, "private", "mpi", near=1.5, far=1.5),
    Target(2, 1 * MIB, "zero-copy", "mpi", near=2.5, far=2.5),
    Target(2, 1 * MIB, "private", "copy", near=2.1, far=None),
    Target(2, 1 * MIB, "zero-copy", "copy", near=1.3, far=None),
    Target(2, 64 * MIB, "private", "mpi", near=2, far=4),
    Target(2, 64 * MIB, "zero-copy", "mpi", near=2.8, far=7),
    Target(2, 64 * MIB, "private", "copy", near=1.5, far=1.8),
    Target(2, 64 * MIB, "zero-copy", "copy", near=1.1, far=1.1),
    Target(4, 8, "private", "mpi", near=2.5, far=None),
    Target(4, 1 * MIB, "private", "mpi", near=1.4, far=None),
    Target(4, 1 * MIB, "zero-copy", "mpi", near=1.4, far=None),
    Target(4, 64 * MIB, "private", "mpi", near=1.2, far=None),
    Target(4, 64 * MIB, "zero-copy", "mpi", near=1.8, far=None),
    Target(2, 8, "private", "gloo", near=500, far=500),
    Target(2, 1 * MIB, "private", "gloo", near=10, far=10),
    Target(2, 64 * MIB, "private", "gloo", near=5, far=5),
]

# The targets of every other collective, near: 8 B, 1 MiB and 64 MiB for each number of ranks.
_OTHERS = [
    Target(ranks, nbytes, "private", "mpi", near=near, far=None)
    for ranks, ratios_asked in {2: (1.5, 1.5, 1.3), 4: (2, 1.2, 1.2), 8: (2, 1.2, 1.2)}.items()
    for nbytes, near in zip((8, 1 * MIB, 64 * MIB), ratios_asked, strict=True)
] + [Target(2, nbytes, "zero-copy", "mpi", near=2, far=None) for nbytes in (1 * MIB, 64 * MIB)]


def choose(call: str) -> None:
    """Choose the targets that count: all_reduce has its own."""
    if call == "ping_pong":
        TARGETS[:] = [Target(2, 8, "private", "mpi", near=2.2, far=2.2)]
        TARGETS[:] += [Target(2, nbytes, variant, "mpi", near=least, far=least)
                       for nbytes in (64 * KIB, 256 * KIB, MIB, 4 * MIB)
                       for variant, least in (("private", 1), ("zero-copy", 1.5))]
    elif call in MESSAGES:
        TARGETS[:] = [Target(ranks, 8, "private", "mpi", near=1, far=1) for ranks in (2, 4)]
    elif call != "all_reduce":
        TARGETS[:] = _OTHERS


@dataclass(frozen=True)
class Group:
    """The key of one table."""

    ranks: int
    distance: str
    input: str

    def place(self) -> tuple[int, str, int]:
        """Return the sort key of this table."""
        return self.ranks, self.input, ("near", "one core", "far", "unknown").index(self.distance)


@dataclass(frozen=True)
class Median:
    us: float
    rounds: int


@dataclass(frozen=True)
class Ratio:
    """One quotient of two medians, and the verdict on the target if there is one."""

    nbytes: int
    variant: str
    rival: str
    rival_name: str
    value: float
    rounds: int
    target: float | None
    verdict: str  # met, missed, too few rounds, or nothing where no target is set


Medians = dict[tuple[int, str, str], Median]  # by bytes, contestant, variant


def medians_by_group(samples: Iterable[Any]) -> dict[Group, Medians]:
    """Return medians over the rounds, without samples during which the distance changed."""
    times: dict[Group, dict[tuple[int, str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample.distance != "mixed":
            group = Group(sample.ranks, sample.distance, sample.input)
            times[group][sample.nbytes, sample.contestant, sample.variant].append(sample.us)
    return {group: {key: Median(statistics.median(us), len(us)) for key, us in times[group].items()}
            for group in sorted(times, key=Group.place)}


def fastest(medians: Medians, nbytes: int, rival: str) -> tuple[str, Median] | None:
    found = [(name, medians[nbytes, name, variant]) for name, variant in RIVALS[rival]
             if (nbytes, name, variant) in medians]
    return min(found, key=lambda item: item[1].us, default=None)


def ratios(group: Group, medians: Medians) -> list[Ratio]:
    """Return every shmring figure against every rival: rival / shmring, and shmring / copy."""
    found = []
    for nbytes in sorted({key[0] for key in medians}):
        for variant in VARIANTS:
            mine = medians.get((nbytes, "shmring", variant))
            if mine is None:
                continue
            for rival in RIVALS:
                best = fastest(medians, nbytes, rival)
                counts = rival != "copy" or nbytes >= COPY_COUNTS_FROM_NBYTES
                if best is not None and counts:
                    target = target_for(group, nbytes, variant, rival)
                    found.append(_ratio(nbytes, variant, mine, rival, best, target))
    return found


def _ratio(nbytes: int, variant: str, mine: Median, rival: str, best_of_rivals: tuple[str, Median],
           target: float | None) -> Ratio:
    name, best = best_of_rivals
    value = mine.us / best.us if rival == "copy" else best.us / mine.us
    rounds = min(mine.rounds, best.rounds)
    return judged(nbytes, variant, rival, name, value, rounds, target)


def judged(nbytes: int, variant: str, rival: str, name: str, value: float, rounds: int,
           target: float | None) -> Ratio:
    """Return the ratio with the verdict on its target."""
    verdict = ""
    if target is not None:
        good = value <= target if rival == "copy" else value >= target
        verdict = "too few rounds" if rounds < ENOUGH_ROUNDS else "met" if good else "missed"
    return Ratio(nbytes, variant, rival, name, value, rounds, target, verdict)


def target_for(group: Group, nbytes: int, variant: str, rival: str) -> float | None:
    wanted = (group.ranks, nbytes, variant, rival)
    for target in TARGETS:
        if (target.ranks, target.nbytes, target.variant, target.rival) == wanted:
            # One core is the near end of near, though not the two cores that the targets speak of.
            return {"near": target.near, "one core": target.near, "far": target.far}.get(group.distance)
    return None
