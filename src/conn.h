/* A connection to a rank of another host. It sends whole messages in order, from the caller's memory, and receives them
 * into the caller's memory. This file owns no descriptor: its user passes a connected, authenticated, non-blocking
 * stream socket, and closes it. Only sr_conn_sleep and sr_conn_sleep_or wait.
 *
 * One thread at a time uses a connection. All sizes are in bytes. The numbers of a head are little-endian, as are all
 * machines that shmring runs on. */
#ifndef SR_CONN_H
#define SR_CONN_H

#include "tcp_probe.h"

#include <stddef.h>
#include <stdint.h>

/* The head of every message. The receiver knows every head beforehand. A head that differs is an error of one of the
 * two callers, or damaged if its magic number differs; no byte of that message is put into place. */
struct sr_conn_head {
    uint32_t magic;
    uint32_t number;      /* number of the message in its direction, all calls together; it wraps */
    uint64_t seq;         /* of the call */
    uint64_t fingerprint; /* of the call */
    uint64_t count;       /* elements of the call; with the fingerprint it describes the call in an error message */
    uint64_t nbytes;      /* of the message's data, which follow */
};
_Static_assert(sizeof(struct sr_conn_head) == 40, "a head has no holes");
#define SR_CONN_MAGIC 0x31775273u

enum {
    SR_CONN_QUEUE = 64, /* the most messages of one direction that may be under way; a power of two */
    SR_CONN_SMALL_NBYTES = 216, /* shorter messages are received in one read with their head */
};

struct sr_conn_message {
    struct sr_conn_head head;
    unsigned char *data; /* head.nbytes bytes; W only when receiving */
    uint32_t *left;      /* decremented when the message is complete */
};

/* The messages from number `first` up to `end` are under way; the numbers wrap. `done` bytes of the first message, its
 * head included, have been moved. */
struct sr_conn_queue {
    struct sr_conn_message message[SR_CONN_QUEUE];
    uint32_t first, end;
    size_t done;
};

struct sr_conn {
    int fd;
    int end;                      /* the sr_conn_status that ended the connection, or 0 */
    int error;                    /* errno, if `end` is SR_CONN_FAILED */
    struct sr_tcp_probe probe;
    uint64_t nreceived;           /* bytes, heads included */
    struct sr_conn_queue out, in;
    struct sr_conn_head arriving; /* the head of message in.first, as far as it has arrived */
    unsigned char small[SR_CONN_SMALL_NBYTES]; /* directly behind: data of a small message, not in place yet */
};
_Static_assert(offsetof(struct sr_conn, small) == offsetof(struct sr_conn, arriving) + sizeof(struct sr_conn_head),
               "a head and a small message are read at once");

/* The outcome of a step. SR_CONN_CLOSED and the ones after it end the connection. */
enum sr_conn_status {
    SR_CONN_IDLE,       /* nothing is under way */
    SR_CONN_BLOCKED,    /* a message is under way, and the socket has no room or no bytes */
    SR_CONN_PROGRESSED,
    SR_CONN_CLOSED,     /* the other end has closed the connection, or has died */
    SR_CONN_FAILED,     /* with `error`; EBADMSG: bytes arrived that are no head */
    SR_CONN_MISMATCH,   /* `arriving` is not the expected head */
};

void sr_conn_open(struct sr_conn *conn, int fd);

static inline int sr_conn_is_busy(const struct sr_conn_queue *queue) { return queue->first != queue->end; }
static inline uint32_t sr_conn_length(const struct sr_conn_queue *queue) { return queue->end - queue->first; }

/* Append a message to the queue, which must have room. Later steps send or receive it. The connection owns `data` until
 * it decrements `*left`. */
void sr_conn_post(struct sr_conn_queue *queue, const struct sr_conn_head *head, void *data, uint32_t *left);

/* Send and receive what the socket takes and has at this moment. */
enum sr_conn_status sr_conn_step(struct sr_conn *conn);

/* End the connection if its other end has not answered for limit_ns; return whether this call has ended it. To be
 * called now and then while a message is under way, see tcp_probe.h. */
int sr_conn_is_cut(struct sr_conn *conn, uint64_t limit_ns);

/* Return whether a message has arrived although none is expected. Its head is then in `arriving`, and also stays in the
 * socket. */
int sr_conn_peek(struct sr_conn *conn);

/* Sleep until the epoll descriptor `news` has events, at most limit_ns, and take the events. For a thread that steps
 * the connections next. */
void sr_conn_sleep(int news, uint64_t limit_ns);

/* As sr_conn_sleep, but also until the descriptor `other` is readable. Leaves the events, for which another thread may
 * be sleeping. */
void sr_conn_sleep_or(int news, int other, uint64_t limit_ns);

/* Take the events, before the connections are stepped. Edge-triggered events that are left would end the next sleep at
 * once; events that are taken after the step could be ones that the step has not seen. */
void sr_conn_take_news(int news);

#endif
