"""Over hosts: a rank that calls something else is a Mismatch on all ranks in that call or the next. A rank
that waits for no other learns in its next call, or the one after, that the communicator is over.

Random programs (see mismatch_programs.py): some here, thousands by `pytest -m soak`.
"""

import itertools
import os
import random
import signal
import time

import numpy as np
import pytest
from combinations import each_value
from mismatch_programs import LAYOUTS, SETTINGS, run_odd_program
from ranks import Died, Ranks, until_there

import shmring
from shmring._transport.notifications import Notifications, _error_in, _pack
from tests.collectives.test_errors import assert_all, ones

PROGRAMS = 16  # for each layout
SOAK_WORLDS = 2000
AT_ONCE = 20  # programs of one set of processes
SOAK_LIMIT_S = 3600


def assert_limit_named(layout, seeds, **environ):
    with Ranks(len(LAYOUTS[layout]), nodes=LAYOUTS[layout]) as ranks:
        ranks.meet(**environ)
        for seed in seeds:
            wrong = [reported for reported in ranks(run_odd_program, seed) if reported]
            assert not wrong, "\n".join((layout, *wrong))


@each_value({"layout": LAYOUTS, "number": range(len(SETTINGS))})
def test_an_odd_rank_is_a_mismatch_on_all(layout, number):
    begin = PROGRAMS * sorted(LAYOUTS).index(layout)
    seeds = range(begin + number, begin + PROGRAMS, len(SETTINGS))
    assert_limit_named(layout, seeds, **SETTINGS[number])


@pytest.mark.soak
@pytest.mark.limit(SOAK_LIMIT_S)
def test_an_odd_rank_is_a_mismatch_on_all_in_thousands_of_worlds(capsys):
    ways = itertools.cycle(itertools.product(SETTINGS, LAYOUTS))
    first = random.SystemRandom().randrange(1 << 31)
    for seed in range(first, first + SOAK_WORLDS, AT_ONCE):
        environ, layout = next(ways)
        with capsys.disabled():
            print(f"\nprograms {seed} to {seed + AT_ONCE - 1} on {layout}, {environ}", end="", flush=True)
        assert_limit_named(layout, range(seed, seed + AT_ONCE), **environ)


def scatter_from(comm, root):
    Notifications.compare_calls = lambda *_: (
        None
    )  # which hosts that wait for each other would ask after a second
    comm.scatter(ones((comm.size, 10)) if comm.rank == root else None, root, like=ones(10))
    comm.barrier()


@pytest.mark.parametrize("odd_one", range(4))
def test_another_root_on_a_rank_of_several_is_a_mismatch(odd_one):
    with Ranks(4, nodes=[0, 0, 1, 1]) as ranks:
        ranks.meet()
        ranks.begin(_scatter_from_another, odd_one)
        for error in assert_all(ranks.answers(), shmring.Mismatch):
            assert "root=0" in str(error)
            assert "root=2" in str(error)


def _scatter_from_another(comm, odd_one):
    scatter_from(comm, 2 if comm.rank == odd_one else 0)


def gather_or_scatter(comm):
    Notifications.compare_calls = lambda *_: None
    if comm.rank == 1:
        comm.gather(ones(3, "u1"), root=2)
    else:
        comm.scatter(ones((4, 10)) if comm.rank == 2 else None, 2, out=np.empty(10))
    comm.all_reduce(ones(1000))


def test_a_call_that_sends_nothing_to_who_calls_another_is_a_mismatch():
    with Ranks(4, nodes=[0, 0, 1, 1]) as ranks:
        for error in assert_all(ranks.meet().outcomes(gather_or_scatter), shmring.Mismatch):
            assert error.seq == 1
            assert "gather(uint8[3], root=2)" in str(error)
            assert "scatter(float64[10], root=2)" in str(error)


def come_late_to_another_call(comm):
    """Send rank 3 a message of rank 2's next call before rank 3 begins its own, in which it awaits rank 1."""
    if comm.rank == 3:
        time.sleep(0.3)
        comm.scan(ones(9000))
    comm.gather(ones(3000), root=1)
    comm.scatter(ones((4, 5)) if comm.rank == 2 else None, root=2, like=ones(5))


def test_a_message_of_a_later_call_does_not_hide_the_calls_that_differ():
    with Ranks(4, nodes=[0, 1, 0, 1]) as ranks:
        for error in assert_all(ranks.meet().outcomes(come_late_to_another_call), shmring.Mismatch):
            assert "gather(float64[3000], root=1)" in str(error)
            assert "scan(float64[9000], sum)" in str(error)


# ---- a rank that waits for no other -----------------------------------------------------------------------

ALONE = {
    "reduce": lambda comm, how: comm.reduce(ones(4), root=0, **how),
    "gather": lambda comm, how: comm.gather(ones(4), root=0, **how),
    "broadcast": lambda comm, how: comm.broadcast(ones(4), root=2, **how),
    "scatter": lambda comm, how: comm.scatter(ones((3, 4)), root=2, **how),
    "large reduce": lambda comm, how: comm.reduce(ones(9000), root=0, **how),
    "large broadcast": lambda comm, how: comm.broadcast(ones(9000), root=2, **how),
    "send": lambda comm, how: comm.send(ones(4), 0, 5),
    "isend": lambda comm, how: comm.isend(ones(4), 0, 5),
}


