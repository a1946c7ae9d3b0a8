# Move point-to-point messages: step_messages advances everything that is posted as far as possible, and returns at
# once. Messages between two ranks keep the order of their ring. If a message without a receive precedes one that a
# receive waits for, it is kept in private memory. wait_for_message waits until a message is complete. Nothing here
# touches a Python object.

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from .._core.group cimport (
    ABORTED, BLOCKED, DEAD, DONE, LATE, LEFT, PROGRESSED, SIGNALLED, SIGNAL_INTERVAL_NS, Group, check_liveness,
    peer_status, runs_here,
)
from .._core.kernels cimport SR_COPY_ORDINARY
from .._core.path_trials cimport READ_IN_PLACE, THROUGH_SLOTS
from .._core.segment cimport (
    SR_NO_ABORT, SR_PAGE, sr_flag_load, sr_flag_load_ordered, sr_flag_release, sr_flag_swap, sr_flag_take, sr_header,
    sr_lane, sr_layout_message_ring_offset, sr_now_ns, sr_pause, sr_time_away, sr_waitset, sr_waitset_watch, sr_yield,
)
from .._core.spsc_ring cimport (
    SR_FRAME_FIRST, SR_FRAME_OFFER, SR_RING_WAIT, SR_RING_WHOLE, sr_flag_mark, sr_frame,
    sr_message_ring, sr_offer_withdraw, sr_receipt_free_number, sr_receipt_give, sr_receipt_take,
    sr_receipts_count, sr_ring, sr_ring_end, sr_ring_first, sr_ring_format, sr_ring_open_end, sr_ring_peek,
    sr_ring_publish_taken, sr_ring_pull, sr_ring_push,
)
from .._diagnostics.flight_recorder cimport (
    ANYBODY, SR_IN_PROBE, SR_IN_RECV, SR_IN_SEND, SR_WAIT_MESSAGE, begin_wait, end_wait,
)
from .._engine.progress cimport ACTIVE, IDLE, REAPABLE, WAITING, WANTS_PYTHON
from .._engine.queue cimport BACKGROUND
from .._engine.wait cimport sleep_ns_after, sleep_until_death
from .._internode.context cimport inter_of, remote, sr_conn_sleep
from .._transport.channel cimport (
    SR_CHANNEL_DAMAGED, SR_CHANNEL_OPEN, sr_channel, sr_channel_give_receipt, sr_channel_probe, sr_channel_pull,
    sr_channel_push, sr_channel_read, sr_channel_withdraw, sr_channels_attend, sr_channels_poll_abort,
    sr_channels_step, sr_channels_wake,
)
from .messages cimport (
    ANY, COMPLETE, CONTEXT_SHIFT, DAMAGED, LOCAL_PEERS, MOVING, NEEDS_ROOM, NOT_OFFERED, NO_FAILURE, NO_OFFER, OFFERED,
    OTHER_ITEMS, REMOTE_PEERS, STAGED, TOO_LONG, TO_BE_READ, UNMATCHED, Failure, Matching, Message, Peer,
    UnexpectedMessage, Wait, frame_tag, has_work, is_probe_for,
)
from .message_path cimport USUAL_PIECE_NBYTES, begin_send, measure_distance, note_send, set_first_distance, way_out
from .offers cimport push_offer, step_offer

cdef enum:
    RECEIPT_SHIFT = 48   # in nbytes_and_receipt: a message is shorter than 2**48 bytes
    STEPS_AT_ONCE = 64       # with progress, before the clock is read
    STEPS_A_POLL = 16    # while no call waits for other hosts: a poll of their channels is a system call
    WATCH_NS = 50000000      # the progress thread polls an idle communicator for this long
    REMOTE_POLLS = 3         # polls in a short try: a poll of other hosts is a system call


# ---- lists of messages ------------------------------------------------------------------------------------------

cdef void complete(Matching *m, Message *message) noexcept nogil:
    message.state = COMPLETE
    message.next = NULL
    if message.owner != NULL:
        message.next = m.completed
        m.completed = message
        m.npending -= 1


# No receive becomes complete after an abort. Shared arrays then become private copies, and bytes that arrive in the
# shared pages later are not in the copy. Much Python code runs between the abort and the copy, so bytes that were
# written before this check are in it. The message then stays in no list, and a rank that waits for it sees the abort.
cdef inline void complete_receive(Matching *m, Message *message) noexcept nogil:
    if sr_flag_load(&m.g.header.abort) == SR_NO_ABORT:
        complete(m, message)


cdef void end_receive(Matching *m, Message *message, Failure failure) noexcept nogil:
    message.failure = failure
    complete_receive(m, message)


# Return False if the message is not in this list.
cdef bint unlink(Message **first, Message **last, Message *message) noexcept nogil:
    cdef Message *before = NULL
    cdef Message **link = first
    while link[0] != NULL and link[0] != message:
        before = link[0]
        link = &before.next
    if link[0] == NULL:
        return False
    link[0] = message.next
    if last[0] == message:
        last[0] = before
    message.next = NULL
    return True


