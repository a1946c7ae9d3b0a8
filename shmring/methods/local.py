"""Fewer synchronisations: gradient accumulation over micro-batches, and local SGD.

This module uses only a communicator's public API.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .flat import agree, check_alike, check_op, dtype_of, one_call, one_call_to_make, views

if TYPE_CHECKING:
    from shmring import Comm

__all__ = ["GradientAccumulation", "LocalSGD"]

_Op = Literal["avg", "sum"]


class _Periodic:
    """A flat array in memory that all ranks map. It is reduced once every `every` steps."""

    def __init__(self, comm: Comm, like: Sequence[NDArray[Any]], every: int) -> None:
        try:
            dtype = dtype_of(like)
            if operator.index(every) < 1:
                raise ValueError(f"every is {every}; it must be 1 step or more")
        except Exception:
            comm.refuse("all_gather")
            raise
        agree(comm, every=every)
        self.every = every
        self.synchronisations = 0
        self._comm = comm
        self._steps = 0
        self._flat = comm.zeros(sum(each.size for each in like), dtype)
        self._views = views(self._flat, like)

    @property
    def nbytes(self) -> int:
        """Return the bytes that a synchronisation reduces."""
        return self._flat.nbytes

    def _reduce(self, op: _Op) -> None:
        self._comm.all_reduce(self._flat, op)
        self.synchronisations += 1


class GradientAccumulation(_Periodic):
    """Sum the gradients of `every` micro-batches on each rank and reduce the sums. All ranks make one.

    like: arrays with the shapes and the one floating dtype of the gradients; their values are not read. op:
    "avg" makes `gradients` the mean over micro-batches and ranks, "sum" the sum. Micro-batches are summed in
    order, then ranks are folded in rank order: apart from rounding, the result is that of one batch `every`
    times as large.
    """

    @one_call_to_make
    def __init__(self, comm: Comm, like: Sequence[NDArray[Any]], every: int, *, op: _Op = "avg") -> None:
        try:
            check_op(op)
        except ValueError:
            comm.refuse("all_gather")
            raise
        super().__init__(comm, like, every)
        self._op = op

    @property
    def gradients(self) -> list[NDArray[Any]]:
        """Return the gradients that `add` reduced last: views, which the next `add` overwrites."""
        return self._views

    @one_call
    def add(self, gradients: Sequence[NDArray[Any]]) -> bool:
        """Add the gradients of a micro-batch; reduce and return True in every `every`-th call.

        That call is collective; after it, update the weights by `gradients`. The argument holds this rank's
        gradients of one micro-batch and may be reused at once.
        """
        try:
            check_alike(gradients, self._views, "gradients")
        except (TypeError, ValueError):
            self._comm.refuse("all_reduce")
            raise
        first = self._steps % self.every == 0
        for total, part in zip(self._views, gradients, strict=True):
            if first:
                total[...] = part
            else:
                np.add(total, part, out=total)
        self._steps += 1
        if self._steps % self.every:
            return False
        self._reduce(self._op)
        if self._op == "avg" and self.every > 1:
            np.divide(self._flat, self.every, out=self._flat)
        return True


class LocalSGD(_Periodic):
    """Train each rank separately and average the weights every `every` steps (Stich 2019).

    All ranks make one. params: arrays of one floating dtype, with the same shapes on all ranks; rank 0's
    values are copied to all ranks. From then on the weights are `params` of this object, views of memory
    that all ranks map. A rank updates its own views and calls `step` each time. An optimiser's state, such
    as momentum, is not averaged.
    """

    @one_call_to_make
    def __init__(self, comm: Comm, params: Sequence[NDArray[Any]], every: int) -> None:
        super().__init__(comm, params, every)
        self.params = self._views
        for view, param in zip(self.params, params, strict=True):
            view[...] = param
        comm.broadcast(self._flat)

    @one_call
    def step(self) -> bool:
        """Count a step; average and return True in every `every`-th call, which is collective."""
        self._steps += 1
        if self._steps % self.every:
            return False
        self.average()
        return True

    @one_call
    def average(self) -> None:
        """Average now, as at the end of training. Collective."""
        self._reduce("avg")
