"""The collectives whose pieces differ in length against their definition: every dtype, empty pieces and
pieces that wrap around the buffers many times, all memories, refused arguments, and a rank that dies."""

import ctypes
import functools
import mmap
import os
import signal

import numpy as np
import pytest
from cases import (
    DTYPES,
    MEMORIES,
    Placed,
    environment,
    numbers,
    refusals_of,
    rng_of,
    root_of,
    same_bytes,
)
from combinations import first, pairwise
from ranks import Died, Ranks

import shmring

MAP_FIXED = 0x10  # mmap has no name for it
RANKS = (1, 2, 4, 8)
KINDS = ("all_gather_v", "gather_v", "scatter_v", "all_to_all_v")
SPLITTING = ("scatter_v", "all_to_all_v")
RECORD = np.dtype([("when", "M8[s]"), ("name", "S5"), ("what", "f8", (3,))])
OPAQUE = {"record": RECORD, "words": np.dtype("U7"), "times": np.dtype("m8[ms]")}
FACTORS = {
    "kind": KINDS,
    "dtype": (*DTYPES, *OPAQUE),
    "most": (0, 1, 7, 1000, 20_000),  # rows of a piece
    "trailing": ((), (1,), (3,), (2, 5), (0,)),
    "memory": MEMORIES,
    "out": (False, True),
    "background": (False, True),
    "root": ("first", "last", "middle"),
    "ranks": RANKS,
    "chunk": (None, 256, 4096),
    "depth": (None, 2, 5),
    "path": ("auto", "near", "far"),
    "single_copy": ("auto", "off", 64),
}


def has_a_meaning(row):
    return not (row.get("chunk", 1) is None and row.get("depth") is not None)


@functools.cache
def rows(seed):
    return pairwise(FACTORS, has_a_meaning, seed=seed)


def piece(row, giver, taker):
    """Return the piece that giver sends to taker."""
    seed = sorted((name, repr(value)) for name, value in row.items())
    rng = rng_of(seed, giver, taker if row["kind"] in SPLITTING else None)
    nrows = int(rng.choice([0, row["most"], rng.integers(row["most"] + 1)]))
    shape = (nrows, *row["trailing"])
    count = int(np.prod(shape, dtype=int))
    if row["dtype"] in OPAQUE:
        dtype = OPAQUE[row["dtype"]]
        return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)
    return numbers(row["dtype"], count, rng).reshape(shape)


def givers(row, rank, size):
    """Return the ranks that send something, by definition; None: no result."""
    root = root_of(row, size)
    if row["kind"] == "scatter_v":
        return [root]
    return range(size) if row["kind"] != "gather_v" or rank == root else None


def call_once(comm, row):
    """Run one rank's part of a case: return None, or its results by giver as bytes, shape and dtype."""
    kind, rank, size = row["kind"], comm.rank, comm.size
    root = root_of(row, size)
    takers = range(size) if kind in SPLITTING else [0]
    most = row["most"] * piece(row, rank, 0).itemsize * int(np.prod(row["trailing"], dtype=int))
    given = [Placed(comm, piece(row, rank, taker), row["memory"], most) for taker in takers]
    x = [placed.array for placed in given] if kind in SPLITTING else given[0].array
    keywords = {"root": root} if kind in ("gather_v", "scatter_v") else {}
    sources = givers(row, rank, size)
    placed_out = []
    if row["out"]:
        # Shared memory is had together, so one that takes nothing makes as much room as others.
        wanted = [piece(row, giver, rank) for giver in sources or range(size)]
        placed_out = [Placed(comm, np.zeros_like(array), row["memory"], most) for array in wanted]
        arrays = [placed.array for placed in placed_out]
        keywords["out"] = (arrays[0] if kind == "scatter_v" else arrays) if sources else None
    if kind == "scatter_v" and rank != root:
        x = None
        keywords.setdefault("like", np.empty((3, *row["trailing"]), given[0].array.dtype))
    result = getattr(comm, kind)(x, **keywords, async_op=row["background"])
    if row["background"]:
        comm.barrier()
        result = result.result()
    for placed in given + placed_out:
        placed.assert_surroundings()
    for placed, taker in zip(given, takers, strict=True):
        assert same_bytes(placed.array, piece(row, rank, taker)), "what was given has changed"
    if row["out"] and sources:
        assert result is keywords["out"]
    if result is None:
        return None
    found = [result] if kind == "scatter_v" else result
    return [(array.tobytes(), array.shape, array.dtype.str) for array in found]


