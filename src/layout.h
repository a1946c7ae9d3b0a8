/* The layout of shared memory: the segment of a communicator, and the heads of rings and locks in memory of their own.
   For each field it names the ranks that write it (W) and read it (R). "W owner" is the rank whose lane holds the
   field. Atomic fields are accessed only by the functions in sync/. */
#ifndef SR_LAYOUT_H
#define SR_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Terms. A *rank* is a process (or thread) of the communicator. A *lane* is a rank's part of the control pages. A
   *staging buffer* is a rank's buffer through which arrays in private memory pass. It holds *slots*; a slot holds one
   *chunk* of an array. A *slice* is the part of a chunk that one rank reduces. A *message ring* carries the messages
   from one rank to one other rank, whatever else both are doing.

   A *position* says where a slot begins: a count of bytes that never goes back and is the same on all ranks for the
   same chunk. Its low bits are the offset in the staging buffer, its high bits count the laps. A *lap* is the least
   power of two that is not less than the length of the buffer; slots skip the part of a lap beyond that length. If two
   ranks both stage, they swap staging buffers with each lap, except in a large all_reduce or reduce; more ranks swap
   parts of long messages.

     0                  +----------------------------------------------+
                        | sr_header                                    |  geometry, the abort word
     4096               +----------------------------------------------+
                        | sr_lane of rank 0: call lines, counters,     |  most cache lines have one writer
                        |   event, liveness, records, waits, stacks    |
                        | sr_lane of rank 1 ...                        |
     page-aligned       +----------------------------------------------+
                        | staging buffer of rank 0 (staging_nbytes)    |  allocated before its first touch
                        | staging buffer of rank 1 ...                 |
                        +----------------------------------------------+
                        | message rings to rank 0: from rank 0 (never  |  get pages when the sender first needs
                        |   used), from rank 1 ...                     |  them; the sender then marks itself in
                        | message rings to rank 1 ...                  |  the receiver's `p2p_senders`
                        +----------------------------------------------+                                  */

#define SR_MAGIC 0x676e69726d687362u       /* "bshmring": a segment of this layout */
#define SR_PAGE 4096u
#define SR_CACHE_LINE 64u
#define SR_LINE 128u            /* two cache lines: the adjacent-line prefetcher loads them as a pair */
#define SR_LINES 128u           /* call lines of a rank, a power of two */
#define SR_PAYLOAD_NBYTES 48u   /* of a call line: the most that a tiny message can have */
#define SR_RECORDS 64u          /* flight records of a rank, a power of two */
#define SR_REASON_NBYTES 192u
#define SR_OP_NBYTES 24u
#define SR_ITEM_NAME_NBYTES 16u  /* of the name that NumPy gives to the dtype of opaque items */
#define SR_VIEW_NBYTES 640u     /* of a packed view, see shmring/_lifecycle/membership.py */
#define SR_VIEW_WORDS (SR_VIEW_NBYTES / 8u)
#define SR_KEY_NBYTES 32u
#define SR_STACKS_NBYTES 8192u  /* of the text that describes a rank's Python stacks */
#define SR_MAX_RANKS 4096u      /* culprit (on any host) and reporter have 16 bits each in the abort word */

typedef _Atomic uint64_t sr_flag; /* flags that only grow are compared by signed difference, so that they may wrap */

/* A rank begins every collective with a call line: one cache line that says which call the rank has entered, and with
   which arguments. Call k uses line k mod SR_LINES. A rank publishes call k only after it has seen every rank's line of
   call k - SR_LINES / 2. Every rank had published that line only after it had seen this rank's line of call
   k - SR_LINES, so no rank still reads the line that is overwritten. There are so many lines because ranks that share
   a CPU run many calls in one turn. */
struct sr_call_line {
    sr_flag seq;                              /* W owner, last; R all */
    uint64_t fingerprint;                     /* W owner before seq; R all: equal on all ranks or Mismatch */
    unsigned char payload[SR_PAYLOAD_NBYTES]; /* W owner before seq; R all: a tiny message or sr_descriptor */
} __attribute__((aligned(64)));

/* Payload of a call line whose data are larger than the line. W owner before seq; R all. */
struct sr_descriptor {
    uint64_t x_block, out_block;    /* shared blocks of x and out; 0: private memory; SR_PRIVATE: see there */
    uint64_t x_offset, out_offset;  /* bytes from the owner's part of the block; with SR_PRIVATE the owner's address */
    uint32_t far;                   /* of rank 0: the cores are far apart; holds from the next call on */
    uint32_t ping;                  /* of rank 0: this call measures the distance again */
    uint32_t skew;                  /* bytes before the owner's data in a slot, whosever it is; below SR_CACHE_LINE */
    uint32_t next_in_place;         /* of rank 0, if it chooses: the path of the next call of this kind and class */
};

