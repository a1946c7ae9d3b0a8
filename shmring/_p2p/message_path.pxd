# The path of a message to a rank of this host: through the ring, which copies twice, or in place, copied once. Two
# copies are not always slower: memory that the sender has just written comes out of its caches more slowly than a ring,
# and is slow to write again once another core has read it. The sender chooses by trials (path_trials.pxd): it alone
# knows how long it takes to write the next message.
#
# On some processors the sender writes the ring by streaming stores, which are faster between far cores, and slower
# between near ones.

from libc.stdint cimport uint32_t, uint64_t

from .._core.group cimport Group
from .._core.kernels cimport SR_COPY_IN_TURN, SR_COPY_ORDINARY, SR_COPY_STREAMING
from .._core.path_trials cimport (
    LONG_CALL_NBYTES, MEAN_CALL, MEAN_ON_SHARED_CPUS, READ_IN_PLACE, THROUGH_SLOTS, WINDOW_CALLS, PathTrials,
    init_trials, is_timed, note_call, note_distance, size_class,
)
from .._core.placement cimport reads_in_turn
from .._core.segment cimport SR_PRIVATE, sr_now_ns
from .._core.spsc_ring cimport sr_offer_state, sr_ring_end, sr_ring_load_taken, sr_ring_set_piece
from .messages cimport Matching, Message, Peer


cdef enum:
    # The gap before a message counts at most so many times the time of the send: a send into the ring ends long before
    # the receiver answers (bench/peers/matrix.py, ping_pong of 4 KiB).
    MOST_SEND_GAPS = 32
    # A load of a word that another core has stored takes 10 to 40 ns between near cores of an EPYC, and 100 to 130 ns
    # between far ones.
    FAR_LOAD_NS = 65
    SLOWEST_CLOCK_NS = 100   # with a slower clock the time of a load says nothing
    MOST_FAR_LOADS = 12


# ---- the distance to the receiver ------------------------------------------------------------------------------------

# The first messages are sent as the calls so far have measured the distance.
cdef inline void set_first_distance(const Group *g, Peer *p) noexcept nogil:
    p.far = g.far
    p.far_loads = MOST_FAR_LOADS if g.far else 0
    p.distance_at = p.out.position


# True if the receiver's core is far away.
cdef inline bint is_far(const Group *g, const Peer *p) noexcept nogil:
    return g.far if g.header.forced_path else p.far


# Note the time of a load of a word that the receiver has just stored. clock_ns: how long a reading of the clock takes.
# One load counts little: interrupts and copies of long arrays make some of them slow.
cdef inline void note_load(Peer *p, uint64_t took_ns, uint64_t clock_ns) noexcept nogil:
    if clock_ns > SLOWEST_CLOCK_NS:
        return
    if took_ns > FAR_LOAD_NS + clock_ns:
        p.far_loads = min(p.far_loads + 1, <int> MOST_FAR_LOADS)
        p.far = p.far or p.far_loads == MOST_FAR_LOADS
    else:
        p.far_loads = max(p.far_loads - 1, 0)
        p.far = p.far and p.far_loads > 0


# Measure the distance again, since virtual CPUs move: time the load of a word that the receiver stores whenever it has
# taken a quarter of the ring. The first two readings of the clock tell how long a reading takes.
cdef inline void measure_distance(const Group *g, Peer *p, const Message *message) noexcept nogil:
    cdef uint64_t passed = p.out.position - p.distance_at
    cdef uint64_t before_ns, begin_ns
    if g.header.forced_path or passed < p.out.nbytes // 4:
        return
    if message.nbytes < min(g.tuning.far_stream_nbytes, <uint64_t> LONG_CALL_NBYTES):
        return
    if message.out.offset == 0 and passed > p.out.nbytes:   # since then the word may have left all caches
        p.distance_at = p.out.position
        return
    before_ns = sr_now_ns()
    begin_ns = sr_now_ns()
    if not sr_ring_load_taken(&p.out):   # the receiver has not stored it, so it may be in this core's cache
        return
    note_load(p, sr_now_ns() - begin_ns, begin_ns - before_ns)
    p.distance_at = p.out.position


# Return the state of a message's offer. A long message's state tells the distance, too, when the receiver has changed
# it.
cdef inline int load_offer_state(Peer *p, Message *message) noexcept nogil:
    cdef uint64_t before_ns, begin_ns
    cdef int state
    if message.nbytes < LONG_CALL_NBYTES:
        return sr_offer_state(message.offer)
    before_ns = sr_now_ns()
    begin_ns = sr_now_ns()
    state = sr_offer_state(message.offer)
    if state != message.offer_state:
        note_load(p, sr_now_ns() - begin_ns, begin_ns - before_ns)
        message.offer_state = state
    return state


# True if messages of this length are written into the ring by streaming stores, but for short pieces (sr_ring_copy).
cdef inline bint is_streamed(const Group *g, const Peer *p, size_t nbytes) noexcept nogil:
    return nbytes >= g.tuning.far_stream_nbytes and is_far(g, p)


# ---- pieces ----------------------------------------------------------------------------------------------------------