def go_on_alone(comm, over, name, way, path):
    """On rank 2, which is alone on its host: how many calls it makes after all others have given up."""
    comm.barrier()
    plan = comm.plan("reduce", ones(4), root=0) if way == "plan" else None
    if comm.rank == 1 and over == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 0:
        if over == "abort":
            comm.abort("enough")
        with pytest.raises(shmring.Error):
            comm.reduce(ones(4), root=1)
        path.touch()
    if comm.rank < 2:
        return None
    until_there(path)
    for made in range(100):
        try:
            if plan is not None:
                plan()
            elif way == "background":
                ALONE[name](comm, {"async_op": True}).wait()
            else:
                ALONE[name](comm, {})
        except (shmring.RankFailed, shmring.Aborted) as error:
            return made, type(error).__name__
    return 100, "no error"


CASES = [(over, name, "foreground") for over in ("abort", "death") for name in ALONE]
CASES += [("death", name, "background") for name in ("reduce", "broadcast")] + [("death", "reduce", "plan")]


@pytest.mark.parametrize(("over", "name", "way"), CASES)
def test_a_rank_without_waits_learns_that_it_is_over(tmp_path, over, name, way):
    with Ranks(3, nodes=[0, 0, 1]) as ranks:
        outcomes = ranks.meet().outcomes(go_on_alone, over, name, way, tmp_path / "told")
    assert isinstance(outcomes[1], Died) or over == "abort"
    made, error = outcomes[2]
    assert made <= 1
    assert error == {"abort": "Aborted", "death": "RankFailed"}[over]


def differ_alone(comm, kind):
    """Let rank 2 make another call, which waits for no rank, after ranks 0 and 1 have begun their own."""
    if comm.rank < 2:
        comm.reduce(ones(4), root=0)
        comm.barrier()
    for made in range(100):
        try:
            ALONE[kind](comm, {})
        except shmring.Mismatch as error:
            return made, str(error)
    return 100, "no error"


@pytest.mark.parametrize("kind", ["gather", "broadcast", "scatter", "large reduce", "large broadcast"])
def test_another_call_that_waits_for_no_rank_is_a_mismatch_with_the_next(kind):
    with Ranks(3, nodes=[0, 0, 1]) as ranks:
        outcomes = ranks.meet().outcomes(differ_alone, kind)
    made, text = outcomes[2]
    assert made <= 1, text
    for reported in (text, *map(str, assert_all(outcomes[:2], shmring.Mismatch))):
        assert "reduce(float64[4], sum, root=0)" in reported
        assert f"{kind.removeprefix('large ')}(float64[" in reported


# ---- calls that match -------------------------------------------------------------------------------------


def be_the_last_to_come(comm, kind, count):
    """Let rank 0 come to the last call after all others have finished it and left."""
    if comm.rank == 0:
        time.sleep(0.3)
    x = np.full(count, comm.rank + 1.0)
    if kind == "reduce":
        comm.reduce(x, root=0)
        found = x[-1] if comm.rank == 0 else None
    elif kind == "gather":
        rows = comm.gather(x, root=0)
        found = rows[:, -1].tolist() if comm.rank == 0 else None
    else:
        comm.broadcast(x, root=comm.size - 1)
        found = x[-1]
    comm.close()
    return found


@each_value({"nodes": [[0, 1], [0, 1, 1, 2]], "count": [1, 3000, 600_000]})
def test_a_rank_may_leave_after_its_last_call_before_others_come(world_over_hosts, nodes, count):
    size = len(nodes)
    given = [rank + 1.0 for rank in range(size)]
    for kind, of_root in (("reduce", sum(given)), ("gather", given)):
        assert world_over_hosts(nodes)(be_the_last_to_come, kind, count) == [of_root] + [None] * (size - 1)
    assert world_over_hosts(nodes)(be_the_last_to_come, "broadcast", count) == [given[-1]] * size


def go_ahead(comm, path):
    """Return, on rank 0, the number of broadcasts that it begins before rank 1 comes to the first."""
    if comm.rank == 1:
        until_there(path)
        time.sleep(0.3)
    works = [comm.broadcast(ones(5), async_op=True) for _ in range(20)]
    if comm.rank == 0:
        works[0].wait()
        path.touch()
        time.sleep(0.2)
    ndone = sum(work.done() for work in works)
    for work in works:
        work.wait()
    return ndone


def test_no_rank_is_more_than_a_call_ahead_of_another_host(world_over_hosts, tmp_path):
    assert world_over_hosts([0, 1])(go_ahead, tmp_path / "ahead")[0] == 1


def test_an_error_that_is_too_long_for_other_hosts_keeps_its_rank_and_call():
    calls = ("reduce(float32[1024], sum, root=0)",) * 4096
    error = _error_in(_pack(shmring.Mismatch("they differ", rank=3, op="reduce", seq=7, calls=calls)), 0)
    assert isinstance(error, shmring.Mismatch)
    assert (str(error), error.rank, error.op, error.seq, error.calls) == ("they differ", 3, "reduce", 7, ())
