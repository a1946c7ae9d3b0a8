"""Mixed precision: a loss scale that is equal on all ranks, and float32 copies of float16 weights.

See Micikevicius et al. 2018. This module uses only a communicator's public API.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .._arguments import refusing
from .flat import agree, check_arrays, one_call, one_call_to_make

if TYPE_CHECKING:
    from shmring import Comm

__all__ = ["LossScaler", "MasterWeights"]

_LEAST_SCALE, _MOST_SCALE = 2.0**-126, 2.0**126  # in float32 these and their inverses are normal numbers


class LossScaler:
    """A loss scaler that keeps float16 gradients from underflow; all ranks skip the same steps.

    Multiply the loss, or its gradient with respect to the last layer's output, by `scale`; then `unscale` the
    gradients. If any rank has an infinity or a NaN, all ranks skip the step. Making one is collective, with
    the same numbers on all ranks. Use powers of 2, which scale gradients without rounding.

    Parameters
    ----------
    comm : Comm
        The communicator.
    scale : float
        The first scale.
    growth, backoff : float
        Factors of the scale: after growth_interval steps, and after a skipped step. They leave the scale
        between 2**-126 and 2**126, so that float32 has the scale and its inverse.
    growth_interval : int
        Number of consecutive steps of which none is skipped.

    Raises
    ------
    ValueError, OverflowError
        For a wrong number of this rank; the other ranks get `Mismatch`. On all ranks, if a number differs.
    Error
        As `Comm.all_gather`.

    Examples
    --------
    >>> from shmring.methods.precision import LossScaler
    >>> scaler, gradient = LossScaler(comm, scale=4.0), np.full(2, 8.0, "f4")
    >>> scaler.unscale([gradient])
    True
    >>> gradient.tolist()
    [2.0, 2.0]
    """

    @one_call_to_make
    def __init__(
        self,
        comm: Comm,
        *,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        try:
            are_right = 0 < scale < math.inf and growth >= 1 and 0 < backoff < 1 and growth_interval >= 1
        except (TypeError, ValueError):  # one of them is not a number
            are_right = False
        if not are_right:
            comm.refuse("all_gather")
            raise ValueError(
                f"scale {scale!r}, growth {growth!r}, backoff {backoff!r}, "
                f"growth_interval {growth_interval!r}: scale is above 0 and finite, growth 1 or more, "
                "backoff between 0 and 1, growth_interval 1 or more"
            )
        agree(comm, scale=scale, growth=growth, backoff=backoff, growth_interval=growth_interval)
        self.scale = float(scale)  # Another type of number may have less range.
        self.skipped = 0  # steps skipped
        self._growth, self._backoff, self._growth_interval = float(growth), float(backoff), growth_interval
        self._good = 0  # consecutive steps without overflow
        self._overflow = np.zeros((), np.bool_)
        self._agree = comm.plan("all_reduce", self._overflow, "lor")
        self._comm = comm

    @one_call
    def unscale(self, gradients: Sequence[NDArray[Any]], out: Sequence[NDArray[Any]] | None = None) -> bool:
        """Divide by the scale, into `out` or in place; return False if the step must be skipped. Collective.

        The ranks exchange one byte.

        Parameters
        ----------
        gradients : list of numpy.ndarray
            This rank's gradients, or its part of them, before or after the reduction. Their number and shapes
            may differ between ranks.
        out : list of numpy.ndarray, optional
            Writable arrays of the same shapes, of float32 or wider. float16 gradients require it, since they
            would underflow again. If False is returned, they are unchanged.

        Returns
        -------
        bool
            The same on all ranks.

        Raises
        ------
        TypeError, ValueError
            For wrong arrays of this rank. The other ranks get `Mismatch`.
        Error
            As `Comm.all_reduce`.
        """
        with refusing(self._comm, "all_reduce"):
            gradients = list(gradients)  # it may be a generator, but is used several times
            into = gradients if out is None else list(out)
            _check_into(gradients, into)
        self._overflow[...] = not all(map(_is_finite, gradients))
        self._agree()
        if self._overflow:
            self.scale = min(self.scale, max(self.scale * self._backoff, _LEAST_SCALE))
            self._good = 0
            self.skipped += 1
            return False
        with np.errstate(all="ignore"):  # an error would be of one rank only
            for source, target in zip(gradients, into, strict=True):
                np.multiply(source, 1.0 / self.scale, out=target, dtype=target.dtype)
        self._good += 1
        if self._good >= self._growth_interval:
            self.scale = max(self.scale, min(self.scale * self._growth, _MOST_SCALE))
            self._good = 0
        return True


class MasterWeights:
    """float32 copies of 16-bit weights, which accumulate updates too small for 16 bits.

    Parameters
    ----------
    params : list of numpy.ndarray
        The 16-bit weights, float16 or bfloat16. The copies are the attribute `weights`, in the same order.

    Examples
    --------
    >>> from shmring.methods.precision import MasterWeights
    >>> half = np.ones(2, "f2")
    >>> master = MasterWeights([half])
    >>> master.weights[0] -= 0.25
    >>> master.store()
    >>> half.tolist()
    [0.75, 0.75]
    """

    def __init__(self, params: Sequence[NDArray[Any]]) -> None:
        self.params = params
        self.weights = [param.astype(np.float32) for param in params]

    def store(self) -> None:
        """Round `weights` into the 16-bit params, in place.

        Values beyond the range of float16 become infinite.
        """
        for param, weight in zip(self.params, self.weights, strict=True):
            np.copyto(param, weight, casting="unsafe")


def _check_into(gradients: Sequence[NDArray[Any]], into: Sequence[NDArray[Any]]) -> None:
    check_arrays([*gradients, *into])
    if any(each.dtype.itemsize < 4 for each in into):
        raise TypeError("unscaled gradients would underflow in 16 bits: give out= with arrays of float32")
    given, wanted = ([each.shape for each in which] for which in (into, gradients))
    if given != wanted:
        raise ValueError(f"out has arrays of shapes {given}, but the gradients are of {wanted}")
    for source, target in zip(gradients, into, strict=True):
        if target.dtype.kind not in "fc" or not np.can_cast(source.dtype, target.dtype, "same_kind"):
            raise TypeError(
                f"gradients of {source.dtype} cannot be unscaled into {target.dtype}; give out= of floats"
            )
        if not target.flags.writeable:
            raise ValueError("an array to write is read-only; give writable arrays as out=")


def _is_finite(array: NDArray[Any]) -> bool:
    """Return whether all elements are finite. Reads min and max, which need no temporary array."""
    if array.dtype.kind == "c":
        return _is_finite(array.real) and _is_finite(array.imag)
    with np.errstate(invalid="ignore"):
        return math.isfinite(array.max(initial=0)) and math.isfinite(array.min(initial=0))
