"""put, get, accumulate and fetch_and_add on an array that all ranks see: NumPy's results, exact totals in any
order of arrival, ranges that no rank sees half written, and ranks that die inside one."""

import ctypes
import enum
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
from ranks import Died, Ranks, interrupt_once_there

import shmring
from shmring._arrays import locks
from shmring._arrays import shared_array as shared
from shmring._arrays.locks import LOCK_NBYTES
from tests.collectives.test_errors import assert_all

RANGE_NBYTES = 32 << 10  # bytes that are whole
UFUNCS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
}  # fmt: skip
SUMMED = ["i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


# ---- against NumPy ----------------------------------------------------------------------------------------


def some(dtype, count, seed):
    numbers = np.random.default_rng(seed).integers(1, 5, count)
    return (numbers * (1 + 1j) if np.dtype(dtype).kind == "c" else numbers).astype(dtype)


def as_numpy(comm, dtype, count):
    """Everything on one array and, by NumPy, on a copy of it: to the bit."""
    a = comm.shared(count, dtype)
    mine = np.zeros(count, dtype)
    index = np.random.default_rng(7).integers(-count, count, 3 * count // 2)
    two = np.array(2).astype(dtype)
    ops = [op for op, ufunc in UFUNCS.items() if reduces(op, dtype)]
    if comm.rank == 0:
        for one in (a, mine):
            one.put(range(count), some(dtype, count, 1))
        for turn, op in enumerate(ops):
            values = some(dtype, count, turn)
            a.accumulate(..., values, op)
            mine[...] = UFUNCS[op](mine, values)
            a.accumulate(slice(1, -2, 3), two, op)
            mine[1:-2:3] = UFUNCS[op](mine[1:-2:3], two)
            assert a.get().tobytes() == mine.tobytes(), op
        a.accumulate(index, some(dtype, index.size, 3))
        np.add.at(mine, index, some(dtype, index.size, 3))
        assert a.get(index).tobytes() == mine[index].tobytes()
        before = mine[: count // 2].copy()
        assert a.fetch_and_add(slice(count // 2), before[::-1]).tobytes() == before.tobytes()
        mine[: count // 2] += before[::-1]
        a.put(slice(2, 9), [1, 2])
        mine.put(range(2, 9), [1, 2])
    a.fence()
    return a.get().tobytes()


def reduces(op, dtype):
    return {
        "b": op in ("band", "bor", "bxor", "land", "lor", "lxor"),
        "f": op in ("sum", "prod", "min", "max"),
        "c": op in ("sum", "prod"),
    }.get(np.dtype(dtype).kind, not op.startswith("l"))


@pytest.mark.parametrize("dtype", [*SUMMED, "?"])
def test_it_is_what_numpy_makes_of_the_same(world_of, dtype):
    first, second = world_of(2)(as_numpy, dtype, 40_000 // np.dtype(dtype).itemsize * 3)
    assert first == second


def shapes(comm):
    a = comm.shared((4, 5), "i8")
    a.put(range(20), range(20))
    assert (a.get() == np.arange(20).reshape(4, 5)).all()
    assert a.get(-1) == 19
    assert type(a.get(3)) is np.int64
    assert type(a.get()) is np.ndarray
    assert a.get([[1, 2], [3, -1]]).tolist() == [[1, 2], [3, 19]]
    assert a.get(slice(2, 5)).tolist() == [2, 3, 4]
    assert a.get(slice(5, 2)).shape == a.get([]).shape == (0,)
    out = np.empty((5, 4), "i8")
    assert a.get(out=out) is out
    assert out.reshape(-1).tolist() == list(range(20))
    part = a[2:4]  # a view: its own numbers, the same elements
    a.fence()
    part.accumulate(..., np.ones((2, 5), "i8"))
    part.accumulate(0, 10)
    a[3, 1:3].put([0, 1], 7)
    a.fence()
    assert a[2].tolist() == [10 + 11 * comm.size, *(n + comm.size for n in (11, 12, 13, 14))]
    assert a[3].tolist() == [15 + comm.size, 7, 7, 18 + comm.size, 19 + comm.size]
    a.fence()
    a.accumulate(slice(0, 5), a[1])  # of its own memory, which changes in the loop
    scalar, empty = comm.shared((), "f8"), comm.shared((0, 3), "f8")
    scalar.accumulate(..., 1.5)
    empty.accumulate(..., 1.5)
    assert empty.get().shape == (0, 3)
    scalar.fence()
    return a[0].tolist(), float(scalar.get())


@pytest.mark.parametrize("size", [1, 3])
def test_numbers_slices_integers_and_views(world_of, size):
    row = [n + size * (n + 5) for n in range(5)]
    assert world_of(size)(shapes) == [(row, 1.5 * size)] * size


def like_put(comm):
    """np.put, which calls the method, with all that it takes."""
    a, mine = comm.shared(10, "i4"), np.zeros(10, "i4")
    for one in (a, mine) if comm.rank == 0 else ():
        np.put(one, [1, 3, 3], [4.9, 5, 6])
        np.put(one, [12, -11], [1, 2], mode="wrap")
        np.put(one, [-5, 44], [8, 9], mode="clip")
        np.put(one, np.ma.masked_array([0, 5], [True, False]), [3, 2])
        np.put(one, range(4, 9), [1, 2])
        np.put(one, [], 3)
        np.put(one, [2], [])
        np.put(one, [7, 8], ["3", 2.5])
        for value, error in ((1 << 70, OverflowError), (1j, TypeError), (float("nan"), ValueError)):
            with pytest.raises(error):
                np.put(one, 0, value)
    a.put(slice(9, 99), a.get(slice(9, 99)), "clip")
    a.put(..., a.get(), "wrap")
    a.fence()
    copy = a.copy()
    copy.put(0, 99)  # private: NumPy's own
    assert copy[0] == 99
    return a.tolist(), mine.tolist()


def test_put_is_numpys_put(world_of):
    shared, mine = world_of(2)(like_put)[0]
    assert shared == mine


class Color(enum.IntEnum):
    RED = 3


def parts_and_names(comm):
    """A rank's part may be empty. Numbers may be of a subclass, which may have no 0."""
    a = comm.shared(5, "u1")
    part = a[2 * comm.rank : 2 * comm.rank + 2][:5]
    part.fence()
    part.accumulate(..., Color.RED)
    part.put([], Color.RED)
    part.fence()
    return part.get().tolist(), part.fetch_and_add(slice(None), np.float64(1) < 2).tolist()


def test_a_part_without_elements_takes_part(world_of):
    expected = [[3, 3], [3, 3], [3], []]
    assert world_of(4)(parts_and_names) == [(part, part) for part in expected]


def half(comm):
    """Each addition is rounded to nearest even, once."""
    a = comm.shared(3, "f2")
    a.put(range(3), [2048, 2050, 0.1])
    a.accumulate(..., np.array([1, 1, 0.2], "f2"))
    return a.get().tolist()


def test_float16_rounds_to_even(world_of):
    expected = (np.array([2048, 2050, 0.1], "f2") + np.array([1, 1, 0.2], "f2")).tolist()
    assert expected[:2] == [2048, 2052]
    assert world_of(1)(half) == [expected]


def narrow(comm):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a = comm.shared(100, ml_dtypes.bfloat16)
    for _ in range(32):
        a.accumulate(..., np.ones(100, ml_dtypes.bfloat16))
    a.fence()
    return a.get().astype("f4").tolist()


def test_bfloat16(world_of):
    pytest.importorskip("ml_dtypes")
    assert world_of(2)(narrow) == [[64.0] * 100] * 2


# ---- all at once ------------------------------------------------------------------------------------------


def hammer(comm, dtype, turns):
    """Check that no addition is lost, in any order of arrival. Added values are subtracted again: all sums
    are exact."""
    count = 3 * RANGE_NBYTES // np.dtype(dtype).itemsize + 5
    a = comm.shared(count, dtype)
    rng = np.random.default_rng(comm.rank)
    plus = rng.integers(0, 3, count).astype(dtype)
    minus = np.zeros_like(plus) - plus
    index = rng.integers(0, count, 50)
    comm.barrier()
    for turn in range(2 * turns + 1):
        values = minus if turn % 2 else plus
        a.accumulate(..., values)
        a.accumulate(index, values[:50])
        a.fetch_and_add(slice(100, 200), values[:100])
    a.fence()
    mine = plus.copy()
    np.add.at(mine, index, plus[:50])
    mine[100:200] += plus[:100]
    comm.all_reduce(mine)
    return bool((a.get() == mine).all())


@pytest.mark.parametrize("dtype", ["u2", "i8", "f2", "f4", "c8"])
def test_no_addition_is_lost(world_of, dtype):
    assert all(world_of(4)(hammer, dtype, 1000))


def draw_tickets(comm, times):
    counter = comm.shared(1, "i8")
    comm.barrier()
    drawn = [int(counter.fetch_and_add(0, 1)) for _ in range(times)]
    assert drawn == sorted(drawn)
    counter.fence()
    assert counter.get(0) == times * comm.size
    return drawn


@pytest.mark.parametrize("size", [1, 4])
def test_every_ticket_is_drawn_once(world_of, size):
    drawn = itertools.chain(*world_of(size)(draw_tickets, 10_000))
    assert sorted(drawn) == list(range(10_000 * size))


def by_threads(comm):
    counter = comm.shared(RANGE_NBYTES, "i8")
    threads = [threading.Thread(target=lambda: [counter.accumulate(..., 1) for _ in range(40)]) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counter.fence()
    return bool((counter == 80 * comm.size).all())


def test_threads_of_a_rank_keep_out_of_each_others_ranges(world_of):
    assert all(world_of(2)(by_threads))


def tear(comm, times):
    """Let two ranks write whole ranges of one number each; a reader sees one number in each range."""
    per_range = RANGE_NBYTES // 8
    a = comm.shared((4, per_range), "i8")
    torn = 0
    comm.barrier()
    for turn in range(times):
        if comm.rank % 2:
            a.put(..., turn)
            a.accumulate(..., 1)
        else:
            found = a.get()
            torn += int((found != found[:, :1]).sum())
    a.fence()
    return torn


def test_no_rank_sees_a_range_half_written(world_of):
    assert world_of(4)(tear, 500) == [0] * 4


def in_a_group(comm):
    pair = comm.split(comm.rank % 2)
    a = pair.shared(10, "f8")
    a.accumulate(..., comm.rank)
    a.fence()
    return float(a[0])


def test_a_group_has_its_own(world_of):
    assert world_of(4)(in_a_group) == [2.0, 4.0, 2.0, 4.0]


# ---- ends -------------------------------------------------------------------------------------------------


def take_stripe(comm, array):
    """Set the stripe's word as if this rank were inside the array's first range."""
    offset = shared.room_nbytes(array.nbytes, 0) - locks.count_for(array.nbytes) * LOCK_NBYTES
    ctypes.c_uint32.from_address(array.ctypes.data + offset).value = comm.rank + 1


def die_inside(comm):
    a = comm.shared(3 * RANGE_NBYTES, "u1")
    if comm.rank == 1:
        take_stripe(comm, a)
        a.fence()
        time.sleep(0.1)  # so that the others wait already
        os.kill(os.getpid(), signal.SIGKILL)
    a.fence()
    a.accumulate(slice(RANGE_NBYTES, None), 1)  # behind its range
    a.accumulate(RANGE_NBYTES - 1, 1)


def test_a_wait_for_a_dead_ranks_range_raises():
    with Ranks(3) as ranks:
        first, gone, last = ranks.meet().outcomes(die_inside)
        assert isinstance(gone, Died)
        for error in assert_all([first, last], shmring.RankFailed):
            assert error.rank == 1
            assert "while it accessed a range of a shared array" in str(error)


def wait_in_vain(comm):
    """Keep rank 1 inside the first range: Timeout and Ctrl-C leave completed parts done, and have no other
    effect."""
    a = comm.shared(2 * RANGE_NBYTES, "u1")
    if comm.rank == 1:
        take_stripe(comm, a)
        a.fence()
    else:
        a.fence()
        with pytest.raises(shmring.Timeout, match="rank 1 still accessed a range of a shared array"):
            a.accumulate(..., 1, timeout=0.2)
        interrupt_once_there(a[RANGE_NBYTES:])  # the part before the one that waits
        with pytest.raises(KeyboardInterrupt):
            a.put([RANGE_NBYTES, 0], 7)
        assert a.get(RANGE_NBYTES) == 7
    a.fence()
    return a.tolist() == [0] * RANGE_NBYTES + [7] + [0] * (RANGE_NBYTES - 1)


def test_a_wait_ends_by_a_timeout_or_by_ctrl_c(world_of):
    assert all(world_of(2)(wait_in_vain))


def use_after_close(comm):
    a = comm.shared(100, "i8")
    a.accumulate(..., 1)
    a.fence()
    comm.close()
    for use in (a.get, lambda: a.put(0, 1), lambda: a.accumulate(0, 1), lambda: a.fetch_and_add(0, 1)):
        with pytest.raises(shmring.Closed):
            use()
    return int(a.sum())


def test_the_end_of_the_communicator_takes_them_away(world_of):
    assert world_of(2)(use_after_close) == [200] * 2


def use_after_an_error(comm):
    """Every rank has a copy now: access to it would have no effect on the other ranks."""
    a = comm.shared(100, "i8", locks=1)
    a.accumulate(..., 1)
    a.fence()
    if comm.rank == 0:
        comm.abort("enough")
    with pytest.raises(shmring.Aborted):
        comm.barrier()
    uses = (a.get, lambda: a.put(0, 1), lambda: a.accumulate(0, 1), lambda: a.fetch_and_add(0, 1))
    for use in (*uses, a.lock(0).__enter__):
        with pytest.raises(shmring.Aborted, match="enough"):
            use()
    return int(a.sum())


def test_an_error_that_ends_the_communicator_takes_them_away(world_of):
    assert world_of(2)(use_after_an_error) == [200] * 2


# ---- wrong arguments --------------------------------------------------------------------------------------

WRONG = {
    "beyond": (lambda a: a.accumulate(12, 1), IndexError, "index 12 is out of bounds"),
    "before": (lambda a: a.get([0, -13]), IndexError, "index -13 is out of bounds"),
    "put beyond": (lambda a: a.put([1, 12], 5), IndexError, "out of bounds"),
    "a mask": (lambda a: a.get(np.ones(12, bool)), IndexError, "flatnonzero"),
    "half an index": (lambda a: a.get(1.5), TypeError, "integer"),
    "half indices": (lambda a: a.get([1.5]), TypeError, "safe"),
    "half indices, wrapped around": (lambda a: a.put([1.5], 7, "wrap"), TypeError, "safe"),
    "half an index, clipped": (lambda a: a.put(1.5, 7, "clip"), TypeError, "safe"),
    "an axis": (lambda a: a.get([1, 2, "x"]), TypeError, ""),
    "an index of axes": (lambda a: a.get((1, 2)), TypeError, "ravel_multi_index"),
    "added at axes": (lambda a: a.accumulate((1, 2), 1), TypeError, "ravel_multi_index"),
    "fetched at axes": (lambda a: a.fetch_and_add((1, 2), 1), TypeError, "ravel_multi_index"),
    "fractions": (lambda a: a.accumulate(0, 1.5), TypeError, "cannot be cast"),
    "values": (lambda a: a.accumulate(slice(3), [1, 2]), ValueError, "2 values for 3 elements"),
    "op": (lambda a: a.accumulate(0, 1, "sub"), ValueError, "op is 'sub'"),
    "avg": (lambda a: a.accumulate(0, 1, "avg"), ValueError, "op is 'avg'"),
    "mode": (lambda a: a.put(0, 1, "near"), ValueError, "mode"),
    "out's dtype": (lambda a: a.get(out=np.empty(12, "f4")), ValueError, "float32"),
    "out's size": (lambda a: a.get(out=np.empty(11, "i8")), ValueError, "11 elements"),
    "out's gaps": (lambda a: a.get(out=np.empty(24, "i8")[::2]), ValueError, "C order"),
    "masked values": (lambda a: a.accumulate(0, np.ma.masked_array([1], [True])), TypeError, "mask would"),
    "masked indices": (lambda a: a.accumulate(np.ma.masked_array([1], [True]), 1), TypeError, "mask would"),
    "masked out": (lambda a: a.get(0, out=np.ma.masked_array([1], [True])), TypeError, "mask would"),
    "out inside": (lambda a: a.get(slice(2), out=np.asarray(a).reshape(-1)[:2]), ValueError, "itself"),
    "a view with gaps": (lambda a: a[:, ::2].get(), ValueError, "do not follow"),
    "another order": (lambda a: a.T.accumulate(..., 1), ValueError, "do not follow"),
    "a copy": (lambda a: a.copy().accumulate(0, 1), ValueError, "private copy"),
    "other bytes": (lambda a: a.view(">i8").get(0), TypeError, "byte order"),
    "dates": (lambda a: a.view("M8[s]").get(0), TypeError, "datetime64"),
    "between elements": (
        lambda a: a.view("u1").reshape(-1)[1:17].view("i8").get(0),
        ValueError,
        "do not foll",
    ),
    "bits of floats": (lambda a: a.view("f8").accumulate(0, 1.0, "band"), TypeError, "no meaning"),
}


def refuse(comm):
    a = comm.shared((3, 4), "i8")
    for name, (wrong, kind, words) in WRONG.items():
        with pytest.raises(kind) as caught:
            wrong(a)
        assert words in str(caught.value), f"{name}: {caught.value}"
    view = a[1:]
    view.flags.writeable = False
    for use in (view.put, view.accumulate, view.fetch_and_add):
        with pytest.raises(ValueError, match="read-only"):
            use(0, 1)
    assert view.get(0) == 0
    a.fence()
    return a.tolist()


def test_wrong_arguments_are_refused_and_change_nothing(world_of):
    assert world_of(2)(refuse) == [[[0] * 4] * 3] * 2


def room(comm):
    """Stripes are part of the array's memory: none of an empty one, 16 at most."""
    line = LOCK_NBYTES
    rooms = [shared.room_nbytes(nbytes, 0) for nbytes in (0, 1, RANGE_NBYTES, RANGE_NBYTES + 1)]
    assert rooms == [0, 2 * line, RANGE_NBYTES + line, RANGE_NBYTES + 3 * line]
    return shared.room_nbytes(64 * RANGE_NBYTES, 3) == 64 * RANGE_NBYTES + (3 + 16) * line


def test_stripes_are_a_few_lines(world_of):
    assert world_of(1)(room) == [True]
