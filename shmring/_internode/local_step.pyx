# Local steps and the partial results that they make. A call of ranks of several hosts is made of calls of the ranks of
# each host, which take the best path among them, and of messages between hosts. A partial result is the reduction of
# the values of one host. Partial sums of 16- and 8-bit floats stay float32 until those of all hosts are added, so that
# they are rounded once; on the wire float32 may have a shorter format, and what the format loses is added to what the
# next call sends. (Error feedback: F. Seide et al., "1-bit stochastic gradient descent", 2014.)

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from .._algorithms.direct cimport choose_pipeline
from .._core.group cimport (
    ACROSS, BARRIER, BLOCKED, DONE, MISMATCHED, PROGRESSED, REMOTE_MISMATCH, Awaited, Call, Group, count_path,
    fingerprint_of, is_before, is_joined, is_split, line_of, verify,
)
from .._core.kernels cimport (
    SR_AVG, SR_BOOL, SR_DTYPES, SR_F32, SR_LAND, SR_PROD, SR_SUM, SR_WIRE_NATIVE, sr_dtype_is_widened,
    sr_encoded_nbytes,
)
from .._core.segment cimport sr_flag_reached
from .._core.trace cimport step_call
from .context cimport (
    MOST_UNDER_WAY, InterNode, await_confirmations, blocked_on_conns, confirm, inter_of, move, place_of, receive_from,
    send_to,
)


# ---- one local step --------------------------------------------------------------------------------------------

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


# ---- partial results -------------------------------------------------------------------------------------------

# What this call's are, and how they are written on the wire.
cdef void choose_partials(InterNode *inter, Call *c, int wire) noexcept nogil:
    inter.dtype, inter.itemsize = c.dtype, c.itemsize
    if c.dtype < SR_DTYPES and sr_dtype_is_widened(c.dtype) and (c.op == SR_SUM or c.op == SR_PROD or c.op == SR_AVG):
        inter.dtype, inter.itemsize = SR_F32, sizeof(float)
    inter.format = wire if inter.dtype == SR_F32 else SR_WIRE_NATIVE


# What a host of one rank has is its partial result, unless folding a single value changes it: as logical ops do.
cdef bint is_partial_itself(Group *g, Call *c) noexcept nogil:
    return g.size == 1 and c.op < SR_LAND and c.dtype != SR_BOOL and inter_of(g).dtype == c.dtype


# Elements of x as they are added: themselves, or in `wide`.
cdef const unsigned char *summands(Group *g, Call *c, const unsigned char *x, size_t count,
                                   unsigned char *wide) noexcept nogil:
    if inter_of(g).dtype == c.dtype:
        return x
    g.kernels.widen[c.dtype](<float *> wide, x, count)
    return wide


# A local step that makes partial results.
cdef Call *new_reduction(Group *g, Call *c, int kind, size_t count) noexcept nogil:
    cdef Call *step = new_local(g, c, kind, count)
    step.dtype, step.itemsize = inter_of(g).dtype, inter_of(g).itemsize
    step.nbytes = count * step.itemsize
    return step


# ---- on the wire ---------------------------------------------------------------------------------------------

# What is sent is what is kept.
cdef void encode_and_keep(Group *g, unsigned char *encoded, float *residual, float *values,
                          size_t count) noexcept nogil:
    cdef int format = inter_of(g).format
    g.kernels.encode[format](encoded, residual, values, count)
    g.kernels.decode[format](values, encoded, count)


# The same of what several ranks write, who must all come to the same bits: nothing is added to it. What is lost goes
# into `residual`, unless that is NULL, `times` over.
cdef void encode_alike(Group *g, unsigned char *encoded, float *residual, float times, float *values,
                       size_t count) noexcept nogil:
    cdef float *lost = <float *> inter_of(g).scratch
    cdef size_t i
    memset(lost, 0, count * sizeof(float))
    encode_and_keep(g, encoded, lost, values, count)
    if residual != NULL:
        for i in range(count):
            residual[i] += times * lost[i]


cdef size_t nbytes_on_wire(InterNode *inter, size_t count) noexcept nogil:
    return count * inter.itemsize if inter.format == SR_WIRE_NATIVE else sr_encoded_nbytes(inter.format, count)


# encoded: room for it; residual: what was lost before of these elements, and now of what is sent; or NULL.
cdef void send_partial(Group *g, Call *c, int rank, const unsigned char *partial, size_t count,
                       unsigned char *encoded, float *residual, uint32_t *left) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if inter.format != SR_WIRE_NATIVE:
        g.kernels.encode[inter.format](encoded, residual, <const float *> partial, count)
        partial = encoded
    send_to(g, c, rank, partial, nbytes_on_wire(inter, count), left)


cdef void receive_partial(Group *g, Call *c, int rank, unsigned char *arrived, size_t count,
                          uint32_t *left) noexcept nogil:
    receive_from(g, c, rank, arrived, nbytes_on_wire(inter_of(g), count), left)


# Results are elements already: only those of float32 can be written shorter.
cdef bint are_results_encoded(InterNode *inter, Call *c) noexcept nogil:
    return inter.format != SR_WIRE_NATIVE and c.dtype == SR_F32


cdef size_t result_nbytes(InterNode *inter, Call *c, size_t count) noexcept nogil:
    return sr_encoded_nbytes(inter.format, count) if are_results_encoded(inter, c) else count * c.itemsize


# ---- folding -------------------------------------------------------------------------------------------------

# The partial results of all hosts, in their order: this host's own, and those that have arrived, `pitch` bytes apart.
# wide: where elements are not added as themselves, room for their sum, which may be `own`.
cdef void fold_nodes(Group *g, Call *c, const unsigned char *own, const unsigned char *arrived, size_t pitch,
                     unsigned char *wide, unsigned char *out, size_t count) noexcept nogil:
    fold_some(g, c, 0, 1, True, own, arrived, pitch, wide, out, count)


# The same of every step-th node from `first` on: of one of each group, or, if it is not the last fold, of one group,
# whose sum is a partial result again and goes to `wide`.
cdef void fold_some(Group *g, Call *c, int first, int step, bint is_last, const unsigned char *own,
                    const unsigned char *arrived, size_t pitch, unsigned char *wide, unsigned char *out,
                    size_t count) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef unsigned char *decoded = inter.scratch
    cdef int end = inter.nnodes if is_last else first + inter.per_group
    cdef int op = c.op if is_last or c.op != SR_AVG else <int> SR_SUM
    cdef bint narrows = is_last and inter.dtype != c.dtype
    cdef int nsources = 0
    cdef int node = first
    while node < end:
        inter.source[nsources] = own
        if node != inter.node:
            inter.source[nsources] = arrived + place_of(inter, node) * pitch
            if inter.format != SR_WIRE_NATIVE:
                g.kernels.decode[inter.format](<float *> decoded, inter.source[nsources], count)
                inter.source[nsources] = decoded
                decoded += inter.slice_nbytes
        nsources += 1
        node += step
    g.target[0] = out if is_last and not narrows else wide
    g.kernels.fold[inter.dtype][op](g.target, 1, 0, inter.source, nsources, count, <uint32_t> inter.size)
    if narrows:
        g.kernels.narrow[c.dtype](out, <const float *> wide, count)
