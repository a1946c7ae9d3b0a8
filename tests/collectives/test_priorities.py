"""Calls with a priority. Of the calls that every rank has issued, the greatest priority runs next, on all
ranks alike; large calls run in parts. Results are the same as without priorities. Different priorities,
deaths, late ranks and closing are handled as in other calls.

To be certain which calls every rank has issued, the tests stop one rank in the meantime: see `issue_held`.
"""

import contextlib
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
from cases import rng_of
from ranks import Died, Ranks, interrupted, turns, until_stopped, until_there, when_there
from snapshots import until_given_up

import shmring
from shmring.tools import _attach
from tests.collectives.test_errors import assert_all

PART = (4 << 20) // 8  # elements of a part, of float64
TINY = {"SHMRING_CHUNK": 1024, "SHMRING_DEPTH": 2}
HELD = 1_000_000  # more than passes through slots without the stopped rank


# ---- the order --------------------------------------------------------------------------------------------


def issue_held(comm, issue):
    """Call issue() on all ranks; the last rank has called it before and is stopped until all have."""
    pids = comm.all_gather(np.array([os.getpid()]))[:, 0]
    last = comm.size - 1
    if comm.rank == last:
        issued = issue()
        os.kill(os.getpid(), signal.SIGSTOP)
        return issued
    until_stopped(pids[last])
    issued = issue()
    if comm.rank != 0:
        comm.send(np.zeros(1), 0)
    for rank in range(1, last if comm.rank == 0 else 0):
        comm.recv(np.zeros(1), rank)
    if comm.rank == 0:
        os.kill(pids[last], signal.SIGCONT)
    return issued


def records_of(comm):
    """Return this rank's records of the open communicator that has this number of ranks."""
    flights = [segment.flight for segment in _attach.of_processes([os.getpid()])]
    (flight,) = [flight for flight in flights if flight.nranks == comm.local_size]
    return flight.records_of(comm.local_rank)


def order_of(comm):
    """Return the order of calls by their counts, without elections and local steps."""
    records = records_of(comm)
    calls = [record["count"] for record in records if record["kind"] != "election"]
    return [count for count, _ in itertools.groupby(calls)]


def call_with_priorities(comm, calls):
    """calls: (count, priority) each, behind one that holds all of them up."""
    held = np.ones(HELD)
    arrays = [np.full(count, comm.rank + 1.0) for count, _ in calls]

    def issue():
        works = [comm.all_reduce(held, async_op=True)]
        for array, (_, priority) in zip(arrays, calls, strict=True):
            works.append(comm.all_reduce(array, async_op=True, priority=priority))
        return works

    works = issue_held(comm, issue)
    for work in works:
        work.wait()
    total = sum(range(1, comm.size + 1))
    assert all((array == total).all() for array in (*arrays, held * total / comm.size))
    return order_of(comm)[-len(calls) :]


CALLS = {
    "the greatest first": [(1, 1), (2, 3), (3, 2)],
    "of equal ones the first": [(1, 0), (2, 7), (3, 0), (4, 7), (5, 7)],
    "negative ones": [(1, -4095), (2, -1), (3, 4095), (4, 0)],
    "large ones beside small ones": [(20_000, 1), (2, 5), (300_000, 5), (4, 9)],
    "one without is a wall": [(1, 0), (2, 1), (3, None), (4, 0), (5, 9), (6, None), (7, None), (8, 1)],
    "many": [(number + 1, number * 37 % 11) for number in range(24)],
}


def expected_order(calls):
    order, run = [], []
    for count, priority in [*calls, (None, None)]:
        if priority is not None:
            run.append((-priority, len(run), count))
            continue
        order += [count for _, _, count in sorted(run)]
        run = []
        order += [] if count is None else [count]
    return order


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("environ", [{}, TINY], ids=["", "tiny-chunks"])
def test_the_greatest_priority_runs_next(world_of, calls, environ):
    for order in world_of(3, **environ)(call_with_priorities, calls):
        assert order == expected_order(calls)


