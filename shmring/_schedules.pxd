# Ring and tree: explicit algorithms that fold in an order of their own. May know: _group.

from ._group cimport Call, Group

cdef void enter_stepped(Group *g, Call *c) noexcept nogil
cdef int step_ring(Group *g, Call *c) noexcept nogil
cdef int step_tree(Group *g, Call *c) noexcept nogil
