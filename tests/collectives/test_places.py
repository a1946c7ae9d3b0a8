"""The places of data in the staging buffers: owners of slices write results back, pairs of ranks swap places.

The staging buffers are used again after every few chunks, so that places are written, read and swapped often.
"""

import numpy as np
import pytest

from shmring._config import thresholds, tuning_table

COUNTS = 1, 37, 700, 5_000, 12_345, 60_001  # float64s: the longest has tens of chunks
TURNS = 3  # one more than the lengths of a lap


@pytest.fixture
def small_window(tmp_path):
    """Return a function that makes a table in which long messages keep to 4 slots of `cached_nbytes`."""

    def table(size, cached_nbytes):
        path = tmp_path / f"{size}.json"
        values = {"cached_chunk_nbytes": cached_nbytes, "cached_most_nbytes": thresholds.NEVER}
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


def mixed(comm, call_all):
    return [
        (count, turn, wrong)
        for count in COUNTS
        for turn in range(TURNS)
        for call in call_all
        for wrong in call(comm, count, turn)
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_slices(world_of, small_window, size):
    environ = small_window(size, max(16 * 64 * size, 4 << 10))
    assert world_of(size, **environ)(mixed, [reduced]) == [[]] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_pieces(world_of, small_window, size):
    environ = small_window(size, 64 << 10)
    assert world_of(size, **environ)(mixed, [exchanged, reduced]) == [[]] * size
