# May know: _group.

from ._group cimport Call, Group

cdef int step_small(Group *g, Call *c) noexcept nogil
