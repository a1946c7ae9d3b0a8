/* Publish and wait: the only file with memory orders, pauses and futexes.
   May know: layout.h. Every publish names the wait that it pairs with; TSan proves the pairs in tests/c. */
#ifndef SR_FLAG_H
#define SR_FLAG_H

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

static inline void sr_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static inline uint64_t sr_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- flags ---------------------------------------------------------------------------------------------- */

/* P: pairs with every A below; all that the caller wrote before is seen by who sees the value. */
static inline uint64_t sr_flag_load(const sr_flag *flag) /* A1 */
{
    return atomic_load_explicit((sr_flag *)flag, memory_order_acquire);
}

static inline bool sr_flag_reached(const sr_flag *flag, uint64_t target) /* A2 */
{
    return (int64_t)(sr_flag_load(flag) - target) >= 0;
}

/* For values that nobody sleeps on: credits, first values. Pairs with A1, A2. */
static inline void sr_flag_set(sr_flag *flag, uint64_t value)
{
    atomic_store_explicit(flag, value, memory_order_release);
}

/* The bell's word is a generation, its lowest bit says that somebody sleeps. Ringing begins an even generation, so
   that whoever is about to sleep on the old one does not, however many come and go in between. */
static inline void sr_bell_ring(struct sr_bell *bell)
{
    uint32_t old = atomic_load_explicit(&bell->sleepers, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&bell->sleepers, &old, (old | 1) + 1, memory_order_seq_cst,
                                                  memory_order_relaxed))
        ;
    syscall(SYS_futex, &bell->sleepers, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

/* How every sleep begins: watch the bell that the writers of one or more flags ring, look at each flag once more with
   sr_flag_load_ordered, then sleep on what the watch returned. */
static inline uint32_t sr_bell_watch(struct sr_bell *own_bell)
{
    return atomic_fetch_or_explicit(&own_bell->sleepers, 1, memory_order_seq_cst) | 1; /* S1 */
}

static inline uint64_t sr_flag_load_ordered(const sr_flag *flag)
{
    return atomic_load_explicit((sr_flag *)flag, memory_order_seq_cst); /* S2, pairs with P1, P2 */
}

/* Of a word that says that memory is somebody else's again: what was read before this saw 0 was read in time. */
static inline uint64_t sr_flag_load_after_reads(const sr_flag *flag)
{
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit((sr_flag *)flag, memory_order_relaxed);
}

static inline void sr_bell_sleep(struct sr_bell *own_bell, uint32_t generation, uint64_t limit_ns)
{
    struct timespec limit = {(time_t)(limit_ns / 1000000000u), (long)(limit_ns % 1000000000u)};
    syscall(SYS_futex, &own_bell->sleepers, FUTEX_WAIT, generation, &limit, NULL, 0);
}

/* P1, pairs with A1, A2, S2. The locked exchange orders the flag before the look at the bell (the sleeper does
   the same the other way round in S1, S2), so one of the two always sees the other. */
static inline void sr_flag_publish(sr_flag *flag, uint64_t value, struct sr_bell *own_bell)
{
    atomic_exchange_explicit(flag, value, memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&own_bell->sleepers, memory_order_seq_cst) & 1, 0))
        sr_bell_ring(own_bell);
}

/* P2, as P1 for words of which each writer has some bits. */
static inline void sr_flag_mark(sr_flag *flag, uint64_t bits, struct sr_bell *bell)
{
    atomic_fetch_or_explicit(flag, bits, memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&bell->sleepers, memory_order_seq_cst) & 1, 0))
        sr_bell_ring(bell);
}

static inline bool sr_flag_spin(const sr_flag *flag, uint64_t target, int pauses)
{
    for (int i = 0; i < pauses; i++) {
        if (sr_flag_reached(flag, target))
            return true;
        sr_pause();
    }
    return sr_flag_reached(flag, target);
}

static inline void sr_yield(void) { sched_yield(); }

/* Tells the others which CPU this rank runs on, and returns it. */
static inline int sr_life_tell_cpu(struct sr_life *life)
{
    int cpu = sched_getcpu();
    if (atomic_load_explicit(&life->cpu, memory_order_relaxed) != cpu)
        atomic_store_explicit(&life->cpu, cpu, memory_order_relaxed);
    return cpu;
}

/* What it told last: perhaps it runs elsewhere by now. */
static inline int sr_life_cpu(const struct sr_life *life)
{
    return atomic_load_explicit(&((struct sr_life *)life)->cpu, memory_order_relaxed);
}

