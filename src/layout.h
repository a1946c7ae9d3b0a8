/* THE picture of the shared segment: every structure in it, who writes (W) and who reads (R) each field.
   Atomic fields are touched only through sync/. */
#ifndef SR_LAYOUT_H
#define SR_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Words: *rank*, a process (or thread) of the communicator; *lane*, a rank's part of the segment;
   *staging buffer*, the part of a lane through which data pass; *slot*, the piece of it that holds one chunk;
   *chunk*, what a slot takes; *slice*, the part of a chunk that one rank reduces; *position*, where a slot
   begins: laps around the ring and an offset in it as one count, never reset, the same on all ranks for the
   same chunk. A *lap* is the power of two from the ring's length on; what it has more than the ring is skipped. Two
   ranks that both stage swap rings with each lap.
   *Message ring*: through which one rank's messages reach one other, whatever else both are doing.

     0                  +----------------------------------------------+
                        | sr_header                                    |  geometry, the abort word
     4096               +----------------------------------------------+
                        | sr_lane of rank 0: call lines, counters,     |  each line by one writer
                        |   event, liveness, records, waits, stacks    |
                        | sr_lane of rank 1 ...                        |
     page-aligned       +----------------------------------------------+
                        | staging buffer of rank 0 (ring_nbytes)       |  allocated before its first touch
                        | staging buffer of rank 1 ...                 |
                        +----------------------------------------------+
                        | message rings to rank 0: from rank 0 (never  |  pages only once the sender needs them;
                        |   used), from rank 1 ...                     |  marks the receiver's `p2p_senders`
                        | message rings to rank 1 ...                  |
                        +----------------------------------------------+                                  */

#define SR_MAGIC 0x676e69726d687338u       /* "8shmring": a segment of this layout */
#define SR_QUEUE_MAGIC 0x32756575716d6873u /* "shmqueu2": a ring that lives alone */
#define SR_PAGE 4096u
#define SR_CACHE_LINE 64u
#define SR_LINE 128u            /* two cache lines: the adjacent-line prefetcher pairs them */
#define SR_LINES 128u           /* call lines of a rank, a power of two */
#define SR_PAYLOAD_NBYTES 48u   /* of a call line: what a tiny message may weigh */
#define SR_RECORDS 64u          /* flight records a rank, a power of two */
#define SR_REASON_NBYTES 192u
#define SR_OP_NBYTES 24u
#define SR_ITEM_NAME_NBYTES 16u  /* of a dtype that is only moved, as NumPy writes it */
#define SR_VIEW_NBYTES 640u     /* what a rank that goes on says of who does, see shmring/_lifecycle/membership.py */
#define SR_VIEW_WORDS (SR_VIEW_NBYTES / 8u)
#define SR_KEY_NBYTES 32u
#define SR_STACKS_NBYTES 8192u  /* of a rank's account of its Python stacks */
#define SR_MAX_RANKS 4096u      /* culprit, also of another host, and reporter have 16 bits each in the abort word */

typedef _Atomic uint64_t sr_flag; /* monotonic, compared by signed difference, so that it may wrap */

/* Begins every collective: one cache line that says "I am at call seq, and this is what I call". SR_LINES of them
   take turns: a rank publishes call k only after it has seen everyone's lines of call k - SR_LINES / 2. Those were
   published only after this rank's line of call k - SR_LINES had been seen, and so nobody still reads it. There are
   so many because ranks that take turns on a CPU want to do many calls in a turn. */
struct sr_call_line {
    sr_flag seq;                              /* W owner, last; R all */
    uint64_t fingerprint;                     /* W owner before seq; R all: equal on all ranks or Mismatch */
    unsigned char payload[SR_PAYLOAD_NBYTES]; /* W owner before seq; R all: a tiny message or sr_descriptor */
} __attribute__((aligned(64)));

/* Payload of a call line whose data are larger than the line. */
struct sr_descriptor {
    uint32_t x_block, out_block;    /* shared blocks where x and out lie; 0: private memory; of x: SR_PRIVATE */
    uint64_t x_offset, out_offset;  /* bytes from the owner's part of the block; of SR_PRIVATE the owner's address */
    uint32_t far;                   /* rank 0's word: the cores are far apart; holds from the next call on */
    uint32_t ping;                  /* rank 0's word: measure the distance again in this call */
    uint32_t skew;                  /* bytes of each of the owner's slots before its data, below SR_CACHE_LINE */
};

