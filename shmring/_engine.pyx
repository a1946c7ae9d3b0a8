# The engine of one communicator on one rank: runs pipelines, waits, and says what went wrong.
# May know: _group, _distance, _pipelines, src; failures and liveness once something is wrong. Opens and allocates
# nothing shared.

import threading

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from ._group cimport *
from ._distance cimport enter_ping, step_ping_call
from ._pipelines cimport choose_pipeline, step_settle

from . import failures, liveness
from .errors import Closed

cdef extern from "kernels.h" nogil:
    struct sr_float_env:
        pass
    sr_float_env sr_float_env_enter()
    void sr_float_env_leave(sr_float_env)
    const sr_kernels *sr_kernels_find(const char *isa)
    const char *sr_kernels_isas(int i)
    const char **sr_dtype_name
    const char **sr_op_name


# ---- tables that Python reads: one definition each, in C -------------------------------------------------------

DTYPES = tuple(sr_dtype_name[i].decode() for i in range(SR_DTYPES))
MOVED_DTYPE = "bytes"   # of calls that only move items of any other dtype
DTYPE_NBYTES = tuple(sr_dtype_nbytes[i] for i in range(SR_DTYPES))
OPS = tuple(sr_op_name[i].decode() for i in range(SR_OPS))
KINDS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan",
         "broadcast", "scatter", "gather", "all_gather", "all_to_all", "barrier", "empty", "ping", "agree")
ALGORITHMS = ("auto", "ring", "tree", "master", "direct")
PATHS = ("tiny", "small", "near", "far", "zero_copy", "ring", "tree", "master")
CAUSES = {"failed": SR_RANK_FAILED, "timed out": SR_TIMED_OUT, "mismatch": SR_MISMATCHED, "aborted": SR_ABORTED}
TINY_NBYTES = SR_PAYLOAD_NBYTES
MAX_RANKS = SR_MAX_RANKS


def supported(str dtype, str op):
    """Whether the op has a meaning for the dtype."""
    cdef const sr_kernels *kernels = sr_kernels_find(NULL)
    return kernels.fold[DTYPES.index(dtype)][OPS.index(op)] != NULL


def isas():
    """Instruction sets that this machine supports, best first."""
    names = []
    while sr_kernels_isas(len(names)) != NULL:
        names.append(sr_kernels_isas(len(names)).decode())
    return names


# ---- waiting ---------------------------------------------------------------------------------------------------

cdef inline int pauses_for(Group *g, Call *c, int pauses) noexcept nogil:
    return 0 if runs_here(g, c.awaited.rank) else pauses


cdef int run_steps(Group *g, Call *c) noexcept nogil:
    cdef int status
    if c.interrupted:
        status = wait_long(g, c)
        if status != PROGRESSED:
            return status
    while True:
        status = c.step(g, c)
        if status == PROGRESSED:
            continue
        if status != BLOCKED:
            return status
        if not sr_flag_spin(c.awaited.flag, c.awaited.target, pauses_for(g, c, g.pauses)):
            status = wait_long(g, c)
            if status != PROGRESSED:
                return status


# Yields, then sleeps; now and then looks at whatever may end the wait otherwise. PROGRESSED: the flag is there.
cdef int wait_long(Group *g, Call *c) noexcept nogil:
    cdef uint64_t now = sr_now_ns()
    cdef uint64_t next_look = now + g.look_ns
    cdef int status
    if c.deadline_ns == 0:
        c.deadline_ns = now + c.timeout_ns
    if not c.interrupted:
        c.wait_begin_ns = now
    c.interrupted = False
    while not sr_flag_reached(c.awaited.flag, c.awaited.target):
        if sr_flag_load(&g.header.abort) != SR_NO_ABORT:
            return ABORTED
        if now >= next_look:
            status = look_around(g, c, now)
            if status != PROGRESSED:
                c.interrupted = status == SIGNALLED
                return status
            next_look = now + g.look_ns
        if now - c.wait_begin_ns < g.yield_ns:
            sr_yield()
        else:
            sr_flag_sleep(c.awaited.flag, c.awaited.target, &g.lane[c.awaited.rank].bell, g.sleep_ns)
        now = sr_now_ns()
    return PROGRESSED


