
from .._core.group cimport Call, Group

cdef int step_small(Group *g, Call *c) noexcept nogil
