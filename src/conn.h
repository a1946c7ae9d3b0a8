/* A connection to a rank of another host: whole messages in order, sent straight from and received straight into
 * the caller's memory. Owns no descriptor: it is handed a connected, non-blocking stream socket, which somebody else
 * has opened and authenticated, and closes. Nothing here waits but sr_conn_sleep.
 *
 * One thread at a time touches a connection. Everything is counted in bytes; the numbers of a head are little-endian,
 * as are all machines that shmring runs on. */
#ifndef SHMRING_CONN_H
#define SHMRING_CONN_H

#include "tcp_probe.h"

#include <stddef.h>
#include <stdint.h>

/* In front of every message. Both ends know beforehand what comes: a head that says anything else is an error of the
 * caller of one of them, and nothing of that message is put into place. */
struct sr_conn_head {
    uint32_t magic;
    uint32_t part;        /* which message of the call, between these two */
    uint64_t seq;         /* which call of the communicator */
    uint64_t fingerprint; /* of what is called */
    uint64_t count;       /* elements of the call: with the fingerprint that is enough to tell a person */
    uint64_t nbytes;      /* of the message that follows */
};
_Static_assert(sizeof(struct sr_conn_head) == 40, "a head has no holes");
#define SR_CONN_MAGIC 0x31775273u

enum {
    SR_CONN_QUEUE = 64, /* messages of one direction that may be under way; a power of two */
    SR_CONN_SMALL_NBYTES = 216, /* messages up to here come with their head in one read */
};

struct sr_conn_message {
    struct sr_conn_head head;
    unsigned char *data; /* head.nbytes; not written to where it is sent */
    uint32_t *left;      /* one less once the message is complete */
};

/* Free-running numbers: `first` to `end` are under way, the first one as far as `done` says, its head included. */
struct sr_conn_queue {
    struct sr_conn_message message[SR_CONN_QUEUE];
    uint32_t first, end;
    size_t done;
};

struct sr_conn {
    int fd;
    int end;                      /* what a step has come to that was the last one, or 0 */
    int error;                    /* errno, if that is SR_CONN_FAILED */
    struct sr_tcp_probe probe;
    uint64_t nsent, nreceived;    /* bytes, heads included */
    struct sr_conn_queue out, in;
    struct sr_conn_head arriving; /* what the other end says of in.first, as far as it is there */
    unsigned char small[SR_CONN_SMALL_NBYTES]; /* behind it: what came with it and is not in place yet */
};
_Static_assert(offsetof(struct sr_conn, small) == offsetof(struct sr_conn, arriving) + sizeof(struct sr_conn_head),
               "a head and a small message are read at once");

/* What a step comes to; from SR_CONN_CLOSED on the connection is of no more use. */
enum sr_conn_status {
    SR_CONN_IDLE,       /* nothing is under way */
    SR_CONN_BLOCKED,    /* something is, and the socket has no room or no bytes */
    SR_CONN_PROGRESSED,
    SR_CONN_CLOSED,     /* the other end has closed it, or is gone */
    SR_CONN_FAILED,     /* because of `error` */
    SR_CONN_MISMATCH,     /* `arriving` is not what is expected */
};

void sr_conn_open(struct sr_conn *conn, int fd);

static inline int sr_conn_is_busy(const struct sr_conn_queue *queue) { return queue->first != queue->end; }
static inline uint32_t sr_conn_length(const struct sr_conn_queue *queue) { return queue->end - queue->first; }

/* Queues a message behind those under way; there has to be room. Sent or received by later steps: until `*left` is
 * one less, `data` belongs to the connection. */
void sr_conn_post(struct sr_conn_queue *queue, const struct sr_conn_head *head, void *data, uint32_t *left);

/* Moves what can be moved at once. */
enum sr_conn_status sr_conn_step(struct sr_conn *conn);

/* To be asked now and then of a connection on which something is under way: whether it ends here, as the other end has
 * not answered for limit_ns. */
int sr_conn_is_cut(struct sr_conn *conn, uint64_t limit_ns);

/* Whether a message has come where none is expected; its head is in `arriving` then, and left to be received. */
int sr_conn_peek(struct sr_conn *conn);

/* Of an epoll descriptor: sleeps until one of its sockets has news, for limit_ns at most, and takes them. For who steps
 * the connections next. */
void sr_conn_sleep(int news, uint64_t limit_ns);

/* Also until the other descriptor can be read; leaves the news, which another thread may be sleeping for. */
void sr_conn_sleep_or(int news, int other, uint64_t limit_ns);

/* Takes what they are, before the connections are stepped: news that are told by edges would end the next sleep again,
 * or, taken behind the step, be those that it has not seen. */
void sr_conn_take_news(int news);

#endif
