"""Deadlines: time between two looks that are far apart does not count, other time does."""

import pytest

from shmring._system import deadline
from shmring._system.deadline import LONGEST_POLL_S, Deadline


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves it."""

    class Clock:
        now_s = 1000.0

    monkeypatch.setattr(deadline.time, "monotonic", lambda: Clock.now_s)
    return Clock


def poll(clock, until, for_s, every_s=0.0625):
    for _ in range(round(for_s / every_s)):
        clock.now_s += every_s
        until.is_over()


def test_time_counts_while_it_is_polled(clock):
    until = Deadline(2.0)
    poll(clock, until, 1.0)
    assert until.left_s() == pytest.approx(1.0)
    poll(clock, until, 0.875)
    assert not until.is_over()
    poll(clock, until, 0.2)
    assert until.is_over()
    assert until.left_s() == 0
    assert until.timeout_s == 2.0


def test_a_stop_does_not_count(clock):
    until = Deadline(2.0)
    poll(clock, until, 1.0)
    clock.now_s += 3600
    assert until.left_s() == pytest.approx(1.0 - LONGEST_POLL_S)
    poll(clock, until, 1.0)
    assert until.is_over()


def test_what_a_blocking_call_takes_counts(clock):
    until = Deadline(2.0)
    clock.now_s += 1.5
    until.clock.count()
    assert until.left_s() == pytest.approx(0.5)


def test_a_wait_whose_looks_are_always_late_ends(clock):
    until = Deadline(1.0)
    poll(clock, until, 60.0, every_s=5.0)
    assert until.is_over()


def test_deadlines_of_one_clock(clock):
    until = Deadline(2.0)
    soon, late = until.within(0.5), until.later(1.0)
    assert until.within(5.0).left_s() == pytest.approx(2.0)
    clock.now_s += 60
    assert soon.left_s() == pytest.approx(0.5 - LONGEST_POLL_S)
    assert late.left_s() == pytest.approx(3.0 - LONGEST_POLL_S)
    poll(clock, soon, 0.5)
    assert soon.is_over()
    assert not until.is_over()


def test_without_an_end(clock):
    until = Deadline(float("inf"))
    poll(clock, until, 10)
    assert until.left_s() == float("inf")
