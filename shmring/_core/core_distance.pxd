# The measurement of distance, as a collective of its own or as a part of another one.

from .group cimport Call, Group

cdef void begin_ping(Group *g, Call *c) noexcept nogil
cdef int step_ping(Group *g, Call *c) noexcept nogil
cdef void enter_ping(Group *g, Call *c) noexcept nogil
cdef int step_ping_call(Group *g, Call *c) noexcept nogil
