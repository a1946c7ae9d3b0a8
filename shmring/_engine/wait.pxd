# Run a call to its end, and poll the conditions that end a wait early.

from libc.stdint cimport uint64_t

from .._core.group cimport Call, Group
from .._core.segment cimport sr_waitset

cdef enum:
    SHORT_SLEEP_NS = 100000     # shortest sleep if a wait may end by a flag or a connection: no sleep ends by both
    LONG_SLEEP_NS = 2000000     # longest such sleep, the interval of polls for dead ranks
    WAIT_PER_SLEEP = 16         # such a sleep lasts 1/16 of the wait so far
    MOST_WATCHED = 16           # ranks whose death ends a sleep: the kernel takes 0.3 us for each
    BRIEF_NBYTES = 65536        # a call or message up to this size takes less time than releasing and taking the GIL

cdef inline uint64_t sleep_ns_after(uint64_t waited_ns) noexcept nogil:
    return min(<uint64_t> LONG_SLEEP_NS, max(<uint64_t> SHORT_SLEEP_NS, waited_ns // WAIT_PER_SLEEP))


cdef int step_to_end(Group *g, Call *c) noexcept nogil
cdef int try_briefly(Group *g, Call *c) noexcept nogil
cdef bint sleep_until_death(Group *g, sr_waitset *waitset, uint64_t longest_ns) noexcept nogil
cdef int poll_call(Group *g, Call *c, uint64_t now) noexcept nogil
