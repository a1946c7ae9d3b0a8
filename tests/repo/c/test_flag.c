/* Flags, events and the abort word between threads. No wake-up is lost, and what was written before a publish is seen
   after the wait, also if counters wrap. The payloads are plain memory, so ThreadSanitizer reports every pair of orders
   in src/sync/ that does not hold. */
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

/* A wake-up would be lost between the last load and the system call, so this interval is sometimes made longer. */
static bool stretches = true;

static inline void stretch_moment(void)
{
    static _Thread_local uint64_t calls;
    struct timespec moment = {0, 20000};
    if (!stretches)
        return;
    if (++calls % 8 == 0)
        nanosleep(&moment, NULL);
    else if (calls % 2 == 0)
        sched_yield();
}
#define syscall(...) (stretch_moment(), syscall(__VA_ARGS__))

#include "sync/abort.h"
#include "sync/waitset.h"

enum { AWAITERS = 4, ROUNDS = 600, PAYLOAD_WORDS = 8 };
#define TEN_MINUTES_NS 600000000000u /* a lost wake-up sleeps into the watchdog */

/* ---- one publisher, several awaiters that spin, yield or sleep ------------------------------------------------- */

enum patience { SPINS, YIELDS, SLEEPS, PATIENCES };

struct exchange {
    struct sr_counter published;          /* by rank 0 */
    struct sr_event event[AWAITERS + 1];    /* by rank */
    struct sr_counter answered[AWAITERS + 1];
    uint64_t payload[PAYLOAD_WORDS];      /* plain: W rank 0 before it publishes; R the others until they answer */
    uint64_t first;
    bool all_sleep;
};

static void await(const sr_flag *flag, uint64_t target, struct sr_event *event, enum patience patience)
{
    while (!sr_flag_reached(flag, target)) {
        if (patience == SLEEPS)
            sr_flag_sleep(flag, target, event, TEN_MINUTES_NS);
        else if (patience == YIELDS || !sr_flag_spin(flag, target, 100))
            sr_yield(); /* also after spinning: there may be fewer CPUs than ranks */
    }
}

static void publish_rounds(struct check_rank *me, struct exchange *shared)
{
    for (uint64_t value = shared->first + 1; value != shared->first + 1 + ROUNDS; value++) {
        for (int i = 0; i < PAYLOAD_WORDS; i++)
            shared->payload[i] = value * 3 + (uint64_t)i;
        check_dawdle(me);
        sr_flag_publish(&shared->published.value, value, &shared->event[0]);
        for (int rank = 1; rank < me->nranks; rank++)
            await(&shared->answered[rank].value, value, &shared->event[rank], SLEEPS);
    }
}

static void await_rounds(struct check_rank *me, struct exchange *shared)
{
    enum patience patience = shared->all_sleep ? SLEEPS : (enum patience)(me->rank % PATIENCES);
    for (uint64_t value = shared->first + 1; value != shared->first + 1 + ROUNDS; value++) {
        check_dawdle(me);
        await(&shared->published.value, value, &shared->event[0], patience);
        CHECK(sr_flag_load(&shared->published.value) == value);
        for (int i = 0; i < PAYLOAD_WORDS; i++)
            CHECK(shared->payload[i] == value * 3 + (uint64_t)i);
        sr_flag_publish(&shared->answered[me->rank].value, value, &shared->event[me->rank]);
    }
}

static void exchange_rounds(struct check_rank *me)
{
    if (me->rank == 0)
        publish_rounds(me, me->shared);
    else
        await_rounds(me, me->shared);
}

static void test_payload_is_seen_and_no_wake_up_lost(int start, int awaiters, bool all_sleep)
{
    struct exchange shared;
    memset(&shared, 0, sizeof shared);
    shared.first = check_start(start, ROUNDS);
    shared.all_sleep = all_sleep;
    sr_flag_set(&shared.published.value, shared.first);
    for (int rank = 0; rank <= awaiters; rank++)
        sr_flag_set(&shared.answered[rank].value, shared.first);
    check_ranks(awaiters + 1, exchange_rounds, &shared);
}

/* ---- an event shared by sleepers with different targets and on different flags ---------------------------------- */

enum { FLAGS = 2, STRIDE = 3 };

struct shared_event {
    struct sr_counter flag[FLAGS]; /* by rank 0, all with the one event */
    struct sr_event event;
    struct sr_counter arrived[AWAITERS + 1];
    uint64_t first;
};

