"""All-reduces by messages against NumPy, the bytes that they send, and their errors.

Hosts are names here, and the network is loopback: see conftest.world_over_hosts.
"""

import os
import signal

import numpy as np
import pytest
from combinations import first
from injections import Interrupt
from ranks import Died, Ranks, raised

import shmring
from shmring import model
from shmring._core import kernels
from shmring.methods import stepwise
from shmring.methods.stepwise import ALGORITHMS, Stepwise

CASES = (("sum", "int64"), ("avg", "float32"), ("max", "float64"), ("prod", "int32"), ("min", "float32"))
COUNTS = (0, 1, 5, 999, 4097)
NUMPY = {"sum": np.add, "avg": np.add, "max": np.maximum, "prod": np.multiply, "min": np.minimum}


def items_of(rank, dtype, count):
    return (np.random.default_rng(rank).standard_normal(count) * 10).astype(dtype)


def reduce_all(comm):
    with Stepwise(comm, chunk_nbytes=1024) as steps:
        for algorithm in ALGORITHMS:
            for op, dtype in CASES:
                for count in COUNTS:
                    x = items_of(comm.rank, dtype, count).reshape(1, count)
                    steps.all_reduce(x, op, algorithm=algorithm)
                    expected = NUMPY[op].reduce([items_of(r, dtype, count) for r in range(comm.size)])
                    if op == "avg":
                        expected = expected / comm.size
                    np.testing.assert_allclose(
                        x[0], expected, rtol=1e-5, atol=1e-5, err_msg=f"{algorithm} {op} {dtype} {count}"
                    )
                    everyones = comm.all_gather(x[0])
                    assert (everyones == everyones[0]).all(), (algorithm, op, count)


@pytest.mark.parametrize("size", first(4, [1, 2, 5, 8, 3, 4, 6, 7]))
def test_the_sums_are_numpys_and_everywhere_the_same(world_of, size):
    world_of(size)(reduce_all)


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1], [0, 1, 2, 2, 1]])
def test_over_hosts_too(world_over_hosts, nodes):
    world_over_hosts(nodes)(reduce_all)


class Counting:
    """A communicator that counts the bytes that it sends."""

    def __init__(self, comm):
        self._comm, self.sent = comm, 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, x, dest, tag):
        self.sent += x.nbytes
        return self._comm.isend(x, dest, tag)


def count_bytes(comm, count):
    found = []
    for algorithm in ALGORITHMS:
        with Stepwise(comm, chunk_nbytes=1024) as steps:
            counting = steps._comm = Counting(steps._comm)
            steps.all_reduce(np.ones(count, "f4"), algorithm=algorithm)
            found.append(counting.sent)
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_each_sends_the_bytes_of_its_formula(world_of, size):
    count = 5040 * 2
    power = 1 << (size.bit_length() - 1)
    for algorithm, sent in zip(ALGORITHMS, np.transpose(world_of(size)(count_bytes, count)), strict=True):
        all_of = 2 * (size - 1)
        if algorithm == "halving_doubling":
            all_of = 2 * (power - 1) + 2 * (size - power)
        assert sum(sent) == all_of * 4 * count, algorithm
        if "ring" in algorithm or (algorithm == "halving_doubling" and size == power):
            assert set(sent) == {2 * (size - 1) * 4 * count // size}, algorithm
        if algorithm in ("ring", "halving_doubling", "tree", "master") and size == power:
            assert max(sent) == model.ALGORITHMS[algorithm](4 * count, size).sent_nbytes, algorithm


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 17, 32])
def test_the_double_tree_is_that_of_the_engine(size):
    for parents, children in zip(stepwise._double(size), kernels.double_tree(size), strict=True):
        for rank in range(size):
            assert sorted(children[rank]) == [child for child in range(size) if parents[child] == rank]


# --- errors ---


def call(comm, x, op, algorithm):
    x = x[comm.rank]
    with Stepwise(comm) as steps:
        steps.all_reduce(x() if callable(x) else x, op[comm.rank], algorithm=algorithm)


def in_other_byte_order():
    """Return an array that a pickle would bring in this machine's order."""
    return np.zeros(5, np.dtype("f8").newbyteorder())


GOOD = np.zeros(5)


@pytest.mark.parametrize(
    ("x", "op", "algorithm", "error", "expected"),
    [
        ([0.0], "sum", "ring", TypeError, "x is list; pass a NumPy array"),
        (np.zeros(5, "f2"), "sum", "tree", TypeError, "x is float16"),
        (np.zeros((4, 3), order="F"), "sum", "master", ValueError, "not contiguous"),
        (in_other_byte_order, "sum", "ring", TypeError, "x is >f8"),
        (
            np.zeros(5, "i4"),
            "avg",
            "double_tree",
            ValueError,
            "no meaning for int32; give sum, prod",
        ),
    ],
)
def test_a_wrong_argument_ends_it_for_all(x, op, algorithm, error, expected):
    with Ranks(2) as ranks:
        wrong, other = ranks.meet().outcomes(call, [x, GOOD], [op, op], algorithm)
    assert isinstance(wrong, error), wrong
    assert expected in str(wrong)
    assert isinstance(other, shmring.Error), other


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("x", "op"),
    [([GOOD, np.zeros(6)], ["sum"] * 2), ([GOOD] * 2, ["sum", "max"])],
    ids=["other counts", "other ops"],
)
def test_calls_that_differ_are_reported(world_of, algorithm, x, op):
    outcomes = world_of(2).outcomes(call, x, op, algorithm)
    assert any("do not make the same call" in str(each) for each in outcomes), outcomes
    assert all(isinstance(each, shmring.Error) for each in outcomes), outcomes


def divide_interrupted(comm):
    """Interrupt rank 0's avg while it divides; return the error of the next call."""
    x = np.full(3, comm.rank + 1.0)
    with Stepwise(comm) as steps:
        if comm.rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(np, "divide", raise_interrupt)
                with pytest.raises(Interrupt):
                    steps.all_reduce(x, "avg", algorithm="ring")
        else:
            raised(steps.all_reduce, x, "avg", algorithm="ring")  # Aborted, unless it was done before
        return raised(steps.all_reduce, x, "avg", algorithm="ring")


def raise_interrupt(*_, **__):
    raise Interrupt


def test_an_interrupt_while_it_divides_ends_it_for_all(world_of):
    for error in world_of(2)(divide_interrupted):
        assert error.startswith("Aborted"), error


def go_on_until_one_dies(comm, algorithm, victim):
    with Stepwise(comm) as steps:
        for turn in range(1 << 30):
            if comm.rank == victim and turn == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            steps.all_reduce(np.zeros(9999), algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["ring", "double_tree"])
def test_a_killed_rank_is_named_on_all(algorithm):
    with Ranks(3, nodes=[0, 1, 1]) as ranks:
        outcomes = ranks.meet().outcomes(go_on_until_one_dies, algorithm, 1)
    assert isinstance(outcomes[1], Died)
    for rank in 0, 2:
        assert isinstance(outcomes[rank], shmring.RankFailed), outcomes
        assert outcomes[rank].rank == 1, outcomes