def test_the_greatest_priority_runs_next_over_hosts(world_over_hosts):
    calls = CALLS["one without is a wall"]
    for order in world_over_hosts([0, 0, 1, 1])(call_with_priorities, calls):
        assert order == expected_order(calls)


def call_in_a_group(comm, calls):
    group = comm.split(0 if comm.rank < 3 else None)
    if group is None:
        return expected_order(calls)
    with group:
        return call_with_priorities(group, calls)


def test_groups_have_an_order_of_their_own(world_of):
    calls = CALLS["one without is a wall"]
    for order in world_of(4)(call_in_a_group, calls):
        assert order == expected_order(calls)


def fuse_behind(comm):
    """Issue fused calls, other kinds and plans, with different counts; all are held up."""
    held, root = np.ones(HELD), np.arange(5.0)
    many = [np.ones(30), np.ones(31, "f4"), np.ones(40_000)]
    x, parts = np.ones(7), np.ones((comm.size, 8))
    planned = np.ones(9)
    plan = comm.plan("all_reduce", planned, async_op=True, priority=6)

    def issue():
        return [
            comm.all_reduce(held, async_op=True),
            comm.all_reduce_many(many, async_op=True, priority=1),
            comm.broadcast(root if comm.rank == 0 else root * 0, async_op=True, priority=2),
            comm.reduce(x, async_op=True, priority=3),
            comm.all_gather(np.ones(6), async_op=True, priority=4),
            comm.reduce_scatter(parts, async_op=True, priority=5),
            plan(),
            plan(),
        ]

    works = issue_held(comm, issue)
    results = [work.result() for work in works]
    assert results[4].shape == (comm.size, 6)
    assert results[5].tolist() == [comm.size] * 8
    assert all((array == comm.size).all() for array in many)
    assert planned.tolist() == [comm.size**2] * 9
    order = order_of(comm)
    return order[order.index(HELD) + 1 :], comm.stats()["calls"]


def test_other_kinds_lists_and_plans(world_of):
    for order, ncalls in world_of(3)(fuse_behind):
        assert order == [9, 8, 6, 7, 5, 31, 40_000, 30]
        assert ncalls == 11  # one before, and three of the list


def call_at_once(comm):
    """Call in the foreground: the call overtakes lower priorities, and stays behind calls without one."""
    low = np.ones(500_000)
    works = [comm.all_reduce(low, async_op=True, priority=0) for _ in range(4)]
    x, y = np.ones(3), [np.ones(4), np.ones(5)]
    comm.all_reduce(x, priority=1)
    comm.all_reduce_many(y, priority=1)
    comm.barrier()
    assert all(work.done() for work in works)
    return x.tolist() + y[0].tolist() + y[1].tolist() + [low[0]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_the_foreground(world_of, size):
    assert world_of(size)(call_at_once) == [[float(size)] * 12 + [float(size) ** 4]] * size


# ---- parts ------------------------------------------------------------------------------------------------


def reduce_in_parts(comm, dtype, kind, memory):
    """The bits of a call in parts are those of one that is not."""
    count = 2 * (4 << 20) // np.dtype(dtype).itemsize + 5
    values = (np.arange(count) % 1009 / (comm.rank + 3)).astype(dtype)
    whole, parts = (comm.copy_of(values) if memory == "shared" else values.copy() for _ in range(2))
    getattr(comm, kind)(whole)
    before = comm.stats()["calls"]
    getattr(comm, kind)(parts, async_op=True, priority=1).wait()
    assert comm.stats()["calls"] == before + 1
    return whole.tobytes() == parts.tobytes(), whole.tobytes() != values.tobytes()


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("all_reduce", "f4"), ("all_reduce", "f2"), ("reduce", "f4"), ("broadcast", "i2")]
)
def test_parts_are_to_the_same_bits(world_of, dtype, kind, memory):
    for rank, (same, changed) in enumerate(world_of(3)(reduce_in_parts, dtype, kind, memory)):
        assert same
        assert changed == (kind == "all_reduce" or (kind == "reduce") == (rank == 0))


