"""Waits of tests and of ranks end before the watchdog: one that hangs fails its test, and not the session."""

import faulthandler
import math

import pytest
import waiting
from ranks import Died, until_stopped, until_there

import shmring


@pytest.fixture
def no_time_is_left(monkeypatch):
    return lambda: monkeypatch.setattr(waiting, "RESERVE_S", math.inf)


def give_up(comm, path):
    waiting.RESERVE_S = math.inf
    until_there(path)


def test_a_rank_that_waits_in_vain_raises(three, tmp_path):
    for error in three.outcomes(give_up, tmp_path / "missing"):
        assert isinstance(error, AssertionError)
        assert str(error) == f"waited in vain: there is a file {tmp_path}/missing"


def hang_but_for_rank_1(comm, path):
    faulthandler.disable()  # the stacks of these ranks interest nobody
    if comm.rank != 1:
        until_there(path)
    return comm.rank


def test_a_test_that_waits_in_vain_kills_the_ranks(three, tmp_path, no_time_is_left):
    three.begin(hang_but_for_rank_1, tmp_path / "missing")
    no_time_is_left()
    with pytest.raises(AssertionError, match=r"waited in vain: there is a file .*/never"):
        until_there(tmp_path / "never", three)
    outcomes = three.answers()
    assert (type(outcomes[0]), type(outcomes[2])) == (Died, Died)


def test_a_rank_that_does_not_answer_fails_the_test(three, tmp_path, no_time_is_left):
    three.begin(hang_but_for_rank_1, tmp_path / "missing")
    assert three.answers(among=(1,)) == [1]
    no_time_is_left()
    with pytest.raises(AssertionError, match=r"rank 0 of 3 has not answered in time; all: \{1: 1\}"):
        three.answers(among=(0,))


def raise_on_rank_1(comm, path):
    if comm.rank == 1:
        raise ValueError("there is no file to come")
    until_there(path)


def test_a_wait_for_ranks_ends_with_their_error(three, tmp_path):
    three.begin(raise_on_rank_1, tmp_path / "missing")
    with pytest.raises(ValueError, match="no file to come"):
        until_there(tmp_path / "never", three)
    (tmp_path / "missing").touch()
    assert [type(outcome) for outcome in three.answers()] == [type(None), ValueError, type(None)]


def test_a_wait_for_ranks_ends_when_all_have_answered(three, tmp_path):
    three.begin(shmring.Comm.barrier)
    with pytest.raises(AssertionError, match=r"all ranks have answered, and .* there is a file"):
        until_there(tmp_path / "never", three)
    assert three.answers() == [None] * 3


def test_a_rank_that_has_ended_is_not_awaited_as_a_stopped_one(three):
    three.kill(1)
    with pytest.raises(AssertionError, match="has ended"):
        until_stopped(three.pid(1))


def left_here(comm):
    return waiting._left_s[0]


def assert_ranks_know_the_time(ranks):
    before_s = waiting._left_s[0]
    found_s = ranks(left_here)
    assert all(waiting._left_s[0] <= left_s <= before_s < math.inf for left_s in found_s)


@pytest.mark.limit(1000)
def test_ranks_know_the_time_that_is_left_to_a_test(world_of):
    assert_ranks_know_the_time(world_of(2))


@pytest.mark.limit(500)
def test_ranks_of_an_earlier_test_know_the_time_of_the_next(world_of):
    assert_ranks_know_the_time(world_of(2))
