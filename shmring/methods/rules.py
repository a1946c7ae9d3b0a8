"""Update rules, SGD with momentum and Adam, applied in place to any slice of a flat array.

Every operation is elementwise, so the result has the same bits for any partition of the array. Weights of
float16 are updated in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["SGD", "Adam", "Rule", "apply", "scratch_for"]

BLOCK = 1 << 14  # elements updated together: about five arrays of this size fit into a core's own cache


class Rule(Protocol):
    """The update rule of an optimiser. Numbers such as `lr` may be changed between steps."""

    @property
    def num_states(self) -> int:
        """Number of state values for each weight, fixed when an optimiser is made. They begin as 0."""

    def update(
        self,
        weights: NDArray[Any],
        gradient: NDArray[Any],
        state: Sequence[NDArray[Any]],
        scratch: NDArray[Any],
        step: int,
    ) -> None:
        """Update weights and state in place. All arrays have the same length and dtype.

        Parameters
        ----------
        weights, gradient : numpy.ndarray
            Slices of one dimension; `apply` converts float16 to float32. The rule may change the gradient.
        state : list of numpy.ndarray
            `num_states` arrays.
        scratch : numpy.ndarray
            An array for intermediate values.
        step : int
            The number of the step: 1, 2, 3 …
        """


@dataclass
class SGD:
    """v ← momentum · v + g; w ← w - lr · v (Polyak 1964). With momentum 0 there is no state v.

    Parameters
    ----------
    lr : float
        The learning rate.
    momentum : float
        0 to 1. If it is 0 when an optimiser is made, it must stay 0.

    Examples
    --------
    >>> from shmring.methods.rules import SGD, apply, scratch_for
    >>> weights, scratch = np.ones(2), scratch_for(np.dtype("f8"))
    >>> apply(SGD(0.5), weights, np.ones(2), [], scratch, 1)
    >>> weights
    array([0.5, 0.5])
    """

    lr: float
    momentum: float = 0.0

    @property
    def num_states(self) -> int:
        """Number of state values for each weight: 0 or 1."""
        return 1 if self.momentum else 0

    def update(
        self,
        weights: NDArray[Any],
        gradient: NDArray[Any],
        state: Sequence[NDArray[Any]],
        scratch: NDArray[Any],
        step: int,
    ) -> None:
        """Update weights and state in place.

        Parameters
        ----------
        weights, gradient, state, scratch, step
            As in `Rule.update`.
        """
        if state:
            (velocity,) = state
            np.multiply(velocity, self.momentum, out=velocity)
            gradient = np.add(velocity, gradient, out=velocity)
        np.multiply(gradient, self.lr, out=scratch)
        np.subtract(weights, scratch, out=weights)


@dataclass
class Adam:
    """Adam (Kingma and Ba 2015): steps by the first moment over the root of the second, bias-corrected.

    Parameters
    ----------
    lr : float
        The learning rate.
    betas : tuple of float
        The decay rates of the two moments, 0 or more and less than 1.
    eps : float
        This is added to the root, so that no division is by 0.

    Examples
    --------
    >>> from shmring.methods.rules import Adam
    >>> Adam(lr=0.01).num_states
    2
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def num_states(self) -> int:
        """Number of state values for each weight: 2."""
        return 2

    def update(
        self,
        weights: NDArray[Any],
        gradient: NDArray[Any],
        state: Sequence[NDArray[Any]],
        scratch: NDArray[Any],
        step: int,
    ) -> None:
        """Update weights and state in place.

        Parameters
        ----------
        weights, gradient, state, scratch, step
            As in `Rule.update`.

        Raises
        ------
        TypeError
            For state of float16, in which small squares and eps would be 0.
        """
        (beta1, beta2), (mean, square) = self.betas, state
        if square.dtype == np.float16:
            raise TypeError("Adam's state is float16; use the dtype of scratch_for(weights.dtype), float32")
        np.multiply(gradient, 1.0 - beta1, out=scratch)
        np.multiply(mean, beta1, out=mean)
        np.add(mean, scratch, out=mean)
        np.multiply(gradient, gradient, out=scratch)
        np.multiply(scratch, 1.0 - beta2, out=scratch)
        np.multiply(square, beta2, out=square)
        np.add(square, scratch, out=square)
        np.divide(square, 1.0 - beta2**step, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.add(scratch, self.eps, out=scratch)
        np.divide(mean, scratch, out=scratch)
        np.multiply(scratch, self.lr / (1.0 - beta1**step), out=scratch)
        np.subtract(weights, scratch, out=weights)


def scratch_for(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the scratch array that `apply` needs; make it once. The rule's state has its dtype.

    Parameters
    ----------
    dtype : numpy.dtype
        The dtype of the weights.

    Returns
    -------
    numpy.ndarray
        One block, of the weights' dtype, or of float32 for float16.

    Examples
    --------
    See `SGD`.
    """
    return np.empty(BLOCK, np.promote_types(dtype, np.float32))


def apply(
    rule: Rule,
    weights: NDArray[Any],
    gradient: NDArray[Any],
    state: Sequence[NDArray[Any]],
    scratch: NDArray[Any],
    step: int,
) -> None:
    """Apply one step of `rule` to 1-d arrays, block by block, so that a block stays in the cache.

    float16 weights are updated in float32 and rounded once.

    Parameters
    ----------
    rule : Rule
        The update.
    weights, gradient : numpy.ndarray
        Arrays of one dimension, of the same length and dtype. The weights are updated in place. The rule may
        change the gradient, unless it is float16.
    state : list of numpy.ndarray
        `num_states` arrays of the same length, of scratch's dtype.
    scratch : numpy.ndarray
        The result of `scratch_for`.
    step : int
        The number of the step: 1, 2, 3 …

    Examples
    --------
    See `SGD`.
    """
    is_half = weights.dtype == np.float16
    for begin in range(0, len(weights), len(scratch)):
        block = slice(begin, begin + len(scratch))
        part, by = weights[block], gradient[block]
        if is_half:
            part, by = part.astype(scratch.dtype), by.astype(scratch.dtype)
        rule.update(part, by, [each[block] for each in state], scratch[: len(part)], step)
        if is_half:
            weights[block] = part
