# Local steps, and the partial results that they make. A call over several hosts consists of local steps, which are
# collectives among the ranks of one host on their best path, and of messages between hosts. A partial result is the
# reduction of the values of one host. Partial sums of 16- and 8-bit floats stay float32 until the sums of all hosts are
# added, so they are rounded once. On the wire, float32 may have a shorter format. The rounding error of that format is
# added to the values that the next call sends (error feedback: F. Seide et al., "1-bit stochastic gradient descent",
# 2014).

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

# Make the next local step. The caller sets x, out and root, and given and taken if the pieces differ in length.
# count: number of elements that one rank takes from one other rank.
cdef Call *new_local(Group *g, Call *c, int kind, size_t count) noexcept nogil:
    cdef Call *step = &inter_of(g).local
    memset(step, 0, sizeof(Call))
    step.kind = kind
    step.dtype = c.dtype
    step.op = SR_SUM if c.op == SR_AVG else c.op   # the sum is divided once, when all hosts are added
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
    # Steps of different calls may have equal arguments.
    step.fingerprint = fingerprint_of(step) ^ c.fingerprint * <uint64_t> 0x9E3779B97F4A7C15
    choose_pipeline(g, step)
    step.enter(g, step)
    inter.runs_locally = True
    c.seq = step.seq
    c.mismatch_seq = step.mismatch_seq


# Begin a local barrier, if there are other local ranks. Return PROGRESSED.
cdef int begin_barrier(Group *g, Call *c) noexcept nogil:
    if g.size > 1:
        new_local(g, c, BARRIER, 0)
        begin_local(g, c)
    return PROGRESSED


# Advance the local step. Return DONE when it is done. Any other status is that of the whole call.
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

# True if all ranks of this host are known to have begun the current call.
cdef inline bint has_met(Group *g) noexcept nogil:
    return g.size == 1 or not is_before(g.verified, inter_of(g).first_local)


# Publish the line of a call that is about to end with REMOTE_MISMATCH. The message that did not match may belong to a
# later call than the one that differs; the other ranks of this host then see the difference in the line.
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


# Advance a call over several hosts, and its connections. `start` begins the call once the previous call is confirmed.
# `stage` does the next action of the schedule when no local step is in progress. Neither waits for another host before
# the first local step has begun, so ranks of one host that make different calls always detect that in this step.
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
        status = verify(g, c, inter.first_local)   # a rank that went ahead has not compared all lines yet
        if status == DONE:
            return PROGRESSED
    else:
        status = stage(g, c)
        if inter.is_to_confirm and (status == BLOCKED or status == DONE) and has_met(g):
            moved = move(g, c)   # send data before the confirmation
            if moved != PROGRESSED and moved != BLOCKED:
                return moved
            confirm(g, c)
    return PROGRESSED if status == BLOCKED and moved == PROGRESSED else status


