"""Pipeline parallelism with two versions of the weights: each rank has some of a model's layers, a stage.

PipeDream-2BW (Narayanan et al. 2021) with its schedule of one forward pass and one backward pass in turn. A
user of the public API: what it is handed is a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

import shmring

from ..errors import agreed
from .flat import agree, check_alike, dtype_of, one_call, one_call_to_make, views
from .rules import Rule, apply, scratch_for

if TYPE_CHECKING:
    from shmring import Comm, Transfer

__all__ = ["Pipeline", "Step", "one_forward_one_backward", "version_of"]

_Array = NDArray[Any]
FORWARD, BACKWARD = 0, 1  # tags


class Step(NamedTuple):
    """What a stage does next, with the micro-batch of this number."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def one_forward_one_backward(stage: int, num_stages: int, count: int) -> list[Step]:
    """The steps of a stage for `count` micro-batches, 1F1B.

    First as many forward passes as there are stages behind it, then a forward and a backward pass in turn,
    and at the end the backward passes that are left. So at most num_stages - stage micro-batches are in
    flight here, that is, have gone forward and not yet backward.
    """
    ahead = min(num_stages - stage - 1, count)
    steps = [Step("forward", number) for number in range(ahead)]
    for number in range(count):
        if ahead + number < count:
            steps.append(Step("forward", ahead + number))
        steps.append(Step("backward", number))
    return steps


def version_of(batch: int) -> int:
    """The version of the weights that a batch's passes use: w(batch - 1), and w(0) for the first batch."""
    return max(batch - 1, 0)


