"""Fewer synchronisations: gradients of several micro-batches summed before they are reduced, and local SGD.

A user of the public API: what it is handed is a communicator.
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
    """A flat array in memory that all ranks map, which is reduced once in `every` steps."""

    def __init__(self, comm: Comm, like: Sequence[NDArray[Any]], every: int) -> None:
        try:
            dtype = dtype_of(like)
            if operator.index(every) < 1:
                raise ValueError(f"every is {every}; it is a number of steps, 1 or more")
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
        """Bytes that a synchronisation reduces."""
        return self._flat.nbytes

    def _reduce(self, op: _Op) -> None:
        self._comm.all_reduce(self._flat, op)
        self.synchronisations += 1


class GradientAccumulation(_Periodic):
    """Sums the gradients of `every` micro-batches on each rank and reduces the sums; all ranks make one.

    like: arrays that are like the gradients, of one floating dtype; only shapes and dtype are looked at. op:
    "avg" makes `gradients` the mean over micro-batches and ranks, "sum" the sum. Micro-batches are summed in
    their order, and ranks folded in theirs: the result is that of one batch `every` times as large, exactly
    where the sums are exact, and else but for rounding.
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
        """What `add` reduced last: views, which the next `add` overwrites."""
        return self._views

    @one_call
    def add(self, gradients: Sequence[NDArray[Any]]) -> bool:
        """Collective with every `every`-th call, which returns True: now `gradients` is to be learnt from.

        gradients: this rank's, of one micro-batch; they may be used again at once.
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
    """Each rank learns by itself, and every `every` steps all take the mean of their weights (Stich 2019).

    params: arrays of one floating dtype, alike in shape on all ranks, which all make one; they are copied,
    rank 0's values to all ranks. From then on the weights are `params` of this object, views of memory that
    all ranks map: a rank changes its own as it likes, and calls `step` each time. What an optimiser keeps
    beside them, such as momentum, stays the rank's own.
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
        """Collective with every `every`-th call, which takes the mean and returns True."""
        self._steps += 1
        if self._steps % self.every:
            return False
        self.average()
        return True

    @one_call
    def average(self) -> None:
        """Collective: take the mean now, as at the end of training."""
        self._reduce("avg")
