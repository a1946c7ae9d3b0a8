# Collectives that take what others staged, as it is or folded, and zero-copy. May know: _group.

from ._group cimport Call, Group

cdef void enter_tiny(Group *g, Call *c) noexcept nogil
cdef int step_tiny(Group *g, Call *c) noexcept nogil
cdef void enter_exchange(Group *g, Call *c) noexcept nogil
cdef int step_exchange(Group *g, Call *c) noexcept nogil
cdef int step_shared(Group *g, Call *c) noexcept nogil
