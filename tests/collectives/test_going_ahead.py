"""Ranks that share CPUs and repeat a call run ahead of ranks that have no data for them: their results are
right, their lead is bounded, and different calls are still noticed."""

import os
import random
import time

import numpy as np
import pytest
from combinations import each_pair
from ranks import Ranks

import shmring
from tests.collectives.test_errors import assert_all

REPEATS = 40
AHEAD = 64  # calls that may be in progress at once: half of the call lines
SOON, LATE = 13, 40  # repeated as often, a call is one of a few, and one of many
KINDS = ("broadcast", "scatter", "gather", "reduce", "scan", "exscan")
COUNTS = (1, 6, 50, 3_000, 20_000)  # in the line, in a slot, in several


def expected(kind, values, root, rank):
    """Return a rank's result if rank r gives values[r] (to rank i of a scatter: values[r] + i)."""
    if kind == "broadcast":
        return values[root]
    if kind == "scatter":
        return values[root] + rank
    if kind == "gather":
        return values if rank == root else None
    if kind == "reduce":
        return sum(values) if rank == root else None
    before = values[: rank + (kind == "scan")]
    return sum(before) if before else values[rank]  # exscan leaves rank 0's as it is


def call(comm, kind, x, root):
    if kind == "broadcast":
        comm.broadcast(x, root)
        return x[0], x[-1]
    if kind == "scatter":
        rows = np.stack([x + i for i in range(comm.size)]) if comm.rank == root else None
        part = comm.scatter(rows, root, like=x)
        return part[0], part[-1]
    if kind == "gather":
        rows = comm.gather(x, root)
        return None if rows is None else (rows[:, 0].tolist(), rows[:, -1].tolist())
    if kind == "reduce":
        comm.reduce(x, "sum", root)
        return (x[0], x[-1]) if comm.rank == root else None
    getattr(comm, kind)(x)
    return x[0], x[-1]


def array_of(comm, count, memory):
    """Collective. mixed: in shared memory, on all ranks but one."""
    room = np.empty(count, "i8") if memory == "private" else comm.empty(count, "i8")
    return np.empty(count, "i8") if memory == "mixed" and comm.rank == 1 else room


def repeat(comm, kind, count, root, memory, dawdles):
    """The same call over and over with other values; now and then a rank is late."""
    chance = random.Random(comm.rank)
    x, wrong = array_of(comm, count, memory), []
    for turn in range(REPEATS):
        values = [1000 * turn + 10 * rank for rank in range(comm.size)]
        x[...] = values[comm.rank]
        if dawdles and chance.random() < 0.1:
            time.sleep(0.001)
        got, want = call(comm, kind, x, root), expected(kind, values, root, comm.rank)
        if got != (None if want is None else (want, want)):
            wrong.append((turn, got, want))
    comm.barrier()
    return wrong


@pytest.mark.limit(180)  # thousands of steps, each of which may wait for a CPU
@each_pair(
    {
        "memory": ["private", "shared", "mixed"],
        "size": [2, 3, 8],
        "kind": KINDS,
        "environ": [
            {},
            {"SHMRING_CHUNK": 512, "SHMRING_FIRST_SEQ": (1 << 64) - 20},
            {"SHMRING_PATH": "single_copy", "SHMRING_FIRST_SEQ": (1 << 64) - 20},
        ],
    }
)
def test_repeated_calls(world_of, memory, size, kind, environ):
    ranks = world_of(size, **environ)
    for count in COUNTS:
        for root in {0, size - 1}:
            assert ranks(repeat, kind, count, root, memory, count % 2 == 0) == [[]] * size


def go_ahead_of_one(comm, calls):
    """On rank 1, which is late: how many calls each other rank has made before it makes its first."""
    x = np.ones(1)
    made = comm.shared(comm.size, "i8")
    for _ in range(LATE):
        comm.broadcast(x)
    went_ahead = wait_for_others(made) if comm.rank == 1 else None
    for _ in range(calls):
        comm.broadcast(x)
        made[comm.rank] += 1
    comm.barrier()
    return went_ahead


def wait_for_others(made):
    """Wait until all ranks have run ahead, and had the time to go too far."""
    while np.delete(made, 1).min() < 2:
        time.sleep(0.01)
    time.sleep(0.3)
    return np.delete(made, 1).tolist()


def share_cpus(comm, count):
    """Keep this rank to the first CPUs; a world that meets after this has as many for all its ranks."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def test_no_rank_is_too_far_ahead():
    with Ranks(8) as ranks:
        ranks.meet()(share_cpus, 2)
        went_ahead = ranks.meet()(go_ahead_of_one, 3 * AHEAD)[1]
    assert min(went_ahead) > 1
    assert max(went_ahead) <= AHEAD


def differ_in_the_middle(comm, how, middle):
    x = np.ones(5)
    for turn in range(middle + 1):
        if turn == middle and comm.rank == 2:
            if how == "root":
                comm.broadcast(x, 1)
            elif how == "size":
                comm.broadcast(np.ones(6))
            elif how == "kind":
                comm.barrier()
            else:
                with pytest.raises(ValueError, match="root"):
                    comm.broadcast(x, comm.size)
        else:
            comm.broadcast(x)
    if middle == LATE or how == "refused":
        comm.barrier()


@each_pair({"size": [3, 8], "how": ["root", "size", "kind", "refused"], "middle": [SOON, LATE]})
def test_calls_that_differ_are_noticed(world_of, size, how, middle):
    for error in assert_all(world_of(size).outcomes(differ_in_the_middle, how, middle), shmring.Mismatch):
        assert error.calls[2] != error.calls[0]
        assert error.seq == middle + 1  # the position of the different call, not of its detection


def differ_at_once(comm):
    comm.barrier()
    comm.broadcast(np.ones(5), comm.rank)


def test_a_call_like_no_other_is_a_mismatch_at_once(world_of):
    assert_all(world_of(8).outcomes(differ_at_once), shmring.Mismatch)
