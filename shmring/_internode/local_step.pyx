# Local steps: a call of ranks of several hosts is made of calls of the ranks of each, which take whatever path is best
# among them, and of messages between hosts.

from libc.stdint cimport uint64_t
from libc.string cimport memset

from .._algorithms.direct cimport choose_pipeline
from .._core.group cimport *
from .._core.trace cimport step_call
from .context cimport MOST_UNDER_WAY, InterNode, await_confirmations, blocked_on_conns, confirm, inter_of, move


# The next local step, to be completed by the caller: x, out, root; given and taken where pieces are uneven.
# count: elements of what one rank takes from one other.
cdef Call *new_local(Group *g, Call *c, int kind, size_t count) noexcept nogil:
    cdef Call *step = &inter_of(g).local
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
    cdef InterNode *inter = inter_of(g)
    cdef Call *step = &inter.local
    step.x_nbytes = step.nbytes * g.size if is_split(step) else step.nbytes
    step.out_nbytes = step.nbytes * g.size if is_joined(step) else step.nbytes
    # Steps may look alike that belong to different calls.
    step.fingerprint = fingerprint_of(step) ^ c.fingerprint * <uint64_t> 0x9E3779B97F4A7C15
    choose_pipeline(g, step)
    step.enter(g, step)
    inter.runs_locally = True
    c.seq = step.seq
    c.mismatch_seq = step.mismatch_seq


# A local step that moves nothing. PROGRESSED: it has begun, where there is anybody to meet.
cdef int meet(Group *g, Call *c) noexcept nogil:
    if g.size > 1:
        new_local(g, c, BARRIER, 0)
        begin_local(g, c)
    return PROGRESSED


# DONE: the step is. What else ends a wait is the whole call's.
cdef int step_local(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Call *step = &inter.local
    cdef int status = step_call(g, step)
    if status == DONE:
        inter.runs_locally = False
    elif status != PROGRESSED:
        c.awaited = step.awaited
        c.mismatch_seq = step.mismatch_seq
        c.relayed = step.relayed
        c.error = step.error
    return status


# ---- the whole call ------------------------------------------------------------------------------------------

# Whether all ranks of this host are known to have begun the call under way.
cdef inline bint has_met(Group *g) noexcept nogil:
    return g.size == 1 or not is_before(g.verified, inter_of(g).first_local)


# Before a call ends as REMOTE_MISMATCH: its line is published. The message that did not match may be of a later call
# than the one that differs, which the ranks of this host then see in the line.
cdef int show_call(Group *g, Call *c, int (*stage)(Group *, Call *) noexcept nogil) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Awaited awaited = c.awaited
    cdef int status = PROGRESSED
    while status == PROGRESSED and not sr_flag_reached(&line_of(g, g.rank, inter.first_local).seq, inter.first_local):
        status = step_local(g, c) if inter.runs_locally else stage(g, c)
    if status == MISMATCHED:
        return status
    c.awaited = awaited
    return REMOTE_MISMATCH


# A step of its schedule, while the connections are served: `start` begins it once the call before is confirmed, `stage`
# does what is next where no local step is under way. Neither waits for another host before the first local step has
# begun: ranks of one host that call different things always meet in that step.
cdef int step_internode(Group *g, Call *c, void (*start)(Group *, Call *) noexcept nogil,
                        int (*stage)(Group *, Call *) noexcept nogil) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int moved, status
    if not inter.has_started:
        status = await_confirmations(g, c)
        if status != DONE:
            return status
        inter.has_started = True
        start(g, c)
    moved = move(g, c)
    if moved != PROGRESSED and moved != BLOCKED:
        return show_call(g, c, stage) if moved == REMOTE_MISMATCH and g.size > 1 else moved
    if inter.runs_locally:
        status = step_local(g, c)
        if status == DONE:
            return PROGRESSED
    elif inter.is_to_confirm and is_before(g.verified, inter.first_local) and not is_before(g.seq, inter.first_local):
        status = verify(g, c, inter.first_local)   # a rank that went ahead has not seen all lines yet
        if status == DONE:
            return PROGRESSED
    else:
        status = stage(g, c)
        if inter.is_to_confirm and (status == BLOCKED or status == DONE) and has_met(g):
            moved = move(g, c)   # data first
            if moved != PROGRESSED and moved != BLOCKED:
                return moved
            confirm(g, c)
    return PROGRESSED if status == BLOCKED and moved == PROGRESSED else status


# DONE once all is sent and received.
cdef int finish_internode(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int i
    for i in range(MOST_UNDER_WAY):
        if inter.fragment[i].sending > 0 or inter.fragment[i].receiving > 0:
            return blocked_on_conns(g, c)
    count_path(g, ACROSS)
    return DONE
