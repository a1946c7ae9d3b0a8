"""Pipeline parallelism with two versions of the weights: each rank has a stage, some of a model's layers.

This is PipeDream-2BW (Narayanan et al. 2021), with the 1F1B schedule of PipeDream (Narayanan et al. 2019).
The module uses only a communicator's public API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._arguments import integer, refusing
from ..errors import agreed
from .flat import abort_after, agree, check_alike, check_rule, dtype_of, one_call, one_call_to_make, views
from .rules import Rule, apply, scratch_for

if TYPE_CHECKING:
    from shmring import Comm, Transfer

__all__ = ["Pipeline", "Step", "one_forward_one_backward", "version_of"]

_Array = NDArray[Any]
FORWARD, BACKWARD = 0, 1  # tags


class Step(NamedTuple):
    """A pass of a stage over a micro-batch.

    Attributes
    ----------
    kind : str
        "forward" or "backward".
    micro_batch : int
        The number of the micro-batch.
    """

    kind: Literal["forward", "backward"]
    micro_batch: int


def one_forward_one_backward(stage: int, num_stages: int, count: int) -> list[Step]:
    """Return the steps of a stage for `count` micro-batches, in the 1F1B schedule.

    A stage first makes as many forward passes as there are stages after it, then alternates forward and
    backward passes, then makes the remaining backward passes. At most num_stages - stage micro-batches are in
    flight at a stage: forward pass done, backward pass not.

    Parameters
    ----------
    stage : int
        The stage's number, from 0.
    num_stages : int
        Number of stages.
    count : int
        Number of micro-batches.

    Returns
    -------
    list of Step
        The steps in their order.

    Examples
    --------
    >>> from shmring.methods.pipeline import one_forward_one_backward
    >>> [(step.kind[0], step.micro_batch) for step in one_forward_one_backward(0, 2, 2)]
    [('f', 0), ('f', 1), ('b', 0), ('b', 1)]
    """
    ahead = min(num_stages - stage - 1, count)
    steps = [Step("forward", number) for number in range(ahead)]
    for number in range(count):
        if ahead + number < count:
            steps.append(Step("forward", ahead + number))
        steps.append(Step("backward", number))
    return steps


def version_of(batch: int) -> int:
    """Return the version of the weights that a batch uses: w(batch - 1), and w(0) for the first batch.

    Parameters
    ----------
    batch : int
        The batch's number, from 0.

    Returns
    -------
    int
        The version's number.

    Examples
    --------
    >>> from shmring.methods.pipeline import version_of
    >>> [version_of(batch) for batch in range(3)]
    [0, 0, 1]
    """
    return max(batch - 1, 0)


class Pipeline:
    """Train a model whose stages are the ranks of a communicator, in rank order. Making one is collective.

    A batch has micro_batches micro-batches, whose gradients are summed. Batches follow each other without a
    flush of the pipeline, and updates are delayed by one batch: w(t + 1) = w(t) - lr · gradient_t(w(t - 1)),
    or the update of `rule` with that gradient. Both passes of a micro-batch use the same version of the
    weights. Two versions suffice for any number of stages.

    Parameters
    ----------
    comm : Comm
        The communicator.
    forward : callable
        forward(weights, x) → (y, saved): this stage's forward pass. y must be contiguous in C order, of one
        shape and dtype for all micro-batches, and must not change after the return. saved may hold x and y.
    backward : callable
        backward(weights, saved, gradient) → (gradient of x, gradients of the weights as a list like weights):
        this stage's backward pass. The gradient of x has x's shape and dtype, must be contiguous in C order,
        and must not change after the return; it may be the received gradient. On rank 0 it may be None.
    weights : list of numpy.ndarray
        This stage's arrays, at least one, of one floating dtype. They are copied. float16 weights are updated
        in float32.
    rule : Rule
        The update.
    micro_batches : int
        At least as many as there are ranks; the same on all ranks.
    receives : tuple, optional
        Shape and dtype of the x from the previous stage, the same for all micro-batches. Not given on rank 0.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument of this rank; the other ranks get `Mismatch`. On all ranks, if micro_batches
        differs or is less than the number of ranks.
    Error
        As `Comm.all_gather`.

    Examples
    --------
    >>> from shmring.methods.pipeline import Pipeline
    >>> from shmring.methods.rules import SGD
    >>> def forward(weights, x):
    ...     return x * weights[0], x
    >>> def backward(weights, x, gradient):
    ...     return gradient * weights[0], [(gradient * x).sum(keepdims=True)]
    >>> receives = None if comm.rank == 0 else ((4,), "f8")
    >>> passes, weights = (forward, backward), [np.ones(1)]
    >>> pipeline = Pipeline(comm, *passes, weights, SGD(0.1), micro_batches=2, receives=receives)
    >>> pipeline.run(3, inputs=lambda i: np.ones(4), loss_gradient=lambda i, y: (y - 0.5) / 8)
    >>> pipeline.batches
    3
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
        with refusing(comm, "all_gather"):
            check_rule(rule)
            dtype = dtype_of(weights)
            micro_batches = integer("micro_batches", micro_batches)
            if (receives is None) != (comm.rank == 0):
                raise ValueError("receives, the shape and dtype of x, is required on all ranks except rank 0")
        agree(comm, micro_batches=micro_batches)
        if micro_batches < comm.size:
            why = f"micro_batches is {micro_batches}; {comm.size} stages need {comm.size} or more"
            raise agreed(ValueError(why))
        self._comm, self._forward_pass, self._backward_pass = comm, forward, backward
        self.rule, self.micro_batches = rule, micro_batches
        self.batches = self._begun = 0  # batches applied to the weights: now, and when this run began

        first = np.concatenate([np.ravel(each) for each in weights])
        self._flat = [first, np.empty_like(first)]  # w(t) is in _flat[t % 2]
        self._versions = [views(flat, weights) for flat in self._flat]
        self._sum = np.zeros_like(first)
        self._sums = views(self._sum, weights)
        self._scratch = scratch_for(dtype)
        self._state = [np.zeros_like(first, self._scratch.dtype) for _ in range(rule.num_states)]

        self._in_flight = comm.size - comm.rank
        shape, of = receives or ((), dtype)
        self._inputs = [np.empty(shape, of) for _ in range(self._in_flight)]
        self._returns: list[_Array] = []  # two buffers for gradients of y, used in turn
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
        """Train on `batches` more batches. Several runs give the same result as one. Collective.

        The pipeline is empty at the end.

        Parameters
        ----------
        batches : int
            Number of batches, the same on all ranks.
        inputs : callable
            inputs(i) returns x of micro-batch i. It is called on rank 0. i counts from 0 in each run.
        loss_gradient : callable
            loss_gradient(i, y) returns the gradient of the loss with respect to the last stage's y, with y's
            shape. It is called on the last rank.

        Raises
        ------
        TypeError, ValueError
            For a wrong argument of this rank; the other ranks get `Mismatch`. On all ranks, if batches
            differs.
        Mismatch, Truncated, ValueError
            If the x that arrives has another dtype or number of elements than `receives`, or the gradient of
            y that arrives another than y. The communicator has then ended.
        Aborted
            If another rank raises one of these errors, or an exception in a pass. The communicator has ended.
        Error
            As `Comm.send`.
        """
        with refusing(self._comm, "all_gather"):
            if inputs is None and self._comm.rank == 0:
                raise ValueError("rank 0 needs inputs")
            if loss_gradient is None and self._is_last:
                raise ValueError(f"rank {self._comm.rank}, the last one, needs loss_gradient")
            batches = integer("batches", batches)
        agree(self._comm, batches=batches)
        if batches < 0:
            raise agreed(ValueError(f"batches is {batches}; it must be 0 or more"))
        self._begun = self.batches
        count = batches * self.micro_batches
        try:
            self._learn(count, inputs, loss_gradient)
        except Exception as error:
            # The other stages would wait for this stage's messages.
            abort_after(self._comm, error, f"stage {self._comm.rank}: {type(error).__name__}: {error}"[:150])
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
            self._receive(x, self._comm.rank - 1, FORWARD)
        y, saved = self._forward_pass(self._weights_for(number), x)
        if loss_gradient is not None and self._is_last:
            gradient = loss_gradient(number, y)
            if gradient is None:
                raise ValueError("loss_gradient returned None; return the gradient with respect to y")
            self._saved[number] = saved, gradient
            return
        self._saved[number] = saved, None
        self._send(FORWARD, number, y, self._comm.rank + 1)
        if not self._returns:
            self._returns = [np.empty_like(y) for _ in range(2)]

    def _backward(self, number: int) -> None:
        # This send has long completed: the previous stage received it before it sent its latest message to
        # this stage.
        self._sent(BACKWARD, number - 2)
        saved, gradient = self._saved.pop(number)
        if gradient is None:
            # The gradient of y. Backward may have returned the other buffer, which may still be in transit.
            gradient = self._returns[number % 2]
            self._receive(gradient, self._comm.rank + 1, BACKWARD)
            self._sent(FORWARD, number)
        back, gradients = self._backward_pass(self._weights_for(number), saved, gradient)
        if self._comm.rank > 0:
            if back is None:
                raise ValueError("backward returned no gradient of x; only rank 0 may omit it")
            self._send(BACKWARD, number, back, self._comm.rank - 1)
        check_alike(gradients, self._sums, "gradients of the weights")
        for total, part in zip(self._sums, gradients, strict=True):
            np.add(total, part, out=total)

    # Context 1: the passes may send messages of the program, which must not be taken for activations.

    def _send(self, tag: int, number: int, x: _Array, dest: int) -> None:
        self._sending[tag, number] = self._comm.isend(x, dest, tag, context=1)

    def _receive(self, x: _Array, source: int, tag: int) -> None:
        """Receive all of x: recv also takes a shorter message, which would leave old values in x."""
        count = self._comm.recv(x, source, tag, context=1).count
        if count != x.size:
            raise ValueError(f"stage {source} sent {count} elements instead of the {x.size} of {x.shape}")

    def _sent(self, tag: int, number: int) -> None:
        if transfer := self._sending.pop((tag, number), None):
            transfer.wait()

    def _update(self) -> None:
        """Write w(t + 1) over w(t - 1), whose last pass is done."""
        newest, oldest = self._flat[self.batches % 2], self._flat[(self.batches + 1) % 2]
        oldest[...] = newest
        self.batches += 1
        apply(self.rule, oldest, self._sum, self._state, self._scratch, self.batches)
        self._sum.fill(0)

    def _weights_for(self, number: int) -> list[_Array]:
        return self._versions[version_of(self._begun + number // self.micro_batches) % 2]
