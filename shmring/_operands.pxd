# One array of a call as the engine sees it. May know: _group.

from ._group cimport SR_DTYPES


cdef enum:
    MOVED = SR_DTYPES         # the dtype of items that are only moved and are none of the table's


cdef struct Operand:      # held from take() to release()
    Py_buffer view
    bint held
    unsigned char *data
    size_t count, itemsize
    int dtype
    bint fortran


# An array that another library holds; see _operands.pyi.
cdef class Memory:
    cdef unsigned char *data
    cdef readonly size_t count
    cdef size_t itemsize
    cdef int number             # of its dtype
    cdef readonly bint readonly
    cdef readonly object owner


# Fills the operand; what it returns has to live as long as the operand is used. moves: items of any fixed size will do.
cdef object take(Operand *operand, object x, bint writable, str what, bint moves)
cdef void release(Operand *operand) noexcept
