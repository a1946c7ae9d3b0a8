/* Requests for the Python stacks of a rank. The liveness thread of the rank sleeps on `event` and answers a wake-up for
   which it finds no other reason: it writes the stacks into the lane, while `version` is odd. */
#ifndef SR_SYNC_STACK_REQUEST_H
#define SR_SYNC_STACK_REQUEST_H

#include <linux/futex.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "layout.h"

/* Called by the liveness thread: sleep until another process requests the stacks (true) or *leave is set (false).
   A signal of the operating system is no request. */
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

/* Called by any thread of the owner: end the liveness thread's sleep. `event` changes, so that a thread that is about
   to sleep on the old value does not sleep. Pairs with sr_stack_request_await. */
static inline void sr_stack_request_leave(struct sr_stack_request *stack_request, _Atomic uint32_t *leave)
{
    atomic_store_explicit(leave, 1, memory_order_release);
    atomic_fetch_add_explicit(&stack_request->event, 1, memory_order_release);
    syscall(SYS_futex, &stack_request->event, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Request the stacks, from any process; read access to the segment is enough. A liveness thread that does not sleep at
   this moment misses the request. Return false if the kernel refuses the call. */
static inline bool sr_stack_request_ask(const struct sr_stack_request *stack_request)
{
    return syscall(SYS_futex, &stack_request->event, FUTEX_WAKE, 1, NULL, NULL, 0) >= 0;
}

/* Called by the liveness thread before it writes the stacks: make `version` odd. A reader loads `version` before it
   reads (A1) and again after (sr_flag_load_after_reads): the text is whole if both loads give the same even value
   (H.-J. Boehm, "Can seqlocks get along with programming language memory models?", 2012). */
static inline void sr_stack_request_begin(struct sr_stack_request *stack_request)
{
    atomic_fetch_or_explicit(&stack_request->version, 1, memory_order_seq_cst);
    (void)atomic_load_explicit(&stack_request->version, memory_order_seq_cst); /* keeps the text behind it */
}

/* Called by the liveness thread after it has written the stacks: make `version` even. */
static inline void sr_stack_request_end(struct sr_stack_request *stack_request)
{
    uint64_t version = atomic_load_explicit(&stack_request->version, memory_order_relaxed);
    atomic_store_explicit(&stack_request->version, version + 1, memory_order_release);
}

#endif
