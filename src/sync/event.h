/* Events: the futex word on which threads sleep until the owner of a flag has published it (an event count).
   The publishers of flag.h signal; sr_flag_sleep and the wait sets of waitset.h sleep. */
#ifndef SR_SYNC_EVENT_H
#define SR_SYNC_EVENT_H

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

/* Wake all threads that sleep on the event. The word is a generation; its lowest bit says that a thread sleeps.
   A signal begins the next even generation, so a thread that is about to sleep on the old one does not sleep, however
   many threads come and go in between. */
static inline void sr_event_signal(struct sr_event *event)
{
    uint32_t old = atomic_load_explicit(&event->sleepers, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&event->sleepers, &old, (old | 1) + 1, memory_order_seq_cst,
                                                  memory_order_relaxed))
        ;
    syscall(SYS_futex, &event->sleepers, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

/* S1. Every sleep begins here: watch the event that the writers of one or more flags signal, load each of these flags
   once more with sr_flag_load_ordered (S2), and only then sleep on the generation that this function returned. */
static inline uint32_t sr_event_watch(struct sr_event *own_event)
{
    return atomic_fetch_or_explicit(&own_event->sleepers, 1, memory_order_seq_cst) | 1;
}

/* Sleep while the word has this value, until a wake-up, at most `limit_ns`. A signal of the operating system ends the
   sleep too, and it may end without a reason. */
static inline void sr_futex_sleep(const void *word, uint32_t value, uint64_t limit_ns)
{
    struct timespec limit = {(time_t)(limit_ns / 1000000000u), (long)(limit_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

/* Sleep until the event is signalled, at most `limit_ns`; return at once if `generation` has ended. It may return
   earlier, as sr_futex_sleep. */
static inline void sr_event_sleep(struct sr_event *own_event, uint32_t generation, uint64_t limit_ns)
{
    sr_futex_sleep(&own_event->sleepers, generation, limit_ns);
}

#endif
