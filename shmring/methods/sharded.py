"""A sharded optimiser: each rank keeps the optimiser's state for its own part of the weights only.

This is ZeRO (Rajbhandari et al. 2020), stages 1 and 2. The module uses only a communicator's public API.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .._arguments import integer, refusing
from .flat import (
    agree_on_shapes,
    check_arrays,
    check_op,
    check_rule,
    dtype_of,
    one_call,
    one_call_to_make,
    views,
)
from .rules import SGD, Adam, Rule, apply, scratch_for

if TYPE_CHECKING:
    from shmring import Comm, Work

__all__ = ["SGD", "Adam", "ShardedOptimizer"]


class ShardedOptimizer:
    """ZeRO: data-parallel training with a sharded optimiser state (Rajbhandari et al. 2020).

    Making one is collective; all arguments but the values of params are the same on all ranks. From then on
    the weights are `params` of this object: a list of views of this rank's copy of the weights, which is in
    shared memory. Read them, but do not touch them during `step`.

    Stage 1: the whole gradient is all-reduced, each rank updates its part of the weights, and the parts are
    all-gathered. `gradients` are views of the array that is reduced; write gradients there to save the copy
    of `add`. Stage 2: gradients are reduce-scattered as they are added, bucket by bucket in the background,
    so a rank keeps only its own part of the sum and at most two buckets; `gradients` is None. The weights are
    bit by bit those of plain data parallelism (`all_reduce`, then the same rule on all weights): both fold in
    rank order, and rules are elementwise. Only an all_reduce with `wire=` would differ.

    With n weights padded to N, the next multiple of the number of ranks R, and s state values for each
    weight, a rank keeps s N / R elements of state, and for gradients N elements (stage 1), or N / R elements
    and the buckets (stage 2). float16 weights are updated in float32 and rounded once in a step; their state
    is float32.

    Parameters
    ----------
    comm : Comm
        The communicator.
    params : list of numpy.ndarray
        Arrays of one floating NumPy dtype, with the same shapes on every rank. Rank 0's values are copied to
        all ranks.
    rule : Rule
        The update: `SGD`, `Adam`, or an object with their methods.
    stage : int
        The stage of ZeRO: 1 or 2.
    op : str
        "avg" or "sum" of the ranks' gradients.
    bucket_nbytes : int
        Approximate bytes of a bucket, in stage 2.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument of this rank; the other ranks get `Mismatch`. On all ranks, if shapes differ.
    Error
        As `Comm.zeros`.

    Examples
    --------
    >>> from shmring.methods.sharded import SGD, ShardedOptimizer
    >>> optimizer = ShardedOptimizer(comm, [np.zeros(3), np.zeros(1)], SGD(0.5))
    >>> for param in reversed(optimizer.params):
    ...     optimizer.add(np.full(param.shape, comm.rank + 1.0))
    >>> optimizer.step()
    >>> optimizer.params[1]
    array([-0.75])
    """

    @one_call_to_make
    def __init__(
        self,
        comm: Comm,
        params: Sequence[NDArray[Any]],
        rule: Rule,
        *,
        stage: int = 1,
        op: str = "avg",
        bucket_nbytes: int = 1 << 20,
    ) -> None:
        with refusing(comm, "all_gather"):
            bucket_nbytes = integer("bucket_nbytes", bucket_nbytes, "1 byte")
            dtype = _checked(params, rule, stage, op)
        agree_on_shapes(comm, params)
        self._comm, self.rule, self.stage = comm, rule, stage
        self.steps = 0
        self._count = sum(param.size for param in params)
        padded = _up_to_multiple(self._count, comm.size)
        self._flat = comm.zeros(padded, dtype)  # the last parameter first, in the order of the gradients
        self.params = views(self._flat, params[::-1])[::-1]
        for view, param in zip(self.params, params, strict=True):
            view[...] = param
        comm.broadcast(self._flat)

        wanted = bucket_nbytes // dtype.itemsize if stage == 2 else padded
        self._in_bucket = _up_to_multiple(max(wanted, 1), comm.size)  # elements
        self._buckets = list(itertools.pairwise([*range(0, padded, self._in_bucket), padded]))
        self._scratch = scratch_for(dtype)
        self._state = [np.zeros(padded // comm.size, self._scratch.dtype) for _ in range(rule.num_states)]
        if stage == 1:
            self._gradient = comm.zeros(padded, dtype)
            self._buffers = [self._gradient]
            self._plans = [comm.plan("all_reduce", self._gradient, op)]
        else:
            self._gradient = np.zeros(padded // comm.size, dtype)  # this rank's part of the sum
            self._buffers = [comm.zeros(min(self._in_bucket, padded), dtype) for _ in self._buckets[:2]]
            self._plans = [
                comm.plan(
                    "reduce_scatter",
                    self._buffers[number % 2][: end - begin],
                    op,
                    out=self._gradient[self._own(begin, end)],
                    async_op=True,
                )
                for number, (begin, end) in enumerate(self._buckets)
            ]
        self._gathers = [
            comm.plan("all_gather", self._flat[self._part(begin, end)], out=self._flat[begin:end])
            for begin, end in self._buckets
        ]
        self._works: list[Work[Any] | None] = [None, None]  # by buffer, the call that still reads it
        self._missing = len(params)  # gradients of this step that have not been added
        self._arrived = 0  # elements of this step that have been added
        self.gradients = views(self._gradient, params[::-1])[::-1] if stage == 1 else None

    @property
    def state_nbytes(self) -> int:
        """Bytes of the optimiser's state on this rank."""
        return sum(each.nbytes for each in self._state)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes that this rank keeps for gradients."""
        own = self._gradient.nbytes if self.stage == 2 else 0
        return own + sum(buffer.nbytes for buffer in self._buffers)

    def add(self, gradient: NDArray[Any]) -> None:
        """Add this rank's gradient of the next parameter. The first is that of the last parameter.

        Collective in stage 2, in which a full bucket begins to be reduced.

        Parameters
        ----------
        gradient : numpy.ndarray
            It has the parameter's shape and dtype. It is copied and may be reused at once, except in stage 1
            if it is an item of `gradients`.

        Raises
        ------
        TypeError, ValueError
            For a wrong array, or one too many. The other ranks get `Mismatch`.
        Error
            As `Comm.reduce_scatter`.
        """
        index = self._missing - 1
        with refusing(self._comm, "reduce_scatter" if self.stage == 2 else "all_reduce"):
            self._check_next(gradient, index)
        if self.gradients is not None:
            if gradient is not self.gradients[index]:
                self.gradients[index][...] = gradient
            self._missing = index
        else:
            self._comm.run_steps(self._scatter, gradient.reshape(-1), index, begun=True)

    def _check_next(self, gradient: NDArray[Any], index: int) -> None:
        if index < 0:
            raise ValueError(f"all {len(self.params)} gradients of this step were added: call step()")
        if not hasattr(gradient, "shape") or not hasattr(gradient, "dtype"):
            raise TypeError(f"a {type(gradient).__name__} instead of a NumPy array; use np.asarray")
        if isinstance(gradient, np.ndarray):
            check_arrays([gradient])  # for a mask
        wanted = self.params[index]
        if gradient.shape != wanted.shape or gradient.dtype != wanted.dtype:
            raise ValueError(
                f"the gradient is {gradient.dtype}{gradient.shape}, but the next parameter, {index}, "
                f"is {wanted.dtype}{wanted.shape}; add them last parameter first"
            )

    def step(self) -> None:
        """Update the weights by the gradients that were added, one for each parameter. Collective.

        An exception in the middle, such as that of a signal handler, ends the communicator.

        Raises
        ------
        ValueError
            If gradients are missing. The other ranks get `Mismatch`.
        Error
            As `Comm.all_gather`.
        """
        if self._missing:
            self._comm.refuse("all_gather" if self.stage == 2 else "all_reduce")
            raise ValueError(f"{self._missing} of {len(self.params)} gradients are missing: add() them first")
        self._comm.run_steps(self._update, begun=True)

    def _update(self) -> None:
        """Execute `step`. In stage 2 it may begin no call before the update, so `step` runs it as begun."""
        if self.stage == 1:
            self._plans[0]()
        elif self._arrived % self._in_bucket:  # the last bucket: its rest is padding
            self._begin(len(self._buckets) - 1)
        self._wait(0)
        self._wait(1)
        self.steps += 1
        for (begin, end), gather in zip(self._buckets, self._gathers, strict=True):
            own = self._own(begin, end)
            gradient = self._gradient[own if self.stage == 2 else self._part(begin, end)]
            state = [each[own] for each in self._state]
            part = self._flat[self._part(begin, end)]
            apply(self.rule, part, gradient, state, self._scratch, self.steps)
            gather()
        self._missing, self._arrived = len(self.params), 0

    @one_call
    def save(self, root: int = 0) -> dict[str, Any] | None:
        """Return the optimiser's state on root, which any number of ranks can load, and None on other ranks.
        Collective.

        Parameters
        ----------
        root : int
            The rank that gets the state.

        Returns
        -------
        dict or None
            "steps": the number of steps. "state": a list of arrays of one dimension over all weights, the
            last parameter first, one for each state value. The weights are not included.

        Raises
        ------
        Error
            As `Comm.gather`.
        """
        at_root = self._comm.rank == root
        whole = [np.zeros(self._flat.size, each.dtype) for each in self._state] if at_root else []
        for begin, end in self._buckets:
            for number, each in enumerate(self._state):
                out = whole[number][begin:end] if at_root else None
                self._comm.gather(each[self._own(begin, end)], root, out=out)
        return {"steps": self.steps, "state": [each[: self._count] for each in whole]} if at_root else None

    @one_call
    def load(self, saved: dict[str, Any] | None, root: int = 0) -> None:
        """Restore the result of `save`, given on root. Collective.

        Parameters
        ----------
        saved : dict
            The result of `save`, on root; ignored on other ranks.
        root : int
            The rank that has it.

        Raises
        ------
        ValueError
            On root, if `saved` does not fit the rule and the weights. The other ranks get `Mismatch`.
        Error
            As `Comm.broadcast`.
        """
        steps, whole = np.zeros((), np.int64), []
        if self._comm.rank == root:
            with refusing(self._comm, "broadcast"):
                whole, steps[...] = self._padded(saved), saved["steps"] if saved else 0
        self._comm.broadcast(steps, root)
        self.steps = int(steps)
        for begin, end in self._buckets:
            for number, each in enumerate(self._state):
                part = whole[number][begin:end] if whole else None
                self._comm.scatter(part, root, out=each[self._own(begin, end)])

    def _padded(self, saved: dict[str, Any] | None) -> list[NDArray[Any]]:
        state = saved["state"] if saved else []
        if [np.shape(each) for each in state] != [(self._count,)] * len(self._state):
            raise ValueError(
                f"the saved state does not fit this rule and these parameters: {len(self._state)} arrays of "
                f"{self._count} elements are needed, these are {[np.shape(each) for each in state]}"
            )
        padding = 0, self._flat.size - self._count
        return [np.pad(each.astype(self._scratch.dtype), padding) for each in state]

    def _scatter(self, gradient: NDArray[Any], index: int) -> None:
        while gradient.size:
            number, inside = divmod(self._arrived, self._in_bucket)
            if inside == 0:
                self._wait(number % 2)
            piece = gradient[: self._in_bucket - inside]
            self._buffers[number % 2][inside : inside + piece.size] = piece
            self._arrived += piece.size
            if self._arrived % self._in_bucket == 0:
                self._begin(number)
            gradient = gradient[piece.size :]
        self._missing = index

    def _begin(self, number: int) -> None:
        self._works[number % 2] = self._plans[number]()

    def _wait(self, buffer: int) -> None:
        work = self._works[buffer]
        if work is not None:
            work.wait()
            self._works[buffer] = None

    def _own(self, begin: int, end: int) -> slice:
        """Return the slice of this rank's state for its part of a bucket."""
        return slice(begin // self._comm.size, end // self._comm.size)

    def _part(self, begin: int, end: int) -> slice:
        """Return the slice of all weights that is this rank's part of a bucket."""
        length = (end - begin) // self._comm.size
        return slice(begin + self._comm.rank * length, begin + (self._comm.rank + 1) * length)


def _up_to_multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _checked(params: Sequence[NDArray[Any]], rule: Rule, stage: int, op: str) -> np.dtype[Any]:
    """Return the parameters' dtype. Raises TypeError or ValueError for a wrong argument."""
    check_rule(rule)
    if stage not in (1, 2):
        raise ValueError(f"stage is {stage!r}; it must be 1 or 2")
    check_op(op)
    return dtype_of(params)
