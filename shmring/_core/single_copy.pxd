# The choice of single copy: other ranks read private memory through the kernel. Staging would copy twice.

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t, uintptr_t

from .group cimport ALL_GATHER, ALL_TO_ALL, SCATTER, Call, Group, is_moved, may_be_read_in_place
from .segment cimport sr_liveness_task, sr_now_ns, sr_single_copy


# True for calls in which single copies of long pieces are the faster path most of the time: no byte is copied by two
# ranks, since memory that several ranks have read is slow to write again. If the user has fixed the path, all calls
# that only move data take it.
cdef inline bint prefers_single_copy(const Group *g, const Call *c) noexcept nogil:
    if not g.tuning.single_copy_measured:
        return is_moved(g, c)
    return c.kind == ALL_TO_ALL or c.kind == SCATTER or (c.kind == ALL_GATHER and g.size == 2)


# The length of pieces from which single copies are faster, in calls whose path is not measured. Through slots, the root
# of a scatter stages while other ranks copy: that is better for little data and few ranks. In an all_gather each rank
# also copies its own piece.
cdef inline uint64_t least_single_copy(const Group *g, const Call *c) noexcept nogil:
    if c.kind == SCATTER:
        return g.tuning.single_copy_scatter_nbytes // <uint64_t> g.size
    return g.tuning.single_copy_nbytes * (2 if c.kind == ALL_GATHER else 1)


# True if other ranks may read pieces of nbytes in this rank's private memory. Longer pieces are streamed through slots,
# unless one rank alone would fill the slots.
cdef inline bint offers_single_copy(const Group *g, const Call *c, size_t nbytes) noexcept nogil:
    return (g.single_copy and prefers_single_copy(g, c)
            and (c.kind == SCATTER or nbytes <= g.tuning.single_copy_most_nbytes))


cdef enum:
    LEAST_REMAP_NS = 20000   # a driver needs longer to map memory of a device where an array was before


# True if the kernel can read this array at all: it cannot read memory that a device has mapped, such as memory that the
# driver of a GPU has pinned. The rank tries it on itself, which takes a third of a microsecond, unless it has just
# offered the same array. If the array could not be read after all, the call would end the communicator.
cdef inline bint can_be_read(Group *g, const void *array) noexcept nogil:
    cdef char first = 0
    cdef uint64_t now_ns = sr_now_ns()
    cdef bint is_known = array == g.read_at and now_ns - g.read_ns < LEAST_REMAP_NS
    if not is_known and sr_single_copy(sr_liveness_task(&g.me.liveness), &first, <uintptr_t> array, 1) != 0:
        return False
    g.read_at, g.read_ns = array, now_ns
    return True


# True if other ranks should read this rank's arrays by single copies.
cdef inline bint is_worth_single_copy(Group *g, Call *c) noexcept nogil:
    if c.trials != NULL:
        return c.trials.in_place and may_be_read_in_place(g, c)
    return (c.given == NULL and c.nbytes >= least_single_copy(g, c) and offers_single_copy(g, c, c.nbytes)
            and may_be_read_in_place(g, c))
