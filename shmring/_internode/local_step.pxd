# The local steps of a call over several hosts, which are collectives among the ranks of one host, and the partial
# results that they make.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t

from .._core.group cimport REDUCE, Call, Group
from .context cimport InterNode

cdef Call *new_local(Group *g, Call *c, int kind, size_t count) noexcept nogil
cdef void begin_local(Group *g, Call *c) noexcept nogil
cdef int begin_barrier(Group *g, Call *c) noexcept nogil
cdef int step_internode(Group *g, Call *c, void (*start)(Group *, Call *) noexcept nogil,
                        int (*stage)(Group *, Call *) noexcept nogil) noexcept nogil
cdef int finish_internode(Group *g, Call *c) noexcept nogil


# True if a rank of `host` needs the result.
cdef inline bint is_wanted_on(InterNode *inter, Call *c, int host) noexcept nogil:
    return c.kind != REDUCE or host == inter.host_of[c.root]


cdef void choose_partials(InterNode *inter, Call *c, int wire) noexcept nogil
cdef bint is_partial_itself(Group *g, Call *c) noexcept nogil
cdef const unsigned char *summands(Group *g, Call *c, const unsigned char *x, size_t count,
                                   unsigned char *wide) noexcept nogil
cdef Call *new_reduction(Group *g, Call *c, int kind, size_t count) noexcept nogil
cdef void send_partial(Group *g, Call *c, int rank, const unsigned char *partial, size_t count, unsigned char *encoded,
                       float *residual, uint32_t *left) noexcept nogil
cdef void receive_partial(Group *g, Call *c, int rank, unsigned char *arrived, size_t count,
                          uint32_t *left) noexcept nogil
cdef void fold_hosts(Group *g, Call *c, const unsigned char *own, const unsigned char *arrived, size_t pitch,
                     unsigned char *wide, unsigned char *out, size_t count) noexcept nogil
cdef void fold_some(Group *g, Call *c, int first, int step, bint is_last, const unsigned char *own,
                    const unsigned char *arrived, size_t pitch, unsigned char *wide, unsigned char *out,
                    size_t count) noexcept nogil
cdef void encode_and_keep(Group *g, unsigned char *encoded, float *residual, float *values,
                          size_t count) noexcept nogil
cdef void encode_alike(Group *g, unsigned char *encoded, float *residual, float times, float *values,
                       size_t count) noexcept nogil
cdef size_t nbytes_on_wire(InterNode *inter, size_t count) noexcept nogil
cdef bint are_results_encoded(InterNode *inter, Call *c) noexcept nogil
cdef size_t result_nbytes(InterNode *inter, Call *c, size_t count) noexcept nogil
