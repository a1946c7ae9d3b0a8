"""One array that all ranks see: the same pages, fences, locks and their owners' deaths.

Its use in collectives, refused uses, and leftovers.
"""

import gc
import os
import pickle
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ranks import Died, Ranks, interrupted, until_there
from waiting import counted_s

import shmring
from shmring._arrays import shared_array
from tests.arrays.test_arrays import own_shared_nbytes, resources
from tests.collectives.test_errors import assert_all

MIB = 1 << 20
LARGE = 24 * MIB


# ---- one array --------------------------------------------------------------------------------------------


def see_each_other(comm):
    a = comm.shared((comm.size, 3), "i4", locks=2)
    assert isinstance(a, np.ndarray)
    assert (a == 0).all()
    assert a.flags.c_contiguous
    assert a.flags.writeable
    assert a.ctypes.data % 64 == 0
    a.fence()
    a[comm.rank] = comm.rank + 1
    a.fence()
    found = a.tolist()
    a.fence()
    if comm.rank == comm.size - 1:
        a += 100
    a.fence()
    return found, int(a.sum())


@pytest.mark.parametrize("how", [{}, {"SHMRING_SEGMENT": "posix"}])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_one_writes_all_see(world_of, size, how):
    rows = [[rank + 1] * 3 for rank in range(size)]
    assert world_of(size, **how)(see_each_other) == [(rows, np.sum(rows) + 300 * size)] * size


def shapes(comm):
    a = comm.shared((), "f8", locks=1)
    b = comm.shared((0, 5), "i2", locks=1)
    c = comm.shared(7, [("time", "f8"), ("count", "i4")])
    d = comm.shared(3, "M8[s]")
    e = comm.shared(5, np.bool_)
    f = comm.shared(3, "U")
    if comm.rank == 0:
        a[...], c["count"][3], d[1], e[4], f[2] = 2.5, 9, "2020-02-02", True, "x"
    for array in (a, b, c, d, e, f):
        array.fence()
    with a.lock(0), b.lock(0):
        pass
    return float(a), b.shape, int(c["count"].sum()), str(d[1]), int(e.sum()), f.tolist()


def test_every_shape_and_dtype(world_of):
    assert world_of(2)(shapes) == [(2.5, (0, 5), 9, "2020-02-02T00:00:00", 1, ["", "", "x"])] * 2


def views_and_copies(comm):
    a = comm.shared((4, 5), locks=3)
    views = [a[1:], a[:, ::2], a.T, a.reshape(-1), a.view("i8"), a[2], a[...], a[4:], a[1:1].T]
    copies = [a.copy(), a[4:].copy(), a + 1, a[[0, 1]], a[a == 0], np.sqrt(a), a.astype("f4")]
    for view in views:
        assert isinstance(view, type(a))
        view.fence()
        with view.lock(2):
            view[:1] = comm.rank
    for copy in copies:
        assert not np.may_share_memory(copy, a)
        if isinstance(copy, type(a)):
            for use in (copy.fence, lambda copy=copy: copy.lock(0)):
                with pytest.raises(ValueError, match="private copy"):
                    use()
    assert type(a + 1) is type(np.sqrt(a)) is np.ndarray
    assert type(a.sum()) is np.float64
    assert type(pickle.loads(pickle.dumps(a))) is np.ndarray
    before = a
    a += 1
    assert a is before
    a.fence()
    return repr(a).startswith("SharedArray")


def test_views_are_shared_and_copies_are_not(world_of):
    assert all(world_of(2)(views_and_copies))


def through_a_view(comm):
    """The views and locks of an array keep its memory."""
    part = comm.shared(1000, "i8", locks=1)[10:20]
    gc.collect()
    part.fence()
    if comm.rank == 0:
        part[...] = 7
    part.fence()
    return int(part.sum())


def test_a_view_keeps_the_memory(world_of):
    assert world_of(3)(through_a_view) == [70] * 3


# ---- in collectives ---------------------------------------------------------------------------------------


