# Offers: large messages that their receiver copies from where they lie. src/offer.h has the states. The sender calls
# its functions for the first of its messages to a peer, the receiver for the message at the head of the ring.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from .._core.group cimport Group, shared_address
from .._core.kernels cimport SR_COPY_ORDINARY, SR_COPY_STREAMING
from .._core.segment cimport (
    SR_CACHE_LINE, SR_NO_ABORT, SR_PRIVATE, sr_flag_acquire, sr_flag_load_after_reads, sr_flag_release,
    sr_liveness_died, sr_liveness_task, sr_now_ns, sr_single_copy,
)
from .._core.spsc_ring cimport (
    SR_OFFER_OPEN, SR_OFFER_READ, SR_OFFER_REFUSED, SR_OFFER_STAGED, SR_RING_DAMAGED, SR_RING_WAIT, SR_RING_WHOLE,
    sr_frame, sr_offer, sr_offer_answer, sr_offer_at, sr_offer_begin, sr_offer_put, sr_offer_stage, sr_offer_state,
    sr_ring_has_room, sr_ring_message_nbytes, sr_ring_peek, sr_ring_push, sr_ring_take,
)
from .message_path cimport load_offer_state
from .messages cimport NO_OFFER, OFFERED, STAGED, TO_BE_READ, UNDER_WAY, VOID, Matching, Message, Peer


cdef enum:
    OFFER_STEP_NBYTES = 1 << 20   # read in one step, between two polls of the other ranks
    OFFER_LEAST_NS = 3000         # for so long, and for the time of a copy into the ring, the receiver may come late
    STAGED_NBYTES_A_NS = 8        # bench/peers/peers.py --call ping_pong, 64 KiB to 1 MiB


# ---- the sender -----------------------------------------------------------------------------------------------

cdef inline bint fits_into_ring(Peer *p, const Message *message) noexcept nogil:
    return (message.nbytes < p.out.nbytes
            and sr_ring_has_room(&p.out, sr_ring_message_nbytes(&p.out, message.nbytes)))


# Offer the message, or look how its offer stands. Return SR_RING_WAIT until the offer has ended: until then the sender
# puts nothing else into the ring. A message whose offer is refused or overdue goes through the ring.
cdef inline int push_offer(Peer *p, Message *message) noexcept nogil:
    cdef int state
    if message.offering != OFFERED:
        if sr_ring_has_room(&p.out, SR_CACHE_LINE):
            message.offer = sr_offer_put(&p.out, &message.out.head, message.address, message.block)
            message.offering = OFFERED
            message.offer_state = SR_OFFER_OPEN
            message.offered_ns = sr_now_ns()
        return SR_RING_WAIT
    state = load_offer_state(p, message)
    if state == SR_OFFER_READ:
        return SR_RING_WHOLE
    if state != SR_OFFER_REFUSED and not (state == SR_OFFER_OPEN and is_overdue(message) and fits_into_ring(p, message)
                                          and sr_offer_stage(message.offer)):
        return SR_RING_WAIT
    message.offering = STAGED
    return sr_ring_push(&p.out, &message.out)


cdef inline bint is_overdue(const Message *message) noexcept nogil:
    return sr_now_ns() - message.offered_ns > OFFER_LEAST_NS + message.nbytes // STAGED_NBYTES_A_NS


# ---- the receiver ---------------------------------------------------------------------------------------------

# Copy the next bytes of an offered message. Return False if this process cannot read them.
cdef inline bint copy_offered(Matching *m, Peer *p, size_t nbytes) noexcept nogil:
    cdef Group *g = m.g
    cdef unsigned char *to = p.incoming.data + p.incoming.offset
    cdef unsigned char *there
    cdef uint64_t address = p.address + p.incoming.offset
    cdef uint32_t way = SR_COPY_STREAMING if p.inward.way == SR_COPY_STREAMING else SR_COPY_ORDINARY
    if p.block == SR_PRIVATE:
        return sr_single_copy(sr_liveness_task(&g.lane[p.lane].liveness), to, address, nbytes) == 0
    sr_flag_acquire(&g.blocks_lock, 1)   # until it is released, no thread unmaps a block
    there = shared_address(g, p.block, p.lane, address, nbytes)
    if there != NULL:
        g.kernels.copy(to, there, nbytes, way)
    sr_flag_release(&g.blocks_lock)
    return there != NULL


# Take an offer that has ended out of the ring.
cdef inline void take_offer(Peer *p, const sr_frame *head) noexcept nogil:
    sr_ring_take(&p.inward, head, NULL)
    p.reading = NO_OFFER


# Read one step of an offered message. Return SR_RING_WHOLE, SR_RING_DAMAGED, or SR_RING_WAIT: there is more to read, or
# p.reading is NO_OFFER, since the message comes through the ring, or VOID.
cdef inline int step_offer(Matching *m, Peer *p) noexcept nogil:
    cdef sr_frame head
    cdef sr_offer *offer
    cdef size_t nbytes
    if p.reading == VOID:
        return SR_RING_WAIT
    if sr_ring_peek(&p.inward, &head) != SR_RING_WHOLE or head.message_nbytes != p.incoming.nbytes:
        return SR_RING_DAMAGED
    offer = sr_offer_at(&p.inward, &head)
    if offer == NULL:
        return SR_RING_DAMAGED
    if p.reading == TO_BE_READ:
        p.address, p.block = offer.address, offer.block
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
        if not copy_offered(m, p, nbytes):
            if sr_offer_answer(offer, SR_OFFER_REFUSED, p.inward.event):
                take_offer(p, &head)
                p.incoming.offset = 0
            else:
                p.reading = VOID
            return SR_RING_WAIT
    p.incoming.offset += nbytes
    if p.incoming.offset < p.incoming.nbytes:
        return SR_RING_WAIT
    # After the last byte: a sender that has ended, or a communicator that has, may have changed what was read.
    if (sr_liveness_died(&m.g.lane[p.lane].liveness)
            or sr_flag_load_after_reads(&m.g.header.abort) != SR_NO_ABORT
            or not sr_offer_answer(offer, SR_OFFER_READ, p.inward.event)):
        p.reading = VOID
        return SR_RING_WAIT
    m.g.stats.messages_in_place += 1
    take_offer(p, &head)
    return SR_RING_WHOLE
