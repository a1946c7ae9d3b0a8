"""Private arrays whose path one rank measures: mixtures of calls and memories, settings that differ between
ranks, and ranks that die or are interrupted in the middle of a single copy."""

import itertools
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from combinations import each_value
from ranks import Died, Ranks, until_stopped, until_there

import shmring
from shmring._config import thresholds, tuning_table
from tests.collectives.test_shared_path_choice import on_cpus
from tests.collectives.test_single_copy import (
    FROM_64_BYTES,
    KINDS,
    assert_killed,
    path_of,
    skip_unless_allowed,
)

MOVING = ("broadcast", "scatter", "gather", "all_gather", "all_to_all", "exscan")
GIVEN_BY_ONE = ("broadcast", "scatter", "gather", "exscan")  # between two ranks
SPLIT = ("scatter", "all_to_all")
# Numbers of float64: around 32 KiB, from which pieces are measured, and several steps of 1 MiB.
LENGTHS = (4_000, 4_095, 4_096, 20_000, 140_001, 300_000)
LONG = 4 << 20  # a number of float64; a signal comes in the middle of such a long call
LONG_CLASS = 32 << 20


@pytest.fixture
def call_with_cpus(world_of):
    """call_with_cpus(size, function, *arguments) → by rank, what it returns if each rank has a CPU."""

    def call(size, *called, **environ):
        return world_of(size, **environ)(on_cpus, size, shmring.world(size), *called)

    return call


# ---- mixtures ----------------------------------------------------------------------------------------------


def value_of(turn, giver, taker):
    return 100.0 * turn + 10 * giver + taker


def fill(x, kind, turn, comm):
    """Write what this rank gives in a turn: a row for each taker, or the same for all."""
    if kind in SPLIT:
        for taker in range(comm.size):
            x[taker] = value_of(turn, comm.rank, taker)
    else:
        x[:] = value_of(turn, comm.rank, 0)


def make_call(comm, kind, x, root, in_place):
    """Make a call and return the rows that this rank gets, by giver: {giver: row}."""
    if kind == "broadcast":
        comm.broadcast(x, root)
        return {root: x}
    if kind == "scatter":
        out = x[root] if in_place and comm.rank == root else np.empty_like(x[0])
        return {root: comm.scatter(x if comm.rank == root else None, root, out=out)}
    if kind == "exscan":
        out = x if in_place else np.full_like(x, -1)
        comm.exscan(x, out=out)
        return {0: out} if comm.size == 2 and comm.rank == 1 else {}
    if kind == "all_to_all":
        return dict(enumerate(comm.all_to_all(x, out=x if in_place else None)))
    rows = None
    if in_place and (kind == "all_gather" or comm.rank == root):
        rows = np.empty((comm.size, x.size))
        rows[comm.rank] = x
        x = rows[comm.rank]
    found = comm.all_gather(x, out=rows) if kind == "all_gather" else comm.gather(x, root, out=rows)
    return {} if found is None else dict(enumerate(found))


def mix(comm, seed, ncalls):
    """Make calls of changing kinds, lengths and roots, whose arrays each rank has in memory of its choice.

    Write to each array as soon as its call returns. Return the wrong results.
    """
    chance, own_chance = random.Random(seed), random.Random(f"{seed} of rank {comm.rank}")
    kind, length, root, in_place = "broadcast", LENGTHS[-1], 0, False
    shared = comm.empty(comm.size * max(LENGTHS), "f8")
    private = np.empty(comm.size * max(LENGTHS))
    wrong = []
    for turn in range(ncalls):
        if chance.random() < 0.2:
            kind, length = chance.choice(MOVING), chance.choice(LENGTHS)
        if chance.random() < 0.3:
            root, in_place = chance.randrange(comm.size), chance.random() < 0.3
        room = shared if own_chance.random() < 0.2 else private
        x = room[: comm.size * length].reshape(comm.size, length) if kind in SPLIT else room[:length]
        fill(x, kind, turn, comm)
        found = make_call(comm, kind, x, root, in_place)
        for giver, row in found.items():
            want = value_of(turn, giver, comm.rank if kind in SPLIT else 0)
            if not (row == want).all():
                wrong.append((turn, kind, length, root, giver, want, np.unique(row)))
        x[...] = -1
    return wrong


