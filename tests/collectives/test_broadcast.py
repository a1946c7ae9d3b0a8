"""broadcast: root's bytes on every rank, whatever the other arrays held, by every path and kind of memory."""

import numpy as np
import pytest
from cases import (
    DTYPES,
    MEMORIES,
    SMALL_NBYTES,
    ZERO_COPY_NBYTES,
    Placed,
    count_of,
    environment,
    inputs,
    root_of,
    same_bytes,
)
from combinations import pairwise

RANKS = (1, 2, 3, 5, 8)
FACTORS = {
    "dtype": ("bool", "uint8", "int16", "bfloat16", "float8_e5m2", "float32", "complex128"),
    "size": (
        0,
        1,
        3,
        (48, 0),
        (48, 1),
        (300, 1),
        (SMALL_NBYTES, 0),
        (SMALL_NBYTES, 1),
        (20_000, 1),
        (99_000, 0),
    ),
    "memory": MEMORIES,
    "out": (False, True),
    "root": ("first", "last", "middle"),
    "ranks": RANKS,
    "chunk": (None, 256, 1024, 4096),
    "depth": (None, 2, 3, 16),
    "path": ("auto", "near", "far"),
    "segment": ("memfd", "posix"),
}


def may_be(row):
    return row.get("chunk", 1) is not None or row.get("depth") is None


def broadcast_once(comm, row):
    """One rank's part in a case: (the result's bytes, the path that the call took)."""
    root = root_of(row, comm.size)
    values = inputs(row, comm.size)[comm.rank]
    x = Placed(comm, values, row["memory"])
    out = Placed(comm, np.zeros_like(values), row["memory"]) if row["out"] else None
    if comm.rank == root and out is not None:
        x.array.flags.writeable = False
    comm.broadcast(x.array, root, out=out and out.array)
    result = out or x
    x.assert_surroundings()
    result.assert_surroundings()
    assert out is None or same_bytes(x.array, values), "x was written to, in spite of out"
    return result.array.tobytes(), comm.stats()["path"]


@pytest.mark.parametrize("size", RANKS)
def test_everyone_gets_the_bytes_of_root(world_of, size):
    for row in pairwise(FACTORS, may_be):
        if row["ranks"] == size:
            results, paths = zip(*world_of(size, **environment(row))(broadcast_once, row), strict=True)
            want = inputs(row, size)[root_of(row, size)].tobytes()
            assert all(result == want for result in results), row
            nbytes = count_of(row) * DTYPES[row["dtype"]].itemsize
            shared = row["memory"] in ("shared", "slice")
            if size > 1 and shared and nbytes >= ZERO_COPY_NBYTES:
                assert set(paths) == {"zero_copy"}, row


def read_only_root(comm):
    x = np.arange(5000.0) if comm.rank == 1 else np.empty(5000)
    x.flags.writeable = comm.rank != 1
    comm.broadcast(x, 1)
    text = b"immutable" * 20 if comm.rank == 0 else bytearray(180)
    comm.broadcast(text, np.int64(0))
    return float(x.sum()), bytes(text)


def test_root_may_hold_memory_that_cannot_be_written(world_of):
    assert world_of(3)(read_only_root) == [(12497500.0, b"immutable" * 20)] * 3


def many_roots(comm, counts, shared):
    """Roots take turns without a pause, and write to their arrays as soon as the call is over."""
    arrays = [comm.empty(count, "i8") if shared else np.empty(count, "i8") for count in counts]
    for call in range(150):
        root, x = call % comm.size, arrays[call % len(arrays)]
        x[...] = call if comm.rank == root else -1
        comm.broadcast(x, root)
        assert (x == call).all(), f"call {call}: {x}"
        x[...] = -2
    return True


@pytest.mark.parametrize("shared", [False, True])
def test_arrays_may_be_written_again_as_soon_as_the_call_returns(world_of, shared):
    for how in ({"SHMRING_CHUNK": 256, "SHMRING_DEPTH": 2}, {}, {"SHMRING_SINGLE_COPY": 64}):
        assert all(world_of(3, **how)(many_roots, [1, 50, 900, 3000], shared))


def large_broadcast(comm):
    x = np.full(3_000_001, comm.rank, "f8")
    comm.broadcast(x, comm.size - 1)
    return float(x.min()), float(x.max())


@pytest.mark.parametrize("path", ["near", "far"])
def test_a_large_one_with_the_settings_that_users_have(world_of, path):
    assert world_of(3, SHMRING_PATH=path)(large_broadcast) == [(2.0, 2.0)] * 3
