# The basis of every algorithm: the state of one communicator (Group), one collective in progress (Call), and the steps
# that all algorithms share: waiting, and the call line. Nothing here touches a Python object.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from .kernels cimport SR_BOOL, SR_DTYPES, SR_LAND, sr_kernels
from .path_trials cimport SIZE_CLASSES, PathTrials
from .segment cimport (
    SR_CLOSED, SR_ITEM_NAME_NBYTES, SR_LINES, SR_NO_ABORT, SR_RECORDS, SR_UNDER_WAY, sr_abort_pack, sr_abort_set,
    sr_call_line, sr_event_signal, sr_flag, sr_flag_load, sr_flag_publish, sr_flag_reached, sr_header, sr_lane,
    sr_layout_lane, sr_layout_lap_nbytes, sr_liveness, sr_liveness_check, sr_liveness_cpu, sr_liveness_died,
    sr_liveness_set_cpu, sr_liveness_state, sr_record, sr_report, sr_tuning,
)


# The result of a step, or of a wait.
cdef enum Status:
    DONE         # the call is complete on this rank
    PROGRESSED   # step again
    BLOCKED      # there is nothing to do before call.awaited.flag reaches its target
    MISMATCHED   # call.awaited.rank makes a different call
    ABORTED      # the abort word is set
    LATE         # call.awaited.rank has not done its part before the deadline
    DEAD         # call.awaited.rank has died
    UNREADABLE   # the array of call.awaited.rank cannot be read: call.error
    LEFT         # call.awaited.rank has closed the communicator
    SIGNALLED    # Python has to check its signals
    LOST         # the connection to call.awaited.rank, on another host, is closed or has failed with call.error
    REMOTE_MISMATCH       # call.awaited.rank, on another host, makes a different call
    UNFILLED     # Python has to fill the queue's next call, for which it needs the results of the calls before


cdef enum Kind:
    ALL_REDUCE, REDUCE, REDUCE_SCATTER, SCAN, EXSCAN
    BROADCAST, SCATTER, GATHER, ALL_GATHER, ALL_TO_ALL
    BARRIER, ALLOCATE, PING, AGREE, SPLIT, FORM_GROUP, SHARE
    ALL_GATHER_V, GATHER_V, SCATTER_V, ALL_TO_ALL_V   # names of vector calls, for their steps
    ALL_REDUCE_MANY                                   # name of a fused call, for its steps
    ELECTION                                          # precedes a call with a priority
    GROW
    NKINDS, INVALID = 63


cdef enum:
    OPAQUE = SR_DTYPES      # the dtype of items that are only moved and have no dtype of the table: see Items


cdef enum:
    MOST_PRIORITY = 4095   # 13 bits of a fingerprint hold -4095 to 4095 and "none"


cdef enum Algorithm:
    AUTO, RING, TREE, MASTER, DIRECT, BIDIRECTIONAL_RING, HALVING_DOUBLING, DOUBLE_TREE, NALGORITHMS   # fit 3 bits


cdef enum Path:      # the method that carried a call, for stats
    TINY, SMALL, NEAR, FAR, ZERO_COPY, BY_RING, BY_TREE, BY_MASTER, SINGLE_COPY, BY_CHAIN, ACROSS
    BY_BIDIRECTIONAL_RING, BY_HALVING_DOUBLING, BY_DOUBLE_TREE, NPATHS


# The memory of one shared array as this process maps it: `stride` bytes for each rank, in rank order. The user knows
# this rank's part by the address `own`, which is a second mapping of the same memory if the array was adopted.
cdef struct Block:
    uint64_t id
    uintptr_t begin
    uintptr_t own
    size_t stride


cdef struct Stats:
    uint64_t calls, bytes_sent, bytes_over_wire, steps, messages_in_place
    uint64_t[NPATHS] path      # by enum Path
    int last_path


cdef enum:
    TRIAL_KINDS = 10      # kinds of calls whose path may be measured, from ALL_REDUCE to ALL_TO_ALL


cdef struct Call


