"""Reduction servers beside the ordinary hierarchical all-reduce of the same workers, in turn.

    python bench/internode/on_hosts.py --hosts 6 -n 1 --rate-gbit 0.25 \
        bench/methods/bench_reducers.py --reducer-hosts 3

A program of ranks: those of the last hosts are the reducers, the others the workers of both ways. Beside the
times, ratios: what the links alone would allow, and what was measured. A host of H sends 2(H - 1)/H of a
message in the hierarchy, and with R hosts of reducers the greater of 1 and, on a reducer's link, H/R.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import shmring
from shmring.methods.reducers import ReductionServers

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the checkout: for bench

from bench.common.arguments import comma_separated, parse_size
from bench.common.turns import in_turn, pin, state_of

HEAD = ("| message | hierarchy ms | reduction servers ms | hierarchy / servers | by the links alone |\n"
        "|---|---|---|---|---|")


def measure(servers: ReductionServers, workers: shmring.Comm, sizes: list[int], rounds: int,
            sample_s: float) -> list[dict[str, float]]:
    """Return the seconds of each way and size, the same on every worker."""
    found = []
    for nbytes in sizes:
        x = np.zeros(nbytes // 4, "f4")
        ways = {"hierarchy": lambda x=x: workers.all_reduce(x),
                "servers": lambda x=x: servers.all_reduce(x)}
        found.append({"nbytes": nbytes, **in_turn(workers, ways, rounds, sample_s)})
    return found


def links_allow(hosts: int, reducer_hosts: int) -> float:
    """Return the hierarchy's time over that of reduction servers if only the links take time."""
    return 2 * (hosts - 1) / hosts / max(1.0, hosts / reducer_hosts)


def table(rows: list[dict[str, float]], allowed: float) -> str:
    lines = [f"| {row['nbytes'] / 2**20:g} MiB | {row['hierarchy'] * 1e3:.1f} | {row['servers'] * 1e3:.1f} | "
             f"{row['hierarchy'] / row['servers']:.2f} | {allowed:.2f} |" for row in rows]
    return "\n".join([HEAD, *lines])


def parse_arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--sizes", type=comma_separated(parse_size), default="64K,1M,16M", help="bytes (%(default)s)")
    add("--reducer-hosts", type=int, default=1, help="the last so many (%(default)s)")
    add("--chunk", type=parse_size, default="64K", help="bytes of a piece, at most (%(default)s)")
    add("--depth", type=int, default=4, help="pieces under way (%(default)s)")
    add("--rounds", type=int, default=5)
    add("--sample-s", type=float, default=0.2, help="seconds of one sample (%(default)s)")
    add("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    with shmring.init() as comm:
        pin(comm)
        hosts = comm.num_nodes - options.reducer_hosts
        if hosts < 1:
            raise SystemExit(f"--reducer-hosts {options.reducer_hosts} of {comm.num_nodes} leave no workers")
        nodes = comm.all_gather(np.array(comm.node))
        reducers = np.flatnonzero(nodes >= hosts).tolist()
        workers = comm.group(np.flatnonzero(nodes < hosts).tolist())
        with ReductionServers(comm, reducers, chunk_nbytes=options.chunk, depth=options.depth) as servers:
            if servers.is_reducer:
                servers.serve()
                return
            rows = measure(servers, workers, options.sizes, options.rounds, options.sample_s)
        if comm.rank == 0:
            where = f"{state_of(workers)}; {len(reducers)} reducers on {options.reducer_hosts} other hosts"
            print(f"{table(rows, links_allow(hosts, options.reducer_hosts))}\n\n{where}", flush=True)
            if options.json:
                facts = {"hosts": hosts, "reducer_hosts": options.reducer_hosts, "where": where}
                options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
