"""Medians, bounds, ratios and tables from the samples of bench_internode.py.

Uses the samples' fields, not the way they were taken.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.common.tables import aligned, format_bytes, format_us
from bench.internode.internode_libraries import (
    BLOCKING,
    EXCHANGE,
    EXCHANGE_BUFFERED,
    EXCHANGE_RENO,
    POLLING,
    wire_nbytes,
)

KIB, MIB = 1 << 10, 1 << 20
# The payload's share of a link's bits: 119.9 MB/s at 1 Gbit/s, as bare sockets measure it one way.
PAYLOAD_BYTES_A_BIT = 119.9e6 / 1e9
# Up to this size the number of messages decides the time, not their bytes.
SMALL_NBYTES = 4 * KIB

LABELS = {
    ("shmring", "private"): "shmring", ("shmring", "plan"): "a plan of it",
    ("shmring", "zero-copy"): "shmring, zero-copy",
    ("shmring", "wire=bf16"): "shmring, wire=bf16", ("shmring", "wire=int8"): "shmring, wire=int8",
    ("gloo", "in place"): "Gloo",
    ("sockets", EXCHANGE): "bare sockets, both ways",
    ("sockets", EXCHANGE_BUFFERED): "the same, 1 MiB buffers",
    ("sockets", EXCHANGE_RENO): "the same, Reno",
    ("sockets", BLOCKING): "bare round trip, blocking", ("sockets", POLLING): "bare round trip, polling",
    ("local", "private"): "shmring inside each host",
}
FULL_WIDTH = {key for key in LABELS if not key[1].startswith("wire=") and key[0] != "local"}


@dataclass(frozen=True)
class Scene:
    """Hosts, ranks and links, and one size; 0 bytes: all ranks idle."""

    name: str
    hosts: int
    ranks_a_host: int
    rate_bit_s: int | None
    nbytes: int

    @property
    def nprocs(self) -> int:
        return self.hosts * self.ranks_a_host

    @property
    def is_small(self) -> bool:
        return 0 < self.nbytes <= SMALL_NBYTES

    @property
    def wire_nbytes(self) -> int:
        """Return the least bytes that each host has to send, and to receive."""
        return wire_nbytes(self.nbytes, self.hosts)

    @property
    def bound_us(self) -> float | None:
        """Return the time of these bytes at the link's own rate; None if the link has no limit."""
        if self.rate_bit_s is None or self.is_small:
            return None
        return 1e6 * self.wire_nbytes / (self.rate_bit_s * PAYLOAD_BYTES_A_BIT)

    def heading(self) -> str:
        rate = "unlimited" if self.rate_bit_s is None else f"{self.rate_bit_s / 1e9:g} Gbit/s"
        size = format_bytes(self.nbytes) if self.nbytes else "idle"
        return f"{self.name}: {self.hosts} hosts x {self.ranks_a_host} ranks, links {rate}, {size}"


@dataclass(frozen=True)
class Row:
    """One line of a table: medians over the rounds, in µs, and their bounds."""

    contestant: str
    variant: str
    us: float
    fastest_us: float
    slowest_us: float
    rounds: int
    bound_ratio: float | None  # to the bytes at the link's own rate
    base_ratio: float | None  # to bare sockets in the same run, see base_us
    wire_mb_s: float | None  # of the bytes that have to cross, even if other bytes crossed


def medians(samples: Iterable[Any]) -> dict[tuple[str, str], list[float]]:
    """Return every figure of an entry, in the order of LABELS."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        found[sample.contestant, sample.variant].append(sample.us)
    return {key: found[key] for key in [*LABELS, *sorted(set(found) - set(LABELS))] if key in found}


def base_us(scene: Scene, found: dict[tuple[str, str], list[float]]) -> float | None:
    """Return the time of bare sockets. For large messages: the same bytes, by the faster of the ways that
    keep the system's congestion control, plus, where no link is the limit, the all-reduce inside each host.
    For small messages: the blocking round trip."""
    middle = {key: statistics.median(us) for key, us in found.items()}
    if scene.is_small:
        return middle.get(("sockets", BLOCKING))
    ways = [("sockets", EXCHANGE), ("sockets", EXCHANGE_BUFFERED)]
    wire = min((middle[way] for way in ways if way in middle), default=None)
    if wire is None or scene.rate_bit_s is not None:
        return wire
    local = middle.get(("local", "private"))
    return None if local is None else wire + local


def rows(scene: Scene, samples: Iterable[Any]) -> list[Row]:
    found = medians(samples)
    base, bound = base_us(scene, found), scene.bound_us
    made = []
    for (contestant, variant), every_us in found.items():
        us = statistics.median(every_us)
        full_width = (contestant, variant) in FULL_WIDTH and not scene.is_small
        made.append(Row(
            contestant, variant, us, min(every_us), max(every_us), len(every_us),
            bound_ratio=us / bound if bound and contestant != "local" else None,
            base_ratio=us / base if base and contestant not in ("sockets", "local") else None,
            wire_mb_s=scene.wire_nbytes / us if full_width else None))
    return made


def base_name(scene: Scene) -> str:
    if scene.is_small:
        return "/ round trip"
    return "/ sockets" if scene.rate_bit_s is not None else "/ (sockets + inside)"


def report(scene: Scene, samples: Iterable[Any], idle_ms_a_second: dict[str, float]) -> str:
    if idle_ms_a_second:
        lines = [["", "CPU ms a second, each rank"]]
        lines += [[name, f"{ms:.2f}"] for name, ms in idle_ms_a_second.items()]
        return f"{scene.heading()}\n{aligned(lines)}"
    unit, scale = ("µs", 1.0) if scene.is_small else ("ms", 1e-3)
    columns = ["", unit, "fastest", "slowest", "/ bound", base_name(scene), "MB/s", "rounds"]
    lines = [columns]
    for row in rows(scene, samples):
        label = LABELS.get((row.contestant, row.variant), f"{row.contestant}, {row.variant}")
        times = [format_us(us * scale) for us in (row.us, row.fastest_us, row.slowest_us)]
        ratios = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.bound_ratio, row.base_ratio)]
        speed = "-" if row.wire_mb_s is None else f"{row.wire_mb_s:,.1f}"
        lines.append([label, *times, *ratios, speed, str(row.rounds)])
    kept = [at for at, name in enumerate(columns)
            if name in ("", unit, "rounds") or any(line[at] != "-" for line in lines[1:])]
    table = aligned([[line[at] for at in kept] for line in lines])
    bound = scene.bound_us
    return "\n".join([scene.heading() + (f", lower bound {bound * 1e-3:,.1f} ms" if bound else ""), table])
