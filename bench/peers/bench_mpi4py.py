"""shmring's stand-in for mpi4py beside mpi4py on MPI, call by call: python bench/peers/bench_mpi4py.py --help

Each round launches every contestant once, in turn; the figure of a call is the least of its medians. The
ranks are pinned. Compare only the ratios of one run. Contains the command line, the calls, the program of a
rank and the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated
from bench.peers import install_peers
from bench.peers.contestants import MPI_PEERS, chosen

FACADE, DIRECT = "shmring as mpi4py", "shmring"
SAMPLES = 5
LAUNCH_TIMEOUT_S = 300.0
SMALL_OBJECT = {"a": 1, "b": [1, 2, 3]}
LARGE_COUNT = 8 << 20  # float64: 64 MiB
# Two launches differ in their pages by more than the stand-in costs, so it is compared within its own launch.
LARGE, LARGE_DIRECTLY = "Allreduce 64 MiB", "all_reduce of the same 64 MiB"
Run = Callable[[], Any]


def calls_of_mpi4py(skip_large: bool) -> dict[str, Run]:
    """Return the calls by name, on mpi4py's interface."""
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    x, y = np.ones(1), np.zeros(1)
    persistent = comm.Allreduce_init(x, y)

    def start_and_wait() -> None:
        persistent.Start()
        persistent.Wait()

    calls: dict[str, Run] = {
        "Allreduce 8 B": lambda: comm.Allreduce(x, y),
        "persistent Allreduce 8 B": start_and_wait,
        "Iallreduce + Wait 8 B": lambda: comm.Iallreduce(x, y).Wait(),
        "Bcast 8 B": lambda: comm.Bcast(x),
        "Barrier": comm.Barrier,
        "Send/Recv 8 B, there and back": there_and_back(
            rank, lambda peer: comm.Send(x, peer), lambda peer: comm.Recv(y, peer)),
        "send/recv of an object, there and back": there_and_back(
            rank, lambda peer: comm.send(SMALL_OBJECT, peer), lambda peer: comm.recv(source=peer)),
        "bcast of an object": lambda: comm.bcast(SMALL_OBJECT),
        "allgather of an object": lambda: comm.allgather(SMALL_OBJECT),
    }
    if not skip_large:
        large, result = np.ones(LARGE_COUNT), np.zeros(LARGE_COUNT)
        calls[LARGE] = lambda: comm.Allreduce(large, result)
        if MPI.get_vendor()[0] == "shmring":
            engine = comm._ref.comm
            calls[LARGE_DIRECTLY] = lambda: engine.all_reduce(large, out=result)
    return calls


def calls_of_shmring(comm: Any, skip_large: bool) -> dict[str, Run]:
    """Return the same calls by the same names, on shmring's own interface."""
    import numpy as np

    rank = comm.rank
    x, y = np.ones(1), np.zeros(1)
    plan = comm.plan("all_reduce", x, out=y)
    calls: dict[str, Run] = {
        "Allreduce 8 B": lambda: comm.all_reduce(x, out=y),
        "persistent Allreduce 8 B": plan,
        "Iallreduce + Wait 8 B": lambda: comm.all_reduce(x, out=y, async_op=True).wait(),
        "Bcast 8 B": lambda: comm.broadcast(x),
        "Barrier": comm.barrier,
        "Send/Recv 8 B, there and back": there_and_back(
            rank, lambda peer: comm.send(x, peer), lambda peer: comm.recv(y, peer)),
        "send/recv of an object, there and back": there_and_back(
            rank, lambda peer: comm.send_object(SMALL_OBJECT, peer), comm.recv_object),
        "bcast of an object": lambda: comm.broadcast_object(SMALL_OBJECT),
        "allgather of an object": lambda: comm.all_gather_object(SMALL_OBJECT),
    }
    if not skip_large:
        large, result = np.ones(LARGE_COUNT), np.zeros(LARGE_COUNT)
        calls[LARGE] = lambda: comm.all_reduce(large, out=result)
    return calls


def there_and_back(rank: int, send: Callable[[int], Any], recv: Callable[[int], Any]) -> Run:
    """Return a round trip between ranks 0 and 1; the others do nothing."""
    def first() -> None:
        send(1)
        recv(1)

    def second() -> None:
        recv(0)
        send(0)

    return [first, second][rank] if rank < 2 else lambda: None


