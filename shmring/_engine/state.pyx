# The format of a segment, and the state of one communicator on one rank in it: its memory, the thread by which other
# ranks see that it is alive, the last known calls of other hosts, and its warnings. The calls are in engine.

import _thread
import time

from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strncpy
from posix.unistd cimport getpid

from .._algorithms.choice cimport choose_local_algorithm
from .._core.group cimport (
    INVALID, PROGRESSED, REMOTE_MISMATCH, TRIAL_KINDS, Call, Group, check_liveness, first_position, is_before,
    peer_status, set_far,
)
from .._core.kernels cimport find_kernels
from .._core.path_trials cimport FIRST_CLASS_NBYTES, SIZE_CLASSES
from .._core.placement cimport window_nbytes_of
from .._core.segment cimport (
    SR_CACHE_LINE, SR_FAULT_KERNELS, SR_FINISHED, SR_KEY_NBYTES, SR_LINES, SR_MAGIC, SR_MAX_RANKS, SR_NO_ABORT,
    SR_OP_NBYTES, SR_PROGRESSES, SR_REASON_NBYTES, SR_RECORDS, SR_VIEW_NBYTES, SR_VIEW_WORDS, sr_flag_load, sr_flag_set,
    sr_header, sr_lane, sr_layout_control_nbytes, sr_layout_lane, sr_layout_lap_nbytes, sr_layout_segment_nbytes,
    sr_layout_staging_offset, sr_liveness, sr_liveness_find_thread, sr_liveness_is_held, sr_liveness_is_unwatched,
    sr_now_ns, sr_record, sr_report, sr_seqlock_read, sr_seqlock_write, sr_stack_request, sr_tuning,
)
from .._core.staging cimport slot_nbytes
from .._diagnostics.flight_recorder cimport SR_STACKS_NBYTES, Flight, name_in_fingerprint, name_in_record
from .._internode.context cimport (
    InterNode, call_number, examine_confirmations, inter_of, number_in, rank_at, rank_at_end_of, remote, sr_conn,
    sr_conn_length,
)

from .._core import kernels
from .._diagnostics import stacks, stall_warning
from .._diagnostics.flight_recorder import KINDS, PATHS, call_of_fingerprint
from .._system import limits
from ..errors import Error

cdef extern from "sync/liveness.h" nogil:
    cdef struct sr_hold:
        pass
    void sr_liveness_hold(sr_liveness *, sr_hold *)
    void sr_liveness_let_go(sr_liveness *)

cdef extern from "sync/stack_request.h" nogil:
    bint sr_stack_request_await(sr_stack_request *, sr_leave *leave)
    void sr_stack_request_leave(sr_stack_request *, sr_leave *leave)
    void sr_stack_request_begin(sr_stack_request *)
    void sr_stack_request_end(sr_stack_request *)

cdef extern from "<sys/prctl.h>" nogil:
    enum: PR_SET_NAME
    int prctl(int option, const char *name)

cdef const char *THREAD_NAME = "shmring-life"
cdef uint64_t LONGEST_START_NS = 60_000_000_000
# A wait compares the calls of other hosts with its own after this time, or after half of the timeout.
cdef uint64_t ASK_NS = 1_000_000_000
cdef uint64_t SAME_CALL_NS = 1_000_000_000   # limit of await_same_call


TAKEN = "another thread is inside a call of this communicator; give each thread its own"
MEANWHILE = "was called while another thread is inside a call of this communicator; wait for that call first"
KEY_NBYTES = SR_KEY_NBYTES


# ---- the segment, for rank 0 -----------------------------------------------------------------------------------

def control_nbytes(int nranks):
    """Return the bytes of the header and the lanes, which are allocated when the communicator starts."""
    return sr_layout_control_nbytes(nranks)


def segment_nbytes(int nranks, size_t staging_nbytes, size_t message_ring_nbytes):
    """Return the bytes of a whole segment, the staging buffers and the message rings included."""
    return sr_layout_segment_nbytes(nranks, staging_nbytes, message_ring_nbytes)


