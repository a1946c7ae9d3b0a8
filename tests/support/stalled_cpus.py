"""Run a command on CPUs that stall at times, as those of a shared machine do. A test that fails only then
takes a delay for a fault. python tests/support/stalled_cpus.py pytest, as root."""

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import time

FORK = multiprocessing.get_context("fork")
PRIORITY = 10  # of SCHED_FIFO: before all that is not of the kernel


def stand_still(cpu, arguments, begin_s):
    """Holds a CPU now and then. All draw the same numbers, so that all CPUs stand still at the same time."""
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    chance = random.Random(arguments.seed)
    at_s = begin_s
    while True:
        at_s += chance.uniform(0.5, 1.5) * arguments.every
        time.sleep(max(0.0, at_s - time.monotonic()))
        at_s += chance.uniform(0.2, 1) * arguments.longest
        while time.monotonic() < at_s:
            pass


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=float, default=4.0, metavar="SECONDS", help="between two, on average")
    parser.add_argument("--longest", type=float, default=0.8, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root, who may hold a CPU")
    begin_s = time.monotonic()
    for cpu in os.sched_getaffinity(0):
        FORK.Process(target=stand_still, args=(cpu, arguments, begin_s), daemon=True).start()
    return subprocess.run(arguments.command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
