from .._core.group cimport Call, Group

cdef void choose_algorithm_across(Group *g, Call *c) noexcept nogil
cdef void enter_refused_across(Group *g, Call *c) noexcept nogil
cdef int step_refused_across(Group *g, Call *c) noexcept nogil
