"""Arrays that are mostly zero: the bits of a plain all_reduce, whatever is skipped, on every rank."""

import tracemalloc

import numpy as np
import pytest
from combinations import each_value

import shmring
from shmring.methods.sparse import SparseAllReduce, all_reduce_pairs

COUNTS = (0, 1, 7, 8, 16, 100, 1003)
BLOCK = 8
DTYPES = ("f4", "f8", "f2", "c8", "u1", "i2", "i8", "?")


def mostly_zero(rank, count, dtype, share):
    """Blocks of its own, and ends of blocks; some -0.0, NaN and infinities."""
    rng = np.random.default_rng([rank, count])
    x = np.zeros(count, dtype)
    where = np.repeat(rng.random(count // BLOCK + 1) < share, BLOCK)[:count]
    values = rng.integers(0, 2, count) if dtype == "?" else rng.integers(-9, 9, count) * 0.37
    with np.errstate(invalid="ignore"):
        x[where] = values.astype(dtype)[where]
    if x.dtype.kind in "fc" and count >= 100:
        x[[3, 40]] = -0.0, np.nan
        x[50 + rank] = np.inf * (-1) ** rank
        x[64:72] = -0.0  # on all ranks: the sum is -0.0
    return x


def beside_all_reduce(comm, dtype, op, share, dense_above):
    """Return whether the bits are those of all_reduce, for each count; and the densities."""
    reduce = SparseAllReduce(comm, block=BLOCK, dense_above=dense_above)
    found = []
    for count in COUNTS:
        x = mostly_zero(comm.rank, count, dtype, share)
        dense = x.copy()
        comm.all_reduce(dense, op)
        with np.errstate(invalid="ignore"):
            reduce(x, op)
        found.append((x.tobytes() == dense.tobytes(), reduce.density))
    return found


@each_value({"size": [1, 3], "dtype": DTYPES})
def test_bits_are_those_of_all_reduce(world_of, size, dtype):
    ops = ["sum", "max", "prod"] + (["avg"] if np.dtype(dtype).kind in "fc" else ["bor", "band"])
    for op in ops:
        if op == "max" and dtype == "c8":
            continue
        for share, dense_above in ((0, 1), (0.05, 1), (0.05, 0), (1, 1), (1, 0.5)):
            results = world_of(size)(beside_all_reduce, dtype, op, share, dense_above)
            assert all(same for result in results for same, _ in result), (op, share, dense_above)
            assert len({str(result) for result in results}) == 1


def what_is_sent(comm, density, dense_above):
    """Return the bytes that a call moved relative to all_reduce, for large arrays with whole blocks of
    zeros."""
    x = np.zeros((1000, 256), "f4")
    x[: int(density * 1000)] = 1
    reduce = SparseAllReduce(comm, dense_above=dense_above)
    begin = comm.stats()["bytes_sent"]
    comm.all_reduce(x)
    between = comm.stats()["bytes_sent"]
    reduce(x)
    return reduce.density, (comm.stats()["bytes_sent"] - between) / (between - begin), float(x[0, 0])


def test_only_blocks_that_are_not_zero_travel(world_of):
    ranks = world_of(2)
    for density, share, first in ranks(what_is_sent, 0.1, None):
        assert density == 0.1
        assert share < 0.25  # large private arrays are read in place, and count half
        assert first == 4
    for density, share, _ in ranks(what_is_sent, 0.6, 0.5):
        assert density == 0.6
        assert 1 <= share < 1.01


def across(comm):
    x = mostly_zero(comm.rank, 40_000, "f4", 0.05)
    dense = x.copy()
    begin = comm.stats()["bytes_over_wire"]
    comm.all_reduce(dense)
    between = comm.stats()["bytes_over_wire"]
    SparseAllReduce(comm, block=BLOCK)(x)
    crossed = comm.stats()["bytes_over_wire"] - between
    return x.tobytes() == dense.tobytes(), crossed, between - begin


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1)], ids=["1+1", "2+2"])
def test_fewer_bytes_cross_the_wire(world_over_hosts, nodes):
    results = world_over_hosts(nodes)(across)
    assert all(same for same, _, _ in results)
    assert 3 * sum(crossed for _, crossed, _ in results) < sum(plain for _, _, plain in results)


def after_other_blocks(comm):
    """Return whether the same rows come to the same sums after a call with other rows."""
    comm.wire = "int8"
    reduce, found = SparseAllReduce(comm), []
    rows = np.random.default_rng(comm.rank).standard_normal((200, 256)).astype("f4")
    for begin in (0, 300, 0):
        x = np.zeros((600, 256), "f4")
        x[begin : begin + 200] = rows
        reduce(x)
        found.append(x[begin : begin + 200].tobytes())
    return len(set(found))


