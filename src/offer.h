/* Offers: a large message that the consumer of a ring copies from where it lies, once. A ring copies twice.

   The producer puts a frame with the address of the message into the ring, and puts in nothing else until it knows how
   the offer ended. So the producer can still send the message through the ring, piece by piece:

     producer   OPEN --------------------> STAGED       the consumer did not come in time; the pieces follow
     consumer   OPEN --> READING --------> READ         the message is received
                              '---------> REFUSED      the consumer cannot read that memory; the pieces follow
     producer   OPEN, READING -----------> WITHDRAWN    the bytes are no longer valid; nothing follows

   Both sides change the state by compare-and-swap, so exactly one of two changes happens. If READING becomes READ, the
   producer has not withdrawn the message before the last byte was read: every byte is valid. */
#ifndef SR_OFFER_H
#define SR_OFFER_H

#include "spsc_ring.h"

enum sr_offer_state {
    SR_OFFER_OPEN,
    SR_OFFER_READING,
    SR_OFFER_READ,
    SR_OFFER_REFUSED,
    SR_OFFER_STAGED,
    SR_OFFER_WITHDRAWN,
};

/* ---- the producer --------------------------------------------------------------------------------------------- */

/* Put an offer into the ring and publish it; sr_ring_has_room has returned true for one line. The offer stays valid
   until the producer puts the next frame into the ring. */
static inline struct sr_offer *sr_offer_put(struct sr_ring_end *end, struct sr_frame *head, uint64_t address,
                                            uint64_t block)
{
    const struct sr_offer offer = {.address = address, .block = block};
    const uint64_t begin = sr_ring_data_at(end->position, sizeof offer);
    head->nbytes = sizeof offer;
    head->flags = SR_FRAME_FIRST | SR_FRAME_OFFER;
    sr_ring_put(end, head, &offer);
    return (struct sr_offer *)(end->bytes + (begin & (end->nbytes - 1)));
}

/* Return the state. Pairs with sr_offer_answer; the load is ordered (S2), since the producer may be about to sleep. */
static inline enum sr_offer_state sr_offer_state(const struct sr_offer *offer)
{
    return (enum sr_offer_state)sr_flag_load_ordered(&offer->state);
}

/* Take the offer back, to send the message through the ring. Return false if the consumer was first. */
static inline bool sr_offer_stage(struct sr_offer *offer)
{
    return sr_flag_replace(&offer->state, SR_OFFER_OPEN, SR_OFFER_STAGED);
}

/* Withdraw the message: its memory is about to change. */
static inline void sr_offer_withdraw(struct sr_offer *offer)
{
    if (!sr_flag_replace(&offer->state, SR_OFFER_OPEN, SR_OFFER_WITHDRAWN))
        sr_flag_replace(&offer->state, SR_OFFER_READING, SR_OFFER_WITHDRAWN);
}

/* ---- the consumer --------------------------------------------------------------------------------------------- */

/* Return the offer in the next frame, which sr_ring_peek has returned; NULL if it is not an offer of this message. */
static inline struct sr_offer *sr_offer_at(const struct sr_ring_end *end, const struct sr_frame *head)
{
    const uint64_t begin = sr_ring_data_at(end->position, sizeof(struct sr_offer));
    if (head->flags != (SR_FRAME_FIRST | SR_FRAME_OFFER) || head->nbytes != sizeof(struct sr_offer))
        return NULL;
    return (struct sr_offer *)(end->bytes + (begin & (end->nbytes - 1)));
}

/* Begin to read. Return false if the producer has taken the offer back. */
static inline bool sr_offer_begin(struct sr_offer *offer)
{
    return sr_flag_replace(&offer->state, SR_OFFER_OPEN, SR_OFFER_READING);
}

/* End a read with READ or REFUSED. The exchange releases: it comes after all reads. Return false if
   the producer has withdrawn the message meanwhile. */
static inline bool sr_offer_answer(struct sr_offer *offer, enum sr_offer_state answer, struct sr_event *event)
{
    return sr_flag_replace_and_publish(&offer->state, SR_OFFER_READING, answer, event);
}

#endif