def assert_uneven(found, row, rank, size):
    """Check that call_once found on a rank what the definition says."""
    sources = givers(row, rank, size)
    assert (found is None) == (sources is None), (rank, row)
    for giver, (content, shape, dtype) in zip(sources or (), found or (), strict=True):
        want = piece(row, giver, rank)
        assert content == want.tobytes(), (giver, rank, row)
        assert (shape, dtype) == (want.shape, want.dtype.str), (giver, rank, row)


@pytest.mark.limit(400)
@pytest.mark.parametrize("seed", first(1, range(2)))
@pytest.mark.parametrize("size", RANKS)
def test_every_uneven_collective_is_what_its_definition_says(world_of, size, seed):
    for row in rows(seed):
        if row["ranks"] != size:
            continue
        for rank, found in enumerate(world_of(size, **environment(row))(call_once, row)):
            assert_uneven(found, row, rank, size)


# ---- in place, and data of several ranks ------------------------------------------------------------------


def in_place(comm):
    n, rank = comm.size, comm.rank
    lengths = [100 * (r + 1) for r in range(n)]
    out = [np.full((length, 2), -1.0) for length in lengths]
    out[rank][...] = rank
    comm.all_gather_v(out[rank], out=out)
    swapped = [np.full(50 + rank + j, 10.0 * rank + j) for j in range(n)]
    comm.all_to_all_v(swapped, out=swapped)
    parts = [np.full(lengths[r], float(r)) for r in range(n)]
    own = comm.scatter_v(parts, 1, out=parts[1]) if rank == 1 else comm.scatter_v(None, 1, like=parts[0])
    return [np.unique(a).tolist() for a in out], [np.unique(a).tolist() for a in swapped], own.tolist()


@pytest.mark.parametrize("chunk", [None, 256])
def test_the_own_piece_and_a_swap_are_in_place(world_of, chunk):
    n = 3
    for rank, found in enumerate(world_of(n, **({"SHMRING_CHUNK": chunk} if chunk else {}))(in_place)):
        gathered, swapped, own = found
        assert gathered == [[r] for r in range(n)]
        assert swapped == [[10.0 * giver + rank] for giver in range(n)]
        assert own == [rank] * (100 * (rank + 1))


def equal_shared(comm):
    """Give parts of shared blocks: blocks are equally long on every rank, the parts are not."""
    block = comm.full(150_000, comm.rank, "f8")
    x = block[: 50_000 * (comm.rank + 1)]
    got = comm.all_gather_v(x)
    first = comm.stats()["path"]
    swapped = comm.all_to_all_v([x[j:] for j in range(comm.size)])
    second = comm.stats()["path"]
    mixed = comm.all_gather_v(x if comm.rank else x.copy())
    sums = [a.sum() for a in got], [a.sum() for a in swapped], [a.sum() for a in mixed]
    return first, second, comm.stats()["path"], sums


def test_shared_arrays_are_copied_once(world_of):
    for rank, found in enumerate(world_of(3, SHMRING_PATH="near", SHMRING_SINGLE_COPY="off")(equal_shared)):
        first, second, third, (gathered, swapped, mixed) = found
        assert (first, second, third) == ("zero_copy", "zero_copy", "near")
        assert gathered == mixed == [r * 50_000.0 * (r + 1) for r in range(3)]
        assert swapped == [r * (50_000.0 * (r + 1) - rank) for r in range(3)]


def lists_that_do_not_last(comm):
    n = comm.size
    got = comm.all_to_all_v(np.full(5000, 10.0 * comm.rank + j) for j in range(n))
    made = ([np.full(300, float(j)) for j in range(n)] if comm.rank == 0 else None,)
    return [a[-1] for a in got], comm.scatter_v(*made, like=np.zeros(0))[-1]


def test_lists_need_not_last(world_of):
    for rank, (swapped, own) in enumerate(world_of(3, SHMRING_CHUNK=512)(lists_that_do_not_last)):
        assert swapped == [10.0 * giver + rank for giver in range(3)]
        assert own == rank


def many_calls(comm):
    """Vector calls between others: their slots and credits follow each other."""
    rng, total = np.random.default_rng(7), 0.0
    for _ in range(60):
        lengths = [int(n) for n in rng.integers(0, 3000, comm.size)]
        got = comm.all_gather_v(np.full(lengths[comm.rank], comm.rank, "f4"))
        assert [len(a) for a in got] == lengths
        x = np.full(int(rng.integers(0, 5000)), 1.0)
        comm.all_reduce(x)
        back = comm.all_to_all_v([got[j][: comm.rank * 7] for j in range(comm.size)])
        assert [len(a) for a in back] == [min(7 * r, lengths[comm.rank]) for r in range(comm.size)]
        total += x.sum()
    return total


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_calls_between_others(world_of, size):
    assert len(set(world_of(size, SHMRING_CHUNK=512)(many_calls))) == 1


