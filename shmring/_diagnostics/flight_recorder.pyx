# Read what a segment records about its ranks, for errors and for tools outside the communicator: calls, waits,
# presence, the abort report, stacks. Everything read is checked before it is used.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from .._core.group cimport (
    ALL_GATHER, ALL_GATHER_V, ALL_TO_ALL, ELECTION, GATHER, INVALID, MOST_PRIORITY, NALGORITHMS, NKINDS, NPATHS,
    OPAQUE, mixed_count,
)
from .._core.kernels cimport SR_DTYPES, SR_OPS
from .._core.segment cimport (
    SR_ABORTED, SR_CLOSED, SR_ITEM_NAME_NBYTES, SR_JOINED, SR_MAGIC, SR_MAX_RANKS, SR_MISMATCHED, SR_NO_ABORT,
    SR_OP_NBYTES, SR_PAGE, SR_RANK_FAILED, SR_REASON_NBYTES, SR_RECORDS, SR_REMOTE_ABORT, SR_TIMED_OUT, sr_abort_cause,
    sr_abort_culprit, sr_abort_reporter, sr_flag, sr_flag_load, sr_flag_load_after_reads, sr_flag_reached,
    sr_flag_replace, sr_header, sr_lane, sr_layout_control_nbytes, sr_layout_lane, sr_layout_segment_nbytes,
    sr_liveness_died, sr_liveness_state, sr_now_ns, sr_record, sr_report, sr_stack_request, sr_wait,
)
from .._core.trace cimport NTRACED, TRACED_CALL, TRACED_SEND, Trace, TraceSlice

from .._core import kernels
from .._core.kernels import OPS, dtypes

cdef extern from "sync/stack_request.h" nogil:
    bint sr_stack_request_ask(const sr_stack_request *)


# ---- names, by the numbers in records ----------------------------------------------------------------------------

DTYPES = tuple(dtypes())
OPAQUE_DTYPE = "bytes"   # dtype of calls that only move items, if no more is known
DTYPE_NBYTES = tuple(dtypes().values())
cdef const char *KIND_NAMES[NKINDS]
KIND_NAMES[:] = [
    b"all_reduce", b"reduce", b"reduce_scatter", b"scan", b"exscan",
    b"broadcast", b"scatter", b"gather", b"all_gather", b"all_to_all", b"barrier", b"empty", b"ping", b"agree",
    b"split", b"group", b"shared", b"all_gather_v", b"gather_v", b"scatter_v", b"all_to_all_v", b"all_reduce_many",
    b"election", b"grow",
]
KINDS = tuple([(<bytes> KIND_NAMES[number]).decode() for number in range(<int> NKINDS)])
RECORD_DTYPES = (*DTYPES, OPAQUE_DTYPE)
ALGORITHMS = ("auto", "ring", "tree", "master", "direct", "bidirectional_ring", "halving_doubling", "double_tree")
assert len(ALGORITHMS) == NALGORITHMS
PATHS = ("tiny", "small", "near", "far", "zero_copy", "ring", "tree", "master", "single_copy", "chain",
         "across", "bidirectional_ring", "halving_doubling", "double_tree")
assert len(PATHS) == NPATHS
WIRES = tuple(kernels.wire_formats())
CAUSES = {SR_RANK_FAILED: "failed", SR_TIMED_OUT: "timed out", SR_MISMATCHED: "mismatch", SR_ABORTED: "aborted",
          SR_REMOTE_ABORT: "remote"}
OUTCOMES = ("under way", "complete", "raised")
WAITS = ("call", "send", "recv", "probe", "lock")
assert len(WAITS) == SR_WAIT_KINDS
TRACED = ("call", "wait", "stage", "reduce", "copy", "stage and copy", "wire", "send", "recv", "probe")
assert len(TRACED) == NTRACED


# ---- calls, as dicts ------------------------------------------------------------------------------------------------

