# The choice of an algorithm for every call over several hosts, and calls that need none: refused ones.

from .._algorithms.choice cimport enter_refused, step_refused
from .._core.group cimport (
    ALL_GATHER, ALL_TO_ALL, BROADCAST, DONE, GATHER, INVALID, REDUCE_SCATTER, SCATTER, Call, Group, is_scan,
)
from .context cimport InterNode, await_confirmations, begin_internode, call_number, confirm, inter_of, step_internode
from .data_movement cimport (
    stage_all_gather, stage_large_broadcast, stage_pairwise, stage_small_broadcast, start_all_gather, start_broadcast,
    start_pairwise,
)
from .reductions cimport stage_large, stage_reduce_scatter, stage_small, start_large, start_reduce_scatter, start_small


# ---- refused calls -------------------------------------------------------------------------------------------------

cdef inline void enter_refused_across(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    inter.seq += 1
    inter.previous_is_confirmed = inter.is_to_confirm = False
    c.fingerprint = INVALID   # as in enter_refused
    c.seq = c.mismatch_seq = g.seq


# Confirm a refused call to other hosts without waiting for the other ranks of this host.
cdef inline int step_refused_across(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int status
    if not inter.previous_is_confirmed:
        status = await_confirmations(g, c)
        if status != DONE:
            return status
        inter.previous_is_confirmed = True
        enter_refused(g, c)
        inter.fingerprint = 0   # the call's record describes it
        g.recorded.number = call_number(inter, inter.seq)
        if inter.confirmer != NULL:
            confirm(g, c)
    return step_refused(g, c)


# ---- choice --------------------------------------------------------------------------------------------------------

# Choose the algorithm of a call. The choice depends only on the call and on values that are equal on all ranks, so all
# ranks choose the same one.
cdef inline void choose_algorithm_across(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    c.enter, c.step = begin_internode, step_internode
    if c.kind == GATHER or c.kind == SCATTER or c.kind == ALL_TO_ALL:
        c.start_across, c.stage_across = start_pairwise, stage_pairwise
    elif c.kind == ALL_GATHER or is_scan(c):
        c.start_across, c.stage_across = start_all_gather, stage_all_gather
    elif c.kind == BROADCAST:
        c.start_across = start_broadcast
        c.stage_across = stage_small_broadcast if c.nbytes <= inter.small_nbytes else stage_large_broadcast
    elif c.kind == REDUCE_SCATTER and c.nbytes > 0:
        c.start_across, c.stage_across = start_reduce_scatter, stage_reduce_scatter
    elif c.nbytes <= inter.small_nbytes:
        c.start_across, c.stage_across = start_small, stage_small
    else:
        c.start_across, c.stage_across = start_large, stage_large
