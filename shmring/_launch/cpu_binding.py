"""What the ranks of shmrun run on: their CPUs with --bind, and how many threads libraries start in each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .._system import cpu_topology, cpulist
from .._system.limits import usable_cpus
from .options import say


@dataclass(frozen=True)
class Cpus:
    """What a rank is bound to (empty: to nothing), and its OMP_NUM_THREADS (None: as the user has it)."""

    numbers: Sequence[int] = ()
    threads: int | None = None

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes that are started meanwhile run there from their first instruction on."""
        own = os.sched_getaffinity(0)
        if self.numbers:
            os.sched_setaffinity(0, self.numbers)
        try:
            yield
        finally:
            if self.numbers:
                os.sched_setaffinity(0, own)


def share_cpus(environment: dict[str, str], bind: str, ranks: range) -> dict[int, Cpus]:
    """Bind the ranks, and keep numerical libraries from starting a thread for every CPU in every rank."""
    nprocs, cpus, allowed = len(ranks), usable_cpus(), os.sched_getaffinity(0)
    shares: list[list[int]] = []
    if bind != "none":
        topology = cpu_topology.read(allowed)
        shares = (cpu_topology.by_core if bind == "core" else cpu_topology.by_node)(topology, nprocs)
        if not shares:
            cores = len(cpu_topology.cores_of(topology))
            say(f"--bind core: {nprocs} ranks are more than the {cores} usable core(s), so none is bound")
    threads: list[int | None] = [None] * nprocs
    if nprocs > 1 and not environment.get("OMP_NUM_THREADS"):
        # A cgroup's quota may leave less than the affinity does.
        bound = [max(1, count * cpus // len(allowed)) for count in cpu_topology.threads_of(shares)]
        threads = [*(bound or [max(1, cpus // nprocs)] * nprocs)]
        where = f", bound by {bind}" if shares else ""
        set_to = cpulist.spell(count for count in threads if count)
        say(f"{nprocs} ranks on {cpus} usable CPU(s){where}: OMP_NUM_THREADS={set_to} unless you set it")
    return dict(zip(ranks, map(Cpus, shares or [[]] * nprocs, threads), strict=True))
