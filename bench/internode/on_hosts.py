"""Run a program of ranks on several hosts, which are network namespaces of this machine, so it needs root.

    python bench/internode/on_hosts.py --hosts 2 -n 1 --rate-gbit 1 bench/methods/bench_METHOD.py --sizes 1M

starts shmrun on each host, as one would by hand on two machines, and exits with the greatest exit status.
Uses tests/support/hosts.py.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))  # for hosts

from hosts import GBIT_S, Hosts

PORT = 29411   # in namespaces of our own nobody else has it


def parse_arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("-n", "--ranks", type=int, default=1, help="on each host (%(default)s)")
    parser.add_argument("--rate-gbit", type=float, help="of each host's link; no limit unless given")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="and its arguments")
    options = parser.parse_args()
    if not options.program:
        parser.error("which program?")
    return options


def main() -> int:
    options = parse_arguments()
    rate_bit_s = None if options.rate_gbit is None else int(options.rate_gbit * GBIT_S)
    environ = {**os.environ, "SHMRING_KEY": secrets.token_hex(16)}
    with Hosts(options.hosts, rate_bit_s) as hosts:
        started = [
            host.start(sys.executable, "-m", "shmring.run", "--no-prefix", "--nnodes", options.hosts,
                       "--node-rank", host.index, "--rdzv", f"{hosts[0].address}:{PORT}", "-n", options.ranks,
                       *options.program, env={**environ, "SHMRING_NODE": str(host.index)})
            for host in hosts
        ]
        return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
