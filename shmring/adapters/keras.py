"""Data-parallel Keras on TensorFlow: reduce gradients inside `tf.function` and in `model.fit`.

A collective is a `tf.numpy_function`. It has side effects, so TensorFlow runs it in the program's order. XLA
cannot compile it: leave `jit_compile` off, the default on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

import shmring

from .._arguments import refusing
from .._config.optional_deps import need

__all__ = [
    "DistributedOptimizer",
    "all_reduce_grads",
    "average_metrics",
    "broadcast_at_start",
    "broadcast_variables",
]


def all_reduce_grads(
    gradients: Iterable[Any],
    comm: shmring.Comm,
    op: shmring.Op | str = "avg",
    *,
    sparse_as_dense: bool = False,
) -> list[Any]:
    """Combine the gradients of `tape.gradient` elementwise over all ranks; return them for the optimizer.

    Works inside `tf.function` and eagerly. The result is not differentiable.

    Parameters
    ----------
    gradients : iterable of tensor
        Their shapes and dtypes are the same on all ranks. One `Comm.all_reduce_many` reduces them; None stays
        None. An IndexedSlices, the gradient of an embedding, stays one: it has the slices of all ranks, one
        after another (op: sum or avg). This sends less if few rows are used.
    comm : Comm
        The communicator.
    op : str or Op
        As in `Comm.all_reduce`.
    sparse_as_dense : bool
        True: turn an IndexedSlices into a tensor.

    Returns
    -------
    list of tensor
        In the order of `gradients`.

    Raises
    ------
    ValueError
        For an op that IndexedSlices do not support, and for slices that cannot be made dense.
    Error
        As `Comm.all_reduce_many`. Inside `tf.function`: TensorFlow errors with shmring's text.

    Examples
    --------
    ::

        from shmring.adapters import keras as shmring_keras

        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(shmring_keras.all_reduce_grads(gradients, comm), model.trainable_variables)
    """
    as_it_is = _tensorflow().autograph.experimental.do_not_convert(_all_reduce_grads)
    return list(as_it_is(gradients, comm, _op_of(comm, op), sparse_as_dense))


def broadcast_variables(variables: Iterable[Any], comm: shmring.Comm, root: int = 0) -> None:
    """Set every Keras or TensorFlow variable to root's value. Collective, eager.

    Parameters
    ----------
    variables : iterable of variable
        Their shapes and dtypes are the same on all ranks.
    comm : Comm
        The communicator.
    root : int
        The rank that sends.

    Raises
    ------
    Error
        As `Comm.broadcast`.

    Examples
    --------
    ::

        from shmring.adapters import keras as shmring_keras

        shmring_keras.broadcast_variables(model.weights, comm)
    """
    comm.run_steps(_broadcast_variables, variables, comm, root)


def _broadcast_variables(variables: Iterable[Any], comm: shmring.Comm, root: int) -> None:
    for variable in variables:
        value = np.array(variable.numpy())
        comm.broadcast(value, root)
        variable.assign(value)


def DistributedOptimizer(  # the name in Horovod
    optimizer: Any, comm: shmring.Comm, op: shmring.Op | str = "avg", *, sparse_as_dense: bool = False
) -> Any:
    """Return an optimizer of the same class and settings that applies the gradients of all ranks.

    Use it in `model.compile` and in manual steps. Each `apply` calls `all_reduce_grads` with these arguments,
    then the class's own `apply`. All ranks must make the same number of steps. A saved model names the
    original class, so it loads without shmring.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        One that has not been built.
    comm, op, sparse_as_dense
        As in `all_reduce_grads`.

    Returns
    -------
    keras.optimizers.Optimizer
        The new optimizer.

    Raises
    ------
    ValueError
        For an optimizer that has been built, a wrong op, or another backend of Keras.

    Examples
    --------
    ::

        from shmring.adapters import keras as shmring_keras

        model.compile(shmring_keras.DistributedOptimizer(keras.optimizers.Adam(), comm), loss="mse")
    """
    keras = need("keras", "keras", __name__)
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"Keras runs on {keras.backend.backend()}; this needs KERAS_BACKEND=tensorflow")
    if optimizer.built:
        raise ValueError("the optimizer was used already, and its state would be lost: give a new one")
    made = _distributed(optimizer.__class__).from_config(optimizer.get_config())
    made.reduce_gradients = functools.partial(
        all_reduce_grads, comm=comm, op=_op_of(comm, op), sparse_as_dense=sparse_as_dense
    )
    return made


def broadcast_at_start(comm: shmring.Comm, root: int = 0) -> Any:
    """Return a callback for `model.fit` that broadcasts root's weights and optimizer state at the start.

    Parameters
    ----------
    comm : Comm
        The communicator.
    root : int
        The rank that sends.

    Returns
    -------
    keras.callbacks.Callback
        The callback.

    Examples
    --------
    See `average_metrics`.
    """

    def broadcast(_: dict[str, Any] | None) -> None:
        model = callback.model
        broadcast_variables([*model.weights, *model.optimizer.variables], comm, root)

    callback = need("keras", "keras", __name__).callbacks.LambdaCallback(on_train_begin=broadcast)
    return callback


def average_metrics(comm: shmring.Comm) -> Any:
    """Return a callback for `model.fit` that averages an epoch's losses and metrics over the ranks.

    All ranks have equal weight, so give all of them the same number of samples. Each metric is one number.
    List the callback before callbacks that read the metrics (EarlyStopping, ReduceLROnPlateau), so that these
    act alike on every rank.

    Parameters
    ----------
    comm : Comm
        The communicator.

    Returns
    -------
    keras.callbacks.Callback
        The callback.

    Examples
    --------
    ::

        from shmring.adapters import keras as shmring_keras

        callbacks = [shmring_keras.broadcast_at_start(comm), shmring_keras.average_metrics(comm)]
        model.fit(x, y, callbacks=callbacks)
    """

    def average(_: int, logs: dict[str, Any]) -> None:
        names = sorted(logs)
        with refusing(comm, "all_reduce"):
            values = np.array([float(logs[name]) for name in names])
        comm.all_reduce(values, "avg")
        logs.update(zip(names, values.tolist(), strict=True))

    return need("keras", "keras", __name__).callbacks.LambdaCallback(on_epoch_end=average)


def _distributed(base: Any) -> Any:
    """Return a subclass of the optimizer's class with another `apply`."""

    def apply(self: Any, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        base.apply(self, self.reduce_gradients(grads), trainable_variables)

    return type(base.__name__, (base,), {"apply": apply, "__module__": base.__module__})


@functools.cache  # AutoGraph does not convert a cached function
def _tensorflow() -> Any:
    return need("tensorflow", "keras", __name__)


def _op_of(comm: shmring.Comm, op: shmring.Op | str) -> shmring.Op:
    """Return the op. A wrong op raises ValueError on this rank and Mismatch on the others."""
    try:  # not `refusing`: AutoGraph may convert this function
        return shmring.Op(op)
    except ValueError:
        comm.refuse("all_reduce")
        raise


def _all_reduce_grads(
    gradients: Iterable[Any], comm: shmring.Comm, op: shmring.Op, sparse_as_dense: bool
) -> list[Any]:
    tf = _tensorflow()
    with refusing(comm, "all_reduce"):
        found = list(gradients)
        if sparse_as_dense:  # an error if the slices do not know the shape of the tensor
            found = [each if each is None else tf.convert_to_tensor(each) for each in found]
        sparse = [number for number, each in enumerate(found) if isinstance(each, tf.IndexedSlices)]
        if sparse and op not in (shmring.Op.SUM, shmring.Op.AVG):
            raise ValueError(f"IndexedSlices have no {op.value!r}; take sum or avg, or sparse_as_dense=True")
    dense = [number for number, each in enumerate(found) if each is not None and number not in sparse]
    for number, reduced in zip(dense, _all_reduce([found[n] for n in dense], comm, op), strict=True):
        found[number] = reduced
    for number in sparse:
        found[number] = _gather(found[number], comm, op)
    return found


def _all_reduce(tensors: list[Any], comm: shmring.Comm, op: shmring.Op) -> list[Any]:
    if not tensors:
        return []

    def reduce(*arrays: Any) -> list[np.ndarray[Any, Any]]:
        outs = [np.empty_like(array) for array in arrays]  # new arrays: TensorFlow may keep references
        comm.all_reduce_many(arrays, op, out=outs)
        return outs

    return _call(reduce, tensors, [tensor.shape for tensor in tensors])


def _gather(slices: Any, comm: shmring.Comm, op: shmring.Op) -> Any:
    """Return the concatenated slices of all ranks."""
    tf = _tensorflow()

    def gather(values: Any, indices: Any) -> list[np.ndarray[Any, Any]]:
        everyones = comm.run_steps(lambda: [comm.all_gather_v(array) for array in (values, indices)])
        return [np.concatenate(arrays) for arrays in everyones]

    shapes = [(None, *slices.values.shape[1:]), (None,)]
    values, indices = _call(gather, [slices.values, slices.indices], shapes)
    if op is shmring.Op.AVG:
        values = values / tf.cast(comm.size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _call(function: Any, tensors: list[Any], shapes: list[Any]) -> list[Any]:
    tf = _tensorflow()
    results = tf.numpy_function(function, tensors, [tensor.dtype for tensor in tensors])
    results = results if isinstance(results, list) else [results]  # a single result in eager mode
    return [tf.ensure_shape(result, shape) for result, shape in zip(results, shapes, strict=True)]
