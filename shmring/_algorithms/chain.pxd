# The pipelined chain of the MPI libraries, for reduce, scan and exscan with more ranks than CPUs. Chunk by chunk a
# partial result goes from rank to rank, in rank order, and each rank folds its x into it.
#
# Each x is read once, by its own rank. If all ranks staged and folded, every x would move several times, and in a scan
# the work would grow with the square of the number of ranks. That work runs in parallel only if each rank has a CPU.
# all_reduce gains nothing from a chain: it takes 0.9 to 1.2 of the time with 4 and 8 ranks on 2 CPUs.

from libc.stdint cimport uint32_t, uint64_t

from .._core.descriptor cimport finish, may_ping, step_lines, write_descriptor
from .._core.group cimport (
    BY_CHAIN, DONE, EXSCAN, PROGRESSED, REDUCE, SCAN, Call, Cursor, Group, begin_call, blocked_on, check_line, counter,
    is_moved, is_scan, limit_unverified, publish, publish_line, repeats_last, takes,
)
from .._core.kernels cimport sr_dtype_is_widened
from .._core.placement cimport streams_out
from .._core.segment cimport SR_STAGED, sr_flag, sr_flag_reached
from .._core.staging cimport (
    blocked_on_credit, cursor_end, cursor_slot, fold_hop, give_credit, has_credit, next_chunk, slot, whole_items,
)
from .in_place cimport step_in_place


cdef enum:
    CHAIN_CHUNK_NBYTES = 64 << 10   # the longest chunk: a rank begins once the rank before it has folded the first


# True if the call may run as a chain. 16- and 8-bit floats may not: their partial results are wider than their items.
cdef inline bint may_be_chain(const Group *g, const Call *c) noexcept nogil:
    return (g.oversubscribed and c.nbytes >= g.tuning.chain_nbytes
            and (c.kind == REDUCE or is_scan(c)) and not is_moved(g, c) and not sr_dtype_is_widened(c.dtype))


cdef inline void enter_chain(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    write_descriptor(g, c)
    publish_line(g, c)
    c.chunk_nbytes = whole_items(c, min(<size_t> g.tuning.exchange_nbytes, <size_t> CHAIN_CHUNK_NBYTES))
    c.fold.position = c.copy.position = g.position


cdef inline void advance_chunk(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, cursor)
    cursor.position = cursor_end(g, c, cursor)
    cursor.offset += nbytes


# The place of rank's partial result of a chunk. All ranks use one slot, and each overwrites the result of the rank
# before. In an exscan the partial result of the rank before is this rank's result. It is copied to out only after this
# rank's fold, since out may be x, so the fold must not overwrite it: neighbours use two slots in turn.
cdef inline unsigned char *partial_of(Group *g, Call *c, int rank, uint64_t begin) noexcept nogil:
    return slot(g, rank & 1 if c.kind == EXSCAN else 0, begin)


# True if this rank copies the result from the slot of the last rank.
cdef inline bint takes_from_last(const Group *g, const Call *c) noexcept nogil:
    return c.kind == REDUCE and c.root == g.rank and c.root != g.size - 1


cdef inline int step_chain(Group *g, Call *c) noexcept nogil:
    cdef sr_flag *staged
    cdef int status
    if not c.lines_seen or c.ping:
        status = step_line_before(g, c)
        if status != DONE:
            return status
    if c.in_place:
        return step_in_place(g, c)
    if c.fold.offset < c.nbytes and partial_is_there(g, c) and may_hand_on(g, c):
        fold_chunk(g, c)
        return PROGRESSED
    if c.copy.offset < c.fold.offset:
        staged = counter(g, g.size - 1, SR_STAGED)
        if not sr_flag_reached(staged, cursor_end(g, c, &c.copy)):
            return blocked_on(c, staged, cursor_end(g, c, &c.copy), g.size - 1)
        take_from_last(g, c)
        return PROGRESSED
    if c.fold.offset == c.nbytes:
        g.position = c.fold.position
        finish(g, c, BY_CHAIN)
        return DONE
    if not partial_is_there(g, c):
        return blocked_on(c, counter(g, g.rank - 1, SR_STAGED), cursor_end(g, c, &c.fold), g.rank - 1)
    return blocked_on_credit(g, c, cursor_end(g, c, &c.fold))


# As step_lines. A rank that repeats its last call looks only at the line of the rank before it, which has compared its
# call with those of all ranks before. As in staged, the lines of later ranks are compared some calls later.
cdef inline int step_line_before(Group *g, Call *c) noexcept nogil:
    cdef int status = DONE
    if not repeats_last(g, c) or may_ping(g, c) or c.in_place:
        return step_lines(g, c)
    if g.rank > 0:
        status = check_line(g, c, g.rank - 1, c.seq, c.fingerprint)
    return limit_unverified(g, c) if status == DONE else status


cdef inline bint partial_is_there(Group *g, Call *c) noexcept nogil:
    return g.rank == 0 or sr_flag_reached(counter(g, g.rank - 1, SR_STAGED), cursor_end(g, c, &c.fold))


# True if the slot of the next partial result is free. Rank 0 is the first to use it, so only rank 0 checks.
cdef inline bint may_hand_on(Group *g, Call *c) noexcept nogil:
    return g.rank > 0 or has_credit(g, cursor_end(g, c, &c.fold))


# Fold the next chunk of x into the partial result, for the next rank or as this rank's result.
cdef inline void fold_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.fold)
    cdef uint64_t begin = cursor_slot(g, c, &c.fold)
    cdef bint is_last = g.rank == g.size - 1
    cdef unsigned char *before = partial_of(g, c, g.rank - 1, begin) if g.rank > 0 else NULL
    cdef unsigned char *out = c.out + c.fold.offset
    cdef uint32_t stream = 0
    cdef int nsources = 0, ntargets = 0
    if g.rank > 0:
        g.source[0] = before
        nsources = 1
    g.source[nsources] = c.x + c.fold.offset
    if not is_last or not takes(c, g.rank):
        g.target[0] = partial_of(g, c, g.rank, begin)
        ntargets = 1
        g.stats.bytes_sent += nbytes
    if c.kind == SCAN or (c.kind == REDUCE and c.root == g.rank and is_last):
        g.target[ntargets] = out
        stream = streams_out(g, c) << ntargets
        ntargets += 1
    if ntargets > 0:
        fold_hop(g, c, nsources + 1, ntargets, stream, nbytes // c.itemsize, is_last)
    if c.kind == EXSCAN and g.rank > 0:
        g.kernels.copy(out, before, nbytes, streams_out(g, c))
    advance_chunk(g, c, &c.fold)
    publish(g, SR_STAGED, c.fold.position)
    if not takes_from_last(g, c):
        c.copy = c.fold
        give_credit(g, c.copy.position)


cdef inline void take_from_last(Group *g, Call *c) noexcept nogil:
    cdef unsigned char *result = partial_of(g, c, g.size - 1, cursor_slot(g, c, &c.copy))
    g.kernels.copy(c.out + c.copy.offset, result, next_chunk(c, &c.copy), streams_out(g, c))
    advance_chunk(g, c, &c.copy)
    give_credit(g, c.copy.position)