/* Sleeps until the owner of the flag rings its bell, at most `limit_ns`; signals, and nothing at all, end it too. */
static inline void sr_flag_sleep(const sr_flag *flag, uint64_t target, struct sr_bell *owner_bell, uint64_t limit_ns)
{
    uint32_t generation = sr_bell_watch(owner_bell);
    if ((int64_t)(sr_flag_load_ordered(flag) - target) < 0)
        sr_bell_sleep(owner_bell, generation, limit_ns);
}

/* A sleep on the flags of several owners, for a thread that serves more than one call. Begun by {0}; entered flag by
   flag, while their memory is sure to be mapped; slept once all are in. */
enum { SR_NAP_FLAGS = 64 }; /* further ones are left out: the limit ends the nap */

struct sr_nap {
    int n;
    struct {                         /* the kernel's struct futex_waitv, which older headers lack */
        uint64_t generation, address;
        uint32_t flags, reserved;
    } bell[SR_NAP_FLAGS];
};

/* As sr_bell_watch: the caller looks at what it waits for once more before the nap is slept. */
static inline void sr_nap_watch(struct sr_nap *nap, struct sr_bell *own_bell)
{
    enum { FUTEX_OF_32_BITS = 2 };
    uint32_t generation = sr_bell_watch(own_bell);
    if (nap->n < SR_NAP_FLAGS) {
        nap->bell[nap->n].generation = generation;
        nap->bell[nap->n].address = (uint64_t)(uintptr_t)&own_bell->sleepers;
        nap->bell[nap->n].flags = FUTEX_OF_32_BITS;
        nap->bell[nap->n].reserved = 0;
        nap->n++;
    }
}

/* As the first half of sr_flag_sleep. False: the flag is there already, and the nap is not to be slept. */
static inline bool sr_nap_enter(struct sr_nap *nap, const sr_flag *flag, uint64_t target, struct sr_bell *owner_bell)
{
    sr_nap_watch(nap, owner_bell);
    return (int64_t)(sr_flag_load_ordered(flag) - target) < 0;
}

/* Until one of the owners rings. Linux 5.16; where the kernel does not know it, for a moment only. */
static inline void sr_nap_sleep(struct sr_nap *nap, uint64_t limit_ns)
{
    enum { SYS_FUTEX_WAITV = 449 };
    uint64_t until_ns = sr_now_ns() + limit_ns;
    struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    struct timespec moment = {0, 200000};
    long woken = syscall(SYS_FUTEX_WAITV, nap->bell, nap->n, 0, &until, CLOCK_MONOTONIC);
    if (woken < 0 && (errno == ENOSYS || errno == EPERM))
        nanosleep(&moment, NULL);
}

/* ---- taking turns ------------------------------------------------------------------------------------------- */

/* Takes a word that is 0 by setting it: false when somebody else was first. What was done before the word became 0
   again (sr_flag_set, sr_flag_publish) is seen by who takes it. */
static inline bool sr_flag_take(sr_flag *flag, uint64_t value)
{
    uint64_t none = 0;
    return atomic_compare_exchange_strong_explicit(flag, &none, value, memory_order_acq_rel, memory_order_acquire);
}

/* Sets a word and tells what was there: who comes second in taking and swapping knows it. */
static inline uint64_t sr_flag_swap(sr_flag *flag, uint64_t value)
{
    return atomic_exchange_explicit(flag, value, memory_order_acq_rel);
}

/* ---- the abort word: set once, read by every wait --------------------------------------------------------- */

static inline uint64_t sr_abort_pack(enum sr_cause cause, int culprit, int reporter)
{
    return (uint64_t)cause | (uint64_t)culprit << 8 | (uint64_t)reporter << 24;
}

static inline enum sr_cause sr_abort_cause(uint64_t word) { return (enum sr_cause)(word & 0xff); }
static inline int sr_abort_culprit(uint64_t word) { return (int)(word >> 8 & 0xffff); }
static inline int sr_abort_reporter(uint64_t word) { return (int)(word >> 24 & 0xffff); }

/* The first to come decides what everybody raises. The reporter's sr_report is written before. */
static inline void sr_abort_set(struct sr_header *header, uint64_t word)
{
    uint64_t none = SR_NO_ABORT;
    atomic_compare_exchange_strong_explicit(&header->abort, &none, word, memory_order_seq_cst, memory_order_acquire);
}

/* ---- locks: after U. Drepper, "Futexes are tricky", 2011, mutex 3; the word names its owner, so that who waits can
   look whether it lives ---- */