#define SR_PRIVATE 0xffffffffu /* no block: private memory that others read through the kernel */

/* What a rank tells of its progress. */
enum sr_progress {
    SR_STAGED,   /* ring position up to which it has staged its input */
    SR_REDUCED,  /* ring position up to which it has reduced its slices */
    SR_COPIED,   /* ring position up to which it needs nobody's staging any more: credit for the writers */
    SR_HANDED,   /* ring position up to which the results that it hands down a tree are there for its children */
    SR_FINISHED, /* seq of the last call after which it is done with the others' memory */
    SR_PINGED,   /* round trips begun (rank 0) or answered (others) */
    SR_PROGRESSES
};

struct sr_counter {
    sr_flag value; /* W owner; R all */
} __attribute__((aligned(128)));

/* Rung by the owner after each publish when somebody sleeps on one of its flags. */
struct sr_event {
    _Atomic uint32_t sleepers; /* generation | 1 if somebody sleeps; W sleepers, who rings; the futex word */
} __attribute__((aligned(128)));

enum sr_state { SR_ABSENT, SR_JOINED, SR_CLOSED };

/* Tells the living from the dead: the owner's parked thread holds `holder` as a robust futex for life. */
struct sr_liveness {
    _Atomic uint32_t holder; /* W parked thread: its tid | FUTEX_WAITERS; the kernel sets FUTEX_OWNER_DIED and wakes
                                one of those that sleep on it; R all */
    _Atomic uint32_t state;  /* W owner: enum sr_state; R all */
    int32_t pid;             /* W owner before state; R all */
    _Atomic int32_t cpu;     /* W owner when it waits and CPUs are shared: where it runs; R all, as a hint */
    uint64_t start_time;     /* W owner before state: field 22 of /proc/PID/stat; R all */
    uint64_t address;        /* W owner before state: of this structure as it maps it; R all */
    uint64_t nonce;          /* W owner before state: at random; R all: who reads the same at `address` of the holder's
                                memory can read all of it */
    _Atomic uint32_t unwatched; /* W parked thread before holder: the kernel has refused to mark `holder`, so that the
                                   others look for the thread and mark it themselves; R all */
} __attribute__((aligned(128)));

#define SR_P2P_WORDS (SR_MAX_RANKS / 64u)

/* How a call that a rank has begun stands. */
enum sr_outcome { SR_UNDER_WAY, SR_COMPLETE, SR_RAISED };

/* What a rank called last: read by others for error messages, by tools from outside. Who reads while the owner goes on
   may find it half written, and takes nothing in it for granted. */
struct sr_record {
    uint64_t seq;      /* W owner; R all, as the rest */
    uint64_t count;    /* elements */
    int64_t number;    /* which of the user's calls it belongs to: from 1 on; the engine's own are 0 or less */
    uint8_t kind, dtype, op, algorithm; /* these eight as one word, as the engine has them */
    uint8_t order;     /* 1: Fortran order in more than one dimension */
    uint8_t named;     /* the kind of which it is a step, 0: of none */
    uint8_t wire;      /* how what crosses between hosts is written */
    uint8_t unused;
    uint32_t root;
    uint16_t nodes_in_group;
    uint8_t invalid;   /* the call was refused with an error on its own rank */
    uint8_t outcome;   /* enum sr_outcome */
    uint16_t priority; /* 0: it has none */
    uint16_t reserved;
    uint32_t item_nbytes;                /* of what is only moved: bytes of an item, while `count` is of bytes, ... */
    char item_name[SR_ITEM_NAME_NBYTES]; /* ... and its dtype; zero-terminated */
};

/* Waits of a rank that may be under way at the same time, in threads of their own. */
enum sr_wait_place { SR_WAIT_CALL, SR_WAIT_MESSAGE, SR_WAIT_LOCK, SR_WAITS };
enum sr_wait_kind { SR_IN_CALL, SR_IN_SEND, SR_IN_RECV, SR_IN_PROBE, SR_AT_LOCK, SR_WAIT_KINDS };