def run_rank(options: argparse.Namespace) -> None:
    """Run the program of a rank: time every call, and print µs by call on rank 0."""
    if options.as_rank == DIRECT:
        import shmring

        comm = shmring.init()
        calls = calls_of_shmring(comm, options.skip_large)
        rank, barrier = comm.rank, comm.barrier
        all_seconds: Callable[[float], list[float]] = comm.all_gather_object
    else:
        from mpi4py import MPI

        calls = calls_of_mpi4py(options.skip_large)
        world = MPI.COMM_WORLD
        rank, barrier = world.Get_rank(), world.Barrier
        all_seconds = world.allgather
    in_turn = [name for name in (LARGE, LARGE_DIRECTLY) if name in calls]
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    found = {}
    for names in [[name] for name in calls if name not in (LARGE, LARGE_DIRECTLY)] + [in_turn]:
        us = time_calls([calls[name] for name in names], options.sample_s, barrier, all_seconds)
        found.update(zip(names, us, strict=True))
    if rank == 0:
        print(json.dumps(found), flush=True)


def time_calls(
    calls: list[Run], sample_s: float, barrier: Run, all_seconds: Callable[[float], list[float]]
) -> list[float]:
    """Return the medians of a few samples of each call, taken in turn, in µs per call."""
    def seconds(call: Run, loops: int) -> float:
        barrier()
        begin = time.perf_counter()
        for _ in range(loops):
            call()
        return max(all_seconds(time.perf_counter() - begin))  # of the slowest rank

    loops = 1
    for call in calls:
        while (took_s := seconds(call, loops)) < sample_s / 2:
            loops = max(2 * loops, min(8 * loops, int(loops * sample_s / max(took_s, 1e-9))))
    samples = [[seconds(call, loops) for call in calls] for _ in range(SAMPLES)]
    return [1e6 * statistics.median(of_one) / loops for of_one in zip(*samples, strict=True)]


def contestants(options: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return by contestant the command that launches its ranks, without a program, and the environment."""
    is_crowded = options.ranks > len(os.sched_getaffinity(0))
    run = [sys.executable, "-m", "shmring.run", "--no-prefix", f"-n{options.ranks}"]
    checkout = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    own = {**os.environ, "PYTHONPATH": checkout.rstrip(os.pathsep)}
    found = {FACADE: ([*run, "--mpi4py"], own), DIRECT: (run, own)}
    for peer in chosen(list(MPI_PEERS), options.dir):
        if peer.name in options.only and peer.launcher:
            more = peer.oversubscribed_launcher if is_crowded else ()
            command = [*peer.launcher, *more, "-n", str(options.ranks), str(peer.python)]
            found[peer.name] = command, peer.process_environment(oversubscribed=is_crowded)
    return found


def launch(name: str, command: list[str], environment: dict[str, str],
           options: argparse.Namespace) -> dict[str, float]:
    """Run a contestant once; return µs by call."""
    program = [str(Path(__file__).resolve()), f"--as-rank={name}", f"--sample-s={options.sample_s}"]
    program += ["--skip-large"] * options.skip_large
    done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True,
                          timeout=LAUNCH_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed with exit code {done.returncode}:\n{done.stderr or done.stdout}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_table(best: dict[str, dict[str, float]]) -> None:
    """Print µs by call and contestant, and the ratios of the stand-in."""
    mpis = [name for name in best if name not in (FACADE, DIRECT)]
    print("| call | " + " | ".join([*best, "to shmring", "to the fastest MPI"]) + " |")
    print("|---" * (len(best) + 3) + "|")
    for call, us in best[FACADE].items():
        if call == LARGE_DIRECTLY:
            continue
        direct = best[FACADE][LARGE_DIRECTLY] if call == LARGE else best[DIRECT][call]
        fastest = min((best[name][call] for name in mpis), default=None)
        ratios = [f"{us / direct:.2f}", "-" if fastest is None else f"{us / fastest:.2f}"]
        print(f"| {call} | " + " | ".join([*(f"{best[name][call]:.2f}" for name in best), *ratios]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="default %(default)s")
    add("--rounds", type=int, default=5, help="launches of each contestant (%(default)s)")
    add("--sample-s", type=float, default=0.02, help="seconds of one timed loop (%(default)s)")
    add("--skip-large", action="store_true", help="leave 64 MiB out")
    add("--dir", type=Path, default=install_peers.default_folder(), help="where MPI lies (%(default)s)")
    add("--only", type=comma_separated(str, list(MPI_PEERS)), default=list(MPI_PEERS),
        help="the MPI libraries, where they are installed: " + ",".join(MPI_PEERS))
    add("--json", type=Path, help="write every launch there")
    add("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        run_rank(options)
        return
    everybody = contestants(options)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in everybody}
    for _ in range(options.rounds):
        for name, (command, environment) in everybody.items():
            rounds[name].append(launch(name, command, environment, options))
    best = {name: {call: min(one[call] for one in found) for call in found[0]}
            for name, found in rounds.items()}
    print(f"µs, {options.ranks} ranks, the least of {options.rounds} medians\n")
    print_table(best)
    if options.json is not None:
        options.json.write_text(json.dumps({"ranks": options.ranks, "us": rounds}, indent=1))


if __name__ == "__main__":
    main()
