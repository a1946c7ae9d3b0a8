"""The state of ranks as tests see it: the rank that each waits for, and whether the communicator was
aborted."""

import os
import time

from shmring.tools import _attach


def own_flight():
    """Return the flight recorder of this process's one communicator, as other processes see it."""
    (segment,) = _attach.of_processes([os.getpid()])
    return segment.flight


def until_given_up():
    """Waits until another rank has given up the one communicator of this process."""
    while own_flight().abort_report() is None:
        time.sleep(0.005)


def place_once_it_waits(ranks, rank):
    """Return the position of a rank in a long wait for another, as other processes see it."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        (segment,) = _attach.of_processes([ranks.pid(rank)])
        place = _attach.rank_state(segment.flight, rank)["where"]
        if "waiting" in place:
            return place
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} waits for nobody: {place}")
