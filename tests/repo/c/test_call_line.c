/* The call lines. Every collective publishes call k, waits for every rank's line of call k, and reads these lines;
   ranks that go ahead read the lines that they need, and see the other lines some calls later. Payloads are plain
   memory, so ThreadSanitizer reports a line that is written while it is read. With -DONE_LINE the program breaks the
   rule (it uses one line), and only ThreadSanitizer can notice. */
#include "sync/flag.h"

#include <string.h>

#include "check.h"

#ifdef ONE_LINE
enum { LINES = 1 };
#define EXPECT(condition) ((void)(condition))
#else
enum { LINES = SR_LINES };
#define EXPECT CHECK
#endif

enum { MOST_RANKS = 5, ROUNDS = 4000, WORDS = SR_PAYLOAD_NBYTES / 8 };

struct meeting {
    struct sr_lane lane[MOST_RANKS];
    uint64_t first;
    uint64_t odd_seq; /* the call in which odd_rank makes a different call */
    int odd_rank;     /* -1: no rank does */
};

static void open_meeting(struct meeting *shared, uint64_t first)
{
    memset(shared, 0, sizeof *shared);
    shared->first = first;
    shared->odd_rank = -1;
    for (int rank = 0; rank < MOST_RANKS; rank++)
        for (int i = 0; i < (int)SR_LINES; i++)
            sr_flag_set(&shared->lane[rank].line[i].seq, shared->first - 1);
}

static struct sr_call_line *line_of(struct meeting *shared, int rank, uint64_t seq)
{
    return &shared->lane[rank].line[seq % LINES];
}

static uint64_t word_of(int rank, uint64_t seq, int i)
{
    return (seq * 8 + (uint64_t)i) * 0x9e3779b97f4a7c15ull ^ (uint64_t)rank << 56;
}

static uint64_t fingerprint_of(const struct meeting *shared, int rank, uint64_t seq)
{
    return seq * 31 + (rank == shared->odd_rank && seq == shared->odd_seq);
}

/* Run one of three kinds of tiny call in turn. */
enum kind { REDUCES, BROADCASTS, SYNCHRONISES };

static enum kind kind_of(uint64_t seq) { return (enum kind)(seq / 2 % 3); }
static int root_of(uint64_t seq, int nranks) { return (int)(seq / 6 % (uint64_t)nranks); }

static void publish_line(struct check_rank *me, struct meeting *shared, uint64_t seq)
{
    struct sr_call_line *line = line_of(shared, me->rank, seq);
    if (kind_of(seq) == REDUCES || (kind_of(seq) == BROADCASTS && me->rank == root_of(seq, me->nranks)))
        for (int i = 0; i < WORDS; i++) {
            uint64_t word = word_of(me->rank, seq, i);
            memcpy(line->payload + i * 8, &word, sizeof word);
        }
    line->fingerprint = fingerprint_of(shared, me->rank, seq);
    sr_flag_publish(&line->seq, seq, &shared->lane[me->rank].event);
}

/* Return whether the line equals this rank's. */
static bool await_line(struct check_rank *me, struct meeting *shared, int rank, uint64_t seq)
{
    struct sr_call_line *line = line_of(shared, rank, seq);
    for (int tries = 0; !sr_flag_spin(&line->seq, seq, 20); tries++) {
        if (tries < 20)
            sr_yield();
        else
            sr_flag_sleep(&line->seq, seq, &shared->lane[rank].event, 4000000);
    }
    return line->fingerprint == fingerprint_of(shared, me->rank, seq);
}

/* Return the first rank whose line differs from this rank's, or -1. */
static int await_lines(struct check_rank *me, struct meeting *shared, uint64_t seq)
{
    for (int rank = 0; rank < me->nranks; rank++)
        if (!await_line(me, shared, rank, seq))
            return rank;
    return -1;
}

/* A fold that depends on the order, so that the result shows the order in which ranks were folded. */
static uint64_t fold(uint64_t sum, uint64_t word) { return (sum ^ word) * 0x100000001b3ull; }