def test_what_the_wire_rounds_off_some_blocks_is_not_added_to_others(world_over_hosts):
    assert world_over_hosts([0, 1])(after_other_blocks) == [1, 1]


# ---- pairs ------------------------------------------------------------------------------------------------

LENGTH = 100
LONG = 1 << 20  # in which those few are sorted, not marked
PAIR_DTYPES = ("f4", "f8", "f2", "c16", "i4", "u8")


def pairs_of(rank, dtype, row, kind):
    """In any order and some several times, unless sorted; every third rank has none."""
    rng = np.random.default_rng([rank, len(row)])
    count = 0 if rank % 3 == 2 else 60 + rank
    indices = rng.integers(0, LENGTH, count)
    if kind == "sorted":
        indices = np.unique(indices)
    values = rng.integers(-50, 50, (len(indices), *row))
    values = values.astype(dtype) if np.dtype(dtype).kind in "iu" else (values * 0.37).astype(dtype)
    return indices.astype(rng.choice(["i8", "u4", "i2"])), values


def dense_of(indices, values):
    whole = np.zeros((LENGTH, *values.shape[1:]), "f4" if values.dtype == "f2" else values.dtype)
    np.add.at(whole, indices, values)
    return whole.astype(values.dtype)


def pairs_beside_all_reduce(comm, dtype, row, kind, dense_above, length):
    indices, values = pairs_of(comm.rank, dtype, row, kind)
    whole = dense_of(indices, values)
    comm.all_reduce(whole)
    given = indices.copy(), values.copy()
    found, sums = all_reduce_pairs(comm, indices, values, length, dense_above=dense_above)
    assert (given[0] == indices).all()
    assert (given[1] == values).all()
    assert found.dtype == np.int64
    assert sums.dtype == values.dtype
    everyones = np.unique(np.concatenate(comm.all_gather_object(indices)))
    assert (found == everyones).all()
    assert sums.tobytes() == (whole[found] + whole.dtype.type(0)).tobytes()
    return found.tobytes(), sums.tobytes()