def test_parts_over_hosts(world_over_hosts):
    for same, changed in world_over_hosts([0, 0, 1])(reduce_in_parts, "f4", "all_reduce", "private"):
        assert same
        assert changed


def overtake(comm):
    """A large one has begun when an urgent one is issued, for which it is interrupted between two parts."""
    large, urgent = np.ones(4 * PART), np.ones(7)

    def issue():
        return [
            comm.all_reduce(large, async_op=True, priority=0),
            comm.all_reduce(urgent, async_op=True, priority=1),
        ]

    for work in issue_held(comm, issue):
        work.wait()
    assert urgent.tolist() == [comm.size] * 7
    assert (large == comm.size).all()
    records = [one for one in records_of(comm) if one["kind"] == "all_reduce" and one["number"] > 0]
    return [(one["count"], one["number"], one["priority"]) for one in records]


def test_an_urgent_call_waits_for_a_part_at_most(world_of):
    for records in world_of(3)(overtake):
        counts = [count for count, _, _ in records]
        assert sorted(counts) == [7] + [PART] * 4
        assert counts.index(7) <= 1
        assert {priority for count, _, priority in records if count == 7} == {1}
        assert records[-1] == (
            PART,
            3,
            0,
        )  # of the user's calls, the one in which all told their pids included


# ---- records of other ranks -------------------------------------------------------------------------------


def show_elections(comm):
    before = comm.stats()
    comm.all_reduce(np.ones(3), async_op=True, priority=-2).wait()
    comm.barrier()
    after = comm.stats()
    assert after["calls"] == before["calls"] + 2
    assert sum(after["paths"].values()) == sum(before["paths"].values()) + 2
    return [(one["kind"], one.get("before"), one["number"], one["outcome"]) for one in records_of(comm)]


def test_an_election_is_recorded_and_counted_by_nobody(world_of):
    for records in world_of(2)(show_elections):
        assert records[-3:] == [
            ("election", "all_reduce", 1, "complete"),
            ("all_reduce", None, 1, "complete"),
            ("barrier", None, 2, "complete"),
        ]


def miss(comm):
    if comm.rank == 1:
        until_given_up()
    comm.all_reduce(np.ones(5), async_op=True, timeout=1.2, priority=3).wait()


def test_a_late_rank_is_named(world_of):
    for error in assert_all(world_of(3).outcomes(miss), shmring.Timeout):
        assert (error.rank, error.op, error.seq) == (1, "all_reduce", 1)
        assert error.where[0].startswith(
            "in election before all_reduce(float64[5], sum, priority=3) #1, wait"
        )


def miss_across(comm, missed_path):
    if comm.rank == 1:
        until_there(missed_path)
    try:
        comm.all_reduce(np.ones(5), async_op=True, timeout=0.3, priority=3).wait()
    finally:
        missed_path.touch()


def test_a_late_rank_of_another_host_is_named(world_over_hosts, tmp_path):
    outcomes = world_over_hosts([0, 1]).outcomes(miss_across, tmp_path / "missed")
    for error in assert_all(outcomes, shmring.Timeout):
        assert (error.rank, error.op) == (1, "all_reduce")


def die_behind(comm, path):
    x = np.ones(30_000)
    for turn in turns(comm, path):
        works = [comm.all_reduce(x, "max", async_op=True, priority=number * turn % 7) for number in range(5)]
        if turn % 2:
            works[3].wait()
        works[turn % 5].wait()


