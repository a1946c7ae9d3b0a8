/* Receipts for matched messages: struct sr_receipts of layout.h. The sender takes a free number, sends it with the
   message, and frees it once it has taken the receipt; the receiver gives the receipt when the message is matched. */
#ifndef SR_RECEIPTS_H
#define SR_RECEIPTS_H

#include "sync/flag.h"

enum { SR_RECEIPTS_WORDS = SR_RECEIPTS / 64 };

static inline uint64_t sr_receipt_bit(uint32_t number) { return (uint64_t)1 << (number % 64); }

/* ---- the sender ------------------------------------------------------------------------------------------------ */

/* Return a free number; 0 if none is free. in_use: one bit for each number, in private memory that is zero at first. */
static inline uint32_t sr_receipt_new_number(uint64_t *in_use)
{
    in_use[0] |= 1; /* 0 is no number */
    for (uint32_t word = 0; word < SR_RECEIPTS_WORDS; word++)
        if (in_use[word] != UINT64_MAX) {
            const uint32_t number = 64 * word + (uint32_t)__builtin_ctzll(~in_use[word]);
            in_use[word] |= sr_receipt_bit(number);
            return number;
        }
    return 0;
}

static inline void sr_receipt_free_number(uint64_t *in_use, uint32_t number)
{
    in_use[number / 64] &= ~sr_receipt_bit(number);
}

/* Return the number of receipts given so far. Pairs with sr_receipt_give; the load is ordered (S2), since the sender
   may be about to sleep. */
static inline uint64_t sr_receipts_count(const struct sr_receipts *receipts)
{
    return sr_flag_load_ordered(&receipts->count);
}

/* Return whether the receipt is given, and take it. */
static inline bool sr_receipt_take(struct sr_receipts *receipts, uint32_t number)
{
    sr_flag *word = &receipts->given[number / 64];
    if (!(sr_flag_load(word) & sr_receipt_bit(number)))
        return false;
    sr_flag_unmark(word, sr_receipt_bit(number));
    return true;
}

/* ---- the receiver ---------------------------------------------------------------------------------------------- */

/* Give the receipt with this number, which is less than SR_RECEIPTS. Pairs with sr_receipts_count. */
static inline void sr_receipt_give(struct sr_receipts *receipts, uint32_t number, struct sr_event *event)
{
    sr_flag_mark(&receipts->given[number / 64], sr_receipt_bit(number), event);
    sr_flag_publish(&receipts->count, sr_flag_load(&receipts->count) + 1, event);
}

#endif
