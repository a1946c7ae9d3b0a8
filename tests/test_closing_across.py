"""What a communicator over several hosts does when it is closed: nothing is received into memory that is its
owner's again.

May know: ranks; the public API of shmring.
"""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

import shmring

APART = [0, 1]

# ---- memory that is its owner's again ----------------------------------------------------------------------

HUGE_NBYTES = 10**8  # memory of a mapping of its own: who writes there once it is freed is killed


def close_in_the_middle(comm, how):
    """Rank 1 begins to receive, and closes while more comes."""
    if comm.rank == 0:
        with contextlib.suppress(shmring.RankFailed):
            comm.send(np.ones(HUGE_NBYTES, "u1"), 1)
        return True
    x = np.zeros(HUGE_NBYTES, "u1")
    if how == "irecv":
        comm.irecv(x, 0)
        while not x[0]:
            time.sleep(0.0001)
    else:
        interrupt_once_there(x)
        with pytest.raises(KeyboardInterrupt):
            comm.recv(x, 0)
    del x
    comm.close()
    return True


def interrupt_once_there(x):
    def watch():
        while not x[0]:
            time.sleep(0.0001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch).start()


@pytest.mark.parametrize("how", ["irecv", "recv"])
def test_nothing_is_received_into_memory_that_was_freed(world_across, how):
    for _ in range(3):
        assert world_across(APART)(close_in_the_middle, how) == [True, True]
