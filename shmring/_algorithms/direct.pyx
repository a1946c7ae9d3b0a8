# Large reductions through slots, and the choice of an algorithm for every call among the ranks of one host. The other
# algorithms are in staged (tiny and small messages, data movement, zero-copy) and in named (those that the caller
# names).
#
# Every function runs without the GIL, returns at once, and records in call.awaited what the call waits for.

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memmove

from .._core.descriptor cimport describe, finish, may_ping, step_lines
from .._core.group cimport (
    AUTO, BIDIRECTIONAL_RING, BY_CHAIN, BY_MASTER, DONE, DOUBLE_TREE, EXSCAN, FAR, HALVING_DOUBLING, INVALID, MASTER,
    MOST_AHEAD, NEAR, PROGRESSED, REDUCE, RING, SCAN, TREE, Call, Cursor, Group, all_reached, begin_call, blocked_on,
    blocked_on_counter, check_line, counter, fingerprint_of, is_before, is_folded, is_moved, is_scan, is_sliced,
    keeps_single, publish, publish_line, repeats_last, see_calls_before, takes, verify,
)
from .._core.kernels cimport sr_dtype_is_widened
from .._core.placement cimport (
    copy_from_far, fold_prefetching, goes_backwards, keeps_to_window, may_swap_places, pitch_of, place_of_result,
    place_of_slice, streams_out, streams_slots, window_nbytes_of, writes_back,
)
from .._core.schedule cimport sr_slice_begin_grained
from .._core.segment cimport (
    SR_CACHE_LINE, SR_LINE, SR_PAYLOAD_NBYTES, SR_REDUCED, SR_STAGED, sr_flag, sr_flag_reached,
)
from .._core.staging cimport (
    blocked_on_credit, chunk_of_reduce, fold_hop, give_credit, has_credit, next_begin, next_chunk, slot, slot_begin,
    slot_begin_within, slot_end, slot_nbytes, whole_items,
)
from .named cimport (
    enter_double_tree, enter_halving, enter_ring, enter_tree, step_double_tree, step_halving, step_ring, step_tree,
)
from .staged cimport enter_exchange, enter_tiny, step_exchange, step_shared, step_tiny


# ---- large: chunks through slots -----------------------------------------------------------------------------

# The length of a chunk, unless the message keeps to the cached window.
cdef inline size_t chunk_of(Group *g, Call *c) noexcept nogil:
    if c.nbytes > g.tuning.one_chunk_nbytes:
        return whole_items(c, g.tuning.chunk_nbytes)
    return chunk_of_reduce(c) if c.kind == REDUCE else c.nbytes


# The length of a chunk in the cached window: chunks have equal lengths, so that the last is not short. If ranks swap
# places, all slices of a chunk have one length, and the slot has a line for each slice in addition.
cdef inline size_t chunk_in_window(Group *g, Call *c) noexcept nogil:
    cdef size_t grain = <size_t> g.size * SR_CACHE_LINE if c.swaps_places else SR_LINE
    cdef size_t most = g.tuning.cached_chunk_nbytes
    cdef size_t nbytes
    if c.swaps_places:
        most -= most % grain + grain
    nbytes = c.nbytes // ((c.nbytes - 1) // most + 1) + 1
    return whole_items(c, min(nbytes + (grain - 1) - (nbytes + (grain - 1)) % grain, most))


cdef void enter_direct(Group *g, Call *c) noexcept nogil:
    cdef bint cached = keeps_to_window(g, c, c.nbytes, g.size == 2)
    begin_call(g, c)
    describe(g, c)
    publish_line(g, c)
    c.swaps_places = cached and may_swap_places(g, c)
    c.chunk_nbytes = chunk_in_window(g, c) if cached else chunk_of(g, c)
    c.window_nbytes = window_nbytes_of(g.tuning) if cached else g.ring_nbytes
    c.backwards = goes_backwards(c)
    c.stage.position = c.fold.position = c.copy.position = g.position