# Return DONE once all messages are sent and received.
cdef int finish_internode(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int i
    for i in range(MOST_UNDER_WAY):
        if inter.fragment[i].sending > 0 or inter.fragment[i].receiving > 0:
            return blocked_on_conns(g, c)
    count_path(g, ACROSS)
    return DONE


# ---- partial results -------------------------------------------------------------------------------------------

# Choose the dtype of this call's partial results, and their wire format.
cdef void choose_partials(InterNode *inter, Call *c, int wire) noexcept nogil:
    inter.dtype, inter.itemsize = c.dtype, c.itemsize
    if c.dtype < SR_DTYPES and sr_dtype_is_widened(c.dtype) and (c.op == SR_SUM or c.op == SR_PROD or c.op == SR_AVG):
        inter.dtype, inter.itemsize = SR_F32, sizeof(float)
    inter.format = wire if inter.dtype == SR_F32 else SR_WIRE_NATIVE


# True if x itself is the partial result of this host: the host has one rank, and folding a single value does not change
# it, as logical operations do.
cdef bint is_partial_itself(Group *g, Call *c) noexcept nogil:
    return g.size == 1 and c.op < SR_LAND and c.dtype != SR_BOOL and inter_of(g).dtype == c.dtype


# Return the elements of x in the dtype of partial results: x itself, or widened in `wide`.
cdef const unsigned char *summands(Group *g, Call *c, const unsigned char *x, size_t count,
                                   unsigned char *wide) noexcept nogil:
    if inter_of(g).dtype == c.dtype:
        return x
    g.kernels.widen[c.dtype](<float *> wide, x, count)
    return wide


# Make a local step that computes partial results.
cdef Call *new_reduction(Group *g, Call *c, int kind, size_t count) noexcept nogil:
    cdef Call *step = new_local(g, c, kind, count)
    step.dtype, step.itemsize = inter_of(g).dtype, inter_of(g).itemsize
    step.nbytes = count * step.itemsize
    return step


# ---- on the wire ---------------------------------------------------------------------------------------------

# Encode the values, and replace them by their decoded form, so that this rank keeps exactly the values that it sends.
cdef void encode_and_keep(Group *g, unsigned char *encoded, float *residual, float *values,
                          size_t count) noexcept nogil:
    cdef int format = inter_of(g).format
    g.kernels.encode[format](encoded, residual, values, count)
    g.kernels.decode[format](values, encoded, count)


# As encode_and_keep, for values that several ranks encode and that must have the same bits on all of them: no residual
# is added to the values. The rounding errors, multiplied by `times`, are added to `residual` unless it is NULL.
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


# Send a partial result. encoded: room for its wire format. residual: rounding errors of these elements, which are added
# before encoding and replaced by the new errors; or NULL.
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


# True if results are sent in the wire format. They have the dtype of the call, so only float32 can be encoded.
cdef bint are_results_encoded(InterNode *inter, Call *c) noexcept nogil:
    return inter.format != SR_WIRE_NATIVE and c.dtype == SR_F32


cdef size_t result_nbytes(InterNode *inter, Call *c, size_t count) noexcept nogil:
    return sr_encoded_nbytes(inter.format, count) if are_results_encoded(inter, c) else count * c.itemsize


# ---- folding -------------------------------------------------------------------------------------------------

# Fold the partial results of all hosts in the order of hosts: `own` of this host, and those of the others in `arrived`,
# `pitch` bytes apart. wide: room for the sum if partial results have another dtype than the call; it may be `own`.
cdef void fold_hosts(Group *g, Call *c, const unsigned char *own, const unsigned char *arrived, size_t pitch,
                     unsigned char *wide, unsigned char *out, size_t count) noexcept nogil:
    fold_some(g, c, 0, 1, True, own, arrived, pitch, wide, out, count)


# As fold_hosts, for every step-th host from `first` on. The last fold takes one host of each group, or all hosts if
# there are no groups. An earlier fold takes the hosts of one group; its result is a partial result, too, and is stored
# in `wide`.
cdef void fold_some(Group *g, Call *c, int first, int step, bint is_last, const unsigned char *own,
                    const unsigned char *arrived, size_t pitch, unsigned char *wide, unsigned char *out,
                    size_t count) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef unsigned char *decoded = inter.scratch
    cdef int end = inter.nhosts if is_last else first + inter.per_group
    cdef int op = c.op if is_last or c.op != SR_AVG else <int> SR_SUM
    cdef bint narrows = is_last and inter.dtype != c.dtype
    cdef int nsources = 0
    cdef int host = first
    while host < end:
        inter.source[nsources] = own
        if host != inter.host:
            inter.source[nsources] = arrived + place_of(inter, host) * pitch
            if inter.format != SR_WIRE_NATIVE:
                g.kernels.decode[inter.format](<float *> decoded, inter.source[nsources], count)
                inter.source[nsources] = decoded
                decoded += inter.slice_nbytes
        nsources += 1
        host += step
    g.target[0] = out if is_last and not narrows else wide
    g.kernels.fold[inter.dtype][op](g.target, 1, 0, inter.source, nsources, count, <uint32_t> inter.size)
    if narrows:
        g.kernels.narrow[c.dtype](out, <const float *> wide, count)
