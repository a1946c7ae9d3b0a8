# Structures for point-to-point messages of one communicator on one rank. Ranks are those of all hosts; `lane` is the
# local rank of a rank of this host.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from .._core.group cimport Group
from .._core.path_trials cimport SIZE_CLASSES, PathTrials
from .._core.segment cimport SR_CACHE_LINE, sr_flag
from .._core.spsc_ring cimport sr_incoming, sr_offer, sr_outgoing, sr_receipts, sr_ring_end
from .._engine.queue cimport Pollable
from .._transport.channel cimport sr_channel, sr_channels


cdef enum:
    ANY = -1


# The highest bit of a frame's tag: the context of the message. Tags have the other 31 bits.
cdef enum:
    CONTEXT_SHIFT = 31


cdef enum State:
    POSTED      # no byte has moved yet
    MOVING
    UNMATCHED   # a send that wants a receipt: all its bytes are sent
    WITHDRAWN   # a receive that was cancelled
    COMPLETE


cdef enum Failure:
    NO_FAILURE
    TOO_LONG      # the message is longer than the receiver's memory
    OTHER_ITEMS   # sender and receiver disagree on the items


cdef enum Outcome:    # result of a step, besides PROGRESSED and BLOCKED of Status
    NEEDS_ROOM = 64   # the next message of matching.unmatched_source is unexpected and needs new memory
    DAMAGED           # the ring of matching.unmatched_source holds invalid data


# The progress of an offer. If the receiver comes late and the ring has room, or if it cannot read that memory, the
# message goes through the ring.
cdef enum Offering:
    NOT_OFFERED
    OFFERED
    STAGED      # was offered, and goes through the ring


# A posted send, receive or probe. It is linked into Matching until it is complete.
cdef struct Message:
    Message *next
    void *owner              # notified when complete; the message is then in matching.completed
    bint is_send, is_probe
    bint probes_others       # a receive that becomes a probe if the matching message has no room, or other items
    bint wants_receipt       # a send that is complete once the receiver has matched it with a receive
    uint32_t receipt         # ... and the number of its receipt, if it is not to the own rank; else 0
    int peer                 # destination; source, or ANY
    int64_t tag              # or ANY
    uint32_t context         # 0 or 1; messages of different contexts never match
    uint64_t kind            # 56 bits that describe the items and must be equal at both ends
    unsigned char *data
    size_t nbytes            # bytes to send, or room at `data`
    State state
    Failure failure
    int source               # of the message that arrived, for a receive or a probe
    uint32_t came_tag
    uint64_t came_kind
    size_t came_nbytes
    size_t beside_nbytes     # room of the receives that were posted when this one was
    bint takes               # a matched probe: it takes the message, so that no receive or probe finds it
    UnexpectedMessage *taken   # the message that it took; or that this receive gets, instead of any other
    sr_outgoing out          # only for a send, as all that follow
    bint can_be_offered      # the receiver may copy it from `address` in `block`
    uint64_t address
    uint64_t block
    bint has_begun           # its path is chosen:
    int path                 # THROUGH_SLOTS: through the ring; READ_IN_PLACE: the sender offers it, see offer.h
    PathTrials *trials       # of its class of messages; NULL: its path is not measured
    uint64_t begin_ns        # when it began; 0: it is not timed
    uint64_t gap_ns          # time since the message before it of its class
    Offering offering
    sr_offer *offer          # in the ring; valid while OFFERED
    int offer_state          # as last loaded
    uint64_t offered_ns


# A message that arrived before a receive was posted for it. It is kept in private memory.
cdef struct UnexpectedMessage:
    UnexpectedMessage *next
    int source
    uint32_t tag             # with the bit of its context
    uint64_t kind
    size_t nbytes
    uint32_t receipt         # the receipt that its sender wants; 0: none
    Message *sender          # ... or the send that waits for it, in a message to itself
    bint whole               # the whole message has arrived
    bint is_offered          # the frame at the head of the ring is an offer
    Message *wanted_by       # the matching receive; NULL: none yet
    bint is_taken            # a matched probe has taken it
    UnexpectedMessage **holder   # the pointer of the probe that took it, until it is received; else NULL
    UnexpectedMessage *next_dropped
    unsigned char *data      # follows this structure in memory


cdef enum:
    SHARED_TO_PRIVATE = 4   # shared arrays are offered from a quarter on: reading them needs no system call


# The progress of a message that a peer has offered.
cdef enum Reading:
    NO_OFFER
    TO_BE_READ
    UNDER_WAY
    VOID         # the sender has withdrawn the message, or has ended: it never becomes complete


