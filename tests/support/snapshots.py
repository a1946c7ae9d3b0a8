"""What tests see of ranks: who waits for whom, and whether the communicator was given up."""

import os
import time

from shmring.tools import _attach


def own_flight():
    """What this rank's process shows of its one communicator to whoever looks from outside."""
    (segment,) = _attach.of_processes([os.getpid()])
    return segment.flight


def until_given_up():
    """Waits until another rank has given up the one communicator of this process."""
    while own_flight().abort_report() is None:
        time.sleep(0.005)


def place_once_it_waits(ranks, rank):
    """Where a rank is that waits at length for another, as who looks from outside sees it."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        (segment,) = _attach.of_processes([ranks.pid(rank)])
        place = _attach.rank_seen(segment.flight, rank)["where"]
        if "waiting" in place:
            return place
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} waits for nobody: {place}")
