from libc.stdint cimport uint64_t

from .._core cimport numpy_api as cnp
from .fused cimport FusedCollectives


cdef class Slots:
    cdef readonly cnp.ndarray own, every
    cdef int size

    cdef void put(self, object frame) noexcept
    cdef uint64_t largest(self) noexcept
    cdef list frames(self)


cdef class ObjectCollectives(FusedCollectives):
    cdef Slots slots   # None before the first call

    cdef Slots slots_of_objects(self)
    cdef object frame_of(self, int kind, object item, object root, bint all_give)
