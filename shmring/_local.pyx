# Local steps: a call of ranks of several hosts is made of calls of the ranks of each, which take whatever path is best
# among them, and of messages between hosts. May know: _group, _leg, _pipelines, _trace.

from libc.stdint cimport uint64_t
from libc.string cimport memset

from ._group cimport *
from ._leg cimport MOST_UNDER_WAY, Leg, blocked_on_wires, leg_of, move
from ._pipelines cimport choose_pipeline
from ._trace cimport step_call


# The next local step, to be completed by the caller: x, out, root; given and taken where pieces are uneven.
# count: elements of what one rank takes from one other.
cdef Call *new_local(Group *g, Call *c, int kind, size_t count) noexcept nogil:
    cdef Call *step = &leg_of(g).local
    memset(step, 0, sizeof(Call))
    step.kind = kind
    step.dtype = c.dtype
    step.op = SR_SUM if c.op == SR_AVG else c.op   # divided once, when all are added
    step.order = c.order
    step.count = count
    step.itemsize = c.itemsize
    step.nbytes = count * c.itemsize
    step.timeout_ns = c.timeout_ns
    step.within = c
    return step


cdef void begin_local(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Call *step = &leg.local
    step.x_nbytes = step.nbytes * g.size if is_split(step) else step.nbytes
    step.out_nbytes = step.nbytes * g.size if is_joined(step) else step.nbytes
    # Steps may look alike that belong to different calls.
    step.fingerprint = fingerprint_of(step) ^ c.fingerprint * <uint64_t> 0x9E3779B97F4A7C15
    choose_pipeline(g, step)
    step.enter(g, step)
    leg.runs_locally = True
    c.seq = step.seq
    c.parted_seq = step.parted_seq


# DONE: the step is. What else ends a wait is the whole call's.
cdef int step_local(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Call *step = &leg.local
    cdef int status = step_call(g, step)
    if status == DONE:
        leg.runs_locally = False
    elif status != PROGRESSED:
        c.awaited = step.awaited
        c.parted_seq = step.parted_seq
        c.relayed = step.relayed
        c.error = step.error
    return status


# ---- the whole call ------------------------------------------------------------------------------------------

# A step of its schedule, while the wires are served: `stage` does what is next where no local step is under way.
cdef int step_crossing(Group *g, Call *c, int (*stage)(Group *, Call *) noexcept nogil) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef int moved = move(g, c)
    cdef int status
    if moved != PROGRESSED and moved != BLOCKED:
        return moved
    if leg.runs_locally:
        status = step_local(g, c)
        if status == DONE:
            return PROGRESSED
    else:
        status = stage(g, c)
    return PROGRESSED if status == BLOCKED and moved == PROGRESSED else status


# DONE once all is sent and received.
cdef int finish_crossing(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef int i
    for i in range(MOST_UNDER_WAY):
        if leg.stretch[i].sending > 0 or leg.stretch[i].receiving > 0:
            return blocked_on_wires(g, c)
    count_path(g, ACROSS)
    return DONE
