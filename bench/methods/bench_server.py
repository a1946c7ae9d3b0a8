"""One exchange, gradients in and updated weights out: a parameter server beside all_reduce and the update.

    shmrun -n 4 bench/methods/bench_server.py --sizes 64K,1M,16M
    sudo python bench/internode/on_hosts.py --hosts 4 -n 1 --rate-gbit 1 \
        bench/methods/bench_server.py --sizes 16M --rounds 3

A program of ranks, each of which works, but for rank 0 in the last line. One host only: the ring, and
`one-sided`, which is asynchronous, each rank at its own pace. The textbook's bytes, of N workers and D bytes:
2ND through one server, a share of that through each of several, and 2(N-1)D/N that each sends for an
all-reduce. Counted: what the busiest rank sent over the wire; what a rank that only serves took and gave.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import shmring
from shmring.methods.server import SGD, ParameterServer

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import SAMPLE_S, in_turn, pin, state_of

MIB = 1 << 20
RATE = 1e-6
SERVES = "rank 0 only serves"


def by_all_reduce(comm: shmring.Comm, count: int, algorithm: str) -> Callable[[], None]:
    gradient, weights = np.zeros(count, "f4"), np.zeros(count, "f4")
    scaled = np.empty_like(gradient)

    def exchange() -> None:
        comm.all_reduce(gradient, algorithm=algorithm)
        np.multiply(gradient, RATE, out=scaled)
        np.subtract(weights, scaled, out=weights)

    return exchange


def ways_of(comm: shmring.Comm, count: int) -> tuple[dict[str, Callable[[], None]], list[ParameterServer]]:
    gradient, weights = np.zeros(count, "f4"), np.zeros(count, "f4")
    settings: dict[str, dict[str, int | None]] = {"one server": {"servers": 1}}
    if comm.size > 1:
        settings[f"{comm.size} servers"] = {"servers": comm.size}
    if comm.num_nodes == 1:
        settings["one-sided"] = {"staleness": None}
    servers = {name: ParameterServer(comm, weights, SGD(RATE), **how)
               for name, how in settings.items()}
    algorithms = ("auto", "ring") if comm.num_nodes == 1 else ("auto",)
    ways = {f"all_reduce, {name}": by_all_reduce(comm, count, name) for name in algorithms}
    for name, server in servers.items():
        ways[name] = lambda server=server: server.step(gradient, weights)
    return ways, list(servers.values())


def served(comm: shmring.Comm, nbytes: int, rounds: int, sample_s: float) -> tuple[float, int]:
    """Return the seconds of an exchange by messages with rank 0, which only serves, and the bytes that it
    moves."""
    gradient, weights = np.zeros(nbytes // 4, "f4"), np.zeros(nbytes // 4, "f4")
    workers = comm.split(int(comm.rank > 0))
    exchanges, time_s = 0, 0.0

    def exchange() -> None:
        nonlocal exchanges
        server.step(gradient, weights)
        exchanges += 1

    with ParameterServer(comm, weights, SGD(RATE), servers=[0]) as server:
        if server.serves:
            server.serve()
        else:
            time_s = in_turn(workers, {"": exchange}, rounds, sample_s)[""]
    time_s, exchanges = comm.broadcast_object((time_s, exchanges), comm.size - 1)
    return time_s, comm.broadcast_object(server.served_nbytes) // exchanges


def textbook_nbytes(way: str, ranks: int, nbytes: int) -> float:
    if way.startswith("all_reduce"):
        return 2 * (ranks - 1) * nbytes / ranks
    if way == SERVES:
        return 2 * (ranks - 1) * nbytes
    return 2 * nbytes if way == f"{ranks} servers" else 2 * ranks * nbytes


def wire_nbytes(comm: shmring.Comm, way: Callable[[], None]) -> int:
    """Return the bytes that the busiest rank sends in one exchange."""
    comm.barrier()
    before = comm.stats()["bytes_over_wire"]
    way()
    sent = np.array([comm.stats()["bytes_over_wire"] - before])
    comm.all_reduce(sent, "max")
    return int(sent[0])


def measure(comm: shmring.Comm, nbytes: int, rounds: int, sample_s: float) -> Iterator[dict[str, object]]:
    ways, servers = ways_of(comm, nbytes // 4)
    counted = {name: wire_nbytes(comm, way) for name, way in ways.items()}
    times = in_turn(comm, ways, rounds, sample_s)
    for server in servers:
        server.close()
    if comm.size > 1:
        times[SERVES], counted[SERVES] = served(comm, nbytes, rounds, sample_s)
    for name, time_s in times.items():
        yield {"nbytes": nbytes, "way": name, "s": time_s,
               "to_all_reduce": time_s / times["all_reduce, auto"],
               "textbook_nbytes": textbook_nbytes(name, comm.size, nbytes), "counted_nbytes": counted[name]}


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--sizes", type=comma_separated(parse_size), default="64K,1M,16M",
                        help="of the gradient, bytes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-s", type=float, default=SAMPLE_S,
                        help="how long one way is timed (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with shmring.init() as comm:
        if comm.num_nodes == 1:   # stand-ins for hosts would all begin with the first CPU
            pin(comm)
        rows = [row for nbytes in options.sizes
                for row in measure(comm, nbytes, options.rounds, options.sample_s)]
        if comm.rank != 0:
            return
        print(f"{state_of(comm)}\n")
        print("| gradient | way | an exchange | / all_reduce | textbook | counted |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            print(f"| {row['nbytes'] / MIB:.4g} MiB | {row['way']} | {row['s'] * 1e3:.3f} ms "
                  f"| {row['to_all_reduce']:.2f} | {row['textbook_nbytes'] / MIB:.4g} MiB "
                  f"| {row['counted_nbytes'] / MIB:.4g} MiB |", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"state": state_of(comm), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
