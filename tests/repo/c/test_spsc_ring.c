/* A ring between two threads. What comes out is what went in, in order and whole, at every length and around every
   edge. No wake-up is lost. Wrong sizes in shared memory are noticed before they are used. The bytes are plain memory,
   so ThreadSanitizer reports frames and credit that are not published as they must be. */
#include "spsc_ring.h"

#include "check.h"

enum { MESSAGES = 3000, RING_MOST_NBYTES = 8192, MESSAGE_MOST_NBYTES = 20000 };
#define TEN_MINUTES_NS 600000000000u /* a lost wake-up sleeps into the watchdog */

struct room {
    struct {
        struct sr_ring ring;
        struct sr_event event[2]; /* by side */
    } queue;
    unsigned char bytes[RING_MOST_NBYTES] __attribute__((aligned(128)));
    uint64_t nbytes, first;
    size_t piece_nbytes;
    bool sleeps, cuts;
};

static struct room room;

static void copy(void *dst, const void *src, size_t nbytes, uint32_t way)
{
    CHECK(way == 0);
    memcpy(dst, src, nbytes);
}

static void open_end(struct sr_ring_end *end, enum sr_side other)
{
    sr_ring_open_end(end, &room.queue.ring, room.bytes, room.nbytes, room.first, &room.queue.event[other], copy,
                     room.piece_nbytes);
}

static void format(uint64_t nbytes, size_t piece_nbytes, int start)
{
    memset(&room, 0, sizeof room);
    room.nbytes = nbytes;
    room.piece_nbytes = piece_nbytes;
    room.first = sr_ring_first(check_start(start, 64 * nbytes), nbytes);
    sr_ring_format(&room.queue.ring, room.first);
}

/* ---- messages of any length, in order ------------------------------------------------------------------------- */

static uint64_t length_of(uint64_t message)
{
    struct check_rank dice = {.random = message};
    uint64_t kind = check_random(&dice) % 8;
    return check_random(&dice) % (kind == 0 ? MESSAGE_MOST_NBYTES : kind < 3 ? 700 : 70);
}

static bool is_cut(uint64_t message) { return room.cuts && message % 5 == 3; }

static unsigned char byte_of(uint64_t message, uint64_t i) { return (unsigned char)(message * 31 + i * 7 + (i >> 8)); }

static void await_room(struct sr_ring_end *end, uint64_t nbytes)
{
    while (!sr_ring_has_room(end, nbytes)) {
        uint32_t generation = sr_event_watch(&room.queue.event[SR_PRODUCER]);
        if (!room.sleeps)
            sr_yield();
        else if (!sr_ring_has_room(end, nbytes))
            sr_event_sleep(&room.queue.event[SR_PRODUCER], generation, TEN_MINUTES_NS);
    }
}

static void put_message(struct check_rank *me, struct sr_ring_end *end, uint64_t number)
{
    unsigned char data[MESSAGE_MOST_NBYTES];
    struct sr_outgoing message = {.head = {.message_nbytes = length_of(number), .tag = (uint32_t)number, .kind = 9},
                                  .data = data};
    const struct sr_frame cut = {.message_nbytes = length_of(number), .flags = SR_FRAME_CUT};
    for (uint64_t i = 0; i < message.head.message_nbytes; i++)
        data[i] = byte_of(number, i);
    check_dawdle(me);
    while (sr_ring_push(end, &message) == SR_RING_WAIT) {
        await_room(end, sr_ring_frame_nbytes(message.head.nbytes));
        if (is_cut(number) && message.offset > 0) {
            sr_ring_put(end, &cut, NULL);
            return;
        }
    }
}

static void await_frame(struct sr_ring_end *end)
{
    sr_ring_publish_taken(end);
    while (!sr_ring_has_frame(end)) {
        uint32_t generation = sr_event_watch(&room.queue.event[SR_CONSUMER]);
        if (!room.sleeps)
            sr_yield();
        else if (!sr_ring_has_frame(end))
            sr_event_sleep(&room.queue.event[SR_CONSUMER], generation, TEN_MINUTES_NS);
    }
}

static void get_message(struct check_rank *me, struct sr_ring_end *end, uint64_t number)
{
    unsigned char data[MESSAGE_MOST_NBYTES];
    struct sr_frame head;
    struct sr_incoming message = {.data = number % 7 == 6 ? NULL : data, .nbytes = length_of(number)};
    enum sr_ring_status status;
    await_frame(end);
    CHECK(sr_ring_peek(end, &head) == SR_RING_WHOLE);
    CHECK(head.tag == (uint32_t)number && head.kind == 9 && head.message_nbytes == length_of(number));
    check_dawdle(me);
    while ((status = sr_ring_pull(end, &message)) == SR_RING_WAIT)
        await_frame(end);
    CHECK(status == SR_RING_WHOLE || (status == SR_RING_CUT && is_cut(number)));
    for (uint64_t i = 0; message.data != NULL && i < message.offset; i++)
        CHECK(data[i] == byte_of(number, i));
}

