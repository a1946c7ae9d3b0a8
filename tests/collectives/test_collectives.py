"""Every collective against its definition in NumPy: dtype, size, memory, out, root, path, chunk and number of
ranks in pairs; identities between collectives; refused arguments."""

import functools

import numpy as np
import pytest
from cases import (
    DTYPES,
    MEMORIES,
    Placed,
    all_reduced,
    assert_same,
    environment,
    numbers,
    refusals_of,
    rng_of,
    root_of,
    same_bytes,
)
from combinations import first, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks

import shmring
from shmring._core import kernels
from shmring._core.kernels import OPS

RANKS = (1, 2, 3, 4, 5, 8)
FOLDING = ("reduce", "reduce_scatter", "scan", "exscan")
MOVING = ("scatter", "gather", "all_gather", "all_to_all", "broadcast")
IN_PLACE = ("reduce", "scan", "exscan", "broadcast")
SPLITTING = ("reduce_scatter", "scatter", "all_to_all")
FACTORS = {
    "kind": FOLDING + MOVING,
    "dtype": tuple(DTYPES),
    "op": OPS,
    "rows": (0, 1, 2, 3, 7),  # of each rank's part
    "columns": (None, 1, 3, 50, 1000, 6001),  # None: one dimension
    "memory": MEMORIES,
    "out": (False, True),
    "root": ("first", "last", "middle"),
    "ranks": RANKS,
    "chunk": (None, 256, 1024, 4096),
    "depth": (None, 2, 3, 16),
    "path": ("auto", "near", "far"),
    "single_copy": ("auto", "off", 64),
    "segment": ("memfd", "posix"),
}


def has_a_meaning(row):
    if row.get("chunk", 1) is None and row.get("depth") is not None:
        return False
    if row.get("kind") in FOLDING and "op" in row:
        if row["op"] == "avg" and row["kind"] in ("scan", "exscan"):
            return False
        return "dtype" not in row or row["op"] in kernels.ops(row["dtype"])
    return True


@functools.cache
def rows(seed):
    return pairwise(FACTORS, has_a_meaning, seed=seed)


def shape_of(row, rows):
    return (rows,) if row["columns"] is None else (rows, row["columns"])


def inputs(row, size):
    """Each rank's x of a case."""
    parts = size if row["kind"] in SPLITTING else 1
    shape = shape_of(row, row["rows"] * parts)
    count = int(np.prod(shape))
    seed = sorted((name, repr(value)) for name, value in row.items())
    return [numbers(row["dtype"], count, rng_of(seed, rank)).reshape(shape) for rank in range(size)]


def outcomes(row, xs, nodes=None):
    """Return what every rank should return or have in x, by definition; None if that is undefined.

    nodes: by rank, if there are several hosts.
    """
    size, kind, op = len(xs), row["kind"], row["op"]
    root = root_of(row, size)

    def folded(arrays, nodes=None):
        flat = [array.ravel() for array in arrays]
        return all_reduced(row["dtype"], op, flat, nodes=nodes).reshape(arrays[0].shape)

    def part(array, rank):
        return array.reshape(size, row["rows"], *array.shape[1:])[rank]

    if kind == "reduce":
        return [folded(xs, nodes) if rank == root else xs[rank] for rank in range(size)]
    if kind == "reduce_scatter":
        return [folded([part(x, rank) for x in xs], nodes) for rank in range(size)]
    if kind == "scan":
        return [folded(xs[: rank + 1]) for rank in range(size)]
    if kind == "exscan":
        return [folded(xs[:rank]) if rank else xs[0] for rank in range(size)]
    if kind == "broadcast":
        return [xs[root]] * size
    if kind == "scatter":
        return [part(xs[root], rank) for rank in range(size)]
    if kind == "gather":
        return [np.stack(xs) if rank == root else None for rank in range(size)]
    if kind == "all_gather":
        return [np.stack(xs)] * size
    return [np.concatenate([part(x, rank) for x in xs]) for rank in range(size)]


