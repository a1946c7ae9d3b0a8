# May know: _group.

from ._group cimport Call, Group

cdef void enter_small(Group *g, Call *c) noexcept nogil
cdef int step_small(Group *g, Call *c) noexcept nogil