def behind_background_calls(comm):
    """Check that vector and fused calls run after earlier calls, on this communicator and on a group."""
    group = comm.split(comm.rank % 2)
    rng, found = np.random.default_rng(3), []
    for _ in range(20):
        arrays = [np.full(int(n), comm.rank, "f8") for n in rng.integers(0, 4000, 3)]
        works = [comm.all_reduce(a, async_op=True) for a in arrays]
        pieces = group.all_gather_v(np.full(group.rank * 50, group.rank))
        swapped = comm.all_to_all_v([np.full(comm.rank + j, comm.rank) for j in range(comm.size)])
        works.append(comm.barrier(async_op=True))
        many = [np.ones(3, "f4"), np.ones(9, "i8")]
        comm.all_reduce_many(many)
        assert all(work.done() for work in works[:-1])
        for work in works:
            work.wait()
        assert [len(piece) for piece in pieces] == [50 * r for r in range(group.size)]
        assert [len(piece) for piece in swapped] == [r + comm.rank for r in range(comm.size)]
        assert all((m == comm.size).all() for m in many)
        found.append([a.sum() for a in arrays])
    group.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_calls_stand_behind_background_calls(world_of, size):
    results = world_of(size, SHMRING_CHUNK=1024)(behind_background_calls)
    assert all(found == results[0] for found in results)


def near_the_wrap(comm):
    return [a.tolist() for _ in range(20) for a in comm.all_gather_v(np.arange(100 * comm.rank))]


def test_numbers_may_wrap(world_of):
    first, second = world_of(2, SHMRING_CHUNK=256, SHMRING_FIRST_SEQ=2**64 - 9)(near_the_wrap)
    assert first == second == [[], list(range(100))] * 20


def scatter_4_gib(comm, window_nbytes):
    """Scatter 4 GiB of zeros to rank 1, all of whose `out` is one window of memory."""
    nbytes = 4 << 30
    reserve = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(reserve, "u1")
    if comm.rank == 0:
        comm.scatter_v([array[:1], array], 0, like=array)
    else:
        map_windows(array, window_nbytes)
        array[0] = 9
        comm.scatter_v(None, 0, out=array)
        assert array[0] == 0
    return comm.stats()["paths"]


