/* A sequence lock with two copies of the data: readers read one copy while the writer writes the other.

   The fences are those of H.-J. Boehm, "Can seqlocks get along with programming language memory models?", 2012. Version
   n + 2 lies in the same copy as version n, and its words are written after version n + 1 was published. A reader of
   version n that loads a word of version n + 2 therefore sees `version` changed when it loads it again. */
#ifndef SR_SYNC_SEQLOCK_H
#define SR_SYNC_SEQLOCK_H

#include "sync/flag.h"

/* Publish the next version. Pairs with sr_seqlock_read. */
static inline void sr_seqlock_write(struct sr_seqlock *lock, const uint64_t *word)
{
    const uint64_t version = atomic_load_explicit(&lock->version, memory_order_relaxed) + 1;
    atomic_thread_fence(memory_order_release);
    for (unsigned i = 0; i < SR_VIEW_WORDS; i++)
        atomic_store_explicit(&lock->word[version & 1][i], word[i], memory_order_relaxed);
    atomic_store_explicit(&lock->version, version, memory_order_release);
}

/* Copy the newest version and return its number; return 0 if there is none. Pairs with sr_seqlock_write. */
static inline uint64_t sr_seqlock_read(const struct sr_seqlock *from, uint64_t *word)
{
    struct sr_seqlock *lock = (struct sr_seqlock *)from;
    uint64_t version = sr_flag_load(&lock->version), seen = version;
    while (version != 0) {
        for (unsigned i = 0; i < SR_VIEW_WORDS; i++)
            word[i] = atomic_load_explicit(&lock->word[version & 1][i], memory_order_relaxed);
        seen = sr_flag_load_after_reads(&lock->version);
        if (seen == version)
            break;
        version = seen;
    }
    return version;
}

#endif