/* What a rank waits for once that takes so long that it sleeps: read by others and by tools, as records are. */
struct sr_wait {
    sr_flag since_ns; /* of CLOCK_MONOTONIC; 0: it waits for nothing. W owner, last; R all, as the rest */
    sr_flag until_ns; /* 0: it still waits; else when it gave up, with an error */
    sr_flag seq;      /* of the record that says in which call; of calls only */
    sr_flag what;     /* enum sr_wait_kind << 32 | the rank awaited, local; size + rank: of another host; ~0: any */
} __attribute__((aligned(64)));

/* Where somebody who only reads asks a rank for its stacks: the parked thread sleeps on `event`, and to be woken
   without a reason is to be asked. */
struct sr_stack_request {
    _Atomic uint32_t event; /* W owner: goes up when the parked thread is to leave; the futex word; R all */
    uint32_t rank, size;   /* W owner: as the ranks of all hosts are counted; R all */
    sr_flag version;       /* W parked thread: goes up by one before and after it writes `stacks`; R all */
} __attribute__((aligned(128)));

/* Who gave up, and why; filled before the abort word is set. */
struct sr_report {
    /* W owner, before the abort word; R all, once that names the owner as reporter. */
    uint64_t seq;
    int64_t number;                /* which of the user's calls that is */
    char op[SR_OP_NBYTES];         /* that call's name; zero-terminated, as the reason, which is UTF-8 */
    char reason[SR_REASON_NBYTES];
    uint8_t reserved[24];
};

/* What a rank says once the communicator is over and it wants to go on with those that are left: its *view*, whole,
   each time that changes. The last two are kept, so that the newer one can be read while the next is written. */
struct sr_seqlock {
    sr_flag version;                         /* how many; W owner, last; R all */
    uint8_t reserved[120];
    sr_flag word[2][SR_VIEW_WORDS];          /* by number modulo 2; W owner before version; R all */
};

struct sr_lane {
    struct sr_call_line line[SR_LINES];        /* by seq modulo SR_LINES */
    struct sr_counter progress[SR_PROGRESSES]; /* by enum sr_progress */
    struct sr_event event;
    struct sr_liveness liveness;
    struct sr_report report;
    struct sr_event p2p_event;    /* on which the owner sleeps for messages and for room; its peers signal it */
    sr_flag p2p_senders[SR_P2P_WORDS]; /* W rank r its bit r, once its message ring to the owner is laid out; R owner */
    struct sr_record record[SR_RECORDS];
    struct sr_seqlock view;
    struct sr_wait wait[SR_WAITS]; /* by enum sr_wait_place */
    struct sr_stack_request stack_request;
    char stacks[SR_STACKS_NBYTES] __attribute__((aligned(4096))); /* W parked thread; R all: zero-terminated UTF-8 */
} __attribute__((aligned(4096)));

/* ---- rings of frames (spsc_ring.h) ------------------------------------------------------------------------------ */

/* From one producer to one consumer: frames one after another, each from a cache line on, around and around. A
   *position* counts bytes since the beginning, laps included; the ring's length is a power of two, so a position's
   low bits are the offset. Behind the last frame lies the word in which the next one will be announced. */
struct sr_ring {
    struct sr_counter taken; /* W consumer: position up to which it needs nothing any more; R producer: its room */
};

enum sr_frame_flags { SR_FRAME_FIRST = 1, SR_FRAME_LAST = 2, SR_FRAME_CUT = 4 };

/* Begins every piece of a message. Up to SR_FRAME_INLINE_NBYTES of it lie in the rest of the line, more from the
   next line on: what is small is one line that travels once. */
struct sr_frame {
    sr_flag begun;          /* W producer, last: own position + 1, before that the own position; R consumer */
    uint64_t message_nbytes;/* W producer before begun, as all that follow; R consumer after: of all pieces together */
    uint32_t nbytes;        /* of this piece */
    uint32_t tag;           /* as the user of the ring likes */
    union {
        struct {
            uint64_t kind : 56; /* as the user of the ring likes */
            uint64_t flags : 8; /* enum sr_frame_flags; CUT: the message ends here unfinished, and is void */
        };
        uint64_t kind_and_flags; /* written at once: to write one of them alone is to read the line before */
    };
};

#define SR_FRAME_INLINE_NBYTES 32u
#define SR_RING_LEAST_NBYTES 512u

enum sr_side { SR_PRODUCER, SR_CONSUMER, SR_SIDES };

