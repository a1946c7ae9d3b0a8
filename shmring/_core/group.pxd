# What every pipeline stands on: one communicator's state (Group), one collective in progress (Call), and the steps
# that all of them share: what they wait for, and the call line. Who knows it knows the C rooms as well.
# Nothing here touches a Python object.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from .kernels cimport SR_BOOL, SR_DTYPES, SR_LAND, sr_kernels
from .segment cimport (
    SR_CLOSED, SR_ITEM_NAME_NBYTES, SR_LINES, SR_NO_ABORT, SR_RECORDS, SR_UNDER_WAY, sr_abort_pack, sr_abort_set,
    sr_call_line, sr_event_signal, sr_flag, sr_flag_load, sr_flag_publish, sr_flag_reached, sr_header, sr_lane,
    sr_layout_lane, sr_layout_lap_nbytes, sr_liveness, sr_liveness_check, sr_liveness_cpu, sr_liveness_died,
    sr_liveness_set_cpu, sr_liveness_state, sr_record, sr_report, sr_tuning,
)


cdef enum Status:
    DONE         # the call is complete here
    PROGRESSED   # step again
    BLOCKED      # nothing to do before call.awaited.flag reaches its target
    MISMATCHED   # call.awaited.rank calls something else
    ABORTED      # the abort word is set
    LATE         # call.awaited.rank did not come before the deadline
    DEAD         # call.awaited.rank is gone
    UNREADABLE   # the array of call.awaited.rank, because of call.error
    LEFT         # call.awaited.rank closed the communicator
    SIGNALLED    # time to let Python look at its signals
    LOST         # the connection to call.awaited.rank, which is of another host: closed, or failed with call.error
    REMOTE_MISMATCH       # call.awaited.rank, which is of another host, calls something else
    UNDESCRIBED  # the queue's next call is for Python to describe, which wants what came of those before it


cdef enum Kind:
    ALL_REDUCE, REDUCE, REDUCE_SCATTER, SCAN, EXSCAN
    BROADCAST, SCATTER, GATHER, ALL_GATHER, ALL_TO_ALL
    BARRIER, ALLOCATE, PING, AGREE, SPLIT, FORM_GROUP, SHARE
    ALL_GATHER_V, GATHER_V, SCATTER_V, ALL_TO_ALL_V   # what the steps of a vector call are named
    ALL_REDUCE_MANY                                   # what each call of a fused one is named
    ELECTION                                            # what comes before a call with a priority
    NKINDS, INVALID = 63


cdef enum:
    OPAQUE = SR_DTYPES      # the dtype of items that are only moved, of none of the table's dtypes: see Items


cdef enum:
    MOST_PRIORITY = 4095   # 13 bits of a fingerprint, with its negative and none


cdef enum Algorithm:
    AUTO, RING, TREE, MASTER, DIRECT, BIDIRECTIONAL_RING, HALVING_DOUBLING, DOUBLE_TREE, NALGORITHMS   # fit 3 bits


cdef enum Path:      # what a call went through, for stats
    TINY, SMALL, NEAR, FAR, ZERO_COPY, BY_RING, BY_TREE, BY_MASTER, SINGLE_COPY, BY_CHAIN, ACROSS
    BY_BIDIRECTIONAL_RING, BY_HALVING_DOUBLING, BY_DOUBLE_TREE, NPATHS


# One shared array's memory as this process maps it: `stride` bytes for each rank, in rank order. The own part is known
# to its user at `own`, which is another address of the same memory where that was adopted.
cdef struct Block:
    uint32_t id
    uintptr_t begin
    uintptr_t own
    size_t stride


cdef struct Stats:
    uint64_t calls, bytes_sent, bytes_over_wire, steps
    uint64_t[NPATHS] path      # by enum Path
    int last_path


cdef enum:
    SCRATCH_NBYTES = 512 << 10   # what the others have for this rank, little beside an L2


