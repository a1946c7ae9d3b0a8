"""all_reduce against NumPy in rank order, bit for bit: every pair of dtype, op, size, ranks, memory, path,
segment, algorithm, chunk and instruction set, through staging buffers so small that pipelines wrap many
times."""

import ctypes
import functools
import math

import numpy as np
import pytest
from cases import (
    DTYPES,
    MEMORIES,
    SMALL_NBYTES,
    ZERO_COPY_NBYTES,
    Placed,
    assert_all_reduced,
    count_of,
    environment,
    inputs,
    rng_of,
    same_bytes,
)
from combinations import each_pair, each_value, first, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks

import shmring
from shmring._config import thresholds, tuning_table
from shmring._core import kernels
from shmring._core.kernels import OPS
from shmring._diagnostics.flight_recorder import ALGORITHMS
from shmring._system import limits

RANKS = (1, 2, 3, 4, 5, 8)
SIZES = (
    0, 1, 2, 12, 13, (48, 0), (48, 1), (256, -1), (256, 1), (5000, 0),
    (SMALL_NBYTES, -1), (SMALL_NBYTES, 0), (SMALL_NBYTES, 1), (20_000, 1), (64 << 10, 0), (150 << 10, 3),
)  # fmt: skip
FACTORS = {
    "dtype": tuple(DTYPES),
    "op": OPS,
    "size": SIZES,
    "memory": MEMORIES,
    "out": (False, True),
    "algorithm": ALGORITHMS,
    "ranks": RANKS,
    "chunk": (None, 256, 512, 1024, 4096),
    "depth": (None, 2, 3, 16),
    "path": ("auto", "near", "far"),
    "single_copy": ("auto", "off", 64),
    "segment": ("memfd", "posix"),
    "isa": tuple(kernels.isas()),
}


def has_a_meaning(row):
    if row.get("chunk", 1) is None and row.get("depth") is not None:
        return False  # a depth alone fixes the chunk as well
    return "op" not in row or "dtype" not in row or row["op"] in kernels.ops(row["dtype"])


@functools.cache
def rows(seed):
    """All pairs; with another seed each pair is in other company."""
    return pairwise(FACTORS, has_a_meaning, seed=seed)


def reduce_once(comm, row):
    """One rank's part in a case: (the result's bytes, the path that the call took)."""
    values = inputs(row, comm.size)[comm.rank]
    x = Placed(comm, values, row["memory"])
    out = Placed(comm, np.zeros_like(values), row["memory"]) if row["out"] else None
    comm.all_reduce(x.array, row["op"], out=out and out.array, algorithm=row["algorithm"])
    result = out or x
    x.assert_surroundings()
    result.assert_surroundings()
    assert out is None or same_bytes(x.array, values), "x was written to, in spite of out"
    return result.array.tobytes(), comm.stats()["path"]


def path_of(row):
    """Return the path that a case must have taken, if that does not depend on the machine."""
    nbytes = count_of(row) * DTYPES[row["dtype"]].itemsize
    name = "small_all_reduce_nbytes" if row["ranks"] <= limits.usable_cpus() else "small_nbytes"
    small_nbytes = thresholds.built_in(row["ranks"])[name]
    small_nbytes = min(small_nbytes, row["chunk"] or small_nbytes)
    if nbytes <= 48 and (row["algorithm"] == "auto" or nbytes == 0):
        return {"tiny"}
    if row["algorithm"] not in ("auto", "direct"):
        return {row["algorithm"]}
    is_small = row["algorithm"] == "auto" and nbytes * (row["ranks"] - 1) <= small_nbytes
    if row["algorithm"] == "auto" and row["memory"] in ("shared", "slice"):
        some = {"zero_copy", "small", "near", "far"}
        return {"zero_copy"} if nbytes >= ZERO_COPY_NBYTES else some
    if is_small:
        return {"small"}
    return {"near", "far"} if row["path"] == "auto" else {row["path"]}


def test_the_rows_cover_every_pair():
    few = {name: FACTORS[name] for name in ("dtype", "op", "ranks", "memory")}
    found = pairwise(few, has_a_meaning)
    for a in few:
        for b in few:
            want = {(x, y) for x in few[a] for y in few[b] if a != b and has_a_meaning({a: x, b: y})}
            assert want <= {(row[a], row[b]) for row in found}
    assert all(has_a_meaning(row) for row in found)