/* Rank 0 publishes without waiting; each sleeper waits for every STRIDE-th value of its own flag. */
static void ring_for_all(struct check_rank *me)
{
    struct shared_event *shared = me->shared;
    if (me->rank == 0) {
        for (uint64_t i = 1; i <= ROUNDS * STRIDE; i++) {
            for (int flag = 0; flag < FLAGS; flag++)
                sr_flag_publish(&shared->flag[flag].value, shared->first + i, &shared->event);
            check_dawdle(me);
        }
        return;
    }
    for (uint64_t i = STRIDE; i <= ROUNDS * STRIDE; i += STRIDE)
        await(&shared->flag[me->rank % FLAGS].value, shared->first + i, &shared->event, SLEEPS);
}

static void test_event_wakes_all_sleepers(int start)
{
    struct shared_event shared;
    memset(&shared, 0, sizeof shared);
    shared.first = check_start(start, ROUNDS * STRIDE);
    for (int flag = 0; flag < FLAGS; flag++)
        sr_flag_set(&shared.flag[flag].value, shared.first);
    check_ranks(AWAITERS + 1, ring_for_all, &shared);
}

/* ---- falling asleep during the publish ------------------------------------------------------------------------ */

enum { BALLS = 40000, BALLAST = 8 };

struct court {
    struct sr_counter ball[2]; /* by rank */
    struct sr_event event[2];
    uint64_t ballast[2][BALLAST][16]; /* plain: W its rank before it publishes; R the other until it does */
    uint64_t first;
};

/* Each spins for about as long as the other takes, asleep or awake, then sleeps: some publishes fall between S1
   and the sleep. The ballast, lines that the other has just read, keeps a mere store long in the store buffer:
   P1 must not be one. */
static void play(struct check_rank *me)
{
    struct court *shared = me->shared;
    int other = 1 - me->rank;
    for (uint64_t i = 1; i <= BALLS; i++) {
        uint64_t mine = shared->first + i, theirs = mine - (me->rank == 0);
        int pauses = (int)(check_random(me) % (2u << check_random(me) % 10));
        if (!sr_flag_spin(&shared->ball[other].value, theirs, pauses))
            await(&shared->ball[other].value, theirs, &shared->event[other], SLEEPS);
        for (int i = 0; i < BALLAST; i++) {
            CHECK(shared->ballast[other][i][0] == theirs);
            shared->ballast[me->rank][i][0] = mine;
        }
        sr_flag_publish(&shared->ball[me->rank].value, mine, &shared->event[me->rank]);
    }
}

static void test_sleeper_and_publisher_never_miss_each_other(int start)
{
    struct court shared;
    memset(&shared, 0, sizeof shared);
    shared.first = check_start(start, BALLS);
    for (int rank = 0; rank < 2; rank++) {
        sr_flag_set(&shared.ball[rank].value, shared.first);
        for (int i = 0; i < BALLAST; i++)
            shared.ballast[rank][i][0] = shared.first;
    }
    stretches = false;
    check_ranks(2, play, &shared);
    stretches = true;
}

/* ---- comparison, limits, spinning ----------------------------------------------------------------------------- */