static void put_and_get(struct check_rank *me)
{
    struct sr_ring_end end;
    open_end(&end, me->rank == 0 ? SR_CONSUMER : SR_PRODUCER);
    for (uint64_t number = 0; number < MESSAGES; number++)
        (me->rank == 0 ? put_message : get_message)(me, &end, number);
    CHECK(me->rank == 0 || !sr_ring_has_frame(&end));
}

static void test_messages_come_out_as_they_went_in(void)
{
    for (int start = 0; start < CHECK_STARTS; start++)
        for (uint64_t nbytes = SR_RING_LEAST_NBYTES; nbytes <= RING_MOST_NBYTES; nbytes *= 4)
            for (int how = 0; how < 4; how++) {
                format(nbytes, how == 0 ? 64 : 4096, start);
                room.sleeps = how != 1;
                room.cuts = how == 3;
                check_ranks(2, put_and_get, &room);
            }
}

/* ---- several producers, one consumer that sleeps on one event for all of them ----------------------------------- */

enum { PRODUCERS = 3, ROUNDS = 800 };

struct many {
    struct sr_ring ring[PRODUCERS];
    unsigned char bytes[PRODUCERS][SR_RING_LEAST_NBYTES] __attribute__((aligned(128)));
    struct sr_event event[PRODUCERS + 1]; /* the consumer's is the first */
    sr_flag marks;
};

static void produce_or_consume(struct check_rank *me)
{
    struct many *shared = me->shared;
    struct sr_ring_end end[PRODUCERS];
    struct sr_frame head = {.message_nbytes = 8, .nbytes = 8, .flags = SR_FRAME_FIRST | SR_FRAME_LAST};
    uint64_t next[PRODUCERS] = {0}, value, left = PRODUCERS * ROUNDS;
    for (int i = 0; i < PRODUCERS; i++)
        sr_ring_open_end(&end[i], &shared->ring[i], shared->bytes[i], SR_RING_LEAST_NBYTES, 0,
                         &shared->event[me->rank == 0 ? i + 1 : 0], copy, 64);
    if (me->rank > 0) {
        struct sr_ring_end *own = &end[me->rank - 1];
        sr_ring_format(own->ring, 0);
        sr_flag_mark(&shared->marks, 1ull << me->rank, &shared->event[0]);
        for (value = 0; value < ROUNDS; value++) {
            check_dawdle(me);
            while (!sr_ring_has_room(own, sr_ring_frame_nbytes(8))) {
                uint32_t generation = sr_event_watch(&shared->event[me->rank]);
                if (!sr_ring_has_room(own, sr_ring_frame_nbytes(8)))
                    sr_event_sleep(&shared->event[me->rank], generation, TEN_MINUTES_NS);
            }
            sr_ring_put(own, &head, &value);
        }
        return;
    }
    while (left > 0) {
        uint32_t generation = sr_event_watch(&shared->event[0]);
        bool any = false;
        for (int i = 0; i < PRODUCERS; i++)
            while (sr_flag_load_ordered(&shared->marks) >> (i + 1) & 1 &&
                   sr_ring_peek(&end[i], &head) == SR_RING_WHOLE) {
                sr_ring_take(&end[i], &head, &value);
                CHECK(value == next[i]++);
                any = true;
                left--;
            }
        for (int i = 0; i < PRODUCERS; i++)
            sr_ring_publish_taken(&end[i]);
        check_dawdle(me);
        if (!any)
            sr_event_sleep(&shared->event[0], generation, TEN_MINUTES_NS);
    }
}

static void test_one_event_wakes_for_every_ring(void)
{
    static struct many shared;
    for (int turn = 0; turn < 10; turn++) {
        memset(&shared, 0, sizeof shared);
        check_ranks(PRODUCERS + 1, produce_or_consume, &shared);
    }
}

/* ---- one thread: edges ---------------------------------------------------------------------------------------- */

static void test_a_full_ring_has_no_room_until_it_is_told(void)
{
    struct sr_ring_end producer, consumer;
    struct sr_frame head = {.message_nbytes = 8, .nbytes = 8, .flags = SR_FRAME_FIRST | SR_FRAME_LAST};
    uint64_t count = 0;
    format(SR_RING_LEAST_NBYTES, 64, CHECK_PAST_64_BITS);
    open_end(&producer, SR_CONSUMER);
    open_end(&consumer, SR_PRODUCER);
    for (; sr_ring_has_room(&producer, sr_ring_frame_nbytes(8)); count++)
        sr_ring_put(&producer, &head, &count);
    CHECK(count == SR_RING_LEAST_NBYTES / SR_CACHE_LINE - 1);
    CHECK(sr_ring_peek(&consumer, &head) == SR_RING_WHOLE);
    sr_ring_take(&consumer, &head, &count);
    CHECK(count == 0);
    CHECK(!sr_ring_has_room(&producer, sr_ring_frame_nbytes(8)));
    sr_ring_publish_taken(&consumer);
    CHECK(sr_ring_has_room(&producer, sr_ring_frame_nbytes(8)));
}