@each_value({"size": [2, 3], "seed": range(4)})
def test_results_are_right_in_any_mixture(call_with_cpus, size, seed):
    assert call_with_cpus(size, mix, seed, 400) == [[]] * size


@each_value({"size": [2, 4], "environ": [FROM_64_BYTES, {"SHMRING_PATH": "single_copy"}]})
def test_results_are_right_if_the_path_is_fixed(world_of, size, environ):
    assert world_of(size, **environ)(mix, size, 200) == [[]] * size


# ---- settings that differ ----------------------------------------------------------------------------------


def paths_of_all(comm):
    return [path_of(comm, kind) for kind in KINDS]


def test_the_path_that_rank_0_fixes_holds_for_all_ranks(world_of):
    skip_unless_allowed(world_of)
    ranks = world_of(3)
    assert ranks.try_to_meet(of_rank={0: {"SHMRING_PATH": "single_copy"}}) == [None] * 3
    for paths in ranks(paths_of_all):
        assert set(paths) == {"single_copy"}
    assert ranks.try_to_meet(of_rank={1: {"SHMRING_PATH": "single_copy"}}) == [None] * 3
    for paths in ranks(mix, 3, 200), ranks(mix, 4, 200):
        assert paths == [[]] * 3


def test_ranks_with_other_tables_than_rank_0_agree_on_each_path(world_of, tmp_path):
    skip_unless_allowed(world_of)
    path = tmp_path / "table.json"
    table = {"single_copy_measured": 0, "single_copy_nbytes": 4096, "single_copy_scatter_nbytes": 4096}
    tuning_table.save(path, {2: {"near": table, "far": table}}, thresholds.LIMITS)
    ranks = world_of(2)
    for rank in range(2):
        assert ranks.try_to_meet(of_rank={rank: {"SHMRING_TUNING": str(path)}}) == [None] * 2
        assert ranks(mix, rank, 100) == [[]] * 2


# ---- ranks that end in the middle --------------------------------------------------------------------------


def is_next_tried(comm, kind):
    """Return whether the next long call of a kind is a single copy, as far as this rank knows."""
    return comm.stats()["chosen_paths"].get(kind, {}).get(LONG_CLASS) == "single_copy"


def call_long(comm, kind, x, out, **how):
    """Make a long call in which rank 0 gives x; return what this rank gets."""
    if kind == "broadcast":
        comm.broadcast(x, **how)
        return x
    if kind == "scatter":
        comm.scatter(x if comm.rank == 0 else None, out=out, **how)
    elif kind == "exscan":
        comm.exscan(x, out=out, **how)
    else:
        comm.gather(x, comm.size - 1, out=out if comm.rank == comm.size - 1 else None, **how)
    return out


def call_while_tried(comm, kind, path_when_tried):
    """Make calls without end; rank 0 makes a file before the first single copies, of a trial."""
    x = np.empty((comm.size, LONG) if kind == "scatter" else LONG)
    out = np.empty((comm.size, LONG) if kind == "gather" else LONG)
    for turn in itertools.count():
        x[...] = turn if comm.rank == 0 else -1
        if comm.rank == 0 and is_next_tried(comm, kind) and not os.path.exists(path_when_tried):
            open(path_when_tried, "w").close()
        found = call_long(comm, kind, x, out)
        if comm.rank == comm.size - 1:
            assert (found[0 if kind == "gather" else ...] == turn).all()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("kind", "size"), [("broadcast", 3), ("scatter", 2), ("gather", 2), ("exscan", 2)])
def test_a_rank_killed_in_a_trial_of_single_copies_is_named(tmp_path, world_of, kind, size, victim):
    skip_unless_allowed(world_of)
    path = tmp_path / "tried"
    with Ranks(size) as ranks:
        ranks.meet()
        ranks.begin(on_cpus, size, shmring.world(size), call_while_tried, kind, str(path))
        until_there(path, ranks)
        time.sleep(random.uniform(0, 0.03))
        ranks.kill(victim)
        outcomes = ranks.answers()
        assert_killed(outcomes, victim)


