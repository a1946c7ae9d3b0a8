/* A ring from one writer to one or several readers, all threads. Every reader gets every message, in order and whole,
   at every length and around every edge; a reader that comes late gets every message from one on; a reader that leaves
   is no longer waited for. If the writer drops messages, a reader gets whole messages only, and knows how many it has
   lost. No wake-up is lost. Wrong sizes in shared memory are noticed before they are used. The bytes are plain memory,
   so ThreadSanitizer reports frames and room that are not published as they must be. */
#ifdef __SANITIZE_THREAD__ /* it does not know fences, on which only a writer that drops messages relies */
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include "broadcast.h"

#include "check.h"

enum { MESSAGES = 1500, RING_MOST_NBYTES = 8192, MESSAGE_MOST_NBYTES = 20000, MOST_PLACES = 4 };
enum { HEAD_NBYTES = 4 * SR_PAGE };
#define TEN_MINUTES_NS 600000000000u /* a lost wake-up sleeps into the watchdog */

/* A reader of a ring that drops messages may copy bytes while they are overwritten, and then discards its copy.
   ThreadSanitizer is to ignore these reads. */
#ifdef __SANITIZE_THREAD__
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
#else
static void AnnotateIgnoreReadsBegin(const char *file, int line) { (void)file, (void)line; }
static void AnnotateIgnoreReadsEnd(const char *file, int line) { (void)file, (void)line; }
#endif

struct room {
    union {
        struct sr_broadcast ring;
        unsigned char head[HEAD_NBYTES];
    };
    unsigned char bytes[RING_MOST_NBYTES] __attribute__((aligned(128)));
    uint64_t nbytes, first;
    size_t piece_nbytes;
    uint32_t places;
    bool sleeps, cuts, comes_and_goes;
    _Atomic bool is_over;
    _Atomic uint64_t lost;
};

static struct room room;

static void copy(void *dst, const void *src, size_t nbytes, uint32_t way)
{
    CHECK(way == 0);
    memcpy(dst, src, nbytes);
}

static void format(uint64_t nbytes, size_t piece_nbytes, uint32_t places, uint32_t reserved, bool drops, int start)
{
    memset(&room, 0, sizeof room);
    room.nbytes = nbytes;
    room.piece_nbytes = piece_nbytes;
    room.places = places;
    room.first = sr_ring_first(check_start(start, 64 * nbytes), nbytes);
    sr_broadcast_format(&room.ring, nbytes, places, reserved, drops, false, room.first);
    CHECK(sr_broadcast_head_nbytes(places) <= HEAD_NBYTES);
    CHECK(sr_broadcast_is_valid(&room.ring, HEAD_NBYTES + nbytes, nbytes, places));
}

static void open_writer(struct sr_broadcast_writer *writer)
{
    sr_broadcast_open_writer(writer, &room.ring, room.bytes, room.nbytes, room.first, copy, room.piece_nbytes);
}

/* ---- messages of any length ----------------------------------------------------------------------------------- */

static uint64_t length_of(uint64_t message)
{
    struct check_rank dice = {.random = message};
    uint64_t kind = check_random(&dice) % 8;
    uint64_t most = kind == 0 ? MESSAGE_MOST_NBYTES : kind < 3 ? 700 : 70;
    if (room.ring.drops && most > room.nbytes / 4) /* has to fit into the ring */
        most = room.nbytes / 4;
    return check_random(&dice) % most;
}

static bool is_cut(uint64_t message) { return room.cuts && message % 5 == 3; }

static unsigned char byte_of(uint64_t message, uint64_t i) { return (unsigned char)(message * 31 + i * 7 + (i >> 8)); }

/* ---- the writer ----------------------------------------------------------------------------------------------- */

static bool has_room(struct sr_broadcast_writer *writer, uint64_t nbytes)
{
    if (!sr_ring_has_room(&writer->end, nbytes))
        sr_broadcast_find_slowest(writer, room.places);
    return sr_ring_has_room(&writer->end, nbytes);
}

static void await_room(struct sr_broadcast_writer *writer, uint64_t nbytes)
{
    while (!has_room(writer, nbytes)) {
        const int slowest = writer->slowest;
        struct sr_event *event = &room.ring.reader[slowest].event;
        uint32_t generation = sr_event_watch(event);
        if (!room.sleeps)
            sr_yield();
        else if (!has_room(writer, nbytes) && writer->slowest == slowest)
            sr_event_sleep(event, generation, TEN_MINUTES_NS);
    }
}