#define SR_PRIVATE UINT64_MAX /* in place of a block: private memory that other ranks read through the kernel */

/* The progress counters of a rank. */
enum sr_progress {
    SR_STAGED,   /* position up to which the rank has staged its input */
    SR_REDUCED,  /* position up to which the rank has reduced its slices */
    SR_COPIED,   /* position up to which the rank needs no staged data any more: credit for the writers */
    SR_HANDED,   /* position up to which the results for the rank's children in a tree are staged */
    SR_FINISHED, /* seq of the last call after which the rank no longer accesses other ranks' arrays */
    SR_PINGED,   /* round trips begun (rank 0) or answered (other ranks) */
    SR_PROGRESSES
};

struct sr_counter {
    sr_flag value; /* W owner; R all */
} __attribute__((aligned(128)));

/* The owner signals its event after it has published one of its flags, if another rank sleeps. See sync/event.h. */
struct sr_event {
    _Atomic uint32_t sleepers; /* generation | 1 if a rank sleeps; the futex word. W sleepers, the signaller; R both */
} __attribute__((aligned(128)));

enum sr_state { SR_ABSENT, SR_JOINED, SR_CLOSED };

/* Shows whether the owner lives: its liveness thread holds `holder` as a robust futex until it ends. */
struct sr_liveness {
    _Atomic uint32_t holder; /* W liveness thread: its tid | FUTEX_WAITERS; when the thread dies the kernel sets
                                FUTEX_OWNER_DIED and wakes one of the threads that sleep on the word; R all */
    _Atomic uint32_t state;  /* W owner: enum sr_state; R all */
    int32_t pid;             /* W owner before state; R all */
    _Atomic int32_t cpu;     /* W owner when it waits and CPUs are shared: the CPU it runs on; R all, as a hint */
    uint64_t start_time;     /* W owner before state: field 22 of /proc/PID/stat; R all */
    uint64_t address;        /* W owner before state: of this structure in the owner's address space; R all */
    uint64_t nonce;          /* W owner before state: random; R all: a rank that reads the same value at `address` in
                                the owner's memory can read all of that memory */
    _Atomic uint32_t unwatched; /* W liveness thread before holder: 1 if the kernel has refused to mark `holder`; the
                                   other ranks then look for the thread and mark the word themselves; R all */
} __attribute__((aligned(128)));

#define SR_P2P_WORDS (SR_MAX_RANKS / 64u)

/* State of a call that a rank has begun. */
enum sr_outcome { SR_UNDER_WAY, SR_COMPLETE, SR_RAISED };

/* One of the last calls of a rank, for error messages and tools. W owner; R all. A reader may find a record that its
   owner is overwriting, and must not rely on any of the values. */
struct sr_record {
    uint64_t seq;
    uint64_t count;    /* elements */
    int64_t number;    /* of the user's call to which this one belongs, from 1 on; 0 or less: the engine's own */
    uint8_t kind, dtype, op, algorithm; /* these eight bytes are copied as one word from struct Call of group.pxd */
    uint8_t order;     /* 1: Fortran order in more than one dimension */
    uint8_t named;     /* the kind of the call of which this one is a step; 0: of none */
    uint8_t wire;      /* wire format between hosts */
    uint8_t unused;
    uint32_t root;
    uint16_t hosts_in_group;
    uint8_t invalid;   /* 1: the call was refused with an error on its own rank */
    uint8_t outcome;   /* enum sr_outcome */
    uint16_t priority; /* 0: none */
    uint16_t reserved;
    uint32_t item_nbytes;                /* opaque items: bytes of one item, and `count` counts bytes */
    char item_name[SR_ITEM_NAME_NBYTES]; /* opaque items: their dtype; zero-terminated */
};

/* Waits that a rank may be in at the same time, in different threads. */
enum sr_wait_index { SR_WAIT_CALL, SR_WAIT_MESSAGE, SR_WAIT_LOCK, SR_WAITS };
enum sr_wait_kind { SR_IN_CALL, SR_IN_SEND, SR_IN_RECV, SR_IN_PROBE, SR_AT_LOCK, SR_WAIT_KINDS };