static void test_old_data_are_never_taken_for_a_frame(void)
{
    const struct sr_frame head = {.message_nbytes = 128, .nbytes = 128, .flags = 3};
    const struct sr_frame small = {.message_nbytes = 8, .nbytes = 8, .flags = 3};
    struct sr_ring_end producer, consumer;
    struct sr_frame taken;
    uint64_t data[16] = {0}, lap;
    format(1024, 512, CHECK_PAST_64_BITS);
    open_end(&producer, SR_CONSUMER);
    open_end(&consumer, SR_PRODUCER);
    lap = producer.position + producer.nbytes;
    data[0] = lap + SR_CACHE_LINE + 1; /* what these words hold once frames begin there in the next lap */
    data[8] = lap + 2 * SR_CACHE_LINE + 1;
    for (sr_ring_put(&producer, &head, data); sr_ring_peek(&consumer, &taken) == SR_RING_WHOLE;) {
        sr_ring_take(&consumer, &taken, NULL);
        CHECK(!sr_ring_has_frame(&consumer));
        if (consumer.position != lap + 3 * SR_CACHE_LINE)
            sr_ring_put(&producer, &small, data);
    }
    CHECK(consumer.position == producer.position);
}

static void test_wrong_sizes_are_damage(void)
{
    static const struct sr_frame wrong[] = {
        {.message_nbytes = 1u << 30, .nbytes = 1u << 30, .flags = 3}, /* beyond the ring */
        {.message_nbytes = (1ull << 48) - 1, .nbytes = UINT32_MAX, .flags = 1},
        {.message_nbytes = 8, .nbytes = 8, .flags = 3, .receipt = SR_RECEIPTS}, /* beyond the receipts */
        {.message_nbytes = 8, .nbytes = 9, .flags = 3},               /* a piece larger than its message */
        {.message_nbytes = 64, .nbytes = 8, .flags = 3},              /* marked as the last piece, but is not all */
        {.message_nbytes = 8, .nbytes = 8, .flags = 1},               /* is all, but not marked as the last piece */
        {.message_nbytes = 64, .nbytes = 8, .flags = 0},              /* the middle of no message */
        {.message_nbytes = 64, .nbytes = 0, .flags = 1},              /* an empty piece that is not the last */
        {.message_nbytes = 64, .nbytes = 0, .flags = SR_FRAME_CUT},   /* the end of no message */
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        unsigned char data[64] = {0};
        struct sr_ring_end producer, consumer;
        struct sr_incoming message = {.data = data, .nbytes = wrong[i].message_nbytes};
        struct sr_frame *frame;
        format(1024, 64, CHECK_FROM_ZERO);
        open_end(&producer, SR_CONSUMER);
        open_end(&consumer, SR_PRODUCER);
        frame = sr_ring_frame_at(&producer, producer.position);
        sr_ring_put(&producer, &(struct sr_frame){.nbytes = 0}, NULL);
        frame->nbytes_and_receipt = wrong[i].nbytes_and_receipt;
        frame->nbytes = wrong[i].nbytes;
        frame->flags = wrong[i].flags;
        CHECK(sr_ring_pull(&consumer, &message) == SR_RING_DAMAGED);
        CHECK(consumer.position == room.first && message.offset == 0);
    }
}

static void test_credit_beyond_what_was_put_in_is_none(void)
{
    struct sr_ring_end producer;
    const struct sr_frame head = {.message_nbytes = 200, .nbytes = 200, .flags = 3};
    unsigned char data[200] = {0};
    format(1024, 512, CHECK_FROM_ZERO);
    open_end(&producer, SR_CONSUMER);
    while (sr_ring_has_room(&producer, sr_ring_frame_nbytes(200)))
        sr_ring_put(&producer, &head, data);
    sr_flag_set(&room.queue.ring.taken.value, producer.position + 64);
    CHECK(!sr_ring_has_room(&producer, sr_ring_frame_nbytes(200)));
    sr_flag_set(&room.queue.ring.taken.value, producer.position);
    CHECK(sr_ring_has_room(&producer, sr_ring_frame_nbytes(200)));
}

int main(void)
{
    check_begin("messages come out as they went in");
    test_messages_come_out_as_they_went_in();
    check_begin("a sleep on one event ends for every ring");
    test_one_event_wakes_for_every_ring();
    check_begin("a full ring has no room until the consumer publishes");
    test_a_full_ring_has_no_room_until_it_is_told();
    check_begin("old data are never taken for a frame");
    test_old_data_are_never_taken_for_a_frame();
    check_begin("wrong sizes are damage");
    test_wrong_sizes_are_damage();
    check_begin("invalid credit gives no room");
    test_credit_beyond_what_was_put_in_is_none();
    return 0;
}
