# Partial results: what the ranks of a host have made of their values, on the way to those of other hosts. Sums of 16-
# and 8-bit floats are float32 until all hosts' are added, so that they are rounded once; on the wire float32 may be
# written shorter, and what that loses is added to what the next call sends. (Error feedback: F. Seide et al., "1-bit
# stochastic gradient descent", 2014.)

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.string cimport memset

from .._core.group cimport *
from .context cimport *
from .local_step cimport new_local


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
