/* Channels between ranks of different hosts: one stream socket for each pair, on which the pieces of messages, the
 * credit for them, and notifications go as frames. What comes is laid into a ring in private memory, whose other
 * end is read as that of a local rank's (spsc_ring.h), or straight into the array that waits for it. A sender puts no
 * more on the socket than that ring has room for: whoever looks can take off all that has come, and no notification is
 * stuck for long.
 *
 * Owns no descriptor: it is handed connected, non-blocking sockets and an epoll descriptor. Nothing here waits. Any
 * thread may call what is below; who *reads* the rings is one thread at a time.
 *
 *   sender                                       receiver
 *   array --sr_channel_push--> socket ~~~~~~> pump --+--> ring --sr_channel_pull--> array
 *                     ^                           +---------------------------^
 *                     +----- limit <~~~~~~ credit, as the ring is read                                    */
#ifndef SR_CHANNEL_H
#define SR_CHANNEL_H

#include "tcp_probe.h"
#include "spsc_ring.h"

enum sr_channel_what {
    SR_CHANNEL_ABORT = 1, /* it is over, because of what follows */
    SR_CHANNEL_LEAVING,  /* the sender leaves in order */
    SR_CHANNEL_CREDIT,   /* `whole`: up to where the other end may send */
    SR_CHANNEL_PIECE,    /* of a message: what sr_frame says of it, and its bytes */
    /* notes, each of which replaces the one before: */
    SR_CHANNEL_VIEW,     /* of who goes on after the end, see sr_seqlock */
    SR_CHANNEL_CALLING,  /* the sender has waited for a while in a collective: struct sr_channel_call */
    SR_CHANNEL_CONFIRMED, /* all ranks of the sender's host have begun this collective: struct sr_channel_call */
};

/* In front of everything; little-endian, as are all machines that shmring runs on. */
struct sr_channel_head {
    uint32_t magic;
    uint32_t what;       /* enum sr_channel_what */
    uint32_t nbytes;     /* that follow */
    uint32_t tag;        /* of a piece, as the rest */
    uint64_t kind : 56;
    uint64_t flags : 8;
    uint64_t whole;      /* bytes of its message */
};
_Static_assert(sizeof(struct sr_channel_head) == 32, "a head has no holes");

/* Which one, by the number that all ranks count, and as what. */
struct sr_channel_call {
    uint64_t seq, fingerprint, count;
};

struct sr_channel_note {
    uint64_t count; /* that have come */
    unsigned char last[SR_VIEW_NBYTES], next[SR_VIEW_NBYTES]; /* the last one; the one that comes */
};

enum {
    SR_CHANNEL_MAGIC = 0x32507273,
    SR_CHANNEL_PIECE_NBYTES = 65536, /* a system call is lost in the time that so much takes */
    SR_CHANNEL_REASON_NBYTES = 65536,  /* of what says why it is over */
    SR_CHANNEL_REST_NBYTES = SR_CHANNEL_PIECE_NBYTES + SR_CHANNEL_REASON_NBYTES + SR_PAGE,
    SR_CHANNEL_SCRATCH_NBYTES = 8192,
};

/* What has become of a connection. */
enum sr_channel_end {
    SR_CHANNEL_OPEN,
    SR_CHANNEL_CLOSED,  /* the other end has closed it, or is gone */
    SR_CHANNEL_FAILED,  /* because of `error` */
    SR_CHANNEL_DAMAGED, /* on it came what no rank of this version sends */
};

/* One connection. Touched only by the thread that holds `turn`, but where a field says otherwise. */
struct sr_channel {
    int fd;
    int rank;              /* at the other end */
    sr_flag end;           /* enum sr_channel_end; R all */
    sr_flag left;          /* the other end has said that it leaves; R all */
    sr_flag opened;        /* the first piece has come; R all */
    sr_flag confirmed;     /* the number of the last call that was confirmed, set behind its note; R all */
    int error;
    struct sr_tcp_probe probe;
    /* out: in bytes as the other end's ring counts them, from 0 */
    uint64_t sent, limit;  /* so far; up to where its ring has room */
    uint64_t there_nbytes; /* of that ring; 0: nothing is known of it yet */
    unsigned char *rest;   /* what the socket would not take, from a frame's middle on; SR_CHANNEL_REST_NBYTES */
    size_t rest_begin, rest_end;
    uint64_t put;          /* bytes that the socket has taken */
    uint64_t messages_end; /* how many those are once all whole messages, and the last view, are among them */
    bool deaf;             /* it takes nothing any more */
    bool watched;          /* there will be news when it takes something again */
    /* in */
    struct sr_ring_end in; /* the producer's end of the ring */
    uint64_t first;        /* its first position */
    uint64_t passed, granted; /* what went past the ring, as if it had been in it; the limit that the other end knows */
    struct sr_channel_head head;
    size_t head_nbytes; /* of the head that have come */
    size_t arrived; /* of what follows it */
    bool past; /* this piece goes past the ring: */
    unsigned char *target; /* ... here; NULL: nowhere */
    struct sr_channel_note note[3]; /* by enum sr_channel_what from SR_CHANNEL_VIEW on */
    bool pausing; /* the last frame was a piece that is in the ring, with more to come of its message */
    uint64_t landed; /* bytes of the reader's message that came so, and that it has not counted yet */
    /* the reader's own */
    struct sr_ring_end *out_of; /* the consumer's end */
    struct sr_incoming *incoming;
    bool mixed; /* something may have landed */
    uint64_t seen_taken;
};

