# Offers: large messages that their receiver copies from where they lie. src/offer.h has the states. The sender calls
# its functions for the first of its messages to a peer, the receiver for the message at the head of the ring.

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from .._core.group cimport Group, shared_address
from .._core.placement cimport copy_from_far
from .._core.segment cimport (
    SR_CACHE_LINE, SR_NO_ABORT, SR_PRIVATE, sr_flag_load_after_reads, sr_flag_set, sr_flag_take, sr_liveness_died,
    sr_liveness_task, sr_now_ns, sr_single_copy, sr_yield,
)
from .._core.spsc_ring cimport (
    SR_OFFER_OPEN, SR_OFFER_READ, SR_OFFER_READ_SLOWLY, SR_OFFER_REFUSED, SR_OFFER_STAGED, SR_RING_DAMAGED,
    SR_RING_WAIT, SR_RING_WHOLE, sr_frame, sr_offer, sr_offer_answer, sr_offer_at, sr_offer_begin, sr_offer_put,
    sr_offer_stage, sr_offer_state, sr_ring_has_room, sr_ring_message_nbytes, sr_ring_peek, sr_ring_push, sr_ring_take,
)
from .messages cimport (
    NOT_OFFERED, NO_OFFER, OFFERED, OFFER_CLASSES, STREAMED, TO_BE_OFFERED, TO_BE_READ, UNDER_WAY, VOID, Matching,
    Message, Peer, least_offered,
)


cdef enum:
    OFFER_STEP_NBYTES = 1 << 20   # read in one step, between two polls of the other ranks
    OFFER_LEAST_NS = 3000         # for so long, and for the time of a copy into the ring, the receiver may come late
    STAGED_NBYTES_A_NS = 8        # bench/peers/peers.py --call ping_pong, 64 KiB to 1 MiB
    LEAST_SLOW = 4                # slow messages in a row after which the ring is taken, if the last one was very slow:
    MUCH_SLOWER_PERCENT = 85      # ... had at most so much of the ring's speed
    MOST_SLOW = 12                # slow messages in a row after which the ring is taken (matrix.py, ping_pong of 1 MiB)
    LEAST_UNOFFERED = 7           # messages after one that was late, or after slow ones, before the next one is offered
    MOST_UNOFFERED = 127          # ... after slow ones time and again
    ENOUGH_OFFERS = 16            # offers after which that number begins at LEAST_UNOFFERED again
    MOST_OFFERS = 127             # offers before one message measures the ring again
    MOST_MEASURED = 8             # messages through the ring in the mean of their speed
    CLASS_SHIFT = 16              # lengths below 64 KiB are the first class
    LEAST_GAIN_PERCENT = 110      # one copy has to be faster: the sender's next write to that memory is slower


# ---- the sender -----------------------------------------------------------------------------------------------

cdef inline int offer_class(size_t nbytes) noexcept nogil:
    cdef int found = 0
    while found < OFFER_CLASSES - 1 and nbytes >> (CLASS_SHIFT + 2 * found):
        found += 1
    return found


cdef inline bint fits_into_ring(Peer *p, const Message *message) noexcept nogil:
    return (message.nbytes < p.out.nbytes
            and sr_ring_has_room(&p.out, sr_ring_message_nbytes(&p.out, message.nbytes)))


