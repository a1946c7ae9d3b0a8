# Recursive halving and doubling: an explicit algorithm that folds in an order of its own.

from .._core.group cimport Call, Group

cdef void enter_halving(Group *g, Call *c) noexcept nogil
cdef int step_halving(Group *g, Call *c) noexcept nogil
