/* Hints to the CPU and to the scheduler. */
#ifndef SR_SYNC_CPU_H
#define SR_SYNC_CPU_H

#include <sched.h>

#include "layout.h"

/* Tell the CPU that this thread spins. */
static inline void sr_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static inline void sr_yield(void) { sched_yield(); }

/* Request cache lines for writing that other cores may hold. A store waits until the other cores have given up its
   line, one store after the other; these requests proceed in parallel. The bytes do not change. */
static inline void sr_prefetch_for_write(void *there, size_t nbytes)
{
#if defined(__x86_64__)
    for (size_t at = 0; at < nbytes; at += SR_CACHE_LINE)
        __asm__ volatile("prefetchw %0" : : "m"(((char *)there)[at]));
#else
    (void)there, (void)nbytes;
#endif
}

#endif