# Whether a dead rank has left this call undone: one that has done its part may end without closing.
cdef inline bint is_missed(Group *g, Call *c, int rank) noexcept nogil:
    if rank == c.awaited.rank:
        return not sr_flag_reached(c.awaited.flag, c.awaited.target)
    return not sr_flag_reached(&g.lane[rank].line[c.seq & 1].seq, c.seq)


cdef int look_around(Group *g, Call *c, uint64_t now) noexcept nogil:
    cdef int rank
    for rank in range(g.size):
        if rank != g.rank and sr_life_died(&g.lane[rank].life) and is_missed(g, c, rank):
            c.awaited.rank = rank
            return DEAD
    if sr_life_state(&g.lane[c.awaited.rank].life) == SR_CLOSED:
        # It may have published before it left.
        return PROGRESSED if sr_flag_reached(c.awaited.flag, c.awaited.target) else LEFT
    if now >= c.deadline_ns:
        return LATE
    if now >= g.signal_ns:
        g.signal_ns = now + SIGNAL_INTERVAL_NS
        return SIGNALLED
    return PROGRESSED


cdef enum:
    SIGNAL_INTERVAL_NS = 5000000
    BRIEF_NBYTES = 65536        # calls this small are over sooner than the GIL is let go and taken again


# A short try with the GIL held: pauses when every rank has a CPU, else a yield or two for those awaited.
cdef int try_briefly(Group *g, Call *c) noexcept nogil:
    cdef int yields = 0
    cdef int status = PROGRESSED
    while status == PROGRESSED:
        status = c.step(g, c)
        if status == BLOCKED:
            if sr_flag_spin(c.awaited.flag, c.awaited.target, pauses_for(g, c, g.brief_pauses)):
                status = PROGRESSED
            elif yields < g.brief_yields:
                sr_yield()
                yields += 1
                status = PROGRESSED
    return status


cdef bytes reason_text(str reason):
    return reason.encode("utf-8", "backslashreplace")[:SR_REASON_NBYTES - 1]


# ---- the engine ------------------------------------------------------------------------------------------------

