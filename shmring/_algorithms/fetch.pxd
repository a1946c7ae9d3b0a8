# all_reduce of private arrays without staging.

from .._core.group cimport Call, Group

cdef int step_fetched(Group *g, Call *c) noexcept nogil
