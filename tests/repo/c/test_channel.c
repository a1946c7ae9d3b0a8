/* Channels between two ranks. Each rank has a thread that reads and one that only polls, as during a collective. What
   is received is what was sent, in order and whole, however the kernel cuts it. Notifications are received behind
   messages that no rank receives. Whatever bytes arrive, nothing is written outside of its place. */
#include <errno.h>
#include <sys/socket.h>

static _Thread_local int refusal; /* the error of the next call of sendmsg; 0: none */

static ssize_t sendmsg_or_refuse(int fd, const struct msghdr *all, int flags)
{
    errno = refusal;
    refusal = 0;
    return errno ? -1 : sendmsg(fd, all, flags);
}

#define sendmsg sendmsg_or_refuse
#include "../../../src/channel.c"

#include "check.h"

#include <arpa/inet.h>
#include <fcntl.h>

enum { MESSAGES = 2000, MOST_NBYTES = 60000, RING_MOST_NBYTES = 1 << 16 };
#define TEN_MINUTES_NS 600000000000u

struct side {
    struct sr_channels channels;
    struct sr_channel channel;
    struct sr_ring ring;
    unsigned char bytes[RING_MOST_NBYTES] __attribute__((aligned(128)));
    unsigned char rest[SR_CHANNEL_REST_NBYTES];
    struct sr_ring_end out_of;
    struct sr_incoming incoming;
    sr_flag done;
};

static struct side side[2];
static int ends[2];

static void copy(void *dst, const void *src, size_t nbytes, uint32_t way)
{
    CHECK(way == 0);
    memcpy(dst, src, nbytes);
}

static void connect_ends(void) { CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0); }

static void connect_ends_by_tcp(void)
{
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t nbytes = sizeof where;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&where, sizeof where) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&where, &nbytes) == 0);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(ends[0], (struct sockaddr *)&where, sizeof where) == 0);
    ends[1] = accept(listener, NULL, NULL);
    CHECK(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0 && fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
    close(listener);
}

static void open_sides(uint64_t ring_nbytes, uint64_t other_ring_nbytes, int buffer_nbytes, int start)
{
    memset(side, 0, sizeof side);
    for (int i = 0; i < 2; i++) {
        uint64_t nbytes = i == 0 ? ring_nbytes : other_ring_nbytes;
        if (buffer_nbytes > 0)
            CHECK(setsockopt(ends[i], SOL_SOCKET, SO_SNDBUF, &buffer_nbytes, sizeof buffer_nbytes) == 0);
        sr_channels_open(&side[i].channels, &side[i].channel, 1, epoll_create1(EPOLL_CLOEXEC));
        CHECK(sr_channel_open(&side[i].channels, &side[i].channel, ends[i], 1 - i, &side[i].ring, side[i].bytes, nbytes,
                              sr_ring_first(check_start(start, 64 * nbytes), nbytes), side[i].rest) == 0);
    }
}

static void close_sides(void)
{
    for (int i = 0; i < 2; i++) {
        sr_channels_shut(&side[i].channels);
        close(side[i].channels.news);
        close(ends[i]);
    }
}

static uint64_t length_of(uint64_t message, int sender)
{
    struct check_rank dice = {.random = 2 * message + (uint64_t)sender};
    uint64_t kind = check_random(&dice) % 8;
    return check_random(&dice) % (kind == 0 ? MOST_NBYTES : kind < 4 ? 1000 : 70);
}

static unsigned char byte_of(uint64_t message, int sender, uint64_t i)
{
    return (unsigned char)(message * 31 + (uint64_t)sender * 101 + i * 7 + (i >> 8));
}

/* ---- both directions at once, two threads at each side ---------------------------------------------------------- */

struct traffic {
    struct check_rank *me;
    struct side *own;
    uint64_t sent, received;
    struct sr_outgoing out;
    unsigned char *sending, *receiving;
    bool is_sending, is_receiving, is_discarded;
};