cdef void unlink_receive(Matching *m, Message *message) noexcept nogil:
    if unlink(&m.first_receive, &m.last_receive, message):
        m.posted_nbytes -= message.nbytes


cdef void unlink_send(Matching *m, Message *message) noexcept nogil:
    cdef Peer *p = &m.peer[message.peer]
    if unlink(&p.first_send, &p.last_send, message):
        m.nsends -= 1


cdef void unlink_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil:
    cdef UnexpectedMessage *before = NULL
    cdef UnexpectedMessage **link = &m.first_unexpected
    while link[0] != unexpected:
        before = link[0]
        link = &before.next
    link[0] = unexpected.next
    if m.last_unexpected == unexpected:
        m.last_unexpected = before


# Discard the rest of the message that is being received from this peer.
cdef void discard_incoming(Matching *m, Peer *p) noexcept nogil:
    p.receiver = NULL
    p.incoming.data = NULL
    if p.channel != NULL:
        sr_channel_withdraw(m.channels, p.channel)


# True if repeating the call of this message would have another effect: part of it has been sent or received.
cdef bint has_moved(const Matching *m, const Message *message) noexcept nogil:
    cdef int i
    if message.is_probe:
        return False
    if message.state == COMPLETE or message.state == UNMATCHED:
        return True
    if message.is_send and (message.out.offset > 0 or message.offering >= OFFERED):
        return True
    if message.is_send and m.peer[message.peer].channel != NULL and message.out.head.flags != 0:   # an empty message
        return True
    for i in range(m.nsources):
        if m.peer[m.source[i]].receiver == message:
            return True
    return False


# Unlink a message that is not complete. The rest of an incoming message is discarded. A send that has begun cannot be
# taken back, so the communicator must not be used afterwards.
cdef void withdraw(Matching *m, Message *message) noexcept nogil:
    cdef int i
    cdef Peer *p
    cdef UnexpectedMessage *unexpected = m.first_unexpected
    if message.state == COMPLETE:
        return
    if message.is_send:
        if message.offering == OFFERED:
            sr_offer_withdraw(message.offer)
        unlink_send(m, message)
        withdraw_receipt(m, message)
        return
    unlink_receive(m, message)
    for i in range(m.nsources):
        p = &m.peer[m.source[i]]
        if p.receiver == message:
            discard_incoming(m, p)
    while unexpected != NULL:
        if unexpected.wanted_by == message:
            unexpected.wanted_by = NULL
        unexpected = unexpected.next


# The send waits for no receipt any more.
cdef void withdraw_receipt(Matching *m, Message *message) noexcept nogil:
    cdef Peer *p = &m.peer[message.peer]
    cdef UnexpectedMessage *unexpected = m.first_unexpected
    cdef Message *last = NULL
    if message.receipt != 0:
        if unlink(&p.first_unmatched, &last, message):
            m.nunmatched -= 1
        sr_receipt_free_number(p.numbers_in_use, message.receipt)
    while unexpected != NULL:
        if unexpected.sender == message:
            unexpected.sender = NULL
        unexpected = unexpected.next


# Detach all messages before the memory of the posted ones is freed: channels still receive data, and other ranks read
# offered messages.
cdef void withdraw_all(Matching *m) noexcept nogil:
    cdef Message *message
    cdef int i
    for i in range(m.size):
        message = m.peer[i].first_send
        if message != NULL and message.offering == OFFERED:
            sr_offer_withdraw(message.offer)
    for i in range(m.nsources):
        discard_incoming(m, &m.peer[m.source[i]])


# ---- matching ------------------------------------------------------------------------------------------------

# tag: that of a frame. ANY matches every tag of the pattern's context.
cdef inline bint matches(const Message *pattern, int source, uint32_t tag) noexcept nogil:
    if tag >> CONTEXT_SHIFT != pattern.context:
        return False
    return ((pattern.peer == source or pattern.peer == ANY)
            and (pattern.tag == ANY or <uint32_t> pattern.tag == tag_within(tag)))


cdef inline uint32_t tag_within(uint32_t tag) noexcept nogil:
    return tag & ((<uint32_t> 1 << CONTEXT_SHIFT) - 1)


cdef inline void set_envelope(Message *message, int source, uint32_t tag, uint64_t kind,
                              size_t nbytes) noexcept nogil:
    message.source = source
    message.came_tag = tag_within(tag)
    message.came_kind = kind
    message.came_nbytes = nbytes


cdef inline Failure failure_of(const Message *message) noexcept nogil:
    if message.kind != message.came_kind:
        return OTHER_ITEMS
    return TOO_LONG if message.came_nbytes > message.nbytes else NO_FAILURE


# Unlink and return the oldest receive that matches the message. Complete the probes that it matches.
cdef Message *take_receiver(Matching *m, int source, uint32_t tag, uint64_t kind, size_t nbytes) noexcept nogil:
    cdef Message *at = m.first_receive
    cdef Message *after
    while at != NULL:
        after = at.next
        if matches(at, source, tag):
            if at.takes:   # the message must be in private memory first, see keep_unexpected
                return NULL
            unlink_receive(m, at)
            set_envelope(at, source, tag, kind, nbytes)
            at.is_probe = is_probe_for(at, kind, nbytes)
            if not at.is_probe:
                return at
            complete(m, at)
        at = after
    return NULL


