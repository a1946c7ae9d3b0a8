"""Groups of ranks: their members, their independence, and no leftovers.

Failures are checked on ranks inside and outside the group.
"""

import contextlib
import gc
import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from combinations import each_value
from leftovers import until_none
from ranks import Died, Ranks
from snapshots import until_given_up
from waiting import counted_s

import shmring
from shmring._diagnostics.flight_recorder import ALGORITHMS
from shmring._lifecycle import groups, startup
from shmring._system import segments
from tests.collectives.test_errors import assert_all


def total(comm, value=None, count=3000):
    """The sum of the ranks' values (their numbers, if not given), from every collective that has one."""
    x = np.full(count, comm.rank if value is None else value, "i8")
    comm.all_reduce(x)
    assert (x == x[0]).all()
    return int(x[0])


# ---- members ----------------------------------------------------------------------------------------------


def parity(comm):
    group = comm.split(comm.rank % 2)
    assert group.parent_ranks == tuple(range(comm.rank % 2, comm.size, 2))
    assert group.parent_ranks[group.rank] == comm.rank
    assert comm.parent_ranks is None
    assert (group.local_rank, group.local_size, group.node, group.num_nodes) == (group.rank, group.size, 0, 1)
    return group.rank, group.size, total(group, comm.rank), total(comm)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_split_by_parity(world_of, size):
    for rank, found in enumerate(world_of(size, SHMRING_CHUNK=1024)(parity)):
        mine = range(rank % 2, size, 2)
        assert found == (rank // 2, len(mine), sum(mine), sum(range(size)))


def test_ranks_may_be_threads():
    with Ranks(4, threads=True) as ranks:
        assert ranks.meet()(parity) == [(0, 2, 2, 6), (0, 2, 4, 6), (1, 2, 2, 6), (1, 2, 4, 6)]


def by_keys(comm, colors):
    group = comm.split(*colors[comm.rank])
    return group and (
        group.parent_ranks,
        group.rank,
        group.all_gather(np.array([comm.rank])).ravel().tolist(),
    )


COLORS = {
    "reversed": [(0, 3), (0, 2), (0, 1), (0, 0)],
    "equal keys keep the order": [(0, 5), (0, 5), (0, -5), (0, 5)],
    "extremes": [(1 << 62, 1 << 62), (-(1 << 63), 0), (1 << 62, -(1 << 62)), (-(1 << 63), -1)],
    "some in none": [(None, 0), (7, 1), (None, 0), (7, 0)],
    "nobody": [(None, 0)] * 4,
    "only rank 0": [(0, 0), (None, 0), (None, 0), (None, 0)],
    "everybody alone": [(rank, 0) for rank in range(4)],
    "numpy's integers": [(np.uint8(3), np.int16(-rank)) for rank in range(4)],
}


@pytest.mark.parametrize("what", COLORS)
def test_colors_choose_the_group_and_keys_the_order(world_of, what):
    colors = COLORS[what]
    for rank, found in enumerate(world_of(4)(by_keys, colors)):
        color = colors[rank][0]
        if color is None:
            assert found is None
            continue
        mine = sorted((r for r in range(4) if colors[r][0] == color), key=lambda r: (colors[r][1], r))
        assert found == (tuple(mine), mine.index(rank), mine)


def in_groups(comm, lists):
    return [
        group and (group.parent_ranks, total(group, comm.rank))
        for group in [comm.group(ranks) for ranks in lists]
    ]


def test_groups_are_the_lists_that_were_given(world_of):
    lists = [[2, 0], (3,), [], range(4), np.array([1, 3, 0])]
    reported = [list(map(int, ranks)) for ranks in lists]
    for rank, found in enumerate(world_of(4)(in_groups, lists)):
        assert found == [(tuple(mine), sum(mine)) if rank in mine else None for mine in reported]


def nested(comm):
    """Make halves of halves down to single ranks; use every level at the end."""
    levels = [comm]
    while levels[-1].size > 1:
        levels.append(levels[-1].split(levels[-1].rank * 2 // levels[-1].size, -levels[-1].rank))
    sums = [total(level, comm.rank) for level in levels]
    assert [total(level, comm.rank) for level in reversed(levels)] == sums[::-1]
    return [level.size for level in levels], sums[0], sums[-1]


def test_groups_of_groups(world_of):
    for rank, found in enumerate(world_of(8)(nested)):
        assert found == ([8, 4, 2, 1], 28, rank)


def duplicate(comm):
    twin = comm.dup()
    assert (twin.rank, twin.size, twin.parent_ranks) == (comm.rank, comm.size, tuple(range(comm.size)))
    sums = total(twin), total(comm)
    comm.close()
    return (*sums, total(twin), total(twin.dup().split(0)))


@pytest.mark.parametrize("size", [1, 3])
def test_a_dup_outlives_what_it_was_made_of(world_of, size):
    assert world_of(size)(duplicate) == [(sum(range(size)),) * 4] * size


# ---- everything works in them -----------------------------------------------------------------------------


def all_kinds(comm):
    group = comm.group([3, 1, 2])
    if group is None:
        return total(comm)
    shared = group.full(5000, group.rank + 1.0)
    group.all_reduce(shared)
    assert group.stats()["path"] == "zero_copy"
    assert (shared == 6).all()
    private = np.full(40_000, 2.0)
    group.plan("all_reduce", private, "prod")()
    assert (private == 8).all()
    for algorithm in ALGORITHMS:
        group.all_reduce(private, "max", algorithm=algorithm)
    assert group.all_gather_object({"parent's": comm.rank}) == [{"parent's": rank} for rank in (3, 1, 2)]
    assert group.broadcast_object("from 3" if group.rank == 0 else None) == "from 3"
    parts = np.arange(6) if group.rank == 1 else None
    own = group.scatter(parts, 1, like=np.empty(2, int))
    assert own.tolist() == [2 * group.rank, 2 * group.rank + 1]
    group.barrier()
    assert group.stats()["calls"] < 40
    group.close()
    assert (shared == 6).all()
    with pytest.raises(shmring.Closed):
        group.barrier()
    return total(comm)


@pytest.mark.parametrize(
    "how", [{}, {"SHMRING_CHUNK": 256, "SHMRING_DEPTH": 2}, {"SHMRING_SEGMENT": "posix"}]
)
def test_every_method_works_in_a_group(world_of, how):
    assert world_of(4, **how)(all_kinds) == [6] * 4


def near_the_wrap(comm):
    group = comm.split(comm.rank // 2)
    return [total(group, count=count) for count in (1, 50, 5000, 1) for _ in range(20)][-1]


def test_sequence_numbers_begin_where_the_parents_did(world_of):
    assert world_of(4, SHMRING_FIRST_SEQ=(1 << 64) - 10)(near_the_wrap) == [1] * 4


def interleave(comm):
    """Calls on the parent and on overlapping groups in turn, all their waits met in this order."""
    rows, columns = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    for turn in range(50):
        for group in (rows, comm, columns) if turn % 2 else (columns, rows, comm):
            assert total(group, turn, 1 + turn * 37) == turn * group.size
    arrays = [group.full(4000, 1.0) for group in (rows, columns, comm)]
    for group, array in zip((rows, columns, comm), arrays, strict=True):
        group.all_reduce(array)
        assert (array == group.size).all()
        group.all_reduce(arrays[0])  # of another communicator: private memory here
    return True


def test_calls_on_several_communicators_in_turn(world_of):
    assert all(world_of(4, SHMRING_CHUNK=512)(interleave))


def in_threads(comm, turns):
    """Each pair of ranks has a group of its own, used by a thread of its own."""
    pairs = [(a, b) for a in range(comm.size) for b in range(a)]
    mine = [group for group in map(comm.group, pairs) if group is not None]
    wrong = []

    def use(group):
        for turn in range(turns):
            if total(group, turn, 1 + turn * 50) != 2 * turn:
                wrong.append((group.parent_ranks, turn))

    threads = [threading.Thread(target=use, args=(group,)) for group in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong or total(comm)


def test_overlapping_groups_in_different_threads(world_of):
    assert world_of(4, SHMRING_CHUNK=1024)(in_threads, 60) == [6] * 4


def crowded(comm):
    group = comm.split(comm.rank % 4)
    for count in (1, 50, 5000, 50_000) * 20:
        assert total(group, 1, count) == 2
    return total(comm)


def test_eight_ranks_in_pairs(world_of):
    assert world_of(8)(crowded) == [28] * 8


# ---- wrong and different arguments ------------------------------------------------------------------------

WRONG = {
    "no color": (lambda comm: comm.split("red"), TypeError, "color"),
    "half a color": (lambda comm: comm.split(0.5), TypeError, "color"),
    "no key": (lambda comm: comm.split(0, None), TypeError, "key"),
    "a large color": (lambda comm: comm.split(1 << 63), ValueError, "64 bits"),
    "timeout of 0": (lambda comm: comm.split(0, timeout=0), ValueError, "timeout"),
    "no such rank": (lambda comm: comm.group([0, 3]), ValueError, "0 to 2"),
    "a negative rank": (lambda comm: comm.group([-1]), ValueError, "0 to 2"),
    "a rank twice": (lambda comm: comm.group([1, 1]), ValueError, "once"),
    "no integers": (lambda comm: comm.group([0.0]), TypeError, "integer"),
    "no list": (lambda comm: comm.group(1), TypeError, "ranks is 1; give a list"),
    "a dup's timeout": (lambda comm: comm.dup(timeout=-1), ValueError, "timeout"),
}


def refuse_everything(comm):
    for name, (wrong, error, words) in WRONG.items():
        with pytest.raises(error) as caught:
            wrong(comm)
        assert words in str(caught.value), f"{name}: {caught.value}"
    return total(comm)


def test_a_wrong_argument_everywhere_is_an_error_everywhere_and_no_more(world_of):
    assert world_of(3)(refuse_everything) == [3] * 3


def refuse_on_rank_1(comm, name):
    if comm.rank == 1:
        WRONG[name][0](comm)
    comm.group([0]) if "rank" in name or "list" in name or "integers" in name else comm.split(0)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_on_one_rank_is_a_mismatch_elsewhere(world_of, name):
    first, wrong, last = world_of(3).outcomes(refuse_on_rank_1, name)
    assert isinstance(wrong, WRONG[name][1])
    for error in assert_all([first, last], shmring.Mismatch):
        assert "refused" in error.calls[1]


def call_differently(comm, what):
    if what == "lists":
        comm.group([0, 1] if comm.rank != 1 else [1, 0])
    elif what == "lengths":
        comm.group([0] if comm.rank != 1 else [1, 0])
    elif what == "group and split":
        comm.group([0]) if comm.rank == 1 else comm.split(0)
    else:
        comm.split(0) if comm.rank == 1 else comm.barrier()


CALLS = {
    "lists": ("group([0, 1])", "group([1, 0])", "group([0, 1])"),
    "lengths": ("group(1 ranks)", "group(2 ranks)", "group(1 ranks)"),
    "group and split": ("split()", "group(1 ranks)", "split()"),
    "split and barrier": ("barrier()", "split()", "barrier()"),
}


@pytest.mark.parametrize("what", CALLS)
def test_ranks_that_call_differently(world_of, what):
    for error in assert_all(world_of(3).outcomes(call_differently, what), shmring.Mismatch):
        for text, called in zip(error.calls, CALLS[what], strict=True):
            assert text in (called, "nothing yet")
        assert len(set(error.calls) - {"nothing yet"}) == 2


def test_a_rank_that_does_not_come_to_a_split_is_named(world_of):
    for error in assert_all(world_of(3).outcomes(come_late), shmring.Timeout):
        assert error.rank == 1


def come_late(comm):
    if comm.rank == 1:
        until_given_up()
    comm.split(0, timeout=1)


# ---- failures ---------------------------------------------------------------------------------------------


def die_in_a_group(comm, victim):
    pairs = comm.split(comm.rank // 2)
    comm.barrier()
    outcomes = []
    if comm.rank == victim:
        os.kill(os.getpid(), 9)
    for communicator in (pairs, comm):
        try:
            outcomes.append(total(communicator, 1))
        except shmring.RankFailed as error:
            outcomes.append(error)
    return outcomes


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_named_in_its_group_and_in_the_parent(victim):
    with Ranks(4) as ranks:
        outcomes = ranks.meet().outcomes(die_in_a_group, victim)
        for rank in set(range(4)) - {victim}:
            in_pairs, in_all = outcomes[rank]
            assert in_all.rank == victim
            if rank // 2 == victim // 2:
                assert in_pairs.rank == victim % 2
            else:
                assert in_pairs == 2


def abort_one(comm):
    pairs = comm.split(comm.rank // 2)
    if comm.rank == 1:
        pairs.abort("only this one")
    try:
        found = total(pairs, 1)
    except shmring.Aborted as error:
        found = error.rank, error.reason
    pairs = pairs if found == 2 else None
    return found, total(comm), total(comm.split(comm.rank // 2))


def test_an_abort_of_one_group_is_its_own(world_of):
    aborted = ((1, "only this one"), 6, 1)
    assert world_of(4)(abort_one) == [aborted, aborted, (2, 6, 1), (2, 6, 1)]


def abort_the_parent(comm):
    pairs = comm.split(comm.rank // 2)
    comm.barrier()
    if comm.rank == 0:
        comm.abort("all of it")
    with pytest.raises(shmring.Aborted):
        comm.barrier()
    return total(pairs), total(pairs.dup())


def test_an_abort_of_the_parent_leaves_its_groups(world_of):
    assert world_of(4)(abort_the_parent) == [(1, 1)] * 4


def die_on_the_way(comm, victim, delay_s):
    """Kill the victim in the middle of some split: no rank hangs, wherever it was."""
    comm.barrier()
    if comm.rank == victim:
        threading.Timer(delay_s, os._exit, (1,)).start()
    for _ in range(1000):
        comm.split(comm.rank // 2).close()


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("delay_s", [0.011, 0.0273, 0.0517])
def test_a_rank_that_ends_in_the_middle_of_a_split(victim, delay_s):
    with Ranks(4) as ranks:
        begin = counted_s()
        outcomes = ranks.meet().outcomes(die_on_the_way, victim, delay_s)
        assert isinstance(outcomes.pop(victim), Died)
        assert_all(outcomes, shmring.RankFailed)
        assert counted_s() - begin < 15


STEPS = {
    "before its lines": (groups, "_introduce"),
    "before its memory": (groups, "begin"),
    "before it has arrived": (startup, "_new_engine"),
}


def exit_where(comm, victim, where):
    """End the victim at a certain step of a split."""
    if comm.rank == victim:
        owner, name = STEPS[where]
        setattr(owner, name, lambda *_, **__: os._exit(1))
    try:
        comm.split(comm.rank % 2)
    except shmring.RankFailed as error:
        return error.rank, getattr(error, "__notes__", [])
    with pytest.raises(shmring.RankFailed) as caught:
        comm.barrier()
    assert caught.value.rank == victim
    return None


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("where", STEPS)
def test_a_rank_that_ends_at_each_step_of_a_split(victim, where):
    with Ranks(4) as ranks:
        outcomes = ranks.meet().outcomes(exit_where, victim, where)
        assert isinstance(outcomes[victim], Died)
        for rank in set(range(4)) - {victim}:
            if where == "before its lines":
                assert outcomes[rank][0] == victim
            elif rank % 2 == victim % 2:
                number, notes = outcomes[rank]
                assert number == victim // 2
                assert f"{[victim % 2, victim % 2 + 2]} of its parent" in notes[0]
            else:
                assert outcomes[rank] is None


def dawdle_where(comm, victim, where):
    """Delay the victim at a certain step of a split; all ranks that need it name it."""
    needs_it = where == "before its lines" or comm.rank % 2 == victim % 2
    if comm.rank == victim:
        owner, name = STEPS[where]
        real = getattr(owner, name)
        setattr(owner, name, lambda *a, **k: (time.sleep(2.5), setattr(owner, name, real), real(*a, **k))[-1])
    comm.split(comm.rank % 2, timeout=0.8 if needs_it else None).close()


@each_value({"where": STEPS, "victim": [0, 1, 2]})
def test_a_rank_that_is_late_at_each_step_of_a_split(world_of, victim, where):
    outcomes = world_of(4).outcomes(dawdle_where, victim, where)
    assert isinstance(outcomes[victim], shmring.Error)
    for rank in set(range(4)) - {victim}:
        if where == "before its lines":
            assert isinstance(outcomes[rank], shmring.Timeout)
            assert outcomes[rank].rank == victim
        elif rank % 2 == victim % 2:
            assert isinstance(outcomes[rank], shmring.Timeout)
            assert outcomes[rank].rank == victim // 2
        else:
            assert outcomes[rank] is None


def no_memory(comm):
    """Group 1 gets no memory: its ranks know, the others have their group, and all can try again."""
    if comm.rank == 1:
        real = segments.allocate

        def full(fd, offset, nbytes, *, purpose):
            raise shmring.OutOfMemory(f"{purpose}: full", wanted_nbytes=nbytes, available_nbytes=1)

        segments.allocate = full
    try:
        found = total(comm.split(comm.rank % 2))
    except shmring.OutOfMemory as error:
        found = error.available_nbytes, "a communicator" in str(error)
    if comm.rank == 1:
        segments.allocate = real
    return found, total(comm.split(comm.rank % 2)), total(comm)


def test_no_memory_for_one_group_is_an_error_of_that_group(world_of):
    failed = ((1, True), 1, 6)
    assert world_of(4)(no_memory) == [(1, 1, 6), failed, (1, 1, 6), failed]


@contextlib.contextmanager
def no_descriptors_left():
    """This process may open not one more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    blockers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                blockers.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for blocker in blockers:
            os.close(blocker)


def no_room(comm, victim):
    with no_descriptors_left() if comm.rank == victim else contextlib.nullcontext():
        try:
            comm.split(0)
            found = "a group"
        except shmring.Error as error:
            found = str(error)
    return found, total(comm.dup())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_without_descriptors_fails_the_split_and_no_more(world_of, victim):
    outcomes = world_of(3)(no_room, victim)
    assert [after for _, after in outcomes] == [3] * 3
    assert "ulimit -n" in outcomes[victim][0]
    assert all("descriptor" in found or "error of that rank" in found for found, _ in outcomes), outcomes


def fork_with_groups(comm):
    group = comm.split(0)
    pid = os.fork()
    if pid == 0:
        closed = 0
        for communicator in (comm, group):
            try:
                communicator.barrier()
            except shmring.Closed:
                closed += 1
        group.close()
        os._exit(closed)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), total(group), total(comm)


def test_a_forked_child_has_none_of_the_groups(world_of):
    assert world_of(2)(fork_with_groups) == [(2, 1, 1)] * 2


# ---- nothing is left --------------------------------------------------------------------------------------


def resources():
    """(descriptors, mappings of segments, threads) of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    mappings = sum("shmring" in line or "/dev/shm" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mappings, len(os.listdir("/proc/self/task"))


def make_many(comm, turns):
    """Groups that are closed, that are forgotten, and that are used after they have outlived others."""
    comm.split(0).close()
    time.sleep(0.1)  # a joined thread may still be visible for a moment
    before = resources()
    for turn in range(turns):
        pairs = comm.split(comm.rank // 2)
        total(pairs)
        inner = pairs.dup()
        array = inner.full(2000, 1.0)
        inner.all_reduce(array)
        if turn % 2:
            pairs.close()
        inner.barrier()
        comm.group([turn % comm.size])
    del pairs, inner, array
    comm.barrier()
    until_none(lambda: resources() != before)
    return before, resources()


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_many_groups_leave_nothing(world_of, segment):
    for before, after in world_of(4, SHMRING_SEGMENT=segment)(make_many, 25):
        assert after == before


def fail_many(comm, turns):
    """Splits that fail leave nothing either."""
    if comm.rank == 1:
        real, segments.allocate = segments.allocate, lambda *_, **__: 1 / 0
    before = resources()
    for _ in range(turns):
        with pytest.raises((shmring.Aborted, ZeroDivisionError)):
            comm.group([1, 0, 2])
    if comm.rank == 1:
        segments.allocate = real
    comm.barrier()
    until_none(lambda: resources() != before)
    return before, resources(), total(comm.dup())


def test_splits_that_fail_leave_nothing(world_of):
    for before, after, works in world_of(3)(fail_many, 10):
        assert after == before
        assert works == 3
