# Which rank takes which piece from which other rank in a call, and taking the pieces, by copying or by folding: from
# slots, from arrays that this process maps, or from private memory through the kernel.

from libc.stdint cimport uint32_t, uintptr_t

from .._core.descriptor cimport descriptor
from .._core.group cimport (
    ABORTED, ALL_GATHER, ALL_TO_ALL, BROADCAST, DEAD, DONE, SCAN, SCATTER, UNREADABLE, Call, Group, Piece, bytes_within,
    check_liveness, gives, is_joined, is_moved, is_scan, piece_for, piece_from, takes,
)
from .._core.placement cimport copy_from_far, streams_out
from .._core.segment cimport (
    SR_NO_ABORT, SR_PRIVATE, sr_flag_load_after_reads, sr_liveness, sr_liveness_died, sr_liveness_task, sr_single_copy,
)
from .._core.staging cimport fold_sources


# ---- which rank takes what from which ------------------------------------------------------------------------

cdef inline bint takes_from(Group *g, Call *c, int taker, int giver) noexcept nogil:
    if taker == giver or not gives(g, c, giver) or not takes(c, taker):
        return False
    return not is_scan(c) or giver < taker


# The bytes of rank's piece in a chunk of nbytes. Chunks are cut from the largest piece, so shorter pieces end before
# it.
cdef inline size_t part_of(const Piece *pieces, int rank, size_t offset, size_t nbytes) noexcept nogil:
    return nbytes if pieces == NULL else bytes_within(pieces[rank].nbytes, offset, nbytes)


# ---- taking pieces -------------------------------------------------------------------------------------------

# Copy or fold nbytes of every rank's piece for this rank into out. g.source points at the pieces.
cdef inline int take_pieces(Group *g, Call *c, size_t offset, size_t nbytes) noexcept nogil:
    if is_moved(g, c):
        return move_pieces(g, c, offset, nbytes)
    fold_pieces(g, c, offset, nbytes)
    return DONE


cdef inline void fold_pieces(Group *g, Call *c, size_t offset, size_t nbytes) noexcept nogil:
    cdef int nsources = g.rank + (c.kind == SCAN) if is_scan(c) else g.size
    cdef size_t part = part_of(c.given, g.rank, offset, nbytes)
    g.source[g.rank] = piece_for(c, g.rank) + offset
    g.target[0] = c.out + offset
    if nsources > 0:
        fold_sources(g, c, c.op, nsources, 1, streams_out(g, c), part // c.itemsize, <uint32_t> nsources)


cdef inline int move_pieces(Group *g, Call *c, size_t offset, size_t nbytes) noexcept nogil:
    cdef size_t part
    cdef int step, giver, status
    for step in range(1, g.size):   # each rank begins with another giver
        giver = (g.rank + step) % g.size
        if takes_from(g, c, g.rank, giver):
            part = part_of(c.taken, giver, offset, nbytes)
            if part > 0:
                status = move_piece(g, c, giver, piece_from(c, giver) + offset, part)
                if status != DONE:
                    return status
    if is_joined(c) and c.taken == NULL:
        keep_own_piece(g, c, offset, nbytes)
    return DONE


cdef enum:
    LEAST_BOTH_WAYS_NBYTES = 64 << 10   # if data move in both directions, shorter pieces are copied in turn more slowly


cdef inline int move_piece(Group *g, Call *c, int giver, unsigned char *there, size_t nbytes) noexcept nogil:
    if c.in_place and lies_in_private(g, c, giver):
        return read_private(g, c, giver, there, nbytes)
    if c.in_place or ((c.kind == ALL_GATHER or c.kind == ALL_TO_ALL) and nbytes < LEAST_BOTH_WAYS_NBYTES):
        g.kernels.copy(there, g.source[giver], nbytes, streams_out(g, c))
    else:
        copy_from_far(g, there, <const unsigned char *> g.source[giver], nbytes, streams_out(g, c))
    return DONE


# Copy this rank's piece for itself, which is in its x already.
cdef inline void keep_own_piece(Group *g, Call *c, size_t offset, size_t nbytes) noexcept nogil:
    cdef const unsigned char *own = piece_for(c, g.rank) + offset
    cdef unsigned char *there = piece_from(c, g.rank) + offset
    if there != own:
        g.kernels.copy(there, own, nbytes, streams_out(g, c))


# Copy the own piece in the calls that do not copy it chunk by chunk.
cdef inline void keep_result_of_own(Group *g, Call *c) noexcept nogil:
    if c.taken != NULL:
        if c.taken[g.rank].nbytes > 0:
            keep_own_piece(g, c, 0, c.taken[g.rank].nbytes)
    elif g.rank == c.root and (c.kind == BROADCAST or c.kind == SCATTER):
        keep_own_piece(g, c, 0, c.nbytes)


# ---- private memory ------------------------------------------------------------------------------------------

# True if the giver's piece is in its private memory. g.source then is an address of the giver's process.
cdef inline bint lies_in_private(Group *g, Call *c, int giver) noexcept nogil:
    if c.taken != NULL:
        return c.taken[giver].there_is_private
    return descriptor(g, c, giver).x_block == SR_PRIVATE


# Copy from a peer's private memory through the kernel. A peer is marked dead before its memory is unmapped, and sets
# the abort word before it reuses its arrays. If neither is visible after the read, the bytes are valid.
cdef inline int read_private(Group *g, Call *c, int giver, unsigned char *there, size_t nbytes) noexcept nogil:
    cdef sr_liveness *liveness = &g.lane[giver].liveness
    c.single_copy = True
    c.awaited.rank = giver
    c.error = sr_single_copy(sr_liveness_task(liveness), there, <uintptr_t> g.source[giver], nbytes)
    if c.error != 0:
        check_liveness(g)
    if sr_liveness_died(liveness):
        return DEAD
    if sr_flag_load_after_reads(&g.header.abort) != SR_NO_ABORT:
        return ABORTED
    return DONE if c.error == 0 else UNREADABLE
