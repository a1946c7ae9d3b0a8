"""Format the result as text: a table of times and a table of ratios for each group.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from bench.peers.targets import VARIANTS, Group, Median, Medians, Ratio, ratios

HEADINGS = {
    ("copy", "plain"): "copy", ("copy", "streaming"): "copy, streamed",
    ("mpich", "blocking"): "MPICH", ("mpich", "persistent"): "MPICH pers.",
    ("openmpi", "blocking"): "Open MPI", ("openmpi", "persistent"): "Open MPI pers.",
    ("intel", "blocking"): "Intel MPI", ("intel", "persistent"): "Intel pers.",
    ("gloo", "in place"): "Gloo", ("shmring", "private"): "shmring",
    ("shmring", "plan"): "a plan of it", ("shmring", "zero-copy"): "zero-copy",
}
RIVAL_HEADINGS = {"mpi": "MPI / it", "persistent": "persistent MPI / it", "copy": "it / copy",
                  "gloo": "Gloo / it"}


def format_bytes(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def format_us(us: float) -> str:
    decimals = 0 if us >= 100 else 1 if us >= 10 else 2 if us >= 0.1 else 3
    return f"{us:,.{decimals}f}"


def aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)


def times_table(medians: Medians) -> str:
    """Format µs; the last column is the least number of rounds of any figure in the row."""
    present = {key[1:] for key in medians}
    columns = [column for column in HEADINGS if column in present]
    columns += sorted(present - set(HEADINGS))
    rows = [["bytes", *(HEADINGS.get(column, " ".join(column)) for column in columns), "rounds"]]
    for nbytes in sorted({key[0] for key in medians}):
        cells: list[Median | None] = [medians.get((nbytes, *column)) for column in columns]
        rounds = min(cell.rounds for cell in cells if cell is not None)
        rows.append([format_bytes(nbytes), *("-" if cell is None else format_us(cell.us) for cell in cells),
                     str(rounds)])
    return aligned(rows)


def format_ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    value = f"{ratio.value:.2f}" if ratio.value < 10 else f"{ratio.value:.0f}"
    if ratio.target is None:
        return value
    sign = "≤" if ratio.rival == "copy" else "≥"
    return f"{value} ({sign} {ratio.target:g}: {ratio.verdict})"


def ratios_table(group: Group, medians: Medians) -> str:
    """Format the ratios; empty if shmring did not take part."""
    found = {(ratio.nbytes, ratio.variant, ratio.rival): ratio for ratio in ratios(group, medians)}
    rivals = [rival for rival in RIVAL_HEADINGS if any(key[2] == rival for key in found)]
    rows = [["bytes", "shmring", *(RIVAL_HEADINGS[rival] for rival in rivals), "fastest MPI"]]
    for nbytes in sorted({key[0] for key in found}):
        for variant in VARIANTS:
            cells = [found.get((nbytes, variant, rival)) for rival in rivals]
            if any(cells):
                mpi = found.get((nbytes, variant, "mpi"))
                rows.append([format_bytes(nbytes), variant, *map(format_ratio, cells),
                             mpi.rival_name if mpi else "-"])
    return aligned(rows) if len(rows) > 1 else ""


def heading(group: Group, samples: Iterable[Any], cpus: list[int]) -> str:
    trips = [ns for sample in samples for ns in sample.round_trip_ns
             if (sample.ranks, sample.distance, sample.input) == (group.ranks, group.distance, group.input)]
    trip = f"round trip {statistics.median(trips):.0f} ns" if min(trips) >= 0 else "round trip unknown"
    return (f"{group.ranks} ranks on CPUs {','.join(map(str, cpus))}, {group.distance} ({trip}), "
            f"input {group.input}, µs")


def verdict_line(found: Iterable[Ratio]) -> str:
    verdicts = [ratio.verdict for ratio in found if ratio.verdict]
    return (f"targets: {verdicts.count('met')} met, {verdicts.count('missed')} missed, "
            f"{verdicts.count('too few rounds')} undecided (too few rounds)")


def report(by_group: dict[Group, Medians], samples: list[Any], cpus: list[int]) -> str:
    parts = []
    for group, medians in by_group.items():
        parts += [heading(group, samples, cpus), times_table(medians), ""]
        comparison = ratios_table(group, medians)
        if comparison:
            parts += [comparison, verdict_line(ratios(group, medians)), ""]
    dropped = sum(sample.distance == "mixed" for sample in samples)
    parts.append(f"{dropped} of {len(samples)} samples dropped: the CPUs moved while they were taken.")
    return "\n".join(parts)