# One communicator's state on one rank. Private memory; what it points at is shared.
cdef struct Group:
    int rank, size
    sr_header *header
    sr_lane *me
    sr_lane **lane             # by rank
    unsigned char **ring       # by rank
    const sr_kernels *kernels
    uint64_t seq               # of the last call begun
    uint64_t first_user_seq    # of the first that is not the engine's own
    sr_record *recorded        # of the last call begun
    uint64_t verified          # up to this call everyone's lines are there and agree with this rank's
    uint64_t position          # where the next slot begins, see layout.h
    uint64_t credit            # up to here everyone else has copied, as last seen
    uint64_t pings             # round trips so far, the same on all ranks
    uint64_t pinged_ns         # when rank 0 measured last
    uint64_t round_trip_ns     # as rank 0 measured it
    uint32_t far, next_far     # in force; as measured, to be announced by rank 0
    uint32_t announced_far     # rank 0's word in the lines of the current call
    size_t ring_nbytes         # of one rank's staging buffer
    size_t lap_nbytes          # from a position to the same place one time around later
    int ndead                  # of all ranks, as far as this one has heard
    bint oversubscribed               # there are more ranks than CPUs, as all have agreed
    int pauses, brief_pauses, brief_yields
    uint64_t yield_ns, sleep_ns, poll_ns, ping_interval_ns
    uint64_t next_poll_ns, signal_ns   # when to look around again, and for signals
    uint64_t polled_ns                # when the wait of a call was looked at last
    bint checks_liveness       # the kernel does not watch them all, and those that it does not can be looked for
    uint64_t stall_ns, report_due_ns     # how long a wait may go without a report, 0: for ever; when one is due
    size_t zero_copy_nbytes    # this rank offers its shared arrays for zero-copy from here on
    bint single_copy           # every rank can read the private memory of every other
    const void **source        # scratch by rank, valid within one step
    void **target              # scratch by rank, valid within one step
    unsigned char *scratch     # SCRATCH_NBYTES and a line for each rank, valid within one step
    Block *block               # sorted by own
    int nblocks
    sr_tuning[2] tunings       # near, far
    sr_tuning *tuning          # in force
    Stats stats
    void *inter                # to the ranks of other hosts, see _internode/context.pxd; NULL: there are none
    void *trace                # of what it does and when, see _core/trace.pxd; NULL: there is none
    void *p2p_trace           # ... of messages


# How far one stage of a pipeline has come.
cdef struct Cursor:
    uint64_t position   # where its next slot begins, or lies at the earliest
    size_t offset       # bytes of the message behind it


# What is moved where its dtype is none of the table's: then bytes are what is counted.
cdef struct Items:
    uint32_t signature   # other where dtypes are, the same in every process
    uint32_t nbytes      # of one
    char[SR_ITEM_NAME_NBYTES] name


# Of a vector call: what goes to one rank, or comes from it.
cdef struct Piece:
    unsigned char *data
    size_t nbytes
    const unsigned char *there   # where the giver's array lies, with zero-copy: as this rank maps it, or ...
    bint there_is_private        # ... the giver does


cdef struct Awaited:
    const sr_flag *flag
    uint64_t target
    int rank


# One collective in progress: enter begins it, step moves it on; both return at once.
cdef struct Call:
    void (*enter)(Group *, Call *) noexcept nogil
    int (*step)(Group *, Call *) noexcept nogil
    # what is called: the first eight bytes as a flight record has them
    uint8_t kind, dtype, op, algorithm, order
    uint8_t named                    # the kind that this call is a step of, 0: it is no step of another
    uint8_t wire                     # how what crosses is written, see kernels.h
    uint8_t unused
    int root
    size_t count, itemsize, nbytes   # of what one rank takes from one other; vector calls: nbytes of the largest piece
    size_t x_nbytes, out_nbytes      # of the whole arrays where they are used
    const Items *items               # of OPAQUE; NULL: the dtype is the table's
    uint64_t fingerprint
    uint64_t timeout_ns
    const Call *within               # the call of ranks of several hosts that this is a local step of, or NULL
    uint16_t priority                # 0: none; else it and MOST_PRIORITY + 1
    uint16_t nodes_in_group          # of hosts that reduce among themselves first; 0: there are no groups
    float *residual                  # what earlier calls lost by that, see sent_count of allreduce; or NULL
    # where it lies
    const unsigned char *x
    unsigned char *out
    bint out_is_new                  # made for this call, large ones in pages that nobody has touched
    uint32_t x_block, out_block
    uint64_t x_offset, out_offset
    const Piece *given               # vector calls: by rank, what it takes of this one; NULL: all pieces are alike
    const Piece *taken               # vector calls: by rank, what this one takes of it
    # how far it is
    uint64_t seq
    int64_t number             # among the user's calls
    uint64_t mismatch_seq        # of the call in which the ranks' calls differ, if they do
    uint64_t deadline_ns       # 0: nobody has waited long yet
    uint64_t wait_begin_ns     # of the long wait that is under way
    bint interrupted           # ... and was left only to look at Python's signals
    Awaited awaited
    int peer, giver            # next ranks whose lines are to be looked at, of all and of those that give something
    int fold_peer, copy_peer   # next ranks whose counters are to be looked at
    bint lines_seen            # the lines that this rank needs are there and agree
    bint announced             # the own line is published
    bint relayed               # each rank needs what the one before it has made of what that one needed
    bint zero_copy             # as far as is known nothing is staged: arrays are read where they lie
    bint single_copy           # ... some of them in private memory, through the kernel
    int error                  # errno of what could not be read
    bint ping                  # the distance is being measured
    int phase                  # of zero-copy: 0 working, 1 waiting for the others to be done; fetch has three
    int round_trips            # of the measurement so far
    size_t chunk_nbytes        # a multiple of itemsize
    bint backwards             # from the last chunk to the first
    size_t window_nbytes       # of the rings, that a long message goes through: all of them, or what stays cached
    Cursor stage, fold, down, copy


