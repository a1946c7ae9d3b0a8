# When private memory is read by others through the kernel: one copy where staging makes two.

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t, uintptr_t

from .group cimport ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, SCATTER, SCRATCH_NBYTES, Call, Group, may_be_read_in_place
from .segment cimport sr_liveness_task, sr_single_copy


cdef enum:
    LEAST_READ_NBYTES = 16 << 10   # at once, so that there are not too many system calls


# An all_reduce of slices that their reducers do not push but others fetch, as they do not map where they belong.
cdef inline bint may_be_fetched(const Group *g, const Call *c) noexcept nogil:
    cdef size_t nothers = g.size - 1
    return (c.kind == ALL_REDUCE and c.nbytes * nothers > g.tuning.small_nbytes
            and nothers * LEAST_READ_NBYTES <= SCRATCH_NBYTES)


# Where every rank has something to copy, and no byte is copied by two. With one at work, as in a broadcast, slots let
# the other take part; what several read is dear to write again (2 and 4 ranks, bench/peers/peers.py --input both).
cdef inline bint may_be_single_copy(const Group *g, const Call *c) noexcept nogil:
    return (c.kind == ALL_TO_ALL or c.kind == SCATTER or (c.kind == ALL_GATHER and g.size == 2)
            or may_be_fetched(g, c))


# From which length of pieces on that pays. Through slots the root of a scatter stages while others copy, which is
# better the less there is and the fewer they are; and what is reduced in place leaves more of the cache to slots (two
# ranks, 8 MiB in small pages: 0.70 ms, against 0.87 by single copies).
cdef inline uint64_t least_single_copy(const Group *g, const Call *c) noexcept nogil:
    cdef uint64_t least = g.tuning.single_copy_nbytes
    if c.kind == ALL_REDUCE:
        return g.tuning.single_copy_in_place_nbytes if c.out == c.x else g.tuning.single_copy_reduce_nbytes
    if c.kind == ALL_GATHER:
        return max(least, g.tuning.single_copy_all_gather_nbytes)
    return max(least, g.tuning.single_copy_scatter_nbytes // <uint64_t> g.size) if c.kind == SCATTER else least


# Up to which; longer ones had better be streamed through slots, unless one rank alone would fill these.
cdef inline uint64_t most_single_copy(const Group *g, const Call *c) noexcept nogil:
    if c.kind == ALL_REDUCE:
        return g.tuning.single_copy_in_place_most_nbytes if c.out == c.x else g.tuning.single_copy_reduce_most_nbytes
    return <uint64_t> -1 if c.kind == SCATTER else g.tuning.single_copy_most_nbytes


# Whether others may read pieces of nbytes in this rank's private memory.
cdef inline bint offers_single_copy(const Group *g, const Call *c, size_t nbytes) noexcept nogil:
    return g.single_copy and may_be_single_copy(g, c) and nbytes <= most_single_copy(g, c)


# Whether the kernel reads it at all, what a device has mapped it does not (as memory that a GPU's driver has pinned):
# asked of itself, which takes a third of a microsecond.
cdef inline bint can_be_read(Group *g, const void *array) noexcept nogil:
    cdef char first = 0
    return sr_single_copy(sr_liveness_task(&g.me.liveness), &first, <uintptr_t> array, 1) == 0


# Whether they had better do so.
cdef inline bint is_worth_single_copy(Group *g, Call *c) noexcept nogil:
    return (c.given == NULL and c.nbytes >= least_single_copy(g, c) and offers_single_copy(g, c, c.nbytes)
            and may_be_read_in_place(g, c))
