"""scikit-learn's estimators that learn by `partial_fit`, on the data of all ranks: weights are averaged.

Iterative parameter mixing (McDonald, Hall and Mann 2010): each rank fits some batches of its own, then all go
on from the mean.
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
    """Collective: the estimator's weights become the mean over all ranks, in place; returns the estimator.

    attributes: which, arrays or lists of arrays of floats, alike on all ranks: those of linear models unless
    given; ("coefs_", "intercepts_") for neural networks. weight: this rank's part in the mean, 0 or more, its
    number of samples for instance; where all are 0 nothing changes. Classifiers need the same `classes` in
    their first `partial_fit`. Raises NotFittedError for one that has no weights yet, ValueError for a weight
    below 0 and for SGD with average=..., which keeps other weights beside those.
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
    """Collective: `partial_fit` on this rank's batches; after `every` of them `average`, weighted by samples.

    batches: pairs (X, y). One rank may have more of them than others, which then take part in the means with
    weight 0; none may have none. classes: all labels of all ranks, for classifiers. Returns the estimator,
    which then has the same weights on every rank. Errors as of `average`.
    """
    if every < 1:
        raise ValueError(f"every is {every}; a mean is taken after 1 batch or more")
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
    """Whether any rank had a weight above 0."""
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
