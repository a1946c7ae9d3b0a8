# reduce, scan and exscan as a chain from rank to rank.

from .._core.group cimport Call, Group

cdef bint may_be_chain(const Group *g, const Call *c) noexcept nogil
cdef void enter_chain(Group *g, Call *c) noexcept nogil
cdef int step_chain(Group *g, Call *c) noexcept nogil
