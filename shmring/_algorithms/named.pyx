# Algorithms of the literature that run only if the caller or SHMRING_ALGORITHM names them: the ring, two opposite
# rings, recursive halving and doubling, the binomial tree and the double binary tree. They do not fold in rank order,
# and they round at each hop. All go through the same slots as every other call.

from libc.stdint cimport uint64_t

from .._core.group cimport (
    BIDIRECTIONAL_RING, BLOCKED, BY_BIDIRECTIONAL_RING, BY_DOUBLE_TREE, BY_HALVING_DOUBLING, BY_RING, BY_TREE, DONE,
    PROGRESSED, RING, Call, Cursor, Group, await_lines, blocked_on, count_path, counter, publish,
)
from .._core.schedule cimport (
    sr_double_tree_child, sr_double_tree_is_inner, sr_double_tree_parent, sr_halving_keeps, sr_halving_peer,
    sr_halving_steps, sr_ring_from, sr_ring_gather_slice, sr_ring_mirrored, sr_ring_reduce_slice, sr_slice_begin,
    sr_tree_receives_from, sr_tree_steps,
)
from .._core.segment cimport (
    SR_BEFORE_RELEASE, SR_COPIED, SR_FAULT, SR_HANDED, SR_REDUCED, SR_STAGED, sr_flag, sr_flag_reached,
)
from .._core.staging cimport (
    begin_stepped, blocked_on_credit, fold_hop, give_credit, has_credit, next_chunk, slot, slot_begin, slot_end,
    slot_nbytes,
)


# ---- transfers -----------------------------------------------------------------------------------------------

# c.stage is the cursor of sending and c.fold that of receiving. Their offsets count transfers.
cdef inline uint64_t transfer_end(Group *g, Call *c, const Schedule *schedule, Cursor *cursor) noexcept nogil:
    return slot_end(g, cursor.position, schedule.slot_nbytes(g, c, cursor.offset))


# Return DONE once all transfers are done. A transfer sends data that arrived at least `ahead` transfers before.
cdef int step_transfers(Group *g, Call *c, const Schedule *schedule, size_t transfers, size_t ahead) noexcept nogil:
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
    if (c.stage.offset < transfers and c.stage.offset < c.fold.offset + ahead
            and has_credit(g, transfer_end(g, c, schedule, &c.stage))):
        send_transfer(g, c, schedule)
        return PROGRESSED
    if c.fold.offset == transfers:
        g.position = c.fold.position
        return DONE
    if c.fold.offset == c.stage.offset:
        # This rank has received all that it could; its next transfer lacks credit.
        return blocked_on_credit(g, c, transfer_end(g, c, schedule, &c.stage))
    status = await_sources(g, c, schedule)
    if status == DONE:
        receive_transfer(g, c, schedule)
        return PROGRESSED
    return status


cdef int await_sources(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.fold)
    cdef int index = 0
    cdef int source = schedule.source(g, c, c.fold.offset, 0)
    while source >= 0:
        if not sr_flag_reached(counter(g, source, SR_STAGED), end):
            return blocked_on(c, counter(g, source, SR_STAGED), end, source)
        index += 1
        source = schedule.source(g, c, c.fold.offset, index)
    return DONE


cdef void send_transfer(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.stage)
    cdef uint64_t slot_at = slot_begin(g, c.stage.position, schedule.slot_nbytes(g, c, c.stage.offset))
    g.stats.bytes_sent += schedule.send(g, c, c.stage.offset, slot(g, g.rank, slot_at))
    c.stage.position = end
    c.stage.offset += 1
    publish(g, SR_STAGED, end)


cdef void receive_transfer(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.fold)
    cdef uint64_t slot_at = slot_begin(g, c.fold.position, schedule.slot_nbytes(g, c, c.fold.offset))
    schedule.receive(g, c, c.fold.offset, slot_at)
    c.fold.position = end
    c.fold.offset += 1
    give_credit(g, end)


# ---- rings ---------------------------------------------------------------------------------------------------

# A transfer is one chunk of one slice in one step. Two rings have half of the message each, and take turns. A slot is
# as large as the largest slice needs, so that positions are the same on all ranks.

cdef Schedule RINGS
RINGS.slot_nbytes, RINGS.send, RINGS.source, RINGS.receive = ring_slot, send_on, ring_source, receive_on


