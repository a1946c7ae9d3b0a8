from libc.stdint cimport uint64_t

from .._core cimport numpy_api as cnp


cdef class Slots:
    cdef readonly cnp.ndarray own, every
    cdef int size

    cdef void put(self, object frame) noexcept
    cdef uint64_t largest(self) noexcept
    cdef list frames(self)


cdef enum:
    PROTOCOL = 5

cpdef object pack(object item)
cdef object pickled(object item, object leave_out)
cpdef object unpack(object frame)
cpdef object as_array(object frame)
cdef object bytes_room(uint64_t nbytes)
cdef uint64_t nbytes_in(cnp.ndarray slot) noexcept
cdef object frame_in(cnp.ndarray slot)
cdef bint fits_in_slot(uint64_t nbytes) noexcept
