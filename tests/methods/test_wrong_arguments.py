"""A wrong argument of one rank is an error there, and Mismatch on the others at once."""

import numpy as np
import pytest
from ranks import raised

from shmring.methods.compression import FP16
from shmring.methods.precision import LossScaler
from shmring.methods.sharded import SGD, ShardedOptimizer
from shmring.methods.sparse import SparseAllReduce, all_reduce_pairs


def read_only(x):
    x.flags.writeable = False
    return x


def add_and_step(comm, stage, gradient):
    optimizer = ShardedOptimizer(comm, [np.zeros(8)], SGD(1.0), stage=stage)
    optimizer.add(gradient)
    optimizer.step()


def unscale(comm, gradient):
    LossScaler(comm).unscale([gradient])


def sum_of_pairs(comm, length):
    all_reduce_pairs(comm, np.array([1]), np.ones(1), length)


CASES = {  # call(comm, argument), a wrong argument, a right one, the error
    "no list": (lambda comm, xs: FP16().all_reduce_many(comm, xs), None, [np.ones(8, "f4")], "TypeError: "),
    "objects": (
        lambda comm, x: SparseAllReduce(comm)(x),
        np.array([None] * 500),
        np.ones(500),
        "TypeError: x is object; pass an array of numbers",
    ),
    "too long": (sum_of_pairs, 2**65, 5, "ValueError: length is 36893488147419103232; it must be 0 to"),
    "no number": (lambda comm, x: LossScaler(comm, scale=x), "x", 1.0, "ValueError: scale 'x', growth 2.0"),
    "list, stage 1": (lambda comm, x: add_and_step(comm, 1, x), [1.0] * 8, np.ones(8), "TypeError: a list"),
    "list, stage 2": (lambda comm, x: add_and_step(comm, 2, x), [1.0] * 8, np.ones(8), "TypeError: a list"),
    "masked": (lambda comm, x: add_and_step(comm, 1, x), np.ma.ones(8), np.ones(8), "TypeError: a masked"),
    "huge": (lambda comm, x: LossScaler(comm, scale=x), 10**400, 1.0, "OverflowError"),
    "read-only": (
        unscale,
        read_only(np.ones(3, "f4")),
        np.ones(3, "f4"),
        "ValueError: an array to",
    ),
    "integers": (unscale, np.ones(3, "i4"), np.ones(3, "f4"), "TypeError: gradients of int32 cannot"),
}


def give_wrong_on_one(comm, name):
    call, wrong, right, _ = CASES[name]
    return raised(call, comm, wrong if comm.rank == 1 else right)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_of_one_rank_is_a_mismatch_for_the_others(world_of, name):
    first, second, third = world_of(3).outcomes(give_wrong_on_one, name)
    assert second.startswith(CASES[name][-1])
    assert first.startswith("Mismatch")
    assert third.startswith("Mismatch")
