# Small all_reduce and reduce of ranks of several hosts, and barrier: one rank of each host exchanges all of it with
# those of all other hosts, which is one hop. Every function returns at
# once; what it waits for is in call.awaited.

from .._core.group cimport *
from .context cimport *
from .local_step cimport begin_local, new_local, step_internode
from .partials cimport *


cdef enum:
    REDUCING, EXCHANGING, BROADCASTING   # stages of a call


# Who does that on a node: the root, where there is one.
cdef inline int leader_on(InterNode *inter, Call *c, int node) noexcept nogil:
    return inter.local_of[c.root] if c.kind == REDUCE and node == inter.node_of[c.root] else 0


cdef inline bint leads(InterNode *inter, Call *c) noexcept nogil:
    return inter.local_of[inter.rank] == leader_on(inter, c, inter.node)


cdef void start_small(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Call *step
    choose_partials(inter, c, SR_WIRE_NATIVE)
    if is_partial_itself(g, c):
        return
    if c.nbytes == 0:   # the ranks meet all the same
        new_local(g, c, BARRIER, 0)
    else:
        step = new_reduction(g, c, REDUCE, c.count)
        step.root = leader_on(inter, c, inter.node)
        step.x = summands(g, c, c.x, c.count, inter.scratch)
        step.out = inter.room
    begin_local(g, c)


cdef int step_small(Group *g, Call *c) noexcept nogil:
    return step_internode(g, c, start_small, stage_small)


cdef int stage_small(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *whole = &inter.fragment[0]
    if inter.stage == REDUCING:
        inter.stage = EXCHANGING
        if leads(inter, c):
            exchange_partials(g, c)
    if inter.stage == EXCHANGING:
        if whole.receiving > 0 or whole.sending > 0:
            return blocked_on_conns(g, c)
        inter.stage = BROADCASTING
        if leads(inter, c) and is_wanted_on(inter, c, inter.node) and c.nbytes > 0:
            fold_nodes(g, c, own_partial(g, c), inter.room + inter.slice_nbytes, inter.slice_nbytes, inter.room, c.out,
                       c.count)
        if c.kind != REDUCE and g.size > 1:
            hand_out_small(g, c)
            return PROGRESSED
    count_path(g, ACROSS)
    return DONE


cdef inline const unsigned char *own_partial(Group *g, Call *c) noexcept nogil:
    return c.x if is_partial_itself(g, c) else inter_of(g).room


# The partial result of this host is there: its leader sends it to all others that fold.
cdef void exchange_partials(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *whole = &inter.fragment[0]
    cdef unsigned char *arrived = inter.room
    cdef size_t count = c.count if c.nbytes > 0 else 0   # of what moves nothing it only says what the call is
    cdef int node, other
    for node in range(inter.nnodes):
        if node == inter.node:
            continue
        arrived += inter.slice_nbytes
        other = rank_at(inter, node, leader_on(inter, c, node))
        if is_wanted_on(inter, c, node):
            send_partial(g, c, other, own_partial(g, c), count, NULL, NULL, &whole.sending)
        if is_wanted_on(inter, c, inter.node):
            receive_partial(g, c, other, arrived, count, &whole.receiving)


# From the leader to the other ranks of the host.
cdef void hand_out_small(Group *g, Call *c) noexcept nogil:
    cdef Call *step = new_local(g, c, BROADCAST if c.nbytes > 0 else BARRIER, c.count if c.nbytes > 0 else 0)
    step.x = c.out
    step.out = c.out
    begin_local(g, c)