/* A wait that has lasted so long that the rank sleeps. W owner; R all ranks and tools, with the caution that records
   need. */
struct sr_wait {
    sr_flag since_ns; /* begin, of CLOCK_MONOTONIC; 0: the rank does not wait. Written last */
    sr_flag until_ns; /* time at which the rank gave up with an error; 0: it still waits */
    sr_flag seq;      /* SR_WAIT_CALL only: of the call's record */
    sr_flag what;     /* enum sr_wait_kind << 32 | the awaited local rank; size + rank: on another host; ~0: any rank */
    sr_flag flag;     /* SR_WAIT_CALL only: offset of the awaited flag from the header, if it lies in a lane */
    sr_flag target;   /* the wait is over once that flag has reached this value, even if the rank does not go on */
} __attribute__((aligned(64)));

/* A process that may only read the segment requests a rank's stacks here. The liveness thread sleeps on `event`; a
   wake-up without any other reason is a request. See sync/stack_request.h. */
struct sr_stack_request {
    _Atomic uint32_t event; /* the futex word. W owner: grows when the liveness thread is to end; R all */
    uint32_t rank, size;   /* W owner: its rank, and the number of ranks, on all hosts together; R all */
    sr_flag version;       /* W liveness thread: grows by one before and after it writes `stacks`; R all */
} __attribute__((aligned(128)));

/* The report of a rank that gives up. */
struct sr_report {
    /* W owner, before it sets the abort word; R all, once the abort word names the owner as the reporter. */
    uint64_t seq;
    int64_t number;                /* of the user's call */
    char op[SR_OP_NBYTES];         /* the name of that call; zero-terminated */
    char reason[SR_REASON_NBYTES]; /* UTF-8, zero-terminated */
    uint8_t reserved[24];
};

/* The view of a rank that continues after the communicator has ended. The rank publishes the whole view each time that
   it changes. The last two versions are kept, so that readers can read the newer one while the next one is written.
   See sync/seqlock.h. */
struct sr_seqlock {
    sr_flag version;                         /* number of versions so far. W owner, last; R all */
    uint8_t reserved[120];
    sr_flag word[2][SR_VIEW_WORDS];          /* by version modulo 2. W owner before version; R all */
};

struct sr_lane {
    struct sr_call_line line[SR_LINES];        /* by seq modulo SR_LINES */
    struct sr_counter progress[SR_PROGRESSES]; /* by enum sr_progress */
    struct sr_event event;
    struct sr_liveness liveness;
    struct sr_report report;
    struct sr_event p2p_event;    /* the owner sleeps on it for messages and for room in a ring; its peers signal it */
    sr_flag p2p_senders[SR_P2P_WORDS]; /* W rank r: bit r, once its message ring to the owner is formatted; R owner */
    struct sr_record record[SR_RECORDS]; /* by seq modulo SR_RECORDS */
    struct sr_seqlock view;
    struct sr_wait wait[SR_WAITS]; /* by enum sr_wait_index */
    struct sr_stack_request stack_request;
    char stacks[SR_STACKS_NBYTES] __attribute__((aligned(4096))); /* W liveness thread; R all: zero-terminated UTF-8 */
} __attribute__((aligned(4096)));

/* ---- rings of frames (spsc_ring.h) ------------------------------------------------------------------------------ */

/* The head of a ring from one producer to one consumer. The ring holds frames, each of which begins at a cache line and
   may wrap around the ring's end. A *position* counts the bytes since the beginning, all laps included. The length of
   the ring is a power of two, so the low bits of a position are the offset. Behind the last frame lies the word in
   which the producer will announce the next frame. */
struct sr_ring {
    struct sr_counter taken; /* W consumer: position up to which it has taken all frames; R producer, for room */
};

enum sr_frame_flags { SR_FRAME_FIRST = 1, SR_FRAME_LAST = 2, SR_FRAME_CUT = 4, SR_FRAME_OFFER = 8 };

/* The head of each piece of a message. Up to SR_FRAME_INLINE_NBYTES of data lie in the rest of this cache line; a
   longer piece has its data from the next line on. So a small message is one line, which moves between cores once. */
