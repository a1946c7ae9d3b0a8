"""Calls of every kind in random order, on a world and on groups of it, without anything between them that
synchronises the ranks: no call leaves anything in lines, buffers, counters or queues that reaches another
call."""

import random
from typing import NamedTuple

import numpy as np
import pytest
from combinations import each_value, first
from ranks import Ranks

from shmring._diagnostics.flight_recorder import ALGORITHMS
from tests.collectives.test_collectives import FOLDING, IN_PLACE, MOVING, arguments_of, one_of_many

KINDS = ("all_reduce", *FOLDING, *MOVING)
PRIORITISED = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
TURNS, STEPS = 10, 60
PARTS = 3  # of the seeds
# Probability that a step repeats the previous one: in long repetitions some ranks run ahead.
AGAIN = (0.5, 0.97)


class Step(NamedTuple):
    make: str
    kind: str
    count: int
    is_shared: bool
    where: int  # which communicator
    value: int = 0  # other items each time


def steps_of(seed, ncomms, makes):
    chance = random.Random(seed)
    again, step = chance.choice(AGAIN), None
    for value in range(STEPS):
        if step is None or chance.random() > again:
            count = chance.choice((chance.randrange(40), chance.randrange(3_000), chance.randrange(40_000)))
            is_shared, where = chance.random() < 0.4, chance.randrange(ncomms)
            step = Step(chance.choice(makes), chance.choice(KINDS), count, is_shared, where)
        yield step._replace(value=value)


# ---- kinds of calls: each begins a step and returns a function that returns (wanted, got) ------------------


def operand(comm, step):
    """Return this rank's x, and what the rank should return or have in x."""
    xs, wanted = one_of_many(step.value, step.kind, step.count, comm.size)
    x = comm.empty(xs[0].size, "i8") if step.is_shared else np.empty(xs[0].size, "i8")
    if comm.rank == step.value % 7:  # now and then one rank's is private
        x = np.empty(xs[0].size, "i8")
    x[...] = xs[comm.rank]
    return x, wanted[comm.rank]


def result_of(step, x, returned):
    return x if step.kind in (*IN_PLACE, "all_reduce") else returned


def blocking(comm, step):
    x, wanted = operand(comm, step)
    given, keywords = arguments_of(comm, step.kind, step.count, x)
    returned = getattr(comm, step.kind)(given, **keywords)
    return lambda: [(wanted, result_of(step, x, returned))]


def planned(comm, step):
    x, wanted = operand(comm, step)
    given, keywords = arguments_of(comm, step.kind, step.count, x)
    returned = comm.plan(step.kind, given, **keywords)()
    return lambda: [(wanted, result_of(step, x, returned))]


def background(comm, step):
    x, wanted = operand(comm, step)
    given, keywords = arguments_of(comm, step.kind, step.count, x)
    work = getattr(comm, step.kind)(given, async_op=True, **keywords)
    return lambda: [(wanted, result_of(step, x, work.result()))]


def urgent(comm, step):
    step = step._replace(kind=PRIORITISED[step.count % len(PRIORITISED)])
    x, wanted = operand(comm, step)
    given, keywords = arguments_of(comm, step.kind, step.count, x)
    work = getattr(comm, step.kind)(given, async_op=True, priority=step.value % 4, **keywords)
    return lambda: [(wanted, result_of(step, x, work.result()))]


def algorithm(comm, step):
    step = step._replace(kind="all_reduce")
    x, wanted = operand(comm, step)
    comm.all_reduce(x, algorithm=ALGORITHMS[step.count % len(ALGORITHMS)])
    return lambda: [(wanted, x)]


def many(comm, step):
    arrays = [np.full(n, comm.rank + step.value) for n in (step.count, 1, step.count // 3, 5)]
    comm.all_reduce_many(arrays)
    total = sum(range(comm.size)) + comm.size * step.value
    return lambda: [(np.full(array.size, total), array) for array in arrays]


def piece(step, giver, taker):
    return np.arange(step.count // (taker + 1)) * (giver + 1) + step.value


def uneven(comm, step):
    taken = comm.all_to_all_v([piece(step, comm.rank, taker) for taker in range(comm.size)])
    return lambda: [(piece(step, giver, comm.rank), got) for giver, got in enumerate(taken)]


def message(comm, step):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.empty(step.count // (comm.rank + 1), "i8")
    awaited = comm.irecv(got, before, tag=step.value)
    sent = comm.isend(piece(step, comm.rank, after), after, tag=step.value)

    def finish():
        sent.wait()
        awaited.wait()
        return [(piece(step, before, comm.rank), got)]

    return finish


def barrier(comm, step):
    comm.barrier()
    return list


ON_ONE_HOST = (blocking, blocking, planned, background, urgent, algorithm, many, uneven, message, barrier)
OVER_HOSTS = tuple(make for make in ON_ONE_HOST if make is not algorithm)


# ---- the tests ---------------------------------------------------------------------------------------------


def is_wrong(finish):
    return any(not np.array_equal(np.ravel(wanted), np.ravel(got)) for wanted, got in finish())


def mix(comm, seed, makes):
    """The steps that went wrong."""
    groups = [comm.dup(), comm.split(comm.rank % 2), comm.split(comm.rank // 2)]
    comms = [comm, comm, *groups]
    by_name = {make.__name__: make for make in makes}
    wrong = []
    for turn in range(TURNS):
        steps = list(steps_of(1000 * seed + turn, len(comms), [make.__name__ for make in makes]))
        begun = [by_name[step.make](comms[step.where], step) for step in steps]
        wrong += [step for step, finish in zip(steps, begun, strict=True) if is_wrong(finish)]
    for group in groups:
        group.close()
    return wrong


@pytest.mark.parametrize("part", first(1, range(PARTS)))
@each_value(
    {
        "size": [2, 3, 4, 8],
        "environ": [{}, {"SHMRING_PATH": "far", "SHMRING_CHUNK": 256, "SHMRING_MESSAGE_RING": 512}],
    }
)
def test_any_mixture_of_calls(world_of, size, environ, part):
    ranks = world_of(size, **environ)
    for seed in range(part, 24 // size, PARTS):
        assert ranks(mix, seed, ON_ONE_HOST) == [[]] * size


@pytest.mark.parametrize("seed", first(1, range(3)))
@pytest.mark.parametrize("nodes", first(2, [[0, 1], [0, 0, 1], [0, 0, 1, 2, 2]]))
def test_any_mixture_of_calls_over_hosts(nodes, seed):
    with Ranks(len(nodes), nodes=nodes) as ranks:
        assert ranks.meet()(mix, seed, OVER_HOSTS) == [[]] * len(nodes)
