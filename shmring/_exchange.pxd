# Collectives that take what others staged, as it is or folded, and such as read it where it lies. May know: _group.

from libc.stdint cimport uint32_t, uint64_t

from ._group cimport Call, Group

cdef void enter_tiny(Group *g, Call *c) noexcept nogil
cdef int step_tiny(Group *g, Call *c) noexcept nogil
cdef void enter_exchange(Group *g, Call *c) noexcept nogil
cdef int step_exchange(Group *g, Call *c) noexcept nogil
cdef int step_shared(Group *g, Call *c) noexcept nogil
cdef unsigned char *shared_address(Group *g, uint32_t block, int rank, uint64_t offset, size_t nbytes) noexcept nogil
