"""Ranks of several hosts that die, stop, leave, abort or call something else: all ranks soon raise the same
error, which names the rank or the call; nothing is left. Hosts are names over loopback."""

import contextlib
import gc
import os
import re
import signal
import time

import numpy as np
import pytest
from combinations import each_pair, each_value, first
from ranks import Died, Ranks, turns, until_there, when_there
from snapshots import place_once_it_waits
from waiting import counted_s

import shmring
from shmring._lifecycle import startup
from tests.collectives.test_errors import (
    COUNTS,
    DIFFERENT,
    WRONG,
    array_for,
    assert_all,
    ones,
    refuse_everything,
    right_or_wrong,
)

SOON_S = 12  # far below every timeout, on a machine that stands still at times
LAYOUTS = {"1+1": [0, 1], "2+2": [0, 0, 1, 1], "2+2+2": [0, 0, 1, 1, 2, 2], "2+1+3": [0, 0, 1, 2, 2, 2]}
VICTIMS = [(layout, victim) for layout, nodes in LAYOUTS.items() for victim in range(len(nodes))]


def is_not_the_last(place):
    layout, rank = place
    return rank != len(LAYOUTS[layout]) - 1


def across(layout):
    return Ranks(len(LAYOUTS[layout]), nodes=LAYOUTS[layout])


def survivors(outcomes, *victims):
    for victim in victims:
        assert isinstance(outcomes[victim], Died), outcomes
    return [outcome for rank, outcome in enumerate(outcomes) if rank not in victims]


def assert_named(outcomes, kind, *culprits):
    """All have raised the same, which names one of these ranks."""
    for error in assert_all(outcomes, kind):
        assert error.rank in culprits, outcomes
        assert f"rank {error.rank}" in str(error)
    assert len({error.rank for error in outcomes}) == 1, outcomes


# ---- ranks that die ---------------------------------------------------------------------------------------


def barrier(comm):
    comm.barrier()


def small(comm):
    comm.all_reduce(ones(9))


def large(comm):
    comm.all_reduce(ones(60_000))


def moved(comm):
    comm.all_to_all(np.zeros((comm.size, 9000)))


def scanned(comm):
    comm.scan(ones(9000))


def gathered(comm):
    comm.all_gather_v(ones(5000 * (comm.rank + 1)))


def from_root(comm):
    comm.broadcast(ones(60_000), comm.size - 1)


def small_from_root(comm):
    comm.broadcast(ones(3), comm.size - 1)


def to_root(comm):
    comm.gather(ones(3), comm.size - 1)


def in_background(comm):
    for work in [comm.all_reduce(ones(count), async_op=True) for count in (5, 50_000, 500, 20_000)]:
        work.wait()


def asks_late(comm):
    """Poll the works only after they have ended."""
    works = [comm.all_reduce(ones(50_000), async_op=True) for _ in range(3)]
    time.sleep(0.01)
    for work in works:
        work.wait()


def together(comm):
    comm.all_reduce_many([ones(3000) for _ in range(20)])


def in_group(comm):
    comm.split(comm.rank % 2).close()


def in_dup(comm):
    with comm.dup() as twin:
        twin.all_reduce(ones(9))


CALLS = (barrier, small, large, moved, scanned, gathered, from_root, in_background, asks_late, together)


def for_ever(comm, call, path_when_running):
    for _ in turns(comm, path_when_running):
        call(comm)


