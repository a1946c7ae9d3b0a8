# Rings, and what else goes in steps that all ranks make: explicit algorithms that fold in an order of their own.

from libc.stdint cimport uint64_t

from .._core.group cimport Call, Group

# An algorithm as a row of *transfers*: in each of them a rank stages something for others, and takes something of what
# others have staged in the same one. All ranks count them alike, and have slots of the same length for them.
cdef struct Schedule:
    size_t (*slot_nbytes)(Group *, Call *, size_t transfer) noexcept nogil
    size_t (*send)(Group *, Call *, size_t transfer, unsigned char *slot) noexcept nogil      # bytes staged
    int (*source)(Group *, Call *, size_t transfer, int index) noexcept nogil                 # a rank; -1: no more
    void (*receive)(Group *, Call *, size_t transfer, uint64_t slot_at) noexcept nogil

cdef void begin_stepped(Group *g, Call *c, int slots) noexcept nogil
cdef int step_transfers(Group *g, Call *c, const Schedule *schedule, size_t transfers, size_t ahead) noexcept nogil
cdef void enter_ring(Group *g, Call *c) noexcept nogil
cdef int step_ring(Group *g, Call *c) noexcept nogil
