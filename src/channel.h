/* Channels between ranks of different hosts: one stream socket for each pair of ranks carries pieces of messages, the
 * credit and receipts for them, and notifications, all as frames. A piece that arrives goes into a ring in private
 * memory, which the receiver reads like the ring of a local rank (spsc_ring.h), or straight into the array of the
 * message that is being received. A sender puts no more on the socket than the receiver's ring has room for. So every
 * thread that polls can empty the socket, and no notification waits long behind a message.
 *
 * This file owns no descriptor: its user passes connected, non-blocking sockets and an epoll descriptor. Nothing here
 * waits but for the lock. Any thread may call the functions below; one thread at a time, the *reader*, reads the rings.
 *
 *   sender                                       receiver
 *   array --sr_channel_push--> socket ~~~~~~> poll --+--> ring --sr_channel_pull--> array
 *                     ^                              +--------------------------------^
 *                     +----- limit <~~~~~~ credit, as the ring is read                                    */
#ifndef SR_CHANNEL_H
#define SR_CHANNEL_H

#include "receipts.h"
#include "spsc_ring.h"
#include "tcp_probe.h"

/* The kind of a frame. */
enum sr_channel_what {
    SR_CHANNEL_ABORT = 1, /* the communicator has ended; the reason follows */
    SR_CHANNEL_LEAVING,  /* the sender leaves in order */
    SR_CHANNEL_CREDIT,   /* `whole`: position up to which the other end may send */
    SR_CHANNEL_PIECE,    /* of a message: the fields of sr_frame, then the data */
    /* notes; each replaces the previous one of its kind: */
    SR_CHANNEL_VIEW,     /* of a rank that continues after the end, see sr_seqlock */
    SR_CHANNEL_CALLING,  /* the sender has waited for a while in a collective: struct sr_channel_call */
    SR_CHANNEL_CONFIRMED, /* all ranks of the sender's host have begun this collective: struct sr_channel_call */
    SR_CHANNEL_RECEIPT,  /* not a note; `whole`: number of the message that is matched, see sr_receipts */
};

/* The head of every frame; little-endian, as are all machines that shmring runs on. */
struct sr_channel_head {
    uint32_t magic;
    uint32_t what;       /* enum sr_channel_what */
    uint32_t nbytes;     /* of the data that follow */
    uint32_t tag;        /* pieces only, as the rest */
    uint64_t kind : 56;
    uint64_t flags : 8;
    uint64_t whole;      /* nbytes_and_receipt of the piece's message */
};
_Static_assert(sizeof(struct sr_channel_head) == 32, "a head has no holes");

/* A collective: its number, which is the same on all ranks, and its arguments. */
struct sr_channel_call {
    uint64_t seq, fingerprint, count;
};

struct sr_channel_note {
    uint64_t count; /* of notes that have arrived */
    unsigned char last[SR_VIEW_NBYTES], next[SR_VIEW_NBYTES]; /* the last whole note; the one that is arriving */
};

enum {
    SR_CHANNEL_MAGIC = 0x33507273,
    SR_CHANNEL_PIECE_NBYTES = 65536, /* so large that the time of a system call does not matter */
    SR_CHANNEL_REASON_NBYTES = 65536,  /* the most that the reason of an abort can have */
    SR_CHANNEL_REST_NBYTES = SR_CHANNEL_PIECE_NBYTES + SR_CHANNEL_REASON_NBYTES + SR_PAGE,
    SR_CHANNEL_SCRATCH_NBYTES = 8192,
};

/* The state of a channel. */
enum sr_channel_end {
    SR_CHANNEL_OPEN,
    SR_CHANNEL_CLOSED,  /* the other end has closed it, or has died */
    SR_CHANNEL_FAILED,  /* with `error` */
    SR_CHANNEL_DAMAGED, /* bytes arrived that no rank of this version sends; `error` is EBADMSG */
};

/* One channel. Unless a field says otherwise, only the thread that holds `lock` reads and writes it. */
struct sr_channel {
    int fd;
    int rank;              /* of the other end */
    sr_flag end;           /* enum sr_channel_end. W the holder; R all threads */
    sr_flag left;          /* 1: the other end has notified that it leaves. W the holder; R all threads */
    sr_flag opened;        /* 1: the first piece has arrived. W the holder; R all threads */
    sr_flag confirmed;     /* number of the last confirmed call. W the holder, after the call's note; R all threads */
    int error;
    struct sr_tcp_probe probe;
    /* sending: positions are those of the other end's ring, from 0 */
    uint64_t sent, limit;  /* position up to which pieces are sent; up to which the other ring has room */
    uint64_t remote_ring_nbytes; /* length of the other end's ring; 0: not known yet */
    unsigned char *rest;   /* the end of a frame that the socket did not take; SR_CHANNEL_REST_NBYTES */
    size_t rest_begin, rest_end;
    uint64_t put;          /* bytes that the socket has taken */
    uint64_t messages_end; /* value of `put` once the socket has taken all whole messages, receipts and the last view */
    uint64_t owed[SR_RECEIPTS_WORDS]; /* receipts that are still to be sent, one bit for each number */
    uint32_t nowed;
    bool unwritable;       /* the socket takes nothing any more */
    bool watched;          /* epoll reports when the socket takes bytes again */
    struct sr_receipts receipts; /* for messages sent on this channel. Set by the lock's holder, taken by the reader */
    /* receiving */
    struct sr_ring_end in; /* the producer's end of the ring */
    uint64_t first;        /* the first position of the ring */
    uint64_t bypassed;     /* bytes that the pieces that bypassed the ring would have taken in it */
    uint64_t granted;      /* the last limit that was sent to the other end */
    struct sr_channel_head head;
    size_t head_nbytes; /* bytes of the head that have arrived */
    size_t arrived; /* bytes that have arrived of the data behind the head */
    bool bypasses; /* the piece that is arriving bypasses the ring and goes to `target` */
    unsigned char *target; /* NULL: the data are discarded */
    struct sr_channel_note note[3]; /* by enum sr_channel_what from SR_CHANNEL_VIEW on */
    bool pausing; /* the last frame was a piece that is in the ring and is not the last one of its message */
    uint64_t uncounted; /* bytes of the reader's message that bypassed the ring and are not in its offset yet */
    /* W and R: the reader */
    struct sr_ring_end *out_of; /* the consumer's end of the ring */
    struct sr_incoming *incoming;
    bool has_bypass; /* bytes may have bypassed the ring since the reader last counted them */
    uint64_t seen_taken;
};

