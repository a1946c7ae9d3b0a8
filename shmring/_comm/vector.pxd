from libc.stdint cimport uint32_t, uint64_t

from .._arrays.operands cimport Operand
from .._core cimport numpy_api as cnp
from .._core.group cimport Call, Piece
from .collectives cimport Collectives, Work


cdef enum:
    ANNOUNCED_NBYTES = 40       # pieces up to this size are sent with their count; both fill the payload of a call line


cdef struct _Place:
    uint64_t block              # 0: to be staged; SR_PRIVATE: as in sr_descriptor
    uint64_t offset             # in the giver's part of a shared block; for SR_PRIVATE its address in the giver
    uint32_t zero_copy_nbytes   # the giver prefers not to stage if the largest piece has at least this size


cdef union _What:
    _Place place
    unsigned char[ANNOUNCED_NBYTES] data   # the whole piece if it fits


# Announcement of one piece, before it is moved.
cdef struct Announced:
    uint64_t nrows
    _What what


cdef class _Parts:
    cdef int size, npieces, nheld
    cdef Operand *held
    cdef Piece *given
    cdef Piece *taken
    cdef Announced *own
    cdef Announced *announced
    cdef size_t row_nbytes
    cdef cnp.ndarray like       # has the dtype and shape[1:] of all arrays of the call
    cdef list kept

    cdef Operand *hold(self, object x, bint writable, str what, int index) except NULL
    cdef object room(self, uint64_t nrows)
    cdef Announced *announced_of(self, int giver, int taker) noexcept


cdef class VectorCollectives(Collectives):
    cdef object run_vector(self, int kind, object x, object root, object out, object like, object async_op,
                           object timeout)
    cdef object run_both(self, int kind, Call *counts, Call *c, _Parts parts, object out)
    cdef object issue_vector(self, Call *counts, Call *c, _Parts parts, object out)
    cdef int describe_given(self, Call *c, _Parts parts, object x, object out, object like) except -1
    cdef int give(self, Call *c, _Parts parts, object x, str what, int index, int first, int last) except -1
    cdef int take_after(self, Call *c, _Parts parts, Operand *operand) except -1
    cdef int describe_out(self, Call *c, _Parts parts, object out) except -1
    cdef int announce(self, Call *c, _Parts parts, bint has_out) except -1
    cdef int describe_counts(self, Call *counts, Call *c, _Parts parts) except -1
    cdef int check_counts(self, Call *c, _Parts parts) except -1
    cdef bint read_counts(self, Call *c, _Parts parts) noexcept
    cdef int choose_place(self, Call *c, _Parts parts) noexcept
    cdef bint find_places(self, Call *c, _Parts parts) noexcept
    cdef object describe_taken(self, Call *c, _Parts parts, object out)


cdef class _VectorWork(Work):
    cdef VectorCollectives comm
    cdef _Parts parts
    cdef object out