@pytest.mark.parametrize("nodes", [None, [0, 0, 1]])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all_others(tmp_path, victim, nodes):
    with Ranks(3, nodes=nodes) as ranks:
        ranks.meet()
        ranks.begin(die_behind, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        ranks.kill(victim)
        outcomes = ranks.answers()
        assert isinstance(outcomes.pop(victim), Died)
        for error in assert_all(outcomes, shmring.RankFailed):
            assert error.rank == victim


def differ(comm, arguments):
    for count, priority in arguments[comm.rank]:
        comm.all_reduce(np.ones(count), async_op=True, priority=priority).wait()
    comm.barrier()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([(3, 1)], [(3, 2)]),
        ([(3, 1)], [(3, None)]),
        ([(3, 1)], [(4, 1)]),
        ([(100, 1)], [(101, 0)]),
        ([(2 * PART, 1)], [(3 * PART, 1)]),
    ],
    ids=["another", "none", "count", "count and priority", "parts"],
)
def test_other_priorities_are_a_mismatch(world_of, one, other):
    for error in assert_all(world_of(3).outcomes(differ, [one, one, other]), shmring.Mismatch):
        assert error.seq == 1
        assert f"all_reduce(float64[{one[0][0]}], sum, priority=1)" in error.calls[0]
        assert error.calls[2] != error.calls[0]


def cross_over(comm, swapped):
    """Issue two calls that look alike, of which one rank makes the other urgent: the next election shows
    it."""
    held, arrays = np.ones(HELD), np.ones((3, 5))
    priorities = (0, 2, 1) if swapped == comm.rank else (0, 1, 2)

    def issue():
        works = [comm.all_reduce(held, async_op=True)]
        for array, priority in zip(arrays, priorities, strict=True):
            works.append(comm.all_reduce(array, async_op=True, priority=priority))
        return works

    for work in issue_held(comm, issue):
        work.wait()


def test_crossed_priorities_are_a_mismatch(world_of):
    for error in assert_all(world_of(3).outcomes(cross_over, 1), shmring.Mismatch):
        assert "another wire=, group_size= or priority=" in str(error)


def test_other_priorities_over_hosts_are_a_mismatch(world_over_hosts):
    """The rank that reports two elections knows the call that its own precedes."""
    for error in assert_all(
        world_over_hosts([0, 1]).outcomes(differ, [[(3, 1)], [(3, 2)]]), shmring.Mismatch
    ):
        named = [f"election before all_reduce(float64[3], sum, priority={priority})" for priority in (1, 2)]
        assert error.calls in ((named[0], "election"), ("election", named[1]))
        assert "called election, but with arrays of other shapes or dtypes, another wire=" in str(error)
    assert_all(world_over_hosts([0, 1]).outcomes(differ, [[(3, 1)], [(3, None)]]), shmring.Mismatch)


def differ_on_host_0(comm, priorities, differed_path):
    if comm.rank == 2:
        until_there(differed_path)
    try:
        comm.all_reduce(np.ones(3), async_op=True, priority=priorities[comm.rank]).wait()
    finally:
        differed_path.touch()


@pytest.mark.parametrize("priorities", [(1, 2, 1), (1, None, 1)])
def test_a_mismatch_over_hosts_names_the_call_of_each_rank(world_over_hosts, tmp_path, priorities):
    """Each rank names its own call as the other ranks of its host do: not just as an election."""
    outcomes = world_over_hosts([0, 0, 1]).outcomes(differ_on_host_0, priorities, tmp_path / "differed")
    for error in assert_all(outcomes, shmring.Mismatch):
        assert error.op == "all_reduce"
        assert "all_reduce(float64[3], sum, priority=1)" in error.calls[0]
        own = "" if priorities[1] is None else f", priority={priorities[1]}"
        assert f"all_reduce(float64[3], sum{own})" in error.calls[1]


