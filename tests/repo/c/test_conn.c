/* A connection between two threads. What is received is what was sent, in order and whole, at every length and however
   the kernel cuts it. A head that is not the expected one is noticed before any byte of its message is put into place.
   A closed end is noticed, also in the middle of a message. */
#include <errno.h>
#include <unistd.h>

static int refusal; /* the error of a kernel that refuses system calls which the C library does not wrap; 0: none */
#define syscall(...) (refusal != 0 ? (errno = refusal, -1L) : syscall(__VA_ARGS__))

#include "../../../src/conn.c"

#include "check.h"

#include <fcntl.h>

enum { MESSAGES = 4000, MOST_NBYTES = 100000, UNDER_WAY = 40 };
#define TEN_MINUTES_NS 600000000000u

static int ends[2];
static const char *lengths; /* lengths of the messages in this test: "mixed", "small" */

static void connect_ends(int buffer_nbytes)
{
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    if (buffer_nbytes > 0)
        for (int i = 0; i < 2; i++)
            CHECK(setsockopt(ends[i], SOL_SOCKET, SO_SNDBUF, &buffer_nbytes, sizeof buffer_nbytes) == 0);
}

static void close_ends(void)
{
    close(ends[0]);
    close(ends[1]);
}

static uint64_t length_of(uint64_t message, int sender)
{
    struct check_rank dice = {.random = 2 * message + (uint64_t)sender};
    uint64_t kind = check_random(&dice) % 8;
    if (lengths[0] == 's')
        return check_random(&dice) % 300;
    return check_random(&dice) % (kind == 0 ? MOST_NBYTES : kind < 3 ? 5000 : 300);
}

static struct sr_conn_head head_of(uint64_t message, int sender)
{
    return (struct sr_conn_head){SR_CONN_MAGIC, (uint32_t)sender, message, message * 77, 5, length_of(message, sender)};
}

static unsigned char byte_of(uint64_t message, int sender, uint64_t i)
{
    return (unsigned char)(message * 31 + (uint64_t)sender * 101 + i * 7 + (i >> 8));
}

/* ---- both directions at once ---------------------------------------------------------------------------------- */

struct end {
    struct sr_conn conn;
    unsigned char *sent[UNDER_WAY], *received[UNDER_WAY];
    uint32_t sending[UNDER_WAY], receiving[UNDER_WAY];
};

static void fill(unsigned char *data, uint64_t message, int sender)
{
    for (uint64_t i = 0; i < length_of(message, sender); i++)
        data[i] = byte_of(message, sender, i);
}

static void check_bytes(const unsigned char *data, uint64_t message, int sender)
{
    for (uint64_t i = 0; i < length_of(message, sender); i++)
        CHECK(data[i] == byte_of(message, sender, i));
}

static void post_next(struct sr_conn_queue *queue, unsigned char **data, uint32_t *left, uint64_t message, int sender)
{
    struct sr_conn_head head = head_of(message, sender);
    left[message % UNDER_WAY] = 1;
    CHECK(sr_conn_length(queue) < SR_CONN_QUEUE);
    sr_conn_post(queue, &head, data[message % UNDER_WAY], &left[message % UNDER_WAY]);
}

static void exchange(struct check_rank *me)
{
    struct end *end = calloc(1, sizeof *end);
    uint64_t posted_out = 0, posted_in = 0, checked = 0;
    int other = 1 - me->rank;
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event news = {.events = EPOLLIN | EPOLLOUT | EPOLLET};
    sr_conn_open(&end->conn, ends[me->rank]);
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, end->conn.fd, &news) == 0);
    for (int i = 0; i < UNDER_WAY; i++) {
        end->sent[i] = malloc(MOST_NBYTES);
        end->received[i] = malloc(MOST_NBYTES);
    }
    while (checked < MESSAGES || posted_out < MESSAGES || sr_conn_is_busy(&end->conn.out)) {
        if (posted_out < MESSAGES && end->sending[posted_out % UNDER_WAY] == 0 && check_random(me) % 3) {
            fill(end->sent[posted_out % UNDER_WAY], posted_out, me->rank);
            post_next(&end->conn.out, end->sent, end->sending, posted_out++, me->rank);
        }
        if (posted_in < MESSAGES && posted_in < checked + UNDER_WAY && check_random(me) % 3)
            post_next(&end->conn.in, end->received, end->receiving, posted_in++, other);
        enum sr_conn_status status = sr_conn_step(&end->conn);
        CHECK(status <= SR_CONN_PROGRESSED);
        while (checked < posted_in && end->receiving[checked % UNDER_WAY] == 0) {
            check_bytes(end->received[checked % UNDER_WAY], checked, other);
            checked++;
        }
        if (status == SR_CONN_BLOCKED && posted_out == MESSAGES && posted_in == MESSAGES)
            sr_conn_sleep(epoll, TEN_MINUTES_NS); /* a lost event would sleep into the watchdog */
        check_dawdle(me);
    }
    CHECK(end->conn.nreceived > MESSAGES * sizeof(struct sr_conn_head));
    for (int i = 0; i < UNDER_WAY; i++) {
        free(end->sent[i]);
        free(end->received[i]);
    }
    close(epoll);
    free(end);
}

