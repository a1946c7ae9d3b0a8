"""Waits of a test and of its ranks, which end with an AssertionError before the watchdog ends the session.

The watchdog of the running test says how much time is left. It does so in memory that ranks share: most of
them were forked before the test began.
"""

import math
import mmap
import os
import time

# A test's last seconds, for its own errors: ranks show their stacks and are killed, and fixtures end.
RESERVE_S = 20
# A rank's wait ends earlier than that of the test for this rank's answer.
HEAD_START_S = 5
LONGEST_S = 100  # of a wait; the only limit in a process that was not forked from pytest's
INTERVAL_S = 0.005

_pid = os.getpid()
_left_s = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
_left_s[0] = math.inf  # no watchdog is known


def set_left_s(left_s):
    _left_s[0] = left_s


def counted_s():
    """Return the time of the running test, in seconds, as its watchdog counts it, here or on a forked rank.

    Assertions that something comes soon take this time: it does not pass while the machine stands still.
    """
    return -_left_s[0]


def is_time_up():
    """Return whether the waits of this process are to end, so that its test ends before the watchdog."""
    return _left_s[0] < (RESERVE_S if os.getpid() == _pid else RESERVE_S + HEAD_START_S)


def wait_until(condition, what, ranks=None):
    """Block until condition() is true, and return its value.

    what: the condition in words. ranks: Ranks that are to make it true as they carry out an order; an error
    that one of them answers ends the wait, and so do the answers of all.
    """
    until = time.monotonic() + LONGEST_S
    while not (found := condition()):
        if is_time_up() or time.monotonic() > until:
            if ranks is not None:
                ranks.show_and_kill()
            raise AssertionError(f"waited in vain: {what}")
        if ranks is not None and ranks.check_early_answers() and not condition():
            raise AssertionError(f"all ranks have answered, and there is no more to wait for: {what}")
        time.sleep(INTERVAL_S)
    return found