def in_collectives(comm):
    """Use it in collectives, as private memory; they never write to it."""
    a = comm.shared((comm.size, 5000), "i8")
    a[comm.rank] = comm.rank + 1
    a.fence()
    out = np.empty(a.shape, "i8")
    comm.all_reduce(a, out=out)
    assert (out == a * comm.size).all()
    assert comm.stats()["path"] != "zero_copy"
    zero_copy = comm.zeros(a.shape, "i8")
    comm.all_reduce(a, out=zero_copy)
    assert (zero_copy == out).all()
    assert (comm.reduce_scatter(a) == (comm.rank + 1) * comm.size).all()
    comm.broadcast(a if comm.rank == 0 else out)
    assert comm.rank == 0 or (out == a).all()
    for call in (
        lambda: comm.all_reduce(a),
        lambda: comm.all_reduce(a[comm.rank]),
        lambda: comm.all_reduce(out, out=a),
        lambda: comm.scan(a.T),
        lambda: comm.all_gather(np.ones(5000, "i8"), out=a),
        lambda: comm.plan("all_reduce", a),
    ):
        with pytest.raises(ValueError, match="one array for all ranks") as caught:
            call()
        assert "np.asarray" in str(caught.value)
    own = np.asarray(a[comm.rank])
    comm.all_reduce(own)  # each rank has a part of its own: that is as good as private memory
    a.fence()
    return a.min(), a.max()


@pytest.mark.parametrize("size", [2, 3])
def test_a_collective_reads_it_but_does_not_write_it(world_of, size):
    total = size * (size + 1) // 2
    assert world_of(size)(in_collectives) == [(total, total)] * size


def beside_zero_copy(comm):
    """Allocate and free blocks around it; each keeps its contents."""
    for turn in range(20):
        one = comm.shared(3000 + turn, "u1", locks=turn % 3)
        each = comm.full(4000, 1.0)
        one[comm.rank :: comm.size] = turn
        comm.all_reduce(each)
        assert comm.stats()["path"] == "zero_copy"
        one.fence()
        assert (one == turn).all()
        assert (each == comm.size).all()
    return True


def test_it_lives_beside_arrays_of_each_rank(world_of):
    assert all(world_of(3)(beside_zero_copy))


# ---- locks ------------------------------------------------------------------------------------------------


def histogram(comm, turns):
    """Counts of every rank's numbers, added to one table bin by bin under the locks of its blocks."""
    nbins, nblocks = 64, 8
    table = comm.shared(nbins, "i8", locks=nblocks)
    numbers = np.random.default_rng(comm.rank).integers(0, nbins, turns)
    for number in numbers.tolist():
        with table.lock(number * nblocks // nbins):
            table[number] += 1
    table.fence()
    own = np.bincount(numbers, minlength=nbins)
    comm.all_reduce(own)
    return table.tolist() == own.tolist(), int(table.sum())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_histogram_by_all_ranks_under_locks(world_of, size):
    assert world_of(size)(histogram, 2000) == [(True, 2000 * size)] * size


def by_threads(comm):
    """Lock from threads of one rank as from other ranks; a thread that would wait for itself gets an
    error."""
    count = comm.shared(1, "i8", locks=2)

    def add(times):
        for _ in range(times):
            with count.lock(1):
                count[0] += 1

    sys.setswitchinterval(1e-5)  # so that threads meet at every step
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add, [1000] * 3))
    sys.setswitchinterval(0.005)
    with count.lock(1), count.lock(0), pytest.raises(RuntimeError, match="already"), count.lock(1):
        pass
    count.fence()
    return int(count[0])


def test_threads_lock_each_other_out(world_of):
    assert world_of(2)(by_threads) == [6000] * 2


def time_out(comm):
    a = comm.shared(3, locks=1)
    if comm.rank == 0:
        with a.lock(0):
            a.fence()
            a.fence()
    else:
        a.fence()
        with pytest.raises(shmring.Timeout) as caught, a.lock(0, timeout=0.2):
            pass
        assert caught.value.rank == 0
        assert "lock 0" in str(caught.value)
        a.fence()
    with a.lock(0):  # nothing is broken
        a[0] += 1
    a.fence()
    return float(a[0])


def test_a_lock_that_is_not_let_go_is_a_timeout_that_harms_nothing(world_of):
    assert world_of(3)(time_out) == [3.0] * 3


def die_with_lock(comm, how):
    a = comm.shared(3, locks=4)
    if comm.rank == 1:
        a.lock(2).__enter__()
        a.fence()
        time.sleep(0.1)  # so that the others wait already
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.close() if how == "closed" else comm.abort("no more")
        return
    a.fence()
    with a.lock(1):
        pass
    with a.lock(2):
        pass


