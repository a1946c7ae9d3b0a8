/* A ring from one writer to one or several readers in shared memory: places of readers, room, and items that the writer
   drops. Frames are those of spsc_ring.h. Each reader is a consumer with a `taken` of its own. The writer is a producer
   whose `taken` is a copy in its private memory: the least of all readers, or the position up to which it has dropped
   items. Nothing here waits. Everything that is read from shared memory is checked before it is used.

   If the writer drops items, a reader may copy bytes while the writer overwrites them. It then sees that `tail` has
   passed them, and discards the copy, as the reader of a sequence lock does. */
#ifndef SR_BROADCAST_H
#define SR_BROADCAST_H

#include "spsc_ring.h"

#define SR_FRAME_CONTINUED 1u /* the tag of a message that belongs to the next one: both are dropped together */

/* The writer, in its private memory. */
struct sr_broadcast_writer {
    struct sr_broadcast *shared;
    struct sr_ring_end end; /* its ring is `least` */
    struct sr_ring least; /* position up to which all readers have taken all frames */
    struct sr_ring_end tail; /* with drops: a consumer that takes the oldest items and discards them */
    uint64_t changes; /* sr_broadcast.changes when this writer last looked at the places */
    int slowest; /* the reader that has taken least; -1: there is no reader */
};

/* ---- memory --------------------------------------------------------------------------------------------------- */

static inline size_t sr_broadcast_head_nbytes(uint64_t places)
{
    const size_t nbytes = sizeof(struct sr_broadcast) + (size_t)places * sizeof(struct sr_reader);
    return (nbytes + SR_PAGE - 1) / SR_PAGE * SR_PAGE;
}

/* Prepare zeroed memory, before any other process maps it. */
static inline void sr_broadcast_format(struct sr_broadcast *shared, uint64_t nbytes, uint32_t places, uint32_t reserved,
                                       bool drops, bool single_use, uint64_t first)
{
    shared->nbytes = nbytes;
    shared->places = places;
    shared->reserved = reserved;
    shared->drops = drops;
    shared->single_use = single_use;
    sr_flag_set(&shared->tail.value, first);
    for (uint32_t i = 0; i < places; i++) {
        sr_ring_format(&shared->reader[i].ring, first);
        sr_flag_set(&shared->reader[i].place.first, first);
        sr_flag_set(&shared->reader[i].place.owner, i < reserved ? SR_PLACE_RESERVED : SR_PLACE_FREE);
    }
    shared->magic = SR_BROADCAST_MAGIC;
}

/* Return whether memory of memory_nbytes is such a ring whose sizes fit into it. The caller keeps copies of the
   sizes and uses only these. */
static inline bool sr_broadcast_is_valid(const struct sr_broadcast *shared, uint64_t memory_nbytes, uint64_t nbytes,
                                         uint64_t places)
{
    return memory_nbytes >= sizeof *shared && shared->magic == SR_BROADCAST_MAGIC && places >= 1 &&
           places <= SR_MOST_READERS && sr_ring_is_valid_length(nbytes) &&
           memory_nbytes >= sr_broadcast_head_nbytes(places) &&
           memory_nbytes - sr_broadcast_head_nbytes(places) >= nbytes;
}

/* ---- places --------------------------------------------------------------------------------------------------- */

static inline enum sr_place_state sr_place_state(uint64_t owner) { return (enum sr_place_state)(owner & 0xff); }

static inline uint32_t sr_place_pid(uint64_t owner) { return (uint32_t)(owner >> 32); }

static inline uint64_t sr_place_owner(uint32_t pid, enum sr_place_state state) { return (uint64_t)pid << 32 | state; }

/* Take a place for a reader; pairs with sr_broadcast_admit and sr_broadcast_leave. Return its index, or -1 if all
   places are taken. The owner is JOINED if the place was reserved, else JOINING. */
static inline int sr_broadcast_take_place(struct sr_broadcast *shared, uint32_t places, uint32_t pid)
{
    static const enum sr_place_state from[] = {SR_PLACE_RESERVED, SR_PLACE_FREE};
    static const enum sr_place_state to[] = {SR_PLACE_JOINED, SR_PLACE_JOINING};
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < places; i++) {
            struct sr_place *place = &shared->reader[i].place;
            if (sr_flag_load(&place->owner) == from[pass] &&
                sr_flag_replace_ordered(&place->owner, from[pass], sr_place_owner(pid, to[pass]))) {
                sr_flag_count(&shared->changes.value);
                return (int)i;
            }
        }
    return -1;
}

