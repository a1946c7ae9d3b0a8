# Running a call to its end, and what may end a wait otherwise.

from libc.stdint cimport uint64_t

from .._core.group cimport Call, Group
from .._core.segment cimport sr_waitset

cdef enum:
    SHORT_SLEEP_NS = 100000       # where either a flag or a connection may be first: there is no sleep that both end
    LONG_SLEEP_NS = 2000000       # as often as the dead are looked for
    PATIENCE = 16               # sleeps are this part of how long it has taken so far
    BRIEF_NBYTES = 65536        # calls this small are over sooner than the GIL is let go and taken again

cdef inline uint64_t sleep_ns_after(uint64_t waited_ns) noexcept nogil:
    return min(<uint64_t> LONG_SLEEP_NS, max(<uint64_t> SHORT_SLEEP_NS, waited_ns // PATIENCE))


cdef int run_steps(Group *g, Call *c) noexcept nogil
cdef int try_briefly(Group *g, Call *c) noexcept nogil
cdef bint sleep_until_death(Group *g, sr_waitset *waitset, uint64_t longest_ns) noexcept nogil
cdef int poll_call(Group *g, Call *c, uint64_t now) noexcept nogil
