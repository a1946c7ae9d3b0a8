/* The abort word of a segment (sr_header.abort), which ends the communicator. It is set once and loaded by every wait.
   The word holds the cause (bits 0 to 7), the culprit (8 to 23) and the reporter (24 to 39). */
#ifndef SR_SYNC_ABORT_H
#define SR_SYNC_ABORT_H

#include "layout.h"

static inline uint64_t sr_abort_pack(enum sr_cause cause, int culprit, int reporter)
{
    return (uint64_t)cause | (uint64_t)culprit << 8 | (uint64_t)reporter << 24;
}

static inline enum sr_cause sr_abort_cause(uint64_t word) { return (enum sr_cause)(word & 0xff); }
static inline int sr_abort_culprit(uint64_t word) { return (int)(word >> 8 & 0xffff); }
static inline int sr_abort_reporter(uint64_t word) { return (int)(word >> 24 & 0xffff); }

/* Set the abort word unless it is set already: the first word decides which error every rank raises. The reporter has
   written its sr_report before; an acquiring load of the word (A1) makes the report visible.

   After this call the rank may overwrite memory that other ranks are still reading. The load keeps those writes behind
   the word; an exclusive store alone does not (aarch64 before 8.1; tests/repo/models/give_up.litmus). Pairs with
   sr_flag_load_after_reads. */
static inline void sr_abort_set(struct sr_header *header, uint64_t word)
{
    uint64_t none = SR_NO_ABORT;
    atomic_compare_exchange_strong_explicit(&header->abort, &none, word, memory_order_seq_cst, memory_order_acquire);
    (void)atomic_load_explicit(&header->abort, memory_order_seq_cst);
}

#endif
