"""all_reduce_many: bit for bit the results of separate calls, one call for many arrays, refused arguments."""

import numpy as np
import pytest
from cases import DTYPES, assert_same, numbers, refusals_of, rng_of, same_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks

import shmring
from shmring._core import kernels

OPS = {name: kernels.ops(name) for name in DTYPES}


@pytest.fixture(scope="module")
def crew():
    with Ranks(3) as ranks:
        yield ranks.meet(SHMRING_CHUNK=4096)


def fused_and_separate(comm, specs, op, fuse_nbytes, place, background=False):
    """Check that many arrays, given as (dtype, count), have the same results fused and separate."""
    one_by_one = [
        numbers(dtype, count, rng_of(specs, op, i, comm.rank)) for i, (dtype, count) in enumerate(specs)
    ]
    given = [x.copy() for x in one_by_one]
    if place == "shared":
        given = [comm.copy_of(x) for x in given]
    out = [np.zeros_like(x) for x in given] if place == "out" else None
    before = [x.copy() for x in given]
    for x in one_by_one:
        comm.all_reduce(x, op)
    result = comm.all_reduce_many(given, op, out=out, fuse_nbytes=fuse_nbytes, async_op=background)
    if background:
        result = result.result()
    assert result is None
    if out is not None:
        assert all(map(same_bytes, given, before)), "x was written to, in spite of out"
    for (dtype, count), want, got in zip(specs, one_by_one, given if out is None else out, strict=True):
        with np.errstate(all="ignore"):
            assert_same(got, want, op, (dtype, count))


COUNTS = st.one_of(st.integers(0, 5), st.integers(0, 300), st.integers(0, 40_000))


@settings(max_examples=60)
@given(
    dtypes_and_counts=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), COUNTS), max_size=12),
    op=st.sampled_from(("sum", "max", "min", "prod")),
    fuse_nbytes=st.sampled_from((None, 0, 100, 5000, 1 << 30, 1 << 63)),
    place=st.sampled_from(("private", "shared", "out")),
    background=st.booleans(),
)
def test_together_is_bit_for_bit_one_by_one(crew, dtypes_and_counts, op, fuse_nbytes, place, background):
    specs = [(dtype, count) for dtype, count in dtypes_and_counts if op in OPS[dtype]]
    crew(fused_and_separate, specs, op, fuse_nbytes, place, background)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("op", ["avg", "sum", "bxor"])
def test_every_op_at_every_number_of_ranks(world_of, size, op):
    specs = [(dtype, count) for dtype in DTYPES if op in OPS[dtype] for count in (1, 3, 700)]
    world_of(size)(fused_and_separate, specs, op, None, "private")


def more_than_a_bucket(comm):
    arrays = [np.full(1000 + i % 7, comm.rank + i, "f8") for i in range(300)]
    begin = comm.stats()["calls"]
    comm.all_reduce_many(arrays, fuse_nbytes=1 << 20)
    calls = comm.stats()["calls"] - begin
    return calls, [a.tolist() == [a.size and comm.size * i + 1] * len(a) for i, a in enumerate(arrays)]


def test_more_than_one_bucket(world_of):
    for calls, right in world_of(2)(more_than_a_bucket):
        assert 5 < calls < 20
        assert all(right)


