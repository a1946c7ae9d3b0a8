# Collectives that copy or fold what other ranks staged, and those that read it in place (zero-copy).

from libc.stdint cimport uint32_t, uint64_t

from .._core.group cimport Call, Group

cdef enum:
    SHARED_STEP_NBYTES = 1 << 20   # moved in one step, so that other calls get their turn

cdef void enter_tiny(Group *g, Call *c) noexcept nogil
cdef int step_tiny(Group *g, Call *c) noexcept nogil
cdef void enter_exchange(Group *g, Call *c) noexcept nogil
cdef int step_exchange(Group *g, Call *c) noexcept nogil
cdef int step_shared(Group *g, Call *c) noexcept nogil
cdef int find_given(Group *g, Call *c, size_t skip) noexcept nogil
cdef bint lies_in_private(Group *g, Call *c, int giver) noexcept nogil
cdef int read_private(Group *g, Call *c, int giver, unsigned char *there, size_t nbytes) noexcept nogil
