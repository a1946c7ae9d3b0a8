# Calls in place: nothing is staged. Ranks read the arrays of other ranks where they are, by zero copy or single copy.
# Reductions write to the out of other ranks.

from libc.stdint cimport uint32_t, uintptr_t

from .._core.descriptor cimport descriptor, finish
from .._core.group cimport (
    ABORTED, DONE, MISMATCHED, PROGRESSED, REDUCE, SINGLE_COPY, ZERO_COPY, Call, Group, blocked_on, counter,
    gives_in_place, is_moved, is_sliced, piece_of_x, publish, shared_address, takes,
)
from .._core.schedule cimport sr_slice_begin_grained
from .._core.segment cimport (
    SR_BEFORE_RELEASE, SR_CACHE_LINE, SR_FAULT, SR_FINISHED, SR_NO_ABORT, SR_PRIVATE, sr_descriptor,
    sr_flag_load_after_reads, sr_flag_reached,
)
from .pieces cimport keep_result_of_own, take_pieces, takes_from


cdef enum:
    IN_PLACE_STEP_NBYTES = 1 << 20   # moved in one step, so that other calls get their turn


# The address of a giver's x: in this process, or in the giver's for private memory; NULL if the descriptor is invalid.
cdef inline const unsigned char *given_address(Group *g, Call *c, int giver) noexcept nogil:
    cdef sr_descriptor *theirs = descriptor(g, c, giver)
    if theirs.x_block == SR_PRIVATE:
        return <unsigned char *> <uintptr_t> theirs.x_offset if is_moved(g, c) else NULL
    return shared_address(g, theirs.x_block, giver, theirs.x_offset, c.x_nbytes)


# Set g.source to every giver's x, `skip` bytes in. Return MISMATCHED if a descriptor is invalid.
cdef inline int find_sources(Group *g, Call *c, size_t skip) noexcept nogil:
    cdef const unsigned char *array
    cdef int rank
    for rank in range(g.size):
        if gives_in_place(g, c, rank):
            array = given_address(g, c, rank)
            if array == NULL:
                c.awaited.rank = rank
                return MISMATCHED
            g.source[rank] = array + skip
    return DONE


# Set g.target to the out of every rank that takes a result, `skip` bytes in. Return as find_sources.
cdef inline int find_targets(Group *g, Call *c, size_t skip) noexcept nogil:
    cdef sr_descriptor *theirs
    cdef unsigned char *array
    cdef int rank
    for rank in range(g.size):
        if takes(c, rank):
            theirs = descriptor(g, c, rank)
            array = shared_address(g, theirs.out_block, rank, theirs.out_offset, c.nbytes)
            if array == NULL:
                c.awaited.rank = rank
                return MISMATCHED
            g.target[rank] = array + skip
    return DONE


# As find_sources. The addresses of the pieces came with their lengths, and were checked on arrival.
cdef inline void find_pieces(Group *g, Call *c) noexcept nogil:
    cdef int giver
    for giver in range(g.size):
        g.source[giver] = c.taken[giver].there + c.copy.offset


cdef inline int step_in_place(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.has_finished:
        status = reduce_and_push(g, c) if is_sliced(c) else pull(g, c)
        if status != DONE:
            return status
        if sr_flag_load_after_reads(&g.header.abort) != SR_NO_ABORT:
            return ABORTED   # a rank that gave up may have written to its array while this rank read it
        SR_FAULT(SR_BEFORE_RELEASE)
        publish(g, SR_FINISHED, c.seq)
        c.has_finished = True
        c.fold_peer = 0
    while c.fold_peer < g.size:
        if (awaits_end_of(g, c, c.fold_peer)
                and not sr_flag_reached(counter(g, c.fold_peer, SR_FINISHED), c.seq)):
            return blocked_on(c, counter(g, c.fold_peer, SR_FINISHED), c.seq, c.fold_peer)
        c.fold_peer += 1
    finish(g, c, SINGLE_COPY if c.single_copy else ZERO_COPY)
    return DONE


# True if `rank` reads this rank's x or writes to its out: this rank must not use them again before `rank` is done.
cdef inline bint awaits_end_of(Group *g, Call *c, int rank) noexcept nogil:
    if is_sliced(c):
        return rank != g.rank
    return takes_from(g, c, rank, g.rank)


# True if stores to a rank's out bypass the cache. In place they do not: the line was just read, so it is in the cache.
cdef inline uint32_t streams_push(const Group *g, const Call *c, int rank) noexcept nogil:
    return c.nbytes >= g.tuning.stream_reduced_nbytes and g.target[rank] != g.source[rank]


# all_reduce and reduce: reduce this rank's slice of every x into every out that takes the result.
cdef inline int reduce_and_push(Group *g, Call *c) noexcept nogil:
    cdef size_t begin = sr_slice_begin_grained(c.count, g.size, g.rank, SR_CACHE_LINE // c.itemsize)
    cdef size_t end = sr_slice_begin_grained(c.count, g.size, g.rank + 1, SR_CACHE_LINE // c.itemsize)
    cdef size_t length = IN_PLACE_STEP_NBYTES // c.itemsize
    cdef uint32_t stream = 0
    cdef int status, rank
    begin += c.fold.offset // c.itemsize
    if length > end - begin:
        length = end - begin
    status = find_sources(g, c, begin * c.itemsize)
    if status == DONE:
        status = find_targets(g, c, begin * c.itemsize)
    if status != DONE:
        return status
    if c.kind == REDUCE:
        stream = streams_push(g, c, c.root)
        g.target[0] = g.target[c.root]
    else:
        for rank in range(g.size):
            stream |= streams_push(g, c, rank) << min(rank, 31)   # bit 31 stands for all later ranks
    if length > 0:
        g.kernels.fold[c.dtype][c.op](g.target, 1 if c.kind == REDUCE else g.size, stream, g.source, g.size,
                                      length, <uint32_t> g.size)
    c.fold.offset += length * c.itemsize
    g.stats.bytes_sent += length * c.itemsize
    return PROGRESSED if begin + length < end else DONE


# All other kinds: take this rank's pieces straight from every giver's x.
cdef inline int pull(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = min(c.nbytes - c.copy.offset, <size_t> IN_PLACE_STEP_NBYTES)
    cdef int status = DONE
    if takes(c, g.rank):
        if c.taken != NULL:
            find_pieces(g, c)
        else:
            status = find_sources(g, c, piece_of_x(c, g.rank) + c.copy.offset)
        if status == DONE:
            status = take_pieces(g, c, c.copy.offset, nbytes)
        if status != DONE:
            return status
        c.copy.offset += nbytes
        if c.copy.offset < c.nbytes:
            return PROGRESSED
    keep_result_of_own(g, c)
    return DONE
