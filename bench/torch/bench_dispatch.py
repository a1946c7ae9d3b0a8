"""Tiny calls of torch.distributed on shmring, and on a group that does nothing: what torch's Python takes,
and what shmring adds to it. python bench/torch/bench_dispatch.py --rounds 200

All kinds of calls take turns in blocks, so a busy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.append(str(CHECKOUT))  # for bench

import torch  # noqa: E402  (found by the line above)
import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402

from bench.common.tables import aligned, format_us  # noqa: E402
from shmring.adapters.torch import register_backend  # noqa: E402

NPROCS = 2
WARM_UP = 3
TARGET_US = 2.0  # of dist.all_reduce
FORK = multiprocessing.get_context("fork")


def empty_group(group: Any) -> Any:
    """Return a group of the same ranks whose calls do nothing."""

    class Empty(dist.ProcessGroup):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__(group.rank(), group.size())

        def nothing(self, *_: Any) -> None:
            pass

        allreduce = broadcast = nothing
        all_gather_single = _allgather_base = reduce_scatter_single = _reduce_scatter_base = nothing
        rank, size = (lambda self: group.rank()), (lambda self: group.size())

    empty = Empty()
    for table in (c10d._world.pg_map, c10d._world.pg_group_ranks):
        table[empty] = table[group]  # type: ignore[index, unused-ignore]
    return empty


def calls_on(group: Any) -> dict[str, Callable[[], Any]]:
    x, whole = torch.zeros(2), torch.zeros(2 * NPROCS)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "all_gather": lambda: gather(whole, x, group=group),
        "reduce_scatter": lambda: scatter(x, whole, group=group),
    }


def be_rank(pipe: Any, rank: int, folder: str, rounds: int, count: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of names that torch replaces
    register_backend()
    dist.init_process_group("shmring", init_method=f"file://{folder}/meeting", rank=rank, world_size=NPROCS)
    group: Any = dist.group.WORLD
    kinds = {"torch alone": calls_on(empty_group(group)), "shmring": calls_on(group)}
    comm, x = group.comm, torch.zeros(2)
    kinds["comm"] = {"all_reduce": lambda: comm.all_reduce(x)}
    us: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds + WARM_UP):
        for kind, calls in kinds.items():
            for name, call in calls.items():
                comm.barrier()
                begin_ns = time.perf_counter_ns()
                for _ in range(count):
                    call()
                us.setdefault((name, kind), []).append((time.perf_counter_ns() - begin_ns) / count / 1e3)
    comm.barrier()
    dist.destroy_process_group()
    pipe.send({key: statistics.median(times[WARM_UP:]) for key, times in us.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=200, help="blocks of each call (%(default)s)")
    add("--count", type=int, default=300, help="calls of a block (%(default)s)")
    options = parser.parse_args()
    ours, theirs = FORK.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            FORK.Process(target=be_rank, args=(theirs, rank, folder, options.rounds, options.count))
            for rank in range(NPROCS)
        ]
        for process in ranks:
            process.start()
        theirs.close()  # so that the end of a rank is the end of the pipe
        found, _ = ours.recv(), ours.recv()
        for process in ranks:
            process.join()
    lines = [["8 B a rank, µs", "torch alone", "shmring", "its share", "comm"]]
    for name in dict.fromkeys(name for name, _ in found):
        alone, whole = found[name, "torch alone"], found[name, "shmring"]
        direct = format_us(found[name, "comm"]) if (name, "comm") in found else "-"
        lines.append([name, format_us(alone), format_us(whole), format_us(whole - alone), direct])
    print(f"2 ranks, torch {torch.__version__}; all_reduce is to take at most {TARGET_US} µs")
    print(aligned(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