# Offer the message, and wait for the end of the offer. Nothing follows an offer in the ring until then.
#
# One copy is not always faster than two: memory that the sender has just written comes out of its caches more slowly
# than a ring, and is slow to write again once another core has read it. The receiver measures both. After some messages
# in a row that were slow, or one whose receiver was late, the next ones of about its length go through the ring. One
# slow message is not enough: it may have brought the memory into the receiver's caches, where the next one finds it.
cdef inline int push_offer(Matching *m, Peer *p, Message *message) noexcept nogil:
    cdef int state
    cdef int k = offer_class(message.nbytes)
    if message.offering == TO_BE_OFFERED:
        if p.nunoffered[k] > 0 and not m.g.tuning.single_copy_message_always:
            p.nunoffered[k] -= 1
            message.offering = NOT_OFFERED
            return sr_ring_push(&p.out, &message.out)
        if sr_ring_has_room(&p.out, SR_CACHE_LINE):
            message.offer = sr_offer_put(&p.out, &message.out.head, message.place, message.block)
            message.offering = OFFERED
            message.offered_ns = sr_now_ns()
        return SR_RING_WAIT
    state = sr_offer_state(message.offer)
    if state == SR_OFFER_READ:
        note_offer(p, k)
        return SR_RING_WHOLE
    if state == SR_OFFER_READ_SLOWLY:
        prefer_ring(p, k)
        return SR_RING_WHOLE
    if state == SR_OFFER_REFUSED:
        p.nunoffered[k] = MOST_UNOFFERED
    elif (state == SR_OFFER_OPEN and is_overdue(message) and fits_into_ring(p, message)
            and sr_offer_stage(message.offer)):
        p.nunoffered[k] = LEAST_UNOFFERED
    else:
        return SR_RING_WAIT
    message.offering = STREAMED
    return sr_ring_push(&p.out, &message.out)


# The ring's speed changes with what the caches hold, so one message measures it from time to time.
cdef inline void note_offer(Peer *p, int k) noexcept nogil:
    p.noffers[k] += 1
    if p.noffers[k] == ENOUGH_OFFERS:
        p.last_unoffered[k] = 0
    if p.noffers[k] == MOST_OFFERS:
        p.noffers[k] = 0
        p.nunoffered[k] = 1


cdef inline void prefer_ring(Peer *p, int k) noexcept nogil:
    p.noffers[k] = 0
    p.last_unoffered[k] = min(2 * p.last_unoffered[k] + LEAST_UNOFFERED, <int> MOST_UNOFFERED)
    p.nunoffered[k] = p.last_unoffered[k]


cdef inline bint is_overdue(const Message *message) noexcept nogil:
    return sr_now_ns() - message.offered_ns > OFFER_LEAST_NS + message.nbytes // STAGED_NBYTES_A_NS


# ---- the receiver ---------------------------------------------------------------------------------------------

# Begin to receive the bytes of a message. Measure how long large ones take.
cdef inline void begin_copy(Matching *m, Peer *p, bint is_offered) noexcept nogil:
    p.reading = TO_BE_READ if is_offered else NO_OFFER
    p.copy_ns = 0
    if not is_offered and p.channel == NULL and p.incoming.nbytes >= least_offered(m.g):
        p.copy_ns = sr_now_ns()


# Note the speed of a message that has come through the ring. One message counts little: this rank may have been
# interrupted, or so late that all of the message was there.
cdef inline void note_ring_speed(Peer *p) noexcept nogil:
    cdef int k = offer_class(p.incoming.nbytes)
    cdef uint64_t took_ns = sr_now_ns() - p.copy_ns
    cdef double speed = <double> p.incoming.nbytes / <double> max(took_ns, <uint64_t> 1)
    cdef double known = p.ring_speed[k]
    if p.nmeasured[k] == 0:
        known = speed
    p.nmeasured[k] = min(p.nmeasured[k] + 1, <int> MOST_MEASURED)
    p.ring_speed[k] = known + (min(max(speed, known / 2), 2 * known) - known) / p.nmeasured[k]


# Copy the next bytes of an offered message. Return False if this process cannot read them.
cdef inline bint copy_offered(Matching *m, Peer *p, size_t nbytes) noexcept nogil:
    cdef Group *g = m.g
    cdef unsigned char *to = p.incoming.data + p.incoming.offset
    cdef unsigned char *there
    cdef uint64_t place = p.place + p.incoming.offset
    if p.block == SR_PRIVATE:
        return sr_single_copy(sr_liveness_task(&g.lane[p.lane].liveness), to, place, nbytes) == 0
    while not sr_flag_take(&g.blocks_lock, 1):   # until it is free again, no thread unmaps a block
        sr_yield()
    there = shared_address(g, p.block, p.lane, place, nbytes)
    if there != NULL:
        copy_from_far(g, to, there, nbytes, p.incoming.nbytes >= g.tuning.stream_out_nbytes)
    sr_flag_set(&g.blocks_lock, 0)
    return there != NULL