static void put_cut(struct sr_broadcast_writer *writer, uint64_t number)
{
    const struct sr_frame cut = {.message_nbytes = length_of(number), .flags = SR_FRAME_CUT, .kind = number};
    await_room(writer, sr_ring_frame_nbytes(0));
    sr_ring_put(&writer->end, &cut, NULL);
}

static void put_message(struct check_rank *me, struct sr_broadcast_writer *writer, uint64_t number)
{
    unsigned char data[MESSAGE_MOST_NBYTES];
    struct sr_outgoing message = {.head = {.message_nbytes = length_of(number), .kind = number}, .data = data};
    for (uint64_t i = 0; i < message.head.message_nbytes; i++)
        data[i] = byte_of(number, i);
    check_dawdle(me);
    if (sr_broadcast_has_changed(writer))
        sr_broadcast_admit(writer, room.places, number);
    if (room.ring.drops) {
        const uint64_t needed = sr_ring_message_nbytes(&writer->end, message.head.message_nbytes);
        if (!sr_ring_has_room(&writer->end, needed))
            CHECK(sr_broadcast_drop(writer, needed));
        CHECK(sr_ring_push(&writer->end, &message) == SR_RING_WHOLE);
        return;
    }
    while (sr_ring_push(&writer->end, &message) == SR_RING_WAIT) {
        await_room(writer, sr_ring_frame_nbytes(message.head.nbytes));
        if (is_cut(number) && message.offset > 0) {
            put_cut(writer, number);
            return;
        }
    }
}

static void put_all(struct check_rank *me)
{
    struct sr_broadcast_writer writer;
    open_writer(&writer);
    for (uint64_t number = 0; number < MESSAGES; number++)
        put_message(me, &writer, number);
    room.is_over = true;
    sr_event_signal(&room.ring.event);
}

/* ---- a reader ------------------------------------------------------------------------------------------------- */

struct reader {
    struct sr_ring_end end;
    const sr_flag *tail;
    uint32_t place;
    uint64_t owner;
};

static bool is_admitted(const struct reader *reader)
{
    return sr_place_state(sr_flag_load_ordered(&room.ring.reader[reader->place].place.owner)) == SR_PLACE_JOINED;
}

static bool is_ready(const struct reader *reader)
{
    bool ready;
    if (reader->end.ring == NULL)
        return is_admitted(reader);
    if (!room.ring.drops)
        return sr_ring_has_frame(&reader->end);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    ready = sr_ring_has_frame(&reader->end) || sr_broadcast_was_dropped(reader->tail, reader->end.position);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    return ready;
}

/* Return whether something has come; false once the writer has ended. */
static bool await_frame(struct reader *reader)
{
    if (reader->end.ring != NULL)
        sr_ring_publish_taken(&reader->end);
    while (!is_ready(reader)) {
        uint32_t generation = sr_event_watch(&room.ring.event);
        if (is_ready(reader))
            return true;
        if (room.is_over)
            return is_ready(reader);
        if (!room.sleeps)
            sr_yield();
        else
            sr_event_sleep(&room.ring.event, generation, TEN_MINUTES_NS);
    }
    return true;
}

/* Return the number of the first message that this reader is to get. */
static uint64_t join(struct check_rank *me, struct reader *reader)
{
    struct sr_reader *shared;
    memset(reader, 0, sizeof *reader);
    reader->place = (uint32_t)sr_broadcast_take_place(&room.ring, room.places, (uint32_t)me->rank);
    CHECK(reader->place < room.places);
    shared = &room.ring.reader[reader->place];
    if (!await_frame(reader))
        return MESSAGES;
    reader->owner = sr_place_owner((uint32_t)me->rank, SR_PLACE_JOINED);
    CHECK(sr_flag_load(&shared->place.owner) == reader->owner);
    reader->tail = &room.ring.tail.value;
    sr_ring_open_end(&reader->end, &shared->ring, room.bytes, room.nbytes, sr_flag_load(&shared->place.first),
                     &shared->event, copy, room.piece_nbytes);
    return sr_flag_load(&shared->place.first_number);
}

static void leave(struct reader *reader)
{
    sr_broadcast_leave(&room.ring, reader->place, sr_flag_load(&room.ring.reader[reader->place].place.owner));
}

