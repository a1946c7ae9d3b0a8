
from libc.stdint cimport uint32_t, uint64_t

from .._core.group cimport Group
from .._core.segment cimport sr_report
from .._diagnostics.flight_recorder cimport Flight


cdef void begin_report(Group *g, sr_report *report, bint in_call, uint64_t seq) noexcept nogil
cdef int world_number(Group *g, int rank) noexcept nogil


cdef class State:
    cdef Group g
    cdef readonly double timeout_s        # default timeout of every call, in seconds
    cdef unsigned long call_owner         # the thread inside a call of several steps; 0: none is
    cdef object segment                   # keeps the mapping alive
    cdef readonly Flight flight           # reads the records of all ranks, for errors

    cdef bint may_call(self) noexcept
    cdef sr_report report_of(self, object seq, str reason, str op)
    cdef bint find_block(self, const void *address, size_t nbytes, uint32_t *block, uint64_t *offset) noexcept
