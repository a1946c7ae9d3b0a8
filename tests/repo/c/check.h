/* Shared by the C tests: CHECK, ranks as threads, random delays, a watchdog, and useful first sequence numbers. */
#ifndef CHECK_H
#define CHECK_H

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { CHECK_MAX_RANKS = 16 };

/* First values of a counter: it goes on from 0, or passes 2^32 or 2^64 in the middle of `rounds`. */
enum { CHECK_FROM_ZERO, CHECK_PAST_32_BITS, CHECK_PAST_64_BITS, CHECK_STARTS };

static inline uint64_t check_start(int which, uint64_t rounds)
{
    if (which == CHECK_FROM_ZERO)
        return 0;
    return (which == CHECK_PAST_32_BITS ? 1ull << 32 : 0) - rounds / 2;
}

#define CHECK(condition) ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, #condition))

static inline void check_failed(const char *file, int line, const char *condition)
{
    fprintf(stderr, "%s:%d: not so: %s\n", file, line, condition);
    _exit(1);
}

/* Names the test that begins; the default action of SIGALRM ends it when it hangs. */
static inline void check_begin(const char *name)
{
    printf("%s\n", name);
    fflush(stdout);
    alarm(200);
}

struct check_rank {
    int rank, nranks;
    void *shared;    /* what all ranks see */
    uint64_t random; /* state of check_random */
    void (*body)(struct check_rank *);
    pthread_t thread;
};

static inline uint64_t check_random(struct check_rank *me)
{
    uint64_t z = me->random += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* Mostly nothing, now and then a moment, a turn of the scheduler, or a nap: so that ranks overtake each other. */
static inline void check_dawdle(struct check_rank *me)
{
    struct timespec nap = {0, 1000};
    uint64_t chance = check_random(me) % 64;
    if (chance == 0)
        nanosleep(&nap, NULL);
    else if (chance < 4)
        sched_yield();
    else if (chance < 16)
        for (volatile int i = (int)(check_random(me) % 200); i > 0; i--) {}
}

static inline void *check_thread(void *argument)
{
    struct check_rank *me = argument;
    me->body(me);
    return NULL;
}

/* Runs `body` in `nranks` threads at once and waits for all. */
static inline void check_ranks(int nranks, void (*body)(struct check_rank *), void *shared)
{
    struct check_rank ranks[CHECK_MAX_RANKS];
    CHECK(nranks <= CHECK_MAX_RANKS);
    for (int rank = 0; rank < nranks; rank++) {
        ranks[rank] = (struct check_rank){rank, nranks, shared, (uint64_t)rank + 1, body, 0};
        CHECK(pthread_create(&ranks[rank].thread, NULL, check_thread, &ranks[rank]) == 0);
    }
    for (int rank = 0; rank < nranks; rank++)
        CHECK(pthread_join(ranks[rank].thread, NULL) == 0);
}

#endif
