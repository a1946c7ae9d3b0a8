# The path of a message to a rank of this host: through the ring, which copies twice, or in place, copied once. Two
# copies are not always slower: memory that the sender has just written comes out of its caches more slowly than a ring,
# and is slow to write again once another core has read it. On some processors streaming stores into the ring are faster
# between far cores, and slower between near ones. The sender chooses by trials (path_trials.pxd): it alone knows how
# long it takes to write the next message.

from libc.stddef cimport size_t

from .._core.group cimport Group
from .._core.path_trials cimport (
    MEAN_CALL, MEAN_ON_SHARED_CPUS, WINDOW_CALLS, Choice, begin_choice, is_timed, next_path, note_call,
)
from .._core.segment cimport SR_PRIVATE, sr_now_ns
from .messages cimport (
    IN_PLACE, LEAST_MEASURED_NBYTES, MESSAGE_CLASSES, STREAMED_THROUGH_RING, THROUGH_RING, Matching, Message,
    MessagePath, Peer,
)


cdef enum:
    SEND_GAPS = 32   # a send through the ring takes a small part of the time until the receiver has answered


# Return the choice for messages of a length, in shared or private memory.
cdef inline Choice *choice_of(Peer *p, const Message *message) noexcept nogil:
    cdef bint shared = message.has_place and message.block != SR_PRIVATE
    cdef int found = 0
    while found < MESSAGE_CLASSES - 1 and message.nbytes >= <size_t> 2 * LEAST_MEASURED_NBYTES << found:
        found += 1
    return &p.choice[shared * MESSAGE_CLASSES + found]


# The path of the first messages of a class, and of all whose path is not measured.
cdef inline MessagePath first_path(const Group *g, const Message *message) noexcept nogil:
    if message.has_place:
        return IN_PLACE
    if g.far and message.nbytes >= g.tuning.far_stream_nbytes:
        return STREAMED_THROUGH_RING
    return THROUGH_RING


# Begin a send that is the first to the peer: choose its path.
cdef inline void begin_send(Matching *m, Peer *p, Message *message) noexcept nogil:
    cdef Choice *choice
    message.has_begun = True
    message.path = THROUGH_RING
    message.paths = 1 << THROUGH_RING
    if message.nbytes < LEAST_MEASURED_NBYTES and not message.has_place:
        return
    if message.has_place:
        message.paths |= 1 << IN_PLACE
    if message.nbytes >= m.g.tuning.far_stream_nbytes:
        message.paths |= 1 << STREAMED_THROUGH_RING
    if message.paths == 1 << THROUGH_RING:
        return
    if m.g.tuning.single_copy_message_always:
        message.path = first_path(m.g, message)
        return
    choice = message.choice = choice_of(p, message)
    if not choice.used:
        begin_choice(choice, first_path(m.g, message), WINDOW_CALLS, SEND_GAPS)
    if message.paths >> next_path(choice) & 1:
        message.path = <MessagePath> next_path(choice)
    if is_timed(choice, message.nbytes):
        message.begin_ns = sr_now_ns()
        message.gap_ns = message.begin_ns - choice.ended_ns


# Note the time of a message that has been sent.
cdef inline void note_send(Matching *m, Message *message) noexcept nogil:
    note_call(message.choice, MEAN_ON_SHARED_CPUS if m.g.oversubscribed else MEAN_CALL, message.paths, message.path,
              message.nbytes, message.begin_ns, message.gap_ns)
