"""shrink after a failure: the survivors go on, whichever rank has died, was stopped, aborted, or dies
meanwhile."""

import contextlib
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from combinations import each_value, first
from ranks import Died, Ranks, interrupted, turns, until_there, when_there
from waiting import counted_s, wait_until

import shmring
from shmring._system import limits, segments

LARGE = 24 << 20
SOON_S = 10  # far below every timeout, on a machine that stalls at times
WORLDS = [None, [0, 0, 1], [0, 1, 0], [0, 1, 2]]  # by rank its host; None: one host


def world(nodes, size=3):
    return Ranks(size, nodes=nodes)


def check_works(comm, ranks):
    """Check the results of calls of every kind between the ranks that were `ranks` of the first world."""
    assert comm.size == len(ranks)
    x = np.full(50_000, ranks[comm.rank] + 1.0, "f4")
    comm.all_reduce(x)
    assert (x == sum(ranks) + len(ranks)).all()
    assert comm.all_gather_object(ranks[comm.rank]) == list(ranks)
    shared = comm.full(30_000, 1.0, "f4")
    comm.all_reduce(shared)
    assert (shared == comm.size).all()
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.zeros(3)
    if comm.size > 1:
        comm.sendrecv(np.full(3, float(comm.rank)), to, got, source)
        assert (got == source).all()
    comm.barrier()


def go_on_after(comm, path_when_running):
    """Call until the communicator is over, then go on; return the error and the state at that time."""
    x = np.ones(20_000, "f4")
    try:
        for _ in turns(comm, path_when_running):
            x[:] = 1
            comm.all_reduce(x)
    except shmring.Error as error:
        begin = counted_s()
        left = comm.shrink()
        with left:
            check_works(left, left.parent_ranks)
            took_s = counted_s() - begin
            with pytest.raises(shmring.Closed):
                comm.barrier()
            return type(error), error.rank, left.parent_ranks, left.rank, left.epoch, took_s
    raise AssertionError("nothing has happened")


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("nodes", WORLDS, ids=str)
def test_those_that_are_left_go_on(tmp_path, nodes, victim):
    with world(nodes) as ranks:
        ranks.meet()
        ranks.begin(go_on_after, str(tmp_path / "runs"))
        when_there(tmp_path / "runs", ranks)
        ranks.kill(victim)
        outcomes = ranks.answers()
    left = tuple(rank for rank in range(3) if rank != victim)
    assert isinstance(outcomes[victim], Died)
    for place, rank in enumerate(left):
        assert outcomes[rank][:5] == (shmring.RankFailed, victim, left, place, 1)
        assert outcomes[rank][5] < SOON_S


def fall(comm):
    victims = []
    ranks = tuple(range(comm.size))
    while comm.size > 1:
        check_works(comm, ranks)
        try:
            if comm.rank == (len(victims) * 7) % comm.size:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                comm.barrier()
        except shmring.RankFailed as error:
            victims.append(ranks[error.rank])
            comm = comm.shrink()
            ranks = tuple(ranks[rank] for rank in comm.parent_ranks)
    check_works(comm, ranks)
    comm.close()
    return ranks, sorted(victims), comm.epoch


def test_one_after_another_down_to_the_last():
    with Ranks(6) as ranks:
        outcomes = ranks.meet().outcomes(fall)
    (survivor,) = [outcome for outcome in outcomes if not isinstance(outcome, Died)]
    assert survivor[0] == (outcomes.index(survivor),)
    assert survivor[1] == [rank for rank in range(6) if rank != survivor[0][0]]
    assert survivor[2] == 5


def keep_on(comm, path_when_running):
    """Go on after every error, until a file names the ranks that should remain."""
    ranks = tuple(range(comm.size))
    while True:
        try:
            x = np.full(100, comm.size, "f4")
            comm.all_reduce(x)
            assert (x == comm.size**2).all()
            if comm.rank == 0:
                with open(path_when_running, "w") as file:
                    file.write(repr(ranks))
            word = comm.broadcast_object(os.path.exists(path_when_running + ".end"))
            if word:
                return ranks
        except shmring.Error:
            comm = comm.shrink()
            ranks = tuple(ranks[rank] for rank in comm.parent_ranks)


def state_in(path):
    return path.read_text() if path.exists() else ""


