/* Publish and wait: the only file with memory orders, pauses and futexes.
   Every publish names the wait that it pairs with; TSan proves the pairs in tests/repo/c. */
#ifndef SR_FLAG_H
#define SR_FLAG_H

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fault.h"
#include "layout.h"

static inline void sr_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

/* Asks for lines that are about to be stored to and that other cores may hold. A store waits until they have let go of
   its line, one after the other; these requests are under way together. A hint: what lies there stays as it is. */
static inline void sr_prefetch_for_write(void *there, size_t nbytes)
{
#if defined(__x86_64__)
    for (size_t at = 0; at < nbytes; at += SR_CACHE_LINE)
        __asm__ volatile("prefetchw %0" : : "m"(((char *)there)[at]));
#else
    (void)there, (void)nbytes;
#endif
}

static inline uint64_t sr_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A wait looks around every few ms. If more time than this lies between two of its looks, its thread did not run: the
   process was stopped (SIGSTOP, a frozen cgroup), or got no CPU. */
enum { SR_LONGEST_POLL_NS = 100000000 };

/* The part of the time between two looks of a wait by which its deadline moves. Not all of it, so that a wait whose
   looks are always late ends as well. */
static inline uint64_t sr_time_away(uint64_t looked_ns, uint64_t now_ns)
{
    const uint64_t between_ns = now_ns - looked_ns;
    return between_ns > SR_LONGEST_POLL_NS ? between_ns - SR_LONGEST_POLL_NS : 0;
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

/* The event's word is a generation, its lowest bit says that somebody sleeps. Signalling begins an even generation, so
   that whoever is about to sleep on the old one does not, however many come and go in between. */
static inline void sr_event_signal(struct sr_event *event)
{
    uint32_t old = atomic_load_explicit(&event->sleepers, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&event->sleepers, &old, (old | 1) + 1, memory_order_seq_cst,
                                                  memory_order_relaxed))
        ;
    syscall(SYS_futex, &event->sleepers, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

/* How every sleep begins: watch the event that the writers of one or more flags signal, look at each flag once more
   with sr_flag_load_ordered, then sleep on what the watch returned. */
static inline uint32_t sr_event_watch(struct sr_event *own_event)
{
    return atomic_fetch_or_explicit(&own_event->sleepers, 1, memory_order_seq_cst) | 1; /* S1 */
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

static inline void sr_event_sleep(struct sr_event *own_event, uint32_t generation, uint64_t limit_ns)
{
    struct timespec limit = {(time_t)(limit_ns / 1000000000u), (long)(limit_ns % 1000000000u)};
    syscall(SYS_futex, &own_event->sleepers, FUTEX_WAIT, generation, &limit, NULL, 0);
}

/* P1, pairs with A1, A2, S2. The locked exchange orders the flag before the look at the event (the sleeper does
   the same the other way round in S1, S2), so one of the two always sees the other. */
static inline void sr_flag_publish(sr_flag *flag, uint64_t value, struct sr_event *own_event)
{
    SR_FAULT(SR_BEFORE_PUBLISH);
    atomic_exchange_explicit(flag, value, memory_order_seq_cst);
    SR_FAULT(SR_AFTER_PUBLISH);
    if (__builtin_expect(atomic_load_explicit(&own_event->sleepers, memory_order_seq_cst) & 1, 0))
        sr_event_signal(own_event);
}

/* P2, as P1 for words of which each writer has some bits. */
static inline void sr_flag_mark(sr_flag *flag, uint64_t bits, struct sr_event *event)
{
    atomic_fetch_or_explicit(flag, bits, memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&event->sleepers, memory_order_seq_cst) & 1, 0))
        sr_event_signal(event);
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
static inline int sr_liveness_set_cpu(struct sr_liveness *liveness)
{
    int cpu = sched_getcpu();
    if (atomic_load_explicit(&liveness->cpu, memory_order_relaxed) != cpu)
        atomic_store_explicit(&liveness->cpu, cpu, memory_order_relaxed);
    return cpu;
}

/* What it told last: perhaps it runs elsewhere by now. */
static inline int sr_liveness_cpu(const struct sr_liveness *liveness)
{
    return atomic_load_explicit(&((struct sr_liveness *)liveness)->cpu, memory_order_relaxed);
}

/* Sleeps until the owner of the flag signals its event, at most `limit_ns`; signals, and nothing at all, end it too. */
static inline void sr_flag_sleep(const sr_flag *flag, uint64_t target, struct sr_event *owner_event, uint64_t limit_ns)
{
    uint32_t generation = sr_event_watch(owner_event);
    if ((int64_t)(sr_flag_load_ordered(flag) - target) < 0)
        sr_event_sleep(owner_event, generation, limit_ns);
}

/* A sleep on the flags of several owners, for a thread that serves more than one call. Begun by {0}; entered flag by
   flag, while their memory is sure to be mapped; slept once all are in. */
enum { SR_WAITSET_FLAGS = 64 }; /* further ones are left out: the limit ends the sleep */

struct sr_waitset {
    int n;
    struct {                         /* the kernel's struct futex_waitv, which older headers lack */
        uint64_t generation, address;
        uint32_t flags, reserved;
    } event[SR_WAITSET_FLAGS];
};

/* As sr_event_watch: the caller looks at what it waits for once more before the sleep. */
static inline void sr_waitset_watch(struct sr_waitset *waitset, struct sr_event *own_event)
{
    enum { FUTEX_OF_32_BITS = 2 };
    uint32_t generation = sr_event_watch(own_event);
    if (waitset->n < SR_WAITSET_FLAGS) {
        waitset->event[waitset->n].generation = generation;
        waitset->event[waitset->n].address = (uint64_t)(uintptr_t)&own_event->sleepers;
        waitset->event[waitset->n].flags = FUTEX_OF_32_BITS;
        waitset->event[waitset->n].reserved = 0;
        waitset->n++;
    }
}

/* As the first half of sr_flag_sleep. False: the flag is there already, and there is to be no sleep. */
static inline bool sr_waitset_enter(struct sr_waitset *waitset, const sr_flag *flag, uint64_t target,
                                    struct sr_event *owner_event)
{
    sr_waitset_watch(waitset, owner_event);
    return (int64_t)(sr_flag_load_ordered(flag) - target) < 0;
}

enum { SR_WAITSET_UNKNOWN = -2 };

/* Which of the events has ended it; -1: something else; SR_WAITSET_UNKNOWN at once where the kernel has no
   such sleep. */
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

/* Until one of the owners rings. Linux 5.16; where the kernel does not know it, for a moment only. */
static inline void sr_waitset_sleep(struct sr_waitset *waitset, uint64_t limit_ns)
{
    struct timespec moment = {0, 200000};
    if (sr_waitset_try(waitset, limit_ns) == SR_WAITSET_UNKNOWN)
        nanosleep(&moment, NULL);
}

/* As sr_waitset_watch, for who has watched an event first: the kernel ends the sleep when the rank dies. It wakes one
   of all that sleep on it, who has to tell the others. False: it has ended. */
static inline bool sr_waitset_watch_liveness(struct sr_waitset *waitset, struct sr_liveness *liveness)
{
    uint32_t holder = atomic_load_explicit(&liveness->holder, memory_order_acquire);
    if (holder & FUTEX_OWNER_DIED)
        return false;
    if (holder != 0 && waitset->n < SR_WAITSET_FLAGS) {
        waitset->event[waitset->n] = waitset->event[0];
        waitset->event[waitset->n].generation = holder;
        waitset->event[waitset->n++].address = (uint64_t)(uintptr_t)&liveness->holder;
    }
    return true;
}

/* Until the first event is signalled or a rank dies. True: one has. Before Linux 5.16 nobody is woken by that. */
static inline bool sr_waitset_sleep_until_death(struct sr_waitset *waitset, uint64_t limit_ns)
{
    struct timespec limit = {(time_t)(limit_ns / 1000000000u), (long)(limit_ns % 1000000000u)};
    int woken = sr_waitset_try(waitset, limit_ns);
    if (woken == SR_WAITSET_UNKNOWN)
        syscall(SYS_futex, (void *)(uintptr_t)waitset->event[0].address, FUTEX_WAIT,
                (uint32_t)waitset->event[0].generation, &limit, NULL, 0);
    return woken > 0;
}

/* ---- taking turns ------------------------------------------------------------------------------------------- */

/* Takes a word that is 0 by setting it: false when somebody else was first. What was done before the word became 0
   again (sr_flag_set, sr_flag_publish) is seen by who takes it. */
static inline bool sr_flag_take(sr_flag *flag, uint64_t value)
{
    uint64_t none = 0;
    return atomic_compare_exchange_strong_explicit(flag, &none, value, memory_order_acq_rel, memory_order_acquire);
}

/* As sr_flag_take, of a word that is `old`. */
static inline bool sr_flag_replace(sr_flag *flag, uint64_t old, uint64_t value)
{
    return atomic_compare_exchange_strong_explicit(flag, &old, value, memory_order_acq_rel, memory_order_acquire);
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

/* The first to come decides what everybody raises. The reporter's sr_report is written before. What this rank writes
   after it, others may still be reading: the look keeps it behind the word, where an exclusive store alone does not
   (aarch64 before 8.1; tests/repo/models/give_up.litmus). Pairs with sr_flag_load_after_reads. */
static inline void sr_abort_set(struct sr_header *header, uint64_t word)
{
    uint64_t none = SR_NO_ABORT;
    atomic_compare_exchange_strong_explicit(&header->abort, &none, word, memory_order_seq_cst, memory_order_acquire);
    (void)atomic_load_explicit(&header->abort, memory_order_seq_cst);
}

/* ---- seqlock: each replaces the one before --------------------------------------------------------------------- */

/* The fences are those of a sequence lock (H.-J. Boehm, "Can seqlocks get along with programming language memory
   models?", 2012): who reads a word of the view after the next one, which lies in the same place, sees that the next
   one has been told. */
static inline void sr_seqlock_write(struct sr_seqlock *lock, const uint64_t *word)
{
    const uint64_t number = atomic_load_explicit(&lock->version, memory_order_relaxed) + 1;
    atomic_thread_fence(memory_order_release);
    for (unsigned i = 0; i < SR_VIEW_WORDS; i++)
        atomic_store_explicit(&lock->word[number & 1][i], word[i], memory_order_relaxed);
    atomic_store_explicit(&lock->version, number, memory_order_release);
}

/* The number of the view that was read; 0: there is none. */
static inline uint64_t sr_seqlock_read(const struct sr_seqlock *from, uint64_t *word)
{
    struct sr_seqlock *lock = (struct sr_seqlock *)from;
    uint64_t number = sr_flag_load(&lock->version), seen = number;
    while (number != 0) {
        for (unsigned i = 0; i < SR_VIEW_WORDS; i++)
            word[i] = atomic_load_explicit(&lock->word[number & 1][i], memory_order_relaxed);
        seen = sr_flag_load_after_reads(&lock->version);
        if (seen == number)
            break;
        number = seen;
    }
    return number;
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

/* ---- liveness ------------------------------------------------------------------------------------------------- */

/* Looks only: a plain load of the word that the kernel marks when the parked thread of its owner is gone. */
static inline bool sr_liveness_died(const struct sr_liveness *liveness)
{
    return (atomic_load_explicit(&((struct sr_liveness *)liveness)->holder, memory_order_acquire) & FUTEX_OWNER_DIED) !=
           0;
}

static inline enum sr_state sr_liveness_state(const struct sr_liveness *liveness)
{
    return (enum sr_state)atomic_load_explicit(&((struct sr_liveness *)liveness)->state, memory_order_acquire);
}

static inline void sr_liveness_set_state(struct sr_liveness *liveness, enum sr_state state)
{
    atomic_store_explicit(&liveness->state, (uint32_t)state, memory_order_seq_cst);
}

/* From SR_ABSENT to SR_JOINED, for who comes first. */
static inline bool sr_liveness_acquire(struct sr_liveness *liveness)
{
    uint32_t absent = SR_ABSENT;
    return atomic_compare_exchange_strong_explicit(&liveness->state, &absent, SR_JOINED, memory_order_seq_cst,
                                                   memory_order_acquire);
}

/* What the kernel is told of: it has to stay where it is as long as `holder` is held. */
struct sr_hold {
    struct robust_list entry;
    struct robust_list_head head;
};

/* Of a thread that has nothing to do but to die: it shall not wait behind those that compute. Linux 6.12 lets whoever
   asks for a short slice go first when it wakes; elsewhere this changes nothing. */
static inline void sr_liveness_be_prompt(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime_ns, deadline_ns, period_ns;
    } asked = {.size = sizeof asked};
    if (syscall(SYS_sched_getattr, 0, &asked, sizeof asked, 0) == 0 && asked.policy == SCHED_OTHER) {
        asked.runtime_ns = 100000;
        syscall(SYS_sched_setattr, 0, &asked, 0);
    }
}

/* How the parked thread holds `holder` (the kernel's robust futex interface: Documentation/locking/robust-futex-ABI):
   registers `holder` with the kernel and takes it; whatever ends the thread then is seen by all. A list entry of our
   own instead of a robust pthread mutex, because its futex word is then ours to lay out and read. If the kernel refuses
   that (a seccomp profile), `holder` is held all the same, and others look for the thread by sr_liveness_check. */
static inline void sr_liveness_hold(struct sr_liveness *liveness, struct sr_hold *hold)
{
    hold->entry.next = &hold->head.list;
    hold->head.list.next = &hold->entry;
    hold->head.futex_offset = (long)((char *)&liveness->holder - (char *)&hold->entry);
    hold->head.list_op_pending = NULL;
    const bool refused = syscall(SYS_set_robust_list, &hold->head, sizeof hold->head) != 0;
    sr_liveness_be_prompt();
    atomic_store_explicit(&liveness->unwatched, refused, memory_order_relaxed);
    atomic_store_explicit(&liveness->holder, (uint32_t)syscall(SYS_gettid) | FUTEX_WAITERS, memory_order_release);
}

static inline void sr_liveness_let_go(struct sr_liveness *liveness)
{
    atomic_store_explicit(&liveness->holder, 0, memory_order_release);
    syscall(SYS_set_robust_list, NULL, sizeof(struct robust_list_head));
}

/* What it does meanwhile: sleeps until somebody asks (true), or *leave is set (false). A signal is no question. */
static inline bool sr_stack_request_await(struct sr_stack_request *stack_request, _Atomic uint32_t *leave)
{
    long woken = -1;
    while (woken != 0) {
        uint32_t event = atomic_load_explicit(&stack_request->event, memory_order_acquire); /* before *leave is read */
        if (atomic_load_explicit(leave, memory_order_acquire) != 0)
            return false;
        woken = syscall(SYS_futex, &stack_request->event, FUTEX_WAIT, event, NULL, NULL, 0);
    }
    return atomic_load_explicit(leave, memory_order_acquire) == 0;
}

/* From any thread of the owner. The word changes, so that who is about to sleep on the old one does not. */
static inline void sr_stack_request_leave(struct sr_stack_request *stack_request, _Atomic uint32_t *leave)
{
    atomic_store_explicit(leave, 1, memory_order_release);
    atomic_fetch_add_explicit(&stack_request->event, 1, memory_order_release);
    syscall(SYS_futex, &stack_request->event, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* From anywhere: who is not asleep does not hear it. Needs no right to write. False: the kernel does not do it. */
static inline bool sr_stack_request_ask(const struct sr_stack_request *stack_request)
{
    return syscall(SYS_futex, &stack_request->event, FUTEX_WAKE, 1, NULL, NULL, 0) >= 0;
}

/* T1: `version` is odd while the text is written. Who reads loads it before (A1) and after (sr_flag_load_after_reads):
   the same even value says that the text is whole (H.-J. Boehm, "Can seqlocks get along with programming language
   memory models?", 2012). */
static inline void sr_stack_request_begin(struct sr_stack_request *stack_request)
{
    atomic_fetch_or_explicit(&stack_request->version, 1, memory_order_seq_cst);
    (void)atomic_load_explicit(&stack_request->version, memory_order_seq_cst); /* keeps the text behind it */
}

static inline void sr_stack_request_end(struct sr_stack_request *stack_request)
{
    uint64_t version = atomic_load_explicit(&stack_request->version, memory_order_relaxed);
    atomic_store_explicit(&stack_request->version, version + 1, memory_order_release);
}

/* The parked thread, as the owner's process may be called in system calls. */
static inline int sr_liveness_task(const struct sr_liveness *liveness)
{
    return (int)(atomic_load_explicit(&((struct sr_liveness *)liveness)->holder, memory_order_relaxed) &
                 FUTEX_TID_MASK);
}

/* Of one that has ended: wakes all that sleep on it. */
static inline void sr_liveness_wake_sleepers(struct sr_liveness *liveness)
{
    syscall(SYS_futex, &liveness->holder, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

static inline bool sr_liveness_is_held(const struct sr_liveness *liveness)
{
    return atomic_load_explicit(&((struct sr_liveness *)liveness)->holder, memory_order_acquire) != 0;
}

/* True if the kernel does not mark `holder` when the rank dies. */
static inline bool sr_liveness_is_unwatched(const struct sr_liveness *liveness)
{
    return atomic_load_explicit(&((struct sr_liveness *)liveness)->unwatched, memory_order_relaxed) != 0;
}

/* Looks for the parked thread of an unwatched rank: 0, or errno. Not for its process, which can be found until its
   parent has waited for it, and lives on after execve; the parked thread is never the first of its process. */
static inline int sr_liveness_find_thread(const struct sr_liveness *liveness)
{
    return syscall(SYS_tgkill, liveness->pid, sr_liveness_task(liveness), 0) == 0 ? 0 : errno;
}

/* Marks an unwatched rank that has ended, as the kernel does with others, and wakes all that sleep on it. Only for who
   has found the thread before: in another PID namespace it never is. */
static inline void sr_liveness_check(struct sr_liveness *liveness)
{
    uint32_t holder = atomic_load_explicit(&liveness->holder, memory_order_acquire);
    if (!sr_liveness_is_unwatched(liveness) || holder == 0 || holder & FUTEX_OWNER_DIED ||
        sr_liveness_find_thread(liveness) != ESRCH)
        return;
    if (atomic_compare_exchange_strong_explicit(&liveness->holder, &holder, holder | FUTEX_OWNER_DIED,
                                                memory_order_acq_rel, memory_order_relaxed))
        sr_liveness_wake_sleepers(liveness);
}

#endif
