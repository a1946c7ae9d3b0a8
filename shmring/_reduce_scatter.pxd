# May know: _group.

from ._group cimport Call, Group

cdef void enter_reduce_scatter(Group *g, Call *c) noexcept nogil
cdef int step_reduce_scatter(Group *g, Call *c) noexcept nogil
