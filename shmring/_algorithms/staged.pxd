# Collectives that copy or fold what other ranks staged, and those that read it in place (zero-copy).

from .._core.group cimport Call, Group

cdef void enter_tiny(Group *g, Call *c) noexcept nogil
cdef int step_tiny(Group *g, Call *c) noexcept nogil
cdef void enter_exchange(Group *g, Call *c) noexcept nogil
cdef int step_exchange(Group *g, Call *c) noexcept nogil
cdef int step_shared(Group *g, Call *c) noexcept nogil
