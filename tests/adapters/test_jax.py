"""shmring.adapters.jax against NumPy: in jit and out of it, gradients, errors; the example.

Ranks import jax, this process does not: it forks.
"""

import re
import signal
import sys

import ml_dtypes
import numpy as np
import pytest
from engines import EXAMPLES, needs, output_of, start

import shmring
from shmring.adapters import jax as adapter

pytestmark = [needs("jax"), pytest.mark.limit(240)]

SLOW_S = 60  # jax is imported and compiles within a call
N = 3
DTYPES = ("float32", "int32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool")


def items_of(rank, dtype, shape=(4, 5)):
    import ml_dtypes  # noqa: F401  (gives NumPy its names)

    return np.random.default_rng(rank).integers(0, 4, shape).astype(dtype)


def bits(array):
    return np.asarray(array).tobytes()


def by(way):
    """Let this rank's adapter make its calls as it does ("XLA"), or as with old versions ("callbacks")."""
    from shmring.adapters._jax import callback, xla

    adapter._way = {"XLA": lambda: xla, "callbacks": lambda: callback}[way]
    assert adapter.calls_through() == way


WAYS = pytest.mark.parametrize("way", ["XLA", "callbacks"])


# --- the results ---


def reduce_every_dtype(comm, op, way):
    import jax

    by(way)
    dtypes = [name for name in DTYPES if op != "avg" or name not in ("int32", "bool")]
    tree = {name: items_of(comm.rank, name) for name in dtypes}
    there = jax.jit(lambda tree: adapter.all_reduce(tree, comm, op))(tree)
    here = adapter.all_reduce(tree, comm, op)
    one = {name: adapter.jit(lambda x: adapter.all_reduce(x, comm, op))(tree[name]) for name in dtypes}
    for name, array in tree.items():
        comm.all_reduce(array, op)
        assert (there[name].dtype, there[name].shape) == (array.dtype, array.shape)
        assert bits(there[name]) == bits(here[name]) == bits(one[name]) == bits(array), name


@WAYS
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_reduce_has_the_bits_of_the_communicators(world_of, op, way):
    world_of(N, timeout_s=SLOW_S)(reduce_every_dtype, op, way)


def reduce_odd_trees(comm, way):
    import jax
    import jax.numpy as jnp

    by(way)
    tree = [jnp.float32(comm.rank), (np.ones((0, 3), "f4"), {"a": 2}), np.full(70_001, comm.rank + 1, "f4")]
    number, (empty, two), large = jax.jit(lambda tree: adapter.all_reduce(tree, comm, "max"))(tree)
    assert (number.shape, empty.shape) == ((), (0, 3))
    assert (number, two["a"]) == (comm.size - 1, 2)
    assert (large == comm.size).all()
    assert adapter.all_reduce({}, comm) == {}


@WAYS
@pytest.mark.parametrize("size", [1, 2])
def test_all_reduce_takes_any_tree(world_of, size, way):
    world_of(size, timeout_s=SLOW_S)(reduce_odd_trees, way)


def reduce_by_the_communicator(comm):
    import jax.numpy as jnp

    for dtype in ("float32", "bfloat16"):
        x = jnp.ones(3, dtype)
        with pytest.raises(ValueError, match="read-only"):
            comm.all_reduce(x)
        out = np.empty(3, x.dtype)
        comm.all_reduce(x, out=out)
        assert (out == comm.size).all()
        assert (x == 1).all()


def test_the_communicator_does_not_write_to_arrays_of_jax(world_of):
    world_of(2, timeout_s=SLOW_S)(reduce_by_the_communicator)


def move_and_scatter(comm, way):
    import jax

    by(way)
    x = items_of(comm.rank, "float32", (comm.size, 2))
    every = np.stack([items_of(rank, "float32", x.shape) for rank in range(comm.size)])

    @jax.jit
    def calls(x, rows):
        return (
            adapter.broadcast([x], comm, root=comm.size - 1)[0],
            adapter.all_gather(x, comm),
            adapter.reduce_scatter(x, comm),
            adapter.reduce_scatter(rows, comm, "max"),
        )

    sent, gathered, part, rows = calls(x, np.repeat(x, 2, axis=0))
    assert bits(sent) == bits(every[-1])
    assert bits(gathered) == bits(every)
    assert part.shape == (2,)
    assert bits(part) == bits(every.sum(0)[comm.rank])
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    assert bits(rows) == bits(np.repeat(every, 2, axis=1).max(0)[mine])


