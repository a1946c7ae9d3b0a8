# The steps that a call of ranks of several hosts takes within this one: each is a call of the local ranks.

from libc.stddef cimport size_t

from .._core.group cimport Call, Group


cdef Call *new_local(Group *g, Call *c, int kind, size_t count) noexcept nogil
cdef void begin_local(Group *g, Call *c) noexcept nogil
cdef int meet(Group *g, Call *c) noexcept nogil
cdef int step_internode(Group *g, Call *c, void (*start)(Group *, Call *) noexcept nogil,
                        int (*stage)(Group *, Call *) noexcept nogil) noexcept nogil
cdef int finish_internode(Group *g, Call *c) noexcept nogil