struct sr_frame {
    sr_flag begun;          /* the frame's position + 1 once the frame is there. W producer, last; R consumer */
    union { /* W producer before begun, R consumer, as all that follow */
        struct {
            uint64_t message_nbytes : 48; /* of all pieces together */
            uint64_t receipt : 16;  /* the number of the receipt that the producer wants; 0: none */
        };
        uint64_t nbytes_and_receipt; /* stored as one word, as kind_and_flags */
    };
    uint32_t nbytes;        /* of this piece */
    uint32_t tag;           /* free for the ring's user */
    union {
        struct {
            uint64_t kind : 56; /* free for the ring's user */
            uint64_t flags : 8; /* enum sr_frame_flags; CUT: the message ends here, incomplete and void */
        };
        uint64_t kind_and_flags; /* stored as one word: to store one bit-field is to load the line first */
    };
};

/* Receipts for messages that one rank sends to one other rank. A sender that wants to know when its message is matched
   with a receive puts a number into the message's frames. Of several such messages any may be matched first, so each
   has a bit. Receipt 0 is none. */
#define SR_RECEIPTS 16384u
struct sr_receipts {
    sr_flag count;                  /* of receipts given. W receiver, after the bit; R sender, which sleeps on it */
    sr_flag given[SR_RECEIPTS / 64]; /* one bit for each number. Set by the receiver, cleared by the sender */
};

#define SR_FRAME_INLINE_NBYTES 32u

/* The data of a frame with SR_FRAME_OFFER: the address of a whole message in the producer's memory. The consumer
   copies the bytes from there, once. See offer.h, which has the states. */
struct sr_offer {
    uint64_t address;  /* W producer before the frame is there, R consumer: address, or offset in ... */
    uint64_t block;    /* ... the producer's part of this shared block; SR_PRIVATE: none. Likewise */
    sr_flag state;     /* enum sr_offer_state. W both sides, by compare-and-swap; R producer, which sleeps on it */
};
#define SR_RING_LEAST_NBYTES 512u

/* The head of a message ring: one page. The ring's bytes begin on the next page. */
struct sr_message_ring {
    struct sr_ring ring;
    struct sr_receipts receipts; /* for messages that went through the ring */
};

enum sr_side { SR_PRODUCER, SR_CONSUMER };

#define SR_ORIGIN_BEGIN 16 /* offset of sr_broadcast.origin */
#define SR_ORIGIN_NBYTES 48

/* A ring from one writer to one or several readers in memory of its own (the public classes Ring and Broadcast;
   broadcast.h). Readers never write to the frames. The ring's bytes begin at sr_broadcast_head_nbytes().

     0                  +----------------------------------------------+
                        | sr_broadcast: the writer's place and event   |
                        | sr_reader 0, sr_reader 1 ...                 |
     page-aligned       +----------------------------------------------+
                        | bytes of the ring  (nbytes)                  |
                        +----------------------------------------------+

   A *place* is the writer's, or one reader's. A process takes a place by one compare-and-swap that stores its pid as
   well, so a place whose owner has been killed can always be recognised. */
enum sr_place_state {
    SR_PLACE_FREE,     /* no process has the place; a reader may take it and join at the writer's position */
    SR_PLACE_RESERVED, /* for a reader that has not come: the first frame is kept for it */
    SR_PLACE_JOINING,  /* a reader waits until the writer has admitted it */
    SR_PLACE_JOINED,
    SR_PLACE_CLOSED,   /* the owner has left, and no other process takes the place: the writer's, or a reader's if
                          places are for single use */
};

struct sr_place {
    sr_flag owner;        /* pid << 32 | enum sr_place_state. W by compare-and-swap: a process that takes or leaves the
                             place, the writer that admits a reader, a process that has found the owner dead; R all */
    sr_flag start_time;   /* field 22 of /proc/PID/stat; 0: not known yet. W owner after `owner`, and 0 before the place
                             becomes free; R all */
    sr_flag first;        /* a reader's first position, and ... W writer before it admits the reader; R the reader */
    sr_flag first_number; /* ... the number of the first item there; likewise */
} __attribute__((aligned(128)));

struct sr_reader {
    struct sr_place place;
    struct sr_ring ring;    /* W the reader: `taken`; R writer */
    struct sr_event event;  /* the writer sleeps on it while this reader is the slowest one; the reader signals it */
};