static void test_order_of_values_survives_the_wrap(void)
{
    static const struct { uint64_t value, target; bool reached; } cases[] = {
        {0, 0, true}, {0, 1, false}, {1, 0, true},
        {0xffffffff, 0x100000000, false}, {0x100000000, 0xffffffff, true},
        {UINT64_MAX, 0, false}, {0, UINT64_MAX, true}, {5, UINT64_MAX - 5, true}, {UINT64_MAX - 5, 5, false},
        {INT64_MAX, (uint64_t)INT64_MAX + 1, false}, {(uint64_t)INT64_MAX + 1, INT64_MAX, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sr_flag flag;
        sr_flag_set(&flag, cases[i].value);
        CHECK(sr_flag_load(&flag) == cases[i].value);
        CHECK(sr_flag_reached(&flag, cases[i].target) == cases[i].reached);
        CHECK(sr_flag_spin(&flag, cases[i].target, 3) == cases[i].reached);
    }
}

static uint64_t slept_ns(uint64_t value, uint64_t target, uint64_t limit_ns)
{
    struct sr_counter flag;
    struct sr_event event;
    memset(&event, 0, sizeof event);
    sr_flag_set(&flag.value, value);
    uint64_t begin = sr_now_ns();
    sr_flag_sleep(&flag.value, target, &event, limit_ns);
    return sr_now_ns() - begin;
}

static void test_sleep_ends_at_its_limit_and_not_before(void)
{
    CHECK(slept_ns(7, 8, 3000000) >= 3000000);
    CHECK(slept_ns(7, 8, 1000000001) >= 1000000001);
    CHECK(slept_ns(UINT64_MAX, 0, 3000000) >= 3000000);
    CHECK(slept_ns(7, 7, TEN_MINUTES_NS) < TEN_MINUTES_NS);
    CHECK(slept_ns(0, UINT64_MAX, TEN_MINUTES_NS) < TEN_MINUTES_NS);
}

/* ---- one thread that sleeps on the flags of several owners ---------------------------------------------------- */

enum { SERVED_ROUNDS = 200 };

struct service {
    struct sr_counter asked[AWAITERS + 1], answered[AWAITERS + 1]; /* by rank: W that rank; W rank 0 */
    struct sr_event event[AWAITERS + 1];
    uint64_t question[AWAITERS + 1], answer[AWAITERS + 1]; /* plain */
};

/* Rank 0 answers the ranks that have asked, and sleeps on the flags of all others. */
static void serve_all(struct check_rank *me, struct service *shared)
{
    uint64_t served[AWAITERS + 1] = {0}, answers = 0;
    while (answers < (uint64_t)SERVED_ROUNDS * (me->nranks - 1)) {
        struct sr_waitset waitset = {0};
        bool sleeps = true;
        for (int rank = 1; rank < me->nranks; rank++) {
            if (served[rank] == SERVED_ROUNDS)
                continue;
            if (sr_waitset_enter(&waitset, &shared->asked[rank].value, served[rank] + 1, &shared->event[rank]))
                continue;
            shared->answer[rank] = shared->question[rank] * 3;
            answers++;
            sr_flag_publish(&shared->answered[rank].value, ++served[rank], &shared->event[0]);
            sleeps = false;
        }
        if (sleeps)
            sr_waitset_sleep(&waitset, TEN_MINUTES_NS);
    }
}

static void ask_and_be_served(struct check_rank *me)
{
    struct service *shared = me->shared;
    if (me->rank == 0) {
        serve_all(me, shared);
        return;
    }
    for (uint64_t i = 1; i <= SERVED_ROUNDS; i++) {
        check_dawdle(me);
        shared->question[me->rank] = i * (uint64_t)me->rank;
        sr_flag_publish(&shared->asked[me->rank].value, i, &shared->event[me->rank]);
        await(&shared->answered[me->rank].value, i, &shared->event[0], SLEEPS);
        CHECK(shared->answer[me->rank] == i * (uint64_t)me->rank * 3);
    }
}

/* ---- words that several threads write ---------------------------------------------------------------------------- */

struct turns {
    sr_flag taken, notify;
    uint64_t count; /* plain: W and R the thread that has taken the word */
    uint64_t told;
};

static void count_by_turns(struct check_rank *me)
{
    struct turns *shared = me->shared;
    for (int i = 0; i < ROUNDS; i++) {
        while (!sr_flag_take(&shared->taken, (uint64_t)me->rank + 1))
            sr_yield();
        CHECK(!sr_flag_take(&shared->taken, 99));
        shared->count++;
        sr_flag_set(&shared->taken, 0);
    }
}

static void test_turns_exclude_each_other(void)
{
    struct turns shared;
    memset(&shared, 0, sizeof shared);
    check_ranks(AWAITERS, count_by_turns, &shared);
    CHECK(shared.count == (uint64_t)ROUNDS * AWAITERS);
}

/* One rank requests a notification while the other finishes: exactly one of the two sees that it came second. */
static void tell_or_see(struct check_rank *me)
{
    struct turns *shared = me->shared;
    check_dawdle(me);
    if (me->rank == 0)
        shared->told += sr_flag_swap(&shared->notify, 77) == 5;
    else if (!sr_flag_take(&shared->notify, 5))
        __atomic_fetch_add(&shared->count, 1, __ATOMIC_RELAXED);
}

static void test_one_of_two_comes_second(void)
{
    for (int i = 0; i < ROUNDS; i++) {
        struct turns shared;
        memset(&shared, 0, sizeof shared);
        check_ranks(2, tell_or_see, &shared);
        CHECK(shared.told + shared.count == 1);
        CHECK(sr_flag_load(&shared.notify) == 77);
    }
}

/* ---- the abort word ------------------------------------------------------------------------------------------- */

struct downfall {
    struct sr_header header;
    struct sr_report report[CHECK_MAX_RANKS]; /* plain: W each rank its own before it sets the word */
    uint64_t seen[CHECK_MAX_RANKS];
};

static uint64_t abort_word_of(int rank)
{
    return sr_abort_pack((enum sr_cause)(SR_RANK_FAILED + rank % 4), (int)SR_MAX_RANKS - 1 - rank, rank);
}

static void abort_at_once(struct check_rank *me)
{
    struct downfall *shared = me->shared;
    struct sr_report *mine = &shared->report[me->rank];
    mine->seq = 100 + (uint64_t)me->rank;
    snprintf(mine->reason, sizeof mine->reason, "rank %d", me->rank);
    check_dawdle(me);
    sr_abort_set(&shared->header, abort_word_of(me->rank));
    uint64_t word = shared->seen[me->rank] = sr_flag_load(&shared->header.abort);
    CHECK(word == abort_word_of(sr_abort_reporter(word)));
    CHECK(shared->report[sr_abort_reporter(word)].seq == 100 + (uint64_t)sr_abort_reporter(word));
    CHECK(atoi(shared->report[sr_abort_reporter(word)].reason + strlen("rank ")) == sr_abort_reporter(word));
}

static void test_abort_has_one_winner(void)
{
    for (int i = 0; i < 300; i++) {
        struct downfall shared;
        memset(&shared, 0, sizeof shared);
        check_ranks(2 + i % 4, abort_at_once, &shared);
        for (int rank = 0; rank < 2 + i % 4; rank++)
            CHECK(shared.seen[rank] == shared.seen[0]);
        sr_abort_set(&shared.header, abort_word_of(9));
        CHECK(sr_flag_load(&shared.header.abort) == shared.seen[0]);
    }
}

enum { SLEEPERS_OF_ABORT = 4 };

struct night {
    struct sr_header header;
    struct sr_counter never;
    struct sr_event event;
};

/* Rank 0 gives up while the other ranks fall asleep on a flag that is never published. */
static void sleep_until_abort(struct check_rank *me)
{
    struct night *shared = me->shared;
    if (me->rank == 0) {
        check_dawdle(me);
        sr_abort_set(&shared->header, abort_word_of(0));
        sr_event_signal(&shared->event);
        return;
    }
    while (sr_flag_load(&shared->header.abort) == SR_NO_ABORT) {
        struct sr_waitset waitset = {0};
        if (sr_waitset_enter(&waitset, &shared->never.value, 1, &shared->event) &&
            sr_flag_load_ordered(&shared->header.abort) == SR_NO_ABORT)
            sr_waitset_sleep(&waitset, TEN_MINUTES_NS);
    }
}

static void test_abort_ends_every_sleep(void)
{
    for (int i = 0; i < 300; i++) {
        struct night shared;
        memset(&shared, 0, sizeof shared);
        check_ranks(1 + SLEEPERS_OF_ABORT, sleep_until_abort, &shared);
    }
}

static void test_abort_word_keeps_its_parts(void)
{
    for (int rank = 0; rank < (int)SR_MAX_RANKS; rank++) {
        uint64_t word = sr_abort_pack(SR_ABORTED, rank, (int)SR_MAX_RANKS - 1 - rank);
        CHECK(sr_abort_cause(word) == SR_ABORTED);
        CHECK(sr_abort_culprit(word) == rank);
        CHECK(sr_abort_reporter(word) == (int)SR_MAX_RANKS - 1 - rank);
    }
}

int main(void)
{
    check_begin("order of values survives the wrap");
    test_order_of_values_survives_the_wrap();
    check_begin("sleep ends at its limit and not before");
    test_sleep_ends_at_its_limit_and_not_before();
    for (int start = 0; start < CHECK_STARTS; start++) {
        check_begin("payload is seen: one awaiter, which sleeps");
        test_payload_is_seen_and_no_wake_up_lost(start, 1, true);
        check_begin("payload is seen: several awaiters, which sleep");
        test_payload_is_seen_and_no_wake_up_lost(start, 3, true);
        check_begin("payload is seen: awaiters that spin, yield or sleep");
        test_payload_is_seen_and_no_wake_up_lost(start, AWAITERS, false);
        check_begin("event wakes all sleepers");
        test_event_wakes_all_sleepers(start);
        check_begin("a sleeper never misses a publish");
        test_sleeper_and_publisher_never_miss_each_other(start);
    }
    check_begin("a sleep on several flags misses none");
    struct service service;
    memset(&service, 0, sizeof service);
    check_ranks(AWAITERS + 1, ask_and_be_served, &service);
    check_begin("only one thread takes a word");
    test_turns_exclude_each_other();
    check_begin("of a take and a swap, one sees that it is second");
    test_one_of_two_comes_second();
    check_begin("the first abort word stays");
    test_abort_has_one_winner();
    check_begin("abort ends every sleep");
    test_abort_ends_every_sleep();
    check_begin("abort word keeps its parts");
    test_abort_word_keeps_its_parts();
    return 0;
}