def format_segment(uintptr_t address, int nranks, size_t staging_nbytes, size_t message_ring_nbytes, *, tuning,
                   int forced_path=0, uint64_t first_seq=0, bytes key=bytes(SR_KEY_NBYTES)):
    """Write the first values of the header and the lanes into zeroed memory, before another process maps it.

    staging_nbytes: the length of a staging buffer; message_ring_nbytes: of a message ring. tuning: the tables for near
    and for far cores; the header keeps the values that the engine reads. key: secret.
    """
    cdef sr_header *header = <sr_header *> address
    cdef sr_lane *lane
    cdef int rank, which, i
    if len(key) != SR_KEY_NBYTES:
        raise ValueError(f"the key of a segment has {SR_KEY_NBYTES} bytes")
    header.nranks = nranks
    header.staging_nbytes = staging_nbytes
    header.forced_path = forced_path
    for i in range(2):
        header.tuning[i] = tuning[i]
    header.first_seq = first_seq
    memcpy(header.key, <const char *> key, SR_KEY_NBYTES)
    header.message_ring_nbytes = message_ring_nbytes
    for rank in range(nranks):
        lane = sr_layout_lane(header, rank)
        for which in range(SR_PROGRESSES):
            sr_flag_set(&lane.progress[which].value, first_position(header))
        sr_flag_set(&lane.progress[SR_FINISHED].value, first_seq)
        for i in range(SR_LINES):
            # One call less, so that no line announces the first call before its rank does.
            sr_flag_set(&lane.line[i].seq, first_seq - 1)
        for i in range(SR_RECORDS):
            lane.record[i].kind = INVALID
    header.magic = SR_MAGIC


def header_of(uintptr_t address):
    """Return what rank 0 wrote into the header of a segment."""
    cdef sr_header *header = <sr_header *> address
    if header.magic != SR_MAGIC:
        raise ValueError("this is not a segment of this version of shmring")
    return {"nranks": header.nranks, "staging_nbytes": header.staging_nbytes,
            "tuning": [header.tuning[0], header.tuning[1]]}


# ---- the state -------------------------------------------------------------------------------------------------

# True if two slots of the largest chunk fit into a staging buffer, so that one is filled while the other is read, and
# also the window of slots that some reductions use.
cdef bint fits_staging(const sr_tuning *tuning, size_t staging_nbytes) noexcept:
    cdef uint64_t largest = max(tuning.one_chunk_nbytes, tuning.chunk_nbytes, tuning.exchange_nbytes)
    if tuning.chunk_nbytes == 0 or not 0 < tuning.cached_chunk_nbytes < staging_nbytes or largest >= staging_nbytes:
        return False
    return max(2 * slot_nbytes(largest + SR_CACHE_LINE), window_nbytes_of(tuning)) <= staging_nbytes


# True if the last call begun is over several hosts and was not refused.
cdef inline bint is_across(const Group *g) noexcept nogil:
    return g.inter != NULL and inter_of(g).fingerprint != 0


# Return this rank's record of call `seq`; over several hosts that of the last call begun, which may have no local step
# yet. NULL if it is overwritten.
cdef const sr_record *own_record(Group *g, uint64_t seq) noexcept nogil:
    cdef const sr_record *record
    if is_across(g) and is_before(seq, inter_of(g).first_local):
        seq = inter_of(g).first_local
    record = &g.me.record[seq & (SR_RECORDS - 1)]
    if record.seq != seq or (is_across(g) and record.number != number_in(g, seq)):
        return NULL
    return record


# Fill a report except its reason. This runs no Python code.
cdef void begin_report(Group *g, sr_report *report, bint in_call, uint64_t seq) noexcept nogil:
    cdef const sr_record *record = own_record(g, seq)
    cdef const char *name = NULL
    memset(report, 0, sizeof(sr_report))
    if not in_call:
        report.seq = g.first_user_seq - 1
        return
    report.seq = seq
    report.number = number_in(g, seq)
    if report.number <= 0:
        return
    if record != NULL:
        name = name_in_record(record)
    elif is_across(g):
        name = name_in_fingerprint(inter_of(g).fingerprint)
    if name != NULL:
        strncpy(report.op, name, SR_OP_NBYTES - 1)


# See State.world_rank.
cdef int world_number(Group *g, int rank) noexcept nogil:
    if g.inter == NULL:
        return rank
    return rank - g.size if rank >= g.size else rank_at(inter_of(g), inter_of(g).host, rank)


