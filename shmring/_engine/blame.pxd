# Find the rank that this rank waits for.

from libc.stdint cimport uint64_t

from .._core.group cimport Call, Group
from .state cimport State

cdef enum:
    REPORT_DELAY_NS = 50000000   # a delayed report leaves this time to ranks with a slightly earlier deadline
    MOST_PLACES = 4          # places of waits that may exist at the same time, see enum sr_wait_place


cdef int rank_to_blame(Group *g, Call *c) noexcept nogil
cdef uint64_t report_delay_ns(Group *g, Call *c) noexcept nogil

cdef int await_same_call(State state, Call *c, object notifications) except -1
cdef tuple mismatched_calls(State state)
cdef tuple find_remote_mismatch(State state, Call *c, object notifications)
cdef tuple last_call_of(State state, int rank, object notifications)
cdef int most_suspect(State state, Call *c, object notifications) except -1


cdef class Stalls:
    cdef uint64_t limit_ns
    cdef uint64_t[MOST_PLACES] since_ns   # by place: start of the current wait
    cdef uint64_t[MOST_PLACES] next_ns    # by place: time of its next warning

    cdef int warn_if_due(self, object engine, int place) except -1
