"""The time to start ranks, make one all_reduce and end, beside plain processes and MPI's launchers.

    python bench/peers/bench_start.py [--ranks 2,8,32,128] [--rounds 5] [--only spawn,shmrun,mpich]

Each way is timed in turn, from its start until all its processes have ended. `fork` starts and joins
processes of multiprocessing that do nothing. The figures are medians in seconds. Programs of `shmrun` and
`mpiexec` import NumPy in each process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shmring

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated
from bench.common.tables import aligned
from bench.peers import install_peers
from bench.peers.contestants import MPI_PEERS, Contestant, chosen

WAYS = ("fork", "spawn", "shmrun", *MPI_PEERS)
LONGEST_S = 120.0

OURS = """
import numpy as np, shmring
with shmring.init() as comm:
    x = np.ones(1)
    comm.all_reduce(x)
    assert x[0] == comm.size
"""
MPI = """
import numpy as np
from mpi4py import MPI
y = np.zeros(1)
MPI.COMM_WORLD.Allreduce(np.ones(1), y)
assert y[0] == MPI.COMM_WORLD.size
"""


def nothing() -> None:
    pass


def fork(nranks: int) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=nothing) for _ in range(nranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def total(comm: shmring.Comm) -> float:
    x = np.ones(1)
    comm.all_reduce(x)
    return float(x[0])


def spawn(nranks: int) -> None:
    assert shmring.spawn(total, nranks, method="fork") == [nranks] * nranks


def run(command: list[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, timeout=LONGEST_S, env=environment, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)


def shmrun(program: Path) -> Callable[[int], None]:
    def start(nranks: int) -> None:
        run([sys.executable, "-m", "shmring.run", "-n", str(nranks), str(program)])

    return start


def mpiexec(peer: Contestant, program: Path) -> Callable[[int], None]:
    def start(nranks: int) -> None:
        oversubscribed = nranks > len(os.sched_getaffinity(0))
        extra = peer.oversubscribed_launcher if oversubscribed else ()
        run([*peer.launcher, *extra, "-n", str(nranks), str(peer.python), str(program)],
            peer.process_environment(oversubscribed=oversubscribed))

    return start


def measure(ways: dict[str, Callable[[int], None]], nranks: int, rounds: int) -> list[str]:
    """Return a row: the median of each way; "-" if it fails or takes too long."""
    taken_s: dict[str, list[float]] = defaultdict(list)
    failed = set()
    for _ in range(rounds):
        for name, start in ways.items():
            if name in failed:
                continue
            begin_s = time.perf_counter()
            try:
                start(nranks)
            except subprocess.SubprocessError:
                failed.add(name)
            taken_s[name].append(time.perf_counter() - begin_s)
    medians = {name: statistics.median(times) for name, times in taken_s.items() if name not in failed}
    return [str(nranks), *(f"{medians[name]:.3f}" if name in medians else "-" for name in ways)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=comma_separated(int), default=[2, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=comma_separated(str), default=list(WAYS), help=f"of {','.join(WAYS)}")
    parser.add_argument("--peers", type=Path, default=install_peers.default_folder(), help="folder of MPIs")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shmring-start-") as folder:
        ours, theirs = Path(folder) / "ours.py", Path(folder) / "theirs.py"
        ours.write_text(OURS)
        theirs.write_text(MPI)
        peers = {peer.name: peer for peer in chosen(asked.only, asked.peers) if peer.launcher}
        ways: dict[str, Callable[[int], None]] = {"fork": fork, "spawn": spawn, "shmrun": shmrun(ours)}
        ways = {name: start for name, start in ways.items() if name == "fork" or name in asked.only}
        ways |= {name: mpiexec(peer, theirs) for name, peer in peers.items()}
        rows = [["ranks", *ways]]
        for nranks in asked.ranks:
            rows.append(measure(ways, nranks, asked.rounds))
            print(f"{nranks} ranks done, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(aligned(rows))


if __name__ == "__main__":
    main()