# The bytes of a chunk's slot, which has room for any rank's skew.
cdef inline size_t room_of(Group *g, Call *c, size_t nbytes) noexcept nogil:
    return g.size * pitch_of(g, nbytes) if c.swaps_places else nbytes + SR_CACHE_LINE


cdef inline uint64_t chunk_slot(Group *g, Call *c, Cursor *cursor, size_t nbytes) noexcept nogil:
    return slot_begin_within(g, cursor.position, room_of(g, c, nbytes), c.window_nbytes)


cdef inline uint64_t chunk_end(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, cursor)
    return chunk_slot(g, c, cursor, nbytes) + slot_nbytes(room_of(g, c, nbytes))


cdef inline void advance(Group *g, Call *c, Cursor *cursor, uint64_t slot_at, size_t nbytes) noexcept nogil:
    cursor.position = slot_at + slot_nbytes(room_of(g, c, nbytes))
    cursor.offset += nbytes


# The begin of the owner's slice of a chunk or of a whole array, in bytes, which is the end of the slice before. With
# the algorithm "master" the slice of rank 0 is everything.
cdef inline size_t slice_begin(Group *g, Call *c, size_t nbytes, int owner) noexcept nogil:
    if c.algorithm == MASTER:
        return 0 if owner == 0 else nbytes
    return sr_slice_begin_grained(nbytes // c.itemsize, g.size, owner, SR_CACHE_LINE // c.itemsize) * c.itemsize


# ---- direct: stage, reduce the own slice, copy the others' results -------------------------------------------

cdef int step_direct(Group *g, Call *c) noexcept nogil:
    cdef int status
    cdef bint stages, copies
    if c.zero_copy:
        # The others' lines show whether their arrays are shared as well. Nothing is staged before that is known.
        status = step_lines(g, c)
        if status != DONE:
            return status
        if c.zero_copy:
            return step_shared(g, c)
    stages = can_stage(g, c)
    if not c.lines_seen or c.ping:
        if stages:
            stage_chunk(g, c)
            return PROGRESSED
        status = step_lines(g, c)
        if status != DONE:
            return status
    copies = c.copy.offset < c.fold.offset and (
        not takes(g, c, g.rank) or all_reached(g, SR_REDUCED, chunk_end(g, c, &c.copy), &c.copy_peer))
    if stages and copies and takes(g, c, g.rank) and next_chunk(c, &c.stage) == next_chunk(c, &c.copy):
        exchange_chunks(g, c)
        return PROGRESSED
    if stages and c.stage.offset - c.fold.offset < 2 * c.chunk_nbytes:
        stage_chunk(g, c)
        return PROGRESSED
    if (c.fold.offset < c.stage.offset
            and all_reached(g, SR_STAGED, chunk_end(g, c, &c.fold), &c.fold_peer)):
        fold_chunk(g, c)
        return PROGRESSED
    if copies:
        copy_chunk(g, c)
        if c.copy.offset < c.nbytes:
            return PROGRESSED
        g.position = c.copy.position
        finish(g, c, BY_MASTER if c.algorithm == MASTER else (FAR if g.far else NEAR))
        return DONE
    if stages:
        stage_chunk(g, c)
        return PROGRESSED
    return block_direct(g, c)


cdef inline bint can_stage(Group *g, Call *c) noexcept nogil:
    return c.stage.offset < c.nbytes and has_credit(g, chunk_end(g, c, &c.stage))


# Wait for the oldest of the pipeline's stages. It never waits for a later stage of this rank, so that the ranks cannot
# deadlock.
cdef int block_direct(Group *g, Call *c) noexcept nogil:
    if c.copy.offset < c.fold.offset:
        return blocked_on_counter(g, c, SR_REDUCED, chunk_end(g, c, &c.copy), c.copy_peer)
    if c.fold.offset < c.stage.offset:
        return blocked_on_counter(g, c, SR_STAGED, chunk_end(g, c, &c.fold), c.fold_peer)
    return blocked_on_credit(g, c, chunk_end(g, c, &c.stage))


# Stage the next chunk without this rank's own slice, which this rank reads in place.
cdef void stage_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef uint64_t slot_at = chunk_slot(g, c, &c.stage, nbytes)
    cdef const unsigned char *x = c.x + next_begin(c, &c.stage)
    cdef uint32_t stream = streams_slots(g, c)
    cdef size_t begin = slice_begin(g, c, nbytes, g.rank)
    cdef size_t end = slice_begin(g, c, nbytes, g.rank + 1)
    cdef size_t at
    cdef int owner
    g.stats.bytes_sent += nbytes - (end - begin)
    if c.swaps_places:
        for owner in range(g.size):
            if owner != g.rank:
                at = slice_begin(g, c, nbytes, owner)
                g.kernels.copy(place_of_slice(g, c, g.rank, owner, slot_at, nbytes, at), x + at,
                               slice_begin(g, c, nbytes, owner + 1) - at, stream)
    else:
        if begin > 0:   # the slices before the own one, then those after it
            g.kernels.copy(place_of_slice(g, c, g.rank, 0, slot_at, nbytes, 0), x, begin, stream)
        if end < nbytes:
            g.kernels.copy(place_of_slice(g, c, g.rank, g.rank + 1, slot_at, nbytes, end), x + end, nbytes - end,
                           stream)
    advance(g, c, &c.stage, slot_at, nbytes)
    publish(g, SR_STAGED, c.stage.position)


# Reduce this rank's slice of a chunk: into out if this rank takes the result, and into slots for the others that do.
cdef void fold_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.fold)
    cdef uint64_t slot_at = chunk_slot(g, c, &c.fold, nbytes)
    cdef uint32_t stream = 0
    cdef int ntargets = 0
    cdef size_t begin = slice_begin(g, c, nbytes, g.rank)
    cdef size_t end = slice_begin(g, c, nbytes, g.rank + 1)
    cdef int rank
    if begin < end:
        for rank in range(g.size):
            g.source[rank] = place_of_slice(g, c, rank, g.rank, slot_at, nbytes, begin)
        if takes(g, c, g.rank):
            stream = streams_out(g, c)
            g.target[0] = c.out + next_begin(c, &c.fold) + begin
            ntargets = 1
        for rank in range(g.size):
            if places_result_for(g, c, rank):
                stream |= <uint32_t> streams_slots(g, c) << ntargets
                g.target[ntargets] = <unsigned char *> g.source[rank]
                g.stats.bytes_sent += end - begin
                ntargets += 1
        g.source[g.rank] = c.x + next_begin(c, &c.fold) + begin
        if g.far and stream == 0 and c.kind != REDUCE and not writes_back(g, c):
            fold_prefetching(g, c, ntargets, end - begin)
        else:
            g.kernels.fold[c.dtype][c.op](g.target, ntargets, stream, g.source, g.size, (end - begin) // c.itemsize,
                                          <uint32_t> g.size)
    advance(g, c, &c.fold, slot_at, nbytes)
    c.fold_peer = 0
    publish(g, SR_REDUCED, c.fold.position)


