"""No wake-up is lost: here sleeps have no timeout of their own, so a rank that is not woken hangs. Two events
are polled only every 4 ms: the closing of a rank, and local ranks while another host is awaited."""

import contextlib
import os
import signal
import time

import numpy as np
import pytest
from combinations import each_value
from programs import run_program, seeds_of
from ranks import Died, Ranks
from waiting import counted_s

import shmring
from shmring._config import thresholds
from tests.collectives.test_errors import ones
from tests.p2p import test_point_to_point as messages

LINUX = tuple(int(number) for number in os.uname().release.split(".")[:2])
NEVER_NS = 600 * 10**9
SOON_S = 5
LAYOUTS = {"2": [0, 0], "3": [0, 0, 0], "5": [0] * 5, "2+1": [0, 0, 1]}


@pytest.fixture
def sleepers(monkeypatch):
    """Worlds whose waiting ranks sleep at once, until they are woken."""
    policy = thresholds.wait_policy
    endless = {
        "pauses": 1,
        "brief_pauses": 0,
        "brief_yields": 0,
        "yield_ns": 0,
        "sleep_ns": NEVER_NS,
        "poll_ns": NEVER_NS,
    }
    monkeypatch.setattr(thresholds, "wait_policy", lambda nranks, **how: policy(nranks, **how) | endless)
    with contextlib.ExitStack() as worlds:

        def meet(nodes, **environ):
            apart = {"nodes": nodes} if max(nodes) > 0 else {}
            return worlds.enter_context(Ranks(len(nodes), **apart)).meet(**environ)

        yield meet


@each_value({"layout": ["2", "3", "5", "2+1"], "chunk": [None, 256]})
def test_programs_of_collectives(sleepers, layout, chunk):
    ranks = sleepers(LAYOUTS[layout], **({"SHMRING_CHUNK": chunk, "SHMRING_DEPTH": 3} if chunk else {}))
    for seed in seeds_of((layout, chunk), 4):
        ranks(run_program, seed, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["2", "3", "5", "2+1"])
def test_programs_of_messages(sleepers, layout):
    ranks = sleepers(LAYOUTS[layout], SHMRING_MESSAGE_RING=messages.TINY)
    for seed in range(3):
        ranks(messages.run_program, seed, 60 * ranks.size, np.dtype("u1"))


def take_turns(comm, times):
    """Let each rank in turn come last and find the others asleep."""
    shared = comm.shared(1, dtype="i8", locks=1)
    shared[...] = 0
    comm.barrier()
    for number in range(times):
        time.sleep(0.002 * ((comm.rank + number) % comm.size))
        comm.barrier()
        comm.all_reduce(ones(9))
        with shared.lock(0):
            shared[0] += 1
    shared.fence()
    return int(shared[0])


@pytest.mark.parametrize("layout", ["2", "5"])
def test_who_comes_last_wakes_all(sleepers, layout):
    ranks = sleepers(LAYOUTS[layout])
    assert ranks(take_turns, 30) == [30 * ranks.size] * ranks.size


def wait_long_for_a_lock(comm):
    """Let all ranks but 0 sleep until a lock is free, so long that each then looks for signals."""
    shared = comm.shared(1, dtype="i8", locks=1)
    shared[...] = 0
    comm.barrier()
    if comm.rank == 0:
        with shared.lock(0):
            comm.barrier()
            time.sleep(0.05)
    else:
        comm.barrier()
        with shared.lock(0):
            shared[0] += 1
    shared.fence()
    return int(shared[0])


def test_a_lock_that_was_held_for_long_wakes_all(sleepers):
    ranks = sleepers(LAYOUTS["5"])
    assert ranks(wait_long_for_a_lock) == [4] * 5


def give_up_a_lock(comm):
    """Ranks 1 and 2 wait for a lock, 1 with a timeout that has passed when the lock is free."""
    shared = comm.shared(1, dtype="i8", locks=1)
    comm.barrier()
    if comm.rank == 0:
        with shared.lock(0):
            comm.barrier()
            time.sleep(0.1)
    elif comm.rank == 1:
        comm.barrier()
        with contextlib.suppress(shmring.Timeout), shared.lock(0, timeout=0.02):
            pass
    else:
        comm.barrier()
        time.sleep(0.05)  # the first wake-up is for the rank that came first
        with shared.lock(0):
            pass
    comm.barrier()
    return True


def test_a_rank_that_gives_up_a_lock_wakes_another(sleepers):
    assert sleepers(LAYOUTS["3"])(give_up_a_lock) == [True] * 3


WAITS = {
    "barrier": lambda c: c.barrier(),
    "all_reduce": lambda c: c.all_reduce(ones(9)),
    "a large all_reduce": lambda c: c.all_reduce(ones(400_000)),
    "broadcast": lambda c: c.broadcast(ones(60_000), 1),
    "in the background": lambda c: c.all_reduce(ones(60_000), async_op=True).wait(),
    "recv": lambda c: c.recv(ones(3), 1),
    "send": lambda c: c.send(ones(3_000_000), 1),
    "irecv": lambda c: c.irecv(ones(3), 1).wait(),
}


def die(comm):
    os.kill(os.getpid(), signal.SIGKILL)


def give_up(comm):
    comm.abort("enough")


def end_after_a_while(comm, wait, how):
    if comm.rank == 1:
        time.sleep(0.15)
        how(comm)
        return None
    WAITS[wait](comm)
    return "returned"


@each_value({"wait": WAITS, "how": [die, give_up]})
def test_an_end_wakes_all(sleepers, wait, how):
    if how is die and LINUX < (5, 16):
        pytest.skip("the death of a rank wakes others from Linux 5.16 on")
    ranks = sleepers(LAYOUTS["3"])
    begin = counted_s()
    outcomes = ranks.outcomes(end_after_a_while, wait, how)
    assert counted_s() - begin < SOON_S
    assert isinstance(outcomes.pop(1), Died if how is die else type(None))
    kind = shmring.RankFailed if how is die else shmring.Aborted
    assert all(isinstance(outcome, kind) and outcome.rank == 1 for outcome in outcomes), outcomes
