"""Far more ranks than CPUs: waits in an order of their own, and deaths that only some ranks watch for."""

import os
import signal

import numpy as np
import pytest

import shmring

RANKS = 40  # more than MANY_RANKS of _core/group.pxd and MOST_WATCHED of _engine/wait.pxd


def call_each(comm):
    for step in range(5):
        x = np.full(3, comm.rank + step, "i8")
        comm.all_reduce(x)
        assert (x == sum(range(comm.size)) + step * comm.size).all()
        comm.barrier()
    large = np.full(20_000, comm.rank, "f4")
    comm.all_reduce(large, "max")
    assert (large == comm.size - 1).all()
    assert comm.all_gather(np.array([comm.rank])).ravel().tolist() == list(range(comm.size))
    received = comm.all_to_all(np.arange(comm.size) + comm.size * comm.rank)
    assert received.tolist() == [comm.rank + comm.size * other for other in range(comm.size)]
    assert comm.broadcast_object(comm.rank, root=comm.size - 1) == comm.size - 1
    return comm.rank


def test_collectives_are_right():
    assert shmring.spawn(call_each, RANKS) == list(range(RANKS))


def lose(comm, victim):
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.all_reduce(np.ones(1))
    except shmring.RankFailed as error:
        with comm.shrink() as left:
            x = np.ones(1)
            left.all_reduce(x)
            return error.rank, x[0]


@pytest.mark.parametrize("victim", [0, 17, RANKS - 1])
def test_every_rank_learns_of_a_death(victim):
    found = shmring.spawn(lose, RANKS, args=[victim], return_exceptions=True)
    assert isinstance(found.pop(victim), shmring.RankFailed)
    assert found == [(victim, RANKS - 1)] * (RANKS - 1)