/* All channels of one rank. */
struct sr_channels {
    sr_flag lock; /* 1: a thread works on the channels */
    sr_flag attended; /* 1: the reader waits for news, so other threads need not poll. W reader; R all threads */
    sr_flag aborted_by; /* 1 + number of the channel on which the reason of an abort came; 0: none. R all threads */
    sr_flag nopened; /* number of channels on which a first piece has arrived. R all threads */
    int waker; /* an eventfd that ends the sleep of a background thread that waits for news */
    int news; /* an epoll descriptor of all channels that are open */
    int nchannels;
    struct sr_channel *channel;
    int reason_from; /* number of the channel whose reason is in `reason` or arrives there; -1: none */
    uint32_t reason_nbytes;
    unsigned char reason[SR_CHANNEL_REASON_NBYTES];
    unsigned char scratch[SR_CHANNEL_SCRATCH_NBYTES];
    struct sr_event nobody; /* the event of the rings: no thread sleeps on it, since news end the sleeps */
};

void sr_channels_open(struct sr_channels *channels, struct sr_channel *channel, int nchannels, int news);

/* Open a channel. The ring and its bytes are zeroed; they and `rest` must stay in place. Return 0, or the errno of
   epoll_ctl. */
int sr_channel_open(struct sr_channels *channels, struct sr_channel *channel, int fd, int rank, struct sr_ring *ring,
                    void *bytes, uint64_t nbytes, uint64_t first, void *rest);

/* Begin to read the ring of a channel: the caller is its reader, and opens the consumer's end at `out_of`. While a
   message is being received, `incoming` describes it: its pieces bypass the ring as long as its data is not NULL. */
void sr_channel_read(struct sr_channels *channels, struct sr_channel *channel, struct sr_ring_end *out_of,
                     struct sr_incoming *incoming, sr_ring_copy_fn *copy);

/* Receive everything that has arrived, and send what is left over. Return whether anything moved. For the reader. */
bool sr_channels_step(struct sr_channels *channels);

/* As sr_channels_step, for a reader that is about to sleep on `news`: no other thread receives anything until the
   reader calls sr_channels_wake. */
bool sr_channels_attend(struct sr_channels *channels);
void sr_channels_wake(struct sr_channels *channels);

/* For all other threads: receive what has arrived, unless the reader does so. Return whether the reason of an abort has
   arrived. */
bool sr_channels_poll_abort(struct sr_channels *channels);

/* As sr_ring_push. Return SR_RING_WAIT also if the channel has ended. */
enum sr_ring_status sr_channel_push(struct sr_channels *channels, struct sr_channel *channel,
                                    struct sr_outgoing *message);

/* As sr_ring_pull, for channel->incoming. */
enum sr_ring_status sr_channel_pull(struct sr_channels *channels, struct sr_channel *channel);

/* Discard the data that still arrive for the reader's message, whose memory is about to go. */
void sr_channel_withdraw(struct sr_channels *channels, struct sr_channel *channel);

/* Send the receipt for a message that came on this channel, or keep it until the socket has room. */
void sr_channel_give_receipt(struct sr_channels *channels, struct sr_channel *channel, uint32_t number);

/* Send a notification behind the bytes that are still unsent. */
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

/* Copy the last note of this kind to `note`, and return how many have arrived; 0: none. */
uint64_t sr_channel_last_note(struct sr_channels *channels, struct sr_channel *channel, enum sr_channel_what what,
                              void *note);

/* As sr_channels_step, for a thread that is not the reader: no piece bypasses its ring. */
void sr_channels_poll(struct sr_channels *channels);

/* End the channel if its other end has not answered for limit_ns. To be called now and then while data are under way,
   see tcp_probe.h. */
void sr_channel_probe(struct sr_channels *channels, struct sr_channel *channel, uint64_t limit_ns);

/* Try to send what is left over. Return whether some of it is still unsent. */
bool sr_channel_has_unsent(struct sr_channels *channels, struct sr_channel *channel);

/* Try to send what is left over. Return whether some byte of the whole messages, receipts or the last view has not
   reached the other end's kernel. While this is true the descriptor must stay open: a closed socket answers bytes that
   arrive, such as credit, with a reset, and loses its unsent bytes. The receiver can read what has reached its
   kernel, even after a reset. */
bool sr_channel_is_delivering(struct sr_channels *channels, struct sr_channel *channel);

/* Stop reading and sending, before the descriptors are closed. */
void sr_channels_shut(struct sr_channels *channels);

#endif
