/* Wait sets: one sleep on the events of several flag owners (futex_waitv, Linux 5.16), for a thread that serves more
   than one call. A set begins as {0}. Its user adds events while their memory is sure to be mapped, and sleeps once
   all are in. */
#ifndef SR_SYNC_WAITSET_H
#define SR_SYNC_WAITSET_H

#include <errno.h>

#include "sync/clock.h"
#include "sync/flag.h"

enum { SR_WAITSET_EVENTS = 64 }; /* further events are left out: the limit ends the sleep */

struct sr_waitset {
    int n;
    struct {                         /* the kernel's struct futex_waitv, which older headers lack */
        uint64_t generation, address;
        uint32_t flags, reserved;
    } event[SR_WAITSET_EVENTS];
};

/* S1, as sr_event_watch: the caller loads the flags that it waits for once more (S2) before it sleeps. */
static inline void sr_waitset_watch(struct sr_waitset *waitset, struct sr_event *own_event)
{
    enum { FUTEX_OF_32_BITS = 2 };
    uint32_t generation = sr_event_watch(own_event);
    if (waitset->n < SR_WAITSET_EVENTS) {
        waitset->event[waitset->n].generation = generation;
        waitset->event[waitset->n].address = (uint64_t)(uintptr_t)&own_event->sleepers;
        waitset->event[waitset->n].flags = FUTEX_OF_32_BITS;
        waitset->event[waitset->n].reserved = 0;
        waitset->n++;
    }
}

/* S1 and S2, as the first half of sr_flag_sleep. Return false if the flag has reached the target: the caller must not
   sleep. */
static inline bool sr_waitset_enter(struct sr_waitset *waitset, const sr_flag *flag, uint64_t target,
                                    struct sr_event *owner_event)
{
    sr_waitset_watch(waitset, owner_event);
    return (int64_t)(sr_flag_load_ordered(flag) - target) < 0;
}

enum { SR_WAITSET_UNKNOWN = -2 };

/* Sleep for at most `limit_ns`. Return the index of the event that ended the sleep, or -1 if something else did.
   Return SR_WAITSET_UNKNOWN at once if the kernel has no futex_waitv. */
static inline int sr_waitset_try(struct sr_waitset *waitset, uint64_t limit_ns)
{
    enum { SYS_FUTEX_WAITV = 449 };
    uint64_t until_ns = sr_now_ns() + limit_ns;
    struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    long woken = syscall(SYS_FUTEX_WAITV, waitset->event, waitset->n, 0, &until, CLOCK_MONOTONIC);
    if (woken < 0)
        return errno == ENOSYS || errno == EPERM ? SR_WAITSET_UNKNOWN : -1;
    return (int)woken;
}

/* Sleep on the first event alone, at most `limit_ns`: all that a kernel without futex_waitv can do. */
static inline void sr_waitset_sleep_on_first(const struct sr_waitset *waitset, uint64_t limit_ns)
{
    sr_futex_sleep((const void *)(uintptr_t)waitset->event[0].address, (uint32_t)waitset->event[0].generation,
                   limit_ns);
}

/* Sleep until one of the events is signalled, at most `limit_ns`. On a kernel without futex_waitv, which cannot wait
   for several events, sleep for 0.2 ms if there are several. */
static inline void sr_waitset_sleep(struct sr_waitset *waitset, uint64_t limit_ns)
{
    struct timespec moment = {0, 200000};
    if (sr_waitset_try(waitset, limit_ns) != SR_WAITSET_UNKNOWN)
        return;
    if (waitset->n == 1)
        sr_waitset_sleep_on_first(waitset, limit_ns);
    else
        nanosleep(&moment, NULL);
}

/* Add the liveness word of a rank to a set that already holds an event: the kernel ends the sleep when that rank dies.
   The kernel wakes only one of the threads that sleep on the word; that thread has to wake the others
   (sr_liveness_wake_sleepers). Return false if the rank has died. */
static inline bool sr_waitset_watch_liveness(struct sr_waitset *waitset, struct sr_liveness *liveness)
{
    uint32_t holder = atomic_load_explicit(&liveness->holder, memory_order_acquire);
    if (holder & FUTEX_OWNER_DIED)
        return false;
    if (holder != 0 && waitset->n < SR_WAITSET_EVENTS) {
        waitset->event[waitset->n] = waitset->event[0]; /* for its `flags` and `reserved` */
        waitset->event[waitset->n].generation = holder;
        waitset->event[waitset->n++].address = (uint64_t)(uintptr_t)&liveness->holder;
    }
    return true;
}

/* Sleep until the first event is signalled or a watched rank dies, at most `limit_ns`. Return whether a death ended the
   sleep: an entry other than the first one. Before Linux 5.16 a death does not end the sleep. */
static inline bool sr_waitset_sleep_until_death(struct sr_waitset *waitset, uint64_t limit_ns)
{
    int woken = sr_waitset_try(waitset, limit_ns);
    if (woken == SR_WAITSET_UNKNOWN)
        sr_waitset_sleep_on_first(waitset, limit_ns);
    return woken > 0;
}

#endif
