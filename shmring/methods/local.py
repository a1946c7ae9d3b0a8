"""Fewer synchronisations: gradient accumulation over micro-batches, and local SGD.

This module uses only a communicator's public API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .._arguments import integer, refusing
from .flat import agree, agree_on_shapes, check_alike, check_op, dtype_of, one_call, one_call_to_make, views

if TYPE_CHECKING:
    from shmring import Comm

__all__ = ["GradientAccumulation", "LocalSGD"]

_Op = Literal["avg", "sum"]


class _Periodic:
    """A flat array in shared memory, which is reduced in every `every`-th step."""

    def __init__(self, comm: Comm, like: Sequence[NDArray[Any]], every: int) -> None:
        with refusing(comm, "all_gather"):
            dtype = dtype_of(like)
            every = integer("every", every, "1 step")
        agree(comm, every=every)
        agree_on_shapes(comm, like)
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
    """Sum the gradients of `every` micro-batches on each rank, then reduce the sums.

    Making one is collective. Micro-batches are summed in order and in the gradients' dtype, then ranks are
    folded in rank order: apart from rounding, the result is that of one batch `every` times as large.

    Parameters
    ----------
    comm : Comm
        The communicator.
    like : list of numpy.ndarray
        Arrays with the shapes and the one floating dtype of the gradients. Their values are not read.
    every : int
        Number of micro-batches, the same on all ranks.
    op : str
        "avg" makes `gradients` the mean over micro-batches and ranks, "sum" the sum.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument of this rank; the other ranks get `Mismatch`. On all ranks, if `every` or the
        shapes differ.
    Error
        As `Comm.all_gather`.

    Examples
    --------
    >>> from shmring.methods.local import GradientAccumulation
    >>> accumulation = GradientAccumulation(comm, [np.empty(2)], every=2)
    >>> accumulation.add([np.full(2, 1.0)]), accumulation.add([np.full(2, 3.0)])
    (False, True)
    >>> accumulation.gradients[0]
    array([2., 2.])
    """

    @one_call_to_make
    def __init__(self, comm: Comm, like: Sequence[NDArray[Any]], every: int, *, op: _Op = "avg") -> None:
        with refusing(comm, "all_gather"):
            check_op(op)
        super().__init__(comm, like, every)
        self._op = op

    @property
    def gradients(self) -> list[NDArray[Any]]:
        """The gradients that `add` reduced last: views in shared memory, which the next `add` overwrites."""
        return self._views

    def add(self, gradients: Sequence[NDArray[Any]]) -> bool:
        """Add the gradients of a micro-batch. In every `every`-th call, reduce the sums and return True.

        That call is collective; after it, update the weights by `gradients`. An exception in the middle of a
        call, such as that of a signal handler, ends the communicator.

        Parameters
        ----------
        gradients : list of numpy.ndarray
            This rank's gradients of one micro-batch, with the shapes and dtype of `like`. They may be reused
            at once.

        Returns
        -------
        bool
            True if `gradients` has been reduced.

        Raises
        ------
        TypeError, ValueError
            For arrays of other shapes or dtypes. The other ranks get `Mismatch`.
        Error
            As `Comm.all_reduce`.
        """
        with refusing(self._comm, "all_reduce"):
            check_alike(gradients, self._views, "gradients")
        return self._comm.run_steps(self._add, gradients, begun=True)

    def _add(self, gradients: Sequence[NDArray[Any]]) -> bool:
        """Execute `add`. It changes the sums before its first call, so `add` runs it as begun."""
        first = self._steps % self.every == 0
        with np.errstate(all="ignore"):  # an error on one rank would leave the others waiting
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
                wide = np.promote_types(self._flat.dtype, np.float32)  # a float16 is at most 65504
                np.divide(self._flat, self.every, out=self._flat, dtype=wide, casting="same_kind")
        return True


class LocalSGD(_Periodic):
    """Train each rank separately and average the weights every `every` steps (Stich 2019).

    Making one is collective. From then on the weights are `params` of this object: views of the rank's own
    array, which is in shared memory. A rank updates its views and calls `step` each time. An optimiser's
    state, such as momentum, is not averaged.

    Parameters
    ----------
    comm : Comm
        The communicator.
    params : list of numpy.ndarray
        Arrays of one floating dtype, with the same shapes on all ranks. Rank 0's values are copied to all
        ranks.
    every : int
        Number of steps, the same on all ranks.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument of this rank; the other ranks get `Mismatch`. On all ranks, if `every` or the
        shapes differ.
    Error
        As `Comm.broadcast`.

    Examples
    --------
    >>> from shmring.methods.local import LocalSGD
    >>> local = LocalSGD(comm, [np.zeros(2)], every=1)
    >>> local.params[0] -= 0.5 * comm.rank
    >>> local.step()
    True
    >>> local.params[0]
    array([-0.25, -0.25])
    """

    @one_call_to_make
    def __init__(self, comm: Comm, params: Sequence[NDArray[Any]], every: int) -> None:
        super().__init__(comm, params, every)
        self.params = self._views
        for view, param in zip(self.params, params, strict=True):
            view[...] = param
        comm.broadcast(self._flat)

    def step(self) -> bool:
        """Count a step. In every `every`-th call, which is collective, average the weights and return True.

        An exception in the middle, such as that of a signal handler, ends the communicator.

        Returns
        -------
        bool
            True if the weights were averaged.

        Raises
        ------
        Error
            As `Comm.all_reduce`.
        """
        return self._comm.run_steps(self._step, begun=True)

    def _step(self) -> bool:
        """Execute `step`. It counts the step before its first call, so `step` runs it as begun."""
        self._steps += 1
        if self._steps % self.every:
            return False
        self._reduce("avg")
        return True

    @one_call
    def average(self) -> None:
        """Average the weights now, as at the end of training. Collective.

        Raises
        ------
        Error
            As `Comm.all_reduce`.
        """
        self._reduce("avg")
