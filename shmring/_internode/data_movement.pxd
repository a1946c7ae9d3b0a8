from .._core.group cimport Call, Group

cdef void start_pairwise(Group *g, Call *c) noexcept nogil
cdef int stage_pairwise(Group *g, Call *c) noexcept nogil
cdef void start_all_gather(Group *g, Call *c) noexcept nogil
cdef int stage_all_gather(Group *g, Call *c) noexcept nogil
cdef void start_broadcast(Group *g, Call *c) noexcept nogil
cdef int stage_small_broadcast(Group *g, Call *c) noexcept nogil
cdef int stage_large_broadcast(Group *g, Call *c) noexcept nogil
