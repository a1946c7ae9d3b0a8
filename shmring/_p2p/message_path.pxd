# The path of a message to a rank of this host: through the ring, which copies twice, or in place, copied once. Two
# copies are not always slower: memory that the sender has just written comes out of its caches more slowly than a ring,
# and is slow to write again once another core has read it. On some processors streaming stores into the ring are faster
# between far cores, and slower between near ones. The sender chooses by trials (path_trials.pxd): it alone knows how
# long it takes to write the next message.

from libc.stdint cimport uint64_t

from .._core.group cimport Group
from .._core.path_trials cimport (
    MEAN_CALL, MEAN_ON_SHARED_CPUS, WINDOW_CALLS, Choice, begin_choice, is_timed, next_path, note_call, size_class,
)
from .._core.segment cimport SR_PRIVATE, sr_now_ns
from .messages cimport (
    IN_PLACE, LEAST_MEASURED_NBYTES, STREAMED_THROUGH_RING, THROUGH_RING, Matching, Message, MessagePath, Peer,
)


cdef enum:
    # A send through the ring takes a small part of the time until the receiver has answered (bench/peers/matrix.py,
    # ping_pong of 4 KiB).
    SEND_GAPS = 32


# Return the choice for messages of a length, in shared or private memory.
cdef inline Choice *choice_of(Peer *p, const Message *message) noexcept nogil:
    cdef bint shared = message.has_place and message.block != SR_PRIVATE
    return &p.choice[shared][size_class(message.nbytes, LEAST_MEASURED_NBYTES)]


# True if streaming stores into the ring are used between far cores for a message of this length.
cdef inline bint may_stream(const Group *g, const Message *message) noexcept nogil:
    return message.nbytes >= max(g.tuning.far_stream_nbytes, <uint64_t> LEAST_MEASURED_NBYTES)


# The path through the ring for the distance of the cores that calls have measured last, or that the user has fixed.
cdef inline MessagePath ring_path(const Group *g, const Message *message) noexcept nogil:
    return STREAMED_THROUGH_RING if g.far and may_stream(g, message) else THROUGH_RING


# The path of the first messages of a class. If the user has fixed the path of calls that move data (SHMRING_CHUNK,
# SHMRING_PATH or SHMRING_SINGLE_COPY), it is the path of all messages.
cdef inline MessagePath first_path(const Group *g, const Message *message) noexcept nogil:
    if message.has_place and (g.tuning.single_copy_measured or message.block != SR_PRIVATE
                              or message.nbytes >= g.tuning.single_copy_nbytes):
        return IN_PLACE
    return ring_path(g, message)


# Begin a send that is the first to the peer: choose its path.
cdef inline void begin_send(Matching *m, Peer *p, Message *message) noexcept nogil:
    cdef Choice *choice
    message.has_begun = True
    message.path = first_path(m.g, message)
    if not m.g.tuning.single_copy_measured or not (message.has_place or may_stream(m.g, message)):
        return
    message.paths = (1 << THROUGH_RING | message.has_place << IN_PLACE
                     | may_stream(m.g, message) << STREAMED_THROUGH_RING)
    choice = choice_of(p, message)
    if not choice.used:
        begin_choice(choice, message.path, WINDOW_CALLS, SEND_GAPS)
    if not message.paths >> next_path(choice) & 1:   # its class has longer messages that may take another path
        return
    message.choice = choice
    message.path = <MessagePath> next_path(choice)
    if is_timed(choice, message.nbytes):
        message.begin_ns = sr_now_ns()
        message.gap_ns = message.begin_ns - choice.ended_ns


# Note the time of a message that has been sent.
cdef inline void note_send(Matching *m, Message *message) noexcept nogil:
    note_call(message.choice, MEAN_ON_SHARED_CPUS if m.g.oversubscribed else MEAN_CALL, message.paths, message.path,
              message.nbytes, message.begin_ns, message.gap_ns)