cdef inline int nrings(const Call *c) noexcept nogil:
    return 2 if c.algorithm == BIDIRECTIONAL_RING else 1


cdef inline int ring_of(const Call *c, size_t transfer) noexcept nogil:
    return <int> (transfer % nrings(c))


# The place of a rank in a ring.
cdef inline int place_in(Group *g, int ring, int rank) noexcept nogil:
    return rank if ring == 0 else sr_ring_mirrored(rank, g.size)


# The begin of a slice of a ring's part, in bytes of the message.
cdef inline size_t slice_bound(Group *g, Call *c, int ring, int index) noexcept nogil:
    cdef size_t begin = sr_slice_begin(c.count, nrings(c), ring)
    cdef size_t count = sr_slice_begin(c.count, nrings(c), ring + 1) - begin
    return (begin + sr_slice_begin(count, g.size, index)) * c.itemsize


cdef inline size_t chunks_per_slice(Group *g, Call *c) noexcept nogil:
    return (slice_bound(g, c, 0, 1) + c.chunk_nbytes - 1) // c.chunk_nbytes   # the first slice is the largest


# The step of a transfer, counted from 1.
cdef inline int ring_step(Group *g, Call *c, size_t transfer) noexcept nogil:
    return <int> (transfer // nrings(c) // chunks_per_slice(g, c)) + 1


cdef inline size_t chunk_begin(Group *g, Call *c, size_t transfer) noexcept nogil:
    return transfer // nrings(c) % chunks_per_slice(g, c) * c.chunk_nbytes


cdef size_t ring_slot(Group *g, Call *c, size_t transfer) noexcept nogil:
    return min(slice_bound(g, c, 0, 1) - chunk_begin(g, c, transfer), c.chunk_nbytes)


# The bytes of the message that the rank at `place` of a ring sends in a transfer: their begin, and *nbytes.
cdef inline size_t transfer_begin(Group *g, Call *c, int place, size_t transfer, size_t *nbytes) noexcept nogil:
    cdef int step = ring_step(g, c, transfer)
    cdef int ring = ring_of(c, transfer)
    cdef int slice
    cdef size_t begin, end
    if step < g.size:
        slice = sr_ring_reduce_slice(place, g.size, step)
    else:
        slice = sr_ring_gather_slice(place, g.size, step - g.size + 1)
    begin = slice_bound(g, c, ring, slice) + chunk_begin(g, c, transfer)
    end = slice_bound(g, c, ring, slice + 1)
    nbytes[0] = 0 if begin >= end else min(end - begin, c.chunk_nbytes)
    return begin


cdef size_t send_on(Group *g, Call *c, size_t transfer, unsigned char *to) noexcept nogil:
    cdef size_t nbytes = 0
    cdef size_t begin = transfer_begin(g, c, place_in(g, ring_of(c, transfer), g.rank), transfer, &nbytes)
    if nbytes > 0:
        g.kernels.copy(to, (c.x if ring_step(g, c, transfer) == 1 else c.out) + begin, nbytes, 0)
    return nbytes


cdef int ring_source(Group *g, Call *c, size_t transfer, int index) noexcept nogil:
    cdef int ring = ring_of(c, transfer)
    return place_in(g, ring, sr_ring_from(place_in(g, ring, g.rank), g.size)) if index == 0 else -1


cdef void receive_on(Group *g, Call *c, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef int source = ring_source(g, c, transfer, 0)
    cdef int step = ring_step(g, c, transfer)
    cdef size_t nbytes = 0
    cdef size_t begin = transfer_begin(g, c, place_in(g, ring_of(c, transfer), source), transfer, &nbytes)
    if step < g.size:
        g.source[0] = slot(g, source, slot_at)
        g.source[1] = c.x + begin
        g.target[0] = c.out + begin
        fold_hop(g, c, 2, 1, 0, nbytes // c.itemsize, step == g.size - 1)
    elif nbytes > 0:
        g.kernels.copy(c.out + begin, slot(g, source, slot_at), nbytes, 0)


cdef void enter_ring(Group *g, Call *c) noexcept nogil:
    begin_stepped(g, c, 4)
    c.relayed = True


cdef int step_ring(Group *g, Call *c) noexcept nogil:
    cdef uint64_t steps = 2 * <uint64_t> (g.size - 1)
    cdef size_t ahead = nrings(c) * chunks_per_slice(g, c)
    cdef int status = step_transfers(g, c, &RINGS, steps * ahead, ahead)
    if status == DONE:
        g.stats.steps += steps
        count_path(g, BY_RING if c.algorithm == RING else BY_BIDIRECTIONAL_RING)
    return status


# ---- recursive halving and doubling ---------------------------------------------------------------------------

# Recursive halving (reduce-scatter), then recursive doubling (all-gather); schedule.h has the schedule. Several ranks
# can read a slot, so the ranks beyond a power of two cost no extra step: they stage their whole block in the first
# step, for both halves, and read all results from the ranks that their core rank reads from.
#
# A message is cut into blocks, and each block goes through all steps. Two blocks take turns, so that a rank works on
# one while it waits for the other. A transfer is one step of one block; with an odd number of blocks some are empty.

cdef Schedule HALVING
HALVING.slot_nbytes, HALVING.send, HALVING.source, HALVING.receive = slot_of_step, send_half, partner, receive_half

# One step of a block. Step s of `steps` reduces or gathers the part that is left after s halvings.
cdef struct Step:
    int steps, step
    bint reduces, is_first, is_last   # is_first: of the reducing steps; is_last: of those, or the first that gathers
    size_t begin, count               # the block's begin in bytes of the message, and its elements


cdef inline size_t nblocks(Call *c) noexcept nogil:
    return (c.nbytes + c.chunk_nbytes - 1) // c.chunk_nbytes


cdef inline size_t abreast(Call *c) noexcept nogil:
    return min(nblocks(c), <size_t> 2)


cdef inline Step step_of(Group *g, Call *c, size_t transfer) noexcept nogil:
    cdef Step s
    cdef size_t turn, block
    s.steps = sr_halving_steps(g.size)
    turn = 2 * <size_t> s.steps * abreast(c)
    block = transfer // turn * abreast(c) + transfer % abreast(c)
    s.step = <int> (transfer % turn // abreast(c)) + 1
    s.reduces = s.step <= s.steps
    if not s.reduces:
        s.step = 2 * s.steps + 1 - s.step
    s.is_first = s.reduces and s.step == 1
    s.is_last = s.step == s.steps
    s.begin = min(block * c.chunk_nbytes, c.nbytes)
    s.count = min(c.nbytes - s.begin, c.chunk_nbytes) // c.itemsize
    return s


# The part of the block that is left after a step: of its 2^steps slices those from `first` on. Return its begin.
cdef inline size_t part_begin(Call *c, const Step *s, int first, size_t *nbytes) noexcept nogil:
    cdef size_t begin = sr_slice_begin(s.count, 1 << s.steps, first)
    nbytes[0] = (sr_slice_begin(s.count, 1 << s.steps, first + (1 << (s.steps - s.step))) - begin) * c.itemsize
    return s.begin + begin * c.itemsize


cdef inline bint is_core(const Step *s, int rank) noexcept nogil:
    return rank < 1 << s.steps


cdef size_t slot_of_step(Group *g, Call *c, size_t transfer) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef size_t nbytes = 0
    if s.is_first and not is_core(&s, g.size - 1):
        return s.count * c.itemsize
    part_begin(c, &s, 0, &nbytes)   # the first slices are the largest
    return nbytes


cdef size_t send_half(Group *g, Call *c, size_t transfer, unsigned char *to) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef size_t nbytes = 0, begin
    cdef int owner
    if is_core(&s, g.rank):
        owner = sr_halving_peer(g.rank, s.steps, s.step) if s.reduces else g.rank
        begin = part_begin(c, &s, sr_halving_keeps(owner, s.steps, s.step), &nbytes)
    else:
        begin, nbytes = s.begin, (s.count * c.itemsize if s.is_first else 0)
    if nbytes > 0:
        g.kernels.copy(to, (c.x if s.is_first else c.out) + begin, nbytes, 0)
    return nbytes


# The index-th rank from which this rank takes data in a transfer; -1: there are no more. In the first step a core rank
# takes data from every rank with the same remainder, later from its peer alone. The other ranks do not reduce; they
# take what their core rank reduced, and then what it takes.
cdef int partner(Group *g, Call *c, size_t transfer, int index) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef int core = g.rank & ((1 << s.steps) - 1)
    cdef int half = 1 << (s.steps - 1)
    cdef int source
    if s.is_first and is_core(&s, g.rank):
        source = (g.rank & (half - 1)) + index * half
        source += half if source >= g.rank else 0
        return source if source < g.size else -1
    if not is_core(&s, g.rank) and (s.reduces or (s.is_last and index == 1)):
        return -1 if s.reduces else core
    return sr_halving_peer(core, s.steps, s.step) if index == 0 else -1


cdef void receive_half(Group *g, Call *c, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    if not s.reduces:
        take_results(g, c, &s, transfer, slot_at)
    elif is_core(&s, g.rank):
        fold_half(g, c, &s, transfer, slot_at)


# Fold the sources and this rank's own part in rank order.
cdef void fold_half(Group *g, Call *c, const Step *s, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef size_t nbytes = 0
    cdef size_t begin = part_begin(c, s, sr_halving_keeps(g.rank, s.steps, s.step), &nbytes)
    cdef const unsigned char *own = (c.x if s.is_first else c.out) + begin
    cdef bint own_is_in = False
    cdef int nsources = 0
    cdef int source = partner(g, c, transfer, 0)
    while source >= 0:
        if not own_is_in and source > g.rank:
            g.source[nsources] = own
            nsources += 1
            own_is_in = True
        g.source[nsources] = slot(g, source, slot_at) + (0 if is_core(s, source) else begin - s.begin)
        nsources += 1
        source = partner(g, c, transfer, nsources - own_is_in)
    if not own_is_in:
        g.source[nsources] = own
        nsources += 1
    g.target[0] = c.out + begin
    fold_hop(g, c, nsources, 1, 0, nbytes // c.itemsize, s.is_last)


cdef void take_results(Group *g, Call *c, const Step *s, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef size_t nbytes = 0, begin
    cdef int index = 0
    cdef int source = partner(g, c, transfer, 0)
    while source >= 0:
        begin = part_begin(c, s, sr_halving_keeps(source, s.steps, s.step), &nbytes)
        if nbytes > 0:
            g.kernels.copy(c.out + begin, slot(g, source, slot_at), nbytes, 0)
        index += 1
        source = partner(g, c, transfer, index)


cdef void enter_halving(Group *g, Call *c) noexcept nogil:
    cdef size_t slices_nbytes = c.itemsize << sr_halving_steps(g.size)
    begin_stepped(g, c, 4)
    c.relayed = True
    if c.chunk_nbytes >= slices_nbytes:   # so that the slices of a block are equal wherever those of the message are
        c.chunk_nbytes -= c.chunk_nbytes % slices_nbytes


cdef int step_halving(Group *g, Call *c) noexcept nogil:
    cdef uint64_t steps = 2 * <uint64_t> sr_halving_steps(g.size)
    cdef size_t turns = (nblocks(c) + abreast(c) - 1) // abreast(c)
    cdef int status = step_transfers(g, c, &HALVING, turns * steps * abreast(c), abreast(c))
    if status == DONE:
        g.stats.steps += steps
        count_path(g, BY_HALVING_DOUBLING)
    return status


# ---- binomial tree -------------------------------------------------------------------------------------------

# Each chunk has two slots on each rank: one for the partial result on the way up (counter STAGED), one for the result
# on the way down (counter REDUCED). c.fold is the cursor of the way up, and c.copy that of the way down.

cdef inline uint64_t up_slot(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return slot_begin(g, cursor.position, 2 * slot_nbytes(next_chunk(c, cursor)))


cdef inline uint64_t down_slot(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return up_slot(g, c, cursor) + slot_nbytes(next_chunk(c, cursor))


cdef inline uint64_t tree_end(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return up_slot(g, c, cursor) + 2 * slot_nbytes(next_chunk(c, cursor))


cdef void enter_tree(Group *g, Call *c) noexcept nogil:
    begin_stepped(g, c, 4)   # two slots for each chunk


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


# Return DONE once the partial results of all subtrees below this rank have arrived. c.fold_peer counts the steps.
cdef int await_children(Group *g, Call *c) noexcept nogil:
    cdef int child
    while c.fold_peer < sr_tree_steps(g.size):
        child = sr_tree_receives_from(g.rank, g.size, c.fold_peer)
        if child >= 0 and not sr_flag_reached(counter(g, child, SR_STAGED), tree_end(g, c, &c.fold)):
            return blocked_on(c, counter(g, child, SR_STAGED), tree_end(g, c, &c.fold), child)
        c.fold_peer += 1
    return DONE


# Fold a chunk of all subtrees. The root writes the result to its out and to its slot for the way down; other ranks fold
# into their slot for the way up.
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


# Copy the parent's result, and pass it on to the children, if this rank has any.
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


# ---- double binary tree --------------------------------------------------------------------------------------

# Each tree reduces half of the message, chunk by chunk. A chunk of tree 0 and one of tree 1 make a pair, which has four
# slots: the way up and the way down of either tree. All cursors count bytes of tree 0's half, and are positions of
# pairs. A rank is a leaf in one tree and an inner node in the other, and advances each of these cursors as far as it
# can:
#
#   c.stage   as a leaf: its x is in its slot, for its parent              counter STAGED
#   c.fold    as an inner node: its subtree's partial result is there      counter REDUCED
#   c.down    as an inner node: the result is in its slot for children     counter HANDED
#   c.copy    as a leaf: it has copied the result and needs no slot        counter COPIED
#
# Each cursor is at most the one above it. The last cursor never waits for an earlier one, so the pipeline cannot
# deadlock.

cdef enum:
    UP, DOWN, PAIR_SLOTS = 4


cdef inline size_t half_nbytes(const Call *c, int tree) noexcept nogil:
    return (sr_slice_begin(c.count, 2, tree + 1) - sr_slice_begin(c.count, 2, tree)) * c.itemsize


# The bytes of a tree's chunk in a pair. The last one of tree 1 may be shorter, or empty.
cdef inline size_t chunk_of_tree(const Call *c, const Cursor *cursor, int tree) noexcept nogil:
    cdef size_t half = half_nbytes(c, tree)
    return 0 if cursor.offset >= half else min(half - cursor.offset, c.chunk_nbytes)


cdef inline uint64_t pair_slot(const Call *c, const Cursor *cursor) noexcept nogil:
    return slot_nbytes(chunk_of_tree(c, cursor, 0))


cdef inline uint64_t pair_begin(Group *g, const Call *c, const Cursor *cursor) noexcept nogil:
    return slot_begin(g, cursor.position, PAIR_SLOTS * pair_slot(c, cursor))


cdef inline uint64_t pair_end(Group *g, const Call *c, const Cursor *cursor) noexcept nogil:
    return pair_begin(g, c, cursor) + PAIR_SLOTS * pair_slot(c, cursor)


cdef inline unsigned char *tree_slot(Group *g, const Call *c, const Cursor *cursor, int rank, int tree,
                                     int way) noexcept nogil:
    return slot(g, rank, pair_begin(g, c, cursor)) + (2 * tree + way) * pair_slot(c, cursor)


cdef inline size_t place_of(const Call *c, const Cursor *cursor, int tree) noexcept nogil:
    return tree * half_nbytes(c, 0) + cursor.offset


cdef inline bint is_inner(Group *g, int rank, int tree) noexcept nogil:
    return sr_double_tree_is_inner(rank, g.size, tree)


cdef inline void advance(Group *g, const Call *c, Cursor *cursor, int which) noexcept nogil:
    cdef uint64_t end = pair_end(g, c, cursor)
    cursor.offset += chunk_of_tree(c, cursor, 0)
    cursor.position = end
    publish(g, which, end)


cdef void enter_double_tree(Group *g, Call *c) noexcept nogil:
    begin_stepped(g, c, 2 * PAIR_SLOTS)
    c.relayed = True


cdef int step_double_tree(Group *g, Call *c) noexcept nogil:
    cdef int status = BLOCKED
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
    if c.stage.offset < half_nbytes(c, 0) and has_credit(g, pair_end(g, c, &c.stage)):
        stage_leaf(g, c)
        return PROGRESSED
    if c.copy.offset == c.stage.offset:
        return blocked_on_credit(g, c, pair_end(g, c, &c.stage))
    # The cursors are tried from the newest to the oldest, so that a blocked rank waits for the oldest.
    if c.fold.offset < c.stage.offset:
        status = fold_subtree(g, c)
    if status != PROGRESSED and c.down.offset < c.fold.offset:
        status = hand_down(g, c)
    if status != PROGRESSED and c.copy.offset < c.down.offset:
        status = copy_leaf(g, c)
    if c.copy.offset < half_nbytes(c, 0):
        return status
    g.position = c.copy.position
    g.stats.steps += 2 * <uint64_t> sr_tree_steps(g.size)
    count_path(g, BY_DOUBLE_TREE)
    return DONE


cdef void stage_leaf(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes
    cdef int tree
    for tree in range(2):
        nbytes = chunk_of_tree(c, &c.stage, tree)
        if nbytes > 0 and not is_inner(g, g.rank, tree):
            g.kernels.copy(tree_slot(g, c, &c.stage, g.rank, tree, UP), c.x + place_of(c, &c.stage, tree), nbytes, 0)
            g.stats.bytes_sent += nbytes
    advance(g, c, &c.stage, SR_STAGED)


cdef int fold_subtree(Group *g, Call *c) noexcept nogil:
    cdef uint64_t end = pair_end(g, c, &c.fold)
    cdef sr_flag *flag
    cdef int tree, which, child
    for tree in range(2):
        for which in range(2):
            child = sr_double_tree_child(g.rank, g.size, tree, which)
            if child >= 0:
                flag = counter(g, child, SR_REDUCED if is_inner(g, child, tree) else SR_STAGED)
                if not sr_flag_reached(flag, end):
                    return blocked_on(c, flag, end, child)
    for tree in range(2):
        if is_inner(g, g.rank, tree):
            fold_children(g, c, tree)
    advance(g, c, &c.fold, SR_REDUCED)
    return PROGRESSED


# Fold a chunk of both children. A root writes the result to its out and to its slot for the way down; other ranks fold
# into their slot for the way up.
cdef void fold_children(Group *g, Call *c, int tree) noexcept nogil:
    cdef size_t nbytes = chunk_of_tree(c, &c.fold, tree)
    cdef size_t begin = place_of(c, &c.fold, tree)
    cdef bint is_root = sr_double_tree_parent(g.rank, g.size, tree) < 0
    cdef int nsources = 1
    cdef int which, child
    g.source[0] = c.x + begin
    for which in range(2):
        child = sr_double_tree_child(g.rank, g.size, tree, which)
        if child >= 0:
            g.source[nsources] = tree_slot(g, c, &c.fold, child, tree, UP)
            nsources += 1
    g.target[0] = tree_slot(g, c, &c.fold, g.rank, tree, DOWN if is_root else UP)
    g.target[1] = c.out + begin
    fold_hop(g, c, nsources, 1 + is_root, 0, nbytes // c.itemsize, is_root)
    g.stats.bytes_sent += nbytes


cdef inline bint results_are_there(Group *g, Call *c, Cursor *cursor, bint inner) noexcept nogil:
    cdef uint64_t end = pair_end(g, c, cursor)
    cdef int tree, parent
    for tree in range(2):
        parent = sr_double_tree_parent(g.rank, g.size, tree)
        if parent >= 0 and is_inner(g, g.rank, tree) == inner:
            if not sr_flag_reached(counter(g, parent, SR_HANDED), end):
                blocked_on(c, counter(g, parent, SR_HANDED), end, parent)
                return False
    return True


cdef void take_tree_results(Group *g, Call *c, Cursor *cursor, bint inner) noexcept nogil:
    cdef size_t nbytes
    cdef unsigned char *out
    cdef int tree, parent
    for tree in range(2):
        parent = sr_double_tree_parent(g.rank, g.size, tree)
        nbytes = chunk_of_tree(c, cursor, tree)
        if parent >= 0 and nbytes > 0 and is_inner(g, g.rank, tree) == inner:
            out = c.out + place_of(c, cursor, tree)
            g.kernels.copy(out, tree_slot(g, c, cursor, parent, tree, DOWN), nbytes, 0)
            if inner:
                g.kernels.copy(tree_slot(g, c, cursor, g.rank, tree, DOWN), out, nbytes, 0)
                g.stats.bytes_sent += nbytes


cdef int hand_down(Group *g, Call *c) noexcept nogil:
    if not results_are_there(g, c, &c.down, True):
        return BLOCKED
    take_tree_results(g, c, &c.down, True)
    advance(g, c, &c.down, SR_HANDED)
    return PROGRESSED


cdef int copy_leaf(Group *g, Call *c) noexcept nogil:
    if not results_are_there(g, c, &c.copy, False):
        return BLOCKED
    take_tree_results(g, c, &c.copy, False)
    SR_FAULT(SR_BEFORE_RELEASE)
    advance(g, c, &c.copy, SR_COPIED)
    return PROGRESSED
