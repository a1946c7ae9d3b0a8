# reduce_scatter of ranks of several hosts: every piece is reduced on each host by one of its ranks, and folded by the
# rank that gets it. Every function returns at once; what it waits for
# is in call.awaited.

from libc.stddef cimport size_t

from .._core.group cimport *
from .context cimport *
from .local_step cimport begin_local, step_crossing
from .partials cimport *


cdef enum:
    ASKING, REDUCING, FOLDING   # stages of a turn


# Which local rank of a node reduces the pieces of a rank.
cdef inline int reducer_on(Leg *leg, int node, int rank) noexcept nogil:
    return rank_at(leg, node, leg.local_of[rank] % leg.nlocal[node])


# Elements of this turn's part of every piece.
cdef inline size_t part_count(Leg *leg, Call *c) noexcept nogil:
    return min(c.count - <size_t> leg.turn * leg.stretch_count, leg.stretch_count)


cdef void start_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    choose_partials(leg, c, SR_WIRE_NATIVE)
    leg.stretch_count = leg.pair_nbytes // leg.itemsize


# A turn for each part of the pieces: partial results are asked for, reduced here for everyone, and folded.
cdef int stage_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *s = &leg.stretch[0]
    cdef unsigned char *out = c.out + <size_t> leg.turn * leg.stretch_count * c.itemsize
    if leg.stage == ASKING:
        await_partials(g, c)
        leg.group = 0
        leg.stage = REDUCING
    if leg.stage == REDUCING:
        if reduce_group(g, c):
            return PROGRESSED
        leg.stage = FOLDING
    if s.receiving > 0 or s.sending > 0:
        return blocked_on_conns(g, c)
    fold_nodes(g, c, place_for_own(g, c), leg.room, leg.pair_nbytes, place_for_own(g, c), out, part_count(leg, c))
    leg.turn += 1
    leg.stage = ASKING
    if <size_t> leg.turn * leg.stretch_count < c.count:
        return PROGRESSED
    count_path(g, ACROSS)
    return DONE


cdef void await_partials(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef unsigned char *arrived = leg.room
    cdef int node
    for node in range(leg.nnodes):
        if node != leg.node:
            receive_partial(g, c, reducer_on(leg, node, leg.rank), arrived, part_count(leg, c),
                            &leg.stretch[0].receiving)
            arrived += leg.pair_nbytes


# The partial result for this rank itself: where the result belongs, or before what is made for others.
cdef inline unsigned char *place_for_own(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    if leg.dtype == c.dtype:
        return c.out + <size_t> leg.turn * leg.stretch_count * c.itemsize
    return leg.scratch


# What this rank reduces in one group, for another host.
cdef inline unsigned char *place_for_partial(Leg *leg, int group) noexcept nogil:
    return leg.room + <size_t> (leg.nnodes - 1 + group) * leg.pair_nbytes


# The pieces of as many ranks of a node as this one has, a local rank reducing that of each. What this rank reduced in
# the step before is for another host. False: there is no group left.
cdef bint reduce_group(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef int first = 0
    cdef int node = node_of_group(g, leg, leg.group, &first)
    if leg.group > 0:
        send_group(g, c, leg.group - 1)
    if node == leg.nnodes:
        return False
    begin_group(g, c, node, first, place_for_own(g, c) if node == leg.node else place_for_partial(leg, leg.group))
    leg.group += 1
    return True


cdef void send_group(Group *g, Call *c, int group) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef int first = 0
    cdef int node = node_of_group(g, leg, group, &first)
    first += leg.local_of[leg.rank]
    if node != leg.node and first < leg.nlocal[node]:
        send_partial(g, c, rank_at(leg, node, first), place_for_partial(leg, group), part_count(leg, c), NULL, NULL,
                     &leg.stretch[0].sending)


cdef void begin_group(Group *g, Call *c, int node, int first, unsigned char *partial) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef size_t count = part_count(leg, c)
    cdef const unsigned char *x = c.x + <size_t> leg.turn * leg.stretch_count * c.itemsize
    cdef unsigned char *wide = leg.scratch + leg.pair_nbytes   # behind the partial result for this rank
    cdef Call *step = new_reduction(g, c, REDUCE_SCATTER, count)
    cdef int local
    for local in range(g.size):
        leg.given[local].nbytes = 0
        if first + local < leg.nlocal[node]:
            leg.given[local].data = <unsigned char *> summands(
                g, c, x + rank_at(leg, node, first + local) * c.nbytes, count, wide)
            leg.given[local].nbytes = step.nbytes
            wide += leg.pair_nbytes
    if g.size == 1:
        step.x = leg.given[0].data
    else:
        step.given = leg.given
    step.out = partial
    begin_local(g, c)


cdef int step_reduce_scatter(Group *g, Call *c) noexcept nogil:
    return step_crossing(g, c, start_reduce_scatter, stage_reduce_scatter)