static void test_both_ways(const char *name, const char *which, int buffer_nbytes)
{
    check_begin(name);
    lengths = which;
    connect_ends(buffer_nbytes);
    check_ranks(2, exchange, NULL);
    close_ends();
}

/* ---- unexpected messages -------------------------------------------------------------------------------------- */

static struct sr_conn one, other;
static unsigned char data_of_one[1000], data_of_other[1000];
static uint32_t left_of_one, left_of_other;

static void open_both(void)
{
    connect_ends(0);
    sr_conn_open(&one, ends[0]);
    sr_conn_open(&other, ends[1]);
    memset(data_of_one, 1, sizeof data_of_one);
    memset(data_of_other, 2, sizeof data_of_other);
    left_of_one = left_of_other = 1;
}

static struct sr_conn_head plain_head(uint64_t nbytes)
{
    return (struct sr_conn_head){SR_CONN_MAGIC, 0, 9, 8, 7, nbytes};
}

static void check_mismatch(struct sr_conn_head sent, enum sr_conn_status status, int error)
{
    struct sr_conn_head expected = plain_head(100);
    open_both();
    sr_conn_post(&one.out, &sent, data_of_one, &left_of_one);
    sr_conn_post(&other.in, &expected, data_of_other, &left_of_other);
    CHECK(sr_conn_step(&one) == SR_CONN_PROGRESSED && left_of_one == 0);
    CHECK(sr_conn_step(&other) == status && other.error == error && left_of_other == 1);
    CHECK(other.arriving.seq == sent.seq && other.arriving.nbytes == sent.nbytes);
    for (size_t i = 0; i < sizeof data_of_other; i++)
        CHECK(data_of_other[i] == 2);
    close_ends();
}

static void test_unexpected(void)
{
    struct sr_conn_head head = plain_head(100);
    check_begin("a message that is not expected");
    open_both();
    CHECK(!sr_conn_peek(&other));
    sr_conn_post(&one.out, &head, data_of_one, &left_of_one);
    CHECK(sr_conn_step(&one) == SR_CONN_PROGRESSED);
    CHECK(sr_conn_peek(&other) && other.arriving.fingerprint == head.fingerprint);
    sr_conn_post(&other.in, &head, data_of_other, &left_of_other);
    CHECK(!sr_conn_peek(&other)); /* now a message is expected, and it is still in the socket */
    CHECK(sr_conn_step(&other) == SR_CONN_PROGRESSED && left_of_other == 0 && data_of_other[99] == 1);
    CHECK(!sr_conn_peek(&other));
    close_ends();
    CHECK(!sr_conn_peek(&other));
}

static void test_other_heads(void)
{
    struct sr_conn_head head = plain_head(100);
    check_begin("a head that is not the expected one");
    for (int field = 1; field < 6; field++) {
        struct sr_conn_head wrong = head;
        wrong.number += field == 1;
        wrong.seq += field == 2;
        wrong.fingerprint += field == 3;
        wrong.count += field == 4;
        wrong.nbytes += field == 5;
        check_mismatch(wrong, SR_CONN_MISMATCH, 0);
    }
    head.nbytes = 900; /* longer than the expected message, and than one that comes with its head */
    check_mismatch(head, SR_CONN_MISMATCH, 0);
    head.magic++; /* no head at all */
    check_mismatch(head, SR_CONN_FAILED, EBADMSG);
}

