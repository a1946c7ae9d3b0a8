"""Ring, tree and master: the published schedules, the bytes and steps promised, and their own fold order."""

import math

import numpy as np
import pytest
from cases import all_reduced, assert_all_reduced, inputs

from shmring import _layout


def simulate_ring(size):
    """Who holds which ranks' parts of each slice after the reducing half."""
    held = [[{rank} for _ in range(size)] for rank in range(size)]
    for step in range(1, size):
        sent = [(rank, part) for at, rank, part in _layout.ring_schedule(size) if at == step]
        for rank, part, parts in [(rank, part, set(held[rank][part])) for rank, part in sent]:
            assert not held[rank - 1][part] & parts, "something is added twice"
            held[rank - 1][part] |= parts
    return held


def test_the_published_ring_of_four_devices():
    """In step s device d sends slice (d + s) mod 4 to device d - 1, and ends owning slice d."""
    schedule = _layout.ring_schedule(4)
    assert schedule == [(s, d, (d + s) % 4) for s in (1, 2, 3) for d in range(4)]
    held = simulate_ring(4)
    for device in range(4):
        assert held[device][device] == {0, 1, 2, 3}


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17])
def test_any_ring_ends_with_each_rank_owning_its_slice(size):
    held = simulate_ring(size)
    assert all(held[rank][rank] == set(range(size)) for rank in range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 31, 32, 33, 1024])
def test_the_tree_needs_log_steps_and_everybody_but_rank_0_sends_once(size):
    schedule = _layout.tree_schedule(size)
    assert max(step for step, _, _ in schedule) + 1 == math.ceil(math.log2(size))
    assert sorted(sender for _, sender, _ in schedule) == list(range(1, size))
    held = [{rank} for rank in range(size)]
    for _, sender, receiver in sorted(schedule):
        held[receiver] |= held[sender]
    assert held[0] == set(range(size))
    receptions = [(step, receiver) for step, _, receiver in schedule]
    assert len(receptions) == len(set(receptions)), "a rank receives twice in a step"


def test_1024_ranks_take_ten_steps_up():
    assert max(step for step, _, _ in _layout.tree_schedule(1024)) == 9


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, (1 << 33) + 5])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_slices_differ_by_at_most_one_element_and_leave_nothing_out(count, size):
    bounds = _layout.slice_bounds(count, size)
    lengths = [end - begin for begin, end in bounds]
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == count
    assert max(lengths) - min(lengths) <= 1


def sent_by(comm, algorithm, count, dtype):
    """(bytes sent, steps) of one call."""
    before = comm.stats()
    comm.all_reduce(np.ones(count, dtype), algorithm=algorithm)
    after = comm.stats()
    return after["bytes_sent"] - before["bytes_sent"], after["steps"] - before["steps"]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("chunk", [None, 256])
def test_the_ring_sends_what_it_promises(world_of, size, chunk):
    ranks = world_of(size, **({"SHMRING_CHUNK": chunk} if chunk else {}))
    for count, dtype in [
        (60, "f4"),
        (6000, "f8"),
        (1, "f8"),
        (2, "u1"),
        (6001, "f4"),
        (1009, "i2"),
        (9973, "u1"),
    ]:
        nbytes = count * np.dtype(dtype).itemsize
        sent, steps = zip(*ranks(sent_by, "ring", count, dtype), strict=True)
        assert sum(sent) == 2 * (size - 1) * nbytes
        assert set(steps) == {2 * (size - 1)}
        if count % size == 0:
            assert set(sent) == {2 * (size - 1) * nbytes // size}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_the_tree_takes_as_many_steps_down_as_up(world_of, size):
    ranks = world_of(size, SHMRING_CHUNK=1024)
    for count in (1, 5000):
        steps = {steps for _, steps in ranks(sent_by, "tree", count, "f4")}
        assert steps == {2 * math.ceil(math.log2(size))}


def reduce_values(comm, row):
    x = inputs(row, comm.size)[comm.rank]
    comm.all_reduce(x, row["op"], algorithm=row["algorithm"])
    return x.tobytes()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_each_algorithm_folds_and_rounds_in_its_own_order(world_of, size, algorithm):
    ranks = world_of(size, SHMRING_CHUNK=256, SHMRING_DEPTH=2)
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float32", "complex128"):
        for op in ("sum", "avg", "prod"):
            for count in (1, size - 1, 3 * size, 1013):
                row = {"dtype": dtype, "op": op, "size": count, "algorithm": algorithm}
                assert_all_reduced(ranks(reduce_values, row), row, inputs(row, size))


@pytest.mark.parametrize("algorithm", ["direct", "master"])
def test_direct_and_master_fold_in_rank_order(world_of, algorithm):
    ranks = world_of(5, SHMRING_CHUNK=256)
    for dtype in ("float16", "float32"):
        row = {"dtype": dtype, "op": "sum", "size": 1013, "algorithm": algorithm}
        assert_all_reduced(ranks(reduce_values, row), row, inputs(row, 5))


def test_the_orders_differ_so_that_these_tests_can_tell():
    row = {"dtype": "float32", "op": "sum", "size": 1013}
    arrays = inputs(row, 5)
    results = {all_reduced("float32", "sum", arrays, name).tobytes() for name in ("auto", "ring", "tree")}
    assert len(results) == 3
