# Partial results: the reductions of the values of one host. Partial sums of 16- and 8-bit floats stay float32 until the
# sums of all hosts are added, so they are rounded once. On the wire, float32 may have a shorter format. The rounding
# error of that format is added to the values that the next call sends (error feedback: F. Seide et al., "1-bit
# stochastic gradient descent", 2014).

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.string cimport memset

from .._core.group cimport Call, Group, keeps_single
from .._core.kernels cimport (
    SR_AVG, SR_DTYPES, SR_F32, SR_PROD, SR_SUM, SR_WIRE_NATIVE, sr_dtype_is_widened, sr_encoded_nbytes,
)
from .context cimport InterNode, index_of_other, inter_of, new_local, receive_from, send_to


# Choose the dtype of this call's partial results, and their wire format.
cdef inline void choose_partials(InterNode *inter, Call *c, int wire) noexcept nogil:
    inter.dtype, inter.itemsize = c.dtype, c.itemsize
    if c.dtype < SR_DTYPES and sr_dtype_is_widened(c.dtype) and (c.op == SR_SUM or c.op == SR_PROD or c.op == SR_AVG):
        inter.dtype, inter.itemsize = SR_F32, sizeof(float)
    inter.format = wire if inter.dtype == SR_F32 else SR_WIRE_NATIVE


# True if x itself is the partial result of this host: the host has one rank, and folding a single value does not change
# it, as logical operations do.
cdef inline bint is_partial_itself(Group *g, Call *c) noexcept nogil:
    return g.size == 1 and keeps_single(c) and inter_of(g).dtype == c.dtype


# Return the elements of x in the dtype of partial results: x itself, or widened in `wide`.
cdef inline const unsigned char *summands(Group *g, Call *c, const unsigned char *x, size_t count,
                                          unsigned char *wide) noexcept nogil:
    if inter_of(g).dtype == c.dtype:
        return x
    g.kernels.widen[c.dtype](<float *> wide, x, count)
    return wide


# Make a local step that computes partial results.
cdef inline Call *new_reduction(Group *g, Call *c, int kind, size_t count) noexcept nogil:
    cdef Call *local_call = new_local(g, c, kind, count)
    local_call.dtype, local_call.itemsize = inter_of(g).dtype, inter_of(g).itemsize
    local_call.nbytes = count * local_call.itemsize
    return local_call


# ---- on the wire ---------------------------------------------------------------------------------------------

# Encode the values, and replace them by their decoded form, so that this rank keeps exactly the values that it sends.
cdef inline void encode_and_keep(Group *g, unsigned char *encoded, float *residual, float *values,
                                 size_t count) noexcept nogil:
    cdef int format = inter_of(g).format
    g.kernels.encode[format](encoded, residual, values, count)
    g.kernels.decode[format](values, encoded, count)


# As encode_and_keep, for values that several ranks encode and that must have the same bits on all of them: no residual
# is added to the values. The rounding errors, multiplied by `times`, are added to `residual` unless it is NULL.
cdef inline void encode_alike(Group *g, unsigned char *encoded, float *residual, float times, float *values,
                              size_t count) noexcept nogil:
    cdef float *lost = <float *> inter_of(g).scratch
    cdef size_t i
    memset(lost, 0, count * sizeof(float))
    encode_and_keep(g, encoded, lost, values, count)
    if residual != NULL:
        for i in range(count):
            residual[i] += times * lost[i]


cdef inline size_t nbytes_on_wire(InterNode *inter, size_t count) noexcept nogil:
    return count * inter.itemsize if inter.format == SR_WIRE_NATIVE else sr_encoded_nbytes(inter.format, count)


# Send a partial result. encoded: room for its wire format. residual: rounding errors of these elements, which are added
# before encoding and replaced by the new errors; or NULL.
cdef inline void send_partial(Group *g, Call *c, int rank, const unsigned char *partial, size_t count,
                              unsigned char *encoded, float *residual, uint32_t *left) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if inter.format != SR_WIRE_NATIVE:
        g.kernels.encode[inter.format](encoded, residual, <const float *> partial, count)
        partial = encoded
    send_to(g, c, rank, partial, nbytes_on_wire(inter, count), left)


cdef inline void receive_partial(Group *g, Call *c, int rank, unsigned char *arrived, size_t count,
                                 uint32_t *left) noexcept nogil:
    receive_from(g, c, rank, arrived, nbytes_on_wire(inter_of(g), count), left)


# True if results are sent in the wire format. They have the dtype of the call, so only float32 can be encoded.
cdef inline bint are_results_encoded(InterNode *inter, Call *c) noexcept nogil:
    return inter.format != SR_WIRE_NATIVE and c.dtype == SR_F32


cdef inline size_t result_nbytes(InterNode *inter, Call *c, size_t count) noexcept nogil:
    return sr_encoded_nbytes(inter.format, count) if are_results_encoded(inter, c) else count * c.itemsize


# ---- folding -------------------------------------------------------------------------------------------------

# Fold the partial results of all hosts in the order of hosts: `own` of this host, and those of the others in `arrived`,
# `pitch` bytes apart. wide: room for the sum if partial results have another dtype than the call; it may be `own`.
cdef inline void fold_hosts(Group *g, Call *c, const unsigned char *own, const unsigned char *arrived, size_t pitch,
                            unsigned char *wide, unsigned char *out, size_t count) noexcept nogil:
    fold_some(g, c, 0, 1, True, own, arrived, pitch, wide, out, count)


# As fold_hosts, for every step-th host from `first` on. The last fold takes one host of each group, or all hosts if
# there are no groups. An earlier fold takes the hosts of one group; its result is a partial result, too, and is stored
# in `wide`.
cdef inline void fold_some(Group *g, Call *c, int first, int step, bint is_last, const unsigned char *own,
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
            inter.source[nsources] = arrived + index_of_other(inter, host) * pitch
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