# Of sequence numbers and positions, which wrap.
cdef inline bint is_before(uint64_t one, uint64_t other) noexcept nogil:
    return <int64_t> (one - other) < 0


# Positions begin with the sequence numbers, so that a test near the wrap of one is near the wrap of both; in a lap in
# which each rank has its own ring, as only that is sure to have its pages then.
cdef inline uint64_t first_position(const sr_header *header) noexcept nogil:
    return header.first_seq & ~<uint64_t> (2 * sr_layout_lap_nbytes(header.ring_nbytes) - 1)


# The cores are near or far from here on: what choices before a call begins depend on is the same for both.
cdef inline void set_far(Group *g, bint far) noexcept nogil:
    g.far = far
    g.tuning = &g.tunings[far]


cdef inline void count_path(Group *g, int path) noexcept nogil:
    g.stats.path[path] += 1
    g.stats.last_path = path


cdef inline uint8_t name_of(const Call *c) noexcept nogil:
    return c.named if c.named else c.kind


# One step of a hash of words: the same in every process.
cdef inline uint64_t mixed(uint64_t word) noexcept nogil:
    word *= <uint64_t> 0x9E3779B97F4A7C15
    return word ^ word >> 29


# Of 32 bits: other things stand on the same ones, so counts that are near each other must not differ in few of them.
cdef inline uint64_t mixed_count(uint64_t count) noexcept nogil:
    return count * <uint64_t> 0x9E3779B97F4A7C15 >> 32


cdef inline uint64_t fingerprint_of(const Call *c) noexcept nogil:
    cdef uint64_t what = name_of(c) | <uint64_t> c.dtype << 6 | <uint64_t> c.op << 12
    what |= <uint64_t> c.algorithm << 16 | <uint64_t> c.order << 19
    what |= <uint64_t> c.root << 20 | mixed_count(c.count) << 32
    what ^= <uint64_t> c.wire << 61 ^ <uint64_t> c.nodes_in_group << 45 ^ <uint64_t> c.priority << 32
    if c.items != NULL:
        what ^= <uint64_t> c.items.signature << 45   # where others have a wire and groups
    return what   # _flight.described takes it apart


# ---- what a kind is ------------------------------------------------------------------------------------------

# A *piece* is what one rank takes from one other. Where x is split, each rank takes another piece of it.
cdef inline bint is_split(const Call *c) noexcept nogil:
    return c.kind == SCATTER or c.kind == ALL_TO_ALL or c.kind == REDUCE_SCATTER


# Where results are joined, what comes from rank i is the i-th piece of out.
cdef inline bint is_joined(const Call *c) noexcept nogil:
    return c.kind == ALL_GATHER or c.kind == GATHER or c.kind == ALL_TO_ALL


# Large ones are reduced slice by slice, each by one rank, which puts its result into the place of others.
cdef inline bint is_sliced(const Call *c) noexcept nogil:
    return c.kind == ALL_REDUCE or c.kind == REDUCE


cdef inline bint is_scan(const Call *c) noexcept nogil:
    return c.kind == SCAN or c.kind == EXSCAN


cdef inline bint is_folded(const Call *c) noexcept nogil:
    return is_sliced(c) or c.kind == REDUCE_SCATTER or is_scan(c)


# Whether what a rank takes is what another has, bit for bit: that of two ranks' exscan is, where an op leaves single
# values as they are. Logical ones do not, and a bool of 2 becomes 1.
cdef inline bint is_moved(const Group *g, const Call *c) noexcept nogil:
    return not is_folded(c) or (c.kind == EXSCAN and g.size == 2 and c.op < SR_LAND and c.dtype != SR_BOOL)


