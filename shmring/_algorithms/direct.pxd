# The pipelines that the engine may run; each is an enter and a step, chosen by `choose_pipeline`.

from .._core.group cimport Call, Group

cdef void choose_pipeline(Group *g, Call *c) noexcept nogil
cdef void enter_refused(Group *g, Call *c) noexcept nogil
cdef void enter_nothing(Group *g, Call *c) noexcept nogil
cdef int step_nothing(Group *g, Call *c) noexcept nogil
cdef int step_refused(Group *g, Call *c) noexcept nogil
