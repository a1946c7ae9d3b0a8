"""Train scikit-learn estimators with `partial_fit` on the data of all ranks by averaging weights.

This is iterative parameter mixing (McDonald, Hall and Mann 2010): each rank fits some batches of its own,
then all ranks continue from the mean of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

import shmring

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
        This rank's weight in the mean, 0 or more, for example its number of samples; if all are 0, nothing
        changes.
    attributes : list of str
        The weights, float arrays or lists of float arrays, with the same shapes on all ranks; by default
        those of linear models; ("coefs_", "intercepts_") for neural networks.

    Returns
    -------
    estimator
        The same one.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        For an estimator without weights.
    ValueError
        For a weight below 0, and for SGD with average=..., which keeps a second set of weights.
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
    """Run `partial_fit` on this rank's batches; after each `every` of them `average` by samples. Collective.

    Parameters
    ----------
    estimator : estimator
        One with `partial_fit`, on every rank.
    comm : Comm
        The communicator.
    batches : iterable of tuple
        Pairs (X, y). A rank may have fewer than others and then joins the means with weight 0; each rank
        needs at least one.
    classes : list, optional
        All labels of all ranks, for classifiers.
    every : int
        Number of batches between two means.
    attributes : list of str
        As in `average`.

    Returns
    -------
    estimator
        The same one. Its weights are then the same on every rank.

    Raises
    ------
    ValueError, Error
        As `average`.

    Examples
    --------
    >>> from sklearn.linear_model import SGDClassifier
    >>> from shmring.adapters import sklearn as shmring_sklearn
    >>> batches = [(np.eye(4) * (i + 1), [0, 1, 0, 1]) for i in range(4)]
    >>> model = SGDClassifier(random_state=1)
    >>> shmring_sklearn.fit_partial_batches(model, comm, batches[comm.rank :: 2], classes=[0, 1]) is model
    True
    """
    if every < 1:
        raise ValueError(f"every is {every}; it must be 1 batch or more")
    known = {} if classes is None else {"classes": classes}
    left = iter(batches)
    learning: Any = estimator
    while True:
        samples = 0
        for images, labels in itertools.islice(left, every):
            learning.partial_fit(images, labels, **known)
            samples += len(labels)
        if not _average(estimator, comm, samples, attributes):
            return estimator


def _average(estimator: Any, comm: shmring.Comm, weight: float, attributes: Sequence[str]) -> bool:
    """Average; return whether any rank had a weight above 0."""
    try:
        arrays = _weights_of(estimator, attributes)
        if not weight >= 0:
            raise ValueError(f"weight is {weight}; it must be 0 or more")
    except (TypeError, ValueError):
        comm.refuse("all_reduce")
        raise
    total = np.array([weight], float)
    sums = [array * np.asarray(weight, array.dtype) for array in arrays]
    comm.all_reduce_many([*sums, total])
    if not total[0]:
        return False
    for array, summed in zip(arrays, sums, strict=True):
        np.divide(summed, total[0], out=array, casting="same_kind")
    return True


def _weights_of(estimator: Any, attributes: Sequence[str]) -> list[Any]:
    need("sklearn.utils.validation", "sklearn", __name__).check_is_fitted(estimator, attributes)
    if getattr(estimator, "average", False):
        raise ValueError(f"the estimator has average={estimator.average!r}; make it with average=False")
    found = (getattr(estimator, name) for name in attributes)
    return [array for each in found for array in (each if isinstance(each, list) else [each])]
