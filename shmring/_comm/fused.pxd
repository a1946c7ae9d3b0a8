
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from .._core.group cimport Call
from .vector cimport VectorCollectives


# One of the arrays of a call.
cdef struct Member:
    unsigned char *x
    unsigned char *out
    size_t count
    uint8_t itemsize, dtype, order


cdef class _Members:
    cdef Member *member
    cdef size_t count, nelements
    cdef uint32_t dtypes        # a bit for each that occurs
    cdef uint64_t signature     # of what they are: the same on all ranks
    cdef uint64_t places        # of where they lie
    cdef list arrays, kept

    cdef int add(self, object x, bint writable, size_t i) except -1
    cdef int add_out(self, object out, size_t i) except -1
    cdef int check_disjoint(self) except -1


# Some of them in a buffer, reduced in the background.
cdef struct Bunch:
    Member *member
    size_t first, last, limit
    unsigned char *buffer


cdef class _Bunch:
    cdef Bunch bunch
    cdef object members, room


cdef class FusedCollectives(VectorCollectives):
    cdef object fused_buffer     # of bytes, kept from call to call
    cdef uint64_t disjoint_places   # of the arrays that were found to be disjoint last
    cdef bint fusing
    cdef list works              # of the call that is being taken apart, if it is to run in the background

    cdef int check_alone(self) except -1
    cdef object members_of(self, object arrays, object out)
    cdef int describe_reduction_of(self, Call *c, int dtype, object op, object timeout, object priority) except -1
    cdef int reduce_all_of_dtype(self, Call *c, _Members members, size_t fuse_nbytes) except -1
    cdef int reduce_bunch(self, Call *c, _Members members, size_t first, size_t last, size_t limit,
                          size_t count) except -1
    cdef int reduce_at(self, Call *c, _Members members, size_t first, unsigned char *x, unsigned char *out,
                       size_t count) except -1
    cdef object issue_all(self)
    cdef int reduce_later(self, Call *c, object kept) except -1
    cdef int reduce_bunch_later(self, Call *c, _Members members, size_t first, size_t last, size_t limit,
                                size_t count) except -1
    cdef unsigned char *room(self, size_t nbytes) except NULL