static enum sr_ring_status peek(struct reader *reader, struct sr_frame *head)
{
    enum sr_ring_status status;
    if (!room.ring.drops)
        return sr_ring_peek(&reader->end, head);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    status = sr_broadcast_peek(&reader->end, reader->tail, head);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    return status;
}

static enum sr_ring_status pull(struct reader *reader, struct sr_incoming *message)
{
    enum sr_ring_status status;
    if (!room.ring.drops)
        return sr_ring_pull(&reader->end, message);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    status = sr_broadcast_pull(&reader->end, reader->tail, message);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    return status;
}

/* Get one message and store its number. Return SR_RING_WHOLE, SR_RING_CUT, or SR_RING_WAIT at the end of all
   messages. */
static enum sr_ring_status get_message(struct check_rank *me, struct reader *reader, uint64_t *number)
{
    unsigned char data[MESSAGE_MOST_NBYTES];
    struct sr_frame head;
    struct sr_incoming message = {.data = data};
    enum sr_ring_status status;
    while ((status = peek(reader, &head)) == SR_RING_WAIT)
        if (!await_frame(reader))
            return SR_RING_WAIT;
    if (status == SR_RING_CUT)
        return status;
    CHECK(status == SR_RING_WHOLE);
    *number = head.kind;
    CHECK(head.message_nbytes == length_of(*number));
    message.nbytes = head.message_nbytes;
    check_dawdle(me);
    while ((status = pull(reader, &message)) == SR_RING_WAIT)
        CHECK(await_frame(reader));
    CHECK(status == SR_RING_WHOLE || status == SR_RING_CUT);
    for (uint64_t i = 0; status == SR_RING_WHOLE && i < message.nbytes; i++)
        CHECK(data[i] == byte_of(*number, i));
    return status;
}

/* Get messages until the end of all, or `most` of them, and check that none is missing. */
static void get_in_order(struct check_rank *me, uint64_t most)
{
    struct reader reader;
    uint64_t wanted = join(me, &reader), number;
    if (room.ring.reserved == room.places)
        CHECK(wanted == 0);
    for (; most > 0 && wanted < MESSAGES; most--, wanted++) {
        const enum sr_ring_status status = get_message(me, &reader, &number);
        CHECK(status == SR_RING_WHOLE || (status == SR_RING_CUT && is_cut(wanted)));
        CHECK(number == wanted);
    }
    CHECK(wanted < MESSAGES || reader.end.ring == NULL || get_message(me, &reader, &number) == SR_RING_WAIT);
    leave(&reader);
}

static void put_or_get(struct check_rank *me)
{
    if (me->rank == 0)
        put_all(me);
    else if (room.comes_and_goes)
        while (!room.is_over)
            get_in_order(me, check_random(me) % 100);
    else
        get_in_order(me, UINT64_MAX);
}

static void test_every_reader_gets_every_message(void)
{
    for (int start = 0; start < CHECK_STARTS; start++)
        for (uint64_t nbytes = SR_RING_LEAST_NBYTES; nbytes <= RING_MOST_NBYTES; nbytes *= 4)
            for (uint32_t readers = 1; readers <= MOST_PLACES; readers *= 2)
                for (int how = 0; how < 3; how++) {
                    format(nbytes, how == 0 ? 64 : 4096, readers, readers, false, start);
                    room.sleeps = how != 1;
                    room.cuts = how == 2;
                    check_ranks((int)readers + 1, put_or_get, &room);
                }
}

static void test_readers_that_come_and_go_miss_nothing_in_between(void)
{
    for (int start = 0; start < CHECK_STARTS; start++)
        for (uint64_t nbytes = SR_RING_LEAST_NBYTES; nbytes <= RING_MOST_NBYTES; nbytes *= 4) {
            format(nbytes, 512, MOST_PLACES, 0, false, start);
            room.sleeps = start != 1;
            room.comes_and_goes = true;
            check_ranks(MOST_PLACES + 1, put_or_get, &room);
        }
}

/* ---- a writer that drops messages ----------------------------------------------------------------------------- */

static void get_what_is_left(struct check_rank *me)
{
    struct reader reader;
    uint64_t next = join(me, &reader), lost = next, got = 0, number = 0;
    enum sr_ring_status status;
    while ((status = get_message(me, &reader, &number)) != SR_RING_WAIT) {
        if (status == SR_RING_CUT)
            continue;
        CHECK(number >= next);
        lost += number - next;
        next = number + 1;
        got++;
        if (me->rank % 2)
            check_dawdle(me);
    }
    CHECK(next == MESSAGES && got + lost == MESSAGES); /* the last message is never dropped */
    room.lost += lost;
}