struct sr_broadcast {
    uint64_t magic;            /* W creator before any other process maps it, R all, as all up to `single_use` */
    uint64_t nbytes;           /* a power of two */
    unsigned char origin[SR_ORIGIN_NBYTES]; /* of ring_common.py: who made the ring, and who has pickled it */
    uint32_t places, reserved; /* places of readers; places that are reserved at the beginning */
    uint32_t drops;            /* 1: the writer does not wait for readers */
    uint32_t single_use;       /* 1: a reader's place has one owner, also after that process has left */
    uint32_t aborted;          /* 1: an exception ended the putting. W writer, before it closes; R readers, then */
    struct sr_place writer;
    struct sr_counter changes; /* W readers that take or leave a place, by fetch-and-add; R writer, which then looks at
                                  the places */
    struct sr_counter tail;    /* with `drops`: position of the oldest item that is kept. W writer, before it overwrites
                                  older ones; R readers, after they have copied bytes */
    struct sr_event event;     /* all readers sleep on it; the writer signals it */
    struct sr_reader reader[]; /* `places` of them */
};

#define SR_BROADCAST_MAGIC 0x3374736163646273u /* "sbdcast3" */
#define SR_MOST_READERS 1024u

/* SR_REMOTE_ABORT: a rank of another host has notified all ranks. */
enum sr_cause { SR_NO_ABORT, SR_RANK_FAILED, SR_TIMED_OUT, SR_MISMATCHED, SR_ABORTED, SR_REMOTE_ABORT };

/* The sizes from which one method is faster than another, in bytes (shmring/_config/thresholds.py). Rank 0's values
   hold for all ranks, since all ranks must choose alike. */
struct sr_tuning {
    uint64_t small_nbytes;            /* up to this sum over the other ranks' messages, no reduction is sliced */
    uint64_t far_stream_nbytes;       /* from here on far cores stage, and send messages, with streaming stores */
    uint64_t one_chunk_nbytes;        /* messages up to here are one chunk */
    uint64_t chunk_nbytes;            /* chunk of a larger message */
    uint64_t exchange_nbytes;         /* chunk of the calls of staged.pxd: results come straight from the slots */
    uint64_t stream_reduced_nbytes;   /* results of reductions out of place from here on bypass the cache */
    uint64_t stream_in_place_nbytes;  /* in place, from here on */
    uint64_t stream_out_nbytes;       /* from here on bypass the cache: results of scans out of place, of calls that
                                         only move data, and received messages */
    uint64_t fuse_nbytes;             /* of many arrays, those up to here are reduced together */
    uint64_t ping_nbytes;             /* calls from here on check the clock whether to measure the distance again */
    uint64_t single_copy_measured;    /* 1: one rank chooses by measurement, where it can: path_choice.pxd, and the
                                         sender of a message: message_path.pxd */
    uint64_t single_copy_nbytes;      /* elsewhere: private pieces and messages from here on are read in place, ... */
    uint64_t single_copy_scatter_nbytes; /* ... in a scatter: the length of all pieces together, ... */
    uint64_t single_copy_most_nbytes; /* ... up to here; beyond, streaming through slots is faster */
    uint64_t cached_chunk_nbytes;     /* chunk of a message between far cores that uses few slots, ... */
    uint64_t cached_most_nbytes;      /* ... which is every message up to here that is more than one chunk */
    uint64_t single_copy_message_nbytes; /* messages from here on may be read from the sender's private memory */
    uint64_t small_all_reduce_nbytes; /* as small_nbytes, for an all_reduce of ranks with a CPU each */
    uint64_t chain_nbytes;            /* with more ranks than CPUs, reductions from here on go from rank to rank */
};

/* W rank 0 before any other rank maps the segment; R all; other writers are named. */
struct sr_header {
    uint64_t magic;
    uint32_t nranks;
    uint32_t forced_path; /* 0: as measured; 1: near; 2: far */
    uint64_t staging_nbytes; /* of one staging buffer, whole pages */
    uint64_t message_ring_nbytes; /* of one message ring, a power of two */
    struct sr_tuning tuning[2];   /* for near cores, for far cores */
    uint64_t first_seq;   /* the first sequence number; positions begin near it, see first_position() of group.pxd */
    uint8_t key[SR_KEY_NBYTES]; /* random: ranks that continue after a failure recognise each other by it */
    /* Set once, by compare-and-swap; sync/abort.h has its format. W any rank; R all */
    sr_flag abort __attribute__((aligned(128)));
    /* Until then no rank warns of a late rank. W the rank that warns, by compare-and-swap; R all */
    sr_flag quiet_until_ns __attribute__((aligned(128)));
};

/* A lock of an array that all ranks see (Comm.shared). Such an array has memory of its own:

     0                  +----------------------------------------------+
                        | the array                                    |  W and R as its users agree
     SR_LINE-aligned    +----------------------------------------------+
                        | sr_lock 0, sr_lock 1 ...                     |
                        +----------------------------------------------+
                        | sr_lock of stripe 0, of stripe 1 ...         |  see Stripes of _arrays/locks.pyx
                        +----------------------------------------------+                                  */
