# The choice of an algorithm among the ranks of one host, and calls that need none.

from .._core.group cimport Call, Group

cdef void choose_local_algorithm(Group *g, Call *c) noexcept nogil
cdef void enter_refused(Group *g, Call *c) noexcept nogil
cdef void enter_nothing(Group *g, Call *c) noexcept nogil
cdef int step_nothing(Group *g, Call *c) noexcept nogil
cdef int step_refused(Group *g, Call *c) noexcept nogil
