/* Locks in shared memory: mutex 3 of U. Drepper, "Futexes are tricky", 2011. The word names its owner, so that a
   waiting rank can check whether the owner lives. Labels: an L locks (acquire), the U unlocks (release).

   Invariants:
   - A lock has one owner. Only L1 and L2 change the word from 0, by compare-and-swap, and only the owner changes it
     back to 0 (U1). An owner that dies stays the owner: nothing here takes the lock from it.
   - The mark SR_LOCK_AWAITED stays until the owner leaves. A rank sleeps only while the word is the marked one that it
     has seen: the kernel compares the two and begins the sleep in one step.
   - No wake-up is lost. While a rank sleeps, the word has the mark, or a rank has removed the mark (U1) and is about to
     wake one, or a rank that was woken is on its way to L2, which sets the mark again, or to sr_lock_pass_on. A rank
     that has slept must therefore do one of these two, and must not take the lock by L1, which sets no mark.
   - The mark may be set although no rank sleeps. U1 then makes a system call in vain.
   A rank that is killed in U1, or after a wake-up, wakes no other rank. The others then sleep up to their limit. */
#ifndef SR_SYNC_LOCK_H
#define SR_SYNC_LOCK_H

#include <linux/futex.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sync/cpu.h"
#include "sync/event.h"

/* L1, pairs with U1. Take the lock if it is free. */
static inline bool sr_lock_try_acquire(struct sr_lock *lock, int rank)
{
    uint32_t word = 0;
    return atomic_compare_exchange_strong_explicit(&lock->word, &word, (uint32_t)rank + 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* Return the rank that owns the lock at this moment, or -1. */
static inline int sr_lock_owner(const struct sr_lock *lock)
{
    uint32_t word = atomic_load_explicit(&((struct sr_lock *)lock)->word, memory_order_relaxed);
    return (int)(word & ~SR_LOCK_AWAITED) - 1;
}

/* L1, for a rank that has not slept: see the invariants. */
static inline bool sr_lock_spin(struct sr_lock *lock, int rank, int pauses)
{
    for (int i = 0; i < pauses; i++) {
        if (sr_lock_owner(lock) < 0 && sr_lock_try_acquire(lock, rank))
            return true;
        sr_pause();
    }
    return false;
}

/* L2, pairs with U1. Take the lock if it is free, and mark it as awaited, since other ranks may be sleeping. Otherwise
   sleep until the owner leaves it, at most `limit_ns`, and return false. */
static inline bool sr_lock_sleep(struct sr_lock *lock, int rank, uint64_t limit_ns)
{
    uint32_t word = atomic_load_explicit(&lock->word, memory_order_relaxed);
    uint32_t next;
    do
        next = (word == 0 ? (uint32_t)rank + 1 : word) | SR_LOCK_AWAITED;
    while (next != word && !atomic_compare_exchange_weak_explicit(&lock->word, &word, next, memory_order_acquire,
                                                                  memory_order_relaxed));
    if (word == 0)
        return true;
    sr_futex_sleep(&lock->word, next, limit_ns);
    return false;
}

/* Wake another waiting rank, for one that no longer waits: the last wake-up may have come to it alone. */
static inline void sr_lock_pass_on(struct sr_lock *lock)
{
    syscall(SYS_futex, &lock->word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* U1, pairs with L1, L2: the next owner sees what this one has written. Wake one rank if the lock is awaited. */
static inline void sr_lock_release(struct sr_lock *lock)
{
    if (atomic_exchange_explicit(&lock->word, 0, memory_order_release) & SR_LOCK_AWAITED)
        sr_lock_pass_on(lock);
}

#endif
