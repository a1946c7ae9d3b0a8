# reduce_scatter of ranks of several hosts: every piece is reduced on each host by one of its ranks, and folded by the
# rank that gets it. Every function returns at once; what it waits for
# is in call.awaited.

from libc.stddef cimport size_t

from .._core.group cimport *
from .context cimport *
from .local_step cimport begin_local, step_internode
from .partials cimport *


cdef enum:
    ASKING, REDUCING, FOLDING   # stages of a turn


# Which local rank of a node reduces the pieces of a rank.
cdef inline int reducer_on(InterNode *inter, int node, int rank) noexcept nogil:
    return rank_at(inter, node, inter.local_of[rank] % inter.nlocal[node])


# Elements of this turn's part of every piece.
cdef inline size_t part_count(InterNode *inter, Call *c) noexcept nogil:
    return min(c.count - <size_t> inter.turn * inter.fragment_count, inter.fragment_count)


cdef void start_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    choose_partials(inter, c, SR_WIRE_NATIVE)
    inter.fragment_count = inter.pair_nbytes // inter.itemsize


# A turn for each part of the pieces: partial results are asked for, reduced here for everyone, and folded.
cdef int stage_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = &inter.fragment[0]
    cdef unsigned char *out = c.out + <size_t> inter.turn * inter.fragment_count * c.itemsize
    if inter.stage == ASKING:
        await_partials(g, c)
        inter.group = 0
        inter.stage = REDUCING
    if inter.stage == REDUCING:
        if reduce_group(g, c):
            return PROGRESSED
        inter.stage = FOLDING
    if s.receiving > 0 or s.sending > 0:
        return blocked_on_conns(g, c)
    fold_nodes(g, c, place_for_own(g, c), inter.room, inter.pair_nbytes, place_for_own(g, c), out, part_count(inter, c))
    inter.turn += 1
    inter.stage = ASKING
    if <size_t> inter.turn * inter.fragment_count < c.count:
        return PROGRESSED
    count_path(g, ACROSS)
    return DONE


cdef void await_partials(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef unsigned char *arrived = inter.room
    cdef int node
    for node in range(inter.nnodes):
        if node != inter.node:
            receive_partial(g, c, reducer_on(inter, node, inter.rank), arrived, part_count(inter, c),
                            &inter.fragment[0].receiving)
            arrived += inter.pair_nbytes


# The partial result for this rank itself: where the result belongs, or before what is made for others.
cdef inline unsigned char *place_for_own(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if inter.dtype == c.dtype:
        return c.out + <size_t> inter.turn * inter.fragment_count * c.itemsize
    return inter.scratch


# What this rank reduces in one group, for another host.
cdef inline unsigned char *place_for_partial(InterNode *inter, int group) noexcept nogil:
    return inter.room + <size_t> (inter.nnodes - 1 + group) * inter.pair_nbytes


# The pieces of as many ranks of a node as this one has, a local rank reducing that of each. What this rank reduced in
# the step before is for another host. False: there is no group left.
cdef bint reduce_group(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int first = 0
    cdef int node = node_of_group(g, inter, inter.group, &first)
    if inter.group > 0:
        send_group(g, c, inter.group - 1)
    if node == inter.nnodes:
        return False
    begin_group(g, c, node, first, place_for_own(g, c) if node == inter.node else place_for_partial(inter, inter.group))
    inter.group += 1
    return True


cdef void send_group(Group *g, Call *c, int group) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int first = 0
    cdef int node = node_of_group(g, inter, group, &first)
    first += inter.local_of[inter.rank]
    if node != inter.node and first < inter.nlocal[node]:
        send_partial(g, c, rank_at(inter, node, first), place_for_partial(inter, group), part_count(inter, c), NULL,
                     NULL, &inter.fragment[0].sending)


cdef void begin_group(Group *g, Call *c, int node, int first, unsigned char *partial) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef size_t count = part_count(inter, c)
    cdef const unsigned char *x = c.x + <size_t> inter.turn * inter.fragment_count * c.itemsize
    cdef unsigned char *wide = inter.scratch + inter.pair_nbytes   # behind the partial result for this rank
    cdef Call *step = new_reduction(g, c, REDUCE_SCATTER, count)
    cdef int local
    for local in range(g.size):
        inter.given[local].nbytes = 0
        if first + local < inter.nlocal[node]:
            inter.given[local].data = <unsigned char *> summands(
                g, c, x + rank_at(inter, node, first + local) * c.nbytes, count, wide)
            inter.given[local].nbytes = step.nbytes
            wide += inter.pair_nbytes
    if g.size == 1:
        step.x = inter.given[0].data
    else:
        step.given = inter.given
    step.out = partial
    begin_local(g, c)


cdef int step_reduce_scatter(Group *g, Call *c) noexcept nogil:
    return step_internode(g, c, start_reduce_scatter, stage_reduce_scatter)
