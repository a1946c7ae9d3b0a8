
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t

from .._arrays.operands cimport Operand
from .._core.group cimport OPAQUE
from .matching cimport Message


cdef enum:
    OBJECT = OPAQUE + 1       # dtype of objects packed by _comm/objects.py


cdef class Status:
    cdef readonly int source
    cdef readonly int64_t tag
    cdef readonly size_t count, nbytes
    cdef uint64_t kind


cdef uint64_t kind_of(Operand *operand) except? 0
cdef int64_t tag_number(object tag, bint may_be_any) except -2
cdef Status status_of(Message *message)
cdef str op_of(Message *message)
cdef str pattern_text(Message *message)
cdef object mismatch(Message *message, int rank, str what_now)
cdef object truncated(Message *message, int rank)
