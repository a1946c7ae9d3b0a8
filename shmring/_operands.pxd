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


# Fills the operand; what it returns has to live as long as the operand is used. moves: items of any fixed size will do.
cdef object take(Operand *operand, object x, bint writable, str what, bint moves)
cdef void release(Operand *operand) noexcept
