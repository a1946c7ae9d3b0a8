"""A sharded optimiser: each rank keeps the optimiser's state of its own part of the weights only.

ZeRO (Rajbhandari et al. 2020), stages 1 and 2. A user of the public API: what it is handed is a communicator.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .flat import check_op, dtype_of, one_call, one_call_to_make, views
from .rules import SGD, Adam, Rule, apply, scratch_for

if TYPE_CHECKING:
    from shmring import Comm, Work

__all__ = ["SGD", "Adam", "ShardedOptimizer"]


class ShardedOptimizer:
    """Data-parallel training whose optimiser state is spread over the ranks; all of them make one.

    params: arrays of one floating dtype of NumPy, alike in shape on every rank; they are copied, rank 0's
    values to all ranks. From then on the weights are `params` of this object, views of one array that all
    ranks map: read them, and leave them alone during `step`. rule: `SGD`, `Adam`, or what has their methods.
    op: "avg" or "sum" of the ranks' gradients. Errors: TypeError and ValueError on the rank that is wrong,
    `Mismatch` on the others.

    stage 1: the gradient is all-reduced as a whole, each rank updates its part of the weights, and the parts
    are gathered. stage 2: gradients are reduce-scattered as they come, bucket by bucket in the background, so
    a rank never has more of the sum than its own part; there are at most two buckets of some bucket_nbytes.
    The weights are those of plain data parallel (`all_reduce`, then the same rule on everything) to the last
    bit: both fold in rank order, and rules are elementwise. Only `wire=` of an all_reduce would differ.

    With n elements padded to N, the next multiple of `size`, and s state numbers an element, a rank has
    N s / size of state, and gradients of N (stage 1) or N / size and the buckets (stage 2).
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
        try:
            dtype = _checked(params, stage, op, bucket_nbytes)
        except Exception:
            comm.refuse("broadcast")
            raise
        self._comm, self.rule, self.stage = comm, rule, stage
        self.steps = 0
        self._count = sum(param.size for param in params)
        padded = _up_to_multiple(self._count, comm.size)
        self._flat = comm.zeros(padded, dtype)  # the last parameter first, as gradients come
        self.params = views(self._flat, params[::-1])[::-1]
        for view, param in zip(self.params, params, strict=True):
            view[...] = param
        comm.broadcast(self._flat)

        wanted = bucket_nbytes // dtype.itemsize if stage == 2 else padded
        self._in_bucket = _up_to_multiple(max(wanted, 1), comm.size)  # elements
        self._buckets = list(itertools.pairwise([*range(0, padded, self._in_bucket), padded]))
        self._state = [np.zeros(padded // comm.size, dtype) for _ in range(rule.num_states)]
        self._scratch = scratch_for(dtype)
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
        self._works: list[Work[Any] | None] = [None, None]  # by buffer, what still reads it
        self._missing = len(params)  # gradients of this step that have not come
        self._arrived = 0  # elements of them that have
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
        """Give this rank's gradient of the next parameter, the last one first.

        It is copied, so it may be used again at once; in stage 1 not if it is that item of `gradients`, views
        of the array that is reduced. In stage 2 collective: a bucket that is full begins to be reduced.
        """
        index = self._missing - 1
        wanted = self.params[index] if index >= 0 else None
        if wanted is None or gradient.shape != wanted.shape or gradient.dtype != wanted.dtype:
            self._comm.refuse("reduce_scatter" if self.stage == 2 else "all_reduce")
            if wanted is None:
                raise ValueError(f"all {len(self.params)} gradients of this step were added: call step()")
            raise ValueError(
                f"the gradient is {gradient.dtype}{gradient.shape}, but parameter {index}, whose turn it is, "
                f"is {wanted.dtype}{wanted.shape}; add them last parameter first"
            )
        if self.gradients is not None:
            if gradient is not self.gradients[index]:
                self.gradients[index][...] = gradient
        else:
            self._comm.run_steps(self._scatter, gradient.reshape(-1), begun=True)
        self._missing = index

    @one_call
    def step(self) -> None:
        """Collective: change the weights by the gradients that were added, one for each parameter."""
        if self._missing:
            self._comm.refuse("all_gather" if self.stage == 2 else "all_reduce")
            raise ValueError(f"{self._missing} of {len(self.params)} gradients are missing: add() them first")
        if self.stage == 1:
            self._plans[0]()
        elif self._arrived % self._in_bucket:  # the last bucket: what follows in it is padding
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
        """Collective: on root {"steps": …, "state": […]}, for any number of ranks to load; None elsewhere.

        state: 1-d arrays over all weights, the last parameter first. The weights themselves every rank has.
        """
        at_root = self._comm.rank == root
        whole = [np.zeros_like(self._flat) for _ in self._state] if at_root else []
        for begin, end in self._buckets:
            for number, each in enumerate(self._state):
                out = whole[number][begin:end] if at_root else None
                self._comm.gather(each[self._own(begin, end)], root, out=out)
        return {"steps": self.steps, "state": [each[: self._count] for each in whole]} if at_root else None

    @one_call
    def load(self, saved: dict[str, Any] | None, root: int = 0) -> None:
        """Collective: go on with what `save` returned on root; what others give is not looked at."""
        steps, whole = np.zeros((), np.int64), []
        if self._comm.rank == root:
            try:
                whole, steps[...] = self._padded(saved), saved["steps"] if saved else 0
            except Exception:
                self._comm.refuse("broadcast")
                raise
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
                f"what was saved is not of this rule and these parameters: {len(self._state)} arrays of "
                f"{self._count} elements are wanted, these are {[np.shape(each) for each in state]}"
            )
        return [np.pad(each.astype(self._flat.dtype), (0, self._flat.size - self._count)) for each in state]

    def _scatter(self, gradient: NDArray[Any]) -> None:
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

    def _begin(self, number: int) -> None:
        self._works[number % 2] = self._plans[number]()

    def _wait(self, buffer: int) -> None:
        work, self._works[buffer] = self._works[buffer], None
        if work is not None:
            work.wait()

    def _own(self, begin: int, end: int) -> slice:
        """Where this rank keeps state for its part of a bucket."""
        return slice(begin // self._comm.size, end // self._comm.size)

    def _part(self, begin: int, end: int) -> slice:
        """This rank's part of a bucket, in the array of all weights."""
        length = (end - begin) // self._comm.size
        return slice(begin + self._comm.rank * length, begin + (self._comm.rank + 1) * length)


def _up_to_multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _checked(params: Sequence[NDArray[Any]], stage: int, op: str, bucket_nbytes: int) -> np.dtype[Any]:
    """The parameters' dtype; TypeError or ValueError for what cannot be."""
    if stage not in (1, 2):
        raise ValueError(f"stage is {stage!r}; it is 1 or 2")
    check_op(op)
    if bucket_nbytes <= 0:
        raise ValueError(f"bucket_nbytes is {bucket_nbytes}; a bucket takes 1 byte or more")
    return dtype_of(params)
