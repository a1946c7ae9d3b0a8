# Running a call to its end, and what may end a wait otherwise. May know: _group.

from libc.stdint cimport uint64_t

from ._group cimport Call, Group

cdef enum:
    NAP_NS = 100000   # where either a flag or the wire may be first: there is no sleep that both end
    BRIEF_NBYTES = 65536        # calls this small are over sooner than the GIL is let go and taken again

cdef int run_steps(Group *g, Call *c) noexcept nogil
cdef int try_briefly(Group *g, Call *c) noexcept nogil
cdef int glance(Group *g, Call *c, uint64_t now) noexcept nogil