# The state of one communicator on one rank. It lies in private memory; header and lanes point into the segment.
cdef struct Group:
    # Local: among the ranks of this host. _core, _algorithms and Engine.rank count so, Comm.rank does not.
    int rank, size
    sr_header *header
    sr_lane *me
    sr_lane **lane             # by rank
    unsigned char **staging    # by rank
    const sr_kernels *kernels
    uint64_t seq               # of the last call that has begun
    uint64_t first_user_seq    # of the first call that is the user's and not the engine's own
    sr_record *recorded        # record of the last call that has begun
    uint64_t verified          # up to this call, the call lines of all ranks have arrived and agree with this rank's
    uint64_t position          # begin of the next slot, see layout.h
    uint64_t credit            # up to this position all ranks, this one included, have copied, as last loaded
    uint64_t pings             # round trips so far, the same on all ranks
    uint64_t pinged_ns         # time of rank 0's last measurement
    uint64_t round_trip_ns     # result of rank 0's last measurement
    uint32_t far, next_far     # the distance that holds now; as measured, for rank 0 to announce
    uint32_t announced_far     # the distance that rank 0 announced in the current call
    size_t staging_nbytes      # of one rank's staging buffer
    size_t lap_nbytes          # from a position to the position one lap later with the same offset
    int ndead                  # number of ranks that have died, as this rank last counted
    bint oversubscribed        # there are more ranks than CPUs; all ranks have agreed on this value
    int pauses, brief_pauses, brief_yields
    uint64_t yield_ns, sleep_ns, poll_ns, ping_interval_ns
    uint64_t next_poll_ns, signal_ns   # times of the next poll of the peers, and of Python's signals
    uint64_t polled_ns         # time of the last poll of a call's wait
    bint checks_liveness       # the kernel does not watch all ranks, and this rank can look for the others' threads
    uint64_t stall_ns          # a longer wait is warned of (0: never)
    uint64_t warning_due_ns    # when the progress thread next checks whether a warning is due; see Stalls
    size_t zero_copy_nbytes    # this rank offers its shared arrays for zero-copy from this size on
    bint single_copy           # every rank can read the private memory of every other rank
    const void *read_at        # the array of this rank that was last offered for a single copy, ...
    uint64_t read_ns           # ... and the time of that call
    PathTrials[2][TRIAL_KINDS][SIZE_CLASSES] path_trials   # first of private arrays, then of shared ones
    const void **source        # scratch by rank, valid within one step
    void **target              # scratch by rank, valid within one step
    Block *block               # sorted by own
    int nblocks
    sr_flag blocks_lock        # 1: a thread replaces the table of blocks, or copies a message out of one
    sr_tuning[2] tunings       # near, far
    sr_tuning *tuning          # the one that holds now
    Stats stats
    void *inter                # InterNode of _internode/context.pxd; NULL: all ranks are on this host
    void (*choose_algorithm)(Group *, Call *) noexcept nogil   # for ranks of one host, or of several
    void *trace                # Trace of trace.pxd; NULL: calls are not traced
    void *p2p_trace            # Trace of the messages; NULL: messages are not traced


# The progress of one stage of a pipeline.
cdef struct Cursor:
    uint64_t position   # begin of its next slot, or a lower bound of it
    size_t offset       # bytes of the message that are done


# The items of an array that is only moved and has no dtype of the table. Its `count` counts bytes.
cdef struct Items:
    uint32_t signature   # differs if the dtypes differ; the same in every process
    uint32_t nbytes      # of one item
    char[SR_ITEM_NAME_NBYTES] name


# In a vector call: the data that go to one rank, or come from it.
cdef struct Piece:
    unsigned char *data
    size_t nbytes
    const unsigned char *there   # with zero-copy the giver's array, as this rank maps it ...
    bint there_is_private        # ... or, if True, as the giver maps it


cdef struct Awaited:
    const sr_flag *flag
    uint64_t target
    int rank