struct sr_lock {
    _Atomic uint32_t word; /* the futex word. 0: free; else the owner's rank + 1, and SR_LOCK_AWAITED if a rank sleeps.
                              W a rank that takes the lock or sleeps, the owner; R all */
} __attribute__((aligned(128)));

#define SR_LOCK_AWAITED 0x80000000u

_Static_assert(sizeof(struct sr_lock) == SR_LINE, "a lock has its pair of cache lines for itself");
_Static_assert(sizeof(struct sr_call_line) == SR_CACHE_LINE, "a call line is one cache line");
_Static_assert(sizeof(struct sr_descriptor) <= SR_PAYLOAD_NBYTES, "a descriptor travels in a call line");
_Static_assert(sizeof(struct sr_counter) == SR_LINE, "a counter has its pair of cache lines for itself");
_Static_assert(sizeof(struct sr_record) == 64, "a flight record is one cache line");
_Static_assert(sizeof(struct sr_wait) == SR_CACHE_LINE, "a wait is one cache line");
_Static_assert(sizeof(struct sr_report) == 256, "a report is four cache lines");
_Static_assert(sizeof(struct sr_lane) == 6 * SR_PAGE, "a lane is six pages");
_Static_assert(sizeof(struct sr_header) <= SR_PAGE, "the header is one page");
_Static_assert(sizeof(struct sr_frame) + SR_FRAME_INLINE_NBYTES == SR_CACHE_LINE, "a small message is one line");
_Static_assert(sizeof(struct sr_offer) <= SR_FRAME_INLINE_NBYTES, "an offer is one line");
_Static_assert(sizeof(struct sr_message_ring) <= SR_PAGE, "the head of a message ring is one page");
_Static_assert(offsetof(struct sr_broadcast, origin) == SR_ORIGIN_BEGIN, "Python finds the origin there");
_Static_assert(sizeof(struct sr_place) == SR_LINE, "a place has its pair of cache lines for itself");
_Static_assert((SR_LINES & (SR_LINES - 1)) == 0, "call lines are found by masking seq");
_Static_assert(SR_LINES / 2 <= SR_RECORDS, "the records still hold a call that differs when the difference is seen");
_Static_assert((SR_RECORDS & (SR_RECORDS - 1)) == 0, "records are found by masking seq");

static inline struct sr_lane *sr_layout_lane(void *segment, int rank)
{
    return (struct sr_lane *)((char *)segment + SR_PAGE) + rank;
}

/* Return the bytes before the first staging buffer, which are allocated when the communicator starts. */
static inline size_t sr_layout_control_nbytes(int nranks)
{
    return SR_PAGE + (size_t)nranks * sizeof(struct sr_lane);
}

static inline size_t sr_layout_staging_offset(int nranks, size_t staging_nbytes, int rank)
{
    return sr_layout_control_nbytes(nranks) + (size_t)rank * staging_nbytes;
}

/* Return the length of a lap: a power of two, so that the low bits of a position are the offset in the staging buffer,
   and positions may wrap at 2^64. */
static inline size_t sr_layout_lap_nbytes(size_t staging_nbytes)
{
    size_t lap_nbytes = SR_PAGE;
    while (lap_nbytes < staging_nbytes)
        lap_nbytes *= 2;
    return lap_nbytes;
}

/* Return the bytes of a message ring and its head, in whole pages. */
static inline size_t sr_layout_message_room_nbytes(size_t message_ring_nbytes)
{
    return SR_PAGE + (message_ring_nbytes + SR_PAGE - 1) / SR_PAGE * SR_PAGE;
}

/* Return the offset of a struct sr_message_ring. The ring's bytes begin on the next page. */
static inline size_t sr_layout_message_ring_offset(int nranks, size_t staging_nbytes, size_t message_ring_nbytes,
                                                   int from, int to)
{
    return sr_layout_staging_offset(nranks, staging_nbytes, nranks) +
           ((size_t)to * (size_t)nranks + (size_t)from) * sr_layout_message_room_nbytes(message_ring_nbytes);
}

static inline size_t sr_layout_segment_nbytes(int nranks, size_t staging_nbytes, size_t message_ring_nbytes)
{
    return sr_layout_message_ring_offset(nranks, staging_nbytes, message_ring_nbytes, 0, nranks);
}

#endif
