"""Collectives inside `jax.jit` on the CPU: `all_reduce(tree, comm)` within a computation that XLA compiles.

Each collective is an ordered callback (`jax.experimental.io_callback`). XLA may run independent operations
concurrently and in any order, but all ranks must call collectives in one order; ordered effects keep the
program's order. JAX copies the arguments before the callback and the results after it; the callback reuses
its result arrays. An XLA FFI handler would save these copies, but has no such order and needs C++.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import shmring

from .._config.optional_deps import need

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]

_Shape = tuple[int, ...]


def all_reduce(tree: Any, comm: shmring.Comm, op: shmring.Op | str = "sum") -> Any:
    """Combine every leaf elementwise over all ranks; return leaves of the same shapes and dtypes.

    Works traced and eagerly. The gradient is that of the sum of the ranks' losses: for a sum the sum of all
    cotangents, for an average their average; other ops have none (TypeError). The result, and errors of the
    communicator, arrive after the call returns: call `jax.block_until_ready` on the result before the
    communicator is used elsewhere or closed. jax refuses ordered callbacks under `vmap` and `checkpoint`.

    Parameters
    ----------
    tree : pytree of arrays
        With the same structure on all ranks. Small leaves are reduced together (tensor fusion, as in
        `Comm.all_reduce_many`).
    comm : Comm
        The communicator.
    op : str or Op
        As in `Comm.all_reduce`, as are the dtypes, with bfloat16 and float8.

    Returns
    -------
    pytree of arrays
        New leaves.

    Raises
    ------
    Exception
        jax errors with shmring's text.

    Examples
    --------
    >>> from shmring.adapters import jax as shmring_jax
    >>> import jax
    >>> total = jax.jit(lambda x: shmring_jax.all_reduce(x, comm))(np.ones(2, "f4"))
    >>> jax.block_until_ready(total).tolist()
    [2.0, 2.0]
    """
    with _refusing(comm, "all_reduce"):
        op = shmring.Op(op)
    return _run(comm, "all_reduce", tree, lambda shape: shape, op)


def broadcast(tree: Any, comm: shmring.Comm, root: int = 0) -> Any:
    """Return root's leaves on every rank. The gradient is the sum of all cotangents on root, else zeros.

    Parameters
    ----------
    tree, comm
        As in `all_reduce`.
    root : int
        The rank that sends.

    Returns
    -------
    pytree of arrays
        As `all_reduce`.

    Raises
    ------
    Exception
        As `all_reduce`.

    Examples
    --------
    >>> from shmring.adapters import jax as shmring_jax
    >>> import jax
    >>> jax.block_until_ready(shmring_jax.broadcast(np.full(2, comm.rank), comm, root=1)).tolist()
    [1, 1]
    """
    with _refusing(comm, "broadcast"):
        if not 0 <= root < comm.size:
            raise ValueError(f"root is {root}; there are ranks 0 to {comm.size - 1}")
    return _run(comm, "broadcast", tree, lambda shape: shape, int(root))


def all_gather(tree: Any, comm: shmring.Comm) -> Any:
    """Return all ranks' leaves: (size, *s) for a leaf of shape s. The gradient is `reduce_scatter`.

    Parameters
    ----------
    tree, comm
        As in `all_reduce`.

    Returns
    -------
    pytree of arrays
        As `all_reduce`.

    Raises
    ------
    Exception
        As `all_reduce`.

    Examples
    --------
    >>> from shmring.adapters import jax as shmring_jax
    >>> import jax
    >>> jax.block_until_ready(shmring_jax.all_gather(np.full(2, comm.rank), comm)).tolist()
    [[0, 0], [1, 1]]
    """
    return _run(comm, "all_gather", tree, lambda shape: (comm.size, *shape))


def reduce_scatter(tree: Any, comm: shmring.Comm, op: shmring.Op | str = "sum") -> Any:
    """Return this rank's part of each leaf's `all_reduce`: s of shape (size, *s), or k of size · k rows.

    The gradient of a sum is `all_gather`; that of an average is `all_gather` divided by the number of ranks.

    Parameters
    ----------
    tree, comm, op
        As in `all_reduce`.

    Returns
    -------
    pytree of arrays
        As `all_reduce`.

    Raises
    ------
    Exception
        As `all_reduce`.

    Examples
    --------
    >>> from shmring.adapters import jax as shmring_jax
    >>> import jax
    >>> jax.block_until_ready(shmring_jax.reduce_scatter(np.arange(4), comm)).tolist()  # rank 1 gets [4, 6]
    [0, 2]
    """

    def part(shape: _Shape) -> _Shape:
        if not shape or shape[0] % comm.size:
            raise ValueError(f"a leaf of shape {shape} has no dimension 0 that {comm.size} ranks can share")
        return shape[1:] if shape[0] == comm.size else (shape[0] // comm.size, *shape[1:])

    with _refusing(comm, "reduce_scatter"):
        op = shmring.Op(op)
    return _run(comm, "reduce_scatter", tree, part, op)


@dataclass(frozen=True)
class _Call:
    """A collective that XLA calls back with leaves. Equal _Calls are compiled once."""

    comm: shmring.Comm
    kind: str
    how: tuple[Any, ...]  # op or root
    shapes: tuple[_Shape, ...]  # shapes of the leaves
    results: tuple[Any, ...]  # jax.ShapeDtypeStructs

    @functools.cached_property
    def outs(self) -> list[np.ndarray[Any, Any]]:
        """Return the result arrays, which can be reused: XLA copies them before the next call."""
        return [np.empty(result.shape, result.dtype) for result in self.results]

    def __call__(self, *leaves: Any) -> Sequence[np.ndarray[Any, Any]]:
        arrays = [np.asarray(leaf) for leaf in leaves]
        if self.kind == "all_reduce":
            self.comm.all_reduce_many(arrays, *self.how, out=self.outs)
        else:
            for array, out in zip(arrays, self.outs, strict=True):
                getattr(self.comm, self.kind)(array, *self.how, out=out)
        return self.outs


def _run(comm: shmring.Comm, kind: str, tree: Any, shape_of: Callable[[_Shape], _Shape], *how: Any) -> Any:
    jax = need("jax", "jax", __name__)
    found, structure = jax.tree.flatten(tree)
    if not found:
        return tree
    with _refusing(comm, kind):
        leaves = [jax.numpy.asarray(leaf) for leaf in found]
        results = tuple(jax.ShapeDtypeStruct(shape_of(leaf.shape), leaf.dtype) for leaf in leaves)
    call = _Call(comm, kind, how, tuple(leaf.shape for leaf in leaves), results)
    return structure.unflatten(_collective()(call, leaves))


@contextlib.contextmanager
def _refusing(comm: shmring.Comm, kind: Any) -> Iterator[None]:
    """Report an argument error inside the block to the ranks that wait in the collective `kind`."""
    try:
        yield
    except (TypeError, ValueError):
        comm.refuse(kind)
        raise


@functools.cache
def _collective() -> Any:
    """Return the differentiable function (call, leaves) → results."""
    jax = need("jax", "jax", __name__)
    from jax.experimental import io_callback

    def run(call: _Call, leaves: list[Any]) -> list[Any]:
        return list(io_callback(call, call.results, *leaves, ordered=True))

    collective = jax.custom_vjp(run, nondiff_argnums=(0,))
    collective.defvjp(lambda call, leaves: (run(call, leaves), None), _gradient)
    return collective


def _gradient(call: _Call, _: None, cotangents: list[Any]) -> tuple[list[Any]]:
    """Return the gradient by leaf; None for a leaf of integers."""
    jax = need("jax", "jax", __name__)
    real = [number for number, cotangent in enumerate(cotangents) if cotangent.dtype != jax.dtypes.float0]
    found: list[Any] = [None] * len(cotangents)
    if real:
        leaves = _transposed(call, [cotangents[number] for number in real])
        for number, leaf in zip(real, leaves, strict=True):
            found[number] = leaf.reshape(call.shapes[number])
    return (found,)


def _transposed(call: _Call, cotangents: list[Any]) -> Any:
    jax = need("jax", "jax", __name__)
    comm, how = call.comm, call.how
    if call.kind == "all_gather":
        return reduce_scatter(cotangents, comm)
    if call.kind == "broadcast":
        sums = all_reduce(cotangents, comm)
        return sums if comm.rank == how[0] else [jax.numpy.zeros_like(leaf) for leaf in sums]
    if how[0] not in (shmring.Op.SUM, shmring.Op.AVG):
        raise TypeError(f"{call.kind} with op={how[0].value!r} has no gradient here; sum and avg have one")
    if call.kind == "all_reduce":
        return all_reduce(cotangents, comm, *how)
    whole = all_gather(cotangents, comm)
    return [leaf / comm.size for leaf in whole] if how[0] is shmring.Op.AVG else whole
