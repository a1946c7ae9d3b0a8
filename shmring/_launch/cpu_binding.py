"""The CPUs of shmrun's ranks with --bind, and the number of threads that libraries start in each rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .._system import cpu_topology, cpulist
from .._system.limits import cpus_for_each, usable_cpus
from .options import print_message


@dataclass(frozen=True)
class Cpus:
    """The CPUs that a rank is bound to (empty: none), and its OMP_NUM_THREADS (None: as set)."""

    numbers: Sequence[int] = ()
    threads: int | None = None

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Bind this process within the block, so that processes started there are bound from the start."""
        own = os.sched_getaffinity(0)
        if self.numbers:
            os.sched_setaffinity(0, self.numbers)
        try:
            yield
        finally:
            if self.numbers:
                os.sched_setaffinity(0, own)


def share_cpus(environment: dict[str, str], bind: str, ranks: range) -> dict[int, Cpus]:
    """Assign CPUs to the ranks, and limit the threads that numerical libraries start in each rank."""
    nprocs, cpus, allowed = len(ranks), usable_cpus(), os.sched_getaffinity(0)
    shares: list[list[int]] = []
    if bind != "none":
        topology = cpu_topology.read(allowed)
        shares = (cpu_topology.by_core if bind == "core" else cpu_topology.by_node)(topology, nprocs)
        if not shares:
            cores = len(cpu_topology.cores_of(topology))
            print_message(
                f"--bind core: {nprocs} ranks are more than the {cores} usable core(s), so none is bound"
            )
    threads: list[int | None] = [None] * nprocs
    if nprocs > 1 and not environment.get("OMP_NUM_THREADS"):
        # A cgroup's quota may be below the number of allowed CPUs.
        bound = [max(1, count * cpus // len(allowed)) for count in cpu_topology.threads_of(shares)]
        threads = [*(bound or [cpus_for_each(nprocs)] * nprocs)]
        where = f", bound by {bind}" if shares else ""
        set_to = cpulist.spell(count for count in threads if count)
        print_message(
            f"{nprocs} ranks on {cpus} usable CPU(s){where}: OMP_NUM_THREADS={set_to} in each rank; set it "
            "yourself to change that"
        )
    return dict(zip(ranks, map(Cpus, shares or [[]] * nprocs, threads), strict=True))
