/* Offers between two threads: each message arrives once and whole, whether its consumer reads it where it lies, refuses
   it, or comes so late that its producer sends it through the ring. Memory that the producer has withdrawn is never
   taken for the message. The bytes are plain memory, so ThreadSanitizer reports a read that a later write does not wait
   for. */
#include "offer.h"

#include "check.h"

enum { MESSAGES = 2000, RING_NBYTES = 16384, MESSAGE_NBYTES = 1000, PIECE_NBYTES = 200 };
#define TEN_MINUTES_NS 600000000000u /* a lost wake-up sleeps into the watchdog */

struct room {
    struct {
        struct sr_ring ring;
        struct sr_event event[2]; /* by side */
    } queue;
    unsigned char bytes[RING_NBYTES] __attribute__((aligned(128)));
    unsigned char x[MESSAGE_NBYTES]; /* the producer's */
    bool sleeps;
    bool takes_back; /* the producer withdraws some messages, which then never arrive, and may change them at once */
    uint64_t first;
    uint64_t staged, refused, read; /* W: the producer */
};

static struct room room;

static void copy(void *dst, const void *src, size_t nbytes, uint32_t way)
{
    CHECK(way == 0);
    memcpy(dst, src, nbytes);
}

static void open_end(struct sr_ring_end *end, enum sr_side other)
{
    sr_ring_open_end(end, &room.queue.ring, room.bytes, RING_NBYTES, room.first, &room.queue.event[other], copy,
                     PIECE_NBYTES);
}

static unsigned char byte_of(uint64_t number, uint64_t i) { return (unsigned char)(number * 31 + i * 7); }

static bool is_taken_back(uint64_t number) { return room.takes_back && number % 3 == 2; }

static void await(enum sr_side side, bool (*is_there)(void *), void *of)
{
    while (!is_there(of)) {
        uint32_t generation = sr_event_watch(&room.queue.event[side]);
        if (!room.sleeps)
            sr_yield();
        else if (!is_there(of))
            sr_event_sleep(&room.queue.event[side], generation, TEN_MINUTES_NS);
    }
}

/* ---- the producer --------------------------------------------------------------------------------------------- */

static bool has_ended(void *offer)
{
    const enum sr_offer_state state = sr_offer_state(offer);
    return state != SR_OFFER_OPEN && state != SR_OFFER_READING;
}

static bool has_room(void *end) { return sr_ring_has_room(end, sr_ring_frame_nbytes(PIECE_NBYTES)); }

static void send_through_ring(struct sr_ring_end *end, struct sr_outgoing *message)
{
    while (sr_ring_push(end, message) == SR_RING_WAIT)
        await(SR_PRODUCER, has_room, end);
}

static void put_message(struct check_rank *me, struct sr_ring_end *end, uint64_t number)
{
    struct sr_outgoing message = {.head = {.message_nbytes = MESSAGE_NBYTES, .tag = (uint32_t)number}, .data = room.x};
    struct sr_offer *offer;
    for (uint64_t i = 0; i < MESSAGE_NBYTES; i++)
        room.x[i] = byte_of(number, i);
    await(SR_PRODUCER, has_room, end);
    offer = sr_offer_put(end, &message.head, (uintptr_t)room.x, SR_PRIVATE);
    check_dawdle(me);
    if (number % 3 == 1 && sr_offer_stage(offer)) {
        room.staged++;
        send_through_ring(end, &message);
        return;
    }
    if (is_taken_back(number)) {
        check_dawdle(me);
        sr_offer_withdraw(offer);
        return; /* the next message overwrites x */
    }
    await(SR_PRODUCER, has_ended, offer);
    if (sr_offer_state(offer) == SR_OFFER_REFUSED) {
        room.refused++;
        send_through_ring(end, &message);
    } else {
        CHECK(sr_offer_state(offer) == SR_OFFER_READ);
        room.read++;
    }
}

/* ---- the consumer --------------------------------------------------------------------------------------------- */

static bool has_frame(void *end) { return sr_ring_has_frame(end); }

static void get_through_ring(struct sr_ring_end *end, unsigned char *data)
{
    struct sr_incoming message = {.data = data, .nbytes = MESSAGE_NBYTES};
    enum sr_ring_status status;
    while ((status = sr_ring_pull(end, &message)) == SR_RING_WAIT) {
        sr_ring_publish_taken(end);
        await(SR_CONSUMER, has_frame, end);
    }
    CHECK(status == SR_RING_WHOLE);
}

/* The bytes may change while they are read, if the producer withdraws the message: then they are not used. */
__attribute__((no_sanitize("thread"))) static void read_unordered(unsigned char *to, const unsigned char *from)
{
    for (uint64_t i = 0; i < MESSAGE_NBYTES; i++)
        to[i] = ((const volatile unsigned char *)from)[i];
}