def stop_in_the_middle(cells, value, has_returned):
    """Stop this process once the first cell has the value, but not the last: the calling thread copies."""
    while not has_returned.is_set():  # a thread that sleeps comes too late
        if cells[0] == value and cells[-1] != value:
            os.kill(os.getpid(), signal.SIGSTOP)
            return


def interrupt_in_the_middle(comm, kind, folder):
    """On rank 0, overwrite the array as soon as Ctrl-C ends the call. Rank 1 stops while it copies."""
    x = np.zeros((2, LONG) if kind == "scatter" else LONG)
    out = np.zeros((2, LONG) if kind == "gather" else LONG)
    if comm.rank == 1:
        rows = np.memmap(f"{folder}/got", mode="r+", shape=(2, LONG), dtype="f8")  # the test reads it too
        to_get = rows[0]
        if kind == "broadcast":
            x = to_get
        else:
            out = rows if kind == "gather" else to_get
    for turn in itertools.count(1):
        x[...] = turn if comm.rank == 0 else 0
        is_tried = np.array(is_next_tried(comm, kind))
        comm.broadcast(is_tried)
        has_returned = threading.Event()
        stopping = None
        if is_tried and comm.rank == 1:
            stopping = threading.Thread(target=stop_in_the_middle, args=(to_get, turn, has_returned))
            stopping.start()
        try:
            call_long(comm, kind, x, out)
        except KeyboardInterrupt:
            x[...] = -1
            open(f"{folder}/written", "w").close()
            until_there(f"{folder}/over")  # nothing is freed or closed before, which rank 1 would see
            raise
        finally:
            has_returned.set()
            if stopping is not None:
                stopping.join()
        assert comm.rank == 0 or (to_get == turn).all()


def stop_while_it_copies(pid, got):
    """Wait until a process has stopped in the middle of its copy. The copy may end just before it stops."""
    while True:
        until_stopped(pid)
        if got[0] != got[-1]:
            return
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("kind", GIVEN_BY_ONE)
def test_a_rank_that_reads_while_the_giver_is_interrupted_takes_nothing(tmp_path, world_of, kind):
    """The giver gets its array back at once, and writes to it before the other rank has read the rest."""
    skip_unless_allowed(world_of)
    got = np.memmap(tmp_path / "got", mode="w+", shape=(2, LONG), dtype="f8")
    with Ranks(2) as ranks:
        ranks.meet()
        ranks.begin(on_cpus, 2, shmring.world(2), interrupt_in_the_middle, kind, str(tmp_path))
        stop_while_it_copies(ranks.pid(1), got[0])  # and rank 0 is in the call, which rank 1 does not end
        ranks.kill(0, signal.SIGINT)
        until_there(tmp_path / "written", ranks)
        ranks.kill(1, signal.SIGCONT)
        other = ranks.answers(among=(1,))[0]
        (tmp_path / "over").touch()
        own = ranks.answers(among=(0,))[0]
    assert isinstance(own, KeyboardInterrupt), (own, other)
    assert isinstance(other, shmring.Aborted), (own, other)
    assert "KeyboardInterrupt in rank 0" in other.reason


def leave_before_others_read(comm, kind):
    """Issue a call in the background on rank 0, and end the process at once, before rank 1 makes the call."""
    x = np.full((2, LONG) if kind == "scatter" else LONG, 7.0)
    out = np.zeros((2, LONG) if kind == "gather" else LONG)
    if comm.rank == 0:
        call_long(comm, kind, x, out, async_op=True)
        os._exit(0)
    time.sleep(0.3)
    call_long(comm, kind, x, out)


@pytest.mark.parametrize("kind", GIVEN_BY_ONE)
def test_a_giver_that_has_ended_is_an_error(world_of, kind):
    skip_unless_allowed(world_of)
    with Ranks(2) as ranks:
        ranks.meet(**FROM_64_BYTES)
        own, other = ranks.outcomes(leave_before_others_read, kind)
        assert isinstance(own, Died)
        assert isinstance(other, shmring.RankFailed)
        assert other.rank == 0