static bool step_out(struct traffic *t)
{
    const int rank = t->me->rank / 2;
    if (!t->is_sending) {
        memset(&t->out, 0, sizeof t->out);
        t->out.head.message_nbytes = length_of(t->sent, rank);
        t->out.head.tag = (uint32_t)t->sent;
        t->out.data = t->sending;
        for (uint64_t i = 0; i < t->out.head.message_nbytes; i++)
            t->sending[i] = byte_of(t->sent, rank, i);
        t->is_sending = true;
    }
    const uint64_t before = t->out.offset;
    if (sr_channel_push(&t->own->channels, &t->own->channel, &t->out) == SR_RING_WAIT)
        return t->out.offset != before;
    memset(t->sending, 0xee, MOST_NBYTES); /* the message is sent: the memory belongs to the caller again */
    t->is_sending = false;
    t->sent++;
    return true;
}

static void check_received(struct traffic *t)
{
    const int sender = 1 - t->me->rank / 2;
    CHECK(t->own->incoming.nbytes == length_of(t->received, sender));
    for (uint64_t i = 0; i < t->own->incoming.nbytes && !t->is_discarded; i++)
        CHECK(t->receiving[i] == byte_of(t->received, sender, i));
}

static bool step_in(struct traffic *t)
{
    struct side *own = t->own;
    struct sr_frame head;
    if (own->out_of.ring == NULL) {
        if (sr_flag_load(&own->channel.opened) == 0)
            return false;
        sr_channel_read(&own->channels, &own->channel, &own->out_of, &own->incoming, copy);
    }
    if (!t->is_receiving) {
        if (sr_ring_peek(&own->out_of, &head) != SR_RING_WHOLE)
            return false;
        CHECK(head.flags & SR_FRAME_FIRST && head.tag == (uint32_t)t->received);
        t->is_discarded = t->received % 11 == 5;
        own->incoming = (struct sr_incoming){t->is_discarded ? NULL : t->receiving, head.message_nbytes, 0};
        t->is_receiving = true;
    } else if (t->received % 11 == 7 && own->incoming.offset > 0 && !t->is_discarded) {
        t->is_discarded = true; /* withdrawn in the middle */
        own->incoming.data = NULL;
        sr_channel_withdraw(&own->channels, &own->channel);
        memset(t->receiving, 0, MOST_NBYTES);
    }
    const uint64_t before = own->incoming.offset;
    const enum sr_ring_status status = sr_channel_pull(&own->channels, &own->channel);
    CHECK(status == SR_RING_WHOLE || status == SR_RING_WAIT);
    if (status == SR_RING_WAIT)
        return own->incoming.offset != before;
    check_received(t);
    t->is_receiving = false;
    t->received++;
    return true;
}

static void talk(struct traffic *t)
{
    struct side *own = t->own;
    while (t->sent < MESSAGES || t->received < MESSAGES) {
        bool moved = sr_channels_step(&own->channels);
        moved = (t->sent < MESSAGES && step_out(t)) || moved;
        moved = (t->received < MESSAGES && step_in(t)) || moved;
        if (!moved) {
            /* An event lost between the poll and the sleep would not end the sleep. */
            bool news = sr_channels_attend(&own->channels);
            news = (t->sent < MESSAGES && step_out(t)) || news;
            news = (t->received < MESSAGES && step_in(t)) || news;
            struct epoll_event event;
            if (!news)
                epoll_wait(own->channels.news, &event, 1, 100000);
            sr_channels_wake(&own->channels);
        }
        check_dawdle(t->me);
    }
    while (sr_channel_has_unsent(&own->channels, &own->channel))
        sr_yield();
}

static void take_part(struct check_rank *me)
{
    struct traffic t = {.me = me, .own = &side[me->rank / 2]};
    if (me->rank % 2) { /* this thread is in a collective */
        while (sr_flag_load(&t.own->done) == 0) {
            CHECK(!sr_channels_poll_abort(&t.own->channels));
            check_dawdle(me);
        }
        return;
    }
    t.sending = malloc(MOST_NBYTES);
    t.receiving = malloc(MOST_NBYTES);
    talk(&t);
    sr_flag_set(&t.own->done, 1);
    free(t.sending);
    free(t.receiving);
}