cdef class Engine:
    """One communicator's state on one rank, over a segment that `format_segment` has begun.

    `segment` has `.address` and `.nbytes` and is kept alive.
    """

    def __cinit__(self, segment, int rank, int size, **_):
        cdef Group *g = &self.g
        cdef uintptr_t base = segment.address
        cdef int i
        memset(g, 0, sizeof(Group))
        g.header = <sr_header *> base
        if g.header.magic != SR_MAGIC or g.header.nranks != size or size > SR_MAX_RANKS or not 0 <= rank < size:
            raise ValueError(f"this is not a segment of {size} ranks, or not one of this version of shmring")
        if segment.nbytes < sr_layout_segment_nbytes(size, g.header.ring_nbytes, g.header.message_ring_nbytes):
            raise ValueError(f"the segment of {size} ranks is only {segment.nbytes} bytes long")
        g.lane = <sr_lane **> calloc(size, sizeof(void *))
        g.ring = <unsigned char **> calloc(size, sizeof(void *))
        g.source = <const void **> calloc(size + 1, sizeof(void *))
        g.target = <void **> calloc(size + 1, sizeof(void *))
        if g.lane == NULL or g.ring == NULL or g.source == NULL or g.target == NULL:
            raise MemoryError()
        for i in range(size):
            g.lane[i] = sr_layout_lane(g.header, i)
            g.ring[i] = <unsigned char *> base + sr_layout_ring_offset(size, g.header.ring_nbytes, i)
        g.rank = rank
        g.size = size
        g.me = g.lane[rank]

    def __init__(self, segment, int rank, int size, *, str isa, dict tuning, double timeout_s):
        cdef Group *g = &self.g
        self.segment = segment
        self.timeout_s = timeout_s
        self.leave_word = bytearray(4)
        isa_bytes = isa.encode()
        g.kernels = sr_kernels_find(isa_bytes)
        if g.kernels == NULL:
            raise ValueError(f"SHMRING_ISA={isa}: this machine has {', '.join(isas())}")
        g.seq = g.header.first_seq
        g.position = g.credit = g.pings = first_position(g.header)
        g.far = g.next_far = g.header.forced_path == 2
        g.tuning = tuning
        self.be_patient(pauses=20, brief_pauses=0, brief_yields=0, yield_ns=200_000, sleep_ns=4_000_000,
                        look_ns=100_000, ping_interval_ns=1_000_000_000, zero_copy_nbytes=0, crowded=False)
        g.ring_nbytes = g.header.ring_nbytes
        g.lap_nbytes = sr_layout_lap_nbytes(g.ring_nbytes)
        if 2 * slot_nbytes(g.tuning.one_chunk_nbytes + SR_CACHE_LINE) > g.ring_nbytes:
            raise ValueError("the staging rings of this communicator are smaller than its tuning needs")

    def __dealloc__(self):
        free(self.g.lane)
        free(self.g.ring)
        free(self.g.source)
        free(self.g.target)
        free(self.g.block)

    def be_patient(self, *, int pauses, int brief_pauses, int brief_yields, uint64_t yield_ns, uint64_t sleep_ns,
                   uint64_t look_ns, uint64_t ping_interval_ns, size_t zero_copy_nbytes, bint crowded):
        """How to wait from now on: pauses, then yields, then sleep, with a look at all else now and then.

        brief_pauses and brief_yields are for small calls, before the GIL is let go. ping_interval_ns is the
        least time between two measurements of the distance; from zero_copy_nbytes on messages are worth
        zero-copy's second synchronisation. crowded: there are more ranks than CPUs.
        """
        self.g.pauses = pauses
        self.g.brief_pauses = brief_pauses
        self.g.brief_yields = brief_yields
        self.g.yield_ns = yield_ns
        self.g.sleep_ns = sleep_ns
        self.g.look_ns = look_ns
        self.g.ping_interval_ns = ping_interval_ns
        self.g.zero_copy_nbytes = zero_copy_nbytes
        self.g.crowded = crowded

    # -- life --

    def arrive(self, int pid, uint64_t start_time):
        """Makes this rank known to the others: from here on its death is noticed."""
        self.g.me.life.pid = pid
        self.g.me.life.start_time = start_time
        self.park_thread = threading.Thread(target=self._park, name="shmring-life", daemon=True)
        self.park_thread.start()
        while not sr_life_is_held(&self.g.me.life):
            self.park_thread.join(0.0001)
        sr_life_set_state(&self.g.me.life, SR_JOINED)

    def _park(self):
        cdef unsigned char[:] word = self.leave_word
        cdef sr_leave *leave = <sr_leave *> &word[0]
        cdef sr_life *life = &self.g.me.life
        with nogil:
            sr_life_hold(life, leave)

    def close(self, str because="the communicator is closed"):
        """Leaves: others that still wait for this rank are told. Local; closing twice is harmless."""
        cdef unsigned char[:] word = self.leave_word
        cdef int rank
        if self.closed_because is not None:
            return
        if self.busy:
            raise RuntimeError("close() while another thread is inside a call of this communicator")
        self.closed_because = because
        sr_life_set_state(&self.g.me.life, SR_CLOSED)
        sr_bell_ring(&self.g.me.bell)
        if self.park_thread is not None:
            sr_life_leave(<sr_leave *> &word[0])
            self.park_thread.join()

    def disown(self):
        """In a forked child: the communicator belongs to the parent; touches nothing that is shared."""
        self.closed_because = "this communicator belongs to the parent of this forked process; join a new world"

    # -- calls --

    cdef int check_usable(self) except -1:
        if self.closed_because is not None:
            raise Closed(self.closed_because, rank=self.g.rank)
        if self.busy:
            raise RuntimeError("another thread is inside a call of this communicator; give each thread its own")
        if sr_flag_load(&self.g.header.abort) != SR_NO_ABORT:
            failures.raise_aborted(self)
        return 0

    cdef int prepare_to_begin(self, Call *c) except -1:
        if self.closed_because is not None or self.busy or sr_flag_load(&self.g.header.abort) != SR_NO_ABORT:
            if self.closed_because is None and not self.busy:
                # What would have been called is part of what the others say of a mismatch.
                c.seq = self.g.seq + 1
                record_call(&self.g, c, False)
            self.check_usable()
        if self.refused:
            self.settle(c.timeout_ns)
        return 0

    cdef int drive(self, Call *c) except -1:
        """Runs a call to its end; raises what ends it otherwise."""
        cdef Group *g = &self.g
        cdef sr_float_env env
        cdef int status = BLOCKED
        self.prepare_to_begin(c)
        self.busy = True
        env = sr_float_env_enter()
        try:
            c.enter(g, c)
            if c.nbytes <= BRIEF_NBYTES:
                status = try_briefly(g, c)
            if status != DONE:
                self.complete(c)
            g.stats.calls += 1
        finally:
            sr_float_env_leave(env)
            self.busy = False
        return 0

    cdef int complete(self, Call *c) except -1:
        cdef Group *g = &self.g
        cdef int status
        while True:
            with nogil:
                status = run_steps(g, c)
            if status == DONE:
                return 0
            self.surface(c, status)

    # Raises what a status means, for everyone; returns after a signal that raised nothing.
    cdef int surface(self, Call *c, int status) except -1:
        cdef int culprit = c.awaited.rank
        cdef Group *g = &self.g
        seq = c.seq
        if status == SIGNALLED:
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                self.give_up(SR_ABORTED, g.rank, seq, f"{type(error).__name__} in rank {g.rank}")
                raise
            return 0
        if status == MISMATCHED:
            self.give_up(SR_MISMATCHED, culprit, seq, "")
        elif status == LATE:
            self.give_up(SR_TIMED_OUT, culprit, seq, failures.describe_late(self, culprit, seq, c.timeout_ns * 1e-9))
        elif status == DEAD:
            cause = liveness.how_it_ended(g.lane[culprit].life.pid, g.lane[culprit].life.start_time)
            self.give_up(SR_RANK_FAILED, culprit, seq, cause)
        elif status == LEFT:
            self.give_up(SR_RANK_FAILED, culprit, seq, "closed the communicator while others still called it")
        failures.raise_aborted(self)
        return 0

    cdef int give_up(self, int cause, int culprit, object seq, str reason) except -1:
        cdef bytes text = reason_text(reason)
        report_abort(self.g.header, cause, culprit, self.g.rank, seq, text, len(text))
        return 0

    cdef int refuse(self, int kind) except -1:
        """A wrong argument here: the others must see that this rank called something invalid, not wait."""
        cdef Call c
        cdef Group *g = &self.g
        memset(&c, 0, sizeof(c))
        c.kind = kind
        c.timeout_ns = <uint64_t> (self.timeout_s * 1e9)
        self.prepare_to_begin(&c)
        g.seq += 1
        c.seq = g.seq
        record_call(g, &c, True)
        c.kind = INVALID
        c.fingerprint = fingerprint_of(&c)
        publish_line(g, &c)
        self.refused = True
        return 0

    # Before the next line may be published everyone's line of the refused call must have been seen.
    cdef int settle(self, uint64_t timeout_ns) except -1:
        cdef Call c
        memset(&c, 0, sizeof(c))
        c.kind = INVALID
        c.fingerprint = fingerprint_of(&c)
        c.seq = self.g.seq
        c.timeout_ns = timeout_ns
        c.step = step_settle
        self.busy = True
        try:
            self.complete(&c)
        finally:
            self.busy = False
        self.refused = False
        return 0

    def check(self):
        """Raises if the communicator is closed or some rank has given up; the cold paths ask while they wait."""
        self.check_usable()

    # A tiny call of the engine's own: start-up and agreements.
    cdef int call_tiny(self, int kind, int op, size_t count, void *data, size_t nbytes, double timeout_s) except -1:
        cdef Call c
        memset(&c, 0, sizeof(c))
        c.kind = kind
        c.dtype = SR_U8
        c.op = op
        c.count = count
        c.itemsize = 1
        c.nbytes = c.x_nbytes = nbytes
        c.x = c.out = <unsigned char *> data
        c.timeout_ns = <uint64_t> (timeout_s * 1e9)
        c.fingerprint = fingerprint_of(&c)
        choose_pipeline(&self.g, &c)
        return self.drive(&c)

    def broadcast_word(self, uint64_t word):
        """Rank 0's word, on every rank."""
        self.call_tiny(BROADCAST, SR_SUM, sizeof(word), &word, sizeof(word), self.timeout_s)
        return word

    def all_agree(self, bint yes):
        """Whether every rank says yes."""
        cdef uint8_t answer = yes
        self.call_tiny(ALL_REDUCE, SR_MIN, 1, &answer, 1, self.timeout_s)
        return bool(answer)

    def union(self, bytes bits):
        """The bits that any rank has set, as an int."""
        cdef unsigned char[SR_PAYLOAD_NBYTES] part
        cdef size_t begin, nbytes
        result = b""
        for begin in range(0, len(bits), SR_PAYLOAD_NBYTES):
            nbytes = min(<size_t> SR_PAYLOAD_NBYTES, len(bits) - begin)
            memcpy(part, <const char *> bits + begin, nbytes)
            self.call_tiny(ALL_REDUCE, SR_BOR, nbytes, part, nbytes, self.timeout_s)
            result += part[:nbytes]
        return int.from_bytes(result, "little")

    def announce_allocation(self, size_t nbytes, double timeout_s):
        """Every rank is about to allocate as much; Mismatch when they differ."""
        self.call_tiny(ALLOCATE, SR_SUM, nbytes, NULL, 0, timeout_s)

    def own_ring(self):
        """(offset in the segment, bytes) of this rank's staging ring."""
        cdef Group *g = &self.g
        return sr_layout_ring_offset(g.size, g.header.ring_nbytes, g.rank), g.header.ring_nbytes

    def measure_distance(self):
        """Flips a line between rank 0 and each other rank in turn; near or far is then common knowledge."""
        cdef Call c
        cdef Group *g = &self.g
        if g.size == 1:
            return
        memset(&c, 0, sizeof(c))
        c.kind = PING
        c.fingerprint = fingerprint_of(&c)
        c.timeout_ns = <uint64_t> (self.timeout_s * 1e9)
        c.enter = enter_ping
        c.step = step_ping_call
        self.drive(&c)
        g.far = g.next_far = self.broadcast_word(g.next_far)

    def open_for_calls(self):
        """The start-up is over: calls are counted from here."""
        self.first_user_seq = self.g.seq + 1
        memset(&self.g.stats, 0, sizeof(Stats))

    # -- shared blocks --

    def set_blocks(self, list blocks):
        """Which shared arrays this process maps: (id, begin, stride) of each, begin of rank 0's part."""
        cdef int i
        cdef Group *g = &self.g
        cdef Block *table = <Block *> calloc(len(blocks) + 1, sizeof(Block))
        if table == NULL:
            raise MemoryError()
        for i, (block, begin, stride) in enumerate(sorted(blocks, key=lambda entry: entry[1])):
            table[i].id = block
            table[i].begin = begin
            table[i].stride = stride
        free(g.block)
        g.block = table
        g.nblocks = len(blocks)

    # The shared block that holds these bytes in this rank's part of it; False: private memory.
    cdef bint find_block(self, const void *address, size_t nbytes, uint32_t *block, uint64_t *offset) noexcept:
        cdef Group *g = &self.g
        cdef uintptr_t begin = <uintptr_t> address
        cdef uintptr_t part
        cdef size_t stride
        cdef int low = 0, high = g.nblocks, middle
        while low < high:
            middle = (low + high) // 2
            if g.block[middle].begin <= begin:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return False
        part = g.block[low - 1].begin + <uintptr_t> g.rank * g.block[low - 1].stride
        stride = g.block[low - 1].stride
        if begin < part or begin - part > stride or nbytes > stride - (begin - part):
            return False
        block[0] = g.block[low - 1].id
        offset[0] = begin - part
        return True

    # -- what tools and errors read --

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
        """Which of the user's calls a sequence number means: the first is 1, the engine's own are 0 or less."""
        return <int64_t> (seq - self.first_user_seq) + 1

    @property
    def isa(self):
        return self.g.kernels.isa.decode()

    def abort(self, str reason):
        """Gives up on behalf of the caller: every rank raises Aborted."""
        if self.closed_because is not None:
            raise Closed(self.closed_because, rank=self.g.rank)
        self.give_up(SR_ABORTED, self.g.rank, self.g.seq, reason)

    def abort_report(self):
        """(cause, culprit, the reporter's sequence number, reason), or None while nobody has given up."""
        cdef uint64_t word = sr_flag_load(&self.g.header.abort)
        cdef int reporter = sr_abort_reporter(word)
        cdef sr_report *report
        if word == SR_NO_ABORT:
            return None
        if reporter >= self.g.size or sr_abort_culprit(word) >= self.g.size:
            raise ValueError("the abort word of this communicator is damaged")
        report = &self.g.lane[reporter].report
        reason = (<bytes> report.reason[:SR_REASON_NBYTES]).split(b"\0")[0].decode(errors="replace")
        cause = next(name for name, value in CAUSES.items() if value == sr_abort_cause(word))
        return cause, sr_abort_culprit(word), report.seq, reason

    def record_of(self, int rank, seq):
        """What a rank called as its seq-th call, as a dict; None when it has not, or too long ago."""
        cdef sr_record record = self.g.lane[rank].record[<uint64_t> seq & (SR_RECORDS - 1)]
        if record.kind >= NKINDS or record.seq != <uint64_t> seq:
            return None
        return {"seq": record.seq, "kind": KINDS[record.kind], "count": record.count, "root": record.root,
                "dtype": (*DTYPES, MOVED_DTYPE)[record.dtype % (SR_DTYPES + 1)], "op": OPS[record.op % SR_OPS],
                "algorithm": ALGORITHMS[record.algorithm % len(ALGORITHMS)], "invalid": bool(record.invalid),
                "order": "F" if record.order else "C"}

    def last_seq_of(self, int rank):
        """The highest sequence number that a rank has begun."""
        cdef sr_lane *lane = self.g.lane[rank]
        cdef uint64_t a = sr_flag_load(&lane.line[0].seq)
        cdef uint64_t b = sr_flag_load(&lane.line[1].seq)
        return a if <int64_t> (a - b) > 0 else b

    def life_of(self, int rank):
        """(pid, start time) of a rank, as it said when it joined."""
        return self.g.lane[rank].life.pid, self.g.lane[rank].life.start_time

    def stats(self):
        """Counters since the communicator began; see Comm.stats."""
        cdef Group *g = &self.g
        cdef int i
        far = "far" if g.far else "near"
        return {
            "calls": g.stats.calls, "bytes_sent": g.stats.bytes_sent, "steps": g.stats.steps,
            "paths": {name: g.stats.path[i] for i, name in enumerate(PATHS)},
            "path": PATHS[g.stats.last_path] if g.stats.calls else None,
            "distance": far, "round_trip_ns": g.round_trip_ns, "isa": self.isa,
        }
