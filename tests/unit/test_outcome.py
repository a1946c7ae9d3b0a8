"""The failure of a rank: how it travels to the launcher, and which of several failures came first."""

import itertools
import pickle

import pytest

import shmring
from shmring._outcome import Failure, Tier, first_of, tier_of_error


def chain(*errors):
    """Return the last error; each one was raised while the one before was handled."""
    for first, last in itertools.pairwise(errors):
        last.__context__ = first
    return errors[-1]


def hidden(error):
    """Return the error as `raise error from None` raises it."""
    error.__suppress_context__ = True
    return error


OWN, MISMATCH = ValueError("mine"), shmring.Mismatch("not the same")
GONE, OTHER_GONE = shmring.RankFailed("rank 0", rank=0), shmring.RankFailed("rank 2", rank=2)
LOOP = ValueError("loop")
LOOP.__context__ = LOOP


@pytest.mark.parametrize(
    ("error", "tier"),
    [
        (OWN, Tier.OWN),
        (LOOP, Tier.OWN),
        (MISMATCH, Tier.COMMON),
        (GONE, Tier.COMMON),
        (OTHER_GONE, Tier.CONSEQUENCE),
        (shmring.Aborted("by rank 2", rank=2), Tier.CONSEQUENCE),
        (chain(KeyError("k"), shmring.Mismatch("x")), Tier.CHAINED),
        (hidden(chain(KeyError("k"), shmring.Mismatch("x"))), Tier.COMMON),
        (chain(shmring.Mismatch("x"), KeyError("k")), Tier.COMMON),
        (chain(OTHER_GONE, ValueError("giving up")), Tier.CONSEQUENCE),
        (chain(KeyError("k"), shmring.RankFailed("rank 2", rank=2)), Tier.CONSEQUENCE),
        (ExceptionGroup("tasks", [OTHER_GONE, ExceptionGroup("more", [OTHER_GONE])]), Tier.CONSEQUENCE),
        (ExceptionGroup("tasks", [OTHER_GONE, MISMATCH]), Tier.COMMON),
        (ExceptionGroup("tasks", [OTHER_GONE, OWN]), Tier.OWN),
    ],
)
def test_the_tier_of_an_error_in_rank_0(error, tier):
    assert tier_of_error(error, 0) is tier


def test_the_first_failure_is_that_of_the_lowest_tier_then_the_earliest():
    failures = {
        0: Failure("gone", tier=Tier.CONSEQUENCE, at=1.0),
        1: Failure("late", tier=Tier.OWN, at=3.0),
        2: Failure("early", tier=Tier.OWN, at=2.0),
    }
    assert first_of(failures) == 2


class OddError(Exception):
    def __init__(self, number, text):
        super().__init__(text)


class ClosedError(Exception):
    def __setattr__(self, name, value):
        raise ValueError("this one takes nothing")


class EmptyError(Exception):
    def __len__(self):
        return 0


def travelled(error):
    """Return what the launcher raises for an error that was raised in rank 3."""
    try:
        raise error
    except BaseException as caught:
        return pickle.loads(pickle.dumps(Failure.of(caught, 3))).exception(3)


def test_the_text_arrives_even_if_nothing_else_does():
    assert str(travelled(OddError(1, "words"))).endswith("OddError: words")
    assert type(travelled(ClosedError("takes no attributes"))) is ClosedError
    assert type(travelled(EmptyError())) is EmptyError


def test_an_exit_is_raised_as_the_end_of_its_rank():
    error = travelled(SystemExit(3))
    assert (type(error), error.rank) == (shmring.RankFailed, 3)
    assert error.cause == "SystemExit: 3 before it returned a result"


def test_a_failure_that_travels_twice_keeps_its_tier_and_its_traceback():
    try:
        try:
            {}["the cause"]
        finally:
            raise shmring.Mismatch("not the same")
    except shmring.Mismatch as error:
        failure = Failure.of(error, 3)
    for _ in range(2):
        failure = pickle.loads(pickle.dumps(failure))
        assert failure.tier is Tier.CHAINED
        assert "KeyError: 'the cause'" in failure.traceback
    (note,) = failure.exception(3, " of 4").__notes__
    assert note.startswith("\nRaised in rank 3 of 4:\n")