# Whether others need anything of this rank's x, and whether it gets anything.
cdef inline bint gives(const Group *g, const Call *c, int rank) noexcept nogil:
    if c.kind == BROADCAST or c.kind == SCATTER:
        return rank == c.root
    if is_scan(c):
        return rank != g.size - 1
    return c.kind != GATHER or rank != c.root


cdef inline bint takes(const Group *g, const Call *c, int rank) noexcept nogil:
    if c.kind == BROADCAST or c.kind == SCATTER:
        return rank != c.root
    if c.kind == EXSCAN:
        return rank != 0
    return (c.kind != GATHER and c.kind != REDUCE) or rank == c.root


# Whether this rank overwrites nothing that others may be reading of its x.
cdef inline bint may_be_read_in_place(const Group *g, const Call *c) noexcept nogil:
    return c.out != c.x or not takes(g, c, g.rank) or not (is_scan(c) or c.kind == ALL_TO_ALL)


# ---- waiting -------------------------------------------------------------------------------------------------

cdef enum:
    SIGNAL_INTERVAL_NS = 5000000   # between two looks of a wait at Python's signals


cdef inline int blocked_on(Call *c, const sr_flag *flag, uint64_t target, int rank) noexcept nogil:
    c.awaited.flag = flag
    c.awaited.target = target
    c.awaited.rank = rank
    return BLOCKED


cdef inline sr_flag *counter(Group *g, int rank, int which) noexcept nogil:
    return &g.lane[rank].progress[which].value


cdef inline void publish(Group *g, int which, uint64_t value) noexcept nogil:
    sr_flag_publish(&g.me.progress[which].value, value, &g.me.event)


# Whether this rank keeps `rank` from its CPU while it waits for it: then pauses are in vain.
cdef inline bint runs_here(Group *g, int rank) noexcept nogil:
    return g.oversubscribed and sr_liveness_cpu(&g.lane[rank].liveness) == sr_liveness_set_cpu(&g.me.liveness)


# Waits for `first` and ranks after it whose counters have not reached the target: best for one that runs here.
cdef inline int blocked_on_counter(Group *g, Call *c, int which, uint64_t target, int first) noexcept nogil:
    cdef int rank
    if g.oversubscribed:
        for rank in range(first, g.size):
            if rank != g.rank and runs_here(g, rank) and not sr_flag_reached(counter(g, rank, which), target):
                return blocked_on(c, counter(g, rank, which), target, rank)
    return blocked_on(c, counter(g, first, which), target, first)


# Everyone else's counter has reached the target; *peer remembers how many ranks are known to have.
cdef inline bint all_reached(Group *g, int which, uint64_t target, int *peer) noexcept nogil:
    while peer[0] < g.size:
        if peer[0] != g.rank and not sr_flag_reached(counter(g, peer[0], which), target):
            return False
        peer[0] += 1
    return True


# Sets the abort word, once for all ranks, and wakes whoever sleeps.
cdef inline void report_abort(sr_header *header, int cause, int culprit, int reporter,
                              const sr_report *said) noexcept nogil:
    cdef uint32_t rank
    if sr_flag_load(&header.abort) == SR_NO_ABORT:
        sr_layout_lane(header, reporter).report = said[0]
        sr_abort_set(header, sr_abort_pack(cause, culprit, reporter))
    for rank in range(header.nranks):
        sr_event_signal(&sr_layout_lane(header, rank).event)
        sr_event_signal(&sr_layout_lane(header, rank).p2p_event)


# Marks ranks that have died where the kernel does not.
cdef inline void check_liveness(Group *g) noexcept nogil:
    cdef int rank
    if g.checks_liveness:
        for rank in range(g.size):
            if rank != g.rank:
                sr_liveness_check(&g.lane[rank].liveness)


# What has become of a rank of this host: PROGRESSED, it lives; DEAD, or LEFT.
cdef inline int peer_status(const sr_liveness *liveness) noexcept nogil:
    if sr_liveness_died(liveness):
        return DEAD
    return LEFT if sr_liveness_state(liveness) == SR_CLOSED else PROGRESSED


# ---- the call line -------------------------------------------------------------------------------------------

cdef enum:
    MOST_AHEAD = SR_LINES // 2 - 1   # calls not yet verified when one ends, so that the next line can be published
    REPEATS = 16                     # a call that was made as often is taken for one of a long loop


cdef inline sr_call_line *line_of(Group *g, int rank, uint64_t seq) noexcept nogil:
    return &g.lane[rank].line[seq & (SR_LINES - 1)]


