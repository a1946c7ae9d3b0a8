"""Sums of many arrays in a wire format between hosts, and the place of their error feedback."""

import gc

import numpy as np
import pytest

import shmring
from shmring._comm.error_feedback import Residuals
from tests.internode.test_internode_collectives import LAYOUTS, TINY_SLICE
from tests.internode.test_wire_formats import exact_sum, values_of

LENGTHS = 900, 1, 3000, 700, 40_000, 500  # the fifth is longer than what is reduced together


def arrays_of(rank, kind):
    whole = values_of(sum(LENGTHS), rank)
    views = np.split(whole, np.cumsum(LENGTHS)[:-1])
    return views if kind == "consecutive" else [view.copy() for view in views]


def means_of_many(comm, kind, times):
    """The first results, the means of all, the bytes that crossed the wire, those of the same as it is."""
    comm.wire = "int8"
    given = arrays_of(comm.rank, kind)
    arrays, results = arrays_of(comm.rank, kind), []
    before = comm.stats()["bytes_over_wire"]
    for _ in range(times):
        for array, values in zip(arrays, given, strict=True):
            array[:] = values
        work = comm.all_reduce_many(arrays, fuse_nbytes=16_000, async_op=kind == "background")
        if work is not None:
            work.wait()
        results.append(np.concatenate(arrays))
    narrow = comm.stats()["bytes_over_wire"] - before
    comm.wire = "native"
    comm.all_reduce_many(arrays, fuse_nbytes=16_000)
    plain = comm.stats()["bytes_over_wire"] - before - narrow
    return results[0], np.mean(results, axis=0, dtype="f8"), narrow / times, plain


@pytest.mark.parametrize("kind", ["apart", "consecutive", "background"])
@pytest.mark.parametrize("layout", ["1+1", "2+1+3"])
def test_many_arrays_travel_as_the_communicator_says(world_over_hosts, layout, kind):
    nodes, times = LAYOUTS[layout], 40
    want = exact_sum([np.concatenate(arrays_of(rank, kind)) for rank in range(len(nodes))])
    found = world_over_hosts(nodes, SHMRING_WIRE_SLICE=TINY_SLICE)(means_of_many, kind, times)
    assert len({first.tobytes() + mean.tobytes() for first, mean, *_ in found}) == 1
    first, mean, *_ = found[0]
    assert 0 < np.abs(mean - want).max() < np.abs(first - want).max() / (times / 4)
    narrow, plain = (sum(values) for values in list(zip(*found, strict=True))[2:])
    assert 0.25 <= narrow / plain < 0.3


def train_a_little(comm):
    """Reduce gradients in buckets, in the order of the backward pass."""
    gradients = arrays_of(comm.rank, "apart")
    comm.wire = "bf16"
    before = comm.stats()["bytes_over_wire"]
    bucketer = shmring.Bucketer(comm, nbytes=20_000, op="sum")
    for gradient in reversed(gradients):
        bucketer.add(gradient)
    bucketer.wait()
    return np.concatenate(gradients), comm.stats()["bytes_over_wire"] - before


def test_buckets_travel_as_the_communicator_says(world_over_hosts):
    want = exact_sum([np.concatenate(arrays_of(rank, "apart")) for rank in range(2)])
    for got, sent in world_over_hosts(LAYOUTS["1+1"], SHMRING_WIRE_SLICE=TINY_SLICE)(train_a_little):
        assert np.abs(got - want).max() < 2**-6 * np.abs(want).max()
        assert sent < 2.2 * sum(LENGTHS)


def share_the_first_array(comm):
    """Reduce two lists that begin with the same array, and go on with arrays of one length each."""
    first, large, small = np.zeros(900, "f4"), values_of(3000, comm.rank) * 1e6, values_of(3000, comm.rank)
    comm.wire = "bf16"
    for array in (large, small):
        comm.all_reduce_many([first, array], fuse_nbytes=16_000)
    return small


def test_rounding_errors_stay_with_their_arrays(world_over_hosts):
    want = exact_sum([values_of(3000, rank) for rank in range(2)])
    for got in world_over_hosts(LAYOUTS["1+1"], SHMRING_WIRE_SLICE=TINY_SLICE)(share_the_first_array):
        assert np.abs(got - want).max() < 2**-6 * np.abs(want).max()


def alternate(comm):
    """Return the mean of many sums of two lists that begin with the same array."""
    first, total = np.zeros(900, "f4"), np.zeros(3000)
    given = [values_of(3000, comm.rank), 2 * values_of(3000, comm.rank)]
    rooms = [np.empty(3000, "f4") for _ in given]
    comm.wire = "bf16"
    for _ in range(40):
        for room, x in zip(rooms, given, strict=True):
            room[:] = x
            comm.all_reduce_many([first, room], fuse_nbytes=16_000)
        total += rooms[0]
    return total / 40


def test_lists_that_begin_with_the_same_array_keep_their_rounding_errors(world_over_hosts):
    want = exact_sum([values_of(3000, rank) for rank in range(2)])
    for got in world_over_hosts(LAYOUTS["1+1"], SHMRING_WIRE_SLICE=TINY_SLICE)(alternate):
        assert np.abs(got - want).max() < 2**-11 * np.abs(want).max()


# ---- storage of the feedback -------------------------------------------------------------------------------


def test_residuals_are_of_a_place_a_dtype_and_a_length():
    residuals, x = Residuals(), np.zeros(1000, "f4")
    first = residuals.of(x, (x.ctypes.data, 11, 500), 512)
    first[:] = 1
    assert residuals.of(x[:500], (x.ctypes.data, 11, 500), 512) is first
    for place in ((x.ctypes.data, 11, 501), (x.ctypes.data, 9, 500), (x.ctypes.data + 4, 11, 500)):
        assert not residuals.of(x[1:], place, 512).any()


def test_what_is_kept_of_one_array_is_bounded_and_goes_with_it():
    residuals, x = Residuals(), np.zeros(1000, "f4")
    kept = [residuals.of(x, (x.ctypes.data, 11, count), count) for count in range(1, 1000)]
    assert residuals.of(x, (x.ctypes.data, 11, 999), 999) is kept[-1]
    total = sum(losses.nbytes for owner in residuals._kept.values() for losses in owner._residuals.values())
    assert 3 * x.nbytes < total <= 4 * x.nbytes
    del x
    gc.collect()
    assert not residuals._kept


def test_what_does_not_show_its_end_keeps_nothing():
    x = np.frombuffer(bytes(400), "f4")
    assert Residuals().of(x, (x.ctypes.data, 11, 100), 100) is None


def test_an_interrupted_destructor_leaves_no_errors_to_another_array():
    """The callback of a weak reference has raised, and the next array has the same identity."""
    residuals, one, other = Residuals(), np.ones(9, "f4"), np.ones(9, "f4")
    residuals.of(one, (1, 2, 3), 9)[:] = 7
    residuals._kept[id(other)] = residuals._kept.pop(id(one))
    assert not residuals.of(other, (1, 2, 3), 9).any()