@pytest.mark.limit(240)
@pytest.mark.parametrize("seed", first(1, range(3)))
@pytest.mark.parametrize("size", RANKS)
def test_all_reduce_is_numpy_in_rank_order(world_of, size, seed):
    for row in rows(seed):
        if row["ranks"] != size:
            continue
        results, paths = zip(*world_of(size, **environment(row))(reduce_once, row), strict=True)
        assert_all_reduced(results, row, inputs(row, size))
        assert size == 1 or set(paths) <= path_of(row), f"{paths}: {row}"


# ---- sizes and shapes -------------------------------------------------------------------------------------


@each_value(
    {
        "count, memory": [
            (300 << 8, "private"),
            ((1 << 20) + 7, "private"),
            ((1 << 20) + 7, "slice"),
            ((17 << 20) // 4, "private"),
            ((17 << 20) // 4, "shared"),
            ((17 << 20) // 4 + 1, "unaligned"),
        ],
        "path": ["near", "far"],
    }
)
def test_large_messages_with_the_settings_that_users_have(world_of, count, memory, path):
    row = {"dtype": "float32", "op": "sum", "size": count, "memory": memory, "algorithm": "auto"}
    ranks = world_of(2, SHMRING_PATH=path, SHMRING_SINGLE_COPY="off")
    for out in (False, True):
        case = {**row, "out": out}
        results, paths = zip(*ranks(reduce_once, case), strict=True)
        assert_all_reduced(results, case, inputs(case, 2))
        assert set(paths) == {"zero_copy" if memory in ("shared", "slice") else path}


def reduce_view(comm, row):
    """As reduce_once, in place, on an array of any shape and order, or on a part of its first axis."""
    values = inputs(row, comm.size)[comm.rank]
    x = Placed(comm, values, row["memory"])
    whole = x.array.reshape(row["shape"], order=row["order"])
    begin, end = row["part"]
    part = whole[begin:end] if whole.ndim else whole
    assert part.size == 0 or np.shares_memory(part, x.array)
    comm.all_reduce(part, row["op"])
    x.assert_surroundings()
    assert same_bytes(whole[:begin], values.reshape(row["shape"])[:begin]) if begin else True
    return part.tobytes(order="A")


@st.composite
def views(draw):
    dtype = draw(st.sampled_from(list(DTYPES)))
    op = draw(st.sampled_from(kernels.ops(dtype)))
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    if draw(st.booleans()):
        shape = (draw(st.integers(1, 3000)), *shape)
    order = draw(st.sampled_from("CF"))
    rows = shape[0] if shape else 0
    begin = draw(st.integers(0, rows)) if order == "C" else 0
    part = (begin, draw(st.integers(begin, rows)) if order == "C" else rows)
    memory = draw(st.sampled_from(MEMORIES))
    return {"dtype": dtype, "op": op, "shape": shape, "size": math.prod(shape), "order": order, "part": part,
            "memory": memory}  # fmt: skip


@pytest.mark.parametrize("chunk", [None, 512])
def test_any_shape_order_view_and_memory(world_of, chunk):
    ranks = world_of(3, **({} if chunk is None else {"SHMRING_CHUNK": chunk}))

    @given(row=views())
    @settings(max_examples=100)
    def check(row):
        arrays = [values.reshape(row["shape"], order=row["order"]) for values in inputs(row, ranks.size)]
        if row["shape"]:
            arrays = [array[slice(*row["part"])] for array in arrays]
        assert_all_reduced(ranks(reduce_view, row), row, [array.ravel(order="A") for array in arrays])

    check()


def reduce_nans(comm, name, op, count):
    """Any bits, many NaNs among them, in an array that begins elsewhere in its cache line on each rank."""
    dtype = DTYPES[name]
    content = rng_of(name, op, count, comm.rank).bytes(count * dtype.itemsize)
    begin = 64 + comm.rank * 20 // dtype.itemsize * dtype.itemsize
    room = np.empty(begin + len(content) + 64, np.uint8)
    begin -= room.ctypes.data % dtype.itemsize
    x = room[begin : begin + len(content)].view(dtype)
    x[...] = np.frombuffer(content, dtype)
    comm.all_reduce(x, op)
    return x.tobytes()


@each_pair(
    {
        "size": [2, 3, 7],
        "name": [name for name in DTYPES if "float" in name],
        "op": ["sum", "prod", "max", "avg"],
    }
)
def test_ranks_agree_on_every_nan(world_of, size, name, op):
    """Every rank folds all of a small message: the offset of the data in memory must not matter."""
    ranks = world_of(size)
    for nbytes in (40, 1000, 4200, 8000, SMALL_NBYTES // (size - 1) - 8, 100_000):
        first, *others = ranks(reduce_nans, name, op, nbytes // DTYPES[name].itemsize)
        assert others == [first] * (size - 1), nbytes


def reduce_gigabytes(comm, count, shared):
    """Three marks, one of them beyond 4 GiB, and nothing else."""
    x = comm.empty(count, "u1") if shared else np.zeros(count, "u1")
    x[[0, 1 << 31, count - 1]] = comm.rank + 1
    comm.all_reduce(x)
    return x[[0, 1 << 31, count - 1]].tolist(), int(np.count_nonzero(x))


@pytest.mark.soak
@pytest.mark.limit(600)
@pytest.mark.parametrize("shared", [False, True])
def test_counts_beyond_4_gib(world_of, shared):
    """Needs some 10 GiB of memory."""
    ranks = world_of(2, timeout_s=300)
    for marks, nonzero in ranks(reduce_gigabytes, (1 << 32) + 77, shared):
        assert marks == [3, 3, 3]
        assert nonzero == 3


def counts_4_gib_apart(comm):
    with pytest.raises(shmring.Mismatch):
        comm.broadcast(np.zeros(77 + (comm.rank << 32), "?"))
    return True


def test_counts_that_differ_by_4_gib_do_not_match(world_of):
    assert all(world_of(2)(counts_4_gib_apart))


# ---- many calls -------------------------------------------------------------------------------------------


def mixed_run(comm, seed, ncalls):
    """Calls of every kind in a row, checked here; returns the bytes that this rank staged."""
    rng = np.random.default_rng(seed)
    shared = comm.empty(8000, np.int64)
    for call in range(ncalls):
        kind = rng.choice(["all_reduce", "all_reduce", "all_reduce", "broadcast", "barrier", "shared"])
        count = int(rng.choice([0, 1, 6, 7, 33, 200, 1000, 3000]))
        algorithm = str(rng.choice(["auto", "auto", *ALGORITHMS]))
        root, start = int(rng.integers(comm.size)), int(rng.integers(4000))
        values = rng.integers(-(1 << 40), 1 << 40, (comm.size, max(count, 2000 if kind == "shared" else 0)))
        if kind == "barrier":
            comm.barrier()
            continue
        x = values[comm.rank].copy()
        if kind == "shared":
            x = shared[start : start + len(x)]
            x[...] = values[comm.rank]
        if kind == "broadcast":
            comm.broadcast(x, root)
        else:
            comm.all_reduce(x, algorithm=algorithm)
        want = values[root] if kind == "broadcast" else values.sum(axis=0)
        assert (x == want).all(), f"call {call}: {kind}({count}, {algorithm=}, {root=})"
    return comm.stats()["bytes_sent"]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("first_seq", [0, (1 << 32) - 60, (1 << 63) - 60, (1 << 64) - 60, (1 << 64) - 1])
def test_counters_wrap_in_the_middle_of_mixed_calls(world_of, size, first_seq):
    # Positions of the staging buffers begin at the same number, so they wrap as well.
    ranks = world_of(size, SHMRING_FIRST_SEQ=first_seq, SHMRING_CHUNK=256, SHMRING_DEPTH=3)
    sent = ranks(mixed_run, size, 200)
    assert min(sent) > 8 * 4096


@pytest.mark.parametrize("seed", range(2))
def test_threads_can_be_ranks(seed):
    with Ranks(3, threads=True) as ranks:
        ranks.meet()
        ranks(mixed_run, seed, 100)
        for row in rows(seed)[seed::30]:
            row = {**row, "ranks": 3}
            results, _ = zip(*ranks(reduce_once, row), strict=True)
            assert_all_reduced(results, row, inputs(row, 3))


# ---- promises to the caller -------------------------------------------------------------------------------


def reduce_rounded(comm, mode):
    """With another rounding mode of this thread: (result, the mode afterwards)."""
    libm = ctypes.CDLL("libm.so.6")
    x = inputs({"dtype": "float32", "op": "sum", "size": 999}, comm.size)[comm.rank]
    libm.fesetround(mode)
    try:
        comm.all_reduce(x)
        return x.tobytes(), libm.fegetround()
    finally:
        libm.fesetround(0)


def test_rounding_modes_are_set_aside_and_restored(world_of):
    ranks = world_of(2)
    row = {"dtype": "float32", "op": "sum", "size": 999}
    for mode in (0x400, 0x800, 0xC00):  # x86: FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO
        results = ranks(reduce_rounded, mode)
        assert_all_reduced([result for result, _ in results], row, inputs(row, 2))
        assert {after for _, after in results} == {mode}


def default_algorithm(comm):
    x = np.ones(1000)
    comm.all_reduce(x)
    return comm.stats()["path"], float(x[0])


@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS} - {"auto", "direct"}))
def test_the_environment_can_choose_the_algorithm(world_of, algorithm):
    assert world_of(3, SHMRING_ALGORITHM=algorithm)(default_algorithm) == [(algorithm, 3.0)] * 3


def forty(comm):
    """Zero-copy with more ranks than a word of 32 bits has room for."""
    x = comm.full(5000, comm.rank, np.int32)
    comm.all_reduce(x)
    y = np.full(5000, comm.rank, np.int32)
    comm.all_reduce(y)
    return int(x.min()), int(x.max()), int(y.min()), int(y.max())


def test_forty_ranks():
    with Ranks(40, threads=True) as ranks:
        assert set(ranks.meet()(forty)) == {(780,) * 4}


# ---- large arrays, and the sizes from which slices are reduced -------------------------------------------


def reduced_in_rank_order(comm, dtype, count, in_place):
    """Return whether all_reduce folded values in rank order, with a sum that depends on it; and the path."""
    rng = np.random.default_rng(count)
    scales = 10.0 ** rng.integers(-6, 6, comm.size)
    xs = [(rng.standard_normal(count + 1) * scale).astype(dtype)[1:] for scale in scales]
    want = functools.reduce(np.add, xs)
    x = xs[comm.rank]  # it begins anywhere in a cache line
    out = x if in_place else np.empty(count + 3, dtype)[3:]
    comm.all_reduce(x, out=out)
    return (out == want).all(), comm.stats()["path"]


@each_value({"count": [20_001, (1 << 20) + 7, (17 << 18) + 1], "size": [5, 3, 2]})
def test_large_ones_are_reduced_in_rank_order(world_of, size, count):
    ranks = world_of(size)
    for dtype, in_place in (("f4", True), ("f4", False), ("c16", True)):
        for is_right, path in ranks(reduced_in_rank_order, dtype, count, in_place):
            assert is_right
            assert path in ("near", "far")


def reduce_ones(comm, count):
    x = np.ones(count)
    comm.all_reduce(x)
    return float(x.min()), float(x.max())


@pytest.mark.parametrize("name", ["small_nbytes", "small_all_reduce_nbytes"])
def test_all_ranks_know_from_which_size_slices_are_reduced(world_of, tmp_path, name):
    path = tmp_path / "table.json"
    tuning_table.save(path, {2: {"any": {name: 4096}}}, thresholds.LIMITS)
    ranks = world_of(2, SHMRING_TUNING=str(path))
    for count in (500, 512, 513, 1024, 8192, 8193):
        assert ranks(reduce_ones, count) == [(2, 2)] * 2


def default_algorithm_of_a_host(comm):
    across = default_algorithm(comm)[1]
    with comm.split(comm.node) as host:
        return across, default_algorithm(host)


def test_the_algorithm_of_the_environment_is_for_ranks_of_one_host(world_over_hosts):
    ranks = world_over_hosts([0, 0, 1, 1], SHMRING_ALGORITHM="ring")
    assert ranks(default_algorithm_of_a_host) == [(4.0, ("ring", 2.0))] * 4
