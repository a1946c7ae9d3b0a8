
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from .channel cimport sr_office, sr_post


cdef class Office:
    cdef sr_office *office
    cdef sr_post *post
    cdef void *memory             # of the rings, and of what sockets would not take
    cdef size_t memory_nbytes
    cdef object lines, news
    cdef int waker
    cdef dict number_of           # by rank

    cdef int allocate(self, int nposts, size_t room_nbytes) except -1
    cdef int close_descriptors(self) except -1
    cdef bint is_delivering(self, uint64_t cut_ns)
    cdef sr_post *post_of(self, int rank) except NULL