def call_of_fingerprint(uint64_t fingerprint, uint64_t count):
    """Return the call that fingerprint and count describe, as `record_of`; None if the kind is unknown."""
    cdef uint64_t kind = fingerprint & 63
    cdef uint64_t narrowed
    if kind == INVALID:
        return {"kind": "something", "invalid": True}
    if kind >= NKINDS:
        return None
    words = words_of(kind, fingerprint >> 6 & 63, fingerprint >> 12 & 15, fingerprint >> 16 & 7, fingerprint >> 19 & 1,
                     fingerprint >> 20 & 0xfff, count)
    if kind < ALL_GATHER_V:   # a fingerprint of the other kinds has no room for these
        narrowed = (fingerprint >> 32 ^ mixed_count(count)) & 0xffffffff
        # A signature stands in place of wire and group size.
        if words["dtype"] == OPAQUE_DTYPE or kind == ALL_GATHER or kind == GATHER or kind == ALL_TO_ALL:
            words["priority"] = priority_of(narrowed & 0x1fff)
        elif narrowed >> 29 < <uint64_t> len(WIRES):
            words |= {"wire": WIRES[narrowed >> 29], "group_size": narrowed >> 13 & 0xffff,
                      "priority": priority_of(narrowed & 0x1fff)}
    return words


cdef dict words_of(int kind, int dtype, int op, int algorithm, bint order, uint32_t root, uint64_t count):
    return {"kind": KINDS[kind], "count": count, "root": root,
            "dtype": RECORD_DTYPES[dtype % (SR_DTYPES + 1)], "op": OPS[op % SR_OPS],
            "algorithm": ALGORITHMS[algorithm % NALGORITHMS], "order": "F" if order else "C", "invalid": False,
            "wire": WIRES[0], "group_size": 0, "priority": None}


cdef object priority_of(int code):
    return code - MOST_PRIORITY - 1 if code else None