@pytest.mark.parametrize(
    ("how", "kind"),
    [("killed", shmring.RankFailed), ("closed", shmring.RankFailed), ("aborted", shmring.Aborted)],
)
def test_a_wait_for_a_lock_ends_with_its_owner(how, kind):
    with Ranks(3) as ranks:
        begin = counted_s()
        first, gone, last = ranks.meet().outcomes(die_with_lock, how)
        if how == "killed":
            assert isinstance(gone, Died)
        for error in assert_all([first, last], kind):
            assert error.rank == 1
            assert "lock 2" in str(error) or how == "aborted"
        assert counted_s() - begin < 15


def die_without_lock(comm):
    a = comm.shared(1, "i8", locks=1)
    if comm.rank == 1:
        with a.lock(0):
            a[0] += 1
    a.fence()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    with a.lock(0):
        a[0] += 1
    return True


def test_a_dead_rank_that_had_let_go_is_in_nobodys_way():
    with Ranks(3) as ranks:
        first, _, last = ranks.meet().outcomes(die_without_lock)
        assert first is last is True


def interrupt(comm, path):
    a = comm.shared(1, locks=1)
    if comm.rank == 0:
        with a.lock(0):
            a.fence()
            until_there(path)
    else:
        a.fence()
        begin = counted_s()
        with pytest.raises(KeyboardInterrupt):
            interrupted(a.lock(0).__enter__, 0.2)
        path.touch()
        assert counted_s() - begin < 15
    comm.barrier()
    return True


def test_ctrl_c_ends_the_wait_for_a_lock(world_of, tmp_path):
    assert all(world_of(2)(interrupt, tmp_path / "interrupted"))


def fork_with_lock(comm):
    """The child neither has the lock nor lets it go."""
    a = comm.shared(1, "i8", locks=1)
    with a.lock(0):
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            a[0] += 1
    if pid == 0:
        try:
            with a.lock(0):
                os._exit(1)
        except shmring.Closed:
            os._exit(0)
    a.fence()
    return os.waitstatus_to_exitcode(status), int(a[0])


def test_a_forked_child_does_not_hold_its_parents_lock(world_of):
    assert world_of(2)(fork_with_lock) == [(0, 2)] * 2


# ---- wrong and different arguments ------------------------------------------------------------------------

WRONG = {
    "objects": (lambda comm: comm.shared(3, object), TypeError, "objects"),
    "a negative length": (lambda comm: comm.shared(-1), ValueError, "0 or more"),
    "half a length": (lambda comm: comm.shared(1.5), TypeError, "integer"),
    "negative locks": (lambda comm: comm.shared(1, locks=-1), ValueError, "locks"),
    "half a lock": (lambda comm: comm.shared(1, locks=0.5), TypeError, "locks"),
    "too many locks": (lambda comm: comm.shared(1, locks=1 << 40), ValueError, "locks"),
    "timeout": (lambda comm: comm.shared(1, timeout=0), ValueError, "timeout"),
}


def refuse(comm):
    for name, (wrong, error, words) in WRONG.items():
        with pytest.raises(error) as caught:
            wrong(comm)
        assert words in str(caught.value), f"{name}: {caught.value}"
    a = comm.shared(1, locks=2)
    for number, error in ((2, IndexError), (-1, IndexError), ("0", TypeError)):
        with pytest.raises(error, match="lock"):
            a.lock(number)
    with pytest.raises(ValueError, match="timeout"):
        a.lock(0, timeout=0)
    with pytest.raises(IndexError, match="locks="):
        comm.shared(1).lock(0)
    comm.barrier()
    return True


def test_an_impossible_request_is_refused_without_other_effects(world_of):
    assert all(world_of(2)(refuse))


def refuse_on_rank_1(comm, name):
    WRONG[name][0](comm) if comm.rank == 1 else comm.shared(1)


@pytest.mark.parametrize("name", WRONG)
def test_an_error_of_construction_is_a_mismatch_on_the_others(world_of, name):
    first, wrong, last = world_of(3).outcomes(refuse_on_rank_1, name)
    assert isinstance(wrong, WRONG[name][1])
    for error in assert_all([first, last], shmring.Mismatch):
        assert "refused" in error.calls[1]


DIFFERENT = {
    "sizes": ((3, "f8", 0), (4, "f8", 0)),
    "shapes": (((2, 3), "f8", 0), ((3, 2), "f8", 0)),
    "dtypes": ((4, "f8", 0), (4, "i8", 0)),
    "locks": ((48, "f8", 0), (16, "f8", 2)),
}


