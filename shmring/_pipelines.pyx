# The collectives as resumable pipelines over shared memory, without the GIL: tiny, small, direct (near and far
# path), zero-copy and broadcast. Ring and tree are in _schedules, the measurement of distance in _distance.
# May know: _group, _distance, _schedules. Every function returns at once; what it waits for is in call.awaited.

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memmove

from ._group cimport *
from ._distance cimport begin_ping, step_ping
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


# ---- what the lines of all but tiny calls say ----------------------------------------------------------------

cdef enum:
    CLOCK_CALLS = 64     # small calls between two looks at the clock, which costs a twentieth of one


cdef inline sr_descriptor *descriptor(Group *g, Call *c, int rank) noexcept nogil:
    return <sr_descriptor *> g.lane[rank].line[c.seq & 1].payload


# Whether rank hopes for zero-copy, and so has staged nothing before its line.
cdef inline bint hopes_for_zero_copy(Group *g, Call *c, int rank) noexcept nogil:
    cdef sr_descriptor *theirs = descriptor(g, c, rank)
    return theirs.x_block != 0 and theirs.out_block != 0 and c.algorithm == AUTO


# Of every slot of this call: data that begin as far into a cache line as they do in the user's array are moved by
# whole lines on both sides. A fifth of the time far, a twentieth near (bench/peers.py, 1 MiB; NumPy's large arrays
# begin 16 bytes into a line).
cdef inline uint32_t skew_of(Call *c) noexcept nogil:
    cdef uint32_t skew = <uint32_t> (<uintptr_t> c.out & (SR_CACHE_LINE - 1))
    return skew if skew % c.itemsize == 0 else 0


# Fills the own line, to be published; where this rank stands in the call is the beginning.
cdef void describe(Group *g, Call *c) noexcept nogil:
    cdef sr_descriptor *mine = descriptor(g, c, g.rank)
    mine.x_block = c.x_block
    mine.x_offset = c.x_offset
    mine.out_block = c.out_block
    mine.out_offset = c.out_offset
    mine.skew = skew_of(c)
    mine.far = g.next_far
    mine.ping = 0
    if g.rank == 0 and (c.seq % CLOCK_CALLS == 0 or c.nbytes >= g.tuning.ping_nbytes) and not g.header.forced_path:
        mine.ping = sr_now_ns() - g.pinged_ns >= g.ping_interval_ns
    c.zero_copy = hopes_for_zero_copy(g, c, g.rank)
    c.ping = False
    c.phase = 0
    c.fold_peer = c.copy_peer = 0
    c.stage.offset = c.fold.offset = c.copy.offset = 0


# What the lines say together: zero-copy only when everyone can, the new distance, whether to measure it again.
cdef inline void read_descriptors(Group *g, Call *c) noexcept nogil:
    cdef sr_descriptor *theirs
    cdef int rank
    if c.zero_copy:
        for rank in range(g.size):
            if not hopes_for_zero_copy(g, c, rank):
                c.zero_copy = False
    theirs = descriptor(g, c, 0)
    g.announced_far = theirs.far
    c.ping = theirs.ping != 0


# DONE: the lines are there and agree, and the distance is measured if it is time.
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


# The call is complete: the path it went, and the distance from the next call on.
cdef inline void finish(Group *g, int path) noexcept nogil:
    count_path(g, path)
    g.far = g.announced_far


# ---- small: one slot a rank, announced by the call line; everyone folds everything ---------------------------