@pytest.mark.parametrize("dtype", PAIR_DTYPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pairs_add_up_to_what_whole_arrays_do(world_of, size, dtype):
    ranks = world_of(size)
    for row in ((), (3,), (2, 2)):
        for kind in ("any", "sorted"):
            several = {
                result
                for dense_above, length in ((0.5, LENGTH), (0, LENGTH), (1e9, LENGTH), (0.5, LONG))
                for result in ranks(pairs_beside_all_reduce, dtype, row, kind, dense_above, length)
            }
            assert len(several) == 1  # on every rank, by either way


def odd_values(comm, dense_above):
    """-0.0 of all, a NaN of one, infinities of both signs."""
    indices = np.array([0, 2, 4, 9])
    values = np.array([np.nan if comm.rank == 1 else 1, np.inf * (-1) ** comm.rank, -0.0, -0.0], "f4")
    with np.errstate(invalid="ignore"):
        found, sums = all_reduce_pairs(comm, indices, values, 10, dense_above=dense_above)
    return found.tolist(), np.isnan(sums).tolist(), np.signbit(sums[2:]).tolist()


def test_nothing_odd_is_lost(world_of):
    for dense_above in (0, 1e9):
        for found, are_nan, are_negative in world_of(2)(odd_values, dense_above):
            assert found == [0, 2, 4, 9]
            assert are_nan == [True, True, False, False]
            assert are_negative == [False, False]


def rounding_in_rank_order(comm):
    """1e8, 1, -1e8 of ranks 0, 1, 2 in float32: 0 in this order, 1 in others."""
    value = np.array([(1e8, 1, -1e8)[comm.rank]], "f4")
    return [float(all_reduce_pairs(comm, np.array([3]), value, 9, dense_above=d)[1][0]) for d in (0, 1e9)]


def test_pairs_are_added_in_rank_order(three):
    assert three(rounding_in_rank_order) == [[0.0, 0.0]] * 3


def nobody_has_any(comm):
    none = np.empty(0, np.int64)
    return [
        all_reduce_pairs(comm, none, np.empty((0, *row), "f4"), length)[1].shape
        for row, length in (((), 0), ((), 10), ((4,), 10))
    ]


def test_no_pairs_at_all(world_of):
    assert world_of(2)(nobody_has_any) == [[(0,), (0,), (0, 4)]] * 2


def empty_rows(comm):
    """Return the indices, the sums' shape, and the bytes allocated, for rows of no elements."""
    tracemalloc.start()
    found, sums = all_reduce_pairs(comm, np.array([comm.rank, 7]), np.ones((2, 0)), 1 << 24)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found.tolist(), sums.shape, most


def test_rows_without_elements_take_no_memory_for_the_whole_array(world_of):
    for found, shape, most in world_of(2)(empty_rows):
        assert (found, shape) == ([0, 1, 7], (3, 0))
        assert most < 1 << 20


# ---- refusals ---------------------------------------------------------------------------------------------

WRONG_ARRAYS = {
    "a list": (lambda: [0.0] * 100, "sum", TypeError, "instead of a NumPy array"),
    "columns": (lambda: np.zeros((10, 20), "f4")[:, :10], "sum", ValueError, "contiguous"),
}
WRONG_PAIRS = {
    "lists": ([1], np.ones(1), TypeError, "instead of a NumPy array"),
    "floats": (np.ones(1), np.ones(1), TypeError, "integers"),
    "words": (np.ones(1, int), np.array(["a"]), TypeError, "numbers"),
    "too few": (np.ones(2, int), np.ones(1), ValueError, "2 indices"),
    "too far": (np.array([10]), np.ones(1), ValueError, "0 to 9"),
    "negative": (np.array([-1]), np.ones(1), ValueError, "0 to 9"),
}


def refused_array(comm, name):
    make, op, error, words = WRONG_ARRAYS[name]
    if comm.rank == 0:
        with pytest.raises(error, match=words):
            SparseAllReduce(comm)(make(), op)
    else:
        with pytest.raises(shmring.Mismatch):
            SparseAllReduce(comm)(np.zeros(100, "f4"))


def refused_pairs(comm, name):
    indices, values, error, words = WRONG_PAIRS[name]
    if comm.rank == 0:
        with pytest.raises(error, match=words):
            all_reduce_pairs(comm, indices, values, 10)
    else:
        with pytest.raises(shmring.Mismatch):
            all_reduce_pairs(comm, np.ones(1, int), np.ones(1), 10)


@pytest.mark.parametrize("name", [*WRONG_ARRAYS, *WRONG_PAIRS])
def test_wrong_arguments_are_refused_and_no_rank_hangs(world_of, name):
    world_of(2)(refused_array if name in WRONG_ARRAYS else refused_pairs, name)


def unlike(comm):
    """Give a length, dtype or row unlike rank 0's: all ranks get the error, and the next call works."""
    one = np.ones(1, int)
    for other in ((np.ones(1), 11), (np.ones(1, "f4"), 10), (np.ones((1, 2)), 10)):
        values, length = other if comm.rank == 1 else (np.ones(1), 10)
        with pytest.raises(ValueError, match=r"ranks \[1\] gave another"):
            all_reduce_pairs(comm, one, values, length)
    assert all_reduce_pairs(comm, one, np.ones(1), 10)[1][0] == comm.size
    with pytest.raises(shmring.Mismatch):
        SparseAllReduce(comm)(np.ones(1000 + comm.rank))


def test_unlike_arrays_are_an_error(world_of):
    world_of(3)(unlike)


def longer_by_blocks_of_zeros(comm, dense_above, nblocks, in_use):
    x = np.zeros(nblocks[comm.rank] * BLOCK)
    x[in_use] = 1
    with pytest.raises(shmring.Mismatch):
        SparseAllReduce(comm, block=BLOCK, dense_above=dense_above)(x)


@pytest.mark.parametrize(
    ("dense_above", "nblocks", "in_use"),
    [
        (1, [3, 4], slice(0)),
        # Only rank 0's share, 19 of 20 blocks, is above dense_above.
        (0.9, [20, 23], slice(BLOCK, 20 * BLOCK)),
    ],
)
def test_blocks_that_only_some_ranks_have_are_an_error(world_of, dense_above, nblocks, in_use):
    world_of(2)(longer_by_blocks_of_zeros, dense_above, nblocks, in_use)


def wrong_on_rank_0(comm, wrong, words):
    if comm.rank == 0:
        with pytest.raises((TypeError, ValueError), match=words):
            SparseAllReduce(comm, **wrong)
    else:
        with pytest.raises(shmring.Mismatch):
            SparseAllReduce(comm)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"block": 0}, "1 element or more"), ({"block": 2.5}, "integer"), ({"dense_above": "half"}, "float")],
)
def test_a_wrong_number_is_reported_where_it_is_and_is_a_mismatch_elsewhere(world_of, wrong, words):
    """Each case has a world: the others' error is final for it."""
    world_of(2)(wrong_on_rank_0, wrong, words)


def other_numbers(comm):
    with pytest.raises(ValueError, match="block is 256, 257 by rank"):
        SparseAllReduce(comm, block=256 + comm.rank)
    with pytest.raises(ValueError, match="block is 1000000, 1000001 by rank"):
        SparseAllReduce(comm, block=1000000 + comm.rank)
    SparseAllReduce(comm)(np.ones(3))
    with pytest.raises(ValueError, match="length is -5"):
        all_reduce_pairs(comm, np.empty(0, int), np.empty(0), -5)


def test_unlike_numbers_are_an_error_on_all(world_of):
    world_of(2)(other_numbers)
