# Publish the waits of this rank, and read those of other ranks.

from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from .._core.group cimport Call, Group
from .._core.segment cimport sr_flag_load, sr_flag_set, sr_header, sr_lane, sr_now_ns, sr_record, sr_wait
from .._core.trace cimport Trace


cdef extern from "layout.h" nogil:
    cdef enum:
        SR_WAIT_CALL, SR_WAIT_MESSAGE, SR_WAIT_LOCK, SR_WAITS
        SR_IN_CALL, SR_IN_SEND, SR_IN_RECV, SR_IN_PROBE, SR_AT_LOCK, SR_WAIT_KINDS
        SR_STACKS_NBYTES


cdef enum:
    ANYBODY = -1   # as the awaited rank


# Publish a wait once it has become long. Calling this again for the same wait does nothing.
cdef inline void begin_wait(Group *g, int index, int kind, uint64_t since_ns, int awaited) noexcept nogil:
    cdef sr_wait *wait = &g.me.wait[index]
    if sr_flag_load(&wait.since_ns) == since_ns:
        return
    sr_flag_set(&wait.since_ns, 0)
    sr_flag_set(&wait.until_ns, 0)
    sr_flag_set(&wait.seq, g.recorded.seq if kind == SR_IN_CALL else 0)
    sr_flag_set(&wait.what, <uint64_t> kind << 32 | <uint32_t> awaited)
    sr_flag_set(&wait.since_ns, since_ns)


# As begin_wait, for the awaited flag of a call. Other ranks see when that flag has been reached.
cdef inline void begin_call_wait(Group *g, const Call *c, uint64_t since_ns) noexcept nogil:
    cdef sr_wait *wait = &g.me.wait[SR_WAIT_CALL]
    if sr_flag_load(&wait.since_ns) == since_ns:
        return
    sr_flag_set(&wait.since_ns, 0)
    sr_flag_set(&wait.flag, <uintptr_t> c.awaited.flag - <uintptr_t> g.header)
    sr_flag_set(&wait.target, c.awaited.target)
    begin_wait(g, SR_WAIT_CALL, SR_IN_CALL, since_ns, c.awaited.rank)


# True if the published wait is for the awaited flag of this call.
cdef inline bint is_wait_of(Group *g, const Call *c) noexcept nogil:
    cdef sr_wait *wait = &g.me.wait[SR_WAIT_CALL]
    return (sr_flag_load(&wait.flag) == <uintptr_t> c.awaited.flag - <uintptr_t> g.header
            and sr_flag_load(&wait.target) == c.awaited.target and sr_flag_load(&wait.seq) == g.recorded.seq)


# Update the rank that the published wait is for.
cdef inline void correct_wait(Group *g, int index, int kind, int awaited) noexcept nogil:
    cdef sr_wait *wait = &g.me.wait[index]
    if sr_flag_load(&wait.since_ns) != 0:
        sr_flag_set(&wait.what, <uint64_t> kind << 32 | <uint32_t> awaited)


# End a wait, whether or not it was published.
cdef inline void end_wait(Group *g, int index) noexcept nogil:
    if sr_flag_load(&g.me.wait[index].since_ns) != 0:
        sr_flag_set(&g.me.wait[index].since_ns, 0)


# Record the time when this rank gave up its call. The wait stays readable.
cdef inline void give_up_wait(Group *g) noexcept nogil:
    cdef sr_wait *wait = &g.me.wait[SR_WAIT_CALL]
    if sr_flag_load(&wait.since_ns) != 0:
        sr_flag_set(&wait.until_ns, sr_now_ns())


cdef const char *name_in_record(const sr_record *record) noexcept nogil
cdef const char *name_in_fingerprint(uint64_t fingerprint) noexcept nogil


cdef class Flight:
    cdef sr_header *header
    cdef object memory           # keeps the header mapped
    cdef readonly int nranks

    cdef sr_lane *lane(self, int rank) except NULL
    cdef uint64_t last_recorded(self, sr_lane *lane) noexcept
    cdef bint is_over(self, const sr_wait *wait) noexcept


cdef class TraceBuffer:
    cdef Trace calls, messages
    cdef bint is_in_use          # an engine records in it
