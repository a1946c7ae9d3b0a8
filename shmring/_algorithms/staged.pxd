# The collectives whose results come straight from what other ranks staged. Chunk by chunk a rank stages the part of its
# x that others need, and takes its own part by copying (broadcast, scatter, gather, all_gather, all_to_all) or by
# folding (small all_reduce, most of reduce, reduce_scatter, scan, exscan). The call line announces the first chunk, so
# a message of one chunk needs one synchronisation. A tiny message lies in the call line itself.
#
# Every function returns at once and records in call.awaited what the call waits for.

from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from .._core.descriptor cimport finish, may_ping, offers_in_place, step_lines, write_descriptor
from .._core.group cimport (
    BLOCKED, BROADCAST, DONE, FAR, GATHER, NEAR, PROGRESSED, REDUCE, SCATTER, SMALL, TINY, Call, Cursor, Group,
    await_lines, begin_call, blocked_on, check_line, count_path, counter, gives, is_late, is_scan, is_split,
    limit_unverified, line_of, piece_for, piece_of_x, publish, publish_line, repeats_last, runs_here, takes,
)
from .._core.placement cimport (
    goes_backwards, keeps_to_window, pieces_nbytes, place_of_piece, prefetch_next_slot, streams_slots, swapped_slot,
    swaps_buffers, window_nbytes_of,
)
from .._core.segment cimport SR_CACHE_LINE, SR_STAGED, sr_flag_reached
from .._core.staging cimport (
    blocked_on_credit, chunk_of_reduce, give_credit, has_credit, next_begin, next_chunk, slot_begin_within, slot_nbytes,
)
from .in_place cimport step_in_place
from .pieces cimport keep_result_of_own, part_of, take_pieces, takes_from


# ---- staging and taking one chunk ----------------------------------------------------------------------------

