/* Mail between ranks of different hosts: one stream socket for each pair, on which the pieces of messages, the credit
 * for them, and words of a few bytes go as frames. What comes is laid into a ring in private memory, whose other end
 * is read as that of a neighbour's (spsc_ring.h), or straight into the array that waits for it. A sender puts no more
 * on the socket than that ring has room for: whoever looks can take off all that has come, and no word is stuck for
 * long.
 *
 * Owns no descriptor: it is handed connected, non-blocking sockets and an epoll descriptor. Nothing here waits. Any
 * thread may call what is below; who *reads* the rings is one thread at a time.
 *
 *   sender                                       receiver
 *   array --sr_post_push--> socket ~~~~~~> pump --+--> ring --sr_post_pull--> array
 *                     ^                           +---------------------------^
 *                     +----- limit <~~~~~~ credit, as the ring is read                                    */
#ifndef SR_POST_H
#define SR_POST_H

#include "tcp_probe.h"
#include "spsc_ring.h"

enum sr_post_what {
    SR_POST_OVER = 1, /* it is over, because of what follows */
    SR_POST_LEAVING,  /* the sender leaves in order */
    SR_POST_CREDIT,   /* `whole`: up to where the other end may send */
    SR_POST_PIECE,    /* of a message: what sr_frame says of it, and its bytes */
    /* notes, each of which replaces the one before: */
    SR_POST_VIEW,     /* of who goes on after the end, see sr_views */
    SR_POST_CALLING,  /* the sender has waited for a while in a collective: struct sr_post_call */
    SR_POST_CONFIRMED, /* all ranks of the sender's host have begun this collective: struct sr_post_call */
};

/* In front of everything; little-endian, as are all machines that shmring runs on. */
struct sr_post_head {
    uint32_t magic;
    uint32_t what;       /* enum sr_post_what */
    uint32_t nbytes;     /* that follow */
    uint32_t tag;        /* of a piece, as the rest */
    uint64_t kind : 56;
    uint64_t flags : 8;
    uint64_t whole;      /* bytes of its message */
};
_Static_assert(sizeof(struct sr_post_head) == 32, "a head has no holes");

/* Which one, by the number that all ranks count, and as what. */
struct sr_post_call {
    uint64_t seq, fingerprint, count;
};

struct sr_post_note {
    uint64_t count; /* that have come */
    unsigned char last[SR_VIEW_NBYTES], next[SR_VIEW_NBYTES]; /* the last one; the one that comes */
};

enum {
    SR_POST_MAGIC = 0x32507273,
    SR_POST_PIECE_NBYTES = 65536, /* a system call is lost in the time that so much takes */
    SR_POST_WORD_NBYTES = 65536,  /* of what says why it is over */
    SR_POST_REST_NBYTES = SR_POST_PIECE_NBYTES + SR_POST_WORD_NBYTES + SR_PAGE,
    SR_POST_SCRATCH_NBYTES = 8192,
};

/* What has become of a connection. */
enum sr_post_end {
    SR_POST_OPEN,
    SR_POST_CLOSED,  /* the other end has closed it, or is gone */
    SR_POST_FAILED,  /* because of `error` */
    SR_POST_DAMAGED, /* on it came what no rank of this version sends */
};

/* One connection. Touched only by who has the office, but where a field says otherwise. */
struct sr_post {
    int fd;
    int rank;              /* at the other end */
    sr_flag end;           /* enum sr_post_end; R all */
    sr_flag left;          /* the other end has said that it leaves; R all */
    sr_flag opened;        /* the first piece has come; R all */
    sr_flag confirmed;     /* the number of the last call that was confirmed, set behind its note; R all */
    int error;
    struct sr_link link;
    /* out: in bytes as the other end's ring counts them, from 0 */
    uint64_t sent, limit;  /* so far; up to where its ring has room */
    uint64_t there_nbytes; /* of that ring; 0: nothing is known of it yet */
    unsigned char *rest;   /* what the socket would not take, from a frame's middle on; SR_POST_REST_NBYTES */
    size_t rest_begin, rest_end;
    uint64_t put;          /* bytes that the socket has taken */
    uint64_t messages_end; /* how many those are once all whole messages, and the last view, are among them */
    bool deaf;             /* it takes nothing any more */
    bool watched;          /* there will be news when it takes something again */
    /* in */
    struct sr_ring_end in; /* the producer's end of the ring */
    uint64_t first;        /* its first position */
    uint64_t passed, told; /* what went past the ring, as if it had been in it; the limit that the other end knows */
    struct sr_post_head head;
    size_t head_nbytes;    /* of the head that have come */
    size_t arrived;        /* of what follows it */
    bool past;             /* this piece goes past the ring: */
    unsigned char *target; /* ... here; NULL: nowhere */
    struct sr_post_note note[3]; /* by enum sr_post_what from SR_POST_VIEW on */
    bool pausing;          /* the last frame was a piece that is in the ring, with more to come of its message */
    uint64_t landed;       /* bytes of the reader's message that came so, and that it has not counted yet */
    /* the reader's own */
    struct sr_ring_end *out_of; /* the consumer's end */
    struct sr_incoming *incoming;
    bool mixed;            /* something may have landed */
    uint64_t seen_taken;
};

