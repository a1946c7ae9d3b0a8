"""The programs of `python -m mpi4py.bench`: a greeting, a ring, a ping-pong."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from . import rc

MPI: Any = import_module("shmring.mpi4py.MPI")
_PROGRAM = "mpi4py.bench"


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {_PROGRAM}", usage="%(prog)s [options] <command> [args]"
    )
    parser.add_argument("--threads", action="store_true", default=None, help="with threads")
    parser.add_argument("--no-threads", dest="threads", action="store_false", help="without threads")
    parser.add_argument("--thread-level", metavar="LEVEL", help="the level of support for threads")
    parser.add_argument("command", choices=sorted(_COMMANDS), help="the program to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(args)
    if options.threads is not None:
        rc.threads = options.threads
    if options.thread_level is not None:
        rc.thread_level = options.thread_level
    _COMMANDS[options.command](MPI.COMM_WORLD, options.args)


def helloworld(comm: Any, args: Sequence[str] | None = None, verbose: bool = True) -> str:
    """Print, rank after rank, a line with the rank and its host; return it."""
    options = _parser("helloworld").parse_args(args)
    line = f"Hello, World! I am process {comm.rank} of {comm.size} on {MPI.Get_processor_name()}."
    lines = comm.gather(line)
    if comm.rank == 0 and verbose and not options.quiet:
        print(*lines, sep="\n", flush=True)
    return line


def ringtest(comm: Any, args: Sequence[str] | None = None, verbose: bool = True) -> float:
    """Send a message around all ranks; return the seconds that it took."""
    parser = _parser("ringtest")
    parser.add_argument("-n", "--size", type=int, default=1, help="bytes of the message")
    parser.add_argument("-s", "--skip", type=int, default=0, help="rounds before the clock starts")
    parser.add_argument("-l", "--loop", type=int, default=1, help="rounds")
    options = parser.parse_args(args)
    sent, received = np.arange(options.size, dtype="u1"), np.empty(options.size, "u1")
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    begin_s = MPI.Wtime()
    for loop in range(options.skip + options.loop):
        if loop == options.skip:
            comm.Barrier()
            begin_s = MPI.Wtime()
        if comm.rank == 0:
            comm.Sendrecv(sent, after, 0, received, before, 0)
        else:
            comm.Recv(received, before)
            comm.Send(received, after)
    took_s = comm.allreduce(MPI.Wtime() - begin_s, MPI.MAX)
    if options.skip + options.loop > 0 and (received != sent).any():
        raise RuntimeError(f"rank {comm.rank} received another message than rank 0 sent")
    if comm.rank == 0 and verbose and not options.quiet:
        what = f"({comm.size} processes, {options.size} bytes)"
        print(f"time for {options.loop} loops = {took_s:g} seconds {what}", flush=True)
    return float(took_s)


def pingpong(
    comm: Any, args: Sequence[str] | None = None, verbose: bool = True
) -> list[tuple[int, float, float]]:
    """Time messages between ranks 0 and 1; return (bytes, mean, standard deviation in seconds) by size."""
    parser = _parser("pingpong")
    parser.add_argument("-m", "--min-size", type=int, default=1, help="bytes of the smallest message")
    parser.add_argument("-n", "--max-size", type=int, default=1 << 20, help="bytes of the largest message")
    parser.add_argument("-s", "--skip", type=int, default=100, help="messages before the clock starts")
    parser.add_argument("-l", "--loop", type=int, default=1000, help="messages each way")
    parser.add_argument("-p", "--pickle", action="store_true", help="send and receive objects")
    options = parser.parse_args(args)
    if comm.size < 2:
        raise SystemExit("pingpong needs two processes")
    is_shown = comm.rank == 0 and verbose and not options.quiet
    if is_shown:
        print("# MPI PingPong Test\n# Size [B]  Bandwidth [MB/s] | Time Mean [s] ± StdDev [s]  Samples")
    found, nbytes = [], options.min_size
    while nbytes <= options.max_size:
        times_s = _ping_pong(comm, nbytes, options)
        mean_s = statistics.fmean(times_s)
        deviation_s = statistics.stdev(times_s) if len(times_s) > 1 else 0.0
        found.append((nbytes, mean_s, deviation_s))
        if is_shown:
            speed = nbytes / mean_s / 1e6
            print(
                f"{nbytes:10d}  {speed:16.2f} | {mean_s:.7e} ± {deviation_s:.4e} {len(times_s):8d}",
                flush=True,
            )
        nbytes = 2 * nbytes or 1
    return found


def _ping_pong(comm: Any, nbytes: int, options: argparse.Namespace) -> list[float]:
    """Return the seconds of half a round trip, of each round."""
    message, room = np.zeros(nbytes, "u1"), None if options.pickle else np.empty(nbytes, "u1")
    send, recv = (comm.send, comm.recv) if options.pickle else (comm.Send, comm.Recv)
    times_s = []
    comm.Barrier()
    for loop in range(options.skip + options.loop):
        begin_s = MPI.Wtime()
        if comm.rank == 0:
            send(message, 1)
            recv(room, 1)
        elif comm.rank == 1:
            recv(room, 0)
            send(message, 0)
        if loop >= options.skip:
            times_s.append((MPI.Wtime() - begin_s) / 2)
    return times_s


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {_PROGRAM} {command}")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing")
    return parser


_COMMANDS: dict[str, Any] = {"helloworld": helloworld, "ringtest": ringtest, "pingpong": pingpong}

if __name__ == "__main__":
    main(sys.argv[1:])
