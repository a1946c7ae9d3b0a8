# The trace of a rank: slices of time, recorded around each step of its calls. Algorithms know nothing of the trace: the
# cursors that a step has advanced show what it did, and the time for which the call was blocked before is a wait. Each
# step reads the clock twice.

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memset

from .group cimport AUTO, BLOCKED, DIRECT, DONE, ELECTION, MASTER, Call, Group, is_folded, takes
from .segment cimport sr_now_ns, sr_record


cdef enum Traced:
    TRACED_CALL, TRACED_WAIT, TRACED_STAGE, TRACED_REDUCE, TRACED_COPY, TRACED_EXCHANGE, TRACED_WIRE
    TRACED_SEND, TRACED_RECV, TRACED_PROBE, NTRACED


cdef struct TraceSlice:
    uint64_t begin_ns, end_ns
    uint64_t nbytes          # by which the call has advanced; of a message: its length
    sr_record call           # of the call, or of the call to which this slice belongs
    int awaited              # of a wait: Call.awaited.rank at its end; of a message: the other rank, among all hosts
    uint8_t traced, path
    bint is_wait


# The last `mask + 1` of the `nslices` slices since the trace began.
cdef struct Trace:
    TraceSlice *slices
    uint64_t mask, nslices
    uint64_t call_begin_ns   # of the current call; 0: it began before the trace
    uint64_t stepped_ns      # end of the call's last step
    uint64_t blocked_ns      # since then the call is blocked; 0: it is not blocked
    uint64_t over_wire       # g.stats.bytes_over_wire at blocked_ns
    int awaited              # Call.awaited.rank of the current wait


cdef inline TraceSlice *next_slice(Trace *t, int traced, uint64_t begin_ns, uint64_t end_ns) noexcept nogil:
    cdef TraceSlice *s = &t.slices[t.nslices & t.mask]
    memset(s, 0, sizeof(TraceSlice))
    s.traced, s.begin_ns, s.end_ns = traced, begin_ns, end_ns
    t.nslices += 1
    return s


# End the slice of a wait. Bytes to and from other hosts move while a rank waits, so such a wait is a slice of the wire.
# The step of a call over several hosts does not end a wait that one of its local steps has begun.
cdef inline void end_wait_traced(Trace *t, Group *g, uint64_t end_ns) noexcept nogil:
    cdef bint over_wire = t.awaited >= g.size or g.stats.bytes_over_wire != t.over_wire
    cdef TraceSlice *s
    if t.blocked_ns != 0 and t.blocked_ns <= end_ns:
        s = next_slice(t, TRACED_WIRE if over_wire else TRACED_WAIT, t.blocked_ns, end_ns)
        s.nbytes = g.stats.bytes_over_wire - t.over_wire
        s.awaited, s.is_wait = t.awaited, True
        s.call.number = g.recorded.number
        t.blocked_ns = 0


cdef inline void begin_traced(Trace *t) noexcept nogil:
    t.call_begin_ns = t.stepped_ns = sr_now_ns()
    t.blocked_ns = 0


# Return the kind of work that a step has done, or NTRACED if it has advanced nothing. Data that are taken directly from
# other ranks' slots are folded or copied at once; the last rank to enter the call does that in the step in which it
# stages its own data.
cdef inline int work_of(Group *g, Call *c, const Call *before, int status) noexcept nogil:
    cdef bint stages = c.stage.offset != before.stage.offset
    cdef bint has_more = c.copy.offset != before.copy.offset or c.down.offset != before.down.offset
    cdef bint takes_some = has_more and takes(c, g.rank)
    cdef bint has_begun = (c.stage.offset | c.fold.offset | c.copy.offset) != 0
    cdef bint at_once = status == DONE and c.nbytes > 0 and not has_begun   # tiny: the whole call in one step
    cdef bint folds = is_folded(c) and c.fold.offset == 0 and (takes_some or at_once)
    if folds or c.fold.offset != before.fold.offset:
        return TRACED_REDUCE
    if stages and takes_some:
        return TRACED_EXCHANGE
    if stages:
        return TRACED_STAGE
    return TRACED_COPY if takes_some or at_once else NTRACED


# The bytes that a step has staged, folded or copied: the largest of the three. 0 for algorithms whose cursors count
# something else, such as chunks.
cdef inline uint64_t moved_nbytes(Group *g, Call *c, const Call *before) noexcept nogil:
    cdef int64_t most = max(<int64_t> (c.stage.offset - before.stage.offset), 0)
    if c.algorithm != AUTO and c.algorithm != DIRECT and c.algorithm != MASTER:
        return 0
    most = max(most, <int64_t> (c.fold.offset - before.fold.offset))
    if takes(c, g.rank):   # a rank that takes nothing passes over all chunks at once
        most = max(most, <int64_t> (c.copy.offset - before.copy.offset))
    return most


cdef inline int step_traced(Trace *t, Group *g, Call *c) noexcept nogil:
    # A call over several hosts: its local steps are traced.
    cdef bint is_outer = g.inter != NULL and (c.recorded_as == NULL or c.named == ELECTION)
    cdef uint64_t nslices_before = t.nslices
    cdef uint64_t over_wire = g.stats.bytes_over_wire
    cdef Call before
    cdef uint64_t begin_ns = sr_now_ns()
    cdef uint64_t end_ns
    cdef int status, traced
    cdef TraceSlice *s
    before.stage, before.fold, before.down, before.copy = c.stage, c.fold, c.down, c.copy
    status = c.step(g, c)
    end_ns = t.stepped_ns = sr_now_ns()
    if is_outer:
        traced = TRACED_WIRE if g.stats.bytes_over_wire != over_wire and t.nslices == nslices_before else NTRACED
    else:
        traced = work_of(g, c, &before, status)
    if status == BLOCKED and traced == NTRACED and t.blocked_ns != 0:
        t.awaited = c.awaited.rank
        return status
    end_wait_traced(t, g, begin_ns)
    if traced != NTRACED:
        s = next_slice(t, traced, begin_ns, end_ns)
        s.nbytes = g.stats.bytes_over_wire - over_wire if is_outer else moved_nbytes(g, c, &before)
        s.call.number = g.recorded.number
    if status == BLOCKED and t.blocked_ns == 0:
        t.blocked_ns, t.awaited, t.over_wire = end_ns, c.awaited.rank, g.stats.bytes_over_wire
    return status


cdef inline void end_traced(Trace *t, Group *g) noexcept nogil:
    cdef uint64_t now = t.stepped_ns if t.blocked_ns == 0 else sr_now_ns()   # a blocked call has been given up
    cdef TraceSlice *s
    end_wait_traced(t, g, now)
    if t.call_begin_ns != 0:
        s = next_slice(t, TRACED_CALL, t.call_begin_ns, now)
        s.call = g.recorded[0]
        s.path = g.stats.last_path
        t.call_begin_ns = 0


# Record a message for which this rank has waited since begin_ns. Return the time.
cdef inline uint64_t note_message(Trace *t, int traced, uint64_t begin_ns, int rank, uint64_t nbytes,
                                  int outcome) noexcept nogil:
    cdef uint64_t now = sr_now_ns()
    cdef TraceSlice *s = next_slice(t, traced, begin_ns, now)
    s.awaited, s.nbytes, s.call.outcome = rank, nbytes, outcome
    return now


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
