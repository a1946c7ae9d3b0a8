"""Choose the CPUs of each rank (`shmrun --bind`) from the caches and nodes that CPUs share.

All functions but `read`, which reads /sys, are pure. Consecutive ranks are placed close together: on one NUMA
node, and there under one cache.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from . import cpulist

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Cpu:
    """A usable CPU with its node, last-level cache and core, each named by its lowest CPU."""

    node: int
    cache: int
    core: int
    number: int


def read(usable: Iterable[int], system: str = "/sys/devices/system") -> list[Cpu]:
    """Return the usable CPUs in the order of binding. Levels that /sys does not report count as shared."""
    nodes = {
        number: min(numbers)
        for path in glob.glob(f"{system}/node/node[0-9]*/cpulist")
        if (numbers := _numbers_in(path))
        for number in numbers
    }
    cpus = []
    for number in usable:
        own = f"{system}/cpu/cpu{number}"
        siblings = _numbers_in(f"{own}/topology/core_cpus_list", f"{own}/topology/thread_siblings_list")
        cpus.append(Cpu(nodes.get(number, 0), _last_cache(own), min(siblings, default=number), number))
    return sorted(cpus)


def cores_of(cpus: Iterable[Cpu]) -> list[list[Cpu]]:
    """Return the usable CPUs (hardware threads) of each core."""
    return _groups(sorted(cpus), lambda cpu: (cpu.node, cpu.cache, cpu.core))


def by_core(cpus: Iterable[Cpu], nprocs: int) -> list[list[int]]:
    """Return for each rank the CPUs of its own whole cores; an empty list if ranks outnumber cores."""
    cores = cores_of(cpus)
    if nprocs > len(cores):
        return []
    shares = _share(cores, nprocs, [lambda core: core[0].node, lambda core: core[0].cache])
    return [_numbers(itertools.chain(*share)) for share in shares]


def by_node(cpus: Iterable[Cpu], nprocs: int) -> list[list[int]]:
    """Return for each rank all CPUs of a NUMA node, or of several if nodes outnumber ranks."""
    nodes = _groups(sorted(cpus), lambda cpu: cpu.node)
    if nprocs < len(nodes):
        return [_numbers(itertools.chain(*share)) for share in _cut(nodes, nprocs)]
    counts = _deal(nprocs, [len(cores_of(node)) for node in nodes])
    return [_numbers(node) for node, count in zip(nodes, counts, strict=True) for _ in range(count)]


def threads_of(shares: Sequence[list[int]]) -> list[int]:
    """Return the threads that each rank can keep busy, given that ranks may share CPUs."""
    return [max(1, len(share) // shares.count(share)) for share in shares]


def _share(cores: list[T], nprocs: int, borders: list[Callable[[T], Any]]) -> list[list[T]]:
    """Partition cores so that no rank crosses a border, if there is a rank for each group between borders."""
    groups = _groups(cores, borders[0]) if borders else [cores]
    if not borders or nprocs < len(groups):
        return _cut(cores, nprocs)
    counts = _deal(nprocs, [len(group) for group in groups])
    shares = (_share(group, count, borders[1:]) for group, count in zip(groups, counts, strict=True))
    return list(itertools.chain(*shares))


def _deal(nprocs: int, sizes: list[int]) -> list[int]:
    """Return the ranks of each group, at least one, so as to maximise the smallest share of a rank."""
    counts = [1] * len(sizes)
    for _ in range(nprocs - len(sizes)):
        counts[max(range(len(sizes)), key=lambda at: sizes[at] / (counts[at] + 1))] += 1
    return counts


def _cut(items: list[T], pieces: int) -> list[list[T]]:
    ends = [at * len(items) // pieces for at in range(pieces + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(ends)]


def _groups(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    return [list(group) for _, group in itertools.groupby(items, key)]


def _numbers(cpus: Iterable[Cpu]) -> list[int]:
    return sorted(cpu.number for cpu in cpus)


def _last_cache(cpu: str) -> int:
    """Return the lowest CPU that shares this CPU's last-level cache."""
    level, sharers = 0, [0]
    for path in glob.glob(f"{cpu}/cache/index[0-9]*/level"):
        (found,) = _numbers_in(path) or [0]
        if found > level:
            level, sharers = found, _numbers_in(os.path.join(os.path.dirname(path), "shared_cpu_list")) or [0]
    return min(sharers)


def _numbers_in(*paths: str) -> list[int]:
    """Return the numbers in the first readable file."""
    for path in paths:
        try:
            with open(path) as file:
                return cpulist.parse(file.read())
        except (OSError, ValueError):  # hidden from a container, an older kernel, a node without CPUs
            continue
    return []
