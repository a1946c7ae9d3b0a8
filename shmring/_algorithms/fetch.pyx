# all_reduce of private arrays without staging. Each rank reads its slice of the other ranks' arrays in place, through
# the kernel, and reduces it; then it fetches their slices of the result. It reads as many bytes as through slots, but
# stages none.
#
# Every function returns at once and records in call.awaited what the call waits for.

from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from .._core.descriptor cimport *
from .._core.group cimport *
from .._core.staging cimport *
from .staged cimport SHARED_STEP_NBYTES, find_given, lies_in_private, read_private, shared_address


cdef enum Phase:
    REDUCING
    FETCHING
    ENDING

cdef enum:
    PREFETCH_MOST_NBYTES = 2 << 20   # larger arrays do not stay in the caches, so no other core holds their lines


cdef int step_fetched(Group *g, Call *c) noexcept nogil:
    cdef int status
    if c.phase == REDUCING:
        status = reduce_own_slice(g, c)
        if status != DONE:
            return status
        publish(g, SR_REDUCED, end_of_call(g))
        c.phase = FETCHING
    if c.phase == FETCHING:
        status = fetch_slices(g, c)
        if status != DONE:
            return status
        if sr_flag_load_after_reads(&g.header.abort) != SR_NO_ABORT:
            return ABORTED   # a rank that gave up may have written to its array while this rank fetched it
        give_credit(g, end_of_call(g))
        c.phase = ENDING
    # Other ranks may still be fetching this rank's slice.
    if not all_reached(g, SR_COPIED, end_of_call(g), &c.copy_peer):
        return blocked_on_counter(g, c, SR_COPIED, end_of_call(g), c.copy_peer)
    g.position = end_of_call(g)
    finish(g, SINGLE_COPY)
    return DONE


# Reserve an empty slot: only its end position is used, as a synchronisation counter.
cdef inline uint64_t end_of_call(Group *g) noexcept nogil:
    return slot_end(g, g.position, SR_LINE)


# The begin of a rank's slice, in bytes.
cdef inline size_t slice_at(Group *g, Call *c, int rank) noexcept nogil:
    return sr_slice_begin_grained(c.count, g.size, rank, SR_CACHE_LINE // c.itemsize) * c.itemsize


# Reduce one step of this rank's slice: as many bytes as the scratch memory holds of all other ranks.
cdef int reduce_own_slice(Group *g, Call *c) noexcept nogil:
    cdef size_t begin = slice_at(g, c, g.rank) + c.fold.offset
    cdef size_t left = slice_at(g, c, g.rank + 1) - begin
    # Place the copies as far into a cache line as the own array, so that all sources are loaded by whole lines.
    cdef size_t skew = <uintptr_t> (c.out + begin) & (SR_CACHE_LINE - 1)
    cdef size_t room = SCRATCH_NBYTES // <size_t> (g.size - 1) & ~<size_t> (SR_CACHE_LINE - 1)
    cdef size_t nbytes = min(left, whole_items(c, room))
    cdef unsigned char *there = g.scratch + skew
    cdef int step, rank
    cdef int status = find_given(g, c, begin)
    if nbytes == 0 or status != DONE:
        return status
    g.source[g.rank] = c.x + begin
    for step in range(1, g.size):   # each rank begins with another source
        rank = (g.rank + step) % g.size
        if lies_in_private(g, c, rank):
            status = read_private(g, c, rank, there, nbytes)
            if status != DONE:
                return status
            g.source[rank] = there
            there += room + SR_CACHE_LINE
    g.target[0] = c.out + begin
    if c.nbytes <= PREFETCH_MOST_NBYTES:   # the others fetched the same lines in the call before
        fold_prefetching(g, c, 1, 0, nbytes)
    else:
        g.kernels.fold[c.dtype][c.op](g.target, 1, 0, g.source, g.size, nbytes // c.itemsize, <uint32_t> g.size)
    c.fold.offset += nbytes
    g.stats.bytes_sent += nbytes
    return PROGRESSED if nbytes < left else DONE


# Fetch a part of another rank's slice, once that rank has reduced it. The order is by rank, from the next rank on.
cdef int fetch_slices(Group *g, Call *c) noexcept nogil:
    cdef int status, owner
    if c.copy_peer == g.size - 1:
        c.copy_peer = 0
        return DONE
    owner = (g.rank + 1 + c.copy_peer) % g.size
    if not sr_flag_reached(counter(g, owner, SR_REDUCED), end_of_call(g)):
        return blocked_on(c, counter(g, owner, SR_REDUCED), end_of_call(g), owner)
    status = fetch(g, c, owner)
    if status == DONE:
        c.copy.offset = 0
        c.copy_peer += 1
        return PROGRESSED
    return status


cdef int fetch(Group *g, Call *c, int owner) noexcept nogil:
    cdef size_t begin = slice_at(g, c, owner) + c.copy.offset
    cdef size_t left = slice_at(g, c, owner + 1) - begin
    cdef size_t nbytes = min(left, <size_t> SHARED_STEP_NBYTES)
    cdef sr_descriptor *theirs = descriptor(g, c, owner)
    cdef int status = DONE
    if theirs.out_block == SR_PRIVATE:
        g.source[owner] = <unsigned char *> <uintptr_t> theirs.out_offset + begin
        status = read_private(g, c, owner, c.out + begin, nbytes) if nbytes > 0 else DONE
    else:
        g.source[owner] = shared_address(g, theirs.out_block, owner, theirs.out_offset, c.nbytes)
        if g.source[owner] == NULL:
            c.awaited.rank = owner
            return MISMATCHED   # the descriptor is invalid
        g.kernels.copy(c.out + begin, <unsigned char *> g.source[owner] + begin, nbytes, 0)
    if status != DONE:
        return status
    c.copy.offset += nbytes
    return PROGRESSED if nbytes < left else DONE
