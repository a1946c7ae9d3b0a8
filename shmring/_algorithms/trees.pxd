# Binomial tree and double binary tree: explicit algorithms that fold in an order of their own.

from .._core.group cimport Call, Group

cdef void enter_tree(Group *g, Call *c) noexcept nogil
cdef int step_tree(Group *g, Call *c) noexcept nogil
cdef void enter_double_tree(Group *g, Call *c) noexcept nogil
cdef int step_double_tree(Group *g, Call *c) noexcept nogil