# One collective in progress. `enter` begins it, `step` advances it; neither waits.
cdef struct Call:
    void (*enter)(Group *, Call *) noexcept nogil
    int (*step)(Group *, Call *) noexcept nogil
    void (*start_across)(Group *, Call *) noexcept nogil   # over several hosts, see step_internode
    int (*stage_across)(Group *, Call *) noexcept nogil
    # ---- the arguments; the first eight bytes are also those of a flight record ----
    uint8_t kind, dtype, op, algorithm, order
    uint8_t named                    # the kind of the call of which this one is a step; 0: of none
    uint8_t wire                     # wire format between hosts, see kernels.h
    uint8_t unused
    int root
    size_t count, itemsize, nbytes   # of the piece that one rank takes from another; vector calls: of the largest one
    size_t x_nbytes, out_nbytes      # of the whole arrays, if this rank uses them
    const Items *items               # of OPAQUE items; NULL: the dtype is in the table
    uint64_t fingerprint
    uint64_t timeout_ns
    const Call *recorded_as          # the flight record shows it in place of a local step or an election
    uint16_t priority                # 0: none; else the priority + MOST_PRIORITY + 1
    uint16_t hosts_in_group          # number of hosts that first reduce among themselves; 0: there are no groups
    float *residual                  # error feedback: the rounding errors of earlier calls; or NULL
    # ---- the arrays ----
    const unsigned char *x
    unsigned char *out
    bint out_is_new                  # allocated for this call; the pages of a large one have not been touched
    uint64_t x_block, out_block
    uint64_t x_offset, out_offset
    const Piece *given               # vector calls: by rank, the data that it takes from this one; NULL: equal pieces
    const Piece *taken               # vector calls: by rank, the data that this one takes from it
    # ---- the progress ----
    uint64_t seq
    int64_t number             # among the user's calls
    uint64_t mismatch_seq      # of the call in which the ranks' calls differ, if they do
    uint64_t deadline_ns       # 0: the call has not waited long yet
    uint64_t wait_begin_ns     # begin of the current long wait
    bint interrupted           # that wait was interrupted only to check Python's signals
    Awaited awaited
    int peer, giver            # next rank whose line is checked: among all ranks, among those that give this one data
    int fold_peer, copy_peer   # next rank whose counter is checked
    bint lines_seen            # the lines that this rank needs have arrived and agree
    bint announced             # a staged call: this rank's line is published
    bint in_place              # as far as known, nothing is staged: arrays are read in place
    bint single_copy           # some of them are private and read through the kernel
    int error                  # errno: UNREADABLE, of the read; LOST, of the connection, or 0 if it was closed
    bint ping                  # the distance is being measured
    bint has_finished          # in place: this rank is done, and waits until the others are
    int round_trips            # of the measurement so far
    PathTrials *trials         # the path of this call is measured; else NULL
    bint runs_trials           # this rank chooses the path of such calls
    uint64_t begin_ns          # if this rank times the call: its begin, plus the wait for call lines; else 0
    uint64_t gap_ns            # ... and the time since the last such call, if that was timed
    uint64_t lines_awaited_ns  # begin of that wait; 0: none
    size_t chunk_nbytes        # a multiple of itemsize
    bint swaps_places          # pairs of ranks swap places in their staging buffers, see placement
    bint backwards             # chunks go from the last to the first
    size_t window_nbytes       # the part of the staging buffers that a long message uses: all, or what stays cached
    Cursor stage, fold, down, copy   # one for each stage of a pipeline; down: results go down a tree


# Return whether a sequence number or position is before another one. Both wrap.
cdef inline bint is_before(uint64_t one, uint64_t other) noexcept nogil:
    return <int64_t> (one - other) < 0


# The first position. It is near the first sequence number, so that a test near the wrap of one is near the wrap of
# both. It lies in a lap in which each rank uses its own staging buffer, since at first only that one is sure to have
# pages.
cdef inline uint64_t first_position(const sr_header *header) noexcept nogil:
    return header.first_seq & ~<uint64_t> (2 * sr_layout_lap_nbytes(header.staging_nbytes) - 1)


# Set the distance from here on. Thresholds that are used before a call begins have equal values in both tables.
cdef inline void set_far(Group *g, bint far) noexcept nogil:
    g.far = far
    g.tuning = &g.tunings[far]