cdef inline uint64_t pieces_slot(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return slot_begin_within(g, cursor.position, pieces_nbytes(g, c, next_chunk(c, cursor)), c.window_nbytes)


cdef inline uint64_t pieces_end(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return pieces_slot(g, c, cursor) + slot_nbytes(pieces_nbytes(g, c, next_chunk(c, cursor)))


cdef inline void advance_pieces(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, cursor)
    cursor.position = pieces_end(g, c, cursor)
    cursor.offset += nbytes


cdef inline void stage_pieces(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef uint64_t slot_at = pieces_slot(g, c, &c.stage)
    cdef int taker
    if is_split(c):
        for taker in range(g.size):
            if takes_from(g, c, taker, g.rank):
                stage_piece(g, c, place_of_piece(g, c, g.rank, taker, slot_at, nbytes), taker, nbytes)
    else:
        stage_piece(g, c, swapped_slot(g, c, g.rank, slot_at), g.rank, nbytes)
    advance_pieces(g, c, &c.stage)


cdef inline void stage_piece(Group *g, Call *c, unsigned char *there, int taker, size_t nbytes) noexcept nogil:
    cdef size_t begin = next_begin(c, &c.stage)
    cdef size_t part = part_of(c.given, taker, begin, nbytes)
    if part > 0:
        g.kernels.copy(there, piece_for(c, taker) + begin, part, streams_slots(g, c))
        g.stats.bytes_sent += part


cdef inline void take_from_slots(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t slot_at = pieces_slot(g, c, &c.copy)
    cdef int giver
    for giver in range(g.size):
        g.source[giver] = place_of_piece(g, c, giver, g.rank, slot_at, nbytes)
    take_pieces(g, c, next_begin(c, &c.copy), nbytes)
    advance_pieces(g, c, &c.copy)
    c.copy_peer = 0
    give_credit(g, c.copy.position)


# ---- going ahead ---------------------------------------------------------------------------------------------

# True if this rank may complete the call before all others have entered it, see repeats_last. In other kinds of calls
# a rank waits for all others in any case. Measured in turn on 2 CPUs: without this, broadcast, reduce, gather and scan
# of 8 B take 4 to 5 times as long among 4 ranks, and 6 to 15 times among 8.
cdef inline bint goes_ahead(Group *g, Call *c) noexcept nogil:
    return (repeats_last(g, c)
            and (c.kind == BROADCAST or c.kind == SCATTER or is_scan(c)
                 or ((c.kind == GATHER or c.kind == REDUCE) and g.rank != c.root)))


# As await_lines, but only for the ranks that give this rank data.
cdef inline int await_givers(Group *g, Call *c) noexcept nogil:
    cdef int status
    while c.giver < g.size:
        if takes_from(g, c, g.rank, c.giver):
            status = check_line(g, c, c.giver, c.seq, c.fingerprint)
            if status != DONE:
                return blocked_on_giver(g, c) if status == BLOCKED else status
        c.giver += 1
    return limit_unverified(g, c)


# As blocked_on_line: wait for the ranks of this CPU first, since all of them enter the call, also those that give
# nothing.
cdef inline int blocked_on_giver(Group *g, Call *c) noexcept nogil:
    cdef int rank
    for rank in range(g.size):
        if is_late(g, rank, c.seq) and runs_here(g, rank):
            return blocked_on(c, &line_of(g, rank, c.seq).seq, c.seq, rank)
    return blocked_on(c, &line_of(g, c.giver, c.seq).seq, c.seq, c.giver)


# True if all ranks that give this rank data offer them in place. Their call lines have arrived.
cdef inline bint givers_offer_in_place(Group *g, Call *c) noexcept nogil:
    cdef int giver
    for giver in range(g.size):
        if takes_from(g, c, g.rank, giver) and not offers_in_place(g, c, giver):
            return False
    return True


# As step_lines. A rank that only takes learns from the lines of its givers whether the call is in place. A rank that
# gives data and offers them in place needs all lines: another rank may not offer its own. One that has staged its
# data knows that the call is not read in place.
cdef inline int step_givers_lines(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not goes_ahead(g, c) or may_ping(g, c) or (c.in_place and gives(g, c, g.rank)):
        return step_lines(g, c)
    status = await_givers(g, c)
    if status == DONE and c.in_place:
        c.in_place = givers_offer_in_place(g, c)
    return status


# ---- tiny: the pieces lie in the call lines ------------------------------------------------------------------

cdef inline void enter_tiny(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    if c.x_nbytes > 0 and gives(g, c, g.rank):
        memcpy(line_of(g, g.rank, c.seq).payload, c.x, c.x_nbytes)
    publish_line(g, c)


cdef inline int step_tiny(Group *g, Call *c) noexcept nogil:
    cdef int giver
    cdef int status = await_givers(g, c) if goes_ahead(g, c) else await_lines(g, c)
    if status != DONE:
        return status
    if c.nbytes > 0:
        if takes(c, g.rank):
            for giver in range(g.size):
                g.source[giver] = line_of(g, giver, c.seq).payload + piece_of_x(c, g.rank)
            take_pieces(g, c, 0, c.nbytes)
        else:
            keep_result_of_own(g, c)
    count_path(g, TINY)
    return DONE


# ---- through slots -------------------------------------------------------------------------------------------

cdef inline void enter_staged(Group *g, Call *c) noexcept nogil:
    # Two slots must fit, wherever the first begins. With thousands of ranks one cache line for each does not fit.
    cdef bint cached = (keeps_to_window(g, c, pieces_nbytes(g, c, c.nbytes), swaps_buffers(g, c))
                        and pieces_nbytes(g, c, 1) <= g.tuning.cached_chunk_nbytes)
    cdef size_t most_in_slot = g.tuning.cached_chunk_nbytes if cached else g.tuning.exchange_nbytes
    begin_call(g, c)
    write_descriptor(g, c)
    c.window_nbytes = window_nbytes_of(g.tuning) if cached else g.staging_nbytes
    c.chunk_nbytes = c.nbytes
    if pieces_nbytes(g, c, c.nbytes) > most_in_slot:
        # Whole cache lines are whole items of all dtypes that are folded.
        c.chunk_nbytes = most_in_slot // (g.size - 1 if is_split(c) else 1)
        c.chunk_nbytes = max(c.chunk_nbytes & ~<size_t> (SR_CACHE_LINE - 1), <size_t> SR_CACHE_LINE)
    if c.kind == REDUCE:
        c.chunk_nbytes = min(c.chunk_nbytes, chunk_of_reduce(c))
    c.backwards = goes_backwards(c)
    c.stage.position = c.copy.position = g.position


# The first step publishes the line, after it has staged the first chunk. While lines are missing, a rank stages as much
# as it has credit for. After that it stages up to two chunks ahead of what it has taken, then takes, and stages further
# ahead only if it would wait otherwise.
cdef inline int step_staged(Group *g, Call *c) noexcept nogil:
    cdef bint stages
    cdef int status
    if not c.announced:
        if gives(g, c, g.rank) and not c.in_place:
            if not has_credit(g, pieces_end(g, c, &c.stage)):
                return blocked_on_credit(g, c, pieces_end(g, c, &c.stage))
            stage_pieces(g, c)
            publish_line(g, c)
            prefetch_next_slot(g, c)
        else:
            publish_line(g, c)
        c.announced = True
    stages = can_stage_pieces(g, c)
    if not c.lines_seen or c.ping:
        if stages:
            stage_and_publish(g, c)
            return PROGRESSED
        status = step_givers_lines(g, c)
        if status != DONE:
            return status
        if c.in_place:
            return PROGRESSED
        if not takes(c, g.rank):
            skip_taking(g, c)
        stages = can_stage_pieces(g, c)
    if c.in_place:
        return step_in_place(g, c)
    if stages and c.stage.offset < c.copy.offset + 2 * c.chunk_nbytes:
        stage_and_publish(g, c)
        return PROGRESSED
    if can_take(g, c):
        if pieces_are_there(g, c):
            take_from_slots(g, c)
            return PROGRESSED
        if not stages:
            return blocked_on_piece(g, c)
    if stages:
        stage_and_publish(g, c)
        return PROGRESSED
    if c.copy.offset == c.nbytes and (c.stage.offset == c.nbytes or not gives(g, c, g.rank)):
        return finish_staged(g, c)
    return blocked_on_credit(g, c, pieces_end(g, c, &c.stage))


cdef inline bint can_stage_pieces(Group *g, Call *c) noexcept nogil:
    return (gives(g, c, g.rank) and not c.in_place and c.stage.offset < c.nbytes
            and has_credit(g, pieces_end(g, c, &c.stage)))


# Pass over all slots, on a rank that takes nothing. Called only once the call is known not to be in place, because a
# call in place leaves the positions to the next call.
cdef inline void skip_taking(Group *g, Call *c) noexcept nogil:
    while c.copy.offset < c.nbytes:
        advance_pieces(g, c, &c.copy)
    give_credit(g, c.copy.position)


# True if this rank may take its next chunk. Taking writes to out, which may be x, so the same chunk of x must have been
# staged before.
cdef inline bint can_take(Group *g, Call *c) noexcept nogil:
    return c.copy.offset < c.nbytes and (c.copy.offset < c.stage.offset or not gives(g, c, g.rank))


cdef inline void stage_and_publish(Group *g, Call *c) noexcept nogil:
    stage_pieces(g, c)
    publish(g, SR_STAGED, c.stage.position)


# True if the giver's call line announced the chunk: it announces the first one, if the giver has staged it.
cdef inline bint is_announced(Group *g, Call *c, int giver) noexcept nogil:
    return c.copy.offset == 0 and not offers_in_place(g, c, giver)


cdef inline bint pieces_are_there(Group *g, Call *c) noexcept nogil:
    cdef uint64_t end = pieces_end(g, c, &c.copy)
    while c.copy_peer < g.size:
        if (takes_from(g, c, g.rank, c.copy_peer) and part_of(c.taken, c.copy_peer, next_begin(c, &c.copy), 1) > 0
                and not is_announced(g, c, c.copy_peer)
                and not sr_flag_reached(counter(g, c.copy_peer, SR_STAGED), end)):
            return False
        c.copy_peer += 1
    return True


cdef inline int blocked_on_piece(Group *g, Call *c) noexcept nogil:
    return blocked_on(c, counter(g, c.copy_peer, SR_STAGED), pieces_end(g, c, &c.copy), c.copy_peer)


cdef inline int finish_staged(Group *g, Call *c) noexcept nogil:
    keep_result_of_own(g, c)
    g.position = c.copy.position
    finish(g, c, SMALL if c.chunk_nbytes == c.nbytes else (FAR if g.far else NEAR))
    return DONE
