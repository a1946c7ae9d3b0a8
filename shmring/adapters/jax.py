"""Collectives inside `jax.jit` on the CPU: `all_reduce(tree, comm)` beside the computation that XLA compiles.

They are ordered callbacks (`jax.experimental.io_callback`): XLA runs independent operations in any order and
at once, and ranks that call collectives in different orders are an error; ordered effects keep the program's
order. JAX copies arguments before it calls, and results, from arrays that the call keeps for its next time.
A handler of XLA's FFI would save these copies, but has no such order, and needs C++.
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
    """Every leaf combined elementwise over all ranks, for every rank: leaves of the same shapes and dtypes.

    tree: any pytree of arrays, of one structure on all ranks; small leaves are reduced together (tensor
    fusion, as `Comm.all_reduce_many`). op and dtypes: as of `Comm.all_reduce`, bfloat16 and float8 included.
    Works traced and not. The gradient is that of the sum over the ranks of their losses: of a sum the sum of
    all cotangents, of an average their average; other ops have none (TypeError).

    Errors of the communicator reach the caller as jax's, with shmring's in the text. They come, as the result
    does, later than the call: `jax.block_until_ready` what came out before the communicator is used
    elsewhere or closed. Under `vmap` and `checkpoint` jax refuses ordered callbacks.
    """
    with _refusing(comm, "all_reduce"):
        op = shmring.Op(op)
    return _run(comm, "all_reduce", tree, lambda shape: shape, op)


def broadcast(tree: Any, comm: shmring.Comm, root: int = 0) -> Any:
    """root's leaves on every rank. The gradient is the sum of all cotangents on the root, zeros elsewhere."""
    with _refusing(comm, "broadcast"):
        if not 0 <= root < comm.size:
            raise ValueError(f"root is {root}; there are ranks 0 to {comm.size - 1}")
    return _run(comm, "broadcast", tree, lambda shape: shape, int(root))


def all_gather(tree: Any, comm: shmring.Comm) -> Any:
    """Every rank's leaves on every rank: (size, *s) for a leaf of shape s; the gradient: `reduce_scatter`."""
    return _run(comm, "all_gather", tree, lambda shape: (comm.size, *shape))


def reduce_scatter(tree: Any, comm: shmring.Comm, op: shmring.Op | str = "sum") -> Any:
    """This rank's part of each leaf's `all_reduce`: (size, *s) becomes s, and size · k rows k rows.

    The gradient of a sum is `all_gather`, that of an average as much by the number of ranks.
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
    """A collective as XLA calls it back, with leaves. Equal ones are compiled once."""

    comm: shmring.Comm
    kind: str
    how: tuple[Any, ...]  # op or root
    shapes: tuple[_Shape, ...]  # of the leaves
    results: tuple[Any, ...]  # jax.ShapeDtypeStructs

    @functools.cached_property
    def outs(self) -> list[np.ndarray[Any, Any]]:
        """XLA has copied them before the next call can come."""
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
    """A wrong argument is found before the collective is called, for which the others may wait."""
    try:
        yield
    except (TypeError, ValueError):
        comm.refuse(kind)
        raise


@functools.cache
def _collective() -> Any:
    """(call, leaves) → the results, as jax differentiates it."""
    jax = need("jax", "jax", __name__)
    from jax.experimental import io_callback

    def run(call: _Call, leaves: list[Any]) -> list[Any]:
        return list(io_callback(call, call.results, *leaves, ordered=True))

    collective = jax.custom_vjp(run, nondiff_argnums=(0,))
    collective.defvjp(lambda call, leaves: (run(call, leaves), None), _gradient)
    return collective


def _gradient(call: _Call, _: None, cotangents: list[Any]) -> tuple[list[Any]]:
    """By leaf; None where it holds whole numbers, which have no gradient."""
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