cdef inline void count_path(Group *g, int path) noexcept nogil:
    g.stats.path[path] += 1
    g.stats.last_path = path


cdef inline uint8_t name_of(const Call *c) noexcept nogil:
    return c.named if c.named else c.kind


# One step of a hash of words. It is the same in every process.
cdef inline uint64_t mixed(uint64_t word) noexcept nogil:
    word *= <uint64_t> 0x9E3779B97F4A7C15
    return word ^ word >> 29


# A hash of 32 bits. The fingerprint combines other fields with the same bits, so close counts must differ in many bits.
cdef inline uint64_t mixed_count(uint64_t count) noexcept nogil:
    return count * <uint64_t> 0x9E3779B97F4A7C15 >> 32


cdef inline uint64_t fingerprint_of(const Call *c) noexcept nogil:
    cdef uint64_t what = name_of(c) | <uint64_t> c.dtype << 6 | <uint64_t> c.op << 12
    what |= <uint64_t> c.algorithm << 16 | <uint64_t> c.order << 19
    what |= <uint64_t> c.root << 20 | mixed_count(c.count) << 32
    what ^= <uint64_t> c.wire << 61 ^ <uint64_t> c.hosts_in_group << 45 ^ <uint64_t> c.priority << 32
    if c.items != NULL:
        what ^= <uint64_t> c.items.signature << 45   # such a call has no wire format and no groups
    return what   # flight_recorder.pyx decodes it for error messages


# The address at which this process maps rank's part of a shared block; NULL if the descriptor is invalid.
cdef inline unsigned char *shared_address(Group *g, uint64_t block, int rank, uint64_t offset,
                                          size_t nbytes) noexcept nogil:
    cdef int i
    for i in range(g.nblocks):
        if g.block[i].id == block:
            if nbytes > g.block[i].stride or offset > g.block[i].stride - nbytes:
                return NULL
            return <unsigned char *> (g.block[i].begin + <uintptr_t> rank * g.block[i].stride + offset)
    return NULL


# ---- properties of a kind ------------------------------------------------------------------------------------

# A *piece* is the data that one rank takes from one other rank.

# True if each rank takes a different piece of x.
cdef inline bint is_split(const Call *c) noexcept nogil:
    return c.kind == SCATTER or c.kind == ALL_TO_ALL or c.kind == REDUCE_SCATTER


# True if the data from rank i become the i-th piece of out.
cdef inline bint is_joined(const Call *c) noexcept nogil:
    return c.kind == ALL_GATHER or c.kind == GATHER or c.kind == ALL_TO_ALL


# True if a piece of giver's x goes to taker, in a gather, scatter, all_gather or all_to_all; also a rank's own.
cdef inline bint goes_from_to(const Call *c, int giver, int taker) noexcept nogil:
    if c.kind == SCATTER:
        return giver == c.root
    return c.kind != GATHER or taker == c.root


# The begin of rank's piece in an x that is split evenly, in bytes.
cdef inline size_t piece_of_x(const Call *c, int rank) noexcept nogil:
    return <size_t> rank * c.nbytes if is_split(c) else 0


# Return the number of bytes of a piece of nbytes that lie in [offset, offset + most).
cdef inline size_t bytes_within(size_t nbytes, size_t offset, size_t most) noexcept nogil:
    return 0 if nbytes <= offset else min(nbytes - offset, most)


# True if two ranges of memory have common bytes.
cdef inline bint bytes_overlap(const void *a, size_t a_nbytes, const void *b, size_t b_nbytes) noexcept nogil:
    return (a_nbytes > 0 and b_nbytes > 0
            and <uintptr_t> a < <uintptr_t> b + b_nbytes and <uintptr_t> b < <uintptr_t> a + a_nbytes)


# This rank's piece for `rank`.
cdef inline const unsigned char *piece_for(const Call *c, int rank) noexcept nogil:
    return c.x + piece_of_x(c, rank) if c.given == NULL else c.given[rank].data


