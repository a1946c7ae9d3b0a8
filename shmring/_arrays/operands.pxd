# One array of a call, as the engine uses it.

from .._core.group cimport OPAQUE, Call, Items


cdef struct Operand:      # filled by take(); release() ends it
    Py_buffer view
    bint held
    unsigned char *data
    size_t count, itemsize
    int dtype
    Items items               # only if dtype is OPAQUE
    bint fortran


# An array in another library's memory; see _arrays/operands.pyi.
cdef class Memory:
    cdef unsigned char *data
    cdef readonly size_t count
    cdef size_t itemsize
    cdef int number             # number of its dtype
    cdef readonly bint readonly
    cdef readonly object owner


# Fill the operand. The caller keeps the returned object alive while it uses the operand. moves: accept items of any
# fixed size.
cdef object take(Operand *operand, object x, bint writable, str what, bint moves)
cdef void release(Operand *operand) noexcept
cdef str dtype_name(const Operand *operand)   # NumPy's name for it, possibly cut short, if it is OPAQUE


# Set the items that a call moves to those of the operand. The operand must outlive the call.
cdef inline void describe_items_of(Call *c, const Operand *operand) noexcept:
    c.dtype = operand.dtype
    c.itemsize = operand.itemsize
    c.items = &operand.items if operand.dtype == OPAQUE else NULL


cdef inline bint has_items_of(const Call *c, const Operand *operand) noexcept:
    return operand.dtype == c.dtype and operand.itemsize == c.itemsize and (
        c.dtype != OPAQUE or operand.items.signature == c.items.signature)


# Convert the engine's element count to the user's: the engine counts bytes of OPAQUE items.
cdef inline size_t item_count(const Operand *operand, size_t count) noexcept:
    return count // operand.items.nbytes if operand.dtype == OPAQUE and operand.items.nbytes > 0 else count