def calls_and_path(comm, place):
    count, nbytes = 1000, 256
    block = (
        comm.zeros((count, nbytes // 4), "f4") if place == "shared" else np.zeros((count, nbytes // 4), "f4")
    )
    arrays = [row.copy() for row in block] if place == "apart" else list(block)
    arrays += [np.ones(40_000, "f4"), np.ones(3, "i8")]
    for a in arrays[:count]:
        a[...] = comm.rank
    begin = comm.stats()["calls"]
    comm.all_reduce_many(arrays)
    after = comm.stats()
    assert all((a == 1).all() for a in arrays[:count])
    assert all((a == 2).all() for a in arrays[count:])
    return after["calls"] - begin, after["paths"]["zero_copy"]


@pytest.mark.parametrize("place", ["apart", "consecutive", "shared"])
def test_one_synchronisation_for_the_bucket_and_no_copy_for_shared_views(world_of, place):
    for calls, zero_copy in world_of(2)(calls_and_path, place):
        assert calls == 3  # a bucket of float32, the large one, int64
        assert zero_copy == (place == "shared")


def some_pack_some_do_not(comm):
    """Reduce arrays that are consecutive on one rank only: ranks need not be alike in this."""
    block = comm.full((50, 40), comm.rank, "f8")
    arrays = list(block) if comm.rank == 0 else [np.full(40, comm.rank, "f8") for _ in range(50)]
    comm.all_reduce_many(arrays)
    return all((a == 3).all() for a in arrays)


def test_ranks_need_not_have_the_same_kind_of_memory(world_of):
    assert world_of(3)(some_pack_some_do_not) == [True] * 3


def other_makes(comm):
    import array

    mine = [
        array.array("d", [1.0, 2.0]),
        memoryview(bytearray(8)).cast("i"),
        np.asfortranarray(np.ones((3, 2))),
    ]
    comm.all_reduce_many(iter(mine))
    return mine[0].tolist(), mine[1].tolist(), mine[2].tolist()


def test_arrays_of_other_makes(world_of):
    assert world_of(2)(other_makes) == [([2.0, 4.0], [0, 0], [[2.0] * 2] * 3)] * 2


class Growing:
    """An array of another kind that, when it is inspected, makes its own list longer."""

    def __init__(self, arrays):
        self._arrays, self._x = arrays, np.ones(4)

    @property
    def __array_interface__(self):
        self._arrays.extend(np.ones(4) for _ in range(1000))
        return self._x.__array_interface__


def growing(comm):
    arrays = [np.ones(3)]
    arrays.append(Growing(arrays))
    arrays.append(np.ones(5))
    comm.all_reduce_many(arrays)
    return arrays[2].tolist()


def test_a_list_may_change_meanwhile(world_of):
    assert world_of(2)(growing) == [[2.0] * 5] * 2


def refusals(comm):
    x, fixed = np.arange(6.0), np.arange(6.0)
    fixed.flags.writeable = False
    attempts = {
        "no list": lambda: comm.all_reduce_many(3),
        "number": lambda: comm.all_reduce_many([x, 3.0]),
        "read-only": lambda: comm.all_reduce_many([x, fixed]),
        "strides": lambda: comm.all_reduce_many([x[::2]]),
        "op": lambda: comm.all_reduce_many([x], "sub"),
        "meaning": lambda: comm.all_reduce_many([x, np.zeros(3, "i4")], "avg"),
        "twice": lambda: comm.all_reduce_many([x, np.zeros(2), x]),
        "overlap": lambda: comm.all_reduce_many([x[2:], x[:3]]),
        "out too few": lambda: comm.all_reduce_many([x, x.copy()], out=[x.copy()]),
        "out of another dtype": lambda: comm.all_reduce_many([x], out=[np.zeros(6, "f4")]),
        "out in the way": lambda: comm.all_reduce_many([x, x + 1], out=[x, x]),
        "fuse_nbytes": lambda: comm.all_reduce_many([x], fuse_nbytes=-1),
        "timeout": lambda: comm.all_reduce_many([x], timeout=0),
    }
    text = refusals_of(comm, attempts)
    assert np.array_equal(x, np.arange(6.0))
    return text


def test_wrong_arguments_are_refused_with_a_reason(world_of):
    for text in world_of(2)(refusals):
        assert text["no list"].startswith("TypeError: arrays is a int")
        assert text["number"].startswith("TypeError: arrays[1] is 3.0")
        assert "arrays[1] is read-only" in text["read-only"]
        assert "arrays[0] is not contiguous" in text["strides"]
        assert "op is 'sub'" in text["op"]
        assert "op avg has no meaning for int32" in text["meaning"]
        assert "overlap" in text["twice"]
        assert "overlap" in text["overlap"]
        assert "1 arrays for 2" in text["out too few"]
        assert "out[0] is float32[6]" in text["out of another dtype"]
        assert "overlap" in text["out in the way"]
        assert "fuse_nbytes" in text["fuse_nbytes"]
        assert "timeout" in text["timeout"]


def mismatched(comm, which):
    first = comm.rank == 0
    x = [np.ones(3), np.ones(5)]
    calls = {
        "lengths": lambda: comm.all_reduce_many(x[:: 1 if first else -1]),
        "number": lambda: comm.all_reduce_many(x if first else [np.ones(8)]),
        "none": lambda: comm.all_reduce_many(x if first else []),
        "dtypes": lambda: comm.all_reduce_many([np.ones(4, "f4" if first else "f8")]),
        "ops": lambda: comm.all_reduce_many(x, "sum" if first else "max"),
        "thresholds": lambda: comm.all_reduce_many(x, fuse_nbytes=10 if first else 20),
        "another call": lambda: comm.all_reduce_many([x[0]]) if first else comm.all_reduce(x[0]),
        "one refuses": lambda: comm.all_reduce_many(x if first else [1]),
    }
    try:
        calls[which]()
    except (shmring.Mismatch, TypeError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    "which", ["lengths", "number", "none", "dtypes", "ops", "thresholds", "another call", "one refuses"]
)
def test_lists_that_differ_are_a_mismatch(which):
    with Ranks(2) as ranks:
        (first, text), (second, _) = ranks.meet()(mismatched, which)
    assert (first, second) == ("Mismatch", "TypeError" if which == "one refuses" else "Mismatch")
    if which == "lengths":
        assert "all_reduce_many(float64[8], sum), but with arrays of other shapes or dtypes" in text