static void put_or_get_what_is_left(struct check_rank *me) { (me->rank == 0 ? put_all : get_what_is_left)(me); }

static void test_what_a_slow_reader_gets_is_whole(void)
{
    uint64_t lost = 0;
    for (int start = 0; start < CHECK_STARTS; start++)
        for (uint64_t nbytes = SR_RING_LEAST_NBYTES; nbytes <= RING_MOST_NBYTES; nbytes *= 4)
            for (uint32_t readers = 1; readers <= MOST_PLACES; readers *= 2) {
                format(nbytes, nbytes == RING_MOST_NBYTES ? 512 : 64, readers, readers, true, start);
                room.sleeps = readers != 2;
                check_ranks((int)readers + 1, put_or_get_what_is_left, &room);
                lost += room.lost;
            }
    CHECK(lost > 0);
}

/* ---- one thread: edges ---------------------------------------------------------------------------------------- */

static const struct sr_frame EIGHT = {.message_nbytes = 8, .nbytes = 8, .flags = SR_FRAME_FIRST | SR_FRAME_LAST};

static void open_reader(struct reader *reader)
{
    struct check_rank me = {.rank = 1};
    join(&me, reader);
}

static uint64_t fill(struct sr_broadcast_writer *writer)
{
    uint64_t count = 0;
    for (; has_room(writer, sr_ring_frame_nbytes(8)); count++)
        sr_ring_put(&writer->end, &EIGHT, &count);
    return count;
}

static void take(struct reader *reader, uint64_t wanted)
{
    struct sr_frame head;
    uint64_t value;
    CHECK(sr_ring_peek(&reader->end, &head) == SR_RING_WHOLE);
    sr_ring_take(&reader->end, &head, &value);
    sr_ring_publish_taken(&reader->end);
    CHECK(value == wanted);
}

static void test_the_slowest_reader_makes_the_room(void)
{
    struct sr_broadcast_writer writer;
    struct reader reader[3];
    format(SR_RING_LEAST_NBYTES, 64, 4, 3, false, CHECK_PAST_64_BITS);
    open_writer(&writer);
    CHECK(fill(&writer) == SR_RING_LEAST_NBYTES / SR_CACHE_LINE - 1); /* also for readers that have not come */
    for (int i = 0; i < 3; i++)
        open_reader(&reader[i]);
    take(&reader[0], 0);
    take(&reader[2], 0);
    CHECK(!has_room(&writer, sr_ring_frame_nbytes(8)) && writer.slowest == 1);
    take(&reader[1], 0);
    CHECK(has_room(&writer, sr_ring_frame_nbytes(8)));
    CHECK(fill(&writer) == 1);
    take(&reader[0], 1);
    take(&reader[1], 1);
    CHECK(!has_room(&writer, sr_ring_frame_nbytes(8)) && writer.slowest == 2);
    leave(&reader[2]); /* as when it has died */
    CHECK(has_room(&writer, sr_ring_frame_nbytes(8)) && fill(&writer) == 1);
    leave(&reader[0]);
    leave(&reader[1]);
    CHECK(has_room(&writer, sr_ring_frame_nbytes(8)) && writer.slowest == -1);
}

static void test_a_place_is_for_one_reader(void)
{
    struct sr_broadcast_writer writer;
    format(SR_RING_LEAST_NBYTES, 64, 3, 1, false, CHECK_FROM_ZERO);
    open_writer(&writer);
    CHECK(sr_broadcast_has_changed(&writer) && sr_broadcast_admit(&writer, 3, 7) == 0);
    CHECK(!sr_broadcast_has_changed(&writer));
    CHECK(sr_broadcast_take_place(&room.ring, 3, 11) == 0); /* the reserved one, which needs no admission */
    CHECK(sr_broadcast_take_place(&room.ring, 3, 12) == 1);
    CHECK(sr_broadcast_take_place(&room.ring, 3, 13) == 2);
    CHECK(sr_broadcast_take_place(&room.ring, 3, 14) == -1);
    CHECK(sr_broadcast_has_changed(&writer));
    sr_broadcast_leave(&room.ring, 2, sr_place_owner(13, SR_PLACE_JOINING));
    CHECK(sr_broadcast_admit(&writer, 3, 7) == 1);
    CHECK(sr_flag_load(&room.ring.reader[1].place.owner) == sr_place_owner(12, SR_PLACE_JOINED));
    CHECK(sr_flag_load(&room.ring.reader[1].place.first_number) == 7);
    sr_broadcast_leave(&room.ring, 1, sr_place_owner(99, SR_PLACE_JOINED)); /* another owner's: nothing happens */
    CHECK(sr_flag_load(&room.ring.reader[1].place.owner) == sr_place_owner(12, SR_PLACE_JOINED));
    sr_broadcast_leave(&room.ring, 1, sr_place_owner(12, SR_PLACE_JOINED));
    CHECK(sr_broadcast_take_place(&room.ring, 3, 15) == 1);
}