static void test_both_ways(const char *name, uint64_t ring_nbytes, uint64_t other_nbytes, int buffer_nbytes, int start)
{
    check_begin(name);
    connect_ends();
    open_sides(ring_nbytes, other_nbytes, buffer_nbytes, start);
    check_ranks(4, take_part, NULL);
    /* Some pieces bypassed the rings. If all messages fit into the rings, that is left to chance. */
    CHECK(ring_nbytes == RING_MOST_NBYTES || (side[0].channel.bypassed > 0 && side[1].channel.bypassed > 0));
    close_sides();
}

/* ---- notifications ---------------------------------------------------------------------------------------------- */

static void test_words(void)
{
    static unsigned char data[RING_MOST_NBYTES];
    struct sr_outgoing out = {.head = {.message_nbytes = sizeof data}, .data = data};
    struct sr_channel_call call = {.seq = 5, .fingerprint = 11, .count = 3}, heard;
    check_begin("notifications are received behind messages that no rank receives");
    connect_ends();
    open_sides(4096, 4096, 1, CHECK_FROM_ZERO);
    sr_channels_step(&side[0].channels);
    CHECK(sr_channel_push(&side[0].channels, &side[0].channel, &out) == SR_RING_WAIT);
    for (; call.seq < 7; call.seq++)
        sr_channel_notify(&side[0].channels, &side[0].channel, SR_CHANNEL_CONFIRMED, &call, sizeof call);
    sr_channel_notify(&side[0].channels, &side[0].channel, SR_CHANNEL_ABORT, "enough", 6);
    sr_channel_notify(&side[0].channels, &side[0].channel, SR_CHANNEL_LEAVING, NULL, 0);
    while (sr_flag_load(&side[1].channel.left) == 0) {
        sr_channels_poll_abort(&side[1].channels);
        sr_channels_step(&side[1].channels);
        sr_channel_has_unsent(&side[0].channels, &side[0].channel);
    }
    CHECK(sr_channel_last_note(&side[1].channels, &side[1].channel, SR_CHANNEL_CONFIRMED, &heard) == 2);
    CHECK(sr_flag_load(&side[1].channel.confirmed) == 6 && heard.seq == 6 && heard.fingerprint == 11 &&
          heard.count == 3);
    CHECK(sr_channel_last_note(&side[1].channels, &side[1].channel, SR_CHANNEL_CALLING, &heard) == 0);
    CHECK(sr_flag_load(&side[1].channels.aborted_by) == 1);
    CHECK(side[1].channels.reason_nbytes == 6 && memcmp(side[1].channels.reason, "enough", 6) == 0);
    CHECK(sr_flag_load(&side[1].channel.opened) == 1 && sr_flag_load(&side[1].channel.end) == SR_CHANNEL_OPEN);
    close(ends[0]);
    sr_channels_step(&side[1].channels);
    CHECK(sr_flag_load(&side[1].channel.end) == SR_CHANNEL_CLOSED);
    CHECK(sr_channel_push(&side[1].channels, &side[1].channel, &out) == SR_RING_WAIT); /* without effect */
    sr_channel_notify(&side[1].channels, &side[1].channel, SR_CHANNEL_LEAVING, NULL, 0);
    ends[0] = open("/dev/null", O_RDONLY);
    close_sides();
}

/* ---- the end of a message ---------------------------------------------------------------------------------------- */

/* A rank that has sent its message may make no more calls for long, so nothing of it may stay in the sender. */
static void test_whole_message(void)
{
    static unsigned char data[20000];
    struct sr_outgoing out = {.head = {.message_nbytes = sizeof data}, .data = data};
    int nwaits = 0;
    check_begin("a message is whole once the socket has taken all of it");
    connect_ends();
    open_sides(RING_MOST_NBYTES, RING_MOST_NBYTES, 1, CHECK_FROM_ZERO);
    while (side[0].channel.remote_ring_nbytes == 0)
        sr_channels_step(&side[0].channels);
    for (; sr_channel_push(&side[0].channels, &side[0].channel, &out) == SR_RING_WAIT; nwaits++)
        sr_channels_step(&side[1].channels);
    CHECK(nwaits > 0 && !has_rest(&side[0].channel));
    close_sides();
}

