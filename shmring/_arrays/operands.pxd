# One array of a call as the engine sees it.

from .._core.group cimport OPAQUE, Call, Items


cdef struct Operand:      # held from take() to release()
    Py_buffer view
    bint held
    unsigned char *data
    size_t count, itemsize
    int dtype
    Items items               # of OPAQUE only
    bint fortran


# An array that another library holds; see _arrays/operands.pyi.
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
cdef str dtype_name(const Operand *operand)   # in words; as NumPy writes it, cut short, where it is OPAQUE


# What a call moves: items of the operand, which is kept as long as the call.
cdef inline void describe_items_of(Call *c, const Operand *operand) noexcept:
    c.dtype = operand.dtype
    c.itemsize = operand.itemsize
    c.items = &operand.items if operand.dtype == OPAQUE else NULL


cdef inline bint has_items_of(const Call *c, const Operand *operand) noexcept:
    return operand.dtype == c.dtype and operand.itemsize == c.itemsize and (
        c.dtype != OPAQUE or operand.items.signature == c.items.signature)


# Of as many elements as the engine counts, how many its user does.
cdef inline size_t item_count(const Operand *operand, size_t count) noexcept:
    return count // operand.items.nbytes if operand.dtype == OPAQUE and operand.items.nbytes > 0 else count