# The place of rank's piece in this rank's result.
cdef inline unsigned char *piece_from(const Call *c, int rank) noexcept nogil:
    if c.taken != NULL:
        return c.taken[rank].data
    return c.out + (<size_t> rank * c.nbytes if is_joined(c) else 0)


# True for all_reduce and reduce, in which each rank may reduce one slice and store its result for other ranks.
cdef inline bint is_sliced(const Call *c) noexcept nogil:
    return c.kind == ALL_REDUCE or c.kind == REDUCE


cdef inline bint is_scan(const Call *c) noexcept nogil:
    return c.kind == SCAN or c.kind == EXSCAN


cdef inline bint is_folded(const Call *c) noexcept nogil:
    return is_sliced(c) or c.kind == REDUCE_SCATTER or is_scan(c)


# True if the op leaves single values unchanged: logical ops do not, and a bool of 2 becomes 1.
cdef inline bint keeps_single(const Call *c) noexcept nogil:
    return c.op < SR_LAND and c.dtype != SR_BOOL


# True if a rank takes exactly the bits that another rank has. That includes most exscans of two ranks.
cdef inline bint is_moved(const Group *g, const Call *c) noexcept nogil:
    return not is_folded(c) or (c.kind == EXSCAN and g.size == 2 and keeps_single(c))


# True if other ranks take data of rank's x.
cdef inline bint gives(const Group *g, const Call *c, int rank) noexcept nogil:
    if c.kind == BROADCAST or c.kind == SCATTER:
        return rank == c.root
    if is_scan(c):
        return rank != g.size - 1
    return (c.kind != GATHER and c.kind != REDUCE) or rank != c.root


# True if other ranks read rank's x where it is, in a call in place. In an all_reduce or reduce they read slices of it.
cdef inline bint gives_in_place(const Group *g, const Call *c, int rank) noexcept nogil:
    return is_sliced(c) or gives(g, c, rank)


# True if `rank` takes data of other ranks; also for rank 0 of a scan, which only copies its own x.
cdef inline bint takes(const Call *c, int rank) noexcept nogil:
    if c.kind == BROADCAST or c.kind == SCATTER:
        return rank != c.root
    if c.kind == EXSCAN:
        return rank != 0
    return (c.kind != GATHER and c.kind != REDUCE) or rank == c.root


# True if this rank writes to no part of x that other ranks may be reading.
cdef inline bint may_be_read_in_place(const Group *g, const Call *c) noexcept nogil:
    return c.out != c.x or not takes(c, g.rank) or not (is_scan(c) or c.kind == ALL_TO_ALL)


# ---- waiting -------------------------------------------------------------------------------------------------

cdef enum:
    SIGNAL_INTERVAL_NS = 5000000   # between two checks of Python's signals during a wait


cdef inline int blocked_on(Call *c, const sr_flag *flag, uint64_t target, int rank) noexcept nogil:
    c.awaited.flag = flag
    c.awaited.target = target
    c.awaited.rank = rank
    return BLOCKED


cdef inline sr_flag *counter(Group *g, int rank, int which) noexcept nogil:
    return &g.lane[rank].progress[which].value


# Publish a counter of this rank. Pairs with sr_flag_reached on it, and with the sleeps of a blocked call.
cdef inline void publish(Group *g, int which, uint64_t value) noexcept nogil:
    sr_flag_publish(&g.me.progress[which].value, value, &g.me.event)


# True if `rank` last ran on the CPU of this rank: while this rank pauses, that one cannot run.
cdef inline bint runs_here(Group *g, int rank) noexcept nogil:
    return g.oversubscribed and sr_liveness_cpu(&g.lane[rank].liveness) == sr_liveness_set_cpu(&g.me.liveness)


# Block on the counter of `first` or of a rank after it that has not reached the target: if possible of a rank that runs
# on this CPU.
cdef inline int blocked_on_counter(Group *g, Call *c, int which, uint64_t target, int first) noexcept nogil:
    cdef int rank
    if g.oversubscribed:
        for rank in range(first, g.size):
            if rank != g.rank and runs_here(g, rank) and not sr_flag_reached(counter(g, rank, which), target):
                return blocked_on(c, counter(g, rank, which), target, rank)
    return blocked_on(c, counter(g, first, which), target, first)