/* ---- receipts --------------------------------------------------------------------------------------------------- */

/* Side 1 gives all receipts while the socket of side 0 takes nothing, so most of them are owed. */
static void test_receipts(void)
{
    static uint64_t in_use[SR_RECEIPTS_WORDS];
    uint32_t number, count = 0;
    check_begin("receipts are owed while the socket is full, and all are given");
    connect_ends();
    open_sides(4096, 4096, 1, CHECK_FROM_ZERO);
    while ((number = sr_receipt_new_number(in_use)) != 0) {
        CHECK(number == ++count);
        sr_channel_give_receipt(&side[1].channels, &side[1].channel, number);
    }
    CHECK(count == SR_RECEIPTS - 1 && side[1].channel.nowed > 0);
    CHECK(sr_channel_has_unsent(&side[1].channels, &side[1].channel));
    CHECK(sr_channel_is_delivering(&side[1].channels, &side[1].channel));
    while (sr_receipts_count(&side[0].channel.receipts) < count) {
        sr_channels_step(&side[0].channels);
        sr_channels_step(&side[1].channels);
    }
    CHECK(side[1].channel.nowed == 0 && !sr_channel_has_unsent(&side[1].channels, &side[1].channel));
    for (number = 1; number <= count; number++) {
        CHECK(sr_receipt_take(&side[0].channel.receipts, number));
        CHECK(!sr_receipt_take(&side[0].channel.receipts, number));
        sr_receipt_free_number(in_use, number);
    }
    CHECK(!sr_receipt_take(&side[0].channel.receipts, 0));
    CHECK(sr_receipt_new_number(in_use) == 1);
    close_sides();
}

/* ---- the end ---------------------------------------------------------------------------------------------------- */

static void test_sender_ends(void)
{
    static unsigned char sent[30000], received[sizeof sent];
    struct sr_outgoing out = {.head = {.message_nbytes = sizeof sent}, .data = sent};
    check_begin("bytes in the receiver's kernel are received, though the sender has closed and is written to");
    connect_ends_by_tcp();
    open_sides(RING_MOST_NBYTES, RING_MOST_NBYTES, 0, CHECK_FROM_ZERO);
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = byte_of(1, 0, i);
    while (side[0].channel.remote_ring_nbytes == 0)
        sr_channels_step(&side[0].channels);
    CHECK(!sr_channel_is_delivering(&side[0].channels, &side[0].channel)); /* only credit is unsent, and no message */
    CHECK(sr_channel_push(&side[0].channels, &side[0].channel, &out) == SR_RING_WHOLE);
    while (sr_channel_is_delivering(&side[0].channels, &side[0].channel))
        sr_yield();
    CHECK(side[0].channel.put == side[0].channel.messages_end && !has_rest(&side[0].channel));
    close(ends[0]);
    ends[0] = open("/dev/null", O_RDONLY);
    for (int i = 0; i < 3; i++, usleep(1000))
        sr_channel_notify(&side[1].channels, &side[1].channel, SR_CHANNEL_LEAVING, NULL, 0);
    CHECK(side[1].channel.unwritable); /* the connection has been reset */
    while (sr_flag_load(&side[1].channel.end) == SR_CHANNEL_OPEN)
        sr_channels_step(&side[1].channels);
    side[1].incoming = (struct sr_incoming){received, sizeof received, 0};
    sr_channel_read(&side[1].channels, &side[1].channel, &side[1].out_of, &side[1].incoming, copy);
    CHECK(sr_channel_pull(&side[1].channels, &side[1].channel) == SR_RING_WHOLE);
    CHECK(memcmp(sent, received, sizeof sent) == 0);
    close_sides();
}