# Take an offer that has ended out of the ring.
cdef inline void take_offer(Peer *p, const sr_frame *head) noexcept nogil:
    sr_ring_take(&p.inward, head, NULL)
    p.reading = NO_OFFER
    p.copy_ns = 0


# Return the answer to a message that this rank has just read. It is READ_SLOWLY only after several slow messages: the
# first ones may have brought the memory into this rank's caches, where the next ones find it.
cdef inline int answer_to(Matching *m, Peer *p) noexcept nogil:
    cdef int k = offer_class(p.incoming.nbytes)
    cdef double percent = 0   # of the ring's speed, if that is known
    if p.copy_ns == 0 or m.g.tuning.single_copy_message_always:
        return SR_OFFER_READ
    if p.nmeasured[k] > 0:
        percent = 100 * (<double> p.incoming.nbytes / <double> p.copy_ns) / p.ring_speed[k]
    p.nslow[k] = 0 if percent >= LEAST_GAIN_PERCENT else p.nslow[k] + 1
    if p.nslow[k] < LEAST_SLOW or (p.nslow[k] < MOST_SLOW and percent > MUCH_SLOWER_PERCENT):
        return SR_OFFER_READ
    p.nslow[k] = 0
    return SR_OFFER_READ_SLOWLY


# Read one step of an offered message. Return SR_RING_WHOLE, SR_RING_DAMAGED, or SR_RING_WAIT: there is more to read, or
# p.reading is NO_OFFER, since the message comes through the ring, or VOID.
cdef inline int step_offer(Matching *m, Peer *p) noexcept nogil:
    cdef sr_frame head
    cdef sr_offer *offer
    cdef size_t nbytes
    cdef uint64_t begin_ns
    if p.reading == VOID:
        return SR_RING_WAIT
    if sr_ring_peek(&p.inward, &head) != SR_RING_WHOLE or head.message_nbytes != p.incoming.nbytes:
        return SR_RING_DAMAGED
    offer = sr_offer_at(&p.inward, &head)
    if offer == NULL:
        return SR_RING_DAMAGED
    if p.reading == TO_BE_READ:
        p.place, p.block = offer.place, offer.block
        if not sr_offer_begin(offer):
            if sr_offer_state(offer) == SR_OFFER_STAGED:
                take_offer(p, &head)
            else:
                p.reading = VOID
            return SR_RING_WAIT
        p.reading = UNDER_WAY
    nbytes = p.incoming.nbytes - p.incoming.offset
    if p.incoming.data != NULL:
        nbytes = min(nbytes, <size_t> OFFER_STEP_NBYTES)
        begin_ns = sr_now_ns()
        if not copy_offered(m, p, nbytes):
            if sr_offer_answer(offer, SR_OFFER_REFUSED, p.inward.event):
                take_offer(p, &head)
                p.incoming.offset = 0
            else:
                p.reading = VOID
            return SR_RING_WAIT
        p.copy_ns += sr_now_ns() - begin_ns
    p.incoming.offset += nbytes
    if p.incoming.offset < p.incoming.nbytes:
        return SR_RING_WAIT
    # After the last byte: a sender that has ended, or a communicator that has, may have changed what was read.
    if (sr_liveness_died(&m.g.lane[p.lane].liveness)
            or sr_flag_load_after_reads(&m.g.header.abort) != SR_NO_ABORT
            or not sr_offer_answer(offer, answer_to(m, p), p.inward.event)):
        p.reading = VOID
        return SR_RING_WAIT
    m.g.stats.messages_in_place += 1
    take_offer(p, &head)
    return SR_RING_WHOLE
