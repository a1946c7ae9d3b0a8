/* Locks between threads, and between processes. A lock has one owner at a time, which sees everything that earlier
   owners wrote; no wake-up is lost, also if ranks give up; the word names the owner, also if it has died. The guarded
   data are plain memory, so ThreadSanitizer reports orders that do not hold. */
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
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
        if (!sr_lock_try_acquire(&shared->lock, me->rank))
            take(&shared->lock, me->rank, patience);
        CHECK(sr_lock_owner(&shared->lock) == me->rank);
        for (int i = 0; i < WORDS; i++)
            CHECK(shared->word[i] == shared->word[0]);
        check_dawdle(me);
        for (int i = 0; i < WORDS; i++)
            shared->word[i]++;
        sr_lock_release(&shared->lock);
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
    CHECK(sr_lock_try_acquire(&lock, SR_MAX_RANKS - 1));
    CHECK(!sr_lock_try_acquire(&lock, 0) && !sr_lock_spin(&lock, 0, 10));
    CHECK(sr_lock_owner(&lock) == SR_MAX_RANKS - 1);
    begin = sr_now_ns();
    CHECK(!sr_lock_sleep(&lock, 0, 20000000));
    CHECK(sr_now_ns() - begin >= 20000000);
    CHECK(sr_lock_owner(&lock) == SR_MAX_RANKS - 1); /* also while a rank waits */
    sr_lock_release(&lock);
    CHECK(sr_lock_owner(&lock) == -1);
    CHECK(sr_lock_sleep(&lock, 0, 0)); /* the lock is free: no sleep */
    CHECK(sr_lock_owner(&lock) == 0);
    sr_lock_release(&lock);
    CHECK(sr_lock_try_acquire(&lock, 1));
}

/* ---- ranks that give up --------------------------------------------------------------------------------------- */

enum { ROUNDS = 400, WAITERS = 3 };

struct round {
    struct sr_lock lock; /* rank 0 has it at first */
    int number, takers;  /* takers: plain */
};

static void sleep_for_up_to(struct check_rank *me, uint64_t most_ns)
{
    struct timespec moment = {0, (long)(check_random(me) % most_ns)};
    nanosleep(&moment, NULL);
}

/* Rank 1 sleeps once and gives up, as a rank does whose timeout has ended its sleep, or has passed when another rank
   wakes it. The ranks after it sleep without a limit. If rank 1 has used the last wake-up, they have none but the one
   that it passes on. */
static void wait_or_give_up(struct check_rank *me)
{
    struct round *shared = me->shared;
    const uint64_t limit_ns = shared->number % 2 == 0 ? TEN_MINUTES_NS : 150000;
    me->random += (uint64_t)shared->number << 8;
    sleep_for_up_to(me, me->rank == 0 ? 300000 : 100000);
    if (me->rank == 0) {
        sr_lock_release(&shared->lock);
        return;
    }
    if (me->rank == 1 && !sr_lock_sleep(&shared->lock, me->rank, limit_ns)) {
        sr_lock_pass_on(&shared->lock);
        return;
    }
    if (me->rank > 1)
        take(&shared->lock, me->rank, SLEEPS);
    shared->takers++;
    sr_lock_release(&shared->lock);
}

static void test_rank_that_gives_up_wakes_another(void)
{
    for (int number = 0; number < ROUNDS; number++) {
        struct round shared;
        memset(&shared, 0, sizeof shared);
        shared.number = number;
        CHECK(sr_lock_try_acquire(&shared.lock, 0));
        check_ranks(1 + WAITERS, wait_or_give_up, &shared);
        CHECK(sr_lock_owner(&shared.lock) == -1);
        CHECK(shared.takers == WAITERS || shared.takers == WAITERS - 1);
    }
}

/* ---- ranks that are processes ---------------------------------------------------------------------------------- */

static struct guarded *shared_memory(void)
{
    struct guarded *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    shared->all_sleep = true;
    return shared;
}

static pid_t start_process(struct guarded *shared, void (*body)(struct check_rank *))
{
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct check_rank me = {1, 2, shared, 2, body, 0};
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(&me);
        _exit(0);
    }
    return child;
}

static void reap(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_processes_wake_each_other(void)
{
    struct guarded *shared = shared_memory();
    struct check_rank me = {0, 2, shared, 1, take_turns, 0};
    const pid_t child = start_process(shared, take_turns);
    take_turns(&me);
    reap(child);
    CHECK(sr_lock_owner(&shared->lock) == -1);
    CHECK(shared->word[0] == 2 * (uint64_t)TURNS);
    CHECK(munmap(shared, sizeof *shared) == 0);
}

static void take_and_end(struct check_rank *me)
{
    struct guarded *shared = me->shared;
    CHECK(sr_lock_try_acquire(&shared->lock, me->rank));
}

/* Other ranks find out that the owner has died (sr_liveness_died). */
static void test_owner_that_has_died_is_still_named(void)
{
    struct guarded *shared = shared_memory();
    reap(start_process(shared, take_and_end));
    CHECK(!sr_lock_try_acquire(&shared->lock, 0) && !sr_lock_sleep(&shared->lock, 0, 1000000));
    CHECK(sr_lock_owner(&shared->lock) == 1);
    CHECK(munmap(shared, sizeof *shared) == 0);
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
    check_begin("a rank that gives up wakes another");
    test_rank_that_gives_up_wakes_another();
    check_begin("processes wake each other");
    test_processes_wake_each_other();
    check_begin("an owner that has died is still named");
    test_owner_that_has_died_is_still_named();
    return 0;
}
