# Point-to-point messages of one communicator on one rank, as structures. Ranks are those of the
# world; `lane` says which of the host's own a rank is.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from .._core.group cimport Group, sr_flag
from .._core.spsc_ring cimport sr_incoming, sr_outgoing, sr_ring_end
from .._engine.progress cimport Pollable
from .._transport.channel cimport sr_channels, sr_channel


cdef enum:
    ANY = -1


cdef enum State:
    POSTED      # nothing of it has moved yet
    MOVING
    COMPLETE


cdef enum Failure:
    NO_FAILURE
    TOO_LONG      # the message is longer than the memory it was to go to
    OTHER_ITEMS   # sender and receiver disagree on what the items are


cdef enum Outcome:    # what a step comes to, beside PROGRESSED and BLOCKED of Status
    NEEDS_ROOM = 64   # the next message of matching.unmatched_source is unexpected: it has to be copied into new memory
    DAMAGED           # matching.unmatched_source's ring holds what no sender writes


# A send, a receive or a probe that somebody has asked for. Linked into Matching until it is complete.
cdef struct Message:
    Message *next
    void *owner              # told when it is complete: it is then in matching.completed
    bint is_send, is_probe
    int peer                 # destination; source, or ANY
    int64_t tag              # or ANY
    uint64_t kind            # what the items are: equal at both ends, 56 bits
    unsigned char *data
    size_t nbytes            # that are sent, or that there is room for
    State state
    Failure failure
    int source               # what has come: of a receive or a probe
    uint32_t came_tag
    uint64_t came_kind
    size_t came_nbytes
    sr_outgoing out          # of a send


# A message in private memory, until somebody asks for it.
cdef struct UnexpectedMessage:
    UnexpectedMessage *next
    int source
    uint32_t tag
    uint64_t kind
    size_t nbytes
    bint whole               # all of it has come
    Message *wanted_by       # NULL: nobody yet
    unsigned char *data      # behind this structure


cdef enum Side:       # where what is posted comes from or goes to
    NEAR_SIDE = 1     # ranks of this host
    FAR_SIDE = 2      # ranks of others


cdef struct Peer:
    int lane                 # among the ranks of this host; -1: it is of another, and
    sr_channel *channel      # ... there is this connection to it in place of rings; else NULL
    sr_ring_end out          # to it; open once out_open
    sr_ring_end inward       # from it; open once it is among the sources
    bint out_open
    Message *first_send      # in order; only the first one moves
    Message *last_send
    bint receiving           # a message from it has been begun:
    sr_incoming incoming
    Message *receiver        # ... into this one's memory, or
    UnexpectedMessage *unexpected             # ... or is kept in; neither: it is passed over


# Touched only by who has taken `stepper`, once the thread that runs in the background knows of it.
cdef struct Matching:
    Pollable pollable            # first: the thread knows Matching by it
    sr_flag stepper
    sr_flag resting          # the thread does not look any more: who leaves something for it has to rouse it
    uint64_t watched_until_ns   # the thread's own
    bint stuck               # there was no memory to keep an unexpected message: a call that waits reports it
    Group *g
    int rank, size           # of all hosts' ranks
    int *rank_of             # by lane
    sr_channels *channels    # the channels to ranks of other hosts; NULL: there are none
    uint64_t nheeded         # of those from whom something has come, how many are among the sources
    bint far_later           # nobody waits for other hosts: their channels are looked at now and then only
    uint32_t nsteps
    Peer *peer               # by rank
    size_t ring_nbytes
    uint64_t *seen           # by lane, a bit each: the marks in this rank's p2p_senders that have been heeded
    int *source              # ranks whose rings to this one are open
    int nsources
    int first_source         # where the next look round begins, so that none is starved
    int nsends               # that are linked
    Message *first_receive   # posted and not begun, in order; probes too
    Message *last_receive
    UnexpectedMessage *first_unexpected       # in the order in which they came
    UnexpectedMessage *last_unexpected
    Message *completed       # of those that have an owner
    int npending             # that have an owner and are not complete
    uint64_t begun_ns        # the call that is under way, while calls are traced
    int unmatched_source


cdef int step_messages(Matching *m) noexcept nogil
cdef void post_send(Matching *m, Message *message) noexcept nogil
cdef void post_receive(Matching *m, Message *message) noexcept nogil
cdef bint has_moved(const Matching *m, const Message *message) noexcept nogil
cdef void withdraw(Matching *m, Message *message) noexcept nogil
cdef void withdraw_all(Matching *m) noexcept nogil
cdef void keep_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil
cdef int awaited_sides(Matching *m) noexcept nogil
cdef bint deliver_to_self(Matching *m, Message *message) noexcept nogil
cdef void open_way(Matching *m, int receiver) noexcept nogil
cdef void publish_all_taken(Matching *m) noexcept nogil