/* Free a reader's place, or close it if it is for single use: the reader leaves, or another process has found that the
   owner is dead or will never come. Nothing happens if the owner has changed. Wakes the writer, which may wait for this
   reader. */
static inline void sr_broadcast_leave(struct sr_broadcast *shared, uint32_t i, uint64_t owner)
{
    struct sr_reader *reader = &shared->reader[i];
    const uint64_t left = shared->single_use ? sr_place_owner(sr_place_pid(owner), SR_PLACE_CLOSED) : SR_PLACE_FREE;
    sr_flag_set(&reader->place.start_time, 0);
    if (sr_flag_replace_ordered(&reader->place.owner, owner, left)) {
        sr_flag_count(&shared->changes.value);
        sr_event_signal(&reader->event);
    }
}

/* Return whether any process reads, or a place is kept for one. */
static inline bool sr_broadcast_has_readers(const struct sr_broadcast *shared, uint32_t places)
{
    for (uint32_t i = 0; i < places; i++) {
        const enum sr_place_state state = sr_place_state(sr_flag_load(&shared->reader[i].place.owner));
        if (state != SR_PLACE_FREE && state != SR_PLACE_CLOSED)
            return true;
    }
    return false;
}

/* ---- the writer ----------------------------------------------------------------------------------------------- */

static inline void sr_broadcast_open_writer(struct sr_broadcast_writer *writer, struct sr_broadcast *shared,
                                            void *bytes, uint64_t nbytes, uint64_t first, sr_ring_copy_fn *copy,
                                            size_t piece_nbytes)
{
    memset(writer, 0, sizeof *writer);
    writer->shared = shared;
    writer->slowest = -1;
    writer->changes = ~0ull;
    sr_ring_format(&writer->least, first);
    sr_ring_open_end(&writer->end, &writer->least, bytes, nbytes, first, &shared->event, copy, piece_nbytes);
    sr_ring_open_end(&writer->tail, &writer->least, bytes, nbytes, first, &shared->event, copy, piece_nbytes);
}

/* Return whether readers have come or gone since sr_broadcast_admit. */
static inline bool sr_broadcast_has_changed(const struct sr_broadcast_writer *writer)
{
    return sr_flag_load(&writer->shared->changes.value) != writer->changes;
}

/* Admit the readers that wait for it: their first frame is the writer's next one, which has to be the first of an item.
   Return the number of readers admitted. */
static inline uint32_t sr_broadcast_admit(struct sr_broadcast_writer *writer, uint32_t places, uint64_t number)
{
    uint32_t count = 0;
    writer->changes = sr_flag_load_ordered(&writer->shared->changes.value);
    for (uint32_t i = 0; i < places; i++) {
        struct sr_reader *reader = &writer->shared->reader[i];
        const uint64_t owner = sr_flag_load(&reader->place.owner);
        if (sr_place_state(owner) != SR_PLACE_JOINING)
            continue;
        sr_flag_set(&reader->place.first, writer->end.position);
        sr_flag_set(&reader->place.first_number, number);
        sr_flag_set(&reader->ring.taken.value, writer->end.position);
        count +=
            sr_flag_replace_ordered(&reader->place.owner, owner, sr_place_owner(sr_place_pid(owner), SR_PLACE_JOINED));
    }
    return count;
}

/* Find the reader that has taken least, and give its `taken` to the producer. The loads are ordered (S2): the writer
   may be about to sleep on the event of the slowest reader, and S1 of that event came before. A reader that is admitted
   later begins at a later position, so the result stays valid. */
static inline void sr_broadcast_find_slowest(struct sr_broadcast_writer *writer, uint32_t places)
{
    const uint64_t position = writer->end.position;
    uint64_t most = 0;
    writer->slowest = -1;
    for (uint32_t i = 0; i < places; i++) {
        const struct sr_reader *reader = &writer->shared->reader[i];
        const enum sr_place_state state = sr_place_state(sr_flag_load_ordered(&reader->place.owner));
        if (state != SR_PLACE_JOINED && state != SR_PLACE_RESERVED)
            continue;
        uint64_t behind = position - sr_flag_load_ordered(&reader->ring.taken.value);
        if (behind > writer->end.nbytes) /* invalid: a reader cannot have taken more than was put in */
            behind = writer->end.nbytes;
        if (writer->slowest < 0 || behind > most) {
            writer->slowest = (int)i;
            most = behind;
        }
    }
    sr_flag_set(&writer->least.taken.value, position - most);
}