/* All connections of one rank. */
struct sr_channels {
    sr_flag turn; /* 1: a thread is at work on the channels */
    sr_flag attended; /* the reader waits for news: nobody else needs to */
    sr_flag aborted_by; /* 0, or 1 + the number of the channel on which somebody has said why it is over; R all */
    sr_flag nopened; /* channels on which a first piece has come; R all */
    int waker; /* an eventfd that ends the sleep of who waits for news in the background */
    int news; /* an epoll descriptor of all channels that have not ended */
    int nchannels;
    struct sr_channel *channel;
    int reason_from; /* whose reason is in, or comes into, `reason`; -1: nobody's */
    uint32_t reason_nbytes;
    unsigned char reason[SR_CHANNEL_REASON_NBYTES];
    unsigned char scratch[SR_CHANNEL_SCRATCH_NBYTES];
    struct sr_event nobody; /* sleeps on it: news end sleeps */
};

void sr_channels_open(struct sr_channels *channels, struct sr_channel *channel, int nchannels, int news);

/* The ring and its bytes are zeroed and stay, as does `rest`. 0, or an errno of the epoll descriptor. */
int sr_channel_open(struct sr_channels *channels, struct sr_channel *channel, int fd, int rank, struct sr_ring *ring,
                    void *bytes, uint64_t nbytes, uint64_t first, void *rest);

/* From here on this thread, and whoever takes its place, reads that ring: `out_of` is made its consumer's end. While a
   message is under way, `incoming` says so: pieces go straight there as long as its data is not NULL. */
void sr_channel_read(struct sr_channels *channels, struct sr_channel *channel, struct sr_ring_end *out_of,
                     struct sr_incoming *incoming, sr_ring_copy_fn *copy);

/* Takes in all that has come, and sends what is left over; true: something moved. For the reader. */
bool sr_channels_step(struct sr_channels *channels);

/* The same for a reader that is about to sleep on `news`: from here to sr_channels_wake nobody else takes in
 * anything. */
bool sr_channels_attend(struct sr_channels *channels);
void sr_channels_wake(struct sr_channels *channels);

/* For everyone else: takes in what has come unless the reader does; whether somebody has said why it is over. */
bool sr_channels_poll_abort(struct sr_channels *channels);

/* As sr_ring_push: SR_RING_WHOLE or SR_RING_WAIT, also where the connection has ended. */
enum sr_ring_status sr_channel_push(struct sr_channels *channels, struct sr_channel *channel,
                                    struct sr_outgoing *message);

/* As sr_ring_pull, for channel->incoming. */
enum sr_ring_status sr_channel_pull(struct sr_channels *channels, struct sr_channel *channel);

/* The reader's message has no memory any more: what is on its way to it goes nowhere. */
void sr_channel_withdraw(struct sr_channels *channels, struct sr_channel *channel);

/* Sends a notification behind what is there. */
void sr_channel_notify(struct sr_channels *channels, struct sr_channel *channel, enum sr_channel_what what,
                       const void *body, uint32_t nbytes);

static inline bool sr_channel_is_note(uint32_t what) { return what >= SR_CHANNEL_VIEW && what <= SR_CHANNEL_CONFIRMED; }

static inline uint32_t sr_channel_note_nbytes(uint32_t what)
{
    return what == SR_CHANNEL_VIEW ? SR_VIEW_NBYTES : (uint32_t)sizeof(struct sr_channel_call);
}

static inline struct sr_channel_note *sr_channel_note_of(struct sr_channel *channel, uint32_t what)
{
    return &channel->note[what - SR_CHANNEL_VIEW];
}

/* How many such notes have come, and the last one; 0: none. */
uint64_t sr_channel_last_note(struct sr_channels *channels, struct sr_channel *channel, enum sr_channel_what what,
                              void *note);

/* As sr_channels_step, for who does not read: what comes of messages goes no further than their rings. */
void sr_channels_poll(struct sr_channels *channels);

/* To be asked now and then while something is under way: ends the channel if the other end has not answered for
 * long. */
void sr_channel_probe(struct sr_channels *channels, struct sr_channel *channel, uint64_t limit_ns);

/* Sends what is left over; whether something still is. */
bool sr_channel_owes(struct sr_channels *channels, struct sr_channel *channel);

/* The same; whether any part of a whole message has not reached the other end's kernel. Until then the descriptor has
   to stay: a socket that nobody has answers what comes, credit say, with a reset, and what it had still to send is
   gone. What has reached the other kernel is read there, reset or not: nobody has to stay until it is. */
bool sr_channel_is_delivering(struct sr_channels *channels, struct sr_channel *channel);

/* Nothing is read or sent any more: the descriptors are about to go. */
void sr_channels_shut(struct sr_channels *channels);

#endif