def refuse(comm):
    with pytest.raises(TypeError, match="priority is 'high'; it must be an integer"):
        comm.all_reduce(np.ones(3), async_op=True, priority="high")
    with pytest.raises(ValueError, match="priority is 4096; it must be -4095 to 4095"):
        comm.broadcast(np.ones(3), priority=4096)
    with pytest.raises(ValueError, match="priority is -4096"):
        comm.all_reduce_many([np.ones(3)], priority=-4096)
    x = np.ones(3)
    comm.all_reduce(x, priority=np.int16(3))
    return x.tolist()


def test_wrong_priorities(world_of):
    assert world_of(2)(refuse) == [[2.0] * 3] * 2


# ---- waiting and the end ----------------------------------------------------------------------------------


def wait_for(works, numbers):
    for number in numbers:
        works[number].wait()


def wait_in_any_order(comm, seed):
    """Wait, poll, and wait in threads, while ranks run at different speeds."""
    chance, own = rng_of("waits", seed), np.random.default_rng(comm.rank)
    for _ in range(6):
        counts = chance.choice([1, 9, 3_000, 40_000], 12)
        priorities = chance.choice([-1, 0, 5, 99], 12)
        arrays = [np.full(count, comm.rank + 1.0) for count in counts]
        works = []
        for array, priority in zip(arrays, priorities, strict=True):
            wanted = None if chance.random() < 0.1 else int(priority)
            works.append(comm.all_reduce(array, async_op=True, priority=wanted))
            if own.random() < 0.2:
                time.sleep(0.001)
            if own.random() < 0.2:
                works[own.integers(len(works))].wait()
        mine = own.permutation(len(works))
        thread = threading.Thread(target=wait_for, args=(works, mine[:6]))
        thread.start()
        wait_for(works, mine[6:])
        thread.join()
        assert all(work.done() for work in works)
        total = sum(range(1, comm.size + 1))
        assert all((array == total).all() for array in arrays)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_waits_in_any_order(world_of, size):
    for seed in range(3):
        world_of(size)(wait_in_any_order, seed)


def test_waits_in_any_order_over_hosts(world_over_hosts):
    for seed in range(2):
        world_over_hosts([0, 0, 1])(wait_in_any_order, seed)


def time_out(comm, path):
    """A wait that has had enough harms nothing; nor does Ctrl-C."""
    if comm.rank == 0:
        until_there(path)
    works = [comm.all_reduce(np.ones(20_000), async_op=True, priority=number) for number in (1, 9, 3)]
    if comm.rank == 1:
        with pytest.raises(TimeoutError, match="the call is not finished"):
            works[0].wait(0.05)
        with pytest.raises(KeyboardInterrupt):
            interrupted(works[1].wait, 0.05)
        path.touch()
    for work in works:
        work.wait()


def test_a_wait_that_ends_early_harms_nothing(world_of, tmp_path):
    world_of(2)(time_out, tmp_path / "interrupted")


def close_behind(comm):
    arrays = [np.ones(50_000) for _ in range(5)]
    if comm.rank == 0:
        time.sleep(0.2)
    works = [comm.all_reduce(array, async_op=True, priority=p) for p, array in enumerate(arrays)]
    comm.close()
    for work in works:
        work.wait()
    return [float(array[0]) for array in arrays]


def test_close_lets_all_of_them_come_to_their_end(world_of):
    assert world_of(3)(close_behind) == [[3.0] * 5] * 3


def shrink_behind(comm):
    x = np.ones(2_000)
    works = []
    with contextlib.suppress(shmring.Error):
        for turn in range(1 << 20):
            works.append(comm.all_reduce(x, "max", async_op=True, priority=turn % 5))
            if turn == 100 and comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            works[turn // 2].wait()
    assert all(work.done() for work in works)
    with comm.shrink() as fewer:
        y = np.ones(9)
        fewer.all_reduce(y, async_op=True, priority=4).wait()
        return fewer.size, float(y[0])


def test_the_survivors_go_on():
    with Ranks(3) as ranks:
        first, died, last = ranks.meet().outcomes(shrink_behind)
        assert isinstance(died, Died)
        assert first == last == (2, 2.0)
