/* A single-producer single-consumer ring in shared memory, through which messages pass piece by piece. This file puts
   frames into the ring and takes them out; nothing here waits. Everything that is read from shared memory is checked
   before it is used. */
#ifndef SR_SPSC_RING_H
#define SR_SPSC_RING_H

#include <string.h>

#include "sync/flag.h"

typedef void sr_ring_copy_fn(void *dst, const void *src, size_t nbytes, uint32_t way);

enum { SR_RING_COPY_NBYTES = 2048 }; /* from here on a call of the user's copy function pays off */

/* One end of a ring, in its owner's private memory. */
struct sr_ring_end {
    struct sr_ring *ring;
    unsigned char *bytes;  /* the ring's bytes */
    uint64_t nbytes;       /* length of the ring, a power of two */
    size_t piece_nbytes;   /* the most data in one frame */
    uint64_t position;     /* begin of this end's next frame */
    uint64_t taken;        /* sr_ring.taken, as this end has last loaded (producer) or published it (consumer) */
    struct sr_event *event;  /* the other end sleeps on it */
    sr_ring_copy_fn *copy;
    uint32_t way;          /* argument of `copy` for large pieces, into the ring or out of it */
};

/* A message that goes into the ring. It begins with the head's tag, kind, receipt and message_nbytes, and offset 0. */
struct sr_outgoing {
    struct sr_frame head;
    const unsigned char *data;
    uint64_t offset; /* bytes that are in the ring */
};

/* A message that comes out of the ring. It begins with message_nbytes of its first frame as nbytes, and offset 0. */
struct sr_incoming {
    unsigned char *data; /* NULL: the message is discarded */
    uint64_t nbytes;
    uint64_t offset;     /* bytes that have been taken */
};

enum sr_ring_status {
    SR_RING_WHOLE,   /* the message is complete */
    SR_RING_WAIT,    /* the ring has no room, or no frame */
    SR_RING_CUT,     /* the producer abandoned the message in the middle: it is void */
    SR_RING_DAMAGED, /* the ring holds bytes that no producer writes */
};

static inline bool sr_ring_is_valid_length(uint64_t nbytes)
{
    return nbytes >= SR_RING_LEAST_NBYTES && (nbytes & (nbytes - 1)) == 0;
}

/* Set the length of the pieces of later messages. A frame and the next frame's word take at most half of the ring. The
   consumer publishes `taken` every quarter of the ring, so the producer always finds room in the end. */
static inline void sr_ring_set_piece(struct sr_ring_end *end, size_t nbytes)
{
    const size_t most_nbytes = end->nbytes / 2 - 2 * SR_CACHE_LINE;
    end->piece_nbytes = nbytes < most_nbytes ? nbytes : most_nbytes;
}

static inline void sr_ring_open_end(struct sr_ring_end *end, struct sr_ring *ring, void *bytes, uint64_t nbytes,
                                    uint64_t first, struct sr_event *event, sr_ring_copy_fn *copy, size_t piece_nbytes)
{
    memset(end, 0, sizeof *end);
    end->ring = ring;
    end->bytes = bytes;
    end->nbytes = nbytes;
    sr_ring_set_piece(end, piece_nbytes);
    end->position = end->taken = first;
    end->event = event;
    end->copy = copy;
}

/* Return the first position: a multiple of the ring's length, at most `near`. */
static inline uint64_t sr_ring_first(uint64_t near, uint64_t nbytes) { return near & ~(nbytes - 1); }

/* Prepare a ring in zeroed memory, before any process opens an end. No position + 1 is 0, so no frame is there. */
static inline void sr_ring_format(struct sr_ring *ring, uint64_t first) { sr_flag_set(&ring->taken.value, first); }

static inline uint64_t sr_ring_frame_nbytes(size_t nbytes)
{
    const uint64_t line = SR_CACHE_LINE;
    return nbytes <= SR_FRAME_INLINE_NBYTES ? line : line + ((nbytes + line - 1) & ~(line - 1));
}

static inline struct sr_frame *sr_ring_frame_at(const struct sr_ring_end *end, uint64_t position)
{
    return (struct sr_frame *)(end->bytes + (position & (end->nbytes - 1)));
}

/* Return the position at which a frame's data begin. */
static inline uint64_t sr_ring_data_at(uint64_t position, size_t nbytes)
{
    return position + (nbytes <= SR_FRAME_INLINE_NBYTES ? sizeof(struct sr_frame) : SR_CACHE_LINE);
}

static inline void sr_ring_copy(const struct sr_ring_end *end, void *dst, const void *src, size_t nbytes)
{
    if (nbytes >= SR_RING_COPY_NBYTES)
        end->copy(dst, src, nbytes, end->way);
    else
        memcpy(dst, src, nbytes);
}