static void test_a_place_for_single_use_has_one_owner(void)
{
    format(SR_RING_LEAST_NBYTES, 64, 1, 1, false, CHECK_FROM_ZERO);
    room.ring.single_use = true;
    CHECK(sr_broadcast_take_place(&room.ring, 1, 11) == 0);
    CHECK(sr_broadcast_has_readers(&room.ring, 1));
    sr_broadcast_leave(&room.ring, 0, sr_place_owner(11, SR_PLACE_JOINED));
    CHECK(!sr_broadcast_has_readers(&room.ring, 1));
    CHECK(sr_broadcast_take_place(&room.ring, 1, 12) == -1);
    CHECK(sr_flag_load(&room.ring.reader[0].place.owner) == sr_place_owner(11, SR_PLACE_CLOSED));

    format(SR_RING_LEAST_NBYTES, 64, 1, 1, false, CHECK_FROM_ZERO);
    room.ring.single_use = true;
    sr_broadcast_leave(&room.ring, 0, SR_PLACE_RESERVED); /* no process will come */
    CHECK(!sr_broadcast_has_readers(&room.ring, 1));
    CHECK(sr_broadcast_take_place(&room.ring, 1, 12) == -1);
}

static void test_a_message_in_parts_is_one_message(void)
{
    unsigned char given[900], found[900];
    const uint64_t part[] = {0, 1, 0, 63, 700, 0, 136, 0};
    struct sr_broadcast_writer writer;
    struct reader reader;
    struct sr_outgoing message = {.head = {.message_nbytes = 900}};
    struct sr_incoming incoming = {.data = found, .nbytes = 900};
    for (size_t i = 0; i < sizeof given; i++)
        given[i] = (unsigned char)(i * 7);
    format(SR_RING_LEAST_NBYTES, 100, 1, 1, false, CHECK_PAST_64_BITS);
    open_writer(&writer);
    open_reader(&reader);
    for (size_t i = 0, begin = 0; i < sizeof part / sizeof part[0]; begin += part[i++]) {
        uint64_t done = 0;
        while (sr_ring_push_part(&writer.end, &message, given + begin, part[i], &done) == SR_RING_WAIT) {
            CHECK(sr_ring_pull(&reader.end, &incoming) == SR_RING_WAIT);
            sr_ring_publish_taken(&reader.end);
            CHECK(has_room(&writer, sr_ring_frame_nbytes(message.head.nbytes)));
        }
    }
    CHECK(sr_ring_pull(&reader.end, &incoming) == SR_RING_WHOLE && memcmp(given, found, 900) == 0);
}

static void test_a_message_goes_with_the_one_before_it(void)
{
    struct sr_broadcast_writer writer;
    struct reader reader;
    struct sr_frame head;
    uint64_t value;
    format(SR_RING_LEAST_NBYTES, 64, 1, 1, true, CHECK_PAST_64_BITS);
    open_writer(&writer);
    open_reader(&reader);
    for (value = 0; value < 6; value++) {
        head = EIGHT;
        head.tag = value % 2 == 0 ? SR_FRAME_CONTINUED : 0;
        sr_ring_put(&writer.end, &head, &value);
    }
    CHECK(sr_broadcast_drop(&writer, 3 * SR_CACHE_LINE));
    CHECK(sr_broadcast_peek(&reader.end, reader.tail, &head) == SR_RING_CUT);
    CHECK(sr_broadcast_peek(&reader.end, reader.tail, &head) == SR_RING_WHOLE);
    CHECK(head.tag == SR_FRAME_CONTINUED);
    sr_ring_take(&reader.end, &head, &value);
    CHECK(value == 4);
    CHECK(sr_broadcast_drop(&writer, SR_RING_LEAST_NBYTES - SR_CACHE_LINE)); /* all of the ring */
    CHECK(sr_broadcast_peek(&reader.end, reader.tail, &head) == SR_RING_CUT);
    CHECK(reader.end.position == writer.end.position);
    CHECK(sr_broadcast_peek(&reader.end, reader.tail, &head) == SR_RING_WAIT);
}