# True if the counters of all other ranks have reached the target. *peer: those of all ranks before it have.
cdef inline bint all_reached(Group *g, int which, uint64_t target, int *peer) noexcept nogil:
    while peer[0] < g.size:
        if peer[0] != g.rank and not sr_flag_reached(counter(g, peer[0], which), target):
            return False
        peer[0] += 1
    return True


# Set the abort word unless it is set, and wake all ranks that sleep.
cdef inline void set_abort(sr_header *header, int cause, int culprit, int reporter,
                           const sr_report *report) noexcept nogil:
    cdef uint32_t rank
    if sr_flag_load(&header.abort) == SR_NO_ABORT:
        sr_layout_lane(header, reporter).report = report[0]
        sr_abort_set(header, sr_abort_pack(cause, culprit, reporter))
    for rank in range(header.nranks):
        sr_event_signal(&sr_layout_lane(header, rank).event)
        sr_event_signal(&sr_layout_lane(header, rank).p2p_event)


# Mark the ranks that have died and that the kernel does not watch.
cdef inline void check_liveness(Group *g) noexcept nogil:
    cdef int rank
    if g.checks_liveness:
        for rank in range(g.size):
            if rank != g.rank:
                sr_liveness_check(&g.lane[rank].liveness)


# Return the status of a rank of this host: PROGRESSED if it lives, DEAD, or LEFT.
cdef inline int peer_status(const sr_liveness *liveness) noexcept nogil:
    if sr_liveness_died(liveness):
        return DEAD
    return LEFT if sr_liveness_state(liveness) == SR_CLOSED else PROGRESSED


# ---- the call line -------------------------------------------------------------------------------------------

cdef enum:
    MOST_AHEAD = SR_LINES // 2 - 1   # calls that may be unverified when a call ends: the next line can be published
    REPEATS = 16                     # a call that was made so often is expected to be repeated
    MANY_RANKS = 16                  # so many ranks that share CPUs await late ones in an order of their own


cdef inline sr_call_line *line_of(Group *g, int rank, uint64_t seq) noexcept nogil:
    return &g.lane[rank].line[seq & (SR_LINES - 1)]


cdef inline void record_call(Group *g, Call *c) noexcept nogil:
    cdef sr_record *record = &g.me.record[c.seq & (SR_RECORDS - 1)]
    cdef const Call *called = c
    if c.recorded_as != NULL:
        called = c.recorded_as
    g.recorded = record
    record.seq = c.seq
    record.count = called.count
    record.number = called.number
    memcpy(&record.kind, &called.kind, 8)   # one word: see Call
    record.root = <uint32_t> called.root
    record.hosts_in_group = called.hosts_in_group
    record.priority = called.priority
    if called.items != NULL:
        record.item_nbytes = called.items.nbytes
        memcpy(record.item_name, called.items.name, SR_ITEM_NAME_NBYTES)
    record.invalid = False
    record.outcome = SR_UNDER_WAY


# Forget what an earlier call in this structure has waited for.
cdef inline void reset_waits(Call *c) noexcept nogil:
    c.deadline_ns = 0
    c.peer = 0
    c.lines_seen = c.interrupted = False


cdef inline void begin_call(Group *g, Call *c) noexcept nogil:
    g.seq += 1
    c.seq = c.mismatch_seq = g.seq
    c.number = <int64_t> (g.seq - g.first_user_seq) + 1
    c.giver = 0
    c.backwards = c.swaps_places = False
    reset_waits(c)
    record_call(g, c)


# Publish this rank's line of the call. Its payload has been written before. Pairs with check_line.
cdef inline void publish_line(Group *g, Call *c) noexcept nogil:
    cdef sr_call_line *line = line_of(g, g.rank, c.seq)
    line.fingerprint = c.fingerprint
    sr_flag_publish(&line.seq, c.seq, &g.me.event)


# True if another rank has not published its line of call seq; False for this rank.
cdef inline bint is_late(Group *g, int rank, uint64_t seq) noexcept nogil:
    return rank != g.rank and not sr_flag_reached(&line_of(g, rank, seq).seq, seq)


