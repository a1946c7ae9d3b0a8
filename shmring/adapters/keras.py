"""Data-parallel Keras on TensorFlow: gradients of all ranks inside `tf.function`, and in `model.fit`.

A call is a `tf.numpy_function`, which TensorFlow runs in the program's order, as it has side effects. XLA
does not compile it: leave `jit_compile` as it is on CPUs, off.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

import shmring

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
    """Each gradient combined elementwise over all ranks: from `tape.gradient`, for the optimizer.

    gradients: tensors, alike on all ranks in shape and dtype, fused into one `Comm.all_reduce_many`; None
    stays None. An IndexedSlices, an embedding's gradient, stays one: the slices of all ranks, one after
    another (op: sum or avg), which sends less where few rows are touched; sparse_as_dense: it becomes a
    tensor. Inside `tf.function` and eagerly. Nothing can be differentiated through it. Errors inside
    `tf.function` are TensorFlow's, with shmring's in the text; an op that slices cannot have is a ValueError.
    """
    as_it_is = _tensorflow().autograph.experimental.do_not_convert(_all_reduce_grads)
    return list(as_it_is(list(gradients), comm, _op_of(comm, op), sparse_as_dense))


def broadcast_variables(variables: Iterable[Any], comm: shmring.Comm, root: int = 0) -> None:
    """Collective, eager: every variable, of Keras or TensorFlow, becomes root's, alike in shape and dtype."""
    comm.run_steps(_broadcast_variables, variables, comm, root)


def _broadcast_variables(variables: Iterable[Any], comm: shmring.Comm, root: int) -> None:
    for variable in variables:
        value = np.array(variable.numpy())
        comm.broadcast(value, root)
        variable.assign(value)


def DistributedOptimizer(  # the name that Horovod's users know
    optimizer: Any, comm: shmring.Comm, op: shmring.Op | str = "avg", *, sparse_as_dense: bool = False
) -> Any:
    """An optimizer of the same class and settings that applies the gradients of all ranks.

    For `model.compile` and for steps by hand: each `apply` is an `all_reduce_grads` (arguments as there) and
    then the class's own. Every rank makes as many steps as the others. optimizer: one that was not used yet.
    A model that is saved has the class by its own name, and loads where there is no shmring.
    """
    keras = need("keras", "keras", __name__)
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"Keras runs on {keras.backend.backend()}; this needs KERAS_BACKEND=tensorflow")
    if optimizer.built:
        raise ValueError("the optimizer was used already: its state would be lost; give a new one")
    made = _distributed(optimizer.__class__).from_config(optimizer.get_config())
    made.reduce_gradients = functools.partial(
        all_reduce_grads, comm=comm, op=_op_of(comm, op), sparse_as_dense=sparse_as_dense
    )
    return made


def broadcast_at_start(comm: shmring.Comm, root: int = 0) -> Any:
    """A callback for `model.fit`: weights and the optimizer's state become root's before the first step."""

    def broadcast(_: dict[str, Any] | None) -> None:
        model = callback.model
        broadcast_variables([*model.weights, *model.optimizer.variables], comm, root)

    callback = need("keras", "keras", __name__).callbacks.LambdaCallback(on_train_begin=broadcast)
    return callback


def average_metrics(comm: shmring.Comm) -> Any:
    """A callback for `model.fit`: an epoch's losses and metrics become their mean over the ranks.

    Each rank counts the same: give all as many samples. Stand it before callbacks that read the metrics
    (EarlyStopping, ReduceLROnPlateau), which then do the same on every rank.
    """

    def average(_: int, logs: dict[str, Any]) -> None:
        names = sorted(logs)
        values = np.array([float(logs[name]) for name in names])
        comm.all_reduce(values, "avg")
        logs.update(zip(names, values.tolist(), strict=True))

    return need("keras", "keras", __name__).callbacks.LambdaCallback(on_epoch_end=average)


def _distributed(base: Any) -> Any:
    """An optimizer's class, but for `apply`."""

    def apply(self: Any, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        base.apply(self, self.reduce_gradients(grads), trainable_variables)

    return type(base.__name__, (base,), {"apply": apply, "__module__": base.__module__})


@functools.cache  # which AutoGraph leaves alone
def _tensorflow() -> Any:
    return need("tensorflow", "keras", __name__)


def _op_of(comm: shmring.Comm, op: shmring.Op | str) -> shmring.Op:
    """ValueError here, and Mismatch on others where it is another rank's and right."""
    try:
        return shmring.Op(op)
    except ValueError:
        comm.refuse("all_reduce")
        raise


def _all_reduce_grads(
    found: list[Any], comm: shmring.Comm, op: shmring.Op, sparse_as_dense: bool
) -> list[Any]:
    tf = _tensorflow()
    if sparse_as_dense:
        found = [each if each is None else tf.convert_to_tensor(each) for each in found]
    sparse = [number for number, each in enumerate(found) if isinstance(each, tf.IndexedSlices)]
    if sparse and op not in (shmring.Op.SUM, shmring.Op.AVG):
        comm.refuse("all_reduce")
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
        outs = [np.empty_like(array) for array in arrays]  # new ones: TensorFlow may keep them
        comm.all_reduce_many(arrays, op, out=outs)
        return outs

    return _call(reduce, tensors, [tensor.shape for tensor in tensors])


def _gather(slices: Any, comm: shmring.Comm, op: shmring.Op) -> Any:
    """The slices of all ranks, one after another."""
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
    results = results if isinstance(results, list) else [results]  # one, and eager
    return [tf.ensure_shape(result, shape) for result, shape in zip(results, shapes, strict=True)]