/* ---- the producer --------------------------------------------------------------------------------------------- */

/* Load up to where frames are taken. Return false if that has not changed. The load pairs with
   sr_ring_publish_taken; it is ordered (S2), since the producer may be about to sleep. */
static inline bool sr_ring_load_taken(struct sr_ring_end *end)
{
    const uint64_t taken = sr_flag_load_ordered(&end->ring->taken.value);
    if (taken == end->taken || end->position - taken > end->nbytes) /* invalid: more taken than was put in */
        return false;
    end->taken = taken;
    return true;
}

/* Return whether a frame of nbytes, and the next frame's word, fit into the ring. */
static inline bool sr_ring_has_room(struct sr_ring_end *end, uint64_t nbytes)
{
    const uint64_t needed = end->position + nbytes + SR_CACHE_LINE - end->nbytes;
    return (int64_t)(end->taken - needed) >= 0 || (sr_ring_load_taken(end) && (int64_t)(end->taken - needed) >= 0);
}

/* Publish a frame whose data are in place; sr_ring_has_room has returned true. Pairs with sr_ring_has_frame. Old data
   in the next frame's word must not look like that frame. Since they seldom do, the producer only reads the word: a
   store would take the cache line from the consumer. */
static inline void sr_ring_announce(struct sr_ring_end *end, const struct sr_frame *head)
{
    struct sr_frame *frame = sr_ring_frame_at(end, end->position);
    const uint64_t next = end->position + sr_ring_frame_nbytes(head->nbytes);
    sr_flag *next_begun = &sr_ring_frame_at(end, next)->begun;
    frame->nbytes_and_receipt = head->nbytes_and_receipt;
    frame->nbytes = head->nbytes;
    frame->tag = head->tag;
    frame->kind_and_flags = head->kind_and_flags;
    if (sr_flag_load(next_begun) == next + 1)
        sr_flag_set(next_begun, next);
    sr_flag_publish(&frame->begun, end->position + 1, end->event);
    end->position = next;
}

/* Put one frame into the ring and publish it; sr_ring_has_room has returned true. */
static inline void sr_ring_put(struct sr_ring_end *end, const struct sr_frame *head, const void *data)
{
    const uint64_t begin = sr_ring_data_at(end->position, head->nbytes) & (end->nbytes - 1);
    const size_t before_end = head->nbytes < end->nbytes - begin ? head->nbytes : (size_t)(end->nbytes - begin);
    if (head->nbytes > 0)
        sr_ring_copy(end, end->bytes + begin, data, before_end);
    if (before_end < head->nbytes)
        sr_ring_copy(end, end->bytes, (const char *)data + before_end, head->nbytes - before_end);
    sr_ring_announce(end, head);
}

/* Put as many pieces of a message into the ring as there is room for. Return SR_RING_WHOLE or SR_RING_WAIT. */
static inline enum sr_ring_status sr_ring_push(struct sr_ring_end *end, struct sr_outgoing *message)
{
    for (;;) {
        const uint64_t left = message->head.message_nbytes - message->offset;
        const bool is_last = left <= end->piece_nbytes;
        message->head.nbytes = (uint32_t)(is_last ? left : end->piece_nbytes);
        message->head.flags = (message->offset == 0 ? SR_FRAME_FIRST : 0) | (is_last ? SR_FRAME_LAST : 0);
        if (!sr_ring_has_room(end, sr_ring_frame_nbytes(message->head.nbytes)))
            return SR_RING_WAIT;
        sr_ring_put(end, &message->head, message->data + message->offset);
        message->offset += message->head.nbytes;
        if (is_last)
            return SR_RING_WHOLE;
    }
}

/* As sr_ring_push for a message that lies in several parts of memory: put in one part, of which `done` bytes are in the
   ring. Return SR_RING_WHOLE once all of the part is there. An empty part has no piece. */
static inline enum sr_ring_status sr_ring_push_part(struct sr_ring_end *end, struct sr_outgoing *message,
                                                    const unsigned char *part, uint64_t nbytes, uint64_t *done)
{
    while (*done < nbytes) {
        const uint64_t left = nbytes - *done;
        const uint64_t piece = left < end->piece_nbytes ? left : end->piece_nbytes;
        const bool is_last = message->offset + piece == message->head.message_nbytes;
        message->head.nbytes = (uint32_t)piece;
        message->head.flags = (message->offset == 0 ? SR_FRAME_FIRST : 0) | (is_last ? SR_FRAME_LAST : 0);
        if (!sr_ring_has_room(end, sr_ring_frame_nbytes(piece)))
            return SR_RING_WAIT;
        sr_ring_put(end, &message->head, part + *done);
        message->offset += piece;
        *done += piece;
    }
    return SR_RING_WHOLE;
}