class Pipeline:
    """Trains a model whose stages are the ranks of a communicator, in their order; all of them make one.

    A batch is micro_batches micro-batches, size of the communicator or more, whose gradients are summed. The
    batches follow each other without a pause, and the weights with a delay of one:
    w(t + 1) = w(t) - lr · gradient_t(w(t - 1)), or what `rule` makes of that gradient. Both passes of a
    micro-batch see the same version, and two versions suffice, however many stages there are.

    forward(weights, x) → (y, saved) and backward(weights, saved, gradient) → (gradient of x, gradients of the
    weights, a list like them) are this stage's passes; y and the gradient of x are contiguous, and left alone
    once returned. saved may hold x and y. weights: this stage's arrays of one floating dtype, copied.
    receives: shape and dtype of the x that comes from the stage before, alike for all micro-batches; not on
    rank 0.
    """

    @one_call_to_make
    def __init__(
        self,
        comm: Comm,
        forward: Callable[[list[_Array], _Array], tuple[_Array, Any]],
        backward: Callable[[list[_Array], Any, _Array], tuple[_Array | None, Sequence[_Array]]],
        weights: Sequence[_Array],
        rule: Rule,
        *,
        micro_batches: int,
        receives: tuple[tuple[int, ...], DTypeLike] | None = None,
    ) -> None:
        try:
            dtype = dtype_of(weights)
            if (receives is None) != (comm.rank == 0):
                raise ValueError("receives is for every rank but 0: the shape and dtype of what comes there")
        except Exception:
            comm.refuse("all_gather")
            raise
        agree(comm, micro_batches=micro_batches)
        if micro_batches < comm.size:
            why = f"micro_batches is {micro_batches}; {comm.size} stages need {comm.size} or more"
            raise agreed(ValueError(why))
        self._comm, self._forward_pass, self._backward_pass = comm, forward, backward
        self.rule, self.micro_batches = rule, micro_batches
        self.batches = self._begun = 0  # that the weights have learnt from: now, and when this run began

        first = np.concatenate([np.ravel(each) for each in weights])
        self._flat = [first, np.empty_like(first)]  # w(t) is in _flat[t % 2]
        self._versions = [views(flat, weights) for flat in self._flat]
        self._sum = np.zeros_like(first)
        self._sums = views(self._sum, weights)
        self._state = [np.zeros_like(first) for _ in range(rule.num_states)]
        self._scratch = scratch_for(dtype)

        self._in_flight = comm.size - comm.rank
        shape, of = receives or ((), dtype)
        self._inputs = [np.empty(shape, of) for _ in range(self._in_flight)]
        self._returns: list[_Array] = []  # gradients that come back, by turns
        self._saved: dict[int, tuple[Any, _Array | None]] = {}
        self._sending: dict[tuple[int, int], Transfer] = {}  # by tag and micro-batch

    @property
    def weights(self) -> list[_Array]:
        """This stage's newest weights: views, which the next batches change."""
        return self._versions[self.batches % 2]

    @property
    def weights_nbytes(self) -> int:
        """Bytes of both versions on this rank."""
        return sum(flat.nbytes for flat in self._flat)

    @one_call
    def run(
        self,
        batches: int,
        *,
        inputs: Callable[[int], _Array] | None = None,
        loss_gradient: Callable[[int, _Array], _Array] | None = None,
    ) -> None:
        """Collective: learn from so many more batches; several runs come to the same as one.

        inputs(i): x of micro-batch i, asked on rank 0; loss_gradient(i, y): the gradient of its loss by the
        last stage's y, asked on the last rank. i counts from 0 in each run. The pipeline is empty at the end.
        ValueError where an argument is wrong. Where a rank's passes raise the others get `Aborted`, and the
        communicator is over.
        """
        try:
            if inputs is None and self._comm.rank == 0:
                raise ValueError("rank 0 needs inputs")
            if loss_gradient is None and self._is_last:
                raise ValueError(f"rank {self._comm.rank}, the last one, needs loss_gradient")
        except ValueError:
            self._comm.refuse("all_gather")
            raise
        agree(self._comm, batches=batches)
        if batches < 0:
            raise agreed(ValueError(f"batches is {batches}; it is 0 or more"))
        self._begun = self.batches
        count = batches * self.micro_batches
        try:
            self._learn(count, inputs, loss_gradient)
        except shmring.Error:
            raise
        except Exception as error:  # the other stages would wait for what this one no longer sends
            self._comm.abort(f"stage {self._comm.rank}: {type(error).__name__}: {error}"[:150])
            raise

    def _learn(
        self,
        count: int,
        inputs: Callable[[int], _Array] | None,
        loss_gradient: Callable[[int, _Array], _Array] | None,
    ) -> None:
        for kind, number in one_forward_one_backward(self._comm.rank, self._comm.size, count):
            if kind == "forward":
                self._forward(number, inputs, loss_gradient)
            else:
                self._backward(number)
                if (number + 1) % self.micro_batches == 0:
                    self._update()
        for transfer in self._sending.values():
            transfer.wait()
        self._sending.clear()

    @property
    def _is_last(self) -> bool:
        return self._comm.rank == self._comm.size - 1

    def _forward(
        self,
        number: int,
        inputs: Callable[[int], _Array] | None,
        loss_gradient: Callable[[int, _Array], _Array] | None,
    ) -> None:
        if inputs is not None and self._comm.rank == 0:
            x = inputs(number)
        else:
            x = self._inputs[number % self._in_flight]
            self._comm.recv(x, self._comm.rank - 1, FORWARD)
        y, saved = self._forward_pass(self._weights_for(number), x)
        if loss_gradient is not None and self._is_last:
            self._saved[number] = saved, loss_gradient(number, y)
            return
        self._saved[number] = saved, None
        self._sending[FORWARD, number] = self._comm.isend(y, self._comm.rank + 1, FORWARD)
        if not self._returns:
            self._returns = [np.empty_like(y) for _ in range(2)]

    def _backward(self, number: int) -> None:
        # Taken long since: the stage before had it when it sent what came here last.
        self._sent(BACKWARD, number - 2)
        saved, gradient = self._saved.pop(number)
        if gradient is None:
            gradient = self._returns[number % 2]  # of y: what came last may still be on its way back as x's
            self._comm.recv(gradient, self._comm.rank + 1, BACKWARD)
            self._sent(FORWARD, number)
        back, gradients = self._backward_pass(self._weights_for(number), saved, gradient)
        if self._comm.rank > 0:
            if back is None:
                raise ValueError("backward gave no gradient of x; only that of rank 0 may do so")
            self._sending[BACKWARD, number] = self._comm.isend(back, self._comm.rank - 1, BACKWARD)
        check_alike(gradients, self._sums, "gradients of the weights")
        for total, part in zip(self._sums, gradients, strict=True):
            np.add(total, part, out=total)

    def _sent(self, tag: int, number: int) -> None:
        if transfer := self._sending.pop((tag, number), None):
            transfer.wait()

    def _update(self) -> None:
        """Write w(t + 1) over w(t - 1): the last pass that used it is done."""
        newest, oldest = self._flat[self.batches % 2], self._flat[(self.batches + 1) % 2]
        oldest[...] = newest
        self.batches += 1
        apply(self.rule, oldest, self._sum, self._state, self._scratch, self.batches)
        self._sum.fill(0)

    def _weights_for(self, number: int) -> list[_Array]:
        return self._versions[version_of(self._begun + number // self.micro_batches) % 2]