/* A ring that lives alone, between two processes. Its bytes begin on the next page.

     0                  +----------------------------------------------+
                        | sr_queue: who is who, events, the ring's head  |
     4096               +----------------------------------------------+
                        | bytes of the ring  (nbytes)                   |
                        +----------------------------------------------+                                  */
struct sr_queue {
    uint64_t magic;                  /* W creator before anyone else maps; R both */
    uint64_t nbytes;                 /* W creator ...: a power of two; R both */
    struct sr_liveness creator;          /* W creator ...; R both: whose death leaves a side without anyone to come */
    struct sr_liveness liveness[SR_SIDES];   /* W the process at that side, `state` first by a compare-and-swap; R the
    other */
    struct sr_event event[SR_SIDES];   /* on which that side sleeps; the other signals it */
    struct sr_ring ring;
};

/* SR_REMOTE_ABORT: a rank of another host said so, to everyone. */
enum sr_cause { SR_NO_ABORT, SR_RANK_FAILED, SR_TIMED_OUT, SR_MISMATCHED, SR_ABORTED, SR_REMOTE_ABORT };

/* Sizes at which one way of doing it overtakes another (shmring/_config/thresholds.py); rank 0's hold for all,
   since all have to choose alike. */
struct sr_tuning {
    uint64_t small_nbytes;            /* while the others' messages together are no more, everyone folds everything */
    uint64_t far_stream_nbytes;       /* far cores stage with streaming stores from here on */
    uint64_t one_chunk_nbytes;        /* messages up to here are one chunk */
    uint64_t chunk_nbytes;            /* what a slot takes of larger ones */
    uint64_t exchange_nbytes;         /* what a slot takes where there is no reduced chunk to be copied */
    uint64_t stream_out_nbytes;       /* private results from here on go past the cache, ... */
    uint64_t stream_in_place_nbytes;  /* ... or from here on, where they are folded in place */
    uint64_t zero_copy_stream_nbytes; /* shared results elsewhere, likewise */
    uint64_t fuse_nbytes;             /* arrays up to here are reduced together where there are many */
    uint64_t ping_nbytes;             /* calls this large look at the clock whether to measure the distance again */
    uint64_t single_copy_nbytes;      /* pieces from here on are read from private memory */
    uint64_t single_copy_scatter_nbytes; /* ... if all are as long together, where the root alone gives them */
    uint64_t single_copy_all_gather_nbytes; /* ... that are all of x, which its rank copies as well */
    uint64_t single_copy_most_nbytes; /* ... up to here; beyond, streaming through slots is faster */
    uint64_t cached_chunk_nbytes;     /* what a slot takes of messages between far cores that keep to a few, ... */
    uint64_t cached_most_nbytes;      /* ... which are those up to here that are no single chunk */
    uint64_t single_copy_reduce_nbytes; /* private arrays of an all_reduce are read where they lie from here on, ... */
    uint64_t single_copy_reduce_most_nbytes; /* ... up to here; */
    uint64_t single_copy_in_place_nbytes;    /* those that the result goes to from here on, ... */
    uint64_t single_copy_in_place_most_nbytes; /* ... up to here */
    uint64_t chain_nbytes;            /* with more ranks than CPUs reductions from here on go from rank to rank */
};

struct sr_header {
    uint64_t magic;       /* W rank 0 before anyone maps; R all */
    uint32_t nranks;      /* W rank 0 ...; R all */
    uint32_t forced_path; /* W rank 0 ...: 0 measured, 1 near, 2 far; R all */
    uint64_t ring_nbytes; /* W rank 0 ...: of one staging buffer, whole pages; R all */
    uint64_t message_ring_nbytes; /* W rank 0 ...: of one message ring, a power of two; R all */
    struct sr_tuning tuning[2];   /* W rank 0 ...: for near cores, for far ones; R all */
    uint64_t first_seq;   /* W rank 0 ...: where sequence numbers and positions begin; R all */
    uint8_t key[SR_KEY_NBYTES]; /* W rank 0 ...: at random: by it those know each other who go on after an end; R all */
    /* set once, by compare-and-swap; its format is in sync/abort.h. W any rank; R all */
    sr_flag abort __attribute__((aligned(128)));
    sr_flag quiet_until_ns __attribute__((aligned(128))); /* W who warns of a late rank, by compare-and-swap; R all */
};