/* L1, pairs with U1. */
static inline bool sr_lock_try(struct sr_lock *lock, int rank)
{
    uint32_t word = 0;
    return atomic_compare_exchange_strong_explicit(&lock->word, &word, (uint32_t)rank + 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* The rank that has it at this moment, -1: nobody. */
static inline int sr_lock_owner(const struct sr_lock *lock)
{
    uint32_t word = atomic_load_explicit(&((struct sr_lock *)lock)->word, memory_order_relaxed);
    return (int)(word & ~SR_LOCK_AWAITED) - 1;
}

static inline bool sr_lock_spin(struct sr_lock *lock, int rank, int pauses)
{
    for (int i = 0; i < pauses; i++) {
        if (sr_lock_owner(lock) < 0 && sr_lock_try(lock, rank))
            return true;
        sr_pause();
    }
    return false;
}

/* L2, pairs with U1. Takes the lock if it is free, as one that others may be waiting for; else sleeps until it is let
   go, at most `limit_ns`, and returns false. */
static inline bool sr_lock_sleep(struct sr_lock *lock, int rank, uint64_t limit_ns)
{
    struct timespec limit = {(time_t)(limit_ns / 1000000000u), (long)(limit_ns % 1000000000u)};
    uint32_t word = atomic_load_explicit(&lock->word, memory_order_relaxed);
    uint32_t next;
    do
        next = (word == 0 ? (uint32_t)rank + 1 : word) | SR_LOCK_AWAITED;
    while (next != word && !atomic_compare_exchange_weak_explicit(&lock->word, &word, next, memory_order_acquire,
                                                                  memory_order_relaxed));
    if (word == 0)
        return true;
    syscall(SYS_futex, &lock->word, FUTEX_WAIT, next, &limit, NULL, 0);
    return false;
}

/* U1, pairs with L1, L2: what the owner wrote is seen by the next one. */
static inline void sr_lock_leave(struct sr_lock *lock)
{
    if (atomic_exchange_explicit(&lock->word, 0, memory_order_release) & SR_LOCK_AWAITED)
        syscall(SYS_futex, &lock->word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* ---- life ------------------------------------------------------------------------------------------------- */

/* Looks only: a plain load of the word that the kernel marks when the parked thread of its owner is gone. */
static inline bool sr_life_died(const struct sr_life *life)
{
    return (atomic_load_explicit(&((struct sr_life *)life)->holder, memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

static inline enum sr_state sr_life_state(const struct sr_life *life)
{
    return (enum sr_state)atomic_load_explicit(&((struct sr_life *)life)->state, memory_order_acquire);
}

static inline void sr_life_set_state(struct sr_life *life, enum sr_state state)
{
    atomic_store_explicit(&life->state, (uint32_t)state, memory_order_seq_cst);
}

/* From SR_ABSENT to SR_JOINED, for who comes first. */
static inline bool sr_life_claim(struct sr_life *life)
{
    uint32_t absent = SR_ABSENT;
    return atomic_compare_exchange_strong_explicit(&life->state, &absent, SR_JOINED, memory_order_seq_cst,
                                                   memory_order_acquire);
}

/* The parked thread's whole life (the kernel's robust futex interface: Documentation/locking/robust-futex-ABI):
   registers `holder` with the kernel, takes it, and sleeps until *leave is set; then lets go in order. A list
   entry of our own instead of a robust pthread mutex, because its futex word is then ours to lay out and read. */
static inline void sr_life_hold(struct sr_life *life, _Atomic uint32_t *leave)
{
    struct robust_list entry;
    struct robust_list_head head = {{&entry}, (long)((char *)&life->holder - (char *)&entry), NULL};
    entry.next = &head.list;
    syscall(SYS_set_robust_list, &head, sizeof head);
    atomic_store_explicit(&life->holder, (uint32_t)syscall(SYS_gettid), memory_order_release);
    while (atomic_load_explicit(leave, memory_order_acquire) == 0)
        syscall(SYS_futex, leave, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    atomic_store_explicit(&life->holder, 0, memory_order_release);
    syscall(SYS_set_robust_list, NULL, sizeof head);
}

/* The parked thread, as the owner's process may be called in system calls. */
static inline int sr_life_task(const struct sr_life *life)
{
    return (int)(atomic_load_explicit(&((struct sr_life *)life)->holder, memory_order_relaxed) & FUTEX_TID_MASK);
}

static inline bool sr_life_is_held(const struct sr_life *life)
{
    return atomic_load_explicit(&((struct sr_life *)life)->holder, memory_order_acquire) != 0;
}

static inline void sr_life_leave(_Atomic uint32_t *leave)
{
    atomic_store_explicit(leave, 1, memory_order_release);
    syscall(SYS_futex, leave, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

#endif
