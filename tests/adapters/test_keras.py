"""shmring.adapters.keras against NumPy: gradients in tf.function and out of it, model.fit, errors, example.

Ranks import TensorFlow, this process does not: it forks.
"""

import functools
import re
import sys

import numpy as np
import pytest
from engines import EXAMPLES, needs, output_of, start

import shmring
from shmring.adapters import keras as adapter

pytestmark = [needs("tensorflow", "keras"), pytest.mark.limit(240)]

SLOW_S = 60  # TensorFlow is imported within a call
SHAPES = {"float32": (3, 4), "float64": (), "bfloat16": (70_001,), "float16": (0, 2)}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


def items_of(rank, dtype, shape):
    import ml_dtypes  # noqa: F401  (gives NumPy its names)

    return np.array(np.random.default_rng(rank).integers(0, 9, shape)).astype(dtype)


def reduce_gradients(comm, op):
    import tensorflow as tf

    given = [items_of(comm.rank, dtype, shape) for dtype, shape in SHAPES.items()]
    tensors = [None, *map(tf.constant, given)]
    turns = tf.function(lambda tensors: adapter.all_reduce_grads(tensors, comm, op))
    found = [turns(tensors), turns(tensors), adapter.all_reduce_grads(tensors, comm, op)]
    alone = adapter.all_reduce_grads(tensors[1:2], comm, op)
    for x in given:
        comm.all_reduce(x, op)
    assert alone[0].numpy().tobytes() == given[0].tobytes()
    for none, *results in found:
        assert none is None
        assert [(r.dtype.name, r.numpy().tobytes()) for r in results] == [
            (x.dtype.name, x.tobytes()) for x in given
        ]
        assert [r.shape for r in results] == [x.shape for x in given]
    assert adapter.all_reduce_grads([None], comm) == [None]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_gradients_have_the_bits_of_all_reduce(world_of, size, op):
    world_of(size, timeout_s=SLOW_S)(reduce_gradients, op)


def reduce_slices(comm):
    import tensorflow as tf

    def slices(rank):
        """rank + 1 rows of an embedding of 5."""
        rows = np.arange(rank, 2 * rank + 1)
        return tf.IndexedSlices(tf.fill((rank + 1, 2), rank + 1.0), tf.constant(rows), tf.constant([5, 2]))

    whole = sum(tf.convert_to_tensor(slices(rank)) for rank in range(comm.size)).numpy()
    for op, expected in ("sum", whole), ("avg", whole / comm.size):
        for as_dense in False, True:
            call = functools.partial(adapter.all_reduce_grads, comm=comm, op=op, sparse_as_dense=as_dense)
            for (found,) in call([slices(comm.rank)]), tf.function(call)([slices(comm.rank)]):
                assert isinstance(found, tf.IndexedSlices) != as_dense
                assert np.allclose(tf.convert_to_tensor(found), expected)
    with pytest.raises(ValueError, match="IndexedSlices have no 'max'"):
        adapter.all_reduce_grads([slices(0)], comm, "max")


def test_sparse_gradients_are_gathered_or_made_dense(world_of):
    world_of(3, timeout_s=SLOW_S)(reduce_slices)


def fit(comm, samples):
    """Weights, and the losses of each epoch; ranks begin with weights of their own."""
    import keras

    keras.utils.set_random_seed(comm.rank)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(adapter.DistributedOptimizer(keras.optimizers.Adam(0.01), comm), loss="mse")
    x = np.random.default_rng(3).random((samples, 4)).astype("f4")
    mine = x[comm.rank :: comm.size]
    callbacks = [adapter.broadcast_at_start(comm), adapter.average_metrics(comm)]
    how = {"batch_size": 16 // comm.size, "epochs": 3, "shuffle": False, "verbose": 0}
    history = model.fit(mine, mine.sum(1), callbacks=callbacks, **how)
    return model, history.history["loss"]


def fit_and_save(comm, folder):
    import keras

    model, losses = fit(comm, 64)
    if comm.rank == 0:
        model.save(folder / "model.keras")
        loaded = keras.models.load_model(folder / "model.keras").optimizer
        assert (type(loaded), int(loaded.iterations)) == (keras.optimizers.Adam, 12)
    return [leaf.tobytes() for leaf in model.get_weights()], losses


def test_fit_trains_what_one_rank_would(world_of, tmp_path):
    _, alone = world_of(1, timeout_s=SLOW_S)(fit_and_save, tmp_path)[0]
    together = world_of(2, timeout_s=SLOW_S)(fit_and_save, tmp_path)
    assert together[0] == together[1]
    assert np.allclose(together[0][1], alone, rtol=1e-4)


def scale_losses(comm):
    """One rank's gradient is infinite: all skip the step, and halve the scale."""
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer = adapter.DistributedOptimizer(optimizer, comm)
    weights = keras.Variable(np.ones(2, "f4"))
    optimizer.build([weights])
    step = tf.function(lambda gradient: optimizer.apply([gradient], [weights]))
    step(tf.fill([2], np.inf if comm.rank == 1 else 4.0))
    assert (weights.numpy() == 1).all()
    assert float(optimizer.dynamic_scale) == 2
    step(tf.fill([2], 2.0))
    assert (weights.numpy() == 0).all()


def test_ranks_agree_on_a_step_that_is_skipped(world_of):
    world_of(2, timeout_s=SLOW_S)(scale_losses)


def differ(comm):
    import keras
    import tensorflow as tf

    used = keras.optimizers.SGD()
    used.build([keras.Variable(1.0)])
    with pytest.raises(ValueError, match="used already"):
        adapter.DistributedOptimizer(used, comm)
    with pytest.raises(tf.errors.UnknownError, match="Mismatch"):
        tf.function(lambda x: adapter.all_reduce_grads([x], comm))(tf.zeros(comm.rank + 1))
    with pytest.raises(shmring.Mismatch):
        comm.barrier()


def test_errors_are_reported(world_of):
    world_of(2, timeout_s=SLOW_S)(differ)


def give_a_wrong_op(comm, sparse):
    import tensorflow as tf

    gradient = tf.ones(4)
    if sparse:
        gradient = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([5, 2]))
    wrong = "max" if sparse else "median"
    if comm.rank:
        with pytest.raises(ValueError, match=wrong):
            adapter.all_reduce_grads([gradient], comm, wrong)
        return
    with pytest.raises((shmring.Mismatch, tf.errors.UnknownError), match=r"refused|Mismatch"):
        adapter.all_reduce_grads([gradient], comm)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_wrong_op_of_one_rank_is_a_mismatch_elsewhere(world_of, sparse):
    world_of(2, timeout_s=SLOW_S)(give_a_wrong_op, sparse)


# --- the example ---

EXAMPLE, FEW = EXAMPLES / "keras_digits.py", ("--epochs", 2)


@pytest.fixture(scope="module")
def alone():
    return losses_of(sys.executable, EXAMPLE, *FEW)


def losses_of(*command):
    text = output_of(start(*command))
    assert "the same weights on all ranks: yes" in text, text
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+)", text, re.M)]


@pytest.mark.parametrize("size", [2, 4])
def test_the_example_trains_what_one_rank_would(alone, size):
    assert len(alone) == 2
    together = losses_of(sys.executable, "-m", "shmring.run", "--no-prefix", "-n", size, EXAMPLE, *FEW)
    assert np.allclose(together, alone, rtol=1e-4)