def out_shape(row, x, size):
    if row["kind"] in ("gather", "all_gather"):
        return (size, *x.shape)
    if row["kind"] in ("scatter", "reduce_scatter"):
        return (x.shape[0] // size, *x.shape[1:])
    return x.shape


def call_once(comm, row):
    """Run one rank's part of a case: return the bytes of its result, or None if there is none."""
    kind, root = row["kind"], root_of(row, comm.size)
    values = inputs(row, comm.size)[comm.rank]
    x = Placed(comm, values, row["memory"])
    before = x.array.copy()
    keywords = {"op": row["op"]} if kind in FOLDING else {}
    if kind in ("reduce", "broadcast", "scatter", "gather"):
        keywords["root"] = root
    out = None
    if row["out"]:
        room = np.zeros(out_shape(row, values, comm.size), values.dtype)
        if kind == "exscan" and comm.rank == 0:
            room[...] = values  # which it leaves as it is
        out = Placed(comm, room, row["memory"])
        keywords["out"] = out.array
    given = x.array
    if kind == "scatter" and comm.rank != root:
        given = None
        if out is None:
            keywords["like"] = np.empty(out_shape(row, values, comm.size), values.dtype)
    result = getattr(comm, kind)(given, **keywords)
    x.assert_surroundings()
    if out is not None:
        out.assert_surroundings()
        has_result = kind not in ("gather", "reduce") or comm.rank == root
        assert result is (out.array if has_result and kind not in IN_PLACE else None)
        assert same_bytes(x.array, before), "x was written to, in spite of out"
        result = out.array if has_result else x.array if kind == "reduce" else None
    elif kind in IN_PLACE:
        assert result is None
        result = x.array
    else:
        assert same_bytes(x.array, before), "x was written to"
    return None if result is None else result.tobytes()


@pytest.mark.limit(400)
@pytest.mark.parametrize("seed", first(1, range(3)))
@pytest.mark.parametrize("size", RANKS)
def test_every_collective_is_what_numpy_says(world_of, size, seed):
    for row in rows(seed):
        if row["ranks"] != size:
            continue
        results = world_of(size, **environment(row))(call_once, row)
        xs = inputs(row, size)
        for rank, (result, want) in enumerate(zip(results, outcomes(row, xs), strict=True)):
            assert (result is None) == (want is None), (rank, row)
            if want is None:
                continue
            if row["kind"] in FOLDING and not (row["kind"] == "exscan" and rank == 0):
                with np.errstate(all="ignore"):
                    assert_same(np.frombuffer(result, want.dtype), want.ravel(), row["op"], (rank, row))
            else:
                assert result == want.tobytes(), (rank, row)


# ---- shapes and identities --------------------------------------------------------------------------------


def published_example(comm):
    x = np.array([[0], [1], [2], [3]], "f4")
    return comm.reduce_scatter(x)


def test_four_columns_reduce_scatter_to_rows(world_of):
    for rank, result in enumerate(world_of(4)(published_example)):
        assert np.array_equal(result, [[4 * rank]])


def shapes_returned(comm):
    n = comm.size
    x = np.arange(n * 6.0).reshape(n, 2, 3)
    two_each = np.arange(n * 2 * 5).reshape(n * 2, 5)
    found = {
        "all_gather": comm.all_gather(x),
        "all_gather 0-d": comm.all_gather(np.array(2.5)),
        "gather": comm.gather(x, 0),
        "reduce_scatter": comm.reduce_scatter(x),
        "reduce_scatter rows": comm.reduce_scatter(two_each),
        "scatter": comm.scatter(x if comm.rank == 0 else None, like=np.empty((2, 3))),
        "scatter rows": comm.scatter(two_each if comm.rank == 0 else None, like=two_each[:2]),
        "all_to_all": comm.all_to_all(x),
        "all_to_all rows": comm.all_to_all(two_each),
    }
    return {name: None if array is None else array.shape for name, array in found.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_shapes_returned(world_of, size):
    for rank, found in enumerate(world_of(size)(shapes_returned)):
        assert found == {
            "all_gather": (size, size, 2, 3),
            "all_gather 0-d": (size,),
            "gather": (size, size, 2, 3) if rank == 0 else None,
            "reduce_scatter": (2, 3),
            "reduce_scatter rows": (2, 5),
            "scatter": (2, 3),
            "scatter rows": (2, 5),
            "all_to_all": (size, 2, 3),
            "all_to_all rows": (size * 2, 5),
        }


def identities(comm, nbytes):
    n, rank = comm.size, comm.rank
    x = np.random.default_rng(rank).standard_normal((n, max(1, nbytes // 8 // n)))
    reduced, summed = np.empty_like(x), np.empty_like(x)
    comm.all_reduce(x, out=reduced)
    comm.reduce(x, root=n - 1, out=summed)
    comm.broadcast(summed, n - 1)
    scattered = comm.all_gather(comm.reduce_scatter(x))
    gathered, joined = comm.all_gather(x), np.empty((n, *x.shape))
    comm.gather(x, n // 2, out=joined)
    comm.broadcast(joined, n // 2)
    there = comm.all_to_all(x)
    back = comm.all_to_all(there)
    last = x.copy()
    comm.scan(last)
    comm.broadcast(last, n - 1)
    before = np.zeros_like(x)
    comm.exscan(x, out=before)
    upto = x.copy()
    comm.scan(upto)
    return {
        "all_reduce = reduce + broadcast": same_bytes(reduced, summed),
        "all_reduce = reduce_scatter + all_gather": same_bytes(reduced, scattered),
        "all_reduce = the last of scan": same_bytes(reduced, last),
        "scan = exscan + x": same_bytes(upto, before + x),
        "all_gather = gather + broadcast": same_bytes(gathered, joined),
        "all_to_all twice is nothing": same_bytes(back, x),
    }


@pytest.mark.parametrize("nbytes", [8, 800, 90_000, 5_000_000])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_identities(world_of, size, nbytes):
    for found in world_of(size)(identities, nbytes):
        assert all(found.values()), [name for name, holds in found.items() if not holds]


def in_place_parts(comm):
    """out and x that are each other's part."""
    n, rank = comm.size, comm.rank
    room = np.full((n, 1000), -1.0)
    room[rank] = rank
    comm.all_gather(room[rank], out=room)
    gathered = room.copy()
    x = np.arange(n * 1000.0).reshape(n, 1000) + rank
    rows = x.copy()
    comm.reduce_scatter(x, out=x[rank])
    swapped = np.arange(n * 1000.0).reshape(n, 1000) + 1000 * n * rank
    comm.all_to_all(swapped, out=swapped)
    return gathered, x[rank], rows[rank], np.delete(x, rank, 0), np.delete(rows, rank, 0), swapped


def bytes_staged(comm, dtype, count):
    before = comm.stats()["bytes_sent"]
    x = np.ones(count, dtype)
    comm.reduce(x, root=1)
    assert (x == 1 + comm.rank).all()
    return comm.stats()["bytes_sent"] - before


@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 18, 3 << 20])
def test_the_root_of_two_ranks_folds_and_the_other_rank_stages(world_of, nbytes):
    ranks = world_of(2)
    assert ranks(bytes_staged, "f4", nbytes // 4) == [nbytes, 0]


def test_two_ranks_share_slow_folds(world_of):
    half = 1 << 18
    results = half  # of the slice that rank 0 reduces
    assert world_of(2)(bytes_staged, "f2", half) == [half + results, half]


@pytest.mark.parametrize("chunk", [None, 512])
def test_parts_of_each_other_are_in_place(world_of, chunk):
    n = 3
    for rank, found in enumerate(world_of(n, **({"SHMRING_CHUNK": chunk} if chunk else {}))(in_place_parts)):
        gathered, part, own, others, kept, swapped = found
        assert np.array_equal(gathered, np.repeat(np.arange(n), 1000).reshape(n, 1000))
        assert np.array_equal(part, n * (own - rank) + n * (n - 1) / 2)
        assert np.array_equal(others, kept)
        row = np.arange(rank * 1000.0, rank * 1000.0 + 1000)
        assert np.array_equal(swapped, [row + 1000 * n * giver for giver in range(n)])


RECORD = np.dtype([("when", "M8[s]"), ("name", "S5"), ("what", "f8", (3,))])


def items_of_any_make(comm):
    record = np.zeros(3, RECORD)
    record["what"] = comm.rank
    record["name"] = f"r{comm.rank}".encode()
    return [
        comm.all_gather(record),
        comm.all_gather(np.array([comm.rank], "m8[s]")),
        comm.all_gather(np.array([f"rank {comm.rank}"])),
        comm.all_to_all(np.repeat(record[:1], comm.size)),
    ]


def test_items_of_opaque_dtypes_may_have_any_layout(world_of):
    for found in world_of(3)(items_of_any_make):
        records, times, words, swapped = found
        assert records.dtype == RECORD
        assert records.shape == (3, 3)
        assert [name.decode() for name in records["name"][:, 0]] == ["r0", "r1", "r2"]
        assert np.array_equal(times[:, 0].astype(int), range(3))
        assert words.tolist() == [["rank 0"], ["rank 1"], ["rank 2"]]
        assert swapped["what"][:, 0].tolist() == [0, 1, 2]


def items_without_bytes(comm):
    texts = np.zeros((comm.size, 3), [("text", "S0")])["text"]
    given, is_root = [texts[:1], texts[:2]], comm.rank == 0
    found = [comm.gather(texts), comm.all_gather(texts), comm.all_to_all(texts)]
    found += [comm.scatter(texts if is_root else None, like=texts[0])]
    found += [comm.scatter_v(given if is_root else None, like=texts), *comm.all_gather_v(given[comm.rank])]
    return [None if result is None else (result.dtype.str, result.shape) for result in found]


def test_items_of_opaque_dtypes_may_have_no_byte(world_of):
    first, second = world_of(2)(items_without_bytes)
    shapes = [(2, 2, 3), (2, 2, 3), (2, 3), (3,), (1, 3), (1, 3), (2, 3)]
    assert first == [("|S0", shape) for shape in shapes]
    assert second == [None, *first[1:4], ("|S0", (2, 3)), *first[5:]]


def planned(comm):
    x, n = np.full((comm.size, 40), float(comm.rank)), comm.size
    plans = {
        "all_gather": comm.plan("all_gather", x),
        "reduce_scatter": comm.plan("reduce_scatter", x, op="max"),
        "reduce": comm.plan("reduce", x.copy(), root=n - 1),
        "gather": comm.plan("gather", x, 1),
        "scatter": comm.plan("scatter", x if comm.rank == 0 else None, like=x[0]),
        "all_to_all": comm.plan("all_to_all", x),
        "scan": comm.plan("scan", x.copy()),
    }
    results = {}
    for _ in range(3):
        results = {name: plan() for name, plan in plans.items()}
    return {name: None if result is None else result.copy() for name, result in results.items()}


def test_plans_return_what_the_calls_would(world_of):
    for rank, found in enumerate(world_of(3)(planned)):
        assert found["reduce"] is None
        assert found["scan"] is None
        assert (found["gather"] is None) == (rank != 1)
        assert np.array_equal(found["all_gather"][:, 0, 0], [0, 1, 2])
        assert np.array_equal(found["reduce_scatter"], np.full(40, 2.0))
        assert np.array_equal(found["scatter"], np.zeros(40))
        assert np.array_equal(found["all_to_all"][:, 0], [0, 1, 2])


# Ranks and environment: some share a CPU, two trade buffers, also with rings so small that they wrap soon.
COMPANIES = (
    (3, {}),
    (2, {"SHMRING_PATH": "near"}),
    (2, {"SHMRING_PATH": "far"}),
    (2, {"SHMRING_PATH": "far", "SHMRING_CHUNK": "256"}),
)


@pytest.fixture(scope="module", params=COMPANIES, ids=str)
def company(request):
    size, environ = request.param
    with Ranks(size) as ranks:
        yield ranks.meet(**environ)


def one_of_many(turn, kind, count, size):
    """Return each rank's x for the turn-th call, and what each should return or have in it."""
    items = np.arange(count * (size if kind in SPLITTING else 1))
    xs = [items * (rank + 1) + turn for rank in range(size)]
    if kind == "all_reduce":
        return xs, [sum(xs)] * size
    row = {"kind": kind, "dtype": "int64", "op": "sum", "rows": count, "root": "last"}
    return xs, outcomes(row, xs)


def some_calls(comm, calls):
    """Return the calls with wrong results, of a sequence of calls whose slots, lines and credits follow each
    other."""
    todo = []
    for turn, (kind, count, shared) in enumerate(calls):
        xs, wanted = one_of_many(turn, kind, count, comm.size)
        x = comm.empty(xs[0].size, "i8") if shared else np.empty(xs[0].size, "i8")
        x[...] = xs[comm.rank]
        todo.append((kind, count, x, wanted[comm.rank]))
    found = [(wanted, one_call(comm, kind, count, x)) for kind, count, x, wanted in todo]
    are_right = [np.array_equal(np.ravel(wanted), np.ravel(got)) for wanted, got in found]
    return [call for call, is_right in zip(calls, are_right, strict=True) if not is_right]


def arguments_of(comm, kind, count, x):
    """Return the arguments of a call and its keywords; the last rank is the root."""
    last = comm.size - 1
    if kind == "scatter":
        return x if comm.rank == last else None, {"root": last, "like": x[:count]}
    return x, {"root": last} if kind in ("reduce", "gather", "broadcast") else {}


def one_call(comm, kind, count, x):
    given, keywords = arguments_of(comm, kind, count, x)
    result = getattr(comm, kind)(given, **keywords)
    return x if kind in (*IN_PLACE, "all_reduce") else result


CALLS = st.tuples(
    st.sampled_from(("all_reduce", *FOLDING, *MOVING)),
    st.one_of(st.integers(0, 40), st.integers(0, 200_000)),
    st.booleans(),
)


@pytest.mark.limit(240)
@settings(max_examples=60)
@given(calls=st.lists(CALLS, min_size=1, max_size=12))
def test_any_sequence_of_calls(company, calls):
    assert company(some_calls, calls) == [[]] * company.size


# ---- refusals ---------------------------------------------------------------------------------------------


def refusals(comm):
    n, x = comm.size, np.arange(6.0)
    attempts = {
        "rows": lambda: comm.reduce_scatter(np.zeros(n + 1)),
        "0-d": lambda: comm.all_to_all(np.array(1.0)),
        "Fortran": lambda: comm.all_gather(np.zeros((4, 3), order="F")),
        "root": lambda: comm.gather(x, n),
        "scatter without a shape": lambda: comm.scatter(None, root=1 if comm.rank == 0 else 0),
        "out too small": lambda: comm.all_gather(x, out=np.zeros(6 * n - 1)),
        "out of another dtype": lambda: comm.all_gather(x, out=np.zeros((n, 6), "f4")),
        "overlap": lambda: _overlap(comm),
        "objects": lambda: comm.all_gather(np.array([None, 1])),
        "avg of a scan": lambda: comm.scan(x, "avg"),
        "sum of text": lambda: comm.reduce_scatter(np.array(["a"] * n)),
    }
    return refusals_of(comm, attempts)


def _overlap(comm):
    x = np.zeros((comm.size, 4))
    comm.reduce_scatter(x, out=x.ravel()[2:6])


def test_wrong_arguments_are_refused_with_a_reason(world_of):
    for text in world_of(2)(refusals):
        assert "3 rows" in text["rows"]
        assert "0-d" in text["0-d"]
        assert "Fortran" in text["Fortran"]
        assert "root is 2" in text["root"]
        assert "like=" in text["scatter without a shape"]
        assert "count of 12" in text["out too small"]
        assert "float32" in text["out of another dtype"]
        assert "overlap" in text["overlap"]
        assert text["objects"].startswith("TypeError")
        assert "avg" in text["avg of a scan"]
        assert text["sum of text"].startswith("TypeError")


def mismatched(comm, which):
    x = np.zeros((2, 8))
    calls = {
        "kinds": lambda: comm.all_gather(x) if comm.rank else comm.all_to_all(x),
        "roots": lambda: comm.gather(x, comm.rank),
        "shapes": lambda: comm.all_gather(x[: 1 + comm.rank]),
        "ops": lambda: comm.reduce_scatter(x, ("sum", "max")[comm.rank]),
        "dtypes": lambda: comm.all_gather(x.astype(("f4", "f8")[comm.rank])),
        "sizes of items": lambda: comm.all_gather(np.zeros(4, ("S3", "S5")[comm.rank])),
    }
    try:
        calls[which]()
    except shmring.Mismatch as error:
        return error.calls
    return None


@pytest.mark.parametrize("which", ["kinds", "roots", "shapes", "ops", "dtypes", "sizes of items"])
def test_calls_that_differ_are_a_mismatch(which):
    with Ranks(2) as ranks:
        first, second = ranks.meet()(mismatched, which)
    assert first == second
    assert len(set(first)) == 2
    if which == "roots":
        assert first == ("gather(float64[16], root=0)", "gather(float64[16], root=1)")
