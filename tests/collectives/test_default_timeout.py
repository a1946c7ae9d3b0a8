"""The default timeout of calls, which `comm.timeout_s` changes."""

import time

import numpy as np
import pytest
from waiting import counted_s

import shmring

CALLS = {
    "collective": lambda comm: comm.all_reduce(np.ones(3)),
    "background": lambda comm: comm.all_reduce(np.ones(3), async_op=True).wait(),
    "uneven": lambda comm: comm.all_gather_v(np.ones(comm.rank + 1)),
    "object": lambda comm: comm.all_gather_object(None),
    "message": lambda comm: comm.recv(np.ones(3), 1),
    "split": lambda comm: comm.split(0),
}


def wait_in_vain(comm, kind):
    """Return the seconds after which rank 0 gives up, or None."""
    assert comm.timeout_s > 10  # that of the world
    comm.timeout_s = 12.0
    comm.barrier()
    if comm.rank != 0:
        time.sleep(1.5)
        return None
    comm.timeout_s = 0.2
    began_s, began = time.monotonic(), counted_s()
    with pytest.raises(shmring.Timeout, match=r"0\.2 s"):
        CALLS[kind](comm)
    return time.monotonic() - began_s, counted_s() - began


@pytest.mark.parametrize("kind", CALLS)
def test_calls_end_after_the_default_timeout(world_of, kind):
    (first_s, counted), _ = world_of(2)(wait_in_vain, kind)
    assert first_s > 0.15
    assert counted < 10  # far below the former ones


def inherit(comm):
    comm.timeout_s = 7
    part = comm.split(0)
    return comm.timeout_s, part.timeout_s


def test_a_communicator_made_by_another_has_its_default(world_of):
    assert world_of(2)(inherit) == [(7.0, 7.0)] * 2


@pytest.mark.parametrize("wrong", [0, -1, None, float("nan"), "1", True])
def test_wrong_values_change_nothing(wrong):
    with shmring.init(timeout=9) as comm:
        with pytest.raises((TypeError, ValueError), match=rf"timeout_s is {wrong!r}; .* more than 0"):
            comm.timeout_s = wrong
        assert comm.timeout_s == 9.0


@pytest.mark.parametrize("wrong", [False, True, "1", b"1", [1]])
def test_the_timeout_of_a_world_is_a_number(wrong):
    for begin in (shmring.init, lambda timeout: shmring.spawn(print, 1, timeout=timeout)):
        with pytest.raises(TypeError, match=r"timeout is .*number of seconds"):
            begin(timeout=wrong)
