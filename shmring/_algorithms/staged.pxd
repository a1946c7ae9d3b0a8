# The collectives whose results come straight from what other ranks staged. Chunk by chunk a rank stages the part of its
# x that others need, and takes its own part by copying (broadcast, scatter, gather, all_gather, all_to_all) or by
# folding (small all_reduce, most of reduce, reduce_scatter, scan, exscan). The call line announces the first chunk, so
# a message of one chunk needs one synchronisation. A tiny message lies in the call line itself.
#
# Every function returns at once and records in call.awaited what the call waits for.

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from .._core.descriptor cimport describe, descriptor, finish, may_ping, offers_in_place, step_lines
from .._core.group cimport (
    ABORTED, ALL_GATHER, ALL_TO_ALL, BLOCKED, BROADCAST, DEAD, DONE, FAR, GATHER, MISMATCHED, NEAR, PROGRESSED, REDUCE,
    SCAN, SCATTER, SINGLE_COPY, SMALL, TINY, UNREADABLE, ZERO_COPY, Call, Cursor, Group, Piece, await_lines, begin_call,
    blocked_on, bytes_within, check_line, check_liveness, count_path, counter, gives, gives_in_place, is_joined,
    is_late, is_moved, is_scan, is_sliced, is_split, line_of, piece_for, piece_from, piece_of_x, publish, publish_line,
    repeats_last, runs_here, see_calls_before, shared_address, takes,
)
from .._core.placement cimport (
    copy_from_far, goes_backwards, keeps_to_window, pieces_nbytes, place_of_piece, prefetch_next_slot, streams_out,
    streams_slots, swapped_slot, swaps_buffers, window_nbytes_of,
)
from .._core.schedule cimport sr_slice_begin_grained
from .._core.segment cimport (
    SR_BEFORE_RELEASE, SR_CACHE_LINE, SR_FAULT, SR_FINISHED, SR_NO_ABORT, SR_PRIVATE, SR_STAGED, sr_descriptor,
    sr_flag_load_after_reads, sr_flag_reached, sr_liveness, sr_liveness_died, sr_liveness_task, sr_single_copy,
)
from .._core.staging cimport (
    blocked_on_credit, chunk_of_reduce, fold_sources, give_credit, has_credit, next_begin, next_chunk,
    slot_begin_within, slot_nbytes,
)


# ---- which rank takes what from which ------------------------------------------------------------------------

cdef inline bint takes_from(Group *g, Call *c, int taker, int giver) noexcept nogil:
    if taker == giver or not gives(g, c, giver) or not takes(c, taker):
        return False
    return not is_scan(c) or giver < taker


# The bytes of rank's piece in a chunk of nbytes. Chunks are cut from the largest piece, so shorter pieces end before
# it.
cdef inline size_t part_of(const Piece *pieces, int rank, size_t offset, size_t nbytes) noexcept nogil:
    return nbytes if pieces == NULL else bytes_within(pieces[rank].nbytes, offset, nbytes)


# ---- staging and taking one chunk ----------------------------------------------------------------------------