cdef class State:
    """The state of one communicator on one rank, in a segment that `format_segment` has formatted.

    segment: has `.address` and `.nbytes`, and is kept alive.
    """

    def __cinit__(self, segment, int rank, int size, **_):
        cdef Group *g = &self.g
        cdef uintptr_t base = segment.address
        cdef int i
        memset(g, 0, sizeof(Group))
        g.header = <sr_header *> base
        if (g.header.magic != SR_MAGIC or g.header.nranks != <uint32_t> size or size > <int> SR_MAX_RANKS
                or not 0 <= rank < size):
            raise ValueError(f"this is not a segment of {size} ranks, or not one of this version of shmring")
        if segment.nbytes < sr_layout_segment_nbytes(size, g.header.staging_nbytes, g.header.message_ring_nbytes):
            raise ValueError(f"the segment of {size} ranks is only {segment.nbytes} bytes long")
        g.lane = <sr_lane **> calloc(size, sizeof(void *))
        g.staging = <unsigned char **> calloc(size, sizeof(void *))
        g.source = <const void **> calloc(size + 1, sizeof(void *))
        g.target = <void **> calloc(size + 1, sizeof(void *))
        if g.lane == NULL or g.staging == NULL or g.source == NULL or g.target == NULL:
            raise MemoryError()
        for i in range(size):
            g.lane[i] = sr_layout_lane(g.header, i)
            g.staging[i] = <unsigned char *> base + sr_layout_staging_offset(size, g.header.staging_nbytes, i)
        g.rank = rank
        g.size = size
        g.me = g.lane[rank]
        g.recorded = &g.me.record[0]

    def __init__(self, segment, int rank, int size, *, str isa, list tuning, double timeout_s):
        cdef Group *g = &self.g
        self.segment = segment
        self.flight = Flight(segment)
        self.timeout_s = timeout_s
        isa_bytes = isa.encode()
        g.kernels = SR_FAULT_KERNELS(find_kernels(isa_bytes))
        if g.kernels == NULL:
            raise ValueError(f"SHMRING_ISA={isa}: this machine has {', '.join(kernels.isas())}")
        g.choose_algorithm = choose_local_algorithm
        g.seq = g.verified = g.header.first_seq
        g.first_user_seq = g.seq + (<uint64_t> 1 << 62)   # far ahead: no call is the user's before open_for_calls
        g.position = g.credit = g.pings = first_position(g.header)
        g.tunings[0], g.tunings[1] = tuning
        g.next_far = g.header.forced_path == 2
        set_far(g, g.next_far)
        self.set_wait_policy(pauses=20, brief_pauses=0, brief_yields=0, yield_ns=200_000, sleep_ns=5_000_000,
                             poll_ns=100_000, ping_interval_ns=1_000_000_000, zero_copy_nbytes=0, oversubscribed=False)
        g.staging_nbytes = g.header.staging_nbytes
        g.lap_nbytes = sr_layout_lap_nbytes(g.staging_nbytes)
        if not fits_staging(&g.tunings[0], g.staging_nbytes) or not fits_staging(&g.tunings[1], g.staging_nbytes):
            raise ValueError("the staging buffers of this communicator are smaller than its tuning needs")
        if (g.tunings[0].small_nbytes != g.tunings[1].small_nbytes
                or g.tunings[0].small_all_reduce_nbytes != g.tunings[1].small_all_reduce_nbytes
                or g.tunings[0].fuse_nbytes != g.tunings[1].fuse_nbytes
                or g.tunings[0].chain_nbytes != g.tunings[1].chain_nbytes):
            raise ValueError("the tuning of this communicator differs near and far where it must not")

    def __dealloc__(self):
        free(self.g.lane)
        free(self.g.staging)
        free(self.g.source)
        free(self.g.target)
        free(self.g.block)

    def set_wait_policy(self, *, int pauses, int brief_pauses, int brief_yields, uint64_t yield_ns, uint64_t sleep_ns,
                        uint64_t poll_ns, uint64_t ping_interval_ns, size_t zero_copy_nbytes, bint oversubscribed):
        """Set the wait policy: number of pauses, time of yields, then longest sleep, and the interval of polls.

        brief_pauses and brief_yields: for small calls, before the GIL is released. ping_interval_ns: the least time
        between two measurements of the core distance. zero_copy_nbytes: from this size on, the second synchronisation
        of zero copy pays off. oversubscribed: there are more ranks than CPUs.
        """
        self.g.pauses = pauses
        self.g.brief_pauses = brief_pauses
        self.g.brief_yields = brief_yields
        self.g.yield_ns = yield_ns
        self.g.sleep_ns = sleep_ns
        self.g.poll_ns = poll_ns
        self.g.ping_interval_ns = ping_interval_ns
        self.g.zero_copy_nbytes = zero_copy_nbytes
        self.g.oversubscribed = oversubscribed

    # Find the shared block that contains these bytes in this rank's part. Return False if the memory is private.
    cdef bint find_block(self, const void *address, size_t nbytes, uint64_t *block, uint64_t *offset) noexcept:
        cdef Group *g = &self.g
        cdef uintptr_t begin = <uintptr_t> address
        cdef uintptr_t own
        cdef size_t stride
        cdef int low = 0, high = g.nblocks, middle
        while low < high:
            middle = (low + high) // 2
            if g.block[middle].own <= begin:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return False
        own = g.block[low - 1].own
        stride = g.block[low - 1].stride
        if begin - own > stride or nbytes > stride - (begin - own):
            return False
        block[0] = g.block[low - 1].id
        offset[0] = begin - own
        return True

    # -- compound calls --

    # True if this thread may make calls: a thread in a compound call excludes other threads.
    cdef bint may_call(self) noexcept:
        return self.call_owner == 0 or self.call_owner == <unsigned long> PyThread_get_thread_ident()

    # -- properties for tools and errors --

    @property
    def rank(self):
        return self.g.rank

    @property
    def size(self):
        return self.g.size

    @property
    def seq(self):
        return self.g.seq

    def number_of(self, uint64_t seq):
        """Return the number of the user's call with this sequence number, from 1; the engine's own are 0 or less.

        Over several hosts, where a call has several local steps, return the number of the last call begun on this rank.
        """
        return number_in(&self.g, seq)

    def world_rank(self, int rank):
        """Return a rank's number over all hosts. rank: a local rank, or size + r for rank r of another host."""
        return world_number(&self.g, rank)

    def name_of(self, rank):
        """Return the name of a rank, as in errors. Numbers as in `world_rank`; None means any rank."""
        return "any rank" if rank is None else f"rank {self.world_rank(rank)}"

    @property
    def world_size(self):
        return self.g.size if self.g.inter == NULL else inter_of(&self.g).size

    @property
    def isa(self):
        return self.g.kernels.isa.decode()

    # Return this rank's report of an abort. seq: of the current call, or of the last one; None if no collective failed.
    # op: the name of the failed operation, if it is not that call.
    cdef sr_report report_of(self, object seq, str reason, str op):
        cdef sr_report report
        cdef bytes text = reason.encode("utf-8", "backslashreplace")[:SR_REASON_NBYTES - 1]
        cdef bytes name
        begin_report(&self.g, &report, seq is not None, 0 if seq is None else seq)
        if op is not None:
            name = op.encode()[:SR_OP_NBYTES - 1]
            memset(report.op, 0, SR_OP_NBYTES)
            memcpy(report.op, <const char *> name, len(name))
        memcpy(report.reason, <const char *> text, len(text))
        return report

    def own_call(self, uint64_t seq):
        """As Flight.record_of, for this rank; also for a call over several hosts that has no local step yet."""
        cdef const InterNode *inter = inter_of(&self.g)
        cdef const sr_record *record = own_record(&self.g, seq)
        if record != NULL:
            return self.flight.record_of(self.g.rank, record.seq)
        return call_of_fingerprint(inter.fingerprint, inter.count) if is_across(&self.g) else None

    def last_seq_of(self, int rank):
        """Return the highest sequence number that a rank has begun."""
        cdef uint64_t last = sr_flag_load(&self.g.lane[rank].line[0].seq)
        cdef uint64_t seq
        cdef int i
        for i in range(1, SR_LINES):
            seq = sr_flag_load(&self.g.lane[rank].line[i].seq)
            if <int64_t> (seq - last) > 0:
                last = seq
        return last

    def key(self):
        """Return the secret that only processes which map the segment know."""
        return <bytes> self.g.header.key[:SR_KEY_NBYTES]

    def publish_view(self, bytes view):
        """Publish this rank's view, the ranks that it goes on with. See membership."""
        cdef uint64_t[SR_VIEW_WORDS] words
        if len(view) != SR_VIEW_NBYTES:
            raise ValueError(f"a view has {SR_VIEW_NBYTES} bytes")
        memcpy(words, <const char *> view, SR_VIEW_NBYTES)
        sr_seqlock_write(&self.g.me.view, words)

    def view_of(self, int rank):
        """Return the last view of a rank; None if it has published none."""
        cdef uint64_t[SR_VIEW_WORDS] words
        if sr_seqlock_read(&self.g.lane[rank].view, words) == 0:
            return None
        return (<unsigned char *> words)[:SR_VIEW_NBYTES]

    def has_gone(self, int rank):
        """Return whether a rank has ended or left."""
        check_liveness(&self.g)
        return peer_status(&self.g.lane[rank].liveness) != PROGRESSED

    def find_unwatched_ranks(self):
        """Return (ranks that the kernel does not watch, those of them whose thread this rank cannot see).

        From now on every poll looks for the threads of the former, if this rank can see all of them.
        """
        cdef Group *g = &self.g
        cdef int rank
        unwatched, hidden = [], []
        for rank in range(g.size):
            if sr_liveness_is_unwatched(&g.lane[rank].liveness):
                unwatched.append(rank)
                if sr_liveness_find_thread(&g.lane[rank].liveness) != 0:
                    hidden.append(rank)
        g.checks_liveness = bool(unwatched) and not hidden
        return unwatched, hidden

    def message_rings(self):
        """Return (bytes of a message ring, first sequence number), as rank 0 of the host has set them."""
        return self.g.header.message_ring_nbytes, self.g.header.first_seq

    def stats(self):
        """Return counters since the communicator began. See Comm.stats."""
        cdef Group *g = &self.g
        far = "far" if g.far else "near"
        return {
            "calls": g.stats.calls, "bytes_sent": g.stats.bytes_sent,
            "bytes_over_wire": g.stats.bytes_over_wire, "steps": g.stats.steps,
            "messages_in_place": g.stats.messages_in_place,
            "paths": {name: g.stats.path[i] for i, name in enumerate(PATHS)},
            "path": PATHS[g.stats.last_path] if g.stats.calls else None,
            "chosen_paths": chosen_paths(g, False), "chosen_paths_of_shared": chosen_paths(g, True),
            "distance": far, "round_trip_ns": g.round_trip_ns, "isa": self.isa,
        }


