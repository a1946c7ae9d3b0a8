"""A call with async_op=True that stays with its caller for a moment before the background gets it."""

import gc
import time
import weakref

import numpy as np
import pytest


def lingering(comm, linger_s, late_s):
    """Let rank 1 come late; return when it came, when the others got their Work, and its state then."""
    comm.linger_s = linger_s
    x = np.full(1000, comm.rank + 1.0)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(late_s)
        came = time.monotonic()
    work = comm.all_reduce(x, async_op=True)
    if comm.rank != 1:
        came = time.monotonic()
    was_done = work.done()
    work.wait()
    kept = weakref.ref(x)
    assert (x == comm.size * (comm.size + 1) / 2).all()
    del x, work
    gc.collect()
    return came, was_done, kept() is None


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize(
    ("linger_s", "late_s", "stays"), [(0.0, 0.1, False), (0.002, 0.1, False), (0.05, 0.01, True)]
)
def test_a_call_stays_with_its_caller_for_a_moment(world_of, size, linger_s, late_s, stays):
    """And no longer; once it is done nothing keeps its arrays."""
    ranks = world_of(size)
    for _ in range(20):  # on a busy machine any rank may be delayed
        (returned, was_done, is_free), (came, _, _), *_ = found = ranks(lingering, linger_s, late_s)
        assert is_free or not was_done, found
        if (returned > came) == stays and (was_done or not stays):
            return
    raise AssertionError(found)


def come_late(comm):
    """Return the seconds that each of three calls takes for rank 0, while rank 1 comes late."""
    comm.linger_s = 0.05
    taken = []
    for _ in range(3):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.1)
        begin = time.monotonic()
        work = comm.all_reduce(np.ones(1000), async_op=True)
        taken.append(time.monotonic() - begin)
        work.wait()
    return taken


def test_a_call_waits_less_after_one_that_waited_in_vain(world_of):
    ranks = world_of(2)
    for _ in range(20):  # on a busy machine any rank may be delayed
        first, _, third = taken = ranks(come_late)[0]
        if third < first / 2:
            return
    raise AssertionError(taken)


def wrong_linger(comm):
    for wrong in (-1.0, 0.06, float("nan")):
        with pytest.raises(ValueError, match="linger_s"):
            comm.linger_s = wrong
    with pytest.raises(TypeError):
        comm.linger_s = "long"
    comm.linger_s = 0.05
    return comm.linger_s


def test_how_long_a_call_stays_is_a_number_of_seconds(world_of):
    assert world_of(2)(wrong_linger) == [0.05] * 2
