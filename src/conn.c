#include "conn.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    MESSAGES_AT_ONCE = 8, /* sent by one system call */
    READS_AT_ONCE = 4,    /* from one connection in one step, before the next connection is stepped */
};

void sr_conn_open(struct sr_conn *conn, int fd) {
    memset(conn, 0, sizeof *conn);
    conn->fd = fd;
}

static struct sr_conn_message *message_at(struct sr_conn_queue *queue, uint32_t number) {
    return &queue->message[number % SR_CONN_QUEUE];
}

void sr_conn_post(struct sr_conn_queue *queue, const struct sr_conn_head *head, void *data, uint32_t *left) {
    struct sr_conn_message *message = message_at(queue, queue->end);
    message->head = *head;
    message->data = data;
    message->left = left;
    queue->end++;
}

static size_t whole_nbytes(const struct sr_conn_message *message) {
    return sizeof message->head + message->head.nbytes;
}

/* Count nbytes more as moved, and remove the messages that are complete. */
static void advance(struct sr_conn_queue *queue, size_t nbytes) {
    queue->done += nbytes;
    while (sr_conn_is_busy(queue) && queue->done >= whole_nbytes(message_at(queue, queue->first))) {
        struct sr_conn_message *message = message_at(queue, queue->first);
        queue->done -= whole_nbytes(message);
        queue->first++;
        --*message->left;
    }
}

static enum sr_conn_status status_of_error(struct sr_conn *conn, int error) {
    if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) return SR_CONN_BLOCKED;
    if (error == ENOBUFS || error == ENOMEM) return SR_CONN_BLOCKED; /* the kernel has no memory now */
    if (error == ECONNRESET || error == EPIPE) return SR_CONN_CLOSED;
    conn->error = error;
    return SR_CONN_FAILED;
}

/* ---- sending ---- */

/* Set the places of what is left of the first messages: heads and data in turn. Return the number of places. */
static int gather(struct sr_conn_queue *queue, struct iovec *places) {
    size_t skip = queue->done;
    int nplaces = 0;
    for (uint32_t at = queue->first; at != queue->end && nplaces < 2 * MESSAGES_AT_ONCE; at++) {
        struct sr_conn_message *message = message_at(queue, at);
        size_t of_head = skip < sizeof message->head ? skip : sizeof message->head;
        size_t of_data = skip - of_head;
        if (of_head < sizeof message->head)
            places[nplaces++] =
                (struct iovec){(unsigned char *)&message->head + of_head, sizeof message->head - of_head};
        if (of_data < message->head.nbytes)
            places[nplaces++] = (struct iovec){message->data + of_data, message->head.nbytes - of_data};
        skip = 0;
    }
    return nplaces;
}

