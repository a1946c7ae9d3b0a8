"""The state of ranks as tests see it: the rank that each waits for, and whether the communicator was
aborted."""

import os
import threading
import time

from waiting import wait_until

from shmring.tools import _attach


def own_flight():
    """Return the flight recorder of this process's one communicator, as other processes see it."""
    (flight,) = [one.flight for one in _attach.of_processes([os.getpid()]) if one.flight]  # not of arrays
    return flight


def until_given_up():
    """Waits until another rank has given up the one communicator of this process."""
    wait_until(lambda: own_flight().abort_report() is not None, "another rank has given up")


def until_others_call(comm):
    """Block until all other ranks, of this host, have begun a call that this rank has not made."""
    own = own_flight().last_of(comm.rank)["seq"]

    def others_call():
        flight = own_flight()
        return all(flight.last_of(rank)["seq"] > own for rank in range(comm.size) if rank != comm.rank)

    wait_until(others_call, "all other ranks are in a call")


def signal_in_a_call(comm, *signals):
    """Send this process signals once its one communicator has a call under way; return the thread that does
    it."""

    def send():
        while own_flight().last_of(comm.local_rank)["outcome"] != "under way":
            time.sleep(0.005)
        time.sleep(0.2)  # for a call behind another one: the record shows only the first of them
        for number in signals:
            os.kill(os.getpid(), number)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    return sending


def place_once_it_waits(ranks, rank):
    """Return the position of a rank in a long wait for another, as other processes see it."""

    def place_of_a_wait():
        (segment,) = _attach.of_processes([ranks.pid(rank)])
        place = _attach.rank_state(segment.flight, rank)["where"]
        return place if "waiting" in place else None

    return wait_until(place_of_a_wait, f"rank {rank} waits for another", ranks)