# True if this rank, the owner of a slice, stores the result over the data that `rank` has staged for it. An owner that
# does not write back stores the result once, in its own slot.
cdef inline bint places_result_for(Group *g, Call *c, int rank) noexcept nogil:
    if writes_back(g, c):
        return rank != g.rank and takes(g, c, rank)
    return rank == g.rank and (c.kind != REDUCE or rank != c.root)


cdef void copy_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t slot_at = chunk_slot(g, c, &c.copy, nbytes)
    cdef unsigned char *out = c.out + next_begin(c, &c.copy)
    cdef uint32_t stream = streams_out(g, c)
    cdef size_t begin, end
    cdef int owner
    for owner in range(g.size if takes(g, c, g.rank) else 0):
        begin = slice_begin(g, c, nbytes, owner)
        end = slice_begin(g, c, nbytes, owner + 1)
        if owner != g.rank and begin < end:
            copy_from_far(g, out + begin, place_of_result(g, c, owner, slot_at, nbytes, begin), end - begin, stream)
    advance(g, c, &c.copy, slot_at, nbytes)
    c.copy_peer = 0
    give_credit(g, c.copy.position)


# Do stage_chunk and copy_chunk at once, for chunks of equal length. Loads of one copy overlap with stores of the other,
# which saves a tenth of the call's time at 64 MiB (bench/peers/peers.py).
cdef void exchange_chunks(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef uint64_t staged_at = chunk_slot(g, c, &c.stage, nbytes)
    cdef uint64_t copied_at = chunk_slot(g, c, &c.copy, nbytes)
    cdef const unsigned char *x = c.x + next_begin(c, &c.stage)
    cdef unsigned char *out = c.out + next_begin(c, &c.copy)
    cdef uint32_t stream_out = streams_out(g, c)
    cdef size_t begin, end
    cdef int owner
    for owner in range(g.size):
        begin = slice_begin(g, c, nbytes, owner)
        end = slice_begin(g, c, nbytes, owner + 1)
        if owner != g.rank and begin < end:
            g.kernels.copy_two(place_of_slice(g, c, g.rank, owner, staged_at, nbytes, begin), x + begin,
                               streams_slots(g, c), out + begin,
                               place_of_result(g, c, owner, copied_at, nbytes, begin), stream_out, end - begin)
            g.stats.bytes_sent += end - begin
    advance(g, c, &c.stage, staged_at, nbytes)
    publish(g, SR_STAGED, c.stage.position)
    advance(g, c, &c.copy, copied_at, nbytes)
    c.copy_peer = 0
    give_credit(g, c.copy.position)


# ---- chain: partial results from rank to rank ------------------------------------------------------------------

# reduce, scan and exscan with more ranks than CPUs: the pipelined chain of the MPI libraries. Chunk by chunk a partial
# result goes from rank to rank, in rank order, and each rank folds its x into it. Each x is read once, by its own rank.
# If all ranks staged and folded, every x would move several times, and in a scan the work would grow with the square of
# the number of ranks. That work runs in parallel only if each rank has a CPU. all_reduce gains nothing from a chain: it
# takes 0.9 to 1.2 of the time with 4 and 8 ranks on 2 CPUs.

cdef enum:
    LINK_NBYTES = 64 << 10   # the longest chunk: a rank begins once the rank before it has folded the first


# True if the call may run as a chain. 16- and 8-bit floats may not: their partial results are wider than their items.
cdef bint may_be_chain(const Group *g, const Call *c) noexcept nogil:
    return (g.oversubscribed and c.nbytes >= g.tuning.chain_nbytes
            and (c.kind == REDUCE or is_scan(c)) and not is_moved(g, c) and not sr_dtype_is_widened(c.dtype))


cdef void enter_chain(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    describe(g, c)
    publish_line(g, c)
    c.relayed = True
    c.chunk_nbytes = whole_items(c, min(<size_t> g.tuning.exchange_nbytes, <size_t> LINK_NBYTES))
    c.fold.position = c.copy.position = g.position


cdef inline uint64_t link_begin(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return slot_begin(g, cursor.position, next_chunk(c, cursor))


cdef inline uint64_t link_end(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return slot_end(g, cursor.position, next_chunk(c, cursor))


cdef inline void advance_link(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, cursor)
    cursor.position = link_end(g, c, cursor)
    cursor.offset += nbytes


# The place of rank's partial result of a chunk. All ranks use one slot, and each overwrites the result of the rank
# before. In an exscan that result is this rank's own, which it copies after it has passed its partial result on; so
# ranks alternate between two slots.
cdef inline unsigned char *partial_of(Group *g, Call *c, int rank, uint64_t begin) noexcept nogil:
    return slot(g, rank & 1 if c.kind == EXSCAN else 0, begin)


# True if this rank copies the result from the slot of the last rank.
cdef inline bint takes_from_last(const Group *g, const Call *c) noexcept nogil:
    return c.kind == REDUCE and c.root == g.rank and c.root != g.size - 1


cdef int step_chain(Group *g, Call *c) noexcept nogil:
    cdef sr_flag *staged
    cdef int status
    if not c.lines_seen or c.ping:
        status = step_line_before(g, c)
        if status != DONE:
            return status
    if c.zero_copy:
        return step_shared(g, c)
    if c.fold.offset < c.nbytes and partial_is_there(g, c) and may_hand_on(g, c):
        fold_link(g, c)
        return PROGRESSED
    if c.copy.offset < c.fold.offset:
        staged = counter(g, g.size - 1, SR_STAGED)
        if not sr_flag_reached(staged, link_end(g, c, &c.copy)):
            return blocked_on(c, staged, link_end(g, c, &c.copy), g.size - 1)
        take_from_last(g, c)
        return PROGRESSED
    if c.fold.offset == c.nbytes:
        g.position = c.fold.position
        finish(g, c, BY_CHAIN)
        return DONE
    if not partial_is_there(g, c):
        return blocked_on(c, counter(g, g.rank - 1, SR_STAGED), link_end(g, c, &c.fold), g.rank - 1)
    return blocked_on_credit(g, c, link_end(g, c, &c.fold))


# As step_lines. A rank that repeats its last call looks only at the line of the rank before it, which has compared its
# call with those of all ranks before. As in staged, the lines of later ranks are compared some calls later.
cdef int step_line_before(Group *g, Call *c) noexcept nogil:
    cdef int status = DONE
    if not repeats_last(g, c) or may_ping(g, c) or c.zero_copy:
        return step_lines(g, c)
    if g.rank > 0:
        status = check_line(g, c, g.rank - 1, c.seq, c.fingerprint)
    return see_calls_before(g, c) if status == DONE else status


cdef inline bint partial_is_there(Group *g, Call *c) noexcept nogil:
    return g.rank == 0 or sr_flag_reached(counter(g, g.rank - 1, SR_STAGED), link_end(g, c, &c.fold))


# True if the slot of the next partial result is free. Rank 0, which begins to use it, checks that all ranks are done
# with it, and that its own copies are.
cdef inline bint may_hand_on(Group *g, Call *c) noexcept nogil:
    cdef uint64_t end = link_end(g, c, &c.fold)
    return g.rank > 0 or (has_credit(g, end) and not is_before(c.copy.position, end - g.lap_nbytes))


# Fold the next chunk of x into the partial result, for the next rank or as this rank's result.
cdef void fold_link(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.fold)
    cdef uint64_t begin = link_begin(g, c, &c.fold)
    cdef bint is_last = g.rank == g.size - 1
    cdef unsigned char *before = partial_of(g, c, g.rank - 1, begin) if g.rank > 0 else NULL
    cdef unsigned char *out = c.out + c.fold.offset
    cdef uint32_t stream = 0
    cdef int nsources = 0, ntargets = 0
    if g.rank > 0:
        g.source[0] = before
        nsources = 1
    g.source[nsources] = c.x + c.fold.offset
    if not is_last or not takes(g, c, g.rank):
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
    advance_link(g, c, &c.fold)
    publish(g, SR_STAGED, c.fold.position)
    if not takes_from_last(g, c):
        c.copy = c.fold
        give_credit(g, c.copy.position)


cdef void take_from_last(Group *g, Call *c) noexcept nogil:
    cdef unsigned char *result = partial_of(g, c, g.size - 1, link_begin(g, c, &c.copy))
    g.kernels.copy(c.out + c.copy.offset, result, next_chunk(c, &c.copy), streams_out(g, c))
    advance_link(g, c, &c.copy)
    give_credit(g, c.copy.position)


# ---- refused and empty calls ---------------------------------------------------------------------------------

# Enter a call whose arguments this rank refuses. Its record has the call, its line says that the call is invalid. The
# lines of the next call show whether all ranks have refused it.
cdef void enter_refused(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    g.recorded.invalid = True
    c.kind = INVALID
    c.fingerprint = fingerprint_of(c)
    publish_line(g, c)


cdef int step_refused(Group *g, Call *c) noexcept nogil:
    return verify(g, c, c.seq - MOST_AHEAD)


cdef void enter_nothing(Group *g, Call *c) noexcept nogil:
    pass


cdef int step_nothing(Group *g, Call *c) noexcept nogil:
    return DONE


# ---- choice --------------------------------------------------------------------------------------------------

cdef void enter_alone(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    g.verified = c.seq


cdef int step_alone(Group *g, Call *c) noexcept nogil:
    if c.nbytes == 0 or c.kind == EXSCAN:
        return DONE
    if is_folded(c) and not keeps_single(c):
        g.source[0] = c.x
        g.target[0] = c.out
        g.kernels.fold[c.dtype][c.op](g.target, 1, 0, g.source, 1, c.count, 1)
    elif c.out != c.x:
        memmove(c.out, c.x, c.nbytes)
    return DONE


cdef enum:
    MOST_READ_NBYTES = 512 << 10   # by the root of a reduce on shared CPUs; measured with 4 and 8 ranks on 2 CPUs


# The most bytes of other ranks' arrays that a rank reads in an all_reduce or reduce in which it folds whole arrays.
# - In a reduce of two ranks the root folds a chunk while the other rank stages the next, so both work. With slices
#   16 KiB to 64 MiB take up to 1.4 times as long (bench/peers/peers.py --call reduce).
# - If ranks share CPUs, slices of few data save no time either.
# - Folds of 16- and 8-bit floats take longer than copies, so ranks share them.
cdef inline size_t most_read(const Group *g, const Call *c) noexcept nogil:
    if c.kind == REDUCE and g.size == 2 and not sr_dtype_is_widened(c.dtype):
        return <size_t> -1
    if c.kind == REDUCE and g.oversubscribed and not sr_dtype_is_widened(c.dtype):
        return MOST_READ_NBYTES
    if c.kind == REDUCE or g.oversubscribed:
        return g.tuning.small_nbytes
    return g.tuning.small_all_reduce_nbytes


# Choose the algorithm only by the call and by values that are the same on all ranks, so that all ranks choose alike.
cdef void choose_local_algorithm(Group *g, Call *c) noexcept nogil:
    if g.size == 1:
        c.enter, c.step = enter_alone, step_alone
    elif c.given != NULL:
        c.enter, c.step = enter_exchange, step_exchange
    elif c.nbytes == 0:
        c.enter, c.step = enter_tiny, step_tiny
    elif c.algorithm == RING or c.algorithm == BIDIRECTIONAL_RING:
        c.enter, c.step = enter_ring, step_ring
    elif c.algorithm == HALVING_DOUBLING:
        c.enter, c.step = enter_halving, step_halving
    elif c.algorithm == TREE:
        c.enter, c.step = enter_tree, step_tree
    elif c.algorithm == DOUBLE_TREE:
        c.enter, c.step = enter_double_tree, step_double_tree
    elif c.algorithm != AUTO:
        c.enter, c.step = enter_direct, step_direct
    elif c.x_nbytes <= SR_PAYLOAD_NBYTES:
        c.enter, c.step = enter_tiny, step_tiny
    elif may_be_chain(g, c):
        c.enter, c.step = enter_chain, step_chain
    elif is_sliced(c) and c.nbytes * (g.size - 1) > most_read(g, c):
        c.enter, c.step = enter_direct, step_direct
    else:
        c.enter, c.step = enter_exchange, step_exchange
