# Ring and tree as the literature has them, as resumable pipelines through the same slots as all others. Both fold
# in an order of their own and round at each hop, so they run only when asked for. May know: _group, _slots.

from libc.stdint cimport uint64_t

from ._group cimport *
from ._slots cimport *


cdef void enter_stepped(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    publish_line(g, c)
    c.relayed = c.algorithm == RING
    c.chunk_nbytes = g.tuning.chunk_nbytes
    # A tree chunk has two slots, and as much may be skipped at the ring's end.
    if c.chunk_nbytes > g.ring_nbytes // 4:
        c.chunk_nbytes = g.ring_nbytes // 4
    c.chunk_nbytes = whole_items(c, c.chunk_nbytes)
    c.stage.position = c.fold.position = c.copy.position = g.position
    c.stage.offset = c.fold.offset = c.copy.offset = 0
    c.fold_peer = 0


# ---- ring ----------------------------------------------------------------------------------------------------

# A transfer is one chunk of one slice in one step; head.offset counts transfers. Its slot is as large as the
# largest slice needs, so that positions are the same on all ranks.

cdef inline size_t slice_bound(Group *g, Call *c, int index) noexcept nogil:
    return sr_slice_begin(c.count, g.size, index) * c.itemsize


cdef inline size_t chunks_per_slice(Group *g, Call *c) noexcept nogil:
    cdef size_t largest = slice_bound(g, c, 1)
    return (largest + c.chunk_nbytes - 1) // c.chunk_nbytes if largest > 0 else 1


cdef inline size_t transfer_nbytes(Group *g, Call *c, size_t transfer) noexcept nogil:
    cdef size_t left = slice_bound(g, c, 1) - transfer % chunks_per_slice(g, c) * c.chunk_nbytes
    return left if left < c.chunk_nbytes else c.chunk_nbytes


cdef inline uint64_t transfer_end(Group *g, Call *c, Head *head) noexcept nogil:
    return slot_end(g, head.position, transfer_nbytes(g, c, head.offset))


# The slice that `sender` sends in a transfer, and where this transfer's chunk of it lies in the message.
cdef inline size_t transfer_begin(Group *g, Call *c, int sender, size_t transfer, size_t *nbytes) noexcept nogil:
    cdef size_t chunks = chunks_per_slice(g, c)
    cdef int step = <int> (transfer // chunks) + 1
    cdef int slice
    cdef size_t begin, end
    if step < g.size:
        slice = sr_ring_reduce_slice(sender, g.size, step)
    else:
        slice = sr_ring_gather_slice(sender, g.size, step - g.size + 1)
    begin = slice_bound(g, c, slice) + transfer % chunks * c.chunk_nbytes
    end = slice_bound(g, c, slice + 1)
    nbytes[0] = 0 if begin >= end else (end - begin if end - begin < c.chunk_nbytes else c.chunk_nbytes)
    return begin


cdef int step_ring(Group *g, Call *c) noexcept nogil:
    cdef size_t chunks = chunks_per_slice(g, c)
    cdef size_t transfers = 2 * <size_t> (g.size - 1) * chunks
    cdef int source = sr_ring_from(g.rank, g.size)
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
    # What is sent in one step was received in the step before.
    if (c.stage.offset < transfers and c.stage.offset < c.fold.offset + chunks
            and has_credit(g, transfer_end(g, c, &c.stage))):
        send_transfer(g, c)
        return PROGRESSED
    if c.fold.offset == transfers and c.stage.offset == transfers:
        g.position = c.fold.position
        g.stats.steps += 2 * <uint64_t> (g.size - 1)
        count_path(g, BY_RING)
        return DONE
    if c.fold.offset == c.stage.offset or c.fold.offset == transfers:
        # Everything that was sent here is received; what this rank still has to send lacks credit.
        return blocked_on_credit(g, c, transfer_end(g, c, &c.stage))
    if not sr_flag_reached(counter(g, source, SR_STAGED), transfer_end(g, c, &c.fold)):
        return blocked_on(c, counter(g, source, SR_STAGED), transfer_end(g, c, &c.fold), source)
    receive_transfer(g, c, source)
    return PROGRESSED


cdef void send_transfer(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes
    cdef size_t begin = transfer_begin(g, c, g.rank, c.stage.offset, &nbytes)
    cdef bint first_step = c.stage.offset < chunks_per_slice(g, c)
    cdef uint64_t end = transfer_end(g, c, &c.stage)
    cdef uint64_t slot_at = slot_begin(g, c.stage.position, transfer_nbytes(g, c, c.stage.offset))
    if nbytes > 0:
        g.kernels.copy(slot(g, g.rank, slot_at), (c.x if first_step else c.out) + begin, nbytes, 0)
    g.stats.bytes_sent += nbytes
    c.stage.position = end
    c.stage.offset += 1
    publish(g, SR_STAGED, end)


cdef void receive_transfer(Group *g, Call *c, int source) noexcept nogil:
    cdef size_t nbytes
    cdef size_t begin = transfer_begin(g, c, source, c.fold.offset, &nbytes)
    cdef int step = <int> (c.fold.offset // chunks_per_slice(g, c)) + 1
    cdef uint64_t end = transfer_end(g, c, &c.fold)
    cdef uint64_t slot_at = slot_begin(g, c.fold.position, transfer_nbytes(g, c, c.fold.offset))
    if step < g.size:
        g.source[0] = slot(g, source, slot_at)
        g.source[1] = c.x + begin
        g.target[0] = c.out + begin
        fold_hop(g, c, 2, 1, 0, nbytes // c.itemsize, step == g.size - 1)
    elif nbytes > 0:
        g.kernels.copy(c.out + begin, slot(g, source, slot_at), nbytes, 0)
    c.fold.position = end
    c.fold.offset += 1
    give_credit(g, end)


# ---- tree ----------------------------------------------------------------------------------------------------

# Each chunk has two slots a rank: one on the way up (a partial result, counter STAGED), one on the way down (the
# result, counter REDUCED). c.fold is the head of the way up, c.copy that of the way down.

cdef inline uint64_t up_slot(Group *g, Call *c, Head *head) noexcept nogil:
    return slot_begin(g, head.position, 2 * slot_nbytes(next_chunk(c, head)))


cdef inline uint64_t down_slot(Group *g, Call *c, Head *head) noexcept nogil:
    return up_slot(g, c, head) + slot_nbytes(next_chunk(c, head))


cdef inline uint64_t tree_end(Group *g, Call *c, Head *head) noexcept nogil:
    return up_slot(g, c, head) + 2 * slot_nbytes(next_chunk(c, head))


cdef inline int tree_parent(int rank) noexcept nogil:
    return rank & (rank - 1)


cdef int step_tree(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
    if c.fold.offset < c.nbytes and has_credit(g, tree_end(g, c, &c.fold)):
        status = await_children(g, c)
        if status == DONE:
            send_up(g, c)
            return PROGRESSED
        if c.copy.offset == c.fold.offset:
            return status
    elif c.copy.offset == c.fold.offset:
        return blocked_on_credit(g, c, tree_end(g, c, &c.fold))
    if g.rank != 0 and not sr_flag_reached(counter(g, tree_parent(g.rank), SR_REDUCED), tree_end(g, c, &c.copy)):
        return blocked_on(c, counter(g, tree_parent(g.rank), SR_REDUCED), tree_end(g, c, &c.copy),
                          tree_parent(g.rank))
    pass_down(g, c)
    if c.copy.offset < c.nbytes:
        return PROGRESSED
    g.position = c.copy.position
    g.stats.steps += 2 * <uint64_t> sr_tree_steps(g.size)
    count_path(g, BY_TREE)
    return DONE


# DONE once the partial results of all subtrees below this rank are there; c.fold_peer counts the steps.
cdef int await_children(Group *g, Call *c) noexcept nogil:
    cdef int child
    while c.fold_peer < sr_tree_steps(g.size):
        child = sr_tree_receives_from(g.rank, g.size, c.fold_peer)
        if child >= 0 and not sr_flag_reached(counter(g, child, SR_STAGED), tree_end(g, c, &c.fold)):
            return blocked_on(c, counter(g, child, SR_STAGED), tree_end(g, c, &c.fold), child)
        c.fold_peer += 1
    return DONE


# The root's result goes to its own array and to its slot for the way down; others fold into their slot up.
cdef void send_up(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.fold)
    cdef uint64_t end = tree_end(g, c, &c.fold)
    cdef uint64_t up = up_slot(g, c, &c.fold)
    cdef int nsources = 1
    cdef int step, child
    g.source[0] = c.x + c.fold.offset
    for step in range(sr_tree_steps(g.size)):
        child = sr_tree_receives_from(g.rank, g.size, step)
        if child >= 0:
            g.source[nsources] = slot(g, child, up)
            nsources += 1
    if g.rank == 0:
        g.target[0] = c.out + c.fold.offset
        g.target[1] = slot(g, 0, down_slot(g, c, &c.fold))
        fold_hop(g, c, nsources, 2, 0, nbytes // c.itemsize, True)
    else:
        g.target[0] = slot(g, g.rank, up)
        fold_hop(g, c, nsources, 1, 0, nbytes // c.itemsize, False)
    g.stats.bytes_sent += nbytes
    c.fold.position = end
    c.fold.offset += nbytes
    c.fold_peer = 0
    publish(g, SR_REDUCED if g.rank == 0 else SR_STAGED, end)


# Takes the parent's result and hands it on to the own children, if there are any.
cdef void pass_down(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = next_chunk(c, &c.copy)
    cdef uint64_t end = tree_end(g, c, &c.copy)
    cdef uint64_t down = down_slot(g, c, &c.copy)
    cdef unsigned char *out = c.out + c.copy.offset
    if g.rank != 0:
        g.kernels.copy(out, slot(g, tree_parent(g.rank), down), nbytes, 0)
        if sr_tree_receives_from(g.rank, g.size, 0) >= 0:
            g.kernels.copy(slot(g, g.rank, down), out, nbytes, 0)
            g.stats.bytes_sent += nbytes
        publish(g, SR_REDUCED, end)
    c.copy.position = end
    c.copy.offset += nbytes
    give_credit(g, end)
