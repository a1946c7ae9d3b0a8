# Recursive halving and doubling, which runs only if the caller asks for it: it does not fold in rank order.

from .._core.group cimport Call, Group

cdef void enter_halving(Group *g, Call *c) noexcept nogil
cdef int step_halving(Group *g, Call *c) noexcept nogil
