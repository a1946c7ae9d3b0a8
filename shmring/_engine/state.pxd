from libc.stdint cimport uint32_t, uint64_t
from posix.types cimport pid_t

from .._core.group cimport Call, Group
from .._core.segment cimport sr_lane, sr_report
from .._diagnostics.flight_recorder cimport SR_WAITS, Flight


cdef extern from "layout.h" nogil:
    ctypedef struct sr_leave "_Atomic uint32_t":
        pass


cdef void begin_report(Group *g, sr_report *report, bint in_call, uint64_t seq) noexcept nogil
cdef int world_number(Group *g, int rank) noexcept nogil


cdef class State:
    cdef Group g
    cdef readonly double timeout_s        # default timeout of every call, in seconds
    cdef unsigned long call_owner         # the thread in a compound call; 0: none is
    cdef object segment                   # keeps the mapping alive
    cdef readonly Flight flight           # reads the records of all ranks, for errors
    cdef object notifications             # of ranks of other hosts; None if there is one host

    cdef bint may_call(self) noexcept
    cdef sr_report report_of(self, object seq, str reason, str op)
    cdef bint find_block(self, const void *address, size_t nbytes, uint64_t *block, uint64_t *offset) noexcept


cdef int await_same_call(State state, Call *c) except -1
cdef tuple mismatched_calls(State state)
cdef tuple find_remote_mismatch(State state, Call *c)
cdef tuple last_call_of(State state, int rank)
cdef int most_suspect(State state, Call *c) except -1


cdef class Stalls:
    cdef uint64_t[SR_WAITS] since_ns   # by sr_wait_index: start of the current wait
    cdef uint64_t[SR_WAITS] next_ns    # by sr_wait_index: time of its next warning

    cdef int warn_if_due(self, object engine, int index) except -1


cdef class LivenessThread:
    cdef sr_lane *lane
    cdef sr_leave leave_word
    cdef pid_t pid           # of the process that has started the thread; 0: none has
    cdef unsigned long ident
    cdef bint has_ended
    cdef object at_end       # a lock, held until the thread has ended
    cdef list kept           # the object that keeps the lane mapped, until the thread takes it

    cdef int begin(self, sr_lane *lane, object owner) except -1
    cdef int hold_word(self) except -1
    cdef int write_stacks(self) except -1
    cdef int leave(self) except -1