cdef void enter_small(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    describe(g, c)
    c.announced = False
    c.stage.position = slot_begin(g, g.position, c.nbytes)
    g.position = c.stage.position + slot_nbytes(c.nbytes)


cdef int step_small(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.announced:
        if not has_credit(g, g.position):
            return blocked_on_credit(g, c, g.position)
        if not c.zero_copy:
            stage_small(g, c)
        publish_line(g, c)
        c.announced = True
    status = step_lines(g, c)
    if status != DONE:
        return status
    if c.zero_copy:
        g.position = c.stage.position   # nobody has staged anything
        return step_shared(g, c)
    status = await_late_staging(g, c)
    if status != DONE:
        return status
    finish_small(g, c)
    give_credit(g, g.position)
    finish(g, SMALL)
    return DONE


cdef inline void stage_small(Group *g, Call *c) noexcept nogil:
    if c.kind == ALL_REDUCE or g.rank == c.root:
        g.kernels.copy(slot(g, g.rank, c.stage.position), c.x, c.nbytes,
                       g.far and c.nbytes >= g.tuning.far_stream_nbytes)
        g.stats.bytes_sent += c.nbytes
    c.stage.offset = c.nbytes


# Some arrays are shared and some are not: who hoped for zero-copy stages now, and the others wait for that.
cdef int await_late_staging(Group *g, Call *c) noexcept nogil:
    if c.stage.offset == 0:
        stage_small(g, c)
        publish(g, SR_STAGED, g.position)
    while c.fold_peer < g.size:
        if (c.fold_peer != g.rank and hopes_for_zero_copy(g, c, c.fold_peer)
                and not sr_flag_reached(counter(g, c.fold_peer, SR_STAGED), g.position)):
            return blocked_on(c, counter(g, c.fold_peer, SR_STAGED), g.position, c.fold_peer)
        c.fold_peer += 1
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


# ---- large: chunks through slots -----------------------------------------------------------------------------

cdef void enter_large(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    describe(g, c)
    publish_line(g, c)
    c.chunk_nbytes = c.nbytes
    if c.nbytes > g.tuning.one_chunk_nbytes:
        c.chunk_nbytes = whole_items(c, g.tuning.chunk_nbytes)
    c.stage.position = c.fold.position = c.copy.position = g.position


# The slot of a chunk has room for any rank's skew.
cdef inline uint64_t chunk_slot(Group *g, Head *head, size_t nbytes) noexcept nogil:
    return slot_begin(g, head.position, nbytes + SR_CACHE_LINE)


# Where the data of rank's slot lie that begins at slot_at.
cdef inline unsigned char *slot_data(Group *g, Call *c, int rank, uint64_t slot_at) noexcept nogil:
    return slot(g, rank, slot_at) + (descriptor(g, c, rank).skew & (SR_CACHE_LINE - 1))


cdef inline size_t next_chunk(Call *c, Head *head) noexcept nogil:
    cdef size_t left = c.nbytes - head.offset
    return left if left < c.chunk_nbytes else c.chunk_nbytes


cdef inline uint64_t chunk_end(Group *g, Call *c, Head *head) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, head)
    return chunk_slot(g, head, nbytes) + slot_nbytes(nbytes + SR_CACHE_LINE)


cdef inline void advance(Head *head, uint64_t slot_at, size_t nbytes) noexcept nogil:
    head.position = slot_at + slot_nbytes(nbytes + SR_CACHE_LINE)
    head.offset += nbytes


# ---- direct: stage, reduce the own slice, copy the others' results -------------------------------------------

# Slice `index` of a chunk, in elements. "master" gives rank 0 everything, which is all that it changes.
cdef inline size_t slice_begin(Group *g, Call *c, size_t count, int index) noexcept nogil:
    if c.algorithm == MASTER:
        return 0 if index == 0 else count
    return sr_slice_begin_grained(count, g.size, index, 64 // c.itemsize)


cdef int step_direct(Group *g, Call *c) noexcept nogil:
    cdef int status
    cdef bint stages, copies
    if c.zero_copy:
        # Whether the others' arrays are shared too is in their lines; nothing is staged before that is known.
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
        finish(g, BY_MASTER if c.algorithm == MASTER else (FAR if g.far else NEAR))
        return DONE
    if stages:
        stage_chunk(g, c)
        return PROGRESSED
    return block_direct(g, c)


cdef inline bint can_stage(Group *g, Call *c) noexcept nogil:
    return c.stage.offset < c.nbytes and has_credit(g, chunk_end(g, c, &c.stage))


# Waits for what is oldest: that never depends on anything this rank still owes.
cdef int block_direct(Group *g, Call *c) noexcept nogil:
    if c.copy.offset < c.fold.offset:
        return blocked_on_counter(g, c, SR_REDUCED, chunk_end(g, c, &c.copy), c.copy_peer)
    if c.fold.offset < c.stage.offset:
        return blocked_on_counter(g, c, SR_STAGED, chunk_end(g, c, &c.fold), c.fold_peer)
    return blocked_on_credit(g, c, chunk_end(g, c, &c.stage))


# All but the own slice, which is read where it lies.
cdef void stage_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef size_t count = nbytes // c.itemsize
    cdef size_t begin = slice_begin(g, c, count, g.rank) * c.itemsize
    cdef size_t end = slice_begin(g, c, count, g.rank + 1) * c.itemsize
    cdef uint64_t slot_at = chunk_slot(g, &c.stage, nbytes)
    cdef unsigned char *staged = slot_data(g, c, g.rank, slot_at)
    cdef const unsigned char *x = c.x + c.stage.offset
    cdef uint32_t stream = g.far
    if begin > 0:
        g.kernels.copy(staged, x, begin, stream)
    if end < nbytes:
        g.kernels.copy(staged + end, x + end, nbytes - end, stream)
    advance(&c.stage, slot_at, nbytes)
    g.stats.bytes_sent += nbytes - (end - begin)
    publish(g, SR_STAGED, c.stage.position)


# The result goes to the own array and, for the others, to where the own slice was left out of the slot.
cdef void fold_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.fold)
    cdef size_t count = nbytes // c.itemsize
    cdef size_t begin = slice_begin(g, c, count, g.rank)
    cdef size_t length = slice_begin(g, c, count, g.rank + 1) - begin
    cdef uint64_t slot_at = chunk_slot(g, &c.fold, nbytes)
    cdef uint32_t stream = 0
    cdef int rank
    begin *= c.itemsize
    if length > 0:
        for rank in range(g.size):
            g.source[rank] = slot_data(g, c, rank, slot_at) + begin
        g.source[g.rank] = c.x + c.fold.offset + begin
        g.target[0] = c.out + c.fold.offset + begin
        g.target[1] = slot_data(g, c, g.rank, slot_at) + begin
        if c.nbytes >= g.tuning.stream_out_nbytes:
            stream |= 1
        if g.far:
            stream |= 2
        fold(g, c, 2, stream, g.size, length)
        g.stats.bytes_sent += length * c.itemsize
    advance(&c.fold, slot_at, nbytes)
    c.fold_peer = 0
    publish(g, SR_REDUCED, c.fold.position)


cdef void copy_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t slot_at = chunk_slot(g, &c.copy, nbytes)
    cdef unsigned char *out = c.out + c.copy.offset
    cdef uint32_t stream = c.nbytes >= g.tuning.stream_out_nbytes
    cdef size_t begin, end
    cdef int rank
    for rank in range(g.size):
        begin = slice_begin(g, c, nbytes // c.itemsize, rank) * c.itemsize
        end = slice_begin(g, c, nbytes // c.itemsize, rank + 1) * c.itemsize
        if rank != g.rank and begin < end:
            g.kernels.copy(out + begin, slot_data(g, c, rank, slot_at) + begin, end - begin, stream)
    advance(&c.copy, slot_at, nbytes)
    c.copy_peer = 0
    give_credit(g, c.copy.position)


# stage_chunk and copy_chunk at once, for chunks of the same length: both leave out the own slice. Loads of the one
# overlap with stores of the other: a tenth of the whole at 64 MiB (bench/peers.py).
cdef void exchange_chunks(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef uint64_t staged_at = chunk_slot(g, &c.stage, nbytes)
    cdef uint64_t copied_at = chunk_slot(g, &c.copy, nbytes)
    cdef unsigned char *staged = slot_data(g, c, g.rank, staged_at)
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
                               out + begin, slot_data(g, c, rank, copied_at) + begin, stream_out, end - begin)
            g.stats.bytes_sent += end - begin
    advance(&c.stage, staged_at, nbytes)
    publish(g, SR_STAGED, c.stage.position)
    advance(&c.copy, copied_at, nbytes)
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


cdef int step_shared(Group *g, Call *c) noexcept nogil:
    return step_broadcast_shared(g, c) if c.kind == BROADCAST else step_zero_copy(g, c)


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
        return blocked_on_counter(g, c, SR_FINISHED, c.seq, c.fold_peer)
    finish(g, ZERO_COPY)
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
        return step_shared(g, c)
    if g.rank == c.root:
        if c.stage.offset < c.nbytes:
            return blocked_on_credit(g, c, chunk_end(g, c, &c.stage))
        if c.out != c.x:
            memcpy(c.out, c.x, c.nbytes)
        give_credit(g, c.stage.position)
        g.position = c.stage.position
        finish(g, FAR if g.far else NEAR)
        return DONE
    if not sr_flag_reached(counter(g, c.root, SR_STAGED), chunk_end(g, c, &c.copy)):
        return blocked_on(c, counter(g, c.root, SR_STAGED), chunk_end(g, c, &c.copy), c.root)
    copy_whole_chunk(g, c)
    if c.copy.offset < c.nbytes:
        return PROGRESSED
    g.position = c.copy.position
    finish(g, FAR if g.far else NEAR)
    return DONE


cdef void stage_whole_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.stage)
    cdef uint64_t slot_at = chunk_slot(g, &c.stage, nbytes)
    g.kernels.copy(slot_data(g, c, g.rank, slot_at), c.x + c.stage.offset, nbytes, g.far)
    advance(&c.stage, slot_at, nbytes)
    g.stats.bytes_sent += nbytes
    publish(g, SR_STAGED, c.stage.position)


cdef void copy_whole_chunk(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t slot_at = chunk_slot(g, &c.copy, nbytes)
    g.kernels.copy(c.out + c.copy.offset, slot_data(g, c, c.root, slot_at), nbytes,
                   c.nbytes >= g.tuning.stream_out_nbytes)
    advance(&c.copy, slot_at, nbytes)
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
        return blocked_on_counter(g, c, SR_FINISHED, c.seq, c.fold_peer)
    finish(g, ZERO_COPY)
    return DONE


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
    elif c.nbytes * (g.size - 1) <= g.tuning.small_nbytes:
        c.enter, c.step = enter_small, step_small
    elif c.kind == BROADCAST:
        c.enter, c.step = enter_large, step_broadcast
    else:
        c.enter, c.step = enter_large, step_direct