# As blocked_on_counter, for the line of call seq of c.peer or of a rank after it. From MANY_RANKS ranks on, a rank
# draws the late rank that it awaits: on average half of the late ranks enter the call before that one. A rank that
# always awaited the first late rank would sleep once for each late rank.
cdef inline int blocked_on_line(Group *g, Call *c, uint64_t seq) noexcept nogil:
    cdef int rank, nlate = 0, awaited = c.peer
    cdef bint runs, some_run = False
    cdef uint64_t draw = seq + <uint64_t> g.rank
    for rank in range(c.peer, g.size if g.oversubscribed else 0):
        if is_late(g, rank, seq):
            runs = runs_here(g, rank)
            if runs and not some_run:   # they need this CPU
                some_run, nlate = True, 0
            if runs == some_run:
                nlate += 1
                draw = draw * 6364136223846793005ULL + 1442695040888963407ULL   # Knuth's linear congruential generator
                if nlate == 1 or (g.size >= MANY_RANKS and (draw >> 33) % <uint64_t> nlate == 0):
                    awaited = rank
    return blocked_on(c, &line_of(g, awaited, seq).seq, seq, awaited)


# Return DONE if rank's line for call seq has arrived and has this fingerprint. Pairs with publish_line.
cdef inline int check_line(Group *g, Call *c, int rank, uint64_t seq, uint64_t fingerprint) noexcept nogil:
    cdef sr_call_line *line = line_of(g, rank, seq)
    if not sr_flag_reached(&line.seq, seq):
        return blocked_on(c, &line.seq, seq, rank)
    if line.fingerprint != fingerprint:
        c.awaited.rank = rank
        c.mismatch_seq = seq
        return MISMATCHED
    return DONE


# Return DONE once the lines of all ranks for call g.verified + 1 have arrived and agree.
cdef inline int verify_next(Group *g, Call *c, uint64_t fingerprint) noexcept nogil:
    cdef uint64_t seq = g.verified + 1
    cdef int status
    while c.peer < g.size:
        if c.peer != g.rank:
            status = check_line(g, c, c.peer, seq, fingerprint)
            if status != DONE:
                return blocked_on_line(g, c, seq) if status == BLOCKED else status
        c.peer += 1
    c.peer = 0
    g.verified = seq
    return DONE


# As verify_next, for all calls up to seq. This rank has published their lines.
cdef inline int verify(Group *g, Call *c, uint64_t seq) noexcept nogil:
    cdef int status
    while is_before(g.verified, seq):
        status = verify_next(g, c, line_of(g, g.rank, g.verified + 1).fingerprint)
        if status != DONE:
            return status
    return DONE


# Return DONE once the lines of all ranks for this call have arrived and agree.
cdef inline int await_lines(Group *g, Call *c) noexcept nogil:
    cdef int status = DONE
    if g.verified != c.seq - 1:
        status = verify(g, c, c.seq - 1)
    if status == DONE and g.verified != c.seq:
        status = verify_next(g, c, c.fingerprint)
    c.lines_seen = status == DONE
    return status


# True if this rank may go ahead: ranks share CPUs, and this call repeats the last ones. It then does not wait for ranks
# that give it no data, and verifies their lines some calls later. The lines of any other call are verified at once.
cdef inline bint repeats_last(Group *g, Call *c) noexcept nogil:
    return (g.oversubscribed and c.fingerprint == line_of(g, g.rank, c.seq - 1).fingerprint
            and c.fingerprint == line_of(g, g.rank, c.seq - REPEATS).fingerprint)


# Set lines_seen of a call that goes ahead: the lines that it needs have arrived. If too many calls are unverified,
# verify all of them before.
cdef inline int limit_unverified(Group *g, Call *c) noexcept nogil:
    cdef int status = DONE
    if is_before(g.verified + MOST_AHEAD, c.seq):
        status = verify(g, c, c.seq)   # all of them, so that the next calls need not wait
    c.lines_seen = status == DONE
    return status