cdef dict words_of_record(const sr_record *record):
    words = words_of(kind_of(record), record.dtype, record.op, record.algorithm, record.order, record.root,
                     record.count)
    if record.named == ELECTION and record.priority:
        words["before"] = KINDS[record.kind % NKINDS]
    if record.dtype == OPAQUE and record.item_nbytes > 0:
        words |= {"dtype": text_in(record.item_name, SR_ITEM_NAME_NBYTES), "count": record.count // record.item_nbytes}
    return words | {"seq": record.seq, "number": record.number, "invalid": bool(record.invalid),
                    "wire": WIRES[record.wire % len(WIRES)], "group_size": record.hosts_in_group,
                    "priority": priority_of(record.priority), "outcome": OUTCOMES[record.outcome % len(OUTCOMES)]}


cdef inline int kind_of(const sr_record *record) noexcept nogil:
    return record.named if record.named else record.kind


# Return the name of the recorded call, NULL if the record is invalid. For code that must not run Python.
cdef const char *name_in_record(const sr_record *record) noexcept nogil:
    cdef int kind = kind_of(record)
    if kind == ELECTION and record.priority:
        kind = record.kind   # the call that the ranks were about to choose
    return KIND_NAMES[kind] if 0 <= kind < NKINDS else NULL


cdef const char *name_in_fingerprint(uint64_t fingerprint) noexcept nogil:
    cdef uint64_t kind = fingerprint & 63
    if kind == INVALID:
        return b"something"
    return KIND_NAMES[kind] if kind < NKINDS else NULL


# True if the record is that of call `seq`: a record may be older, newer, or damaged.
cdef inline bint is_of(const sr_record *record, uint64_t seq) noexcept:
    return kind_of(record) < NKINDS and record.seq == seq


cdef str text_in(const char *text, size_t nbytes):
    return (<bytes> text[:nbytes]).split(b"\0")[0].decode(errors="replace")


# ---- a rank ------------------------------------------------------------------------------------------------------

@cython.final
cdef class Sight:
    """Snapshot of what a rank did at one moment; decoded on request."""

    cdef readonly str presence     # as Flight.presence_of
    cdef readonly list waits       # as Flight.waits_of
    cdef readonly uint64_t at_ns   # time of the snapshot, by the clock of the waits
    cdef sr_record last
    cdef bint has_called

    @property
    def record(self):
        """The last call that the rank had begun, as Flight.record_of; None if none."""
        return words_of_record(&self.last) if self.has_called else None


# ---- a segment ---------------------------------------------------------------------------------------------------

def control_nbytes_of(bytes head not None, uint64_t nbytes):
    """Return the bytes of header and lanes of a segment of `nbytes` that begins with `head`, one page.

    0: it is not a communicator's. ValueError: it is damaged, or belongs to another version.
    """
    cdef const sr_header *header = <const sr_header *> <const char *> head
    cdef uint64_t most = <uint64_t> 1 << 48
    if len(head) < SR_PAGE:
        raise ValueError("less than a page of it can be read")
    if header.magic != SR_MAGIC:
        if <uint32_t> (header.magic >> 8) == <uint32_t> (SR_MAGIC >> 8):
            raise ValueError("it belongs to another version of shmring")
        return 0
    if not 1 <= header.nranks <= SR_MAX_RANKS:
        raise ValueError(f"its header says {header.nranks} ranks")
    if not 0 < header.staging_nbytes < most or not 0 < header.message_ring_nbytes < most >> 24:
        raise ValueError(f"its header says staging buffers of {header.staging_nbytes} bytes, and message rings of "
                         f"{header.message_ring_nbytes} bytes")
    if sr_layout_segment_nbytes(header.nranks, header.staging_nbytes, header.message_ring_nbytes) > nbytes:
        raise ValueError(f"its header says more than the {nbytes} bytes that there are")
    return sr_layout_control_nbytes(header.nranks)


cdef class Flight:
    """Reader of the header and lanes of a segment in `memory` (`.address`, `.nbytes`), which it keeps alive.

    `memory` may be a copy of them, except for `ask`. A reader without write access must not call `take_warning_turn`.
    Ranks are local ranks.
    """

    def __cinit__(self, memory):
        cdef uintptr_t address = memory.address
        self.memory = memory
        self.header = <sr_header *> address
        if memory.nbytes < SR_PAGE or self.header.magic != SR_MAGIC:
            raise ValueError("this is not a segment of this version of shmring")
        self.nranks = self.header.nranks
        if not 1 <= self.nranks <= <int> SR_MAX_RANKS or memory.nbytes < sr_layout_control_nbytes(self.nranks):
            raise ValueError(f"this is not a segment of {self.nranks} ranks")

    cdef sr_lane *lane(self, int rank) except NULL:
        if not 0 <= rank < self.nranks:
            raise IndexError(f"there is no local rank {rank} among {self.nranks}")
        return sr_layout_lane(self.header, rank)

    # -- processes --

    def liveness_of(self, int rank):
        """Return (pid, start time) of a rank, as the rank wrote them when it joined."""
        cdef sr_lane *lane = self.lane(rank)
        return lane.liveness.pid, lane.liveness.start_time

    def presence_of(self, int rank):
        """Return "absent", "here", "closed", or "dead". "dead": it ended without closing."""
        cdef sr_lane *lane = self.lane(rank)
        cdef int state = sr_liveness_state(&lane.liveness)
        if sr_liveness_died(&lane.liveness):
            return "dead"
        return "here" if state == SR_JOINED else "closed" if state == SR_CLOSED else "absent"

    def world_rank_and_size(self, int rank):
        """Return (rank, size) of a local rank among the ranks of all hosts."""
        cdef sr_lane *lane = self.lane(rank)
        if lane.stack_request.rank >= lane.stack_request.size or lane.stack_request.size > SR_MAX_RANKS:   # damaged
            return rank, self.nranks
        return lane.stack_request.rank, lane.stack_request.size

    @property
    def nonce(self):
        """A number that is unique to this communicator's segment."""
        return self.lane(0).liveness.nonce

    # -- calls --

    def record_of(self, int rank, seq):
        """Return the call number `seq` of a rank as a dict; None if it has not made it or the record is overwritten."""
        cdef sr_record record = self.lane(rank).record[<uint64_t> seq & (SR_RECORDS - 1)]
        return words_of_record(&record) if is_of(&record, seq) else None

    def records_of(self, int rank):
        """Return the recorded calls of a rank, the oldest first: at most 64, with steps of calls over several hosts."""
        cdef sr_lane *lane = self.lane(rank)
        cdef sr_record record
        cdef uint64_t last = self.last_recorded(lane)
        cdef uint64_t seq
        cdef int back
        found = []
        for back in range(SR_RECORDS - 1, -1, -1):
            seq = last - back
            record = lane.record[seq & (SR_RECORDS - 1)]
            if is_of(&record, seq):
                found.append(words_of_record(&record))
        return found

    cdef uint64_t last_recorded(self, sr_lane *lane) noexcept:
        cdef uint64_t last = self.header.first_seq
        cdef int i
        for i in range(SR_RECORDS):
            if kind_of(&lane.record[i]) < NKINDS and <int64_t> (lane.record[i].seq - last) > 0:
                last = lane.record[i].seq
        return last

    def last_of(self, int rank):
        """Return the last call that a rank has begun, as `record_of` does; None if none."""
        return self.record_of(rank, self.last_recorded(self.lane(rank)))

    def sight_of(self, int rank):
        """Return a snapshot of what a rank does now."""
        cdef Sight sight = Sight.__new__(Sight)
        cdef sr_lane *lane = self.lane(rank)
        cdef uint64_t seq = self.last_recorded(lane)
        sight.presence, sight.waits, sight.at_ns = self.presence_of(rank), self.waits_of(rank), sr_now_ns()
        sight.last = lane.record[seq & (SR_RECORDS - 1)]
        sight.has_called = is_of(&sight.last, seq)
        return sight

    # -- waits --

    def waits_of(self, int rank):
        """Return the long waits of a rank: dicts of `where` (in WAITS), `awaited`, `since_ns`, `until_ns`, `seq`,
        `is_over`.

        awaited: a rank, size + rank for a rank of another host, None for any rank. until_ns: the time when the rank
        gave up, else 0. is_over: the awaited rank has done its part, but the waiting rank has not gone on yet.
        """
        cdef sr_lane *lane = self.lane(rank)
        cdef uint64_t since, until, seq, what
        cdef uint32_t kind
        cdef int32_t awaited
        cdef int index
        found = []
        for index in range(SR_WAITS):
            since = sr_flag_load(&lane.wait[index].since_ns)
            until, seq = sr_flag_load(&lane.wait[index].until_ns), sr_flag_load(&lane.wait[index].seq)
            what = sr_flag_load(&lane.wait[index].what)
            kind, awaited = <uint32_t> (what >> 32), <int32_t> <uint32_t> what
            is_over = self.is_over(&lane.wait[index])
            if since == 0 or since != sr_flag_load(&lane.wait[index].since_ns) or kind >= SR_WAIT_KINDS:
                continue
            if awaited < ANYBODY or awaited >= self.nranks + <int> SR_MAX_RANKS:
                continue
            found.append({"where": WAITS[kind], "awaited": None if awaited == ANYBODY else awaited, "since_ns": since,
                          "until_ns": until, "seq": seq, "is_over": is_over})
        return found

    cdef bint is_over(self, const sr_wait *wait) noexcept:
        cdef uint64_t offset = sr_flag_load(&wait.flag)
        if offset == 0 or offset % sizeof(sr_flag) or offset >= sr_layout_control_nbytes(self.nranks):
            return False
        return sr_flag_reached(<const sr_flag *> (<const char *> self.header + offset), sr_flag_load(&wait.target))

    # -- the end --

    def abort_report(self):
        """Return the report of the rank that aborted first; None if no rank has.

        (cause, culprit, its sequence number, reason, number of the user's call, its name or None)
        """
        cdef uint64_t word = sr_flag_load(&self.header.abort)
        cdef int reporter = sr_abort_reporter(word)
        cdef sr_report *report
        if word == SR_NO_ABORT:
            return None
        cause = CAUSES.get(sr_abort_cause(word))
        if reporter >= self.nranks or sr_abort_culprit(word) >= self.nranks + <int> SR_MAX_RANKS or cause is None:
            raise ValueError("the abort word of this communicator is damaged")
        report = &self.lane(reporter).report
        return (cause, sr_abort_culprit(word), report.seq, text_in(report.reason, SR_REASON_NBYTES), report.number,
                text_in(report.op, SR_OP_NBYTES) or None)

    def take_warning_turn(self, uint64_t now_ns, uint64_t until_ns):
        """Return whether this rank is to log the warning. If so, no other rank warns before `until_ns`."""
        cdef uint64_t quiet_until = sr_flag_load(&self.header.quiet_until_ns)
        return (<int64_t> (now_ns - quiet_until) >= 0
                and sr_flag_replace(&self.header.quiet_until_ns, quiet_until, until_ns))

    # -- stacks --

    def stacks_version(self, int rank):
        """Return how often a rank has begun or finished writing its stacks: odd while it writes."""
        return sr_flag_load(&self.lane(rank).stack_request.version)

    def ask(self, int rank):
        """Ask a rank for its stacks; `stacks_version` shows when it has answered. False if the kernel cannot."""
        return sr_stack_request_ask(&self.lane(rank).stack_request)

    def stacks_of(self, int rank):
        """Return the Python stacks that a rank wrote last; None while it writes."""
        cdef sr_lane *lane = self.lane(rank)
        cdef uint64_t version = sr_flag_load(&lane.stack_request.version)
        text = text_in(lane.stacks, SR_STACKS_NBYTES)
        if version & 1 or sr_flag_load_after_reads(&lane.stack_request.version) != version:
            return None
        return text


# ---- a trace -------------------------------------------------------------------------------------------------------

cdef TraceSlice *room_for(uint64_t capacity) except NULL:
    cdef TraceSlice *room = <TraceSlice *> calloc(capacity, sizeof(TraceSlice))   # pages are allocated when first used
    if room == NULL:
        raise MemoryError()
    return room


@cython.final
cdef class TraceBuffer:
    """Room for the last `capacity` time slices of an engine's calls, and for as many of its messages.

    capacity: a power of two. Messages have slices of their own, since another thread may send and receive.
    """

    def __cinit__(self, uint64_t capacity):
        if capacity == 0 or capacity & (capacity - 1):
            raise ValueError(f"the capacity is {capacity}; it must be a power of two")
        memset(&self.calls, 0, sizeof(Trace))
        memset(&self.messages, 0, sizeof(Trace))
        self.calls.mask = self.messages.mask = capacity - 1
        self.calls.slices = room_for(capacity)
        self.messages.slices = room_for(capacity)

    def __dealloc__(self):
        free(self.calls.slices)
        free(self.messages.slices)

    def slices(self):
        """Return (slices of calls, slices of messages, number of lost slices of calls, of messages).

        A slice is a dict: `what` (in TRACED), `begin_ns`, `end_ns` (CLOCK_MONOTONIC). Slices are in the order of their
        ends. A call and its parts have its `number`. A call has `call`, as `Flight.record_of`, and `path`. A wait has
        `awaited`, a rank as in the engine's world_rank. A message has `rank`, the other rank. A slice that moves data
        has `nbytes`.
        """
        if self.is_in_use:
            raise RuntimeError("it is still being recorded")
        return slices_of(&self.calls), slices_of(&self.messages), nlost(&self.calls), nlost(&self.messages)


cdef object nlost(const Trace *t):
    return max(0, <object> t.nslices - <object> t.mask - 1)


cdef list slices_of(const Trace *t):
    cdef uint64_t number
    slices = []
    for number in range(<uint64_t> nlost(t), t.nslices):
        slices.append(words_of_slice(&t.slices[number & t.mask]))
    return slices


cdef dict words_of_slice(const TraceSlice *s):
    words = {"what": TRACED[s.traced], "begin_ns": s.begin_ns, "end_ns": s.end_ns}
    if s.traced >= TRACED_SEND:
        return words | {"rank": s.awaited, "nbytes": s.nbytes, "outcome": OUTCOMES[s.call.outcome % len(OUTCOMES)]}
    words["number"] = s.call.number
    if s.traced == TRACED_CALL:
        return words | {"call": words_of_record(&s.call), "path": PATHS[s.path]}
    if s.is_wait:
        words["awaited"] = s.awaited
    if s.nbytes:
        words["nbytes"] = s.nbytes
    return words
