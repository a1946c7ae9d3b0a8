# When a rank that waits long speaks of it: never soon, then at doubling times.

import contextlib

from libc.stdint cimport uint64_t

from .._core.group cimport sr_flag_load, sr_now_ns
from .._diagnostics.flight_recorder cimport SR_WAITS
from .state cimport State

from .._diagnostics import stall_warning

assert <int> SR_WAITS <= <int> MOST_PLACES


cdef class Stalls:
    """What one rank has said of its waits, and when the next word is due."""

    def warn_after(self, State state, double limit_s):
        """From here on waits longer than that are told of; 0: none."""
        self.limit_ns = state.g.stall_ns = <uint64_t> (limit_s * 1e9)

    # Asked every few ms by who waits.
    cdef int heed(self, object engine, int place) except -1:
        cdef State state = engine
        cdef uint64_t since = sr_flag_load(&state.g.me.wait[place].since_ns)
        cdef uint64_t now
        if since == 0 or self.limit_ns == 0:
            return 0
        if self.since_ns[place] != since:
            self.since_ns[place] = since
            self.next_ns[place] = since + self.limit_ns
        now = sr_now_ns()
        if now < self.next_ns[place]:
            return 0
        self.next_ns[place] = now + (now - since)
        # Others that have waited about as long are quiet: until shortly before the next word is due.
        if state.flight.take_report_turn(now, now + (now - since) // 4 * 3):
            with contextlib.suppress(Exception):   # what a handler of the log raises is no error of the call
                stall_warning.warn(engine, place, since)
        return 0
