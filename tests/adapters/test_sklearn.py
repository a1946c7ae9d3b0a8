"""shmring.adapters.sklearn: means of the ranks' models, whatever data each rank has."""

import numpy as np
import pytest
from engines import needs

import shmring
from shmring.adapters import sklearn as adapter

pytestmark = needs("sklearn")

CLASSES = np.arange(10)


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import scikit-learn before ranks are forked. It takes a second, so not while tests are collected."""
    import sklearn.linear_model
    import sklearn.neural_network  # noqa: F401


def SGDClassifier(**how):
    from sklearn.linear_model import SGDClassifier

    return SGDClassifier(random_state=1, **how)


def MLPClassifier():
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier(random_state=1)


def not_fitted():
    from sklearn.exceptions import NotFittedError

    return NotFittedError


def digits(begin=0, end=None):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images[begin:end] / 16, labels[begin:end]


def fitted(kind, rank):
    """As rank `rank` has it, having seen 40 samples more than the one before."""
    return kind().partial_fit(*digits(100 * rank, 140 * rank + 40), classes=CLASSES)


def check_average(comm, kind, attributes, weights):
    estimator = fitted(kind, comm.rank)
    used = {} if weights is None else {"weight": weights[comm.rank]}
    assert adapter.average(estimator, comm, attributes=attributes, **used) is estimator
    everybody = [fitted(kind, rank) for rank in range(comm.size)]
    for name in attributes:
        for number, found in enumerate(listed(estimator, name)):
            expected = np.average([listed(one, name)[number] for one in everybody], axis=0, weights=weights)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    estimator.partial_fit(*digits(0, 50))  # continues from there
    assert estimator.predict(digits(0, 5)[0]).shape == (5,)


def listed(estimator, name):
    found = getattr(estimator, name)
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [(SGDClassifier, ("coef_", "intercept_")), (MLPClassifier, ("coefs_", "intercepts_"))],
)
@pytest.mark.parametrize("weights", [None, (3, 0.5, 0)])
def test_average_is_the_weighted_mean(world_of, kind, attributes, weights):
    world_of(3)(check_average, kind, attributes, weights)


def leave_as_it_is(comm):
    estimator = fitted(SGDClassifier, comm.rank)
    before = estimator.coef_.copy()
    adapter.average(estimator, comm, weight=0)
    assert (estimator.coef_ == before).all()


def test_weights_that_are_all_0_change_nothing(world_of):
    world_of(2)(leave_as_it_is)


def fit_digits(comm, every):
    """A rank has twice as many batches as the one before."""
    images, labels = digits()
    begin, end = 200 * (2**comm.rank - 1), 200 * (2 ** (comm.rank + 1) - 1)
    batches = [(images[i : i + 20], labels[i : i + 20]) for i in range(begin, end, 20)] * 3
    estimator = SGDClassifier()
    adapter.fit_partial_batches(estimator, comm, iter(batches), classes=CLASSES, every=every)
    return estimator.coef_.tobytes(), estimator.intercept_.tobytes(), estimator.score(*digits(1400))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("every", [1, 7])
def test_ranks_with_different_numbers_of_batches_learn_the_same(world_of, size, every):
    outcomes = world_of(size)(fit_digits, every)
    assert len(set(outcomes)) == 1
    assert outcomes[0][2] > (0.6 if size == 1 else 0.8)  # of 200 images, or of 1400


def fit_lines(comm):
    """Fit halves of the plane on each rank; the mean finds the line through both."""
    from sklearn.linear_model import SGDRegressor

    x = np.random.default_rng(comm.rank).random((400, 1)) + (comm.rank - 1)
    batches = [(x[i::20], 3 * x[i::20, 0] + 1) for i in range(20)] * 10
    estimator = SGDRegressor(learning_rate="constant", eta0=0.1, alpha=0, random_state=1)
    adapter.fit_partial_batches(estimator, comm, batches)
    np.testing.assert_allclose([*estimator.coef_, *estimator.intercept_], [3, 1], atol=0.05)


def test_regressors_need_no_classes(world_of):
    world_of(2)(fit_lines)


def refuse(comm, estimator, weight, error):
    if comm.rank == 0:
        adapter.average(fitted(SGDClassifier, 0), comm)
    with pytest.raises(error):
        adapter.average(estimator, comm, weight=weight)


@pytest.mark.parametrize(
    ("make", "weight", "error"),
    [
        (SGDClassifier, 1, not_fitted),
        (lambda: fitted(SGDClassifier, 0), -1, lambda: ValueError),
        (
            lambda: SGDClassifier(average=True).partial_fit(*digits(0, 20), classes=CLASSES),
            1,
            lambda: ValueError,
        ),
    ],
    ids=["not fitted", "weight", "average"],
)
def test_a_refusal_on_one_rank_is_a_mismatch_on_the_others(world_of, make, weight, error):
    outcomes = world_of(2).outcomes(refuse, make(), weight, error())
    assert isinstance(outcomes[0], shmring.Mismatch), outcomes
    assert outcomes[1] is None, outcomes


def test_every_is_checked():
    with pytest.raises(ValueError, match="every is 0"):
        adapter.fit_partial_batches(SGDClassifier(), None, [], every=0)
