
from libc.stddef cimport size_t

from .._core.group cimport Call, Group
from .context cimport Leg

cdef int step_large(Group *g, Call *c) noexcept nogil
cdef int gather_stretch(Group *g, Call *c, int number) noexcept nogil
cdef size_t slice_at(Leg *leg, int node, int local, size_t count) noexcept nogil
cdef size_t stretch_count_of(Leg *leg, size_t count, size_t itemsize) noexcept nogil
cdef size_t residual_count(Leg *leg, size_t count) noexcept nogil