static void test_receiver_ends(void)
{
    static unsigned char data[30000];
    struct sr_outgoing out = {.head = {.message_nbytes = sizeof data}, .data = data};
    check_begin("a message that no rank takes is being delivered until the other end is closed");
    connect_ends();
    open_sides(RING_MOST_NBYTES, RING_MOST_NBYTES, 1, CHECK_FROM_ZERO);
    sr_channels_step(&side[0].channels);
    CHECK(sr_channel_push(&side[0].channels, &side[0].channel, &out) == SR_RING_WAIT && is_pushed(&out));
    for (int i = 0; i < 100; i++)
        CHECK(sr_channel_is_delivering(&side[0].channels, &side[0].channel));
    close(ends[1]);
    ends[1] = open("/dev/null", O_RDONLY);
    sr_channels_step(&side[0].channels);
    CHECK(!sr_channel_is_delivering(&side[0].channels, &side[0].channel));
    close_sides();
}

/* ---- random bytes ----------------------------------------------------------------------------------------------- */

static struct sr_channel_head random_head(struct check_rank *dice)
{
    static const uint32_t lengths[] = {0, 1, 32, 33, 100, 300, 1919, 1920, 1921, 4096, 65536, 65537, 0xffffffffu};
    static const uint64_t wholes[] = {0, 1, 33, 100, 512, 4096, 4608, 5000, 1 << 20, 1ull << 62, ~0ull};
    struct sr_channel_head head = {.magic = SR_CHANNEL_MAGIC,
                                   .what = (uint32_t)(check_random(dice) % 10),
                                   .nbytes = lengths[check_random(dice) % 13],
                                   .flags = (uint32_t)(check_random(dice) % 5),
                                   .tag = (uint32_t)check_random(dice),
                                   .kind = (uint32_t)check_random(dice),
                                   .whole = wholes[check_random(dice) % 11]};
    if (check_random(dice) % 4 == 0)
        head.whole = head.nbytes;
    if (check_random(dice) % 50 == 0)
        head.magic++;
    return head;
}

static void test_whatever_comes(void)
{
    static unsigned char body[70000];
    struct check_rank dice = {.random = 1};
    check_begin("random frames end the channel, and nothing is written outside of its place");
    for (int round = 0; round < 3000; round++) {
        connect_ends();
        open_sides(4096, 4096, 0, CHECK_FROM_ZERO);
        for (int i = 0; i < 40 && sr_flag_load(&side[1].channel.end) == SR_CHANNEL_OPEN; i++) {
            struct sr_channel_head head = random_head(&dice);
            size_t nbytes = head.nbytes < sizeof body ? head.nbytes : sizeof body;
            if (write(ends[0], &head, sizeof head) < 0 || write(ends[0], body, nbytes) < 0)
                break;
            sr_channels_step(&side[1].channels);
            if (sr_flag_load(&side[1].channel.opened) != 0 && side[1].out_of.ring == NULL)
                sr_channel_read(&side[1].channels, &side[1].channel, &side[1].out_of, &side[1].incoming, copy);
        }
        close_sides();
    }
}

static void test_no_memory_in_the_kernel(int error)
{
    check_begin("a frame that the kernel has no memory for is sent later");
    connect_ends_by_tcp();
    open_sides(RING_MOST_NBYTES, RING_MOST_NBYTES, 0, CHECK_FROM_ZERO);
    refusal = error;
    sr_channel_notify(&side[1].channels, &side[1].channel, SR_CHANNEL_LEAVING, NULL, 0);
    CHECK(refusal == 0 && !side[1].channel.unwritable);
    while (sr_flag_load(&side[0].channel.left) == 0) {
        sr_channels_step(&side[1].channels);
        sr_channels_step(&side[0].channels);
    }
    close_sides();
}

int main(void)
{
    test_no_memory_in_the_kernel(ENOBUFS);
    test_no_memory_in_the_kernel(ENOMEM);
    test_both_ways("both ways, rings of some lines", 512, 512, 0, CHECK_FROM_ZERO);
    test_both_ways("both ways, rings of some lines, little room in the socket", 512, 1024, 1, CHECK_PAST_32_BITS);
    test_both_ways("both ways, positions wrap", 8192, 4096, 1, CHECK_PAST_64_BITS);
    test_both_ways("both ways, long rings", RING_MOST_NBYTES, RING_MOST_NBYTES, 0, CHECK_FROM_ZERO);
    test_words();
    test_whole_message();
    test_receipts();
    test_sender_ends();
    test_receiver_ends();
    test_whatever_comes();
    return 0;
}