# Return {call: {least bytes of the size class: path}}, of private or shared arrays.
cdef dict chosen_paths(const Group *g, bint shared):
    cdef int row, at
    found = {}
    in_place = "zero_copy" if shared else "single_copy"
    for row in range(TRIAL_KINDS):
        for at in range(SIZE_CLASSES):
            if g.path_trials[shared][row][at].used:
                path = in_place if g.path_trials[shared][row][at].in_place else "slots"
                found.setdefault(KINDS[row], {})[FIRST_CLASS_NBYTES << at] = path
    return found


# ---- ranks of other hosts --------------------------------------------------------------------------------------

# Wait for the call that differs, after a mismatch with a rank that is in a later call already. Its host soon confirms
# the call that it made in place of this one, or a notification gives the reason why the communicator has ended.
cdef int await_same_call(State state, Call *c) except -1:
    cdef InterNode *inter = inter_of(&state.g)
    cdef uint64_t until_ns = sr_now_ns() + SAME_CALL_NS
    while inter.theirs.seq != inter.ours.seq and sr_now_ns() < until_ns:
        if state.notifications.poll() is not None or sr_flag_load(&state.g.header.abort) != SR_NO_ABORT:
            return 0
        if examine_confirmations(&state.g, c) != REMOTE_MISMATCH:
            time.sleep(0.001)
    return 0


