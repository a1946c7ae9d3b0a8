# May know: _group, _operands, collectives.

from libc.stdint cimport uint32_t, uint64_t

from ._group cimport Call, Piece
from ._operands cimport Operand
from .collectives cimport Collectives


# What a rank says of one piece before it moves.
cdef struct Told:
    uint64_t nrows
    uint64_t offset        # in the giver's part of a shared block
    uint32_t block         # 0: private memory
    uint32_t zero_copy_nbytes   # least bytes of the largest piece that are worth zero-copy to the giver


cdef class _Parts:
    cdef int size, npieces, nheld
    cdef Operand *held
    cdef Piece *given
    cdef Piece *taken
    cdef Told *own
    cdef Told *told
    cdef size_t row_nbytes
    cdef uint32_t signature    # of shape[1:], and of a dtype that has no number
    cdef object model, trailing
    cdef list kept

    cdef Operand *hold(self, object x, bint writable, str what) except NULL
    cdef Told *told_of(self, int giver, int taker) noexcept


cdef class Uneven(Collectives):
    cdef object run_uneven(self, int kind, object x, object root, object out, object like, object timeout)
    cdef int describe_given(self, Call *c, _Parts parts, object x, object out, object like) except -1
    cdef int give(self, Call *c, _Parts parts, object x, str what, int first, int last) except -1
    cdef int take_after(self, Call *c, _Parts parts, object x, str what) except -1
    cdef int describe_out(self, Call *c, _Parts parts, object out) except -1
    cdef int offer_shared(self, Call *c, _Parts parts) except -1
    cdef int exchange_counts(self, Call *c, _Parts parts) except -1
    cdef int read_counts(self, Call *c, _Parts parts) except -1
    cdef int find_shared(self, Call *c, _Parts parts) except -1
    cdef object describe_taken(self, Call *c, _Parts parts, object out)