cdef inline uint64_t pieces_slot(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return slot_begin_within(g, cursor.position, pieces_nbytes(g, c, next_chunk(c, cursor)), c.window_nbytes)


cdef inline uint64_t piece_end(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return pieces_slot(g, c, cursor) + slot_nbytes(pieces_nbytes(g, c, next_chunk(c, cursor)))


cdef inline void advance_piece(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, cursor)
    cursor.position = piece_end(g, c, cursor)
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
    advance_piece(g, c, &c.stage)


cdef inline void stage_piece(Group *g, Call *c, unsigned char *there, int taker, size_t nbytes) noexcept nogil:
    cdef size_t begin = next_begin(c, &c.stage)
    cdef size_t part = part_of(c.given, taker, begin, nbytes)
    if part > 0:
        g.kernels.copy(there, piece_for(c, taker) + begin, part, streams_slots(g, c))
        g.stats.bytes_sent += part


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


cdef inline void take_from_slots(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t slot_at = pieces_slot(g, c, &c.copy)
    cdef int giver
    for giver in range(g.size):
        g.source[giver] = place_of_piece(g, c, giver, g.rank, slot_at, nbytes)
    take_pieces(g, c, next_begin(c, &c.copy), nbytes)
    advance_piece(g, c, &c.copy)
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
    return see_calls_before(g, c)


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
    describe(g, c)
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


cdef inline int step_staged(Group *g, Call *c) noexcept nogil:
    cdef bint stages
    cdef int status
    if not c.announced:
        if gives(g, c, g.rank) and not c.in_place:
            if not has_credit(g, piece_end(g, c, &c.stage)):
                return blocked_on_credit(g, c, piece_end(g, c, &c.stage))
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
    return blocked_on_credit(g, c, piece_end(g, c, &c.stage))


cdef inline bint can_stage_pieces(Group *g, Call *c) noexcept nogil:
    return (gives(g, c, g.rank) and not c.in_place and c.stage.offset < c.nbytes
            and has_credit(g, piece_end(g, c, &c.stage)))


# Pass over all slots, on a rank that takes nothing. Called only once the call is known not to be in place, because a
# call in place leaves the positions to the next call.
cdef inline void skip_taking(Group *g, Call *c) noexcept nogil:
    while c.copy.offset < c.nbytes:
        advance_piece(g, c, &c.copy)
    give_credit(g, c.copy.position)


# True if the next chunk may be taken: out may overwrite x, so the same chunk of x must be staged before.
cdef inline bint can_take(Group *g, Call *c) noexcept nogil:
    return c.copy.offset < c.nbytes and (c.copy.offset < c.stage.offset or not gives(g, c, g.rank))


cdef inline void stage_and_publish(Group *g, Call *c) noexcept nogil:
    stage_pieces(g, c)
    publish(g, SR_STAGED, c.stage.position)


# True if the giver's call line announced the chunk: it announces the first one, if the giver has staged it.
cdef inline bint is_announced(Group *g, Call *c, int giver) noexcept nogil:
    return c.copy.offset == 0 and not offers_in_place(g, c, giver)


cdef inline bint pieces_are_there(Group *g, Call *c) noexcept nogil:
    cdef uint64_t end = piece_end(g, c, &c.copy)
    while c.copy_peer < g.size:
        if (takes_from(g, c, g.rank, c.copy_peer) and part_of(c.taken, c.copy_peer, next_begin(c, &c.copy), 1) > 0
                and not is_announced(g, c, c.copy_peer)
                and not sr_flag_reached(counter(g, c.copy_peer, SR_STAGED), end)):
            return False
        c.copy_peer += 1
    return True


cdef inline int blocked_on_piece(Group *g, Call *c) noexcept nogil:
    return blocked_on(c, counter(g, c.copy_peer, SR_STAGED), piece_end(g, c, &c.copy), c.copy_peer)


cdef inline int finish_staged(Group *g, Call *c) noexcept nogil:
    keep_result_of_own(g, c)
    g.position = c.copy.position
    finish(g, c, SMALL if c.chunk_nbytes == c.nbytes else (FAR if g.far else NEAR))
    return DONE


# ---- in place ------------------------------------------------------------------------------------------------

cdef enum:
    IN_PLACE_STEP_NBYTES = 1 << 20   # moved in one step, so that other calls get their turn


# The address of a giver's x: in this process, or in the giver's for private memory; NULL if the descriptor is invalid.
cdef inline const unsigned char *given_address(Group *g, Call *c, int giver) noexcept nogil:
    cdef sr_descriptor *theirs = descriptor(g, c, giver)
    if theirs.x_block == SR_PRIVATE:
        return <unsigned char *> <uintptr_t> theirs.x_offset if is_moved(g, c) else NULL
    return shared_address(g, theirs.x_block, giver, theirs.x_offset, c.x_nbytes)


# Set g.source to every giver's x, `skip` bytes in. Return MISMATCHED if a descriptor is invalid.
cdef inline int find_given(Group *g, Call *c, size_t skip) noexcept nogil:
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


# Set g.target to the out of every rank that takes a result, `skip` bytes in. Return as find_given.
cdef inline int find_taking(Group *g, Call *c, size_t skip) noexcept nogil:
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


# As find_given. The addresses of the pieces came with their lengths, and were checked on arrival.
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
    status = find_given(g, c, begin * c.itemsize)
    if status == DONE:
        status = find_taking(g, c, begin * c.itemsize)
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
            status = find_given(g, c, piece_of_x(c, g.rank) + c.copy.offset)
        if status == DONE:
            status = take_pieces(g, c, c.copy.offset, nbytes)
        if status != DONE:
            return status
        c.copy.offset += nbytes
        if c.copy.offset < c.nbytes:
            return PROGRESSED
    keep_result_of_own(g, c)
    return DONE


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
