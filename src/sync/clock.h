/* The clock of all waits, CLOCK_MONOTONIC in nanoseconds, and the time that a stopped thread missed. */
#ifndef SR_SYNC_CLOCK_H
#define SR_SYNC_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t sr_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A wait polls every few ms. If more time than this lies between two of its polls, its thread did not run: the process
   was stopped (SIGSTOP, a frozen cgroup), or got no CPU. */
enum { SR_LONGEST_POLL_NS = 100000000 };

/* Return by how much a wait moves its deadline for the time between two of its polls. SR_LONGEST_POLL_NS of that time
   always counts, so that a wait whose polls are always late ends as well. */
static inline uint64_t sr_time_away(uint64_t polled_ns, uint64_t now_ns)
{
    const uint64_t between_ns = now_ns - polled_ns;
    return between_ns > SR_LONGEST_POLL_NS ? between_ns - SR_LONGEST_POLL_NS : 0;
}

#endif
