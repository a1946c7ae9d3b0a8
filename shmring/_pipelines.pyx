# The collectives as resumable pipelines over shared memory, without the GIL: tiny, small, direct (near and far
# path), zero-copy, broadcast, and the measurement of distance. Ring and tree are in _schedules.
# May know: _group, _schedules. Every function returns at once; what it waits for is in call.awaited.

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memmove

from ._group cimport *
from ._schedules cimport enter_stepped, step_ring, step_tree


# Sums in rank order of `count` elements that begin `offset` bytes into every source and target.
cdef inline void fold(Group *g, Call *c, int ntargets, uint32_t stream, int nsources, size_t count) noexcept nogil:
    g.kernels.fold[c.dtype][c.op](g.target, ntargets, stream, g.source, nsources, count, <uint32_t> nsources)


# ---- tiny: the call line is the collective -------------------------------------------------------------------

cdef void enter_tiny(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    if c.nbytes > 0 and (c.kind != BROADCAST or g.rank == c.root):
        memcpy(own_line(g, c.seq).payload, c.x, c.nbytes)
    publish_line(g, c)


cdef int step_tiny(Group *g, Call *c) noexcept nogil:
    cdef int rank
    cdef int status = await_lines(g, c)
    if status != DONE:
        return status
    if c.kind == ALL_REDUCE:
        for rank in range(g.size):
            g.source[rank] = g.lane[rank].line[c.seq & 1].payload
        g.target[0] = c.out
        fold(g, c, 1, 0, g.size, c.count)
    elif c.nbytes > 0:
        memcpy(c.out, g.lane[c.root].line[c.seq & 1].payload, c.nbytes)
    count_path(g, TINY)
    return DONE


# ---- small: one slot a rank, announced by the call line; everyone folds everything ---------------------------

cdef void enter_small(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    c.stage.position = slot_begin(g, g.position, c.nbytes)
    c.stage.offset = 0
    g.position = c.stage.position + slot_nbytes(c.nbytes)


cdef int step_small(Group *g, Call *c) noexcept nogil:
    cdef int status
    if c.stage.offset == 0:
        if not has_credit(g, g.position):
            return blocked_on_credit(g, c, g.position)
        if c.kind == ALL_REDUCE or g.rank == c.root:
            g.kernels.copy(slot(g, g.rank, c.stage.position), c.x, c.nbytes,
                           g.far and c.nbytes >= g.tuning.far_stream_nbytes)
            g.stats.bytes_sent += c.nbytes
        c.stage.offset = c.nbytes
        publish_line(g, c)
    status = await_lines(g, c)
    if status != DONE:
        return status
    finish_small(g, c)
    give_credit(g, g.position)
    count_path(g, SMALL)
    return DONE


cdef void finish_small(Group *g, Call *c) noexcept nogil:
    cdef int rank
    if c.kind == BROADCAST:
        if g.rank != c.root:
            memcpy(c.out, slot(g, c.root, c.stage.position), c.nbytes)
        elif c.out != c.x:
            memcpy(c.out, c.x, c.nbytes)
        return
    for rank in range(g.size):
        g.source[rank] = slot(g, rank, c.stage.position)
    g.source[g.rank] = c.x
    g.target[0] = c.out
    fold(g, c, 1, 0, g.size, c.count)


# ---- large: the line describes where the data lie ------------------------------------------------------------

cdef inline sr_descriptor *descriptor(Group *g, Call *c, int rank) noexcept nogil:
    return <sr_descriptor *> g.lane[rank].line[c.seq & 1].payload


cdef void enter_large(Group *g, Call *c) noexcept nogil:
    cdef sr_descriptor *mine
    cdef uint64_t now
    begin_call(g, c)
    mine = descriptor(g, c, g.rank)
    mine.x_block = c.x_block
    mine.x_offset = c.x_offset
    mine.out_block = c.out_block
    mine.out_offset = c.out_offset
    mine.far = g.next_far
    mine.ping = 0
    if g.rank == 0 and c.nbytes >= g.tuning.ping_nbytes and not g.header.forced_path:
        now = sr_now_ns()
        mine.ping = now - g.pinged_ns >= g.tuning.ping_interval_ns
    publish_line(g, c)
    c.zero_copy = (c.x_block != 0 and c.out_block != 0 and c.algorithm == AUTO
                   and c.nbytes >= g.tuning.zero_copy_nbytes)
    c.ping = False
    c.phase = 0
    c.fold_peer = c.copy_peer = 0
    c.chunk_nbytes = c.nbytes
    if c.nbytes > g.tuning.one_chunk_nbytes:
        c.chunk_nbytes = whole_items(c, g.tuning.chunk_nbytes)
    c.stage.position = c.fold.position = c.copy.position = g.position
    c.stage.offset = c.fold.offset = c.copy.offset = 0


# What the lines say together: zero-copy only when everyone can, the new distance, whether to measure it again.
cdef int read_descriptors(Group *g, Call *c) noexcept nogil:
    cdef int rank
    cdef sr_descriptor *theirs
    for rank in range(g.size):
        theirs = descriptor(g, c, rank)
        if theirs.x_block == 0 or theirs.out_block == 0:
            c.zero_copy = False
    theirs = descriptor(g, c, 0)
    g.announced_far = theirs.far
    c.ping = theirs.ping != 0
    return PROGRESSED


cdef inline void adopt_distance(Group *g) noexcept nogil:
    cdef size_t ring_nbytes
    if g.announced_far == g.far:
        return
    g.far = g.announced_far
    ring_nbytes = g.tuning.far_ring_nbytes if g.far else g.tuning.near_ring_nbytes
    if not g.header.forced_chunk_nbytes and ring_nbytes != g.ring_nbytes:
        # Under another ring size positions mean other places: everyone has to be through with the old ones.
        g.ring_nbytes = ring_nbytes
        g.floor = g.position


cdef inline void finish_large(Group *g, Call *c, int path) noexcept nogil:
    count_path(g, path)
    adopt_distance(g)


# The part of every large pipeline before its data paths part. DONE: the lines are there and agree.
cdef inline int step_lines(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
        read_descriptors(g, c)
        if c.ping:
            begin_ping(g, c)
    if c.ping:
        status = step_ping(g, c)
        if status != DONE:
            return status
        c.ping = False
    return DONE


# ---- direct: stage, reduce the own slice, copy the others' results -------------------------------------------

# Slice `index` of a chunk, in elements. "master" gives rank 0 everything, which is all that it changes.
cdef inline size_t slice_begin(Group *g, Call *c, size_t count, int index) noexcept nogil:
    if c.algorithm == MASTER:
        return 0 if index == 0 else count
    return sr_slice_begin_grained(count, g.size, index, 64 // c.itemsize)


cdef inline size_t next_chunk(Call *c, Head *head) noexcept nogil:
    cdef size_t left = c.nbytes - head.offset
    return left if left < c.chunk_nbytes else c.chunk_nbytes


cdef inline uint64_t chunk_end(Group *g, Call *c, Head *head) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, head)
    return slot_begin(g, head.position, nbytes) + slot_nbytes(nbytes)


cdef inline void advance(Head *head, uint64_t end, size_t nbytes) noexcept nogil:
    head.position = end
    head.offset += nbytes


cdef int step_direct(Group *g, Call *c) noexcept nogil:
    cdef int status
    cdef bint stages, copies
    if c.zero_copy:
        # Whether the others' arrays are shared too is in their lines; nothing is staged before that is known.
        status = step_lines(g, c)
        if status != DONE:
            return status
        if c.zero_copy:
            return step_zero_copy(g, c)
    stages = can_stage(g, c)
    if not c.lines_seen or c.ping:
        if stages:
            stage_chunk(g, c)
            return PROGRESSED
        status = step_lines(g, c)
        if status != DONE:
            return status
    copies = c.copy.offset < c.fold.offset and all_reached(g, SR_REDUCED, chunk_end(g, c, &c.copy), &c.copy_peer)
    if stages and copies and next_chunk(c, &c.stage) == next_chunk(c, &c.copy):
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
        finish_large(g, c, BY_MASTER if c.algorithm == MASTER else (FAR if g.far else NEAR))
        return DONE
    if stages:
        stage_chunk(g, c)
        return PROGRESSED
    return block_direct(g, c)


cdef inline bint can_stage(Group *g, Call *c) noexcept nogil:
    return (c.stage.offset < c.nbytes and c.stage.offset - c.fold.offset < g.tuning.lookahead * c.chunk_nbytes
            and has_credit(g, chunk_end(g, c, &c.stage)))


# Waits for what is oldest: that never depends on anything this rank still owes.
cdef int block_direct(Group *g, Call *c) noexcept nogil:
    if c.copy.offset < c.fold.offset:
        return blocked_on(c, counter(g, c.copy_peer, SR_REDUCED), chunk_end(g, c, &c.copy), c.copy_peer)
    if c.fold.offset < c.stage.offset:
        return blocked_on(c, counter(g, c.fold_peer, SR_STAGED), chunk_end(g, c, &c.fold), c.fold_peer)
    return blocked_on_credit(g, c, chunk_end(g, c, &c.stage))


# All but the own slice, which is read where it lies.
cdef void stage_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef size_t count = nbytes // c.itemsize
    cdef size_t begin = slice_begin(g, c, count, g.rank) * c.itemsize
    cdef size_t end = slice_begin(g, c, count, g.rank + 1) * c.itemsize
    cdef uint64_t slot_at = slot_begin(g, c.stage.position, nbytes)
    cdef unsigned char *staged = slot(g, g.rank, slot_at)
    cdef const unsigned char *x = c.x + c.stage.offset
    cdef uint32_t stream = g.far
    if begin > 0:
        g.kernels.copy(staged, x, begin, stream)
    if end < nbytes:
        g.kernels.copy(staged + end, x + end, nbytes - end, stream)
    advance(&c.stage, slot_at + slot_nbytes(nbytes), nbytes)
    g.stats.bytes_sent += nbytes - (end - begin)
    publish(g, SR_STAGED, c.stage.position)


# The result goes to the own array and, for the others, to where the own slice was left out of the slot.
cdef void fold_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.fold)
    cdef size_t count = nbytes // c.itemsize
    cdef size_t begin = slice_begin(g, c, count, g.rank)
    cdef size_t length = slice_begin(g, c, count, g.rank + 1) - begin
    cdef uint64_t slot_at = slot_begin(g, c.fold.position, nbytes)
    cdef uint32_t stream = 0
    cdef int rank
    begin *= c.itemsize
    if length > 0:
        for rank in range(g.size):
            g.source[rank] = slot(g, rank, slot_at) + begin
        g.source[g.rank] = c.x + c.fold.offset + begin
        g.target[0] = c.out + c.fold.offset + begin
        g.target[1] = slot(g, g.rank, slot_at) + begin
        if c.nbytes >= g.tuning.stream_out_nbytes:
            stream |= 1
        if g.far:
            stream |= 2
        fold(g, c, 2, stream, g.size, length)
        g.stats.bytes_sent += length * c.itemsize
    advance(&c.fold, slot_at + slot_nbytes(nbytes), nbytes)
    c.fold_peer = 0
    publish(g, SR_REDUCED, c.fold.position)


cdef void copy_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t slot_at = slot_begin(g, c.copy.position, nbytes)
    cdef unsigned char *out = c.out + c.copy.offset
    cdef uint32_t stream = c.nbytes >= g.tuning.stream_out_nbytes
    cdef size_t begin, end
    cdef int rank
    for rank in range(g.size):
        begin = slice_begin(g, c, nbytes // c.itemsize, rank) * c.itemsize
        end = slice_begin(g, c, nbytes // c.itemsize, rank + 1) * c.itemsize
        if rank != g.rank and begin < end:
            g.kernels.copy(out + begin, slot(g, rank, slot_at) + begin, end - begin, stream)
    advance(&c.copy, slot_at + slot_nbytes(nbytes), nbytes)
    c.copy_peer = 0
    give_credit(g, c.copy.position)


# stage_chunk and copy_chunk at once, for chunks of the same length: both leave out the own slice. Loads of the one
# overlap with stores of the other: a tenth of the whole at 64 MiB (bench/peers.py).
cdef void exchange_chunks(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef uint64_t staged_at = slot_begin(g, c.stage.position, nbytes)
    cdef uint64_t copied_at = slot_begin(g, c.copy.position, nbytes)
    cdef unsigned char *staged = slot(g, g.rank, staged_at)
    cdef const unsigned char *x = c.x + c.stage.offset
    cdef unsigned char *out = c.out + c.copy.offset
    cdef uint32_t stream_out = c.nbytes >= g.tuning.stream_out_nbytes
    cdef size_t begin, end
    cdef int rank
    for rank in range(g.size):
        begin = slice_begin(g, c, nbytes // c.itemsize, rank) * c.itemsize
        end = slice_begin(g, c, nbytes // c.itemsize, rank + 1) * c.itemsize
        if rank != g.rank and begin < end:
            g.kernels.copy_two(staged + begin, x + begin, g.far,
                               out + begin, slot(g, rank, copied_at) + begin, stream_out, end - begin)
            g.stats.bytes_sent += end - begin
    advance(&c.stage, staged_at + slot_nbytes(nbytes), nbytes)
    publish(g, SR_STAGED, c.stage.position)
    advance(&c.copy, copied_at + slot_nbytes(nbytes), nbytes)
    c.copy_peer = 0
    give_credit(g, c.copy.position)


# ---- zero-copy: reduce the own slice of everyone's array into everyone's array -------------------------------

# The address of rank's part of a shared block as this process maps it; NULL when the line lies.
cdef unsigned char *shared_address(Group *g, uint32_t block, int rank, uint64_t offset, size_t nbytes) noexcept nogil:
    cdef int i
    for i in range(g.nblocks):
        if g.block[i].id == block:
            if nbytes > g.block[i].stride or offset > g.block[i].stride - nbytes:
                return NULL
            return <unsigned char *> (g.block[i].begin + <uintptr_t> rank * g.block[i].stride + offset)
    return NULL


# Everyone's x (and out) of this call, `skip` bytes in, as this process maps them. False: a line lies.
cdef bint resolve(Group *g, Call *c, size_t skip) noexcept nogil:
    cdef int rank
    cdef sr_descriptor *theirs
    cdef unsigned char *x
    cdef unsigned char *out
    for rank in range(g.size):
        theirs = descriptor(g, c, rank)
        x = shared_address(g, theirs.x_block, rank, theirs.x_offset, c.nbytes)
        out = shared_address(g, theirs.out_block, rank, theirs.out_offset, c.nbytes)
        if x == NULL or out == NULL:
            c.awaited.rank = rank
            return False
        g.source[rank] = x + skip
        g.target[rank] = out + skip
    return True


cdef enum:
    ZERO_COPY_STEP_NBYTES = 1 << 20   # what one step reduces, so that other calls get their turn


cdef int step_zero_copy(Group *g, Call *c) noexcept nogil:
    cdef size_t begin, end, length
    cdef uint32_t stream = 0
    if c.phase == 0:
        begin = sr_slice_begin_grained(c.count, g.size, g.rank, 64 // c.itemsize)
        end = sr_slice_begin_grained(c.count, g.size, g.rank + 1, 64 // c.itemsize)
        begin += c.fold.offset // c.itemsize
        length = ZERO_COPY_STEP_NBYTES // c.itemsize
        if length > end - begin:
            length = end - begin
        if not resolve(g, c, begin * c.itemsize):
            return MISMATCHED
        if c.nbytes >= g.tuning.zero_copy_stream_nbytes:
            stream = 0xffffffff
        if length > 0:
            fold(g, c, g.size, stream, g.size, length)
        c.fold.offset += length * c.itemsize
        g.stats.bytes_sent += length * c.itemsize
        if begin + length < end:
            return PROGRESSED
        publish(g, SR_FINISHED, c.seq)
        c.phase = 1
        c.fold_peer = 0
    if not all_reached(g, SR_FINISHED, c.seq, &c.fold_peer):
        return blocked_on(c, counter(g, c.fold_peer, SR_FINISHED), c.seq, c.fold_peer)
    finish_large(g, c, ZERO_COPY)
    return DONE


# ---- broadcast: staging by the root, copying by the others ---------------------------------------------------

cdef int step_broadcast(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.zero_copy and g.rank == c.root and c.stage.offset < c.nbytes:
        if has_credit(g, chunk_end(g, c, &c.stage)):
            stage_whole_chunk(g, c)
            return PROGRESSED
    if not c.lines_seen or c.ping:
        status = step_lines(g, c)
        if status != DONE:
            return status
    if c.zero_copy:
        return step_broadcast_shared(g, c)
    if g.rank == c.root:
        if c.stage.offset < c.nbytes:
            return blocked_on_credit(g, c, chunk_end(g, c, &c.stage))
        if c.out != c.x:
            memcpy(c.out, c.x, c.nbytes)
        give_credit(g, c.stage.position)
        g.position = c.stage.position
        finish_large(g, c, FAR if g.far else NEAR)
        return DONE
    if not sr_flag_reached(counter(g, c.root, SR_STAGED), chunk_end(g, c, &c.copy)):
        return blocked_on(c, counter(g, c.root, SR_STAGED), chunk_end(g, c, &c.copy), c.root)
    copy_whole_chunk(g, c)
    if c.copy.offset < c.nbytes:
        return PROGRESSED
    g.position = c.copy.position
    finish_large(g, c, FAR if g.far else NEAR)
    return DONE


cdef void stage_whole_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef uint64_t slot_at = slot_begin(g, c.stage.position, nbytes)
    g.kernels.copy(slot(g, g.rank, slot_at), c.x + c.stage.offset, nbytes, g.far)
    advance(&c.stage, slot_at + slot_nbytes(nbytes), nbytes)
    g.stats.bytes_sent += nbytes
    publish(g, SR_STAGED, c.stage.position)


cdef void copy_whole_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t slot_at = slot_begin(g, c.copy.position, nbytes)
    g.kernels.copy(c.out + c.copy.offset, slot(g, c.root, slot_at), nbytes,
                   c.nbytes >= g.tuning.stream_out_nbytes)
    advance(&c.copy, slot_at + slot_nbytes(nbytes), nbytes)
    give_credit(g, c.copy.position)


# Everyone copies from the root's array; nobody returns before all have, so the root may write to it again.
cdef int step_broadcast_shared(Group *g, Call *c) noexcept nogil:
    if c.phase == 0:
        if not resolve(g, c, 0):
            return MISMATCHED
        if c.out != <unsigned char *> g.source[c.root]:
            g.kernels.copy(c.out, g.source[c.root], c.nbytes, c.nbytes >= g.tuning.zero_copy_stream_nbytes)
        publish(g, SR_FINISHED, c.seq)
        c.phase = 1
        c.fold_peer = 0
    if not all_reached(g, SR_FINISHED, c.seq, &c.fold_peer):
        return blocked_on(c, counter(g, c.fold_peer, SR_FINISHED), c.seq, c.fold_peer)
    finish_large(g, c, ZERO_COPY)
    return DONE


# ---- distance: rank 0 and each other rank in turn flip a line, the slowest pair counts -----------------------

cdef enum:
    PING_BATCH = 4
    PING_ROUNDS = 32            # a rank, a multiple of the batch
    FAR_NS = 180                # nothing was ever seen between near (below 130) and far (above 200)
    PREEMPTED_NS = 3000         # round trips this slow tell of the scheduler, not of the distance


cdef void begin_ping(Group *g, Call *c) noexcept nogil:
    c.round_trips = 0                 # round trips of this measurement so far
    g.pings += <uint64_t> PING_ROUNDS * (g.size - 1)
    if g.rank == 0:
        g.round_trip_ns = 0


cdef int step_ping(Group *g, Call *c) noexcept nogil:
    cdef uint64_t base = g.pings - <uint64_t> PING_ROUNDS * (g.size - 1)
    if g.rank == 0:
        return step_ping_rank0(g, c, base)
    return step_pong(g, c, base)


cdef int step_ping_rank0(Group *g, Call *c, uint64_t base) noexcept nogil:
    cdef int peer, i
    cdef uint64_t begin, took
    cdef uint64_t fastest = ~<uint64_t> 0
    cdef sr_flag *pong
    cdef bint whole
    while c.round_trips < PING_ROUNDS * (g.size - 1):
        peer = 1 + c.round_trips // PING_ROUNDS
        pong = counter(g, peer, SR_PINGED)
        # A batch that had to wait for the scheduler is taken up again here, its time lost.
        whole = c.round_trips % PING_BATCH == 0 and not sr_flag_reached(pong, base + c.round_trips + 1)
        begin = sr_now_ns()
        while True:
            publish(g, SR_PINGED, base + c.round_trips + 1)
            if not sr_flag_spin(pong, base + c.round_trips + 1, g.pauses):
                return blocked_on(c, pong, base + c.round_trips + 1, peer)
            c.round_trips += 1
            if c.round_trips % PING_BATCH == 0:
                break
        took = (sr_now_ns() - begin) // PING_BATCH
        if whole and took < fastest:
            fastest = took
        if c.round_trips % PING_ROUNDS == 0:
            if fastest < PREEMPTED_NS and fastest > g.round_trip_ns:
                g.round_trip_ns = fastest
            fastest = ~<uint64_t> 0
    g.pinged_ns = sr_now_ns()
    if g.round_trip_ns and not g.header.forced_path:
        g.next_far = g.round_trip_ns >= FAR_NS
    return DONE


cdef int step_pong(Group *g, Call *c, uint64_t base) noexcept nogil:
    cdef uint64_t first = base + <uint64_t> PING_ROUNDS * (g.rank - 1)
    cdef sr_flag *ping = counter(g, 0, SR_PINGED)
    while c.round_trips < PING_ROUNDS:
        if not sr_flag_spin(ping, first + c.round_trips + 1, g.pauses):
            return blocked_on(c, ping, first + c.round_trips + 1, 0)
        c.round_trips += 1
        publish(g, SR_PINGED, first + c.round_trips)
    return DONE


cdef void enter_ping(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    begin_ping(g, c)
    publish_line(g, c)


cdef int step_ping_call(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
    return step_ping(g, c)


# ---- after a refused call ------------------------------------------------------------------------------------

# Waits for everyone's line of the call that this rank refused, begun earlier: all must have refused it.
cdef int step_settle(Group *g, Call *c) noexcept nogil:
    return await_lines(g, c)


# ---- choice --------------------------------------------------------------------------------------------------

cdef void enter_alone(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)


cdef int step_alone(Group *g, Call *c) noexcept nogil:
    if c.kind == ALL_REDUCE and c.count > 0:
        g.source[0] = c.x
        g.target[0] = c.out
        fold(g, c, 1, 0, 1, c.count)
    elif c.out != c.x:
        memmove(c.out, c.x, c.nbytes)
    return DONE


# A pure function of the call and of what all ranks share, so that all choose alike.
cdef void choose_pipeline(Group *g, Call *c) noexcept nogil:
    cdef size_t small_nbytes = g.tuning.small_nbytes
    if g.size == 1:
        c.enter, c.step = enter_alone, step_alone
    elif c.nbytes == 0:
        c.enter, c.step = enter_tiny, step_tiny
    elif c.algorithm == RING:
        c.enter, c.step = enter_stepped, step_ring
    elif c.algorithm == TREE:
        c.enter, c.step = enter_stepped, step_tree
    elif c.algorithm != AUTO:
        c.enter, c.step = enter_large, step_direct
    elif c.nbytes <= SR_PAYLOAD_NBYTES:
        c.enter, c.step = enter_tiny, step_tiny
    elif c.nbytes <= small_nbytes:
        c.enter, c.step = enter_small, step_small
    elif c.kind == BROADCAST:
        c.enter, c.step = enter_large, step_broadcast
    else:
        c.enter, c.step = enter_large, step_direct