static void test_closed(void)
{
    struct sr_conn_head head = plain_head(1000);
    check_begin("the other end closes: at once, in a head, in a small message, in a large one");
    for (size_t cut = 0; cut < 600; cut += 20) {
        open_both();
        head.nbytes = cut < 300 ? 100 : 1000;
        unsigned char bytes[sizeof head + 1000] = {0};
        memcpy(bytes, &head, sizeof head);
        size_t nbytes = cut % 300 < sizeof head + 90 ? cut % 300 : sizeof head + 90;
        CHECK(write(ends[0], bytes, nbytes) == (ssize_t)nbytes);
        close(ends[0]);
        sr_conn_post(&other.in, &head, data_of_other, &left_of_other);
        enum sr_conn_status status = SR_CONN_PROGRESSED;
        while (status == SR_CONN_PROGRESSED)
            status = sr_conn_step(&other);
        CHECK(status == SR_CONN_CLOSED && left_of_other == 1);
        close(ends[1]);
    }
}

static void test_last_word(void)
{
    struct sr_conn_head head = plain_head(100);
    check_begin("bytes that arrived before the other end closed are received, also if sending fails");
    open_both();
    sr_conn_post(&one.out, &head, data_of_one, &left_of_one);
    CHECK(sr_conn_step(&one) == SR_CONN_PROGRESSED);
    close(ends[0]);
    sr_conn_post(&other.out, &head, data_of_other, &left_of_one);
    sr_conn_post(&other.in, &head, data_of_other, &left_of_other);
    CHECK(sr_conn_step(&other) == SR_CONN_PROGRESSED && left_of_other == 0 && data_of_other[99] == 1);
    CHECK(sr_conn_step(&other) == SR_CONN_CLOSED);
    close(ends[1]);
}

static void test_empty_and_idle(void)
{
    struct sr_conn_head head = plain_head(0);
    check_begin("messages of a head alone, and idle steps");
    open_both();
    CHECK(sr_conn_step(&one) == SR_CONN_IDLE);
    for (int i = 0; i < 3; i++) {
        left_of_one = left_of_other = SR_CONN_QUEUE;
        for (int j = 0; j < SR_CONN_QUEUE; j++) {
            sr_conn_post(&one.out, &head, NULL, &left_of_one);
            sr_conn_post(&other.in, &head, NULL, &left_of_other);
        }
        CHECK(sr_conn_length(&one.out) == SR_CONN_QUEUE);
        while (left_of_other > 0)
            CHECK(sr_conn_step(&one) <= SR_CONN_PROGRESSED && sr_conn_step(&other) <= SR_CONN_PROGRESSED);
        CHECK(left_of_one == 0);
    }
    CHECK(sr_conn_step(&one) == SR_CONN_IDLE && sr_conn_step(&other) == SR_CONN_IDLE);
    sr_conn_post(&other.in, &head, NULL, &left_of_other);
    CHECK(sr_conn_step(&other) == SR_CONN_BLOCKED);
    close_ends();
}

static void test_onlooker(void)
{
    struct epoll_event news = {.events = EPOLLIN | EPOLLET};
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    check_begin("sr_conn_sleep_or leaves the events to the thread that sleeps for them");
    open_both();
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, ends[1], &news) == 0);
    CHECK(write(ends[0], "x", 1) == 1);
    sr_conn_sleep_or(epoll, -1, TEN_MINUTES_NS);
    sr_conn_sleep(epoll, TEN_MINUTES_NS);
    CHECK(write(ends[0], "x", 1) == 1);
    sr_conn_take_news(epoll);
    CHECK(epoll_wait(epoll, &news, 1, 0) == 0); /* although the bytes are still in the socket */
    close(epoll);
    close_ends();
}

/* An old kernel answers ENOSYS, and some seccomp profiles EPERM. */
static void test_sleep_without_pwait2(void)
{
    static const int refusals[] = {ENOSYS, EPERM};
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    check_begin("sr_conn_sleep sleeps, whatever the kernel refuses");
    for (int i = 0; i < 2; i++) {
        const uint64_t begin = sr_now_ns();
        refusal = refusals[i];
        sr_conn_sleep(epoll, 3000000);
        refusal = 0;
        CHECK(sr_now_ns() - begin >= 3000000);
    }
    close(epoll);
}

int main(void)
{
    test_both_ways("both ways, all lengths", "mixed", 0);
    test_both_ways("both ways, all lengths, little room in the socket", "mixed", 1);
    test_both_ways("both ways, small messages", "small", 0);
    test_unexpected();
    test_other_heads();
    test_closed();
    test_last_word();
    test_empty_and_idle();
    test_onlooker();
    test_sleep_without_pwait2();
    return 0;
}