# Return this rank's call, the other rank's call, and the number of the latter if it differs: a rank that waits for
# nothing in a call detects the mismatch in a later one.
cdef tuple mismatched_calls(State state):
    cdef InterNode *inter = inter_of(&state.g)
    return (own_call_of(state, inter.ours.seq, inter.ours.fingerprint, inter.ours.count),
            call_of_fingerprint(inter.theirs.fingerprint, inter.theirs.count),
            None if inter.theirs.seq == inter.ours.seq else call_number(inter, inter.theirs.seq))


# Return (rank, this rank's call, its call) for a rank of another host that waits in a different call, once this call
# has waited for ASK_NS. Return None if no such rank is known.
cdef tuple find_remote_mismatch(State state, Call *c):
    cdef InterNode *inter = inter_of(&state.g)
    if inter == NULL or inter.fingerprint == 0 or sr_now_ns() - c.wait_begin_ns < min(ASK_NS, c.timeout_ns // 2):
        return None
    rank = state.notifications.compare_calls(inter.seq, inter.fingerprint, inter.count)
    if rank is None:
        return None
    ours = own_call_of(state, inter.seq, inter.fingerprint, inter.count)
    return rank, ours, call_of_fingerprint(*state.notifications.channels.call_of(rank)[1:])


# As call_of_fingerprint, for a call of this rank. If the last call is an election, its record is returned: that names
# the call that the election precedes, for which a fingerprint has no room.
cdef object own_call_of(State state, uint64_t seq, uint64_t fingerprint, uint64_t count):
    found = call_of_fingerprint(fingerprint, count)
    if seq != inter_of(&state.g).seq or found is None or found["kind"] != "election":
        return found
    return state.flight.record_of(state.g.rank, state.g.recorded.seq)


# Return (number, call) of the call that the last data or notification from a rank belongs to; None if nothing came.
cdef tuple last_call_of(State state, int rank):
    cdef InterNode *inter = inter_of(&state.g)
    cdef sr_conn *conn = inter.conn[rank]
    last = state.notifications.channels.call_of(rank)
    if conn.nreceived > 0 and (last is None or call_number(inter, last[0]) < call_number(inter, conn.arriving.seq)):
        last = conn.arriving.seq, conn.arriving.fingerprint, conn.arriving.count
    return None if last is None else (call_number(inter, last[0]), call_of_fingerprint(*last[1:]))


# Return the rank of another host to blame for a late call. The rank with the most outstanding messages may wait itself,
# and has then sent a notification of its wait. A rank without such a notification is more suspect.
cdef int most_suspect(State state, Call *c) except -1:
    cdef Group *g = &state.g
    cdef InterNode *inter = inter_of(g)
    cdef sr_conn *conn
    cdef int at, rank, culprit = c.awaited.rank
    cdef int64_t awaited, most = -1
    if culprit < g.size or inter.conn[culprit - g.size] == NULL or not is_waiting(state, culprit - g.size):
        return culprit
    for at in range(inter.nbusy):
        conn = &inter.conns[inter.busy[at]]
        rank, awaited = rank_at_end_of(inter, conn), sr_conn_length(&conn.in_)
        if awaited > most and not is_waiting(state, rank):
            culprit, most = remote(g, rank), awaited
    return culprit


# True if the last thing received from a rank is the notification that it waits.
cdef bint is_waiting(State state, int rank):
    cdef InterNode *inter = inter_of(&state.g)
    cdef sr_conn *conn = inter.conn[rank]
    last = state.notifications.channels.call_of(rank)
    if last is None or conn.nreceived == 0:
        return last is not None
    return call_number(inter, conn.arriving.seq) <= call_number(inter, last[0])


# ---- the warning about long waits ------------------------------------------------------------------------------

cdef class Stalls:
    """The long waits of one rank, and the times when their next warnings are due."""

    def warn_after(self, State state, double limit_s):
        """Log a warning about waits longer than limit_s seconds from now on; 0 disables it."""
        state.g.stall_ns = <uint64_t> (limit_s * 1e9)

    # Log the warning if it is due. A waiting rank calls this every few milliseconds.
    cdef int warn_if_due(self, object engine, int index) except -1:
        cdef State state = engine
        cdef uint64_t since = sr_flag_load(&state.g.me.wait[index].since_ns)
        cdef uint64_t now
        if since == 0 or state.g.stall_ns == 0:
            return 0
        if self.since_ns[index] != since:
            self.since_ns[index] = since
            self.next_ns[index] = since + state.g.stall_ns
        now = sr_now_ns()
        if now < self.next_ns[index]:
            return 0
        self.next_ns[index] = now + (now - since)
        # Other ranks that have waited about as long log nothing until shortly before this rank's next warning is due.
        if state.flight.take_warning_turn(now, now + (now - since) // 4 * 3):
            try:
                stall_warning.warn(engine, since)
            except Exception:   # an exception of a log handler is not an error of the call
                pass
        return 0


# ---- the liveness thread -----------------------------------------------------------------------------------------

# Other ranks see by it that this rank is alive: it holds a robust futex for its whole life. On request it wakes and
# writes the Python stacks of its process to the segment.
#
# It is not a threading.Thread: without memory for the first steps of the new thread, threading.Thread.start() waits
# forever (CPython issue 140746).

cdef class LivenessThread:
    """The liveness thread of one rank."""

    def __cinit__(self):
        self.at_end = _thread.allocate_lock()
        self.at_end.acquire()

    # Start the thread, and return once it holds the futex. owner: keeps the lane mapped while the thread runs.
    cdef int begin(self, sr_lane *lane, object owner) except -1:
        cdef uint64_t until_ns = sr_now_ns() + LONGEST_START_NS
        self.lane = lane
        self.kept = [owner]
        try:
            _thread.start_new_thread(self._park, ())
        except RuntimeError as error:
            raise limits.explain_thread(error, THREAD_NAME.decode()) from error
        except MemoryError:   # the thread may have started nevertheless: `leave` ends it, without a wait
            self.pid, self.has_ended = getpid(), True
            raise
        self.pid = getpid()
        while not sr_liveness_is_held(&lane.liveness):
            if self.has_ended:
                raise MemoryError(f"no memory for the first steps of the thread {THREAD_NAME.decode()}")
            if sr_now_ns() > until_ns:
                raise Error(f"the thread {THREAD_NAME.decode()} has not begun within {LONGEST_START_NS // 1000**3} s")
            time.sleep(0.0001)
        return 0

    def _park(self):
        try:
            self.ident = PyThread_get_thread_ident()
            prctl(PR_SET_NAME, THREAD_NAME)
            self.hold_word()
        finally:
            self.has_ended = True
            self.at_end.release()

    cdef int hold_word(self) except -1:
        cdef sr_lane *lane = self.lane
        cdef sr_hold hold   # must not move: this function returns only after sr_liveness_let_go
        cdef bint asked = True
        if not self.kept:   # a signal has interrupted the start of this thread, and the rank has left
            return 0
        _owner = self.kept.pop()
        sr_liveness_hold(&lane.liveness, &hold)
        try:
            while asked:
                with nogil:
                    asked = sr_stack_request_await(&lane.stack_request, &self.leave_word)
                if asked:
                    try:
                        self.write_stacks()
                    except BaseException:   # no memory; this rank is alive nevertheless
                        pass
        finally:
            sr_liveness_let_go(&lane.liveness)
        return 0

    cdef int write_stacks(self) except -1:
        cdef bytes text = stacks.of_this_process(SR_STACKS_NBYTES - 1)
        cdef size_t nbytes = min(<size_t> len(text), <size_t> SR_STACKS_NBYTES - 1)
        sr_stack_request_begin(&self.lane.stack_request)
        memcpy(self.lane.stacks, <const char *> text, nbytes)
        self.lane.stacks[nbytes] = 0
        sr_stack_request_end(&self.lane.stack_request)
        return 0

    cdef int leave(self) except -1:
        if self.pid == getpid():   # the thread was started in this process, not in its parent before a fork
            sr_stack_request_leave(&self.lane.stack_request, &self.leave_word)
            self.kept.clear()   # a thread that starts later touches nothing
            # The thread itself may have dropped the last reference, and must not wait for itself.
            if self.ident != <unsigned long> PyThread_get_thread_ident() and not self.has_ended:
                self.at_end.acquire()
                self.at_end.release()
        return 0