@WAYS
def test_broadcast_all_gather_and_reduce_scatter(world_of, way):
    world_of(N, timeout_s=SLOW_S)(move_and_scatter, way)


def keep_the_order(comm, way):
    """Independent collectives, in a loop too."""
    import jax
    import jax.numpy as jnp

    by(way)

    @jax.jit
    def many(x):
        def step(carry, number):
            return adapter.all_reduce(carry, comm, "avg") + number, adapter.all_reduce(number, comm)

        last, sums = jax.lax.scan(step, x, jnp.arange(5.0))
        return [adapter.all_reduce(x[:n] * n, comm) for n in range(1, 9)], last, sums

    found = [many(jnp.full(9, comm.rank + turn, "f4")) for turn in range(5)]  # kept: none shares memory
    ranks = sum(range(comm.size))
    for turn, (several, last, sums) in enumerate(found):
        for n, array in enumerate(several, 1):
            assert (array == n * (ranks + comm.size * turn)).all()
        assert np.allclose(last, ranks / comm.size + turn + 10)
        assert (sums == comm.size * np.arange(5)).all()


@WAYS
def test_collectives_keep_the_programs_order_and_their_results(world_of, way):
    world_of(N, timeout_s=SLOW_S)(keep_the_order, way)


def wait_for_other_work_on_each_rank(comm, way):
    """Make three calls whose results are ready first on one rank and last on another."""
    import jax
    import jax.numpy as jnp

    by(way)

    def late(x, rounds):
        square = jnp.full((200, 200), 1e-3)
        return jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ y), square).sum() + x

    @jax.jit
    def three_calls(x):
        given = [late(x, 20 * ((comm.rank + n) % 3)) for n in range(3)]
        return [adapter.all_reduce(jnp.full(n + 1, given[n]), comm, "max") for n in range(3)]

    for array in three_calls(jnp.float32(1)):
        assert (array >= 1).all()


@WAYS
def test_ranks_that_have_other_work_before_keep_the_order(world_of, way):
    world_of(N, timeout_s=SLOW_S)(wait_for_other_work_on_each_rank, way)


# --- gradients ---


def differentiate(comm, way):
    """Take gradients; each rank's loss is the product of its own weights and its input, so the weights are
    the cotangents."""
    import jax

    by(way)
    size, rank = comm.size, comm.rank
    rng = np.random.default_rng(5)

    def gradient(call, x_shape, y_shape, dtype="f4"):
        """Return the gradient of this rank's x, and the weights by rank."""
        weights = rng.integers(0, 9, (size, *y_shape)).astype("f4")
        loss = lambda x: (call(x) * weights[rank]).sum()  # noqa: E731
        return np.asarray(jax.jit(jax.grad(loss))(np.ones(x_shape, dtype))), weights

    for dtype in "float32", "float16", ml_dtypes.bfloat16:
        found, weights = gradient(lambda x: adapter.all_reduce(x, comm), (4,), (4,), dtype)
        assert found.dtype == dtype
        assert bits(found.astype("f4")) == bits(weights.sum(0))
    found, weights = gradient(lambda x: adapter.all_reduce(x, comm, "avg"), (4,), (4,))
    assert np.allclose(found, weights.mean(0))
    found, weights = gradient(lambda x: adapter.broadcast(x, comm, 1), (4,), (4,))
    assert bits(found) == bits(weights.sum(0) * (rank == 1))
    found, weights = gradient(lambda x: adapter.all_gather(x, comm), (4,), (size, 4))
    assert bits(found) == bits(weights.sum(0)[rank])
    found, _ = gradient(lambda x: adapter.broadcast(x, comm, 1) * np.float32(np.inf), (4,), (4,))
    assert rank == 1 or bits(found) == bits(np.zeros(4, "f4"))  # however large the sum
    for rows in size, 2 * size:
        part = (4,) if rows == size else (2, 4)
        found, weights = gradient(lambda x: adapter.reduce_scatter(x, comm), (rows, 4), part)
        assert bits(found) == bits(weights.reshape(rows, 4))
        found, weights = gradient(lambda x: adapter.reduce_scatter(x, comm, "avg"), (rows, 4), part)
        assert np.allclose(found, weights.reshape(rows, 4) / size)
        found, weights = gradient(lambda x: adapter.all_to_all(x, comm), (rows, 4), (rows, 4))
        assert bits(found) == bits(weights.reshape(size, size, -1, 4)[:, rank].reshape(rows, 4))


