"""How a gradient changes weights: SGD with momentum, Adam; in place, on any slice of a flat array.

Every operation is elementwise, so however an array is cut into parts, its elements come to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["SGD", "Adam", "Rule", "apply", "scratch_for"]

BLOCK = 1 << 14  # elements that are updated together: some five arrays of it stay in a core's own cache


class Rule(Protocol):
    """What an optimiser is given. `lr` and the like may be changed between steps."""

    @property
    def num_states(self) -> int:
        """How many numbers it remembers for each weight; they begin as 0."""

    def update(
        self,
        weights: NDArray[Any],
        gradient: NDArray[Any],
        state: Sequence[NDArray[Any]],
        scratch: NDArray[Any],
        step: int,
    ) -> None:
        """Change weights and state in place; all arrays are alike in length and dtype. step: 1, 2, 3 …"""


@dataclass
class SGD:
    """v ← momentum · v + g; w ← w - lr · v (Polyak 1964). Made without momentum it never has any."""

    lr: float
    momentum: float = 0.0

    @property
    def num_states(self) -> int:
        return 1 if self.momentum else 0

    def update(
        self,
        weights: NDArray[Any],
        gradient: NDArray[Any],
        state: Sequence[NDArray[Any]],
        scratch: NDArray[Any],
        step: int,
    ) -> None:
        if state:
            (velocity,) = state
            np.multiply(velocity, self.momentum, out=velocity)
            gradient = np.add(velocity, gradient, out=velocity)
        np.multiply(gradient, self.lr, out=scratch)
        np.subtract(weights, scratch, out=weights)


@dataclass
class Adam:
    """Steps by the first moment over the root of the second, both corrected for bias (Kingma and Ba 2015)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def num_states(self) -> int:
        return 2

    def update(
        self,
        weights: NDArray[Any],
        gradient: NDArray[Any],
        state: Sequence[NDArray[Any]],
        scratch: NDArray[Any],
        step: int,
    ) -> None:
        (beta1, beta2), (mean, square) = self.betas, state
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
    """What `apply` needs beside the arrays, to be made once."""
    return np.empty(BLOCK, dtype)


def apply(
    rule: Rule,
    weights: NDArray[Any],
    gradient: NDArray[Any],
    state: Sequence[NDArray[Any]],
    scratch: NDArray[Any],
    step: int,
) -> None:
    """One step of `rule` on 1-d arrays, block by block: the later passes find a block in the cache."""
    for begin in range(0, len(weights), len(scratch)):
        block = slice(begin, begin + len(scratch))
        part = weights[block]
        rule.update(part, gradient[block], [each[block] for each in state], scratch[: len(part)], step)
