"""Collectives as ordered host callbacks of JAX, for versions whose FFI the adapter cannot use.

JAX copies the arguments before the callback and the results after it; the callback reuses its result arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

import shmring

from .call import Call


class _Callback:
    """The callback of a call, with its leaves. Its results are valid until it is called again."""

    def __init__(self, call: Call, results: Sequence[Any]) -> None:
        self.call = call
        self.outs = [np.empty(result.shape, result.dtype) for result in results]

    def __call__(self, *leaves: Any) -> Sequence[np.ndarray[Any, Any]]:
        comm = self.call.group.comm()
        if comm is None:
            raise shmring.Closed("the communicator of this compiled program does not exist any more")
        self.call.run(comm, [np.asarray(leaf) for leaf in leaves], self.outs)
        return self.outs


def collective(call: Call, leaves: Sequence[Any]) -> list[Any]:
    """Make the call, or add it to the program that JAX traces."""
    return list(_differentiable(call, list(leaves)))


def _run(call: Call, leaves: list[Any]) -> list[Any]:
    found = call.results([(leaf.shape, leaf.dtype) for leaf in leaves])
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in found]
    return list(io_callback(_Callback(call, results), results, *leaves, ordered=True))


def _forward(call: Call, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    return _run(call, leaves), [leaf.shape for leaf in leaves]


def _backward(call: Call, shapes: list[Any], cotangents: list[Any]) -> tuple[list[Any]]:
    """Return the gradient by leaf; None for a leaf of integers."""
    real = [number for number, cotangent in enumerate(cotangents) if cotangent.dtype != jax.dtypes.float0]
    found: list[Any] = [None] * len(shapes)
    call.check_gradient()
    if real:
        leaves = call.transposed([cotangents[number] for number in real], collective)
        for number, leaf in zip(real, leaves, strict=True):
            found[number] = leaf.reshape(shapes[number])
    return (found,)


_differentiable = jax.custom_vjp(_run, nondiff_argnums=(0,))
_differentiable.defvjp(_forward, _backward)


def jit(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return `jax.jit` of the function, which returns when the calls of the program are over."""
    inner: Any = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        results = inner(*args, **keywords)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(results)):
            jax.block_until_ready(results)
            jax.effects_barrier()
        return results

    call.lower = inner.lower  # type: ignore[attr-defined]
    return call