static void read_lines(struct check_rank *me, struct meeting *shared, uint64_t seq)
{
    int from = kind_of(seq) == BROADCASTS ? root_of(seq, me->nranks) : 0;
    int to = kind_of(seq) == BROADCASTS ? from + 1 : kind_of(seq) == REDUCES ? me->nranks : 0;
    uint64_t seen = 1, expected = 1;
    for (int rank = from; rank < to; rank++) {
        check_dawdle(me);
        for (int i = 0; i < WORDS; i++) {
            uint64_t word;
            memcpy(&word, line_of(shared, rank, seq)->payload + i * 8, sizeof word);
            seen = fold(seen, word);
            expected = fold(expected, word_of(rank, seq, i));
        }
    }
    EXPECT(seen == expected);
    for (int rank = from; rank < to; rank++)
        EXPECT(sr_flag_load(&line_of(shared, rank, seq)->seq) == seq); /* the line has not been written again */
}

static void call_many_times(struct check_rank *me)
{
    struct meeting *shared = me->shared;
    for (uint64_t i = 1; i <= ROUNDS; i++) {
        uint64_t seq = shared->first + i;
        check_dawdle(me);
        publish_line(me, shared, seq);
        EXPECT(await_lines(me, shared, seq) == -1);
        read_lines(me, shared, seq);
    }
}

#ifndef ONE_LINE
/* A broadcast needs only the root's line, and the root needs none: all other lines are seen as late as possible. */
static void call_ahead_many_times(struct check_rank *me)
{
    struct meeting *shared = me->shared;
    for (uint64_t i = 1; i <= ROUNDS; i++) {
        uint64_t seq = shared->first + i;
        check_dawdle(me);
        publish_line(me, shared, seq);
        if (kind_of(seq) == BROADCASTS && me->rank != root_of(seq, me->nranks))
            EXPECT(await_line(me, shared, root_of(seq, me->nranks), seq));
        if (i >= LINES / 2)
            EXPECT(await_lines(me, shared, seq - (LINES / 2 - 1)) == -1);
        if (kind_of(seq) == BROADCASTS)
            read_lines(me, shared, seq);
    }
}
#endif

static void test_lines_are_read_before_they_are_written_again(int start, int nranks)
{
    static struct meeting shared;
    open_meeting(&shared, check_start(start, ROUNDS));
    check_ranks(nranks, call_many_times, &shared);
#ifndef ONE_LINE
    open_meeting(&shared, check_start(start, ROUNDS));
    check_ranks(nranks, call_ahead_many_times, &shared);
#endif
}

/* ---- mismatches ----------------------------------------------------------------------------------------------- */

static void call_until_mismatch(struct check_rank *me)
{
    struct meeting *shared = me->shared;
    uint64_t seq = shared->first;
    int other = -1;
    while (other < 0) {
        seq++;
        check_dawdle(me);
        publish_line(me, shared, seq);
        other = await_lines(me, shared, seq);
    }
    EXPECT(seq == shared->odd_seq);
    EXPECT(other == (me->rank == shared->odd_rank ? (me->rank == 0) : shared->odd_rank));
}

static void test_mismatch_is_seen_by_all_in_the_same_call(int start)
{
    static struct meeting shared;
    for (int i = 0; i < 100; i++) {
        int nranks = 2 + i % (MOST_RANKS - 1);
        open_meeting(&shared, check_start(start, 12));
        shared.odd_rank = i % nranks;
        shared.odd_seq = shared.first + 1 + (uint64_t)(i % 12);
        check_ranks(nranks, call_until_mismatch, &shared);
    }
}

int main(void)
{
    for (int start = 0; start < CHECK_STARTS; start++) {
        for (int nranks = 2; nranks <= MOST_RANKS; nranks++) {
            check_begin("lines are read before they are written again");
            test_lines_are_read_before_they_are_written_again(start, nranks);
        }
        if (LINES > 1) {
            check_begin("all ranks see a mismatch in the same call");
            test_mismatch_is_seen_by_all_in_the_same_call(start);
        }
    }
    return 0;
}
