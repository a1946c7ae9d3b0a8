# One array of a call, as the engine uses it.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from .._core.group cimport OPAQUE, Call, Items


cdef struct Operand:      # filled by take(); release() ends it
    Py_buffer view
    bint held
    unsigned char *data
    size_t count, itemsize
    int dtype
    Items items               # only if dtype is OPAQUE
    bint fortran


# DLPack's structs: https://dmlc.github.io/dlpack/latest/c_api.html
cdef struct DLTensor:
    void *data
    int32_t device, device_number
    int32_t ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides          # elements; NULL: C order
    uint64_t byte_offset


cdef struct Exported:         # DLManagedTensorVersioned
    uint32_t major, minor
    void *context
    void (*deleter)(Exported *) noexcept
    uint64_t flags
    DLTensor tensor


ctypedef int (*Export)(void *x, Exported **exported) except -1


# An array in another library's memory; see _arrays/operands.pyi.
cdef class Memory:
    cdef unsigned char *data
    cdef readonly size_t count
    cdef size_t itemsize
    cdef int number             # number of its dtype
    cdef readonly bint readonly
    cdef readonly object owner
    cdef Exported *exported     # NULL unless the library has exported it


# Fill the operand. The caller keeps the returned object alive while it uses the operand. moves: accept items of any
# fixed size.
cdef object take(Operand *operand, object x, bint writable, str what, bint moves)
cdef void release(Operand *operand) noexcept

# Return what keeps the memory of x allocated, if x may be given other memory while it exists: torch's tensors may, by
# `x.data = y`. None for others. A call that goes on in the background holds this beside x.
cdef object storage_of(object x)
cdef str dtype_name(const Operand *operand)   # NumPy's name for it, possibly cut short, if it is OPAQUE


# Set the items that a call moves to those of the operand. The operand must outlive the call.
cdef inline void fill_items_of(Call *c, const Operand *operand) noexcept:
    c.dtype = operand.dtype
    c.itemsize = operand.itemsize
    c.items = &operand.items if operand.dtype == OPAQUE else NULL


# True if a call may read x while it writes out: they are disjoint or equal, or one is this rank's part of the other.
cdef inline bint can_read_while_writing(const unsigned char *x, size_t x_nbytes, const unsigned char *out,
                                        size_t out_nbytes, int rank) noexcept nogil:
    if x + x_nbytes <= out or out + out_nbytes <= x:
        return True
    if x_nbytes > out_nbytes:
        x += rank * out_nbytes
    elif x_nbytes < out_nbytes:
        out += rank * x_nbytes
    return x == out


cdef inline bint has_items_of(const Call *c, const Operand *operand) noexcept:
    return operand.dtype == c.dtype and operand.itemsize == c.itemsize and (
        c.dtype != OPAQUE or operand.items.signature == c.items.signature)


# Convert the engine's element count to the user's: the engine counts bytes of OPAQUE items.
cdef inline size_t item_count(const Operand *operand, size_t count) noexcept:
    return count // operand.items.nbytes if operand.dtype == OPAQUE and operand.items.nbytes > 0 else count
