/* Flags: words that one rank publishes and other ranks wait for, and words that threads take from each other.

   Labels: a P publishes, an A acquires, S1 and S2 come before a sleep. Every P releases and pairs with every A: a
   thread whose A loads the published value, or a later one, sees everything that the publisher wrote before its P.
   The C programs in tests/repo/c run the pairs under ThreadSanitizer. */
#ifndef SR_SYNC_FLAG_H
#define SR_SYNC_FLAG_H

#include <stdbool.h>

#include "fault.h"
#include "sync/cpu.h"
#include "sync/event.h"

/* A1, pairs with P1, P2 and sr_flag_set. */
static inline uint64_t sr_flag_load(const sr_flag *flag)
{
    return atomic_load_explicit((sr_flag *)flag, memory_order_acquire);
}

/* A2, as A1. Return whether the flag has reached the target. */
static inline bool sr_flag_reached(const sr_flag *flag, uint64_t target)
{
    return (int64_t)(sr_flag_load(flag) - target) >= 0;
}

/* Publish a value on which no thread sleeps: a credit, or a first value. Pairs with A1, A2. */
static inline void sr_flag_set(sr_flag *flag, uint64_t value)
{
    atomic_store_explicit(flag, value, memory_order_release);
}

/* S2, pairs with P1, P2: the load of a flag between sr_event_watch and the sleep. */
static inline uint64_t sr_flag_load_ordered(const sr_flag *flag)
{
    return atomic_load_explicit((sr_flag *)flag, memory_order_seq_cst);
}

/* Load a word that its writer changes before it overwrites some memory: the abort word, a version, or a position. If
   the word has not changed, every byte of that memory that this thread read before is valid. Pairs with sr_abort_set,
   sr_seqlock_write, sr_stack_request_begin and sr_flag_set_before_writes. */
static inline uint64_t sr_flag_load_after_reads(const sr_flag *flag)
{
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit((sr_flag *)flag, memory_order_relaxed);
}

/* Change a word before the memory that it describes is overwritten; pairs with sr_flag_load_after_reads. The fence
   orders the store before all later stores, as in sr_seqlock_write. */
static inline void sr_flag_set_before_writes(sr_flag *flag, uint64_t value)
{
    atomic_store_explicit(flag, value, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

/* P1, pairs with A1, A2, S2. The exchange orders the flag before the load of the event, as S1 orders the sleeper's bit
   in the event before the load of the flag in S2. So the publisher sees the bit, or the sleeper sees the flag. */
static inline void sr_flag_publish(sr_flag *flag, uint64_t value, struct sr_event *own_event)
{
    SR_FAULT(SR_BEFORE_PUBLISH);
    atomic_exchange_explicit(flag, value, memory_order_seq_cst);
    SR_FAULT(SR_AFTER_PUBLISH);
    if (__builtin_expect(atomic_load_explicit(&own_event->sleepers, memory_order_seq_cst) & 1, 0))
        sr_event_signal(own_event);
}

/* P2, as P1, for a word in which each writer owns some of the bits. */
static inline void sr_flag_mark(sr_flag *flag, uint64_t bits, struct sr_event *event)
{
    atomic_fetch_or_explicit(flag, bits, memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&event->sleepers, memory_order_seq_cst) & 1, 0))
        sr_event_signal(event);
}

/* Clear bits that another thread sets with sr_flag_mark. */
static inline void sr_flag_unmark(sr_flag *flag, uint64_t bits)
{
    atomic_fetch_and_explicit(flag, ~bits, memory_order_acq_rel);
}

/* Spin for at most `pauses` pauses. Return whether the flag has reached the target. */
static inline bool sr_flag_spin(const sr_flag *flag, uint64_t target, int pauses)
{
    for (int i = 0; i < pauses; i++) {
        if (sr_flag_reached(flag, target))
            return true;
        sr_pause();
    }
    return sr_flag_reached(flag, target);
}

/* Sleep until the owner of the flag signals its event, at most `limit_ns`. The flag may not have reached the target on
   return: see sr_event_sleep. */
static inline void sr_flag_sleep(const sr_flag *flag, uint64_t target, struct sr_event *owner_event, uint64_t limit_ns)
{
    uint32_t generation = sr_event_watch(owner_event);
    if ((int64_t)(sr_flag_load_ordered(flag) - target) < 0)
        sr_event_sleep(owner_event, generation, limit_ns);
}

/* ---- words that several threads write ------------------------------------------------------------------------- */

/* Set a word that is 0 and return true; return false if it is not 0. The thread that has set the word sees everything
   that was written before the word became 0 (sr_flag_set, sr_flag_publish). */
static inline bool sr_flag_take(sr_flag *flag, uint64_t value)
{
    uint64_t none = 0;
    return atomic_compare_exchange_strong_explicit(flag, &none, value, memory_order_acq_rel, memory_order_acquire);
}

/* A spin lock for short work: wait until the word is 0 and set it, and set it back to 0. value: not 0. */
static inline void sr_flag_acquire(sr_flag *flag, uint64_t value)
{
    while (!sr_flag_take(flag, value))
        sr_yield();
}

static inline void sr_flag_release(sr_flag *flag) { sr_flag_set(flag, 0); }

/* As sr_flag_take, for a word that is `old`. */
static inline bool sr_flag_replace(sr_flag *flag, uint64_t old, uint64_t value)
{
    return atomic_compare_exchange_strong_explicit(flag, &old, value, memory_order_acq_rel, memory_order_acquire);
}

/* As sr_flag_replace, for a word that a thread loads between sr_event_watch and the sleep (S2). The caller signals the
   event afterwards, or publishes (P1) another flag of the same event. */
static inline bool sr_flag_replace_ordered(sr_flag *flag, uint64_t old, uint64_t value)
{
    return atomic_compare_exchange_strong_explicit(flag, &old, value, memory_order_seq_cst, memory_order_acquire);
}

/* As sr_flag_publish (P1), for a word that is `old`: return false if it is not. */
static inline bool sr_flag_replace_and_publish(sr_flag *flag, uint64_t old, uint64_t value, struct sr_event *own_event)
{
    SR_FAULT(SR_BEFORE_PUBLISH);
    if (!sr_flag_replace_ordered(flag, old, value))
        return false;
    SR_FAULT(SR_AFTER_PUBLISH);
    if (__builtin_expect(atomic_load_explicit(&own_event->sleepers, memory_order_seq_cst) & 1, 0))
        sr_event_signal(own_event);
    return true;
}

/* Count one more event in a word that several threads count in. Pairs with A1. */
static inline void sr_flag_count(sr_flag *flag) { atomic_fetch_add_explicit(flag, 1, memory_order_seq_cst); }

/* Set a word and return its previous value. If one thread takes a word and another one swaps it, each of the two sees
   whether it came second. */
static inline uint64_t sr_flag_swap(sr_flag *flag, uint64_t value)
{
    return atomic_exchange_explicit(flag, value, memory_order_acq_rel);
}

#endif