@each_value({"nodes": [None, [0, 1, 0, 1, 0], [0, 0, 1, 1, 2]], "seed": range(4)})
def test_deaths_while_those_that_are_left_find_each_other(tmp_path, nodes, seed):
    chance = random.Random(seed)
    victims = chance.sample(range(5), 3)
    left = tuple(rank for rank in range(5) if rank not in victims)
    path = tmp_path / "state"
    with Ranks(5, nodes=nodes) as ranks:
        ranks.meet()
        ranks.begin(keep_on, str(path))
        wait_until(lambda: state_in(path) == repr((0, 1, 2, 3, 4)), "all ranks have called", ranks)
        for victim in victims:
            ranks.kill(victim)
            time.sleep(chance.choice([0, 0.001, 0.004, 0.01, 0.03]))
        wait_until(lambda: state_in(path) == repr(left), "those that are left have found each other")
        (tmp_path / "state.end").touch()
        outcomes = ranks.answers(among=left)
    assert outcomes == [left] * 2


# ---- with all of them --------------------------------------------------------------------------------------


def come_apart(comm, how):
    before = comm.empty(5)
    before[:] = comm.rank
    try:
        if how == "mismatch":
            comm.all_reduce(np.ones(comm.rank + 2))
        elif how == "aborted" and comm.rank == 1:
            comm.abort("enough")
        elif how == "by shrink" and comm.rank == 1:
            pass
        else:
            comm.barrier()
    except shmring.Error as error:
        found = type(error)
    else:
        found = None
    left = comm.shrink()
    check_works(left, tuple(range(comm.size)))
    assert (before == comm.rank).all()
    fields = left.parent_ranks, left.rank == comm.rank, left.epoch
    left.close()
    return found, *fields


@pytest.mark.parametrize("nodes", WORLDS[:2], ids=str)
@pytest.mark.parametrize("how", ["mismatch", "aborted", "by shrink"])
def test_all_go_on_where_no_rank_has_died(nodes, how):
    with world(nodes) as ranks:
        outcomes = ranks.meet()(come_apart, how)
    error = shmring.Mismatch if how == "mismatch" else shmring.Aborted
    for rank, outcome in enumerate(outcomes):
        expected = None if rank == 1 and how != "mismatch" else error
        assert outcome == (expected, (0, 1, 2), True, 1)


def again_and_again(comm, times):
    counts = []
    for _ in range(times):
        if comm.rank == 0:
            comm.abort("once more")
        comm = comm.shrink()
        with contextlib.suppress(shmring.Aborted):  # a rank that is done with it may be ahead
            comm.all_reduce(np.ones(10_000))
        maps = Path("/proc/self/maps").read_text().count("memfd:shmring")
        counts.append((len(os.listdir("/proc/self/fd")), maps, threading.active_count()))
    comm.close()
    return comm.epoch, counts


@pytest.mark.parametrize("nodes", WORLDS[:2], ids=str)
def test_nothing_adds_up(nodes):
    with world(nodes) as ranks:
        for epoch, counts in ranks.meet()(again_and_again, 8):
            assert epoch == 8
            assert len(set(counts[2:])) == 1, counts


def in_groups(comm):
    half = comm.split(comm.rank % 2)
    if comm.rank == 0:
        half.abort("half of it")
    if comm.rank % 2 == 0:
        half = half.shrink()
    check_works(half, half.parent_ranks if half.epoch == 0 else tuple(comm.rank % 2 + 2 * r for r in (0, 1)))
    comm.barrier()
    return half.size, half.epoch


def test_a_group_goes_on_by_itself():
    with Ranks(4) as ranks:
        assert ranks.meet()(in_groups) == [(2, 1), (2, 0), (2, 1), (2, 0)]


# ---- ranks that stand still --------------------------------------------------------------------------------


