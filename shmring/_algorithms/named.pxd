# Algorithms that run only if the caller names them.

from libc.stdint cimport uint64_t

from .._core.group cimport Call, Group

# An algorithm as a sequence of transfers. In each transfer a rank stages data for others, and takes data that others
# staged in the same transfer. All ranks count transfers alike, and reserve slots of the same length for them.
cdef struct Schedule:
    size_t (*slot_nbytes)(Group *, Call *, size_t transfer) noexcept nogil
    size_t (*send)(Group *, Call *, size_t transfer, unsigned char *slot) noexcept nogil      # bytes staged
    int (*source)(Group *, Call *, size_t transfer, int index) noexcept nogil                 # a rank; -1: no more
    void (*receive)(Group *, Call *, size_t transfer, uint64_t slot_at) noexcept nogil

cdef void enter_ring(Group *g, Call *c) noexcept nogil
cdef int step_ring(Group *g, Call *c) noexcept nogil
cdef void enter_halving(Group *g, Call *c) noexcept nogil
cdef int step_halving(Group *g, Call *c) noexcept nogil
cdef void enter_tree(Group *g, Call *c) noexcept nogil
cdef int step_tree(Group *g, Call *c) noexcept nogil
cdef void enter_double_tree(Group *g, Call *c) noexcept nogil
cdef int step_double_tree(Group *g, Call *c) noexcept nogil
