# The binomial tree and the double binary tree. They run only if they are named.

from libc.stdint cimport uint64_t

from .._core.group cimport (
    BLOCKED, BY_DOUBLE_TREE, BY_TREE, DONE, PROGRESSED, Call, Cursor, Group, await_lines, blocked_on, bytes_within,
    count_path, counter, publish,
)
from .._core.schedule cimport (
    sr_double_tree_child, sr_double_tree_is_inner, sr_double_tree_parent, sr_slice_begin, sr_tree_receives_from,
    sr_tree_steps,
)
from .._core.segment cimport (
    SR_BEFORE_RELEASE, SR_COPIED, SR_FAULT, SR_HANDED, SR_REDUCED, SR_STAGED, sr_flag, sr_flag_reached,
)
from .._core.staging cimport (
    begin_named, blocked_on_credit, fold_hop, give_credit, has_credit, next_chunk, slot, slot_begin, slot_nbytes,
)


# ---- binomial tree -------------------------------------------------------------------------------------------

# Each chunk has two slots on each rank: one for the partial result on the way up (counter STAGED), one for the result
# on the way down (counter REDUCED). c.fold is the cursor of the way up, and c.copy that of the way down.

cdef inline uint64_t up_slot(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return slot_begin(g, cursor.position, 2 * slot_nbytes(next_chunk(c, cursor)))


cdef inline uint64_t down_slot(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return up_slot(g, c, cursor) + slot_nbytes(next_chunk(c, cursor))


cdef inline uint64_t tree_end(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return up_slot(g, c, cursor) + 2 * slot_nbytes(next_chunk(c, cursor))


cdef inline void enter_tree(Group *g, Call *c) noexcept nogil:
    begin_named(g, c, 4)   # two slots for each chunk


cdef inline int tree_parent(int rank) noexcept nogil:
    return rank & (rank - 1)


cdef inline int step_tree(Group *g, Call *c) noexcept nogil:
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
cdef inline int await_children(Group *g, Call *c) noexcept nogil:
    cdef int child
    while c.fold_peer < sr_tree_steps(g.size):
        child = sr_tree_receives_from(g.rank, g.size, c.fold_peer)
        if child >= 0 and not sr_flag_reached(counter(g, child, SR_STAGED), tree_end(g, c, &c.fold)):
            return blocked_on(c, counter(g, child, SR_STAGED), tree_end(g, c, &c.fold), child)
        c.fold_peer += 1
    return DONE


# Fold a chunk of all subtrees. The root writes the result to its out and to its slot for the way down; other ranks fold
# into their slot for the way up.
cdef inline void send_up(Group *g, Call *c) noexcept nogil:
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
cdef inline void pass_down(Group *g, Call *c) noexcept nogil:
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
    return bytes_within(half_nbytes(c, tree), cursor.offset, c.chunk_nbytes)


cdef inline uint64_t pair_slot(const Call *c, const Cursor *cursor) noexcept nogil:
    return slot_nbytes(chunk_of_tree(c, cursor, 0))


cdef inline uint64_t pair_begin(Group *g, const Call *c, const Cursor *cursor) noexcept nogil:
    return slot_begin(g, cursor.position, PAIR_SLOTS * pair_slot(c, cursor))


cdef inline uint64_t pair_end(Group *g, const Call *c, const Cursor *cursor) noexcept nogil:
    return pair_begin(g, c, cursor) + PAIR_SLOTS * pair_slot(c, cursor)


cdef inline unsigned char *tree_slot(Group *g, const Call *c, const Cursor *cursor, int rank, int tree,
                                     int way) noexcept nogil:
    return slot(g, rank, pair_begin(g, c, cursor)) + (2 * tree + way) * pair_slot(c, cursor)


cdef inline size_t offset_in_message(const Call *c, const Cursor *cursor, int tree) noexcept nogil:
    return tree * half_nbytes(c, 0) + cursor.offset


cdef inline bint is_inner(Group *g, int rank, int tree) noexcept nogil:
    return sr_double_tree_is_inner(rank, g.size, tree)


cdef inline void advance(Group *g, const Call *c, Cursor *cursor, int which) noexcept nogil:
    cdef uint64_t end = pair_end(g, c, cursor)
    cursor.offset += chunk_of_tree(c, cursor, 0)
    cursor.position = end
    publish(g, which, end)


cdef inline void enter_double_tree(Group *g, Call *c) noexcept nogil:
    begin_named(g, c, 2 * PAIR_SLOTS)


cdef inline int step_double_tree(Group *g, Call *c) noexcept nogil:
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


cdef inline void stage_leaf(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes
    cdef int tree
    for tree in range(2):
        nbytes = chunk_of_tree(c, &c.stage, tree)
        if nbytes > 0 and not is_inner(g, g.rank, tree):
            g.kernels.copy(tree_slot(g, c, &c.stage, g.rank, tree, UP), c.x + offset_in_message(c, &c.stage, tree),
                           nbytes, 0)
            g.stats.bytes_sent += nbytes
    advance(g, c, &c.stage, SR_STAGED)


cdef inline int fold_subtree(Group *g, Call *c) noexcept nogil:
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
cdef inline void fold_children(Group *g, Call *c, int tree) noexcept nogil:
    cdef size_t nbytes = chunk_of_tree(c, &c.fold, tree)
    cdef size_t begin = offset_in_message(c, &c.fold, tree)
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


cdef inline int await_results(Group *g, Call *c, Cursor *cursor, bint inner) noexcept nogil:
    cdef uint64_t end = pair_end(g, c, cursor)
    cdef int tree, parent
    for tree in range(2):
        parent = sr_double_tree_parent(g.rank, g.size, tree)
        if parent >= 0 and is_inner(g, g.rank, tree) == inner:
            if not sr_flag_reached(counter(g, parent, SR_HANDED), end):
                return blocked_on(c, counter(g, parent, SR_HANDED), end, parent)
    return DONE


cdef inline void take_tree_results(Group *g, Call *c, Cursor *cursor, bint inner) noexcept nogil:
    cdef size_t nbytes
    cdef unsigned char *out
    cdef int tree, parent
    for tree in range(2):
        parent = sr_double_tree_parent(g.rank, g.size, tree)
        nbytes = chunk_of_tree(c, cursor, tree)
        if parent >= 0 and nbytes > 0 and is_inner(g, g.rank, tree) == inner:
            out = c.out + offset_in_message(c, cursor, tree)
            g.kernels.copy(out, tree_slot(g, c, cursor, parent, tree, DOWN), nbytes, 0)
            if inner:
                g.kernels.copy(tree_slot(g, c, cursor, g.rank, tree, DOWN), out, nbytes, 0)
                g.stats.bytes_sent += nbytes


cdef inline int hand_down(Group *g, Call *c) noexcept nogil:
    if await_results(g, c, &c.down, True) == BLOCKED:
        return BLOCKED
    take_tree_results(g, c, &c.down, True)
    advance(g, c, &c.down, SR_HANDED)
    return PROGRESSED


cdef inline int copy_leaf(Group *g, Call *c) noexcept nogil:
    if await_results(g, c, &c.copy, False) == BLOCKED:
        return BLOCKED
    take_tree_results(g, c, &c.copy, False)
    SR_FAULT(SR_BEFORE_RELEASE)
    advance(g, c, &c.copy, SR_COPIED)
    return PROGRESSED
