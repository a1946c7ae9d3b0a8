/* The sequence lock between threads. A reader's copy has the words of one version, whatever the writer does meanwhile,
   and no reader sees an older version after a newer one. */
#ifdef __SANITIZE_THREAD__ /* it does not know fences; it checks the accesses themselves, which are all atomic */
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include "sync/seqlock.h"

#include "check.h"

enum { VERSIONS = 20000, READERS = 3 };

static uint64_t word_of(uint64_t version, unsigned i) { return version << 16 | i; }

static void write_all(struct check_rank *me, struct sr_seqlock *lock)
{
    uint64_t word[SR_VIEW_WORDS];
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        for (unsigned i = 0; i < SR_VIEW_WORDS; i++)
            word[i] = word_of(version, i);
        sr_seqlock_write(lock, word);
        check_dawdle(me);
    }
}

static void write_or_read(struct check_rank *me)
{
    struct sr_seqlock *lock = me->shared;
    uint64_t word[SR_VIEW_WORDS], last = 0;
    if (me->rank == 0)
        write_all(me, lock);
    while (me->rank > 0 && last < VERSIONS) {
        const uint64_t version = sr_seqlock_read(lock, word);
        CHECK(version >= last);
        for (unsigned i = 0; version > 0 && i < SR_VIEW_WORDS; i++)
            CHECK(word[i] == word_of(version, i));
        last = version;
        check_dawdle(me);
    }
}

int main(void)
{
    static struct sr_seqlock lock;
    uint64_t word[SR_VIEW_WORDS];
    check_begin("there is no version at first");
    CHECK(sr_seqlock_read(&lock, word) == 0);
    check_begin("a copy has the words of one version");
    check_ranks(1 + READERS, write_or_read, &lock);
    return 0;
}