/* Return the bytes of the ring that all pieces of a message take together. */
static inline uint64_t sr_ring_message_nbytes(const struct sr_ring_end *end, uint64_t nbytes)
{
    const uint64_t npieces = nbytes / end->piece_nbytes;
    return npieces * sr_ring_frame_nbytes(end->piece_nbytes) +
           sr_ring_frame_nbytes((size_t)(nbytes - npieces * end->piece_nbytes));
}

/* ---- the consumer --------------------------------------------------------------------------------------------- */

/* Publish up to where frames are taken, for which the producer waits (sr_ring_has_room). sr_ring_take calls this every
   quarter of the ring; the consumer calls it when it finds no more frames. */
static inline void sr_ring_publish_taken(struct sr_ring_end *end)
{
    if (end->taken != end->position) {
        SR_FAULT(SR_BEFORE_RELEASE);
        end->taken = end->position;
        sr_flag_publish(&end->ring->taken.value, end->position, end->event);
    }
}

/* Return whether the next frame is there. Pairs with sr_ring_announce; the load is ordered (S2), since the consumer may
   be about to sleep. */
static inline bool sr_ring_has_frame(const struct sr_ring_end *end)
{
    return sr_flag_load_ordered(&sr_ring_frame_at(end, end->position)->begun) == end->position + 1;
}

/* Copy the head of the next frame and check the copy: the shared head may change after the check. Return SR_RING_WHOLE,
   SR_RING_WAIT (no frame is there) or SR_RING_DAMAGED. */
static inline enum sr_ring_status sr_ring_peek(const struct sr_ring_end *end, struct sr_frame *head)
{
    const struct sr_frame *frame = sr_ring_frame_at(end, end->position);
    if (!sr_ring_has_frame(end))
        return SR_RING_WAIT;
    head->nbytes_and_receipt = frame->nbytes_and_receipt;
    head->nbytes = frame->nbytes;
    head->tag = frame->tag;
    head->kind_and_flags = frame->kind_and_flags;
    if (sr_ring_frame_nbytes(head->nbytes) + SR_CACHE_LINE > end->nbytes || head->nbytes > head->message_nbytes ||
        head->receipt >= SR_RECEIPTS)
        return SR_RING_DAMAGED;
    return SR_RING_WHOLE;
}

/* Take the frame whose head sr_ring_peek has returned. If dst is NULL, discard its data. */
static inline void sr_ring_take(struct sr_ring_end *end, const struct sr_frame *head, void *dst)
{
    const uint64_t begin = sr_ring_data_at(end->position, head->nbytes) & (end->nbytes - 1);
    const size_t before_end = head->nbytes < end->nbytes - begin ? head->nbytes : (size_t)(end->nbytes - begin);
    if (dst != NULL && head->nbytes > 0)
        sr_ring_copy(end, dst, end->bytes + begin, before_end);
    if (dst != NULL && before_end < head->nbytes)
        sr_ring_copy(end, (char *)dst + before_end, end->bytes, head->nbytes - before_end);
    end->position += sr_ring_frame_nbytes(head->nbytes);
    if (end->position - end->taken >= end->nbytes / 4)
        sr_ring_publish_taken(end);
}

/* Return whether a frame is the next piece of the message. */
static inline bool sr_ring_continues(const struct sr_incoming *message, const struct sr_frame *head)
{
    const uint64_t left = message->nbytes - message->offset;
    const uint32_t flags = (message->offset == 0 ? SR_FRAME_FIRST : 0) | (head->nbytes == left ? SR_FRAME_LAST : 0);
    return head->flags == flags && head->message_nbytes == message->nbytes && head->nbytes <= left &&
           (head->nbytes > 0 || left == 0);
}

/* Take as many pieces of a message as are there. */
static inline enum sr_ring_status sr_ring_pull(struct sr_ring_end *end, struct sr_incoming *message)
{
    struct sr_frame head;
    for (;;) {
        const enum sr_ring_status status = sr_ring_peek(end, &head);
        if (status != SR_RING_WHOLE)
            return status;
        if (head.flags & SR_FRAME_CUT && message->offset > 0) {
            sr_ring_take(end, &head, NULL);
            return SR_RING_CUT;
        }
        if (head.flags & (SR_FRAME_CUT | SR_FRAME_OFFER) || !sr_ring_continues(message, &head))
            return SR_RING_DAMAGED;
        sr_ring_take(end, &head, message->data == NULL ? NULL : message->data + message->offset);
        message->offset += head.nbytes;
        if (head.flags & SR_FRAME_LAST)
            return SR_RING_WHOLE;
    }
}

#endif