def assert_a_death_is_named(tmp_path, layout, call, *victims):
    with across(layout) as ranks:
        ranks.meet(SHMRING_WIRE_SLICE=16384)
        ranks.begin(for_ever, call, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        begin = counted_s()
        for sig in (
            signal.SIGSTOP,
            signal.SIGKILL,
        ):  # at once: no rank hears of another's death before its own
            for victim in victims:
                ranks.kill(victim, sig)
        outcomes = survivors(ranks.answers(), *victims)
        assert counted_s() - begin < SOON_S
        for error in assert_all(outcomes, shmring.RankFailed):
            assert error.rank in victims, outcomes
            assert error.cause
            assert error.host
        if len(victims) == 1:
            assert_named(outcomes, shmring.RankFailed, *victims)


@each_value({"layout, victim": [("1+1", 0), ("2+2", 1), ("2+1+3", 2)], "call": CALLS})
def test_a_killed_rank_is_named_by_all_others(tmp_path, layout, victim, call):
    assert_a_death_is_named(tmp_path, layout, call, victim)


@pytest.mark.parametrize(("layout", "victim"), first(len(LAYOUTS), sorted(VICTIMS, key=is_not_the_last)))
def test_any_killed_rank_is_named(tmp_path, layout, victim):
    assert_a_death_is_named(tmp_path, layout, large, victim)


@each_value(
    {
        "layout, victims": [("2+2", (2, 3)), ("2+2+2", (0, 1)), ("2+1+3", (3, 4, 5))],
        "call": [small, large, in_background],
    }
)
def test_a_rank_of_a_killed_host_is_named(tmp_path, layout, victims, call):
    assert_a_death_is_named(tmp_path, layout, call, *victims)


@each_value({"layout, victim": [("1+1", 1), ("2+2", 0), ("2+1+3", 2)], "call": [in_group, in_dup]})
def test_a_rank_that_dies_while_groups_form_fails_them(tmp_path, layout, victim, call):
    with across(layout) as ranks:
        ranks.meet()
        ranks.begin(for_ever, call, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        begin = counted_s()
        ranks.kill(victim)
        for error in survivors(ranks.answers(), victim):
            assert isinstance(error, shmring.Error), error
            assert not isinstance(error, shmring.Timeout), error
        assert counted_s() - begin < SOON_S


def die_once_met(comm, victim):
    """Kill a rank so that the group sees the death first, as if the connections of its parent were slower."""

    join = startup.join

    def leave(*args, **kwargs):
        join(*args, **kwargs).close()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    if comm.rank == victim:
        startup.join = leave
    with comm.split(comm.rank % 2):
        comm.barrier()  # of all, as those do that are in the other group


def test_a_death_that_a_group_learns_of_is_that_of_its_parent():
    with across("2+1+3") as ranks:
        outcomes = survivors(ranks.meet().outcomes(die_once_met, 2), 2)
    assert_named(outcomes, shmring.RankFailed, 2)


def come_late_to_a_group(comm, over):
    """Rank 1 does not come to the meeting of its group before rank 0 has given up."""
    join = startup.join

    def wait(*args, **kwargs):
        until_there(over)
        return join(*args, **kwargs)

    if comm.rank:
        startup.join = wait
    try:
        comm.split(0, timeout=1)
    finally:
        startup.join = join
        over.touch()


def test_a_rank_that_is_late_for_its_group_is_reported_with_the_timeout(tmp_path):
    with across("1+1") as ranks:
        error, _ = ranks.meet().outcomes(come_late_to_a_group, tmp_path / "over")
    assert (type(error), error.rank) == (shmring.Timeout, 1)
    assert re.match(r"rank 1 of 2 did not come to \S+ within 1 s;", str(error))


def be_impatient(comm):
    """Rank 1 gives up long before the other rank of its host does, which waits for the one that is late."""
    comm.barrier()
    if comm.rank != 2:
        comm.barrier(timeout=1 if comm.rank == 1 else 15)


def test_a_wait_for_a_waiting_local_rank_names_the_late_rank():
    with Ranks(3, nodes=[0, 0, 1]) as ranks:
        outcomes = ranks.meet().outcomes(be_impatient)
    assert_named(outcomes[:2], shmring.Timeout, 2)


def die_idle(comm, victim, before_any_call):
    if not before_any_call:
        comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    comm.all_reduce(ones(9))


@pytest.mark.parametrize("before_any_call", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_died_between_calls_is_named(layout, before_any_call):
    with across(layout) as ranks:
        for_victim = ranks.meet().outcomes(die_idle, 1, before_any_call)
    assert_named(survivors(for_victim, 1), shmring.RankFailed, 1)


def call_twice_after(comm, victim):
    """The second error is the first again."""
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for call in (lambda: comm.all_reduce(ones(50_000)), comm.barrier, lambda: comm.empty(3), comm.dup):
        with pytest.raises(shmring.RankFailed) as caught:
            call()
        errors.append(str(caught.value))
    assert len(set(errors)) == 1, errors
    with pytest.raises(shmring.RankFailed):
        comm.all_reduce(ones(3), async_op=True).wait()
    return errors[0]


@pytest.mark.parametrize(("layout", "victim"), [("1+1", 0), ("2+2", 3), ("2+1+3", 2)])
def test_a_failure_is_final(layout, victim):
    with across(layout) as ranks:
        outcomes = survivors(ranks.meet().outcomes(call_twice_after, victim), victim)
    assert all(isinstance(outcome, str) and f"rank {victim}" in outcome for outcome in outcomes), outcomes


def use_group_after(comm, victim):
    """Groups without the dead go on; those with it do not; nor does the whole."""
    group = comm.split(comm.rank == victim)
    pair = comm.split(comm.rank // 2)
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(shmring.RankFailed):
        comm.barrier()
    x = np.full(20_000, 1.0)
    group.all_reduce(x)
    assert (x == comm.size - 1).all()
    if comm.rank // 2 == victim // 2:
        with pytest.raises(shmring.RankFailed) as caught:
            pair.all_reduce(x)
        assert pair.parent_ranks[caught.value.rank] == victim
    else:
        pair.all_reduce(x)
        assert (x == 2 * (comm.size - 1)).all()
    return True


def test_groups_without_the_dead_go_on():
    for nodes in ([0, 0, 1, 1], [0, 1, 0, 1]):
        with Ranks(4, nodes=nodes) as ranks:
            outcomes = survivors(ranks.meet().outcomes(use_group_after, 2), 2)
        assert outcomes == [True] * 3, outcomes


# ---- ranks that do not come, or stop ----------------------------------------------------------------------


def miss(comm, absent, call, folder):
    comm.timeout_s = 1.5  # of calls: the ranks may take longer to meet
    if comm.rank == absent:
        for rank in set(range(comm.size)) - {absent}:
            until_there(folder / f"{rank} is told")
        comm.barrier()
    try:
        call(comm)
        comm.barrier()  # the root did not wait before
    finally:
        (folder / f"{comm.rank} is told").touch()


ABSENT = [  # a plain run takes the first six
    ("1+1", 0, small),
    ("2+2", 0, from_root),
    ("2+2", 1, to_root),
    ("2+2", 3, barrier),
    ("2+2+2", 1, gathered),
    ("2+1+3", 4, large),
    ("2+2", 0, small),
    ("2+2", 1, from_root),
    ("2+2", 1, small_from_root),
    ("2+2", 3, moved),
    ("2+2+2", 1, large),
    ("2+1+3", 2, small),
]


@pytest.mark.parametrize(("layout", "absent", "call"), first(6, ABSENT))
def test_a_rank_that_does_not_come_is_a_timeout_naming_it(world_over_hosts, tmp_path, layout, absent, call):
    outcomes = world_over_hosts(LAYOUTS[layout]).outcomes(miss, absent, call, tmp_path)
    assert_named(outcomes, shmring.Timeout, absent)
    for error in outcomes:
        assert isinstance(error, TimeoutError)
        assert "1.5 s" in str(error)
        assert "timeout=" in str(error)


def wait_one_call_apart(comm, slow, absent):
    """One rank waits for the absent one; another, already in the next call and later, for both."""
    comm.timeout_s = 2.0
    if comm.rank == absent:
        time.sleep(4)
    elif comm.rank == slow:
        time.sleep(0.3)
    comm.gather(ones(20_000), slow)
    moved(comm)


@pytest.mark.parametrize(("slow", "absent"), first(2, [(0, 1), (2, 0), (1, 2), (1, 0), (2, 1), (0, 2)]))
def test_a_rank_that_waits_a_call_before_is_not_to_blame(slow, absent):
    with Ranks(3, nodes=[0, 1, 2]) as ranks:
        outcomes = ranks.meet().outcomes(wait_one_call_apart, slow, absent)
    assert_named(outcomes, shmring.Timeout, absent)


# ---- leaving, giving up, interrupting ---------------------------------------------------------------------


def leave_early(comm, leaver):
    comm.barrier()
    if comm.rank == leaver:
        comm.close()
        return None
    comm.all_reduce(ones(9))


@pytest.mark.parametrize(
    ("layout", "leaver"), [("1+1", 0), ("2+2", 1), ("2+2", 2), ("2+1+3", 2), ("2+1+3", 4)]
)
def test_a_rank_that_leaves_while_others_call(world_over_hosts, layout, leaver):
    outcomes = world_over_hosts(LAYOUTS[layout]).outcomes(leave_early, leaver)
    assert outcomes.pop(leaver) is None
    assert_named(outcomes, shmring.RankFailed, leaver)
    for error in outcomes:
        assert "closed" in error.cause
        assert error.op == "all_reduce"


def leave_after_the_last_call(comm, count):
    """Close right after the last call; the other ranks still finish it."""
    x = ones(count)
    comm.all_reduce(x)
    comm.close()
    return float(x[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_waits_for_the_others_to_leave(world_over_hosts, layout):
    for count in (1, 900, 60_000, 600_000):
        for _ in range(2):
            results = world_over_hosts(LAYOUTS[layout])(leave_after_the_last_call, count)
            assert results == [float(len(LAYOUTS[layout]))] * len(LAYOUTS[layout])


def give_up(comm, how):
    if comm.rank != 1:
        comm.all_reduce(ones(9))
        return
    time.sleep(0.2)
    if how == "abort":
        comm.abort("no convergence")
        comm.barrier()
    with comm:
        raise KeyError("no convergence")


@pytest.mark.parametrize("how", ["abort", "exception"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_gives_up_ends_everybodys_call_with_its_reason(world_over_hosts, layout, how):
    outcomes = world_over_hosts(LAYOUTS[layout]).outcomes(give_up, how)
    if how == "exception":
        assert isinstance(outcomes.pop(1), KeyError)
    assert_named(outcomes, shmring.Aborted, 1)
    for error in outcomes:
        assert "no convergence" in error.reason
        assert error.reason in str(error)


def wait_for_interrupt(comm, count, priority):
    if comm.rank == comm.size - 1:
        time.sleep(30)
    comm.all_reduce(ones(count), priority=priority)


@each_pair({"layout": ["1+1", "2+2", "2+1+3"], "count": [3, 60_000], "priority": [None, 1]})
def test_ctrl_c_ends_a_wait_for_another_host(layout, count, priority):
    with across(layout) as ranks:
        ranks.meet(timeout_s=40)
        ranks.begin(wait_for_interrupt, count, priority)
        place_once_it_waits(ranks, 0)
        begin = counted_s()
        ranks.kill(0, signal.SIGINT)
        own, *others = ranks.answers(among=range(len(LAYOUTS[layout]) - 1))
        took_s = counted_s() - begin
        ranks.kill(len(LAYOUTS[layout]) - 1)
        assert isinstance(own, KeyboardInterrupt)
        for error in assert_all(others, shmring.Aborted):
            assert "KeyboardInterrupt in rank 0" in error.reason
        assert took_s < SOON_S


# ---- calls that do not match, and wrong ones --------------------------------------------------------------


OF_ONE_HOST = {"algorithm", "direct and master", "halving and double tree", "rings", "two algorithms"}
APART = sorted(set(DIFFERENT) - OF_ONE_HOST)
ARGUMENTS = "every other", "a text", "no such op", "float band", "timeout of 0", "out overlaps"
REFUSED = *ARGUMENTS, "no such root"


def call_differently(comm, what, odd_one):
    """Let one rank call something else. A rank that waits for no other, such as a root, may see it only in
    its next call."""
    comm.all_reduce(ones(5))
    with contextlib.suppress(shmring.Mismatch):
        DIFFERENT[what][comm.rank == odd_one](comm)
    with pytest.raises(shmring.Mismatch) as caught:
        comm.barrier()
    return caught.value


@each_value({"layout, odd_one": [("1+1", 1), ("2+2", 0), ("2+2", 3), ("2+1+3", 2)], "what": APART})
def test_calls_that_differ_are_a_mismatch_on_every_rank(world_over_hosts, layout, odd_one, what):
    outcomes = world_over_hosts(LAYOUTS[layout]).outcomes(call_differently, what, odd_one)
    for error in assert_all(outcomes, shmring.Mismatch):
        assert len(error.calls) == len(outcomes)
        assert str(error).count("called") >= 2, error


@each_value({"layout, wrong_one": [("1+1", 1), ("2+2", 1), ("2+1+3", 2)], "name": REFUSED})
def test_a_wrong_argument_on_one_rank_is_a_mismatch_elsewhere(world_over_hosts, layout, wrong_one, name):
    for path in ("tiny", "large"):
        outcomes = world_over_hosts(LAYOUTS[layout]).outcomes(refuse_on_one, wrong_one, path, name)
        assert_all(outcomes, shmring.Mismatch)
        if "root" not in name:  # the root has finished the call before any rank could notice
            assert any("refused" in str(error) for error in outcomes), outcomes


def refuse_on_one(comm, wrong_one, path, name):
    x = array_for(comm, path)
    try:
        right_or_wrong(comm, x, comm.rank == wrong_one, name)
        assert comm.rank != wrong_one
    except shmring.Mismatch as error:
        assert comm.rank != wrong_one
        return error
    except WRONG[name][1]:
        assert comm.rank == wrong_one
    with pytest.raises(
        shmring.Mismatch
    ) as caught:  # with the next call, if the rank did not wait in this one
        comm.barrier()
    return caught.value


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_argument_everywhere_is_an_error_everywhere_and_no_more(world_over_hosts, layout, path):
    world_over_hosts(LAYOUTS[layout])(refuse_everything, path)


def refuse_many(comm, late, times):
    """Send as many refusals as messages can be in flight, or more, before any other rank has begun."""
    if comm.rank in late:
        time.sleep(0.5)
    for _ in range(times):
        with pytest.raises(ValueError, match="allowed"):
            comm.all_reduce(ones(3), "sub")
    x = ones(9)
    comm.all_reduce(x)
    return float(x[0])


@each_value({"layout, late": [("1+1", (1,)), ("2+2", (2, 3)), ("2+1+3", (0, 1))], "times": [32, 64, 300]})
def test_any_number_of_wrong_calls_harms_nobody(world_over_hosts, layout, late, times):
    size = len(LAYOUTS[layout])
    assert world_over_hosts(LAYOUTS[layout])(refuse_many, late, times) == [float(size)] * size


# ---- nothing is left --------------------------------------------------------------------------------------


def descriptors():
    gc.collect()
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_lives(fd))


def fd_lives(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}") and "/proc/" not in os.readlink(f"/proc/self/fd/{fd}")


def leave_what(comm):
    """Close the communicator and everything made from it; return the number of descriptors."""
    comm.close()
    return len(descriptors())


def use_and_fail(comm, victim):
    twin, pair = comm.dup(), comm.split(comm.rank % 2)
    x = comm.zeros(20_000)
    twin.all_reduce(x)
    works = [pair.all_reduce(ones(30_000), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(shmring.RankFailed):
        twin.barrier()
    with pytest.raises(shmring.RankFailed):
        comm.all_reduce(ones(60_000), async_op=True).wait()
    twin.close()
    pair.close()
    comm.close()


@pytest.mark.parametrize(("layout", "victim"), first(1, [("2+2", 3), ("1+1", 0), ("2+1+3", 2)]))
def test_no_descriptor_is_left_after_a_failure(layout, victim):
    with across(layout) as ranks:
        ranks.meet()
        before = ranks(leave_what)
        ranks.meet()
        survivors(ranks.outcomes(use_and_fail, victim), victim)
        ranks.begin(leave_what)
        after = ranks.answers()
        assert isinstance(after.pop(victim), Died)
        before.pop(victim)
        assert after == before