/* Return false if the producer has withdrawn the message. */
static bool get_message(struct check_rank *me, struct sr_ring_end *end, uint64_t number, unsigned char *data)
{
    struct sr_frame head;
    struct sr_offer *offer;
    bool valid;
    await(SR_CONSUMER, has_frame, end);
    CHECK(sr_ring_peek(end, &head) == SR_RING_WHOLE);
    offer = sr_offer_at(end, &head);
    CHECK(offer != NULL && head.tag == (uint32_t)number && head.message_nbytes == MESSAGE_NBYTES);
    check_dawdle(me);
    valid = sr_offer_begin(offer);
    if (valid && number % 5 == 4 && !is_taken_back(number)) {
        valid = sr_offer_answer(offer, SR_OFFER_REFUSED, end->event);
        sr_ring_take(end, &head, NULL);
        if (valid)
            get_through_ring(end, data);
        return valid;
    }
    if (valid) {
        check_dawdle(me);
        if (room.takes_back)
            read_unordered(data, (unsigned char *)(uintptr_t)offer->address);
        else
            memcpy(data, (void *)(uintptr_t)offer->address, MESSAGE_NBYTES);
        valid = sr_offer_answer(offer, SR_OFFER_READ, end->event);
        sr_ring_take(end, &head, NULL);
        return valid;
    }
    valid = sr_offer_state(offer) == SR_OFFER_STAGED;
    CHECK(valid || sr_offer_state(offer) == SR_OFFER_WITHDRAWN);
    sr_ring_take(end, &head, NULL);
    if (valid)
        get_through_ring(end, data);
    return valid;
}

static void put_and_get(struct check_rank *me)
{
    unsigned char data[MESSAGE_NBYTES];
    struct sr_ring_end end;
    open_end(&end, me->rank == 0 ? SR_CONSUMER : SR_PRODUCER);
    for (uint64_t number = 0; number < MESSAGES; number++) {
        if (me->rank == 0)
            put_message(me, &end, number);
        else if (get_message(me, &end, number, data))
            for (uint64_t i = 0; i < MESSAGE_NBYTES; i++)
                CHECK(data[i] == byte_of(number, i));
        else
            CHECK(is_taken_back(number));
        if (me->rank == 1 && number % 8 == 7) /* seldom: it wakes the producer, as an answer has to do */
            sr_ring_publish_taken(&end);
    }
}

static void test_messages_arrive_once(bool takes_back)
{
    for (int start = 0; start < CHECK_STARTS; start++)
        for (int sleeps = 0; sleeps < 2; sleeps++) {
            memset(&room, 0, sizeof room);
            room.sleeps = sleeps;
            room.takes_back = takes_back;
            room.first = sr_ring_first(check_start(start, 64 * RING_NBYTES), RING_NBYTES);
            sr_ring_format(&room.queue.ring, room.first);
            check_ranks(2, put_and_get, &room);
            CHECK(room.read > 0 && room.refused > 0);
        }
}

/* ---- what must not be taken for an offer ------------------------------------------------------------------------ */

static void test_frames_that_are_no_offers_are_refused(void)
{
    const struct sr_frame wrong[] = {
        {.message_nbytes = 64, .nbytes = 24, .flags = SR_FRAME_FIRST},
        {.message_nbytes = 64, .nbytes = 24, .flags = SR_FRAME_OFFER},
        {.message_nbytes = 64, .nbytes = 23, .flags = SR_FRAME_FIRST | SR_FRAME_OFFER},
        {.message_nbytes = 64, .nbytes = 24, .flags = SR_FRAME_FIRST | SR_FRAME_OFFER | SR_FRAME_LAST},
    };
    struct sr_frame right = {.message_nbytes = 64, .nbytes = 24, .flags = SR_FRAME_FIRST | SR_FRAME_OFFER};
    struct sr_incoming message = {.nbytes = 64};
    struct sr_ring_end producer, consumer;
    memset(&room, 0, sizeof room);
    open_end(&producer, SR_CONSUMER);
    open_end(&consumer, SR_PRODUCER);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK(sr_offer_at(&consumer, &wrong[i]) == NULL);
    CHECK(sr_offer_at(&consumer, &right) != NULL);
    sr_offer_put(&producer, &right, 0, SR_PRIVATE);
    CHECK(sr_ring_pull(&consumer, &message) == SR_RING_DAMAGED); /* an offer is no piece */
}

static void test_a_withdrawn_offer_ends(void)
{
    struct sr_offer offer = {.address = 0};
    sr_offer_withdraw(&offer);
    CHECK(!sr_offer_begin(&offer) && sr_offer_state(&offer) == SR_OFFER_WITHDRAWN);
    offer.state = SR_OFFER_READING;
    sr_offer_withdraw(&offer);
    CHECK(!sr_offer_answer(&offer, SR_OFFER_READ, &room.queue.event[0]));
    offer.state = SR_OFFER_READ; /* too late: the message has arrived */
    sr_offer_withdraw(&offer);
    CHECK(sr_offer_state(&offer) == SR_OFFER_READ);
}

int main(void)
{
    check_begin("each message arrives once and whole");
    test_messages_arrive_once(false);
    check_begin("no byte that was changed after a withdrawal arrives");
    test_messages_arrive_once(true);
    check_begin("frames that are no offers are refused");
    test_frames_that_are_no_offers_are_refused();
    check_begin("a withdrawn offer ends");
    test_a_withdrawn_offer_ends();
    return 0;
}