static void test_wrong_sizes_and_positions_are_damage(void)
{
    struct sr_broadcast_writer writer;
    struct reader reader;
    struct sr_frame head, *frame;
    uint64_t value = 5;
    format(1024, 64, 2, 2, true, CHECK_FROM_ZERO);
    CHECK(sr_broadcast_is_valid(&room.ring, sr_broadcast_head_nbytes(2) + 1024, 1024, 2));
    CHECK(!sr_broadcast_is_valid(&room.ring, sr_broadcast_head_nbytes(2) + 1023, 1024, 2));
    CHECK(!sr_broadcast_is_valid(&room.ring, sizeof room, 1000, 2));
    CHECK(!sr_broadcast_is_valid(&room.ring, sizeof room, 1ull << 63, 2));
    CHECK(!sr_broadcast_is_valid(&room.ring, sizeof room, 1024, 0));
    CHECK(!sr_broadcast_is_valid(&room.ring, sizeof room, 1024, SR_MOST_READERS + 1));
    CHECK(!sr_broadcast_is_valid(&room.ring, sizeof room, 1024, SR_MOST_READERS));
    open_writer(&writer);
    open_reader(&reader);
    sr_flag_set(&room.ring.tail.value, room.first + 64 + 8); /* no frame begins there */
    CHECK(sr_broadcast_peek(&reader.end, reader.tail, &head) == SR_RING_DAMAGED);
    sr_flag_set(&room.ring.tail.value, room.first);
    frame = sr_ring_frame_at(&writer.end, writer.end.position);
    sr_ring_put(&writer.end, &EIGHT, &value);
    frame->nbytes = 1u << 30;
    CHECK(sr_broadcast_peek(&reader.end, reader.tail, &head) == SR_RING_DAMAGED);
    CHECK(!sr_broadcast_drop(&writer, 960));
    frame->nbytes = 800; /* beyond what was put in */
    frame->message_nbytes = 800;
    CHECK(!sr_broadcast_drop(&writer, 960));
    frame->nbytes = 8;
    frame->flags = SR_FRAME_FIRST; /* the ring holds no end of the message */
    CHECK(!sr_broadcast_drop(&writer, 960));
}

static void test_credit_beyond_what_was_put_in_is_none(void)
{
    struct sr_broadcast_writer writer;
    format(1024, 512, 2, 2, false, CHECK_FROM_ZERO);
    open_writer(&writer);
    fill(&writer);
    sr_flag_set(&room.ring.reader[0].ring.taken.value, writer.end.position + 64);
    sr_flag_set(&room.ring.reader[1].ring.taken.value, writer.end.position);
    CHECK(!has_room(&writer, sr_ring_frame_nbytes(8)));
    sr_flag_set(&room.ring.reader[0].ring.taken.value, writer.end.position);
    CHECK(has_room(&writer, sr_ring_frame_nbytes(8)));
}

int main(void)
{
    check_begin("every reader gets every message");
    test_every_reader_gets_every_message();
    check_begin("readers that come and go miss nothing in between");
    test_readers_that_come_and_go_miss_nothing_in_between();
    check_begin("what a slow reader gets is whole");
    test_what_a_slow_reader_gets_is_whole();
    check_begin("the slowest reader makes the room");
    test_the_slowest_reader_makes_the_room();
    check_begin("a place is for one reader");
    test_a_place_is_for_one_reader();
    check_begin("a place for single use has one owner");
    test_a_place_for_single_use_has_one_owner();
    check_begin("a message in parts is one message");
    test_a_message_in_parts_is_one_message();
    check_begin("a message goes with the one before it");
    test_a_message_goes_with_the_one_before_it();
    check_begin("wrong sizes and positions are damage");
    test_wrong_sizes_and_positions_are_damage();
    check_begin("invalid credit gives no room");
    test_credit_beyond_what_was_put_in_is_none();
    return 0;
}
