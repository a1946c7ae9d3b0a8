"""Bucketer: every array is reduced once, in the same buckets on all ranks, whatever their timing."""

import time

import numpy as np
import pytest

import shmring
from shmring.methods.compression import FP16


def backward(comm, nbytes, delay_s, pause_s):
    """Some training steps: gradients of different lengths, last layer first, at each rank's own pace."""
    lengths = [7, 300, 1, 5000, 64, 64, 20_000]
    bucketer = shmring.Bucketer(comm, nbytes=nbytes, delay_s=delay_s)
    right, calls = [], []
    for step in range(4):
        gradients = [np.full(n, comm.rank + step, "f4") for n in lengths]
        begin = comm.stats()["calls"]
        for gradient in reversed(gradients):
            time.sleep(pause_s * comm.rank)
            bucketer.add(gradient)
        bucketer.wait()
        calls.append(comm.stats()["calls"] - begin)
        mean = step + (comm.size - 1) / 2
        right.append(all((gradient == mean).all() for gradient in gradients))
    return right, calls


@pytest.mark.parametrize(
    ("nbytes", "delay_s"), [(1, None), (3000, None), (1 << 20, None), (1 << 20, 0.001), (1 << 20, 1e-9)]
)
@pytest.mark.parametrize("size", [1, 3])
def test_every_gradient_is_reduced_once(world_of, size, nbytes, delay_s):
    results = world_of(size)(backward, nbytes, delay_s, 0.0003)
    for right, calls in results:
        assert all(right)
        assert calls == results[0][1], "the ranks filled other buckets"


def test_large_buckets_take_few_calls_and_small_ones_many(world_of):
    _, few = world_of(2)(backward, 1 << 20, None, 0)[0]
    _, many = world_of(2)(backward, 1, None, 0)[0]
    assert few == [3] * 4  # the small ones together, the two large ones
    assert many == [7] * 4


def paced(comm, pause_s):
    """Return the bytes of the agreed buckets if rank 0 adds an array every pause_s."""
    bucketer = shmring.Bucketer(comm, nbytes=1 << 20, delay_s=0.05, op="sum")
    sizes = []
    for _ in range(40):
        if comm.rank == 0:
            time.sleep(pause_s)
        bucketer.add(np.ones(1 << 13))
        sizes.append(bucketer._full_nbytes)
    bucketer.wait()
    return sizes


def test_the_pace_of_rank_0_sets_the_size_for_all(world_of):
    first, second = world_of(2)(paced, 0.02)
    assert first == second
    assert first[0] == 1 << 20
    assert first[-1] < 1 << 19  # two or three arrays of 64 KiB are added within 50 ms


def nothing_to_do(comm):
    bucketer = shmring.Bucketer(comm, op="max")
    bucketer.flush()
    bucketer.wait()
    x = np.array(comm.rank)
    bucketer.add(x)
    assert x == comm.rank
    bucketer.flush()
    bucketer.wait()
    assert x == comm.size - 1
    bucketer.wait()
    return comm.stats()["calls"]


def test_an_empty_bucket_calls_nothing(world_of):
    assert world_of(2)(nothing_to_do) == [1, 1]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"nbytes": 0}, ValueError),
        ({"delay_s": 0}, ValueError),
        ({"delay_s": float("nan")}, ValueError),
        ({"delay_s": True}, TypeError),
        ({"op": "mean"}, ValueError),
    ],
)
def test_meaningless_requests_are_refused(wrong, error):
    with pytest.raises(error, match=next(iter(wrong))):
        shmring.Bucketer(None, **wrong)


@pytest.mark.parametrize("compressor", [FP16, "fp16"])
def test_a_compressor_is_made_before(compressor):
    with pytest.raises(TypeError, match=r"compressor=FP16\(\)"):
        shmring.Bucketer(None, compressor=compressor)
