
from .._core.group cimport Call, Group

cdef int step_reduce_scatter(Group *g, Call *c) noexcept nogil
