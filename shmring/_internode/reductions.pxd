from libc.stddef cimport size_t

from .._core.group cimport Call, Group
from .context cimport InterNode

cdef void start_small(Group *g, Call *c) noexcept nogil
cdef int stage_small(Group *g, Call *c) noexcept nogil
cdef void start_large(Group *g, Call *c) noexcept nogil
cdef int stage_large(Group *g, Call *c) noexcept nogil
cdef void start_reduce_scatter(Group *g, Call *c) noexcept nogil
cdef int stage_reduce_scatter(Group *g, Call *c) noexcept nogil
cdef int gather_fragment(Group *g, Call *c, int number) noexcept nogil
cdef size_t slice_at(InterNode *inter, int host, int local, size_t count) noexcept nogil
cdef size_t fragment_count_of(InterNode *inter, size_t count, size_t itemsize) noexcept nogil
cdef size_t residual_count(InterNode *inter, size_t count) noexcept nogil