def stand_still(comm, path_when_running, gone_on):
    """Make zero-copy calls until a Timeout; then the arrays are this rank's own, and it goes on with
    others."""
    x = comm.empty(300_000, "f8")
    one = comm.shared(1000, "f8")
    begin = x.ctypes.data
    try:
        for _ in turns(comm, path_when_running):
            x[:] = 1
            one[:] = 1
            comm.all_reduce(x, timeout=1.5)
    except shmring.Timeout as error:
        was = error.rank
    x[:] = 4711.0
    one[:] = 42.0 + comm.rank
    try:
        comm = comm.shrink(timeout=5)
    except shmring.RankFailed as error:
        return was, error.rank, str(error)
    gone_on.with_name(f"{gone_on.name} {comm.rank}").touch()
    for _ in range(100):
        comm.barrier()
        time.sleep(0.01)
        assert x.ctypes.data == begin
        assert (x == 4711.0).all()
        assert (one == 42.0 + comm.parent_ranks[comm.rank]).all()
    comm.close()
    del x, one
    return was, comm.parent_ranks


def test_a_rank_that_goes_on_later_harms_nobody(tmp_path):
    with Ranks(3) as ranks:
        ranks.meet()
        ranks.begin(stand_still, str(tmp_path / "runs"), tmp_path / "gone on")
        when_there(tmp_path / "runs", ranks)
        ranks.kill(1, signal.SIGSTOP)
        for rank in range(2):  # the others have had a Timeout, and have waited for it once more
            when_there(tmp_path / f"gone on {rank}", ranks)
        ranks.kill(1, signal.SIGCONT)
        outcomes = ranks.answers()
    assert outcomes[0] == outcomes[2] == (1, (0, 2))
    assert outcomes[1][:2] == (1, 1)
    assert "gone on without rank 1" in outcomes[1][2]


def come_late(comm, path):
    with contextlib.suppress(shmring.Aborted):  # given up by the first that is through
        comm.barrier()
    if comm.rank == 0:
        comm.abort("over")
    if comm.rank == 1:
        until_there(path)
    try:
        left = comm.shrink(timeout=2.5)
    except shmring.RankFailed as error:
        return error.rank, error.cause
    path.touch()
    return left.parent_ranks


@pytest.mark.parametrize("nodes", first(1, WORLDS[:2]), ids=str)
def test_a_rank_that_comes_too_late_is_left_behind(tmp_path, nodes):
    with world(nodes) as ranks:
        assert ranks.meet()(come_late, tmp_path / "gone on") == [(0, 2), (1, "left behind"), (0, 2)]


def leave_instead(comm):
    if comm.rank == 2:
        comm.close()
        return None
    comm.abort("over")
    return comm.shrink().parent_ranks


def test_a_rank_that_closes_is_not_waited_for():
    with Ranks(3) as ranks:
        assert ranks.meet()(leave_instead) == [(0, 1), (0, 1), None]


# ---- arguments and moments ---------------------------------------------------------------------------------


def misuse(comm):
    for timeout in (0, -1, "soon"):
        with pytest.raises((ValueError, TypeError)):
            comm.shrink(timeout=timeout)
    comm.barrier()  # nothing has happened
    comm.close()
    with pytest.raises(shmring.Closed):
        comm.shrink()


def test_wrong_arguments_harm_nothing():
    with Ranks(2) as ranks:
        ranks.meet()(misuse)


def alone(comm):
    comm.abort("over")
    left = comm.shrink()
    check_works(left, (0,))
    return left.size, left.epoch


def test_a_world_of_one():
    with Ranks(1) as ranks:
        assert ranks.meet()(alone) == [(1, 1)]


def be_interrupted(comm, path):
    comm.abort("over")
    if comm.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            interrupted(comm.shrink, 0.3)  # rank 0 is not there yet
        path.touch()
    else:
        until_there(path)
    left = comm.shrink()
    check_works(left, (0, 1))
    return left.parent_ranks


@pytest.mark.parametrize("nodes", [None, [0, 1]], ids=str)
def test_ctrl_c_ends_it_and_it_can_be_begun_anew(nodes, tmp_path):
    with world(nodes, 2) as ranks:
        assert ranks.meet()(be_interrupted, tmp_path / "interrupted") == [(0, 1)] * 2


def in_background(comm):
    x = comm.full(200_000, 1.0)
    works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
    if comm.rank == 1:
        time.sleep(0.05)
        comm.abort("over")
    for work in works:
        with contextlib.suppress(shmring.Aborted):
            work.wait()
    left = comm.shrink()
    check_works(left, (0, 1, 2))
    return left.size


def test_after_calls_in_the_background():
    with Ranks(3) as ranks:
        assert ranks.meet()(in_background) == [3, 3, 3]