# True if a receive or probe waits for this source. Unexpected messages of the source must then be kept in private
# memory.
cdef bint is_awaited(Matching *m, int source) noexcept nogil:
    cdef Message *at = m.first_receive
    while at != NULL:
        if at.peer == source or at.peer == ANY:
            return True
        at = at.next
    return False


# A receive has matched a message. Notify the sender if it waits for that.
cdef void give_receipt(Matching *m, int source, uint32_t number) noexcept nogil:
    cdef Peer *p = &m.peer[source]
    if p.channel != NULL:
        sr_channel_give_receipt(m.channels, p.channel, number)
    else:
        sr_receipt_give(&(<sr_message_ring *> p.inward.ring).receipts, number, &m.g.lane[p.lane].p2p_event)


cdef void give_receipt_of(Matching *m, UnexpectedMessage *unexpected) noexcept nogil:
    if unexpected.receipt != 0:
        give_receipt(m, unexpected.source, unexpected.receipt)
    if unexpected.sender != NULL:
        complete(m, unexpected.sender)
    unexpected.receipt, unexpected.sender = 0, NULL


cdef void free_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil:
    unlink_unexpected(m, unexpected)
    if unexpected.holder != NULL:
        unexpected.holder[0] = NULL
    free(unexpected)


# Discard a message that a matched probe took and that is not received. Its sender waits until all bytes are taken.
cdef void discard_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil:
    cdef Peer *p = &m.peer[unexpected.source]
    give_receipt_of(m, unexpected)
    if p.unexpected == unexpected:
        p.unexpected = NULL
        discard_incoming(m, p)
        p.discards = True
        m.ndiscarded += 1
    free_unexpected(m, unexpected)


cdef void deliver_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil:
    cdef Message *message = unexpected.wanted_by
    cdef Failure failure = failure_of(message)
    if failure == NO_FAILURE:
        memcpy(message.data, unexpected.data, unexpected.nbytes)
    free_unexpected(m, unexpected)
    end_receive(m, message, failure)


cdef inline void set_envelope_of(Message *message, const UnexpectedMessage *unexpected) noexcept nogil:
    set_envelope(message, unexpected.source, unexpected.tag, unexpected.kind, unexpected.nbytes)


# A matched probe takes the message.
cdef void take_unexpected(Matching *m, Message *probe, UnexpectedMessage *unexpected) noexcept nogil:
    set_envelope_of(probe, unexpected)
    unexpected.is_taken = True
    unexpected.holder = &probe.taken
    probe.taken = unexpected
    complete(m, probe)


# Begin to receive the message. A receive that outlives its call holds the message instead of the probe that took it.
cdef void receive_unexpected(Matching *m, Message *message, UnexpectedMessage *unexpected) noexcept nogil:
    set_envelope_of(message, unexpected)
    message.state = MOVING
    unexpected.wanted_by = message
    give_receipt_of(m, unexpected)
    if unexpected.holder != NULL and message.owner != NULL:
        unexpected.holder[0] = NULL
        unexpected.holder = NULL
    if unexpected.whole:
        deliver_unexpected(m, unexpected)


# Match a new receive or probe with an unexpected message, else queue it.
cdef void post_receive(Matching *m, Message *message) noexcept nogil:
    cdef UnexpectedMessage *unexpected = m.first_unexpected
    while unexpected != NULL:
        if (unexpected.wanted_by == NULL and not unexpected.is_taken
                and matches(message, unexpected.source, unexpected.tag)):
            if message.takes:
                take_unexpected(m, message, unexpected)
            elif is_probe_for(message, unexpected.kind, unexpected.nbytes):
                message.is_probe = True
                set_envelope_of(message, unexpected)
                complete(m, message)
            else:
                receive_unexpected(m, message, unexpected)
            return
        unexpected = unexpected.next
    message.next = NULL
    if m.last_receive == NULL:
        m.first_receive = message
    else:
        m.last_receive.next = message
    m.last_receive = message
    message.beside_nbytes = m.posted_nbytes
    m.posted_nbytes += message.nbytes


# ---- messages to the own rank ---------------------------------------------------------------------------------------

# Copy the message into the memory of a posted receive. Return False if none matches: the message is unexpected.
cdef bint deliver_to_self(Matching *m, Message *message) noexcept nogil:
    cdef uint32_t tag = frame_tag(message)
    cdef Message *receiver = take_receiver(m, m.rank, tag, message.kind, message.nbytes)
    cdef Failure failure
    if receiver == NULL:
        return False
    failure = failure_of(receiver)
    if failure == NO_FAILURE:
        memcpy(receiver.data, message.data, message.nbytes)
    end_receive(m, receiver, failure)
    complete(m, message)
    return True


