"""Deadlines of waits in Python. Time during which the process was stopped does not count."""

from __future__ import annotations

import time

LONGEST_POLL_S = 0.1


class Clock:
    """Seconds during which this process ran, for waits that read the clock at least every LONGEST_POLL_S.

    If more time lies between two readings, the process did not run between them: it was stopped (SIGSTOP, a
    frozen cgroup, a debugger), or got no CPU. The excess does not count, so that a job goes on when it is
    continued. Calls in C do the same, see `sr_time_away`. A clock belongs to one thread.
    """

    def __init__(self) -> None:
        self._read_s = time.monotonic()
        self._away_s = 0.0

    def now_s(self) -> float:
        now_s = time.monotonic()
        self._away_s += max(0.0, now_s - self._read_s - LONGEST_POLL_S)
        self._read_s = now_s
        return now_s - self._away_s

    def count(self) -> None:
        """Count all time since the last reading: a call took it that blocks and cannot read the clock."""
        self._read_s = time.monotonic()


class Deadline:
    """The end of a wait. The wait polls `left_s` or `is_over` at least every LONGEST_POLL_S.

    timeout_s: the timeout that the deadline was made with. Messages give this number, not the rest of it.
    """

    def __init__(self, timeout_s: float, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.timeout_s = timeout_s
        self.at_s = self.clock.now_s() + timeout_s  # by the clock

    def left_s(self) -> float:
        return max(0.0, self.at_s - self.clock.now_s())

    def is_over(self) -> bool:
        return self.left_s() <= 0

    def within(self, timeout_s: float) -> Deadline:
        """Return the earlier of this deadline and `timeout_s` from now."""
        return Deadline(min(self.left_s(), timeout_s), self.clock)

    def later(self, by_s: float) -> Deadline:
        """Return this deadline moved by `by_s`."""
        return Deadline(self.at_s - self.clock.now_s() + by_s, self.clock)
