from libc.stdint cimport uint8_t, uint32_t, uint64_t

from .._core.group cimport Call
from .vector cimport VectorCollectives


# One array of a call.
cdef struct Member:
    unsigned char *x
    unsigned char *out
    size_t count
    uint8_t itemsize, dtype, order


cdef class _Members:
    cdef Member *member
    cdef size_t count, nelements
    cdef uint32_t dtypes        # a bit for each dtype that occurs
    cdef uint64_t signature     # hash of the dtypes and lengths, the same on all ranks
    cdef uint64_t places        # hash of the addresses
    cdef list arrays, kept

    cdef int add(self, object x, bint writable, size_t i) except -1
    cdef int add_out(self, object out, size_t i) except -1
    cdef int check_disjoint(self) except -1


# Arrays that are packed in a buffer and reduced in the background.
cdef struct Bunch:
    Member *member
    size_t first, last, limit
    unsigned char *buffer


cdef class _Bunch:
    cdef Bunch bunch
    cdef object members, room


cdef class FusedCollectives(VectorCollectives):
    cdef object fused_buffer     # bytes, kept from call to call
    cdef uint64_t disjoint_places   # hash of the arrays last found to be disjoint
    cdef bint fusing
    cdef list works              # Works of the current call if it runs in the background, else None

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