# ---- sending -------------------------------------------------------------------------------------------------

cdef inline int push(Matching *m, Peer *p, Message *message) noexcept nogil:
    cdef int status
    if p.channel != NULL:
        return sr_channel_push(m.channels, p.channel, &message.out)
    if not message.has_begun:
        begin_send(m, p, message)
    elif message.out.offset > 0:
        measure_distance(m.g, p, message)
    if message.path == READ_IN_PLACE and message.offering != STAGED:
        status = push_offer(p, message)
    else:
        status = sr_ring_push(&p.out, &message.out)
    if status == SR_RING_WHOLE and message.trials != NULL:
        note_send(m, message)
    return status


# Before this rank leaves: put every offered message for which there is room into its ring, where it can still be
# received.
cdef void stage_offers(Matching *m) noexcept nogil:
    cdef Peer *p
    cdef Message *message
    cdef int rank
    for rank in range(m.size):
        p = &m.peer[rank]
        message = p.first_send
        while message != NULL:
            message.can_be_offered = False   # a message that has not begun is not offered any more
            if message.path == READ_IN_PLACE and message.offering == NOT_OFFERED:   # there was no room for the offer
                message.path = THROUGH_SLOTS
            message.offered_ns = 0   # an open offer is overdue, so step_sends puts it into the ring
            message = message.next
    step_sends(m)


cdef void post_send(Matching *m, Message *message) noexcept nogil:
    cdef Peer *p = &m.peer[message.peer]
    message.out.head.tag = frame_tag(message)
    message.out.head.kind_and_flags = message.kind
    message.out.head.nbytes_and_receipt = message.nbytes | <uint64_t> message.receipt << RECEIPT_SHIFT
    message.out.data = message.data
    message.out.offset = 0
    message.next = NULL
    if p.first_send == NULL:
        if push(m, p, message) == SR_RING_WHOLE:
            finish_send(m, p, message)
            return
        p.first_send = message
    else:
        p.last_send.next = message
    p.last_send = message
    m.nsends += 1


cdef bint step_sends(Matching *m) noexcept nogil:
    cdef bint moved = False
    cdef Peer *p
    cdef Message *message
    cdef uint64_t offset
    cdef int rank
    for rank in range(m.size):
        p = &m.peer[rank]
        while p.first_send != NULL:
            message = p.first_send
            offset = message.out.offset
            if push(m, p, message) == SR_RING_WAIT:
                moved = moved or message.out.offset != offset
                break
            unlink_send(m, message)
            finish_send(m, p, message)
            moved = True
    return moved


# All bytes of the message are sent.
cdef inline void finish_send(Matching *m, Peer *p, Message *message) noexcept nogil:
    if message.receipt == 0:
        complete(m, message)
    elif not take_receipt(m, p, message):
        message.state = UNMATCHED
        message.next = p.first_unmatched
        p.first_unmatched = message
        m.nunmatched += 1


# Complete the message if its receipt is there.
cdef bint take_receipt(Matching *m, Peer *p, Message *message) noexcept nogil:
    if not sr_receipt_take(p.receipts, message.receipt):
        return False
    sr_receipt_free_number(p.numbers_in_use, message.receipt)
    complete(m, message)
    return True


# Complete the sends whose receipts have come.
cdef bint step_receipts(Matching *m) noexcept nogil:
    cdef bint moved = False
    cdef Message **link
    cdef Message *after
    cdef Peer *p
    cdef uint64_t count
    cdef int rank
    for rank in range(m.size):
        p = &m.peer[rank]
        if p.first_unmatched == NULL:
            continue
        count = sr_receipts_count(p.receipts)
        if count == p.nreceipts:
            continue
        p.nreceipts = count   # before the bits are read: a bit that is set later changes the count again
        link = &p.first_unmatched
        while link[0] != NULL:
            after = link[0].next
            if take_receipt(m, p, link[0]):
                link[0] = after
                m.nunmatched -= 1
                moved = True
            else:
                link = &link[0].next
    return moved


# ---- receiving -----------------------------------------------------------------------------------------------

# Give a new unexpected message to the matched probe that waits for it. No receive waits for it: a receive would have
# got the message from its ring.
cdef void offer_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil:
    cdef Message *at = m.first_receive
    while at != NULL:
        if at.takes and matches(at, unexpected.source, unexpected.tag):
            unlink_receive(m, at)
            take_unexpected(m, at, unexpected)
            return
        at = at.next


# Link memory for the next message of unmatched_source's ring, and receive the message into it.
cdef void keep_unexpected(Matching *m, UnexpectedMessage *unexpected) noexcept nogil:
    cdef Peer *p = &m.peer[unexpected.source]
    unexpected.next = NULL
    if m.last_unexpected == NULL:
        m.first_unexpected = unexpected
    else:
        m.last_unexpected.next = unexpected
    m.last_unexpected = unexpected
    offer_unexpected(m, unexpected)
    if unexpected.whole:   # a message of this rank to itself
        return
    p.unexpected = unexpected
    p.receiver = NULL
    p.receiving = True
    p.inward.way = SR_COPY_ORDINARY
    p.incoming.data = unexpected.data
    p.incoming.nbytes = unexpected.nbytes
    p.incoming.offset = 0
    p.reading = TO_BE_READ if unexpected.is_offered else NO_OFFER