def map_windows(array, window_nbytes):
    """Let all windows of the array be the same memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
    libc.mmap.restype = ctypes.c_void_p
    window = os.memfd_create("window")
    os.ftruncate(window, window_nbytes)
    for begin in range(0, array.nbytes, window_nbytes):
        place, access = array.ctypes.data + begin, mmap.PROT_READ | mmap.PROT_WRITE
        assert libc.mmap(place, window_nbytes, access, mmap.MAP_SHARED | MAP_FIXED, window, 0) == place
    os.close(window)


@pytest.mark.slow
def test_the_fixed_path_holds_for_any_length(world_of):
    for paths in world_of(2, SHMRING_PATH="slots")(scatter_4_gib, 64 << 20):
        assert paths["single_copy"] == 0


# ---- refusals ---------------------------------------------------------------------------------------------


def refusals(comm):
    n, rank, x = comm.size, comm.rank, np.arange(6.0)
    several = [x] * n
    attempts = {
        "0-d": lambda: comm.all_gather_v(np.array(1.0)),
        "number": lambda: comm.all_gather_v(1.0),
        "Fortran": lambda: comm.gather_v(np.zeros((4, 3), order="F")),
        "strides": lambda: comm.all_gather_v(x[::2]),
        "objects": lambda: comm.all_gather_v(np.array([None, 1])),
        "root": lambda: comm.gather_v(x, n),
        "no root": lambda: comm.gather_v(x, None),
        "too few": lambda: comm.all_to_all_v(several[1:]),
        "no list": lambda: comm.all_to_all_v(7),
        "dtypes": lambda: comm.all_to_all_v([x, *[x.astype("f4")] * (n - 1)]),
        "rows": lambda: comm.all_to_all_v([x, *[x.reshape(3, 2)] * (n - 1)]),
        "no shape": lambda: comm.scatter_v(None, root=1 if rank == 0 else 0),
        "out of another dtype": lambda: comm.all_gather_v(x, out=[np.zeros(6, "f4")] * n),
        "out too small": lambda: comm.all_gather_v(x, out=[np.zeros(5) for _ in range(n)]),
        "out overlaps": lambda: comm.all_gather_v(x, out=[x] * n),
        "read-only": lambda: comm.all_gather_v(x, out=[np.broadcast_to(0.0, 6).copy().data.toreadonly()] * n),
        "timeout": lambda: comm.all_gather_v(x, timeout=-1),
    }
    text = refusals_of(comm, attempts)
    assert np.array_equal(x, np.arange(6.0))
    return text


def test_wrong_arguments_are_refused_with_a_reason(world_of):
    for text in world_of(2)(refusals):
        assert "x is 0-d" in text["0-d"]
        assert text["number"].startswith("TypeError")
        assert "Fortran" in text["Fortran"]
        assert "not contiguous" in text["strides"]
        assert text["objects"].startswith("TypeError")
        assert "root is 2" in text["root"]
        assert text["no root"].startswith("TypeError: root is None")
        assert "1 arrays for 2 ranks" in text["too few"]
        assert "TypeError: xs is a int" in text["no list"]
        assert "xs[1] is float32, xs[0] is float64" in text["dtypes"]
        assert "xs[1] has shape (3, 2), xs[0] has (6,)" in text["rows"]
        assert "like=" in text["no shape"]
        assert "out[0] is float32, but the arrays of the call are float64" in text["out of another dtype"]
        assert "out[0] has 5 elements, but 6 come from rank 0" in text["out too small"]
        assert "overlap" in text["out overlaps"]
        assert "out[0] is read-only" in text["read-only"]
        assert "timeout" in text["timeout"]


def mismatched(comm, which):
    rank, x = comm.rank, np.zeros((4, 6))
    rooms = [np.ones((4 + (which == "counts" and rank == 0), 6)) for _ in range(comm.size)]
    calls = {
        "kinds": lambda: comm.all_gather_v(x) if rank else comm.barrier(),
        "roots": lambda: comm.gather_v(x, rank % 2),
        "rows": lambda: comm.all_gather_v(x[:, :rank].copy()),
        "shapes": lambda: comm.all_gather_v(x.reshape(4, *((2, 3), (3, 2))[rank % 2])),
        "dtypes": lambda: comm.all_gather_v(x.astype(("f4", "i4")[rank % 2])),
        "moved dtypes": lambda: comm.all_gather_v(np.zeros(4, ("S6", "U6", "M8[s]")[rank % 3])),
        "times": lambda: comm.all_gather_v(np.zeros(4, ("M8[s]", "m8[s]")[rank % 2])),
        "one refuses": lambda: comm.all_to_all_v([x] * (comm.size - (rank == 1))),
        "counts": lambda: comm.all_gather_v(x, out=rooms),
    }
    error_of = None
    try:
        calls[which]()
    except (shmring.Mismatch, TypeError, ValueError) as error:
        error_of = type(error).__name__, str(error)
    return error_of, all((room == 1).all() for room in rooms)


@pytest.mark.parametrize(
    "which",
    ["kinds", "roots", "rows", "shapes", "dtypes", "moved dtypes", "times", "one refuses", "counts"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_differ_are_a_mismatch_and_nothing_is_overwritten(size, which):
    with Ranks(size) as ranks:
        outcomes = ranks.meet()(mismatched, which)
    wrong = {"one refuses": 1, "counts": 0}.get(which)
    for rank, ((name, text), untouched) in enumerate(outcomes):
        assert untouched
        assert name == ("ValueError" if rank == wrong else "Mismatch"), outcomes
        if which == "shapes" and size == 2:
            assert "arrays of other shapes or dtypes" in text
        if which == "roots" and size == 2:
            assert "gather_v(rows of float64[6], root=0)" in text


# ---- a rank that dies -------------------------------------------------------------------------------------


def die_in_the_middle(comm, victim, kind):
    for number in range(1000):
        if comm.rank == victim and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        x = np.zeros((10_000 * (comm.rank + 1), 2))
        if kind == "all_to_all_v":
            comm.all_to_all_v([x] * comm.size)
        elif kind == "gather_v":
            comm.gather_v(x, number % comm.size)
        else:
            comm.all_gather_v(x)


@pytest.mark.parametrize("kind", ["all_gather_v", "gather_v", "all_to_all_v"])
def test_a_rank_that_is_killed_is_named_by_all(kind):
    with Ranks(3) as ranks:
        outcomes = ranks.meet(SHMRING_CHUNK=1024).outcomes(die_in_the_middle, 1, kind)
    assert isinstance(outcomes.pop(1), Died)
    for outcome in outcomes:
        assert isinstance(outcome, shmring.RankFailed)
        assert (outcome.rank, outcome.op) == (1, kind)
