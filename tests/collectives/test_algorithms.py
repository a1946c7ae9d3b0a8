"""Algorithms on request: the published schedules, the bytes and steps promised, and their own fold order."""

import itertools
import math

import numpy as np
import pytest
from cases import all_reduced, assert_all_reduced, inputs
from combinations import each_value

from shmring._core import kernels

OWN_ORDER = ("ring", "bidirectional_ring", "halving_doubling", "tree", "double_tree")


def simulate_ring(size):
    """Return, by rank and slice, the ranks whose parts are in it after the reducing half."""
    held = [[{rank} for _ in range(size)] for rank in range(size)]
    for step in range(1, size):
        sent = [(rank, part) for at, rank, part in kernels.ring_schedule(size) if at == step]
        for rank, part, parts in [(rank, part, set(held[rank][part])) for rank, part in sent]:
            assert not held[rank - 1][part] & parts, "something is added twice"
            held[rank - 1][part] |= parts
    return held


def test_the_published_ring_of_four_devices():
    """In step s device d sends slice (d + s) mod 4 to device d - 1, and ends owning slice d."""
    schedule = kernels.ring_schedule(4)
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
    schedule = kernels.tree_schedule(size)
    assert max(step for step, _, _ in schedule) + 1 == math.ceil(math.log2(size))
    assert sorted(sender for _, sender, _ in schedule) == list(range(1, size))
    held = [{rank} for rank in range(size)]
    for _, sender, receiver in sorted(schedule):
        held[receiver] |= held[sender]
    assert held[0] == set(range(size))
    receptions = [(step, receiver) for step, _, receiver in schedule]
    assert len(receptions) == len(set(receptions)), "a rank receives twice in a step"


def test_1024_ranks_take_ten_steps_up():
    assert max(step for step, _, _ in kernels.tree_schedule(1024)) == 9


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, (1 << 33) + 5])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_slices_differ_by_at_most_one_element_and_leave_nothing_out(count, size):
    bounds = kernels.slice_bounds(count, size)
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


ODD_AND_EVEN = ((60, "f4"), (6000, "f8"), (1, "f8"), (2, "u1"), (6001, "f4"), (1009, "i2"), (9973, "u1"))
SENT = [(size, chunk) for size in (2, 3, 4, 5, 8) for chunk in (None, 256)]


def world_with(world_of, size, chunk):
    return world_of(size, **({"SHMRING_CHUNK": chunk} if chunk else {}))


def messages_sent(ranks, algorithm):
    """Yield for messages of many lengths: elements, bytes, the bytes that each rank sent, each rank's
    steps."""
    for count, dtype in ODD_AND_EVEN:
        sent, steps = zip(*ranks(sent_by, algorithm, count, dtype), strict=True)
        yield count, count * np.dtype(dtype).itemsize, sent, steps


@pytest.mark.parametrize(("size", "chunk"), SENT)
@pytest.mark.parametrize(("algorithm", "nrings"), [("ring", 1), ("bidirectional_ring", 2)])
def test_a_ring_sends_what_it_promises(world_of, size, chunk, algorithm, nrings):
    for count, nbytes, sent, steps in messages_sent(world_with(world_of, size, chunk), algorithm):
        assert sum(sent) == 2 * (size - 1) * nbytes
        assert set(steps) == {2 * (size - 1)}
        if count % (nrings * size) == 0:
            assert set(sent) == {2 * (size - 1) * nbytes // size}


@pytest.mark.parametrize(("size", "chunk"), [*SENT, (6, 256), (7, None)])
def test_halving_sends_what_it_promises(world_of, size, chunk):
    """2(p - 1)K of the p ranks that are a power of two, and K once of each of the others."""
    core = 1 << (size.bit_length() - 1)
    for count, nbytes, sent, steps in messages_sent(world_with(world_of, size, chunk), "halving_doubling"):
        assert sum(sent[:core]) == 2 * (core - 1) * nbytes
        assert set(sent[core:]) <= {nbytes}
        assert set(steps) == {2 * int(math.log2(core))}
        if count % core == 0:
            assert set(sent[:core]) == {2 * (core - 1) * nbytes // core}


@pytest.mark.parametrize(("size", "chunk"), [*SENT, (6, 256), (7, None)])
def test_a_double_tree_sends_what_it_promises(world_of, size, chunk):
    """Up each tree everyone but its root sends a half, down it everyone with children, once for both."""
    trees = kernels.double_tree(size)
    roots = [set(range(size)) - set(itertools.chain(*children)) for children in trees]
    for count, nbytes, sent, steps in messages_sent(world_with(world_of, size, chunk), "double_tree"):
        itemsize = nbytes // count
        halves = (count - count // 2) * itemsize, count // 2 * itemsize
        for rank in range(size):
            parts = [
                half * ((rank not in root) + bool(children[rank]))
                for half, root, children in zip(halves, roots, trees, strict=True)
            ]
            assert sent[rank] == sum(parts) <= 2 * nbytes
        assert set(steps) == {2 * math.ceil(math.log2(size))}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 14, 31, 1024])
def test_in_a_double_tree_leaves_of_one_are_inner_nodes_of_the_other(size):
    first, second = kernels.double_tree(size)
    for children in (first, second):
        assert sorted(map(len, children))[-1] <= 2
        assert len(set(itertools.chain(*children))) == sum(map(len, children)) == size - 1
    both = [rank for rank in range(size) if first[rank] and second[rank]]
    assert both == ([0] if size % 2 else [])


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


@each_value({"algorithm": OWN_ORDER, "size": [2, 3, 4, 5, 7, 8]})
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
    results = {all_reduced("float32", "sum", arrays, name).tobytes() for name in ("auto", *OWN_ORDER)}
    assert len(results) == 6
