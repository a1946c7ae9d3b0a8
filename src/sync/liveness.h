/* Liveness: the word by which ranks see that another one has died. The liveness thread of a rank holds the futex
   `holder` as long as the rank lives. The kernel marks the futex when the thread ends, whatever ended it. */
#ifndef SR_SYNC_LIVENESS_H
#define SR_SYNC_LIVENESS_H

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "layout.h"

/* ---- the owner --------------------------------------------------------------------------------------------------- */

/* Publish the CPU on which this rank runs, and return it. */
static inline int sr_liveness_set_cpu(struct sr_liveness *liveness)
{
    int cpu = sched_getcpu();
    if (atomic_load_explicit(&liveness->cpu, memory_order_relaxed) != cpu)
        atomic_store_explicit(&liveness->cpu, cpu, memory_order_relaxed);
    return cpu;
}

static inline void sr_liveness_set_state(struct sr_liveness *liveness, enum sr_state state)
{
    atomic_store_explicit(&liveness->state, (uint32_t)state, memory_order_seq_cst);
}

/* The list that the kernel reads when the thread ends. It must stay in place as long as the thread holds `holder`. */
struct sr_hold {
    struct robust_list entry;
    struct robust_list_head head;
};

/* Ask the scheduler for short time slices. The liveness thread only has to end, and must not wait for a CPU behind
   threads that compute. From Linux 6.12 on, a thread that asks for short slices runs first when it wakes; before,
   this changes nothing. */
static inline void sr_liveness_be_prompt(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime_ns, deadline_ns, period_ns;
    } attributes = {.size = sizeof attributes};
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) == 0 && attributes.policy == SCHED_OTHER) {
        attributes.runtime_ns = 100000;
        syscall(SYS_sched_setattr, 0, &attributes, 0);
    }
}

/* Called by the liveness thread: register `holder` with the kernel and take it (the kernel's robust futex interface:
   Documentation/locking/robust-futex-ABI). A list entry of our own, and not a robust pthread mutex, since this way the
   layout of the futex word is ours. If the kernel refuses the registration (a seccomp profile), the thread holds
   `holder` all the same, and the other ranks look for the thread by sr_liveness_check. */
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

/* Called by the liveness thread before it ends in order: release `holder`, so that the end is not taken for a death. */
static inline void sr_liveness_let_go(struct sr_liveness *liveness)
{
    atomic_store_explicit(&liveness->holder, 0, memory_order_release);
    syscall(SYS_set_robust_list, NULL, sizeof(struct robust_list_head));
}

/* ---- the other ranks --------------------------------------------------------------------------------------------- */

/* Return the CPU on which the rank ran when it last published it: a hint. */
static inline int sr_liveness_cpu(const struct sr_liveness *liveness)
{
    return atomic_load_explicit(&((struct sr_liveness *)liveness)->cpu, memory_order_relaxed);
}

/* Return whether the rank's `holder` is marked: its liveness thread has ended without sr_liveness_let_go. */
static inline bool sr_liveness_died(const struct sr_liveness *liveness)
{
    return (atomic_load_explicit(&((struct sr_liveness *)liveness)->holder, memory_order_acquire) & FUTEX_OWNER_DIED) !=
           0;
}

static inline enum sr_state sr_liveness_state(const struct sr_liveness *liveness)
{
    return (enum sr_state)atomic_load_explicit(&((struct sr_liveness *)liveness)->state, memory_order_acquire);
}

/* Return the thread id of the liveness thread. System calls accept it for the owner's process. */
static inline int sr_liveness_task(const struct sr_liveness *liveness)
{
    return (int)(atomic_load_explicit(&((struct sr_liveness *)liveness)->holder, memory_order_relaxed) &
                 FUTEX_TID_MASK);
}

/* Wake all threads that sleep on the liveness word of a rank that has died. */
static inline void sr_liveness_wake_sleepers(struct sr_liveness *liveness)
{
    syscall(SYS_futex, &liveness->holder, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

static inline bool sr_liveness_is_held(const struct sr_liveness *liveness)
{
    return atomic_load_explicit(&((struct sr_liveness *)liveness)->holder, memory_order_acquire) != 0;
}

/* Return whether the kernel does not mark `holder` when the rank dies. */
static inline bool sr_liveness_is_unwatched(const struct sr_liveness *liveness)
{
    return atomic_load_explicit(&((struct sr_liveness *)liveness)->unwatched, memory_order_relaxed) != 0;
}

/* Look for the liveness thread of an unwatched rank. Return 0 if it exists, else errno. The thread is never the first
   one of its process. Its process would be the wrong thing to look for: a dead process exists until its parent has
   waited for it, and a process survives execve. */
static inline int sr_liveness_find_thread(const struct sr_liveness *liveness)
{
    return syscall(SYS_tgkill, liveness->pid, sr_liveness_task(liveness), 0) == 0 ? 0 : errno;
}

/* Mark an unwatched rank that has died, as the kernel marks a watched one, and wake all threads that sleep on its word.
   Only for a caller that has found the thread before: from another PID namespace it is never found. */
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

/* ---- processes without a liveness thread ------------------------------------------------------------------------- */

/* Return a descriptor by which this process sees the end of another one, or -1. */
static inline int sr_process_open(int pid)
{
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, pid, 0);
#else
    (void)pid;
    return -1;
#endif
}

/* Return whether the process has ended, also if its parent has not waited for it. */
static inline bool sr_process_has_ended(int descriptor)
{
    struct pollfd asked = {descriptor, POLLIN, 0};
    return poll(&asked, 1, 0) != 0;
}

static inline void sr_process_close(int descriptor)
{
    if (descriptor >= 0)
        close(descriptor);
}

#endif