/* All connections of one rank. */
struct sr_office {
    sr_flag turn;     /* taken by who has the office */
    sr_flag attended; /* the reader waits for news: nobody else needs to */
    sr_flag heard;    /* 0, or 1 + the number of the post on which somebody has said why it is over; R all */
    sr_flag nopened;  /* posts on which a first piece has come; R all */
    int waker;        /* an eventfd that ends the sleep of who waits for news in the background */
    int news;         /* an epoll descriptor of all posts that have not ended */
    int nposts;
    struct sr_post *post;
    int word_from;    /* whose word is in, or comes into, `word`; -1: nobody's */
    uint32_t word_nbytes;
    unsigned char word[SR_POST_WORD_NBYTES];
    unsigned char scratch[SR_POST_SCRATCH_NBYTES];
    struct sr_bell nobody; /* sleeps on it: news end sleeps */
};

void sr_office_open(struct sr_office *office, struct sr_post *post, int nposts, int news);

/* The ring and its bytes are zeroed and stay, as does `rest`. 0, or an errno of the epoll descriptor. */
int sr_post_open(struct sr_office *office, struct sr_post *post, int fd, int rank, struct sr_ring *ring, void *bytes,
                 uint64_t nbytes, uint64_t first, void *rest);

/* From here on this thread, and whoever takes its place, reads that ring: `out_of` is made its consumer's end. While a
   message is under way, `incoming` says so: pieces go straight there as long as its data is not NULL. */
void sr_post_read(struct sr_office *office, struct sr_post *post, struct sr_ring_end *out_of,
                  struct sr_incoming *incoming, sr_ring_copy_fn *copy);

/* Takes in all that has come, and sends what is left over; true: something moved. For the reader. */
bool sr_office_step(struct sr_office *office);

/* The same for a reader that is about to sleep on `news`: from here to sr_office_wake nobody else takes in anything. */
bool sr_office_attend(struct sr_office *office);
void sr_office_wake(struct sr_office *office);

/* For everyone else: takes in what has come unless the reader does; whether somebody has said why it is over. */
bool sr_office_hears(struct sr_office *office);

/* As sr_ring_push: SR_RING_WHOLE or SR_RING_WAIT, also where the connection has ended. */
enum sr_ring_status sr_post_push(struct sr_office *office, struct sr_post *post, struct sr_outgoing *message);

/* As sr_ring_pull, for post->incoming. */
enum sr_ring_status sr_post_pull(struct sr_office *office, struct sr_post *post);

/* The reader's message has no memory any more: what is on its way to it goes nowhere. */
void sr_post_withdraw(struct sr_office *office, struct sr_post *post);

/* Sends a word behind what is there. */
void sr_post_say(struct sr_office *office, struct sr_post *post, enum sr_post_what what, const void *body,
                 uint32_t nbytes);

static inline bool sr_post_is_note(uint32_t what) { return what >= SR_POST_VIEW && what <= SR_POST_CONFIRMED; }

static inline uint32_t sr_post_note_nbytes(uint32_t what)
{
    return what == SR_POST_VIEW ? SR_VIEW_NBYTES : (uint32_t)sizeof(struct sr_post_call);
}

static inline struct sr_post_note *sr_post_note_of(struct sr_post *post, uint32_t what)
{
    return &post->note[what - SR_POST_VIEW];
}

/* How many such notes have come, and the last one; 0: none. */
uint64_t sr_post_hear(struct sr_office *office, struct sr_post *post, enum sr_post_what what, void *note);

/* As sr_office_step, for who does not read: what comes of messages goes no further than their rings. */
void sr_office_look(struct sr_office *office);

/* To be asked now and then while something is under way: ends the post if the other end has not answered for long. */
void sr_post_check_link(struct sr_office *office, struct sr_post *post, uint64_t limit_ns);

/* Sends what is left over; whether something still is. */
bool sr_post_owes(struct sr_office *office, struct sr_post *post);

/* The same; whether any part of a whole message has not reached the other end's kernel. Until then the descriptor has
   to stay: a socket that nobody has answers what comes, credit say, with a reset, and what it had still to send is
   gone. What has reached the other kernel is read there, reset or not: nobody has to stay until it is. */
bool sr_post_is_delivering(struct sr_office *office, struct sr_post *post);

/* Nothing is read or sent any more: the descriptors are about to go. */
void sr_office_shut(struct sr_office *office);

#endif
