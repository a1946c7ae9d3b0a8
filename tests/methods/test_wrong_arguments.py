"""A wrong argument of one rank is an error there, and Mismatch on the others at once.

Integers of NumPy are right ones.
"""

import numpy as np
import pytest
from ranks import raised

from shmring.methods.compression import FP16, PowerSGD, TopK
from shmring.methods.local import GradientAccumulation
from shmring.methods.pipeline import Pipeline
from shmring.methods.precision import LossScaler
from shmring.methods.reducers import ReductionServers
from shmring.methods.sharded import SGD, ShardedOptimizer
from shmring.methods.sparse import SparseAllReduce, all_reduce_pairs
from shmring.methods.stepwise import Stepwise


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


def sum_pairs_or_all(comm, number):
    x = np.arange(100.0)
    return all_reduce_pairs(comm, np.arange(100), x, number(100), dense_above=1)[1]


class Unreadable:
    """A list of arrays whose file is gone."""

    def __iter__(self):
        raise OSError("no such file")


CASES = {  # call(comm, argument), a wrong argument, a right one, the error
    "no list": (lambda comm, xs: FP16().all_reduce_many(comm, xs), None, [np.ones(8, "f4")], "TypeError: "),
    "unreadable": (
        lambda comm, xs: FP16().all_reduce_many(comm, xs),
        Unreadable(),
        [np.ones(8, "f4")],
        "OSError: no such file",
    ),
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
    "share": (
        lambda comm, share: all_reduce_pairs(comm, np.array([1]), np.ones(1), 5, dense_above=share),
        10**400,
        0.5,
        "OverflowError",
    ),
    "read-only": (
        unscale,
        read_only(np.ones(3, "f4")),
        np.ones(3, "f4"),
        "ValueError: an array to",
    ),
    "pairs of a float": (sum_of_pairs, 5.0, 5, "TypeError: length is 5.0; it must be an integer"),
    "bytes of a float": (
        lambda comm, number: Stepwise(comm, chunk_nbytes=number),
        64.0,
        64,
        "TypeError: chunk_nbytes is 64.0; it must be an integer",
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


# ---- integers of NumPy ------------------------------------------------------------------------------------


def sum_sparse(comm, number):
    x = np.arange(1000.0)
    SparseAllReduce(comm, block=number(100))(x)
    return x


def sum_of_factors(comm, number):
    x = np.ones((200, 200), "f4")
    PowerSGD(number(2)).all_reduce(comm, x)
    return x


def sum_all_of_top_k(comm, number):
    x = np.arange(1000, dtype="f4")
    TopK(number(1)).all_reduce(comm, x)
    return x


def step_in_buckets(comm, number):
    optimizer = ShardedOptimizer(comm, [np.zeros(1000)], SGD(1.0), stage=2, bucket_nbytes=number(64))
    optimizer.add(np.ones(1000))
    optimizer.step()
    return optimizer.params[0]


def accumulate(comm, number):
    sums = GradientAccumulation(comm, [np.zeros(1)], every=number(100))
    for _ in range(300):
        sums.add([np.ones(1)])
    return np.array(sums.synchronisations)


def sum_by_servers(comm, number):
    x = np.arange(3000.0)
    with ReductionServers(comm, [1], chunk_nbytes=number(64), depth=number(100)) as servers:
        if servers.is_reducer:
            return np.array(servers.serve())
        servers.all_reduce(x)
    return x


def sum_in_steps(comm, number):
    x = np.arange(3000.0)
    with Stepwise(comm, chunk_nbytes=number(64)) as stepwise:
        stepwise.all_reduce(x, algorithm="tree")
    return x


def learn(comm, number):
    def forward(weights, x):
        return x * weights[0], x

    def backward(weights, x, gradient):
        return gradient * weights[0], [x * gradient]

    receives = None if comm.rank == 0 else ((1,), "f8")
    how = {"micro_batches": number(100), "receives": receives}
    stages = Pipeline(comm, forward, backward, [np.ones(1)], SGD(1e-3), **how)
    stages.run(number(3), inputs=lambda _: np.ones(1), loss_gradient=lambda _, y: y)
    return stages.weights[0]


@pytest.mark.parametrize(
    "call",
    [
        sum_sparse,
        sum_pairs_or_all,
        sum_of_factors,
        sum_all_of_top_k,
        step_in_buckets,
        accumulate,
        sum_by_servers,
        sum_in_steps,
        learn,
    ],
)
def test_integers_of_numpy_are_as_those_of_python(world_of, call):
    """Arithmetic with an int8 would overflow at 128, with an int32 at 2**31."""
    ranks = world_of(2)
    for narrow, plain in zip(ranks(call, np.int8), ranks(call, int), strict=True):
        np.testing.assert_array_equal(narrow, plain)