# Begin to receive the next message of the source if a receive matches it.
cdef int begin_incoming(Matching *m, int source) noexcept nogil:
    cdef Peer *p = &m.peer[source]
    cdef Message *message
    cdef sr_frame head
    cdef int status
    if m.first_receive == NULL:
        return BLOCKED
    status = sr_ring_peek(&p.inward, &head)
    if status == SR_RING_WAIT:
        return BLOCKED
    if status != SR_RING_WHOLE or not head.flags & SR_FRAME_FIRST:
        m.unmatched_source = source
        return DAMAGED
    message = take_receiver(m, source, head.tag, head.kind, head.message_nbytes)
    if message == NULL:
        m.unmatched_source = source
        if is_awaited(m, source):
            return NEEDS_ROOM
        return BLOCKED
    if head.receipt != 0:
        give_receipt(m, source, head.receipt)
    p.receiving = True
    p.unexpected = NULL
    p.receiver = message
    p.incoming.data = message.data
    p.incoming.nbytes = head.message_nbytes
    p.incoming.offset = 0
    p.reading = TO_BE_READ if head.flags & SR_FRAME_OFFER else NO_OFFER
    p.inward.way = way_out(m, p, message, head.message_nbytes)
    message.state = MOVING
    message.failure = failure_of(message)
    if message.failure != NO_FAILURE:
        p.incoming.data = NULL   # receive and discard all bytes: until then the sender waits for room in the ring
    return PROGRESSED


cdef void finish_incoming(Matching *m, Peer *p) noexcept nogil:
    p.receiving = False
    if p.receiver != NULL:
        complete_receive(m, p.receiver)
    elif p.unexpected != NULL:
        p.unexpected.whole = True
        if p.unexpected.wanted_by != NULL:
            deliver_unexpected(m, p.unexpected)
    elif p.discards:
        p.discards = False
        m.ndiscarded -= 1
    p.receiver = NULL
    p.unexpected = NULL


cdef int step_incoming(Matching *m, int source) noexcept nogil:
    cdef Peer *p = &m.peer[source]
    cdef int outcome = BLOCKED
    cdef int status
    cdef uint64_t offset
    while True:
        if not p.receiving:
            status = begin_incoming(m, source)
            if status != PROGRESSED:
                return status if status != BLOCKED else outcome
            outcome = PROGRESSED
        offset = p.incoming.offset
        if p.channel != NULL:
            status = sr_channel_pull(m.channels, p.channel)
        elif p.reading != NO_OFFER:
            status = step_offer(m, p)
            if status == SR_RING_WAIT and p.reading == NO_OFFER:
                status = sr_ring_pull(&p.inward, &p.incoming)
        else:
            status = sr_ring_pull(&p.inward, &p.incoming)
        if p.incoming.offset != offset:
            outcome = PROGRESSED
        if status == SR_RING_WAIT:
            return outcome
        if status != SR_RING_WHOLE:
            m.unmatched_source = source
            return DAMAGED
        finish_incoming(m, p)
        outcome = PROGRESSED


# ---- rings and channels --------------------------------------------------------------------------------------------

# Open one end of the ring between two ranks of this host. other: rank at the other end.
cdef void open_end(Matching *m, sr_ring_end *end, int sender, int receiver, int other) noexcept nogil:
    cdef sr_header *header = m.g.header
    cdef size_t offset = sr_layout_message_ring_offset(m.g.size, header.staging_nbytes, m.ring_nbytes, sender, receiver)
    cdef unsigned char *head = <unsigned char *> header + offset
    sr_ring_open_end(end, <sr_ring *> head, head + SR_PAGE, m.ring_nbytes,
                     sr_ring_first(header.first_seq, m.ring_nbytes), &m.g.lane[other].p2p_event, m.g.kernels.copy,
                     USUAL_PIECE_NBYTES)