cdef enum:   # bench/peers/matrix.py, ping_pong and stream
    LEAST_PIECE_NBYTES = 4 << 10
    USUAL_PIECE_NBYTES = 16 << 10
    LONG_PIECE_NBYTES = 32 << 10
    LONG_NBYTES = 256 << 10


# True if a message of nbytes passes through the ring in long pieces.
cdef inline bint has_long_pieces(const sr_ring_end *ring, size_t nbytes) noexcept nogil:
    return nbytes >= LONG_NBYTES and ring.nbytes >= 8 * LONG_PIECE_NBYTES


# The length of the pieces of a message in the ring: the receiver copies one while the sender copies the next one.
cdef inline size_t piece_nbytes_of(const Peer *p, size_t nbytes) noexcept nogil:
    if has_long_pieces(&p.out, nbytes):
        return LONG_PIECE_NBYTES
    return min(max(nbytes // 4 // LEAST_PIECE_NBYTES, <size_t> 1) * LEAST_PIECE_NBYTES, <size_t> USUAL_PIECE_NBYTES)


# ---- the copy out of the ring ----------------------------------------------------------------------------------------

cdef enum:
    SHORT_RECEIVES = 16   # no receive is streamed that is shorter than one in so many of stream_out_nbytes
    MOST_IN_TURN_NBYTES = 1 << 20   # bench/peers/matrix.py, ping_pong and stream


# True if the caches do not hold the message and the receives that are posted beside it. Streaming stores then save a
# load of each line. The caller may need a short message at once, whatever else is posted.
cdef inline bint is_streamed_out(const Matching *m, const Message *message, size_t nbytes) noexcept nogil:
    cdef uint64_t least = m.g.tuning.stream_out_nbytes
    return nbytes >= least // SHORT_RECEIVES and nbytes + max(message.beside_nbytes, m.posted_nbytes) >= least


# The way in which the receiver copies a message out of the ring. Between far cores it copies in turn (kernels.h), as
# from slots, unless the pieces are short or the ring was written by streaming stores: with the pieces of 32 KiB this
# saves a twentieth of the time for 256 and 512 KiB there and back (bench/peers/matrix.py, ping_pong written).
cdef inline uint32_t way_out(const Matching *m, const Peer *p, const Message *message, size_t nbytes) noexcept nogil:
    if p.channel != NULL:
        return SR_COPY_ORDINARY
    if is_streamed_out(m, message, nbytes):
        return SR_COPY_STREAMING
    if reads_in_turn(m.g, nbytes) and has_long_pieces(&p.inward, nbytes) and nbytes <= MOST_IN_TURN_NBYTES:
        return SR_COPY_IN_TURN
    return SR_COPY_ORDINARY


# ---- the path --------------------------------------------------------------------------------------------------------

# Return the trials for messages of a length, in shared or private memory.
cdef inline PathTrials *trials_of(Peer *p, const Message *message) noexcept nogil:
    return &p.trials[message.block != SR_PRIVATE][size_class(message.nbytes)]


# The path of the first messages of a class: private ones go through the ring, shared ones are read in place. If the
# user has fixed the path of calls that move data (SHMRING_CHUNK, SHMRING_PATH or SHMRING_SINGLE_COPY), it is the path
# of all messages.
cdef inline int first_path(const Group *g, const Message *message) noexcept nogil:
    cdef bint is_forced = not g.tuning.single_copy_measured and message.nbytes >= g.tuning.single_copy_nbytes
    if message.can_be_offered and (message.block != SR_PRIVATE or is_forced):
        return READ_IN_PLACE
    return THROUGH_SLOTS


# Begin the send at the head of the peer's queue: choose its path.
cdef inline void begin_send(Matching *m, Peer *p, Message *message) noexcept nogil:
    cdef PathTrials *trials
    message.has_begun = True
    message.path = first_path(m.g, message)
    measure_distance(m.g, p, message)
    sr_ring_set_piece(&p.out, piece_nbytes_of(p, message.nbytes))
    p.out.way = SR_COPY_STREAMING if is_streamed(m.g, p, message.nbytes) else SR_COPY_ORDINARY
    if not message.can_be_offered or not m.g.tuning.single_copy_measured:
        return
    trials = trials_of(p, message)
    if not trials.used:
        init_trials(trials, message.path, is_far(m.g, p), message.nbytes, WINDOW_CALLS, MOST_SEND_GAPS, m.ring_nbytes)
    if not m.g.oversubscribed:   # else the distance changes with every switch between ranks
        note_distance(trials, message.nbytes, is_far(m.g, p))
    message.trials = trials
    message.path = trials.path
    if is_timed(trials):
        message.begin_ns = sr_now_ns()
        message.gap_ns = message.begin_ns - trials.ended_ns


# Note the time of a message that has been sent.
cdef inline void note_send(Matching *m, Message *message) noexcept nogil:
    note_call(message.trials, MEAN_ON_SHARED_CPUS if m.g.oversubscribed else MEAN_CALL, message.path, message.nbytes,
              message.begin_ns, message.gap_ns)