cdef inline void record_call(Group *g, Call *c, bint invalid) noexcept nogil:
    cdef sr_record *record = &g.me.record[c.seq & (SR_RECORDS - 1)]
    cdef const Call *called = c
    if c.within != NULL:
        called = c.within
    g.recorded = record
    record.seq = c.seq
    record.count = called.count
    record.number = called.number
    memcpy(&record.kind, &called.kind, 8)   # one word: see Call
    record.root = <uint32_t> called.root
    record.nodes_in_group = called.nodes_in_group
    record.priority = called.priority
    if called.items != NULL:
        record.item_nbytes = called.items.nbytes
        memcpy(record.item_name, called.items.name, SR_ITEM_NAME_NBYTES)
    record.invalid = invalid
    record.outcome = SR_UNDER_WAY


# What has become of the call that was recorded last.
cdef inline void record_outcome(Group *g, int outcome) noexcept nogil:
    g.recorded.outcome = outcome


cdef inline void begin_call(Group *g, Call *c) noexcept nogil:
    g.seq += 1
    c.seq = c.mismatch_seq = g.seq
    c.number = <int64_t> (g.seq - g.first_user_seq) + 1
    c.deadline_ns = 0
    c.peer = c.giver = 0
    c.lines_seen = c.interrupted = c.relayed = c.backwards = False
    record_call(g, c, False)


cdef inline void publish_line(Group *g, Call *c) noexcept nogil:
    cdef sr_call_line *line = line_of(g, g.rank, c.seq)
    line.fingerprint = c.fingerprint
    sr_flag_publish(&line.seq, c.seq, &g.me.event)


# As blocked_on_counter: waits for the line of call seq of c.peer, or of a rank after it.
cdef inline int blocked_on_line(Group *g, Call *c, uint64_t seq) noexcept nogil:
    cdef sr_flag *flag
    cdef int rank
    if g.oversubscribed:
        for rank in range(c.peer, g.size):
            flag = &line_of(g, rank, seq).seq
            if rank != g.rank and runs_here(g, rank) and not sr_flag_reached(flag, seq):
                return blocked_on(c, flag, seq, rank)
    return blocked_on(c, &line_of(g, c.peer, seq).seq, seq, c.peer)


# DONE once everyone's line of call g.verified + 1 is there and says the same.
cdef inline int verify_next(Group *g, Call *c, uint64_t fingerprint) noexcept nogil:
    cdef uint64_t seq = g.verified + 1
    cdef sr_call_line *line
    while c.peer < g.size:
        if c.peer != g.rank:
            line = line_of(g, c.peer, seq)
            if not sr_flag_reached(&line.seq, seq):
                return blocked_on_line(g, c, seq)
            if line.fingerprint != fingerprint:
                c.awaited.rank = c.peer
                c.mismatch_seq = seq
                return MISMATCHED
        c.peer += 1
    c.peer = 0
    g.verified = seq
    return DONE


# The same of all calls up to seq, which this rank has published.
cdef inline int verify(Group *g, Call *c, uint64_t seq) noexcept nogil:
    cdef int status
    while is_before(g.verified, seq):
        status = verify_next(g, c, line_of(g, g.rank, g.verified + 1).fingerprint)
        if status != DONE:
            return status
    return DONE


# DONE once everyone's line of this call is there and says the same.
cdef inline int await_lines(Group *g, Call *c) noexcept nogil:
    cdef int status = DONE
    if g.verified != c.seq - 1:
        status = verify(g, c, c.seq - 1)
    if status == DONE and g.verified != c.seq:
        status = verify_next(g, c, c.fingerprint)
    c.lines_seen = status == DONE
    return status


# Where ranks take turns on a CPU, a rank that repeats its last calls does not wait for those that have nothing for it:
# it sees some calls later whether they have called the same. A call like no other is seen by all at once.
cdef inline bint repeats_last(Group *g, Call *c) noexcept nogil:
    return (g.oversubscribed and c.fingerprint == line_of(g, g.rank, c.seq - 1).fingerprint
            and c.fingerprint == line_of(g, g.rank, c.seq - REPEATS).fingerprint)


# The end of that for one call, which has seen the lines that it needs; now and then it waits for all.
cdef inline int see_calls_before(Group *g, Call *c) noexcept nogil:
    cdef int status = DONE
    if is_before(g.verified + MOST_AHEAD, c.seq):
        status = verify(g, c, c.seq)   # all at once, so that the next calls have nothing to wait for
    c.lines_seen = status == DONE
    return status