/* A lock of an array that all ranks see (Comm.shared). Such an array has memory of its own:

     0                  +----------------------------------------------+
                        | the array                                    |  as its users agree
     SR_LINE-aligned    +----------------------------------------------+
                        | sr_lock 0, sr_lock 1 ...                     |
                        +----------------------------------------------+
                        | sr_lock of stripe 0, of stripe 1 ...         |  see _arrays/striped_locks.pyx
                        +----------------------------------------------+                                  */
struct sr_lock {
    _Atomic uint32_t word; /* 0: free; else the owner's rank + 1, and SR_LOCK_AWAITED if somebody sleeps. W who takes
                              it, who sleeps, the owner; R all; the futex word */
} __attribute__((aligned(128)));

#define SR_LOCK_AWAITED 0x80000000u

_Static_assert(sizeof(struct sr_lock) == SR_LINE, "a lock owns its pair of cache lines");
_Static_assert(sizeof(struct sr_call_line) == SR_CACHE_LINE, "a call line is one cache line");
_Static_assert(sizeof(struct sr_descriptor) <= SR_PAYLOAD_NBYTES, "a descriptor travels in a call line");
_Static_assert(sizeof(struct sr_counter) == SR_LINE, "a counter owns its pair of cache lines");
_Static_assert(sizeof(struct sr_record) == 64, "a flight record is one cache line");
_Static_assert(sizeof(struct sr_wait) == SR_CACHE_LINE, "a wait is one cache line");
_Static_assert(sizeof(struct sr_report) == 256, "a report is four cache lines");
_Static_assert(sizeof(struct sr_lane) == 6 * SR_PAGE, "a lane is six pages");
_Static_assert(sizeof(struct sr_header) <= SR_PAGE, "the header is one page");
_Static_assert(sizeof(struct sr_frame) + SR_FRAME_INLINE_NBYTES == SR_CACHE_LINE, "a small message is one line");
_Static_assert(sizeof(struct sr_queue) <= SR_PAGE, "the head of a ring that lives alone is one page");
_Static_assert((SR_LINES & (SR_LINES - 1)) == 0, "call lines are found by masking seq");
_Static_assert(SR_LINES / 2 <= SR_RECORDS, "the records still hold the call that differs when that is seen");
_Static_assert((SR_RECORDS & (SR_RECORDS - 1)) == 0, "records are found by masking seq");

static inline struct sr_lane *sr_layout_lane(void *segment, int rank)
{
    return (struct sr_lane *)((char *)segment + SR_PAGE) + rank;
}

/* Bytes before the first staging buffer: what is allocated when a communicator begins. */
static inline size_t sr_layout_control_nbytes(int nranks)
{
    return SR_PAGE + (size_t)nranks * sizeof(struct sr_lane);
}

static inline size_t sr_layout_ring_offset(int nranks, size_t ring_nbytes, int rank)
{
    return sr_layout_control_nbytes(nranks) + (size_t)rank * ring_nbytes;
}

/* So that an offset in the ring is a position's low bits, and positions may wrap at 2^64. */
static inline size_t sr_layout_lap_nbytes(size_t ring_nbytes)
{
    size_t lap_nbytes = SR_PAGE;
    while (lap_nbytes < ring_nbytes)
        lap_nbytes *= 2;
    return lap_nbytes;
}

/* With its head, in whole pages. */
static inline size_t sr_layout_message_room_nbytes(size_t message_ring_nbytes)
{
    return SR_PAGE + (message_ring_nbytes + SR_PAGE - 1) / SR_PAGE * SR_PAGE;
}

/* Where the head of a message ring lies, a struct sr_ring; the ring's bytes begin on the next page. */
static inline size_t sr_layout_message_ring_offset(int nranks, size_t ring_nbytes, size_t message_ring_nbytes,
                                                   int from, int to)
{
    return sr_layout_ring_offset(nranks, ring_nbytes, nranks) +
           ((size_t)to * (size_t)nranks + (size_t)from) * sr_layout_message_room_nbytes(message_ring_nbytes);
}

static inline size_t sr_layout_segment_nbytes(int nranks, size_t ring_nbytes, size_t message_ring_nbytes)
{
    return sr_layout_message_ring_offset(nranks, ring_nbytes, message_ring_nbytes, 0, nranks);
}

#endif