static enum sr_conn_status step_out(struct sr_conn *conn) {
    struct iovec places[2 * MESSAGES_AT_ONCE + 1];
    struct msghdr all = {.msg_iov = places};
    if (!sr_conn_is_busy(&conn->out)) return SR_CONN_IDLE;
    all.msg_iovlen = (size_t)gather(&conn->out, places);
    ssize_t nbytes = sendmsg(conn->fd, &all, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (nbytes < 0) return status_of_error(conn, errno);
    advance(&conn->out, (size_t)nbytes);
    return SR_CONN_PROGRESSED;
}

/* ---- receiving ---- */

/* Return the place for the next bytes. A head is checked before any data of its message are put into place. */
static struct iovec next_place(struct sr_conn *conn, const struct sr_conn_message *message) {
    size_t done = conn->in.done;
    size_t nbytes = message->head.nbytes;
    if (done >= sizeof message->head) {
        size_t of_data = done - sizeof message->head;
        return (struct iovec){message->data + of_data, nbytes - of_data};
    }
    size_t with_head = nbytes < SR_CONN_SMALL_NBYTES ? nbytes : 0;
    return (struct iovec){(unsigned char *)&conn->arriving + done, sizeof message->head + with_head - done};
}

static enum sr_conn_status step_in(struct sr_conn *conn) {
    if (!sr_conn_is_busy(&conn->in)) return SR_CONN_IDLE;
    struct sr_conn_message *message = message_at(&conn->in, conn->in.first);
    size_t before = conn->in.done;
    struct iovec place = next_place(conn, message);
    ssize_t received = recv(conn->fd, place.iov_base, place.iov_len, MSG_DONTWAIT);
    if (received == 0) return SR_CONN_CLOSED;
    if (received < 0) return status_of_error(conn, errno);
    size_t nbytes = (size_t)received;
    conn->nreceived += nbytes;
    if (before < sizeof message->head) {
        if (before + nbytes < sizeof message->head) {
            conn->in.done += nbytes;
            return SR_CONN_PROGRESSED;
        }
        if (conn->arriving.magic != SR_CONN_MAGIC) {
            conn->error = EBADMSG;
            return SR_CONN_FAILED;
        }
        if (memcmp(&conn->arriving, &message->head, sizeof message->head) != 0) return SR_CONN_MISMATCH;
        size_t with_head = before + nbytes - sizeof message->head;
        if (with_head > 0) memcpy(message->data, conn->small, with_head);
    }
    advance(&conn->in, nbytes);
    return SR_CONN_PROGRESSED;
}

int sr_conn_is_cut(struct sr_conn *conn, uint64_t limit_ns) {
    if (conn->end != 0 || !sr_tcp_probe_is_cut(&conn->probe, conn->fd, limit_ns)) return 0;
    conn->end = SR_CONN_FAILED;
    conn->error = ETIMEDOUT;
    return 1;
}

int sr_conn_peek(struct sr_conn *conn) {
    if (sr_conn_is_busy(&conn->in) || conn->end != 0) return 0;
    ssize_t nbytes = recv(conn->fd, &conn->arriving, sizeof conn->arriving, MSG_PEEK | MSG_DONTWAIT);
    return nbytes == sizeof conn->arriving && conn->arriving.magic == SR_CONN_MAGIC;
}

static enum sr_conn_status step_both(struct sr_conn *conn) {
    enum sr_conn_status sent = step_out(conn);
    if (sent > SR_CONN_PROGRESSED) {
        /* The other end may have sent the reason before it closed, such as a different head: receive that first. */
        enum sr_conn_status received = step_in(conn);
        return received == SR_CONN_PROGRESSED || received == SR_CONN_MISMATCH ? received : sent;
    }
    enum sr_conn_status outcome = sent;
    for (int i = 0; i < READS_AT_ONCE; i++) {
        enum sr_conn_status received = step_in(conn);
        if (received > outcome) outcome = received;
        if (received != SR_CONN_PROGRESSED) break;
    }
    return outcome;
}

enum sr_conn_status sr_conn_step(struct sr_conn *conn) {
    if (conn->end != 0) return (enum sr_conn_status)conn->end;
    enum sr_conn_status outcome = step_both(conn);
    if (outcome >= SR_CONN_CLOSED) conn->end = (int)outcome;
    return outcome;
}

/* ---- waiting ---- */

void sr_conn_sleep(int news, uint64_t limit_ns) {
    struct epoll_event events[16];
#ifdef SYS_epoll_pwait2
    struct timespec limit = {(time_t)(limit_ns / 1000000000), (long)(limit_ns % 1000000000)};
    const long nevents = syscall(SYS_epoll_pwait2, news, events, 16, &limit, NULL, 0);
    if (nevents >= 0 || (errno != ENOSYS && errno != EPERM)) return;
#endif
    /* Milliseconds only, for Linux before 5.11 and for a seccomp profile that does not know the call (EPERM). */
    epoll_wait(news, events, 16, (int)(limit_ns / 1000000) + 1);
}

void sr_conn_sleep_or(int news, int other, uint64_t limit_ns) {
    struct pollfd both[2] = {{.fd = news, .events = POLLIN}, {.fd = other, .events = POLLIN}};
    struct timespec limit = {(time_t)(limit_ns / 1000000000), (long)(limit_ns % 1000000000)};
    ppoll(both, 2, &limit, NULL);
}

void sr_conn_take_news(int news) {
    struct epoll_event events[16];
    epoll_wait(news, events, 16, 0);
}
