from libc.stdint cimport uint64_t

from .vector cimport VectorCollectives


cdef class FusedCollectives(VectorCollectives):
    cdef object fused_buffer     # bytes, kept from call to call
    cdef uint64_t disjoint_places   # hash of the arrays last found to be disjoint
    cdef bint fusing