def go_on_until_alone(comm, path_when_running):
    x = np.ones(1000)
    try:
        for _ in turns(comm, path_when_running):
            comm.all_reduce(x, "max")
    except shmring.Error:
        left = comm.shrink(timeout=4)
        check_works(left, left.parent_ranks)
        return left.parent_ranks, left.num_nodes


@pytest.mark.slow
def test_each_side_of_a_cut_link_goes_on(tmp_path, world_over):
    ranks = world_over([0, 0, 1, 1], timeout_s=4)
    ranks.begin(go_on_until_alone, str(tmp_path / "runs"))
    when_there(tmp_path / "runs", ranks)
    ranks.hosts[-1].down()
    outcomes = ranks.answers()
    ranks.hosts[-1].up()
    assert outcomes == [((0, 1), 1), ((0, 1), 1), ((2, 3), 1), ((2, 3), 1)]


def test_those_on_other_hosts_go_on_without_one_that_dies(tmp_path, world_over):
    ranks = world_over([0, 0, 1, 2], timeout_s=5)
    ranks.begin(go_on_until_alone, str(tmp_path / "runs"))
    when_there(tmp_path / "runs", ranks)
    ranks.hosts[0].kill()
    outcomes = ranks.answers()
    assert outcomes[2:] == [((2, 3), 2)] * 2


def have_no_room(comm):
    x, one = comm.full(1000, 1.0), comm.shared(10)
    segments.MemoryLimits.headroom = lambda self: limits.Headroom(0, "this test")
    comm.abort("over")
    with pytest.raises(shmring.Aborted) as caught:
        comm.barrier()
    assert any("can still be written to" in note and "this test" in note for note in caught.value.__notes__)
    x[:], one[:] = 2, 3  # the arrays are still usable
    comm.close()
    assert (x == 2).all()
    return True


def test_without_memory_for_copies_the_error_says_so():
    with Ranks(2) as ranks:
        assert ranks.meet()(have_no_room) == [True, True]


def keep_an_array(comm):
    """Check the arrays after a failure: own arrays stay, as private memory; no shared page once all ranks
    have closed."""
    kept, dropped, one = comm.full(LARGE, 1, "u1"), comm.full(LARGE, 2, "u1"), comm.shared(LARGE, "u1")
    freed_before = comm.full(LARGE, 3, "u1")
    view = kept[LARGE // 2 :]
    del freed_before
    one[comm.rank] = 7
    comm.barrier()
    comm.abort("over")
    with pytest.raises(shmring.Aborted):
        comm.barrier()
    one[:] = comm.rank
    del dropped
    left = comm.shrink()
    left.barrier()  # all have closed the old one
    status = Path("/proc/self/status").read_text()
    shared_nbytes = int(re.search(r"RssShmem:\s+(\d+)", status)[1]) << 10
    left.close()
    assert shared_nbytes < LARGE
    assert (kept == 1).all()
    assert (one == left.rank).all()
    kept[:] = 9
    assert (view == 9).all()
    del kept
    assert (view == 9).all()
    return True


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_arrays_stay_and_the_memory_of_all_others_goes(segment):
    with Ranks(3) as ranks:
        assert ranks.meet(SHMRING_SEGMENT=segment)(keep_an_array) == [True] * 3


def is_shared(array):
    """Return whether other processes could map the memory of the array."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return "s" in line.split()[1]
    raise AssertionError("it lies nowhere")


def see_the_end_in_a_thread(comm):
    x = comm.full(1000, 1.0)
    received = []

    def receive():
        try:
            comm.recv(np.zeros(1), source=1 - comm.rank)
        except shmring.Aborted as error:
            received.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    comm.barrier()
    if comm.rank == 0:
        comm.abort("over")
    thread.join()
    assert len(received) == 1
    # This thread has not seen the error yet, and may be writing into x.
    was_shared = is_shared(x) or comm.rank == 0  # which has given up itself
    with pytest.raises(shmring.Aborted):
        comm.barrier()
    return was_shared, is_shared(x), x.sum()


def test_arrays_stay_shared_until_the_thread_that_uses_them_is_reported():
    with Ranks(2) as ranks:
        assert ranks.meet()(see_the_end_in_a_thread) == [(True, False, 1000)] * 2