def differ(comm, wanted):
    shape, dtype, locks = wanted[comm.rank == 1]
    comm.shared(shape, dtype, locks=locks)


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_want_different_arrays(world_of, what):
    for error in assert_all(world_of(3).outcomes(differ, DIFFERENT[what]), shmring.Mismatch):
        called = [call for call in error.calls if call != "nothing yet"]
        assert len(set(called)) == 2
        assert all(call.startswith("shared(") for call in called)


def mix_up(comm):
    comm.shared(3) if comm.rank else comm.empty(3)


def test_shared_is_not_empty(world_of):
    for error in assert_all(world_of(2).outcomes(mix_up), shmring.Mismatch):
        assert error.calls == ("empty(24 bytes)", "shared(24 bytes)")


def absurd(comm, shape):
    with pytest.raises(shmring.OutOfMemory) as caught:
        comm.shared(shape)
    a = comm.shared(1)
    a.fence()
    return caught.value.wanted_nbytes


@pytest.mark.parametrize("segment", ["memfd", "posix"])
@pytest.mark.parametrize("shape", [1 << 40, 1 << 55, 1 << 62, (1 << 40, 1 << 40)])
def test_out_of_memory_on_all_ranks_alike_and_the_communicator_remains(world_of, shape, segment):
    wanted = set(world_of(3, SHMRING_SEGMENT=segment)(absurd, shape))
    assert len(wanted) == 1
    assert wanted.pop() >= 8 * np.prod(np.array(shape, object))


# ---- giving back ------------------------------------------------------------------------------------------


def give_back(comm):
    """Own RssShmem: with the array, with a view of it only, with a lock of it only, without."""
    gc.collect()  # garbage of earlier tests
    comm.barrier()
    before = own_shared_nbytes()
    a = comm.shared(LARGE, "u1", locks=1)
    a[comm.rank :: comm.size] = 1
    a.fence()
    assert (a == 1).all()
    found = [own_shared_nbytes() - before]
    view = a[5:10]
    del a
    gc.collect()
    found.append(own_shared_nbytes() - before)
    lock = view.lock(0)
    del view
    gc.collect()
    found.append(own_shared_nbytes() - before)
    with lock:
        pass
    del lock
    gc.collect()
    found.append(own_shared_nbytes() - before)
    return found


@pytest.mark.parametrize("segment", ["memfd", "posix"])
def test_memory_goes_with_the_last_reference(world_of, segment):
    for with_array, with_view, with_lock, without in world_of(2, SHMRING_SEGMENT=segment)(give_back):
        assert min(with_array, with_view, with_lock) >= LARGE - MIB
        assert without < MIB


def use_after_close(comm):
    a = comm.shared(100, "i8", locks=1)
    a[comm.rank] = 5
    a.fence()
    comm.close()
    for use in (a.fence, a.lock(0).__enter__):
        with pytest.raises(shmring.Closed):
            use()
    return int(a.sum())


def test_it_outlives_the_communicator_but_for_fence_and_locks(world_of):
    assert world_of(2)(use_after_close) == [10] * 2


def allocate_often(comm, times):
    comm.shared(1)
    comm.all_reduce(np.ones(1000))
    before = resources()
    for turn in range(times):
        a = comm.shared(1500 + turn, "u1", locks=turn % 2)
        a[comm.rank] = 1
    del a
    gc.collect()
    comm.barrier()
    return before, resources()


def test_hundreds_of_them_leave_nothing(world_of):
    for before, after in world_of(2)(allocate_often, 300):
        assert after == before


def in_a_group(comm):
    pairs = comm.split(comm.rank // 2)
    a = pairs.shared(2, "i8", locks=1)
    for _ in range(200):
        with a.lock(0):
            a[0] += 1
    a.fence()
    return int(a[0])


def test_a_group_has_its_own(world_of):
    assert world_of(4)(in_a_group) == [400] * 4


def test_no_memory_to_describe_it_is_a_memory_error():
    """NumPy makes a read-only array where it has no memory to describe a buffer, as of a read-only one."""
    room = np.zeros(4096, np.uint8)
    room.flags.writeable = False
    with pytest.raises(MemoryError, match="describe a shared array"):
        shared_array.over(room, (4,), np.dtype("f4"), 0, None, None)
