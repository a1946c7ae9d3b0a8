"""The places of data in the staging buffers: owners of slices write results back, pairs of ranks swap places.

The staging buffers are used again after every few chunks, so that places are written, read and swapped often.
"""

import numpy as np
import pytest
from combinations import first
from ranks import Ranks

import shmring
from shmring._config import thresholds, tuning_table
from shmring._system import limits
from tests.collectives.test_going_ahead import share_cpus

COUNTS = 1, 37, 700, 5_000, 12_345, 60_001  # float64s: the longest has tens of chunks
TURNS = 3  # more than the two parities of a lap


@pytest.fixture
def small_window(tmp_path):
    """Return a function that makes a table in which long messages keep to 4 slots of `cached_nbytes`."""

    def table(size, cached_nbytes, stream_nbytes):
        path = tmp_path / f"{size}.json"
        values = {"cached_chunk_nbytes": cached_nbytes, "cached_most_nbytes": thresholds.NEVER}
        values["far_stream_nbytes"] = stream_nbytes
        values |= {"one_chunk_nbytes": 8 << 10, "single_copy_nbytes": thresholds.NEVER}
        tuning_table.save(path, {size: {"any": {}, "near": values, "far": values}}, thresholds.LIMITS)
        return {"SHMRING_TUNING": str(path), "SHMRING_PATH": "far"}

    return table


def numbers(rank, turn, shape):
    return np.random.default_rng([rank, turn]).integers(-1000, 1000, shape).astype("f8")


def skewed(comm, values):
    """A copy that begins elsewhere in a cache line on each rank."""
    room = np.empty(values.size + 8)
    copy = room[comm.rank % 8 :][: values.size].reshape(values.shape)
    copy[...] = values
    return copy


def reduced(comm, count, turn):
    """Wrong results of an all_reduce in place, one out of place, and a reduce to each rank in turn."""
    given = [numbers(rank, turn, count) for rank in range(comm.size)]
    total = np.sum(given, axis=0)
    x, out = skewed(comm, given[comm.rank]), skewed(comm, np.zeros(count))
    wrong = []
    comm.all_reduce(x, out=out)
    wrong += [] if np.array_equal(out, total) and np.array_equal(x, given[comm.rank]) else ["out of place"]
    root = turn % comm.size
    comm.reduce(x, "sum", root)
    wrong += [] if np.array_equal(x, total if comm.rank == root else given[comm.rank]) else ["reduce"]
    x[...] = given[comm.rank]
    comm.all_reduce(x)
    return wrong + ([] if np.array_equal(x, total) else ["in place"])


def exchanged(comm, count, turn):
    """Wrong results of calls in which each rank has another piece for each."""
    given = [numbers(rank, turn, (comm.size, count)) for rank in range(comm.size)]
    x = skewed(comm, given[comm.rank])
    wrong = []
    expected = np.sum([rows[comm.rank] for rows in given], axis=0)
    wrong += [] if np.array_equal(comm.reduce_scatter(x).ravel(), expected) else ["reduce_scatter"]
    rows = [rows[comm.rank] for rows in given]
    wrong += [] if np.array_equal(comm.all_to_all(x), rows) else ["all_to_all"]
    pieces = [x[rank, : count - count * rank // (2 * comm.size)] for rank in range(comm.size)]
    lengths = {len(piece) for piece in comm.all_to_all_v(pieces)}
    wrong += [] if lengths == {len(pieces[comm.rank])} else ["all_to_all_v"]
    root = turn % comm.size
    part = comm.scatter(x if comm.rank == root else None, root, like=x[0])
    return wrong + ([] if np.array_equal(part.ravel(), given[root][comm.rank]) else ["scatter"])


def moved(comm, count, turn):
    """Wrong results of calls that use the same buffers in other ways, one of them in the background."""
    given = [numbers(rank, turn, count) for rank in range(comm.size)]
    root, wrong = turn % comm.size, []
    for algorithm in ("ring", "tree", "double_tree", "master"):
        x = skewed(comm, given[comm.rank])
        comm.all_reduce(x, algorithm=algorithm)
        wrong += [] if np.array_equal(x, np.sum(given, axis=0)) else [algorithm]
    x, y = skewed(comm, given[comm.rank]), given[comm.rank].copy()
    work = comm.all_gather(y, async_op=True)
    comm.broadcast(x, root)
    wrong += [] if np.array_equal(x, given[root]) else ["broadcast"]
    wrong += [] if np.array_equal(work.result(), given) else ["all_gather"]
    x[...] = given[comm.rank]
    comm.scan(x)
    return wrong + ([] if np.array_equal(x, np.sum(given[: comm.rank + 1], axis=0)) else ["scan"])


def mixed(comm, call_all):
    return [
        (count, turn, wrong)
        for count in COUNTS
        for turn in range(TURNS)
        for call in call_all
        for wrong in call(comm, count, turn)
    ]


def with_a_cpu_each(comm, world, call_all):
    """The same in a new world, whose ranks take this for a machine with enough CPUs."""
    usable, limits.usable_cpus = limits.usable_cpus, lambda _: comm.size
    try:
        with shmring.init(world, rank=comm.rank) as other:
            return mixed(other, call_all)
    finally:
        limits.usable_cpus = usable


@pytest.mark.parametrize("stream_nbytes", [thresholds.NEVER, 64])
@pytest.mark.parametrize("size", first(3, [2, 3, 5, 4, 8]))
def test_slices(world_of, small_window, size, stream_nbytes):
    ranks = world_of(size, **small_window(size, max(16 * 64 * size, 4 << 10), stream_nbytes))
    assert ranks(with_a_cpu_each, shmring.world(size), [reduced, moved]) == [[]] * size
    assert ranks(mixed, [reduced]) == [[]] * size


@pytest.mark.parametrize("stream_nbytes", [thresholds.NEVER, 64])
@pytest.mark.parametrize("size", first(2, [2, 5, 3]))
def test_pieces(world_of, small_window, size, stream_nbytes):
    ranks = world_of(size, **small_window(size, 64 << 10, stream_nbytes))
    assert ranks(with_a_cpu_each, shmring.world(size), [exchanged, reduced, moved]) == [[]] * size
    assert ranks(mixed, [exchanged]) == [[]] * size


def differ_late(comm, turns):
    """Rank 0 makes another call than the others, which repeat a broadcast. Return a rank's wrong values."""
    x, wrong = np.empty(1024), []
    pieces = np.full((comm.size, 2048), -1.0)
    try:
        for turn in range(turns + 64):
            x[...] = turn if comm.rank == 1 else -2.0
            if comm.rank == 0 and turn == turns:
                comm.all_to_all(pieces)
            else:
                comm.broadcast(x, 1)
            wrong += [] if (x == turn).all() else [(turn, x.min(), x.max())]
    except shmring.Mismatch:
        return wrong
    return "no error"


def test_a_call_that_differs_gives_no_wrong_data():
    """Ranks that share CPUs go ahead: they read what the root staged before the others' calls are known."""
    with Ranks(3) as ranks:
        ranks.meet()(share_cpus, 1)
        for turns in range(50, 70):
            found = ranks.meet(SHMRING_CHUNK=16_384, SHMRING_DEPTH=2)(differ_late, turns)
            assert found == [[]] * 3, turns
