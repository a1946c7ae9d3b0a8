"""Train scikit-learn estimators with `partial_fit` on the data of all ranks by averaging weights.

This is iterative parameter mixing (McDonald, Hall and Mann 2010): each rank fits some batches of its own,
then all ranks continue from the mean of the weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

import shmring

from .._arguments import integer, is_no_list, refusing
from .._config.optional_deps import need

__all__ = ["average", "fit_partial_batches"]

_Estimator = TypeVar("_Estimator")
LINEAR = ("coef_", "intercept_")


def average(
    estimator: _Estimator,
    comm: shmring.Comm,
    *,
    weight: float = 1.0,
    attributes: Sequence[str] = LINEAR,
) -> _Estimator:
    """Average the estimator's weights over all ranks in place; return the estimator. Collective.

    Classifiers need the same `classes` in their first `partial_fit`.

    Parameters
    ----------
    estimator : estimator
        A fitted one, on every rank.
    comm : Comm
        The communicator.
    weight : float
        This rank's weight in the mean, 0 or more, for example its number of samples. If it is 0 on all ranks,
        nothing changes.
    attributes : list of str
        The names of the estimator's weights: float arrays or lists of float arrays, with the same shapes on
        all ranks. The default is for linear models; ("coefs_", "intercepts_") is for neural networks.

    Returns
    -------
    estimator
        The same one.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        For an estimator without the attributes.
    TypeError
        For an attribute that is no float array, or that the estimator computes at each access.
    ValueError
        For a weight below 0 or infinite, and for SGD with average=..., which keeps a second set of weights.
    Error
        As `Comm.all_reduce_many`.

    Examples
    --------
    >>> from sklearn.linear_model import SGDClassifier
    >>> from shmring.adapters import sklearn as shmring_sklearn
    >>> x, y = np.eye(4) + comm.rank, [0, 1, 0, 1]
    >>> model = SGDClassifier(random_state=1).partial_fit(x, y, classes=[0, 1])
    >>> shmring_sklearn.average(model, comm, weight=len(x)) is model
    True
    """
    _average(estimator, comm, weight, attributes)
    return estimator


def fit_partial_batches(
    estimator: _Estimator,
    comm: shmring.Comm,
    batches: Iterable[tuple[Any, Any]],
    *,
    classes: Any = None,
    every: int = 1,
    attributes: Sequence[str] = LINEAR,
) -> _Estimator:
    """Run `partial_fit` on this rank's batches, and `average` after every few of them. Collective.

    The weight of a rank in a mean is the number of its samples since the mean before. If a batch raises an
    exception, the other ranks raise `Mismatch` in their next mean.

    Parameters
    ----------
    estimator : estimator
        One with `partial_fit`, on every rank.
    comm : Comm
        The communicator.
    batches : iterable of tuple
        Pairs (X, y), at least one on each rank. A rank that has fewer than others takes part in the later
        means with weight 0.
    classes : list, optional
        All labels of all ranks, for classifiers.
    every : int
        The number of batches between two means, 1 or more.
    attributes : list of str
        As in `average`.

    Returns
    -------
    estimator
        The same one, with the same weights on every rank.

    Raises
    ------
    TypeError, ValueError, Error
        As `average`.
    Exception
        That of `partial_fit`.

    Examples
    --------
    >>> from sklearn.linear_model import SGDClassifier
    >>> from shmring.adapters import sklearn as shmring_sklearn
    >>> batches = [(np.eye(4) * (i + 1), [0, 1, 0, 1]) for i in range(4)]
    >>> model = SGDClassifier(random_state=1)
    >>> shmring_sklearn.fit_partial_batches(model, comm, batches[comm.rank :: 2], classes=[0, 1]) is model
    True
    """
    with refusing(comm, "all_reduce"):
        every = integer("every", every, "1 batch")
        left = iter(batches)
    known = {} if classes is None else {"classes": classes}
    learning: Any = estimator
    while True:
        samples = 0
        with refusing(comm, "all_reduce", BaseException):
            for inputs, labels in itertools.islice(left, every):
                learning.partial_fit(inputs, labels, **known)
                samples += len(labels)
        if not _average(estimator, comm, samples, attributes):
            return estimator


def _average(estimator: Any, comm: shmring.Comm, weight: float, attributes: Sequence[str]) -> bool:
    """Average; return whether any rank had a weight above 0."""
    with refusing(comm, "all_reduce"):
        arrays = _weights_of(estimator, attributes)
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight is {weight}; it must be a finite number, 0 or more")
        total = np.array([weight], float)
    sums = [array * np.asarray(weight, array.dtype) for array in arrays]
    comm.all_reduce_many([*sums, total])
    if not total[0]:
        return False
    for array, summed in zip(arrays, sums, strict=True):
        np.divide(summed, total[0], out=array, casting="same_kind")
    return True


def _weights_of(estimator: Any, attributes: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    if is_no_list(attributes):
        raise TypeError(f"attributes is {attributes!r}; give a list of names")
    need("sklearn.utils.validation", "sklearn", __name__).check_is_fitted(estimator, attributes)
    if getattr(estimator, "average", False):
        raise ValueError(f"the estimator has average={estimator.average!r}; make it with average=False")
    arrays: list[np.ndarray[Any, Any]] = []
    for name in attributes:
        each, again = _listed(getattr(estimator, name)), _listed(getattr(estimator, name))
        # A property may compute another array at each access: a change of that array would be lost.
        if not all(map(_can_be_averaged, each)) or not all(map(np.may_share_memory, each, again)):
            raise TypeError(
                f"{name} of {type(estimator).__name__} cannot be averaged in place: it must be an array of "
                "floats that can be written to, or a list of such arrays"
            )
        arrays += each
    return arrays


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _can_be_averaged(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.flags.writeable
