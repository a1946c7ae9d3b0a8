# Binomial tree and double binary tree, which run only if the caller asks for them: they do not fold in rank order.

from .._core.group cimport Call, Group

cdef void enter_tree(Group *g, Call *c) noexcept nogil
cdef int step_tree(Group *g, Call *c) noexcept nogil
cdef void enter_double_tree(Group *g, Call *c) noexcept nogil
cdef int step_double_tree(Group *g, Call *c) noexcept nogil
