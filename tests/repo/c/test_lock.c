/* Locks between threads. A lock has one owner at a time, which sees everything that earlier owners wrote; no wake-up is
   lost; the word names the owner. The guarded data are plain memory, so ThreadSanitizer reports orders that do not
   hold. */
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

/* A wake-up would be lost between the last load and the system call, so this interval is sometimes made longer. */
static inline void stretch_moment(void)
{
    static _Thread_local uint64_t calls;
    struct timespec moment = {0, 20000};
    if (++calls % 8 == 0)
        nanosleep(&moment, NULL);
    else if (calls % 2 == 0)
        sched_yield();
}
#define syscall(...) (stretch_moment(), syscall(__VA_ARGS__))

#include "sync/clock.h"
#include "sync/lock.h"

enum { TURNS = 3000, WORDS = 4 };
#define TEN_MINUTES_NS 600000000000u /* a lost wake-up sleeps into the watchdog */

enum patience { TRIES, SPINS, SLEEPS, PATIENCES };

struct guarded {
    struct sr_lock lock;
    uint64_t word[WORDS]; /* plain: all equal while the lock is free */
    bool all_sleep;
};

static void take(struct sr_lock *lock, int rank, enum patience patience)
{
    for (;;) {
        if (patience == SLEEPS ? sr_lock_sleep(lock, rank, TEN_MINUTES_NS)
                               : sr_lock_spin(lock, rank, patience == SPINS ? 100 : 1))
            return;
        if (patience != SLEEPS)
            sr_yield();
    }
}

static void take_turns(struct check_rank *me)
{
    struct guarded *shared = me->shared;
    enum patience patience = shared->all_sleep ? SLEEPS : (enum patience)(me->rank % PATIENCES);
    for (int turn = 0; turn < TURNS; turn++) {
        check_dawdle(me);
        if (!sr_lock_try(&shared->lock, me->rank))
            take(&shared->lock, me->rank, patience);
        CHECK(sr_lock_owner(&shared->lock) == me->rank);
        for (int i = 0; i < WORDS; i++)
            CHECK(shared->word[i] == shared->word[0]);
        check_dawdle(me);
        for (int i = 0; i < WORDS; i++)
            shared->word[i]++;
        sr_lock_leave(&shared->lock);
    }
}

static void test_one_owner_at_a_time(int nranks, bool all_sleep)
{
    struct guarded shared;
    memset(&shared, 0, sizeof shared);
    shared.all_sleep = all_sleep;
    check_ranks(nranks, take_turns, &shared);
    CHECK(sr_lock_owner(&shared.lock) == -1);
    for (int i = 0; i < WORDS; i++)
        CHECK(shared.word[i] == (uint64_t)nranks * TURNS);
}

static void test_owner_is_named_and_others_wait_in_vain(void)
{
    struct sr_lock lock = {0};
    uint64_t begin;
    CHECK(sr_lock_owner(&lock) == -1);
    CHECK(sr_lock_try(&lock, SR_MAX_RANKS - 1));
    CHECK(!sr_lock_try(&lock, 0) && !sr_lock_spin(&lock, 0, 10));
    CHECK(sr_lock_owner(&lock) == SR_MAX_RANKS - 1);
    begin = sr_now_ns();
    CHECK(!sr_lock_sleep(&lock, 0, 20000000));
    CHECK(sr_now_ns() - begin >= 20000000);
    CHECK(sr_lock_owner(&lock) == SR_MAX_RANKS - 1); /* also while a rank waits */
    sr_lock_leave(&lock);
    CHECK(sr_lock_owner(&lock) == -1);
    CHECK(sr_lock_sleep(&lock, 0, 0)); /* the lock is free: no sleep */
    CHECK(sr_lock_owner(&lock) == 0);
    sr_lock_leave(&lock);
    CHECK(sr_lock_try(&lock, 1));
}

int main(void)
{
    check_begin("the word names the owner, and others do not get the lock");
    test_owner_is_named_and_others_wait_in_vain();
    for (int nranks = 2; nranks <= 8; nranks += 3) {
        check_begin("one owner at a time: all sleep");
        test_one_owner_at_a_time(nranks, true);
        check_begin("one owner at a time: try, spin or sleep");
        test_one_owner_at_a_time(nranks, false);
    }
    return 0;
}