# Format the ring to a rank of this host, whose pages are populated, and notify that rank.
cdef void open_ring(Matching *m, int receiver) noexcept nogil:
    cdef Peer *p = &m.peer[receiver]
    cdef sr_lane *lane = m.g.lane[p.lane]
    open_end(m, &p.out, m.g.rank, p.lane, p.lane)
    sr_ring_format(p.out.ring, p.out.position)
    set_first_distance(m.g, p)
    sr_flag_mark(&lane.p2p_senders[m.g.rank // 64], <uint64_t> 1 << (m.g.rank % 64), &lane.p2p_event)


cdef inline void add_source(Matching *m, int rank) noexcept nogil:
    m.source[m.nsources] = rank
    m.nsources += 1


# Open the rings of senders that marked themselves in this rank's p2p_senders since the last call.
cdef inline void open_sources(Matching *m) noexcept nogil:
    cdef int word, lane
    cdef uint64_t new
    for word in range((m.g.size + 63) // 64):
        new = sr_flag_load_ordered(&m.g.me.p2p_senders[word]) & ~m.seen[word]
        if new == 0:
            continue
        m.seen[word] |= new
        for lane in range(64 * word, min(m.g.size, 64 * word + 64)):
            if new >> (lane % 64) & 1 and lane != m.g.rank:
                open_end(m, &m.peer[m.rank_of[lane]].inward, lane, m.g.rank, lane)
                add_source(m, m.rank_of[lane])


# Open the channels of ranks of other hosts from which data have arrived.
cdef void open_remote_sources(Matching *m) noexcept nogil:
    cdef sr_channel *channel
    cdef Peer *p
    cdef int i
    for i in range(m.channels.nchannels):
        channel = &m.channels.channel[i]
        p = &m.peer[channel.rank]
        if p.inward.ring == NULL and sr_flag_load(&channel.opened) != 0:
            sr_channel_read(m.channels, channel, &p.inward, &p.incoming, m.g.kernels.copy)
            add_source(m, channel.rank)
            m.nchannels_read += 1


# Publish all free room to the senders at once. A rank calls this before it sleeps.
cdef void publish_all_taken(Matching *m) noexcept nogil:
    cdef int i
    for i in range(m.nsources):
        if m.peer[m.source[i]].channel == NULL:   # channels report room only when it is worth a frame
            sr_ring_publish_taken(&m.peer[m.source[i]].inward)


# ---- one step -----------------------------------------------------------------------------------------------

cdef inline int peers_of(Matching *m, int rank) noexcept nogil:
    if rank == ANY:
        return (LOCAL_PEERS if m.g.size > 1 else 0) | (REMOTE_PEERS if m.channels != NULL else 0)
    return LOCAL_PEERS if m.peer[rank].channel == NULL else REMOTE_PEERS


# Return among which ranks any posted message has its source or destination.
cdef int awaited_peers(Matching *m) noexcept nogil:
    cdef int peers = 0
    cdef int i
    cdef Message *at = m.first_receive
    while at != NULL:
        peers |= peers_of(m, at.peer)
        at = at.next
    for i in range(m.nsources):
        if m.peer[m.source[i]].receiving:
            peers |= peers_of(m, m.source[i])
    if m.nsends > 0 or m.nunmatched > 0:
        for i in range(m.size):
            if m.peer[i].first_send != NULL or m.peer[i].first_unmatched != NULL:
                peers |= peers_of(m, i)
    for i in range(m.channels.nchannels if m.channels != NULL else 0):
        if m.channels.channel[i].watched:   # its socket's send buffer is full
            peers |= REMOTE_PEERS
    return peers


# Receive data from other hosts. Return True if there were any.
cdef bint step_channels(Matching *m) noexcept nogil:
    cdef bint moved
    m.nsteps += 1
    if m.polls_remote_rarely and m.nsteps % STEPS_A_POLL != 0:
        return False
    moved = sr_channels_step(m.channels)
    if sr_flag_load(&m.channels.nopened) != m.nchannels_read:
        open_remote_sources(m)
    return moved


# Return PROGRESSED, BLOCKED, NEEDS_ROOM or DAMAGED. The first two may be returned even if nothing is posted.
cdef int step_messages(Matching *m) noexcept nogil:
    cdef int outcome = BLOCKED
    cdef int _i, at, status
    open_sources(m)
    if m.channels != NULL and step_channels(m):
        outcome = PROGRESSED
    if m.nsends > 0 and step_sends(m):
        outcome = PROGRESSED
    if m.nunmatched > 0 and step_receipts(m):
        outcome = PROGRESSED
    at = m.first_source
    for _i in range(m.nsources):
        if at >= m.nsources:
            at = 0
        status = step_incoming(m, m.source[at])
        if status == NEEDS_ROOM or status == DAMAGED:
            return status
        if status == PROGRESSED:
            outcome = PROGRESSED
        at += 1
    m.first_source = m.first_source + 1 if m.first_source + 1 < m.nsources else 0
    return outcome


# ---- waiting ---------------------------------------------------------------------------------------------------

# A waiting rank pauses, then yields, then sleeps on its event for messages or on news from other hosts. It advances all
# its posted messages meanwhile. The progress thread does so when no call waits.

# Return DONE, BLOCKED after `pauses` pauses without progress or after many steps, or another result of a step.
cdef int step_until_complete(Matching *m, Message *message, int pauses) noexcept nogil:
    cdef int left = pauses
    cdef int steps_left = STEPS_AT_ONCE
    cdef int status
    while message.state != COMPLETE:
        status = step_messages(m)
        if message.state == COMPLETE:
            break
        if status == PROGRESSED and steps_left > 0:
            left = pauses
            steps_left -= 1
            continue
        if status == PROGRESSED:
            return BLOCKED
        if status != BLOCKED or left <= 0:
            return status
        left -= 1
        sr_pause()
    return DONE


# Return the number of pauses before a wait for this message, and set polls_remote_rarely if polls of other hosts can be
# rare. If each pause comes with a poll of other hosts, a system call, few pauses are made: a yield costs little more. A
# peer that shares this CPU cannot run while this rank pauses.
cdef inline int pauses_for(Matching *m, Message *message, int pauses) noexcept nogil:
    m.polls_remote_rarely = m.channels == NULL or (message.peer != ANY and m.peer[message.peer].channel == NULL)
    if not m.polls_remote_rarely:
        return min(pauses, REMOTE_POLLS)
    return 0 if message.peer != ANY and runs_here(m.g, m.peer[message.peer].lane) else pauses


# Try briefly with the GIL held, as a small collective does.
cdef int try_message_briefly(Matching *m, Message *message) noexcept nogil:
    cdef int status
    cdef int yields = 0
    while True:
        status = step_until_complete(m, message, pauses_for(m, message, m.g.brief_pauses))
        if status != BLOCKED or yields >= m.g.brief_yields:
            return status
        sr_yield()
        yields += 1


# As wait_until_complete, but end the published wait, unless the caller continues to wait after SIGNALLED.
cdef int wait_for_message(Matching *m, Message *message, Wait *wait) noexcept nogil:
    cdef int status = wait_until_complete(m, message, wait)
    if status != SIGNALLED:
        end_wait(m.g, SR_WAIT_MESSAGE)
    return status


# Return the number of the awaited rank in published waits; see `remote`.
cdef inline int awaited_by(Matching *m, const Message *message) noexcept nogil:
    if message.peer == ANY:
        return ANYBODY
    return m.peer[message.peer].lane if m.peer[message.peer].channel == NULL else remote(m.g, message.peer)


cdef inline void publish_wait(Matching *m, const Message *message, uint64_t since_ns) noexcept nogil:
    cdef int kind = SR_IN_SEND if message.is_send else SR_IN_PROBE if message.is_probe else SR_IN_RECV
    begin_wait(m.g, SR_WAIT_MESSAGE, kind, since_ns, awaited_by(m, message))


# Return the time. Postpone the deadline by the time that this process was stopped since the last call.
cdef inline uint64_t check_clock(Wait *wait) noexcept nogil:
    cdef uint64_t now = sr_now_ns()
    if wait.polled_ns != 0:
        wait.deadline_ns += sr_time_away(wait.polled_ns, now)
    wait.polled_ns = now
    return now


# Return when the message is complete, when something else ends the wait, or when work needs the GIL.
cdef int wait_until_complete(Matching *m, Message *message, Wait *wait) noexcept nogil:
    cdef Group *g = m.g
    cdef uint64_t now
    cdef int status
    cdef int pauses = pauses_for(m, message, g.pauses)
    if wait.awake_until_ns == 0:
        status = step_until_complete(m, message, pauses)
        if status != BLOCKED:
            return status
    now = check_clock(wait)
    if wait.awake_until_ns == 0:
        wait.awake_until_ns = now + g.yield_ns
        wait.poll_ns = now + g.poll_ns
        wait.signal_ns = now + SIGNAL_INTERVAL_NS
        publish_all_taken(m)
    while True:
        status = step_messages(m)
        if message.state == COMPLETE:
            return DONE
        if status == PROGRESSED:
            now = check_clock(wait)
            wait.awake_until_ns = now + g.yield_ns
            if now >= wait.signal_ns:   # a long message must not keep Ctrl-C waiting
                wait.signal_ns = now + SIGNAL_INTERVAL_NS
                return SIGNALLED
            continue
        if status != BLOCKED:
            return status
        if sr_flag_load(&g.header.abort) != SR_NO_ABORT:
            return ABORTED
        if now >= wait.poll_ns:
            status = poll_peers(m, message, wait, now)
            if status != PROGRESSED:
                return status
            wait.poll_ns = now + g.poll_ns
        if now < wait.awake_until_ns:
            sr_yield()
        else:
            publish_wait(m, message, wait.awake_until_ns)
            if sleep(m, message, now - wait.awake_until_ns):
                wait.poll_ns = 0
        now = check_clock(wait)


# Return True if a rank has died.
cdef bint sleep(Matching *m, Message *message, uint64_t asleep_ns) noexcept nogil:
    cdef sr_waitset waitset
    cdef int peers = awaited_peers(m) if m.channels != NULL else LOCAL_PEERS
    publish_all_taken(m)
    if peers & REMOTE_PEERS:
        sleep_remote(m, message, m.g.sleep_ns if peers == REMOTE_PEERS else sleep_ns_after(asleep_ns))
        return False
    waitset.n = 0
    sr_waitset_watch(&waitset, &m.g.me.p2p_event)
    return (step_messages(m) == BLOCKED and message.state != COMPLETE
            and sr_flag_load_ordered(&m.g.header.abort) == SR_NO_ABORT and sleep_until_death(m.g, &waitset,
                                                                                             m.g.sleep_ns))


cdef void sleep_remote(Matching *m, Message *message, uint64_t limit_ns) noexcept nogil:
    m.polls_remote_rarely = False
    if not sr_channels_attend(m.channels) and step_messages(m) == BLOCKED and message.state != COMPLETE:
        sr_conn_sleep(m.channels.news, limit_ns)
    sr_channels_wake(m.channels)


# True if the message is incomplete after everything its peer sent was processed.
cdef inline bint stays_incomplete(Matching *m, Message *message) noexcept nogil:
    return step_messages(m) == BLOCKED and message.state != COMPLETE


# Return PROGRESSED if the rank is alive, else DEAD, LEFT, or DAMAGED if its data are invalid.
cdef int p2p_peer_status(Matching *m, int rank) noexcept nogil:
    if m.peer[rank].channel != NULL:
        if sr_flag_load(&m.peer[rank].channel.left) != 0:
            return LEFT
        if sr_flag_load(&m.peer[rank].channel.end) == SR_CHANNEL_DAMAGED:
            return DAMAGED
        return PROGRESSED if sr_flag_load(&m.peer[rank].channel.end) == SR_CHANNEL_OPEN else DEAD
    return peer_status(&m.g.lane[m.peer[rank].lane].liveness)


# Return PROGRESSED if the message can still become complete. Else return how a rank that it needs has ended, DEAD, LEFT
# or DAMAGED, and set `culprit` to that rank.
cdef int status_of_peers(Matching *m, Message *message, int *culprit) noexcept nogil:
    cdef int first = 0 if message.peer == ANY else message.peer
    cdef int last = m.size - 1 if message.peer == ANY else message.peer
    cdef int rank, status, nleft = 0
    check_liveness(m.g)
    for rank in range(first, last + 1):
        if rank == m.rank:
            continue
        status = p2p_peer_status(m, rank)
        if status == PROGRESSED:
            continue
        culprit[0] = m.unmatched_source = rank
        if status != LEFT:
            return status if stays_incomplete(m, message) else PROGRESSED
        nleft += 1
    if nleft > 0 and (message.peer != ANY or nleft == m.size - 1):
        return LEFT if stays_incomplete(m, message) else PROGRESSED
    return PROGRESSED


cdef int poll_peers(Matching *m, Message *message, Wait *wait, uint64_t now) noexcept nogil:
    cdef int status
    if m.channels != NULL and sr_channels_poll_abort(m.channels):
        return SIGNALLED
    status = status_of_peers(m, message, &wait.culprit)
    if status != PROGRESSED:
        return status
    if now >= wait.deadline_ns:
        wait.culprit = m.rank if message.peer == ANY else message.peer
        return LATE
    if now >= wait.signal_ns:
        wait.signal_ns = now + SIGNAL_INTERVAL_NS
        if message.peer != ANY and m.peer[message.peer].channel != NULL:
            sr_channel_probe(m.channels, m.peer[message.peer].channel, inter_of(m.g).cut_ns)
        return SIGNALLED
    return PROGRESSED


# ---- in the background -----------------------------------------------------------------------------------------

# Advance one communicator's messages in the progress thread. The thread keeps polling while transfers were pending
# recently, so that a caller need not wake it for each transfer. Then it sleeps on the event of the communicator only if
# a message is being received, or if a send or a receipt is pending.
cdef int poll_messages(Pollable *e, sr_waitset *waitset) noexcept nogil:
    cdef Matching *m = <Matching *> e
    cdef uint64_t now = sr_now_ns()
    cdef int found
    e.news = 0
    if not sr_flag_take(&m.stepper, BACKGROUND):   # a caller advances the messages
        if now < m.watched_until_ns:
            return WAITING
        sr_flag_swap(&m.resting, 1)
        if not sr_flag_take(&m.stepper, BACKGROUND):
            return IDLE
    if m.npending == 0 and m.completed != NULL:
        found = REAPABLE
    elif not has_work(m) or m.lacks_memory or sr_flag_load(&m.g.header.abort) != SR_NO_ABORT:
        found = IDLE
        if now < m.watched_until_ns and not has_work(m):
            found = WAITING
        else:
            sr_flag_swap(&m.resting, 1)
    else:
        m.watched_until_ns = now + WATCH_NS
        found = step_pollable(m, waitset)
    sr_flag_release(&m.stepper)
    return found


cdef int step_pollable(Matching *m, sr_waitset *waitset) noexcept nogil:
    cdef int status
    if waitset != NULL:
        publish_all_taken(m)
        if is_flowing(m):
            sr_waitset_watch(waitset, &m.g.me.p2p_event)
    m.polls_remote_rarely = False
    if m.channels != NULL and awaited_peers(m) & REMOTE_PEERS:
        m.pollable.news, m.pollable.waker = m.channels.news, m.channels.waker
    status = step_messages(m)
    if status == PROGRESSED:
        return ACTIVE
    return WAITING if status == BLOCKED else WANTS_PYTHON


cdef bint is_flowing(Matching *m) noexcept nogil:
    cdef int i
    for i in range(m.nsources):
        if m.peer[m.source[i]].receiving:
            return True
    return m.nsends > 0 or m.nunmatched > 0