@WAYS
def test_gradients_are_those_of_the_sum_of_all_losses(world_of, way):
    world_of(N, timeout_s=SLOW_S)(differentiate, way)


def differentiate_beside_whole_numbers(comm, way):
    import jax
    import jax.numpy as jnp

    by(way)

    def loss(x):
        found = adapter.all_reduce({"x": x, "count": jnp.int32(2)}, comm)
        return found["x"] ** 2 / found["count"]

    assert jax.jit(jax.grad(loss))(1.0) == comm.size  # x = size, count = 2 size: each 1, and all are summed
    with pytest.raises(TypeError, match=r"all_reduce with op='max' has no gradient"):
        jax.grad(lambda x: adapter.all_reduce(x, comm, "max"))(1.0)


@WAYS
def test_whole_numbers_and_other_ops_have_no_gradient(world_of, way):
    world_of(2, timeout_s=SLOW_S)(differentiate_beside_whole_numbers, way)


# --- errors ---


def refuse(comm):
    by("XLA")
    with pytest.raises(ValueError, match="sub"):
        adapter.all_reduce(1.0, comm, "sub")
    with pytest.raises(ValueError, match="there are ranks 0 to 1"):
        adapter.broadcast(1.0, comm, 2)
    with pytest.raises(ValueError, match=r"shape \(3,\) has no dimension 0 that 2 ranks"):
        adapter.reduce_scatter(np.zeros(3), comm)


def test_wrong_arguments_are_refused_when_traced(world_of):
    world_of(2, timeout_s=SLOW_S)(refuse)


def differ(comm, way):
    import jax

    by(way)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatch"):
        jax.block_until_ready(jax.jit(lambda x: adapter.all_reduce(x, comm))(np.zeros(comm.rank + 1, "f4")))


@WAYS
def test_ranks_that_call_different_things_are_reported(world_of, way):
    world_of(2, timeout_s=SLOW_S)(differ, way)


WRONG = {
    "op": lambda comm: adapter.all_reduce(np.ones(4, "f4"), comm, "nonsense" if comm.rank else "sum"),
    "root": lambda comm: adapter.broadcast(np.ones(4, "f4"), comm, 2 if comm.rank else 0),
    "shape": lambda comm: adapter.reduce_scatter(np.ones(3 if comm.rank else 4, "f4"), comm),
    "a large int": lambda comm: adapter.all_reduce(2**40 if comm.rank else 1, comm),
    "no array": lambda comm: adapter.all_gather("text" if comm.rank else np.ones(4, "f4"), comm),
}


def give_wrong_arguments(comm, name):
    by("XLA")
    with pytest.raises((TypeError, ValueError, OverflowError) if comm.rank else shmring.Mismatch):
        WRONG[name](comm)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_of_one_rank_is_a_mismatch_elsewhere(world_of, name):
    world_of(2, timeout_s=SLOW_S)(give_wrong_arguments, name)


def go_on_without_one(comm):
    import os

    import jax

    reduce = jax.jit(lambda x: adapter.all_reduce(x, comm))
    jax.block_until_ready(reduce(np.zeros(5, "f4")))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RankFailed.*rank 1"):
        jax.block_until_ready(reduce(np.zeros(5, "f4")))
    with pytest.raises(shmring.RankFailed):
        comm.barrier()


def test_a_killed_rank_is_named(three):
    outcomes = three.meet(timeout_s=SLOW_S).outcomes(go_on_without_one)
    assert [outcomes[0], outcomes[2]] == [None, None], outcomes


# --- the example ---


@pytest.fixture(scope="module")
def alone():
    return losses_of(sys.executable, EXAMPLE, *FEW)


EXAMPLE, FEW = EXAMPLES / "jax_digits.py", ("--epochs", 2)


def losses_of(*command):
    text = output_of(start(*command))
    assert "the same weights on all ranks: yes" in text, text
    assert float(re.search(r"from NumPy: (\S+) of a loss", text)[1]) < 1e-5, text
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+)", text, re.M)]


@pytest.mark.parametrize("size", [2, 4])
def test_the_example_trains_what_one_rank_would(alone, size):
    assert len(alone) == 2
    together = losses_of(sys.executable, "-m", "shmring.run", "--no-prefix", "-n", size, EXAMPLE, *FEW)
    assert np.allclose(together, alone, rtol=1e-4)
