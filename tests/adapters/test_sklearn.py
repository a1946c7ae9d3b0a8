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


def average_a_view(comm):
    from sklearn.base import BaseEstimator

    class WithAView(BaseEstimator):
        @property
        def part_(self):
            return self.weights_[1:]

        def fit(self, x, y):  # scikit-learn asks for the method
            raise NotImplementedError

    estimator = WithAView()
    estimator.weights_ = np.array([7.0, 1.0, 2.0]) + comm.rank
    adapter.average(estimator, comm, attributes=["part_"])
    return estimator.weights_.tolist()


def test_a_property_that_shows_the_estimator_s_memory_is_averaged(world_of):
    assert world_of(2)(average_a_view) == [[7.0, 1.5, 2.5], [8.0, 1.5, 2.5]]


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


def refuse(comm, estimator, how, error):
    if comm.rank == 0:
        adapter.average(fitted(SGDClassifier, 0), comm)
    with pytest.raises(error):
        adapter.average(estimator, comm, **how)


def with_a_number():
    from sklearn.linear_model import LinearRegression

    return LinearRegression().fit(*digits(0, 20))


def with_a_property():
    from sklearn.svm import SVC

    return SVC(kernel="linear").fit(*digits(0, 20))


def fitted_once():
    return fitted(SGDClassifier, 0)


@pytest.mark.parametrize(
    ("make", "how", "error"),
    [
        (SGDClassifier, {}, not_fitted),
        (fitted_once, {"weight": -1}, lambda: ValueError),
        (fitted_once, {"weight": np.inf}, lambda: ValueError),
        (
            lambda: SGDClassifier(average=True).partial_fit(*digits(0, 20), classes=CLASSES),
            {},
            lambda: ValueError,
        ),
        (fitted_once, {"attributes": "coef_"}, lambda: TypeError),
        (fitted_once, {"attributes": ["classes_"]}, lambda: TypeError),
        (with_a_number, {}, lambda: TypeError),
        (with_a_property, {}, lambda: TypeError),
    ],
    ids=["not fitted", "weight", "infinite", "average", "text", "integers", "number", "property"],
)
def test_a_refusal_on_one_rank_is_a_mismatch_on_the_others(world_of, make, how, error):
    outcomes = world_of(2).outcomes(refuse, make(), how, error())
    assert isinstance(outcomes[0], shmring.Mismatch), outcomes
    assert outcomes[1] is None, outcomes


def fit_a_wrong_batch(comm, number):
    """Rank 1's batch of this number is None."""
    batches = [digits(i, i + 20) for i in range(0, 60, 20)]
    if comm.rank == 1:
        batches[number] = None
    with pytest.raises(TypeError if comm.rank else shmring.Mismatch):
        adapter.fit_partial_batches(SGDClassifier(), comm, batches, classes=CLASSES)


@pytest.mark.parametrize("number", [0, 1])
def test_a_batch_that_fails_on_one_rank_is_a_mismatch_on_the_others(world_of, number):
    world_of(2)(fit_a_wrong_batch, number)


def give_a_wrong_every(comm):
    for every, error in (0, ValueError), (1.5, TypeError):
        with pytest.raises(error, match=f"every is {every}"):
            adapter.fit_partial_batches(SGDClassifier(), comm, [], every=every)


def test_every_is_checked(world_of):
    world_of(1)(give_a_wrong_every)