/* Drop the oldest items until nbytes fit, and some more, so that readers seldom have to load a changed `tail`. Return
   false if the ring holds bytes that no writer writes. nbytes and the next frame's word fit into an empty ring. */
static inline bool sr_broadcast_drop(struct sr_broadcast_writer *writer, uint64_t nbytes)
{
    struct sr_ring_end *tail = &writer->tail;
    const uint64_t end = writer->end.position;
    const uint64_t spare = nbytes + writer->end.nbytes / 8 + SR_CACHE_LINE;
    const uint64_t wanted = end + (spare < writer->end.nbytes ? spare : writer->end.nbytes) - writer->end.nbytes;
    bool is_whole = true;
    while (!is_whole || ((int64_t)(wanted - tail->position) > 0 && tail->position != end)) {
        struct sr_frame head;
        const uint64_t next = tail->position;
        if (sr_ring_peek(tail, &head) != SR_RING_WHOLE || end - next < sr_ring_frame_nbytes(head.nbytes))
            return false;
        tail->position += sr_ring_frame_nbytes(head.nbytes);
        is_whole = head.flags & SR_FRAME_LAST && head.tag != SR_FRAME_CONTINUED;
    }
    sr_flag_set_before_writes(&writer->shared->tail.value, tail->position); /* pairs with sr_broadcast_was_dropped */
    sr_flag_set(&writer->least.taken.value, tail->position);
    return true;
}

/* ---- a reader ------------------------------------------------------------------------------------------------- */

/* Return whether bytes at a position may have been overwritten before the caller read them; false if the writer does
   not drop items (tail is NULL). Pairs with sr_broadcast_drop. */
static inline bool sr_broadcast_was_dropped(const sr_flag *tail, uint64_t position)
{
    return tail != NULL && (int64_t)(sr_flag_load_after_reads(tail) - position) > 0;
}

/* Go on at the oldest item that is kept, after sr_broadcast_was_dropped. Return SR_RING_CUT, since the message of which
   this reader has taken a part is void, or SR_RING_DAMAGED. */
static inline enum sr_ring_status sr_broadcast_skip(struct sr_ring_end *end, const sr_flag *tail)
{
    const uint64_t position = sr_flag_load(tail);
    if (position % SR_CACHE_LINE != 0 || (int64_t)(position - end->position) < 0)
        return SR_RING_DAMAGED;
    end->position = end->taken = position;
    return SR_RING_CUT;
}

/* As sr_ring_peek, in a ring whose writer may drop items. SR_RING_CUT: items have been dropped, and `end` is at the
   oldest item that is kept. The head is checked before the data are used, and is valid if its bytes were not
   overwritten. */
static inline enum sr_ring_status sr_broadcast_peek(struct sr_ring_end *end, const sr_flag *tail, struct sr_frame *head)
{
    const enum sr_ring_status status = sr_ring_peek(end, head);
    return sr_broadcast_was_dropped(tail, end->position) ? sr_broadcast_skip(end, tail) : status;
}

/* As sr_ring_pull, in a ring whose writer may drop items. SR_RING_CUT: as in sr_broadcast_peek. */
static inline enum sr_ring_status sr_broadcast_pull(struct sr_ring_end *end, const sr_flag *tail,
                                                    struct sr_incoming *message)
{
    struct sr_frame head;
    if (tail == NULL)
        return sr_ring_pull(end, message);
    for (;;) {
        const uint64_t position = end->position;
        const enum sr_ring_status status = sr_broadcast_peek(end, tail, &head);
        if (status != SR_RING_WHOLE)
            return status;
        if (head.flags & SR_FRAME_CUT || !sr_ring_continues(message, &head))
            return SR_RING_DAMAGED;
        sr_ring_take(end, &head, message->data == NULL ? NULL : message->data + message->offset);
        if (sr_broadcast_was_dropped(tail, position))
            return sr_broadcast_skip(end, tail);
        message->offset += head.nbytes;
        if (head.flags & SR_FRAME_LAST)
            return SR_RING_WHOLE;
    }
}

#endif
