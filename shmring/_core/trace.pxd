# The trace of a rank: slices of time, recorded by the code that steps its calls. Algorithms know nothing of the trace:
# the progress of the call shows what a step has done.

from libc.stdint cimport uint8_t, uint64_t

from .group cimport Call, Group
from .segment cimport sr_record


cdef enum Traced:
    TRACED_CALL, TRACED_WAIT, TRACED_STAGE, TRACED_REDUCE, TRACED_COPY, TRACED_EXCHANGE, TRACED_WIRE
    TRACED_SEND, TRACED_RECV, TRACED_PROBE, NTRACED


cdef struct Slice:
    uint64_t begin_ns, end_ns
    uint64_t nbytes          # by which the call has advanced; of a message: its length
    sr_record call           # of the call, or of the call to which this slice belongs
    int awaited              # of a wait: Call.awaited.rank at its end; of a message: the other rank, among all hosts
    uint8_t traced, path
    bint is_wait


# The last `mask + 1` of the `nslices` slices since the trace began.
cdef struct Trace:
    Slice *slice
    uint64_t mask, nslices
    uint64_t call_begin_ns   # of the current call; 0: it began before the trace
    uint64_t stepped_ns      # end of the call's last step
    uint64_t blocked_ns      # since then the call is blocked; 0: it is not blocked
    uint64_t over_wire       # g.stats.bytes_over_wire at blocked_ns
    int awaited              # Call.awaited.rank of the current wait


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


# End the call that was recorded last.
cdef inline void end_call(Group *g, int outcome) noexcept nogil:
    g.recorded.outcome = outcome
    if g.trace != NULL:
        end_traced(trace_of(g), g)
