# What a rank does and when, while it is traced: slices of time, noted by who steps its calls. Pipelines know nothing of
# it: what a step has done is seen in the call afterwards.

from libc.stdint cimport uint8_t, uint64_t

from .group cimport Call, Group, record_outcome
from .segment cimport sr_record


cdef enum Traced:
    TRACED_CALL, TRACED_WAIT, TRACED_STAGE, TRACED_REDUCE, TRACED_COPY, TRACED_EXCHANGE, TRACED_WIRE
    TRACED_SEND, TRACED_RECV, TRACED_PROBE, NTRACED


cdef struct Slice:
    uint64_t begin_ns, end_ns
    uint64_t nbytes          # that it has moved this call on; of a message
    sr_record call           # which it is, or is part of
    int awaited              # in the end, if it is a wait; as Call has it. Of a message the other rank, of the world's
    uint8_t traced, path
    bint is_wait


# The last `mask + 1` slices, of `nslices` since it began.
cdef struct Trace:
    Slice *slice
    uint64_t mask, nslices
    uint64_t call_begin_ns   # of the one under way; 0: of none that began since
    uint64_t stepped_ns      # when its last step ended
    uint64_t blocked_ns      # since when it is blocked; 0: it is not
    uint64_t over_wire       # g.stats.bytes_over_wire then
    int awaited


cdef void begin_traced(Trace *t) noexcept nogil
cdef int step_traced(Trace *t, Group *g, Call *c) noexcept nogil
cdef void end_traced(Trace *t, Group *g) noexcept nogil
cdef uint64_t note_message(Trace *t, int traced, uint64_t begin_ns, int rank, uint64_t nbytes,
                           int outcome) noexcept nogil


cdef inline Trace *trace_of(Group *g) noexcept nogil:
    return <Trace *> g.trace


cdef inline void enter_call(Group *g, Call *c) noexcept nogil:
    if g.trace != NULL:
        begin_traced(trace_of(g))
    c.enter(g, c)


cdef inline int step_call(Group *g, Call *c) noexcept nogil:
    return c.step(g, c) if g.trace == NULL else step_traced(trace_of(g), g, c)


# Of the call that was recorded last.
cdef inline void end_call(Group *g, int outcome) noexcept nogil:
    record_outcome(g, outcome)
    if g.trace != NULL:
        end_traced(trace_of(g), g)