cdef enum Peers:      # the ranks among which the source or destination of a message is
    LOCAL_PEERS = 1   # ranks of this host
    REMOTE_PEERS = 2  # ranks of other hosts


cdef struct Peer:
    int lane                 # local rank; -1: the peer is on another host, and
    sr_channel *channel      # ... this channel replaces the rings; NULL for a peer of this host
    sr_ring_end out          # to the peer; open unless out.ring is NULL
    bint far                 # the receiver's core is far away
    int far_loads            # number of slow loads, less the fast ones; 0 to MOST_FAR_LOADS
    uint64_t distance_at     # position of `out` when the distance was last measured
    sr_ring_end inward       # from the peer; open once the peer is among the sources
    Message *first_send      # in order; only the first one is being sent
    Message *last_send
    # By size class the paths of messages to the peer, first of private and then of shared arrays; allocated when `out`
    # is opened.
    PathTrials[SIZE_CLASSES] *trials
    sr_receipts *receipts    # of messages to the peer; NULL until a send wants one
    uint64_t *numbers_in_use   # a bit for each number of a receipt that a send waits for; NULL as above
    uint64_t nreceipts       # number of receipts when the unmatched sends were last checked
    Message *first_unmatched   # sends that wait for nothing but their receipt
    bint receiving           # a message from the peer is being received:
    sr_incoming incoming
    Reading reading
    uint64_t address         # ... if its sender has offered it
    uint64_t block
    Message *receiver        # the receive that gets the message, ...
    UnexpectedMessage *unexpected   # ... or the memory that keeps it; both NULL: the message is discarded
    bint discards            # ... since nothing refers any more to the matched probe that took it
    uint64_t probed_ns       # time of the last poll that checked whether the connection is cut


# Once the progress thread knows of this, only the holder of `stepper` may touch it.
cdef struct Matching:
    Pollable pollable            # must be first: the progress thread casts it to Matching
    sr_flag stepper
    sr_flag resting          # the progress thread has stopped polling: a caller that leaves work for it must wake it
    uint64_t watched_until_ns   # used by the progress thread only
    bint lacks_memory        # no memory for an unexpected message: a call that waits reports it
    Group *g
    int rank, size           # among the ranks of all hosts
    int *rank_of             # by lane
    sr_channels *channels    # channels to ranks of other hosts; NULL: there are none
    uint64_t nchannels_read  # number of channels from which data have arrived and that are among the sources
    bint polls_remote_rarely   # no call waits for other hosts: poll their channels rarely
    uint32_t nsteps
    Peer *peer               # by rank
    size_t ring_nbytes
    uint64_t *seen           # one bit for each lane: marks in this rank's p2p_senders that were processed
    int *source              # ranks whose rings to this one are open
    int nsources
    int first_source         # first source of the next step, so that no source is starved
    int nsends               # number of linked sends
    int nunmatched           # number of sends that wait for nothing but their receipt
    Message *first_receive   # posted and not begun, in order; includes probes
    Message *last_receive
    size_t posted_nbytes     # room of all of these
    UnexpectedMessage *first_unexpected       # in order of arrival
    UnexpectedMessage *last_unexpected
    Message *completed       # complete messages that have an owner
    int npending             # incomplete messages that have an owner
    int ndiscarded           # number of peers whose `discards` is set
    uint64_t begun_ns        # start of the current call, while calls are traced
    int unmatched_source


cdef struct Wait:
    uint64_t deadline_ns
    uint64_t polled_ns        # time of the last clock reading; 0: none yet
    uint64_t awake_until_ns   # the waiter yields before this time and sleeps after it
    uint64_t poll_ns          # time of the next poll of peers and the deadline
    uint64_t signal_ns
    int culprit               # rank whose end or lateness ends the wait


# True if messages have to advance while this rank makes no call.
cdef inline bint has_work(const Matching *m) noexcept nogil:
    return m.npending > 0 or m.ndiscarded > 0


# True if the message at hand matches a receive that then leaves the message where it is.
cdef inline bint is_probe_for(const Message *receive, uint64_t kind, size_t nbytes) noexcept nogil:
    return receive.is_probe or (receive.probes_others and (kind != receive.kind or nbytes > receive.nbytes))


cdef inline uint32_t frame_tag(const Message *message) noexcept nogil:
    return <uint32_t> message.tag | message.context << CONTEXT_SHIFT


# The length from which messages of shared arrays are offered. An offer takes a cache line itself.
cdef inline size_t least_offered(const Group *g) noexcept nogil:
    return max(g.tuning.single_copy_message_nbytes // SHARED_TO_PRIVATE, <size_t> SR_CACHE_LINE)
