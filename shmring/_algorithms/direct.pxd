# Large reductions: chunks go through slots, and each rank reduces one slice of each chunk.
#
# A rank stages the slices of the others, reduces its own, and copies the results of the others: three stages of a
# pipeline. With the algorithm "master" rank 0 reduces everything.

from libc.stdint cimport uint32_t, uint64_t

from .._core.descriptor cimport finish, step_lines, write_descriptor
from .._core.group cimport (
    BY_MASTER, DONE, FAR, MASTER, NEAR, PROGRESSED, REDUCE, Call, Cursor, Group, all_reached, begin_call,
    blocked_on_counter, publish, publish_line, takes,
)
from .._core.placement cimport (
    copy_from_far, fold_prefetching, goes_backwards, keeps_to_window, may_swap_places, pitch_of, place_of_result,
    place_of_slice, streams_out, streams_slots, window_nbytes_of, writes_back,
)
from .._core.schedule cimport sr_slice_begin_grained
from .._core.segment cimport SR_CACHE_LINE, SR_LINE, SR_REDUCED, SR_STAGED
from .._core.staging cimport (
    blocked_on_credit, chunk_of_reduce, give_credit, has_credit, next_begin, next_chunk, slot_begin_within, slot_nbytes,
    whole_items,
)
from .in_place cimport step_in_place


# ---- chunks ------------------------------------------------------------------------------------------------------

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


cdef inline void enter_direct(Group *g, Call *c) noexcept nogil:
    cdef bint cached = keeps_to_window(g, c, c.nbytes, g.size == 2)
    begin_call(g, c)
    write_descriptor(g, c)
    publish_line(g, c)
    c.swaps_places = cached and may_swap_places(g, c)
    c.chunk_nbytes = chunk_in_window(g, c) if cached else chunk_of(g, c)
    c.window_nbytes = window_nbytes_of(g.tuning) if cached else g.staging_nbytes
    c.backwards = goes_backwards(c)
    c.stage.position = c.fold.position = c.copy.position = g.position


# The bytes of a chunk's slot, which has room for the skew of any rank's data (see skew_of in descriptor.pxd).
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


# Return the begin of the owner's slice of a chunk, in bytes, which is the end of the slice before. With the algorithm
# "master" the slice of rank 0 is everything.
cdef inline size_t slice_begin(Group *g, Call *c, size_t nbytes, int owner) noexcept nogil:
    if c.algorithm == MASTER:
        return 0 if owner == 0 else nbytes
    return sr_slice_begin_grained(nbytes // c.itemsize, g.size, owner, SR_CACHE_LINE // c.itemsize) * c.itemsize


# ---- steps -------------------------------------------------------------------------------------------------------

# A rank stages up to two chunks ahead of what it has folded, then folds, then copies results, and stages further ahead
# only if it would wait otherwise. Until the lines of all ranks are there, it only stages.
cdef inline int step_direct(Group *g, Call *c) noexcept nogil:
    cdef int status
    cdef bint stages, copies
    if c.in_place:
        # The others' lines show whether their arrays are shared as well. Nothing is staged before that is known.
        status = step_lines(g, c)
        if status != DONE:
            return status
        if c.in_place:
            return step_in_place(g, c)
    stages = can_stage(g, c)
    if not c.lines_seen or c.ping:
        if stages:
            stage_chunk(g, c)
            return PROGRESSED
        status = step_lines(g, c)
        if status != DONE:
            return status
    copies = c.copy.offset < c.fold.offset and (
        not takes(c, g.rank) or all_reached(g, SR_REDUCED, chunk_end(g, c, &c.copy), &c.copy_peer))
    if stages and copies and takes(c, g.rank) and next_chunk(c, &c.stage) == next_chunk(c, &c.copy):
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
    return blocked_direct(g, c)


cdef inline bint can_stage(Group *g, Call *c) noexcept nogil:
    return c.stage.offset < c.nbytes and has_credit(g, chunk_end(g, c, &c.stage))


# Block on the oldest of the pipeline's stages. It never waits for a later stage of this rank, so the ranks cannot
# deadlock.
cdef inline int blocked_direct(Group *g, Call *c) noexcept nogil:
    if c.copy.offset < c.fold.offset:
        return blocked_on_counter(g, c, SR_REDUCED, chunk_end(g, c, &c.copy), c.copy_peer)
    if c.fold.offset < c.stage.offset:
        return blocked_on_counter(g, c, SR_STAGED, chunk_end(g, c, &c.fold), c.fold_peer)
    return blocked_on_credit(g, c, chunk_end(g, c, &c.stage))


# Stage the next chunk without this rank's own slice, which this rank reads in place.
cdef inline void stage_chunk(Group *g, Call *c) noexcept nogil:
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
cdef inline void fold_chunk(Group *g, Call *c) noexcept nogil:
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
        if takes(c, g.rank):
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
        return rank != g.rank and takes(c, rank)
    return rank == g.rank and (c.kind != REDUCE or rank != c.root)


cdef inline void copy_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t slot_at = chunk_slot(g, c, &c.copy, nbytes)
    cdef unsigned char *out = c.out + next_begin(c, &c.copy)
    cdef uint32_t stream = streams_out(g, c)
    cdef size_t begin, end
    cdef int owner
    for owner in range(g.size if takes(c, g.rank) else 0):
        begin = slice_begin(g, c, nbytes, owner)
        end = slice_begin(g, c, nbytes, owner + 1)
        if owner != g.rank and begin < end:
            copy_from_far(g, out + begin, place_of_result(g, c, owner, slot_at, nbytes, begin), end - begin, stream)
    advance(g, c, &c.copy, slot_at, nbytes)
    c.copy_peer = 0
    give_credit(g, c.copy.position)


# Do stage_chunk and copy_chunk at once, for chunks of equal length. Loads of one copy overlap with stores of the other,
# which saves a tenth of the call's time at 64 MiB (bench/peers/peers.py).
cdef inline void exchange_chunks(Group *g, Call *c) noexcept nogil:
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
