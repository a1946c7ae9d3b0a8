/* Who does what, as pure functions of integers: slices of a message, steps of the ring and of the tree.
   May know: the standard headers. The engine and the tests read the same schedules from here. */
#ifndef SR_SCHEDULE_H
#define SR_SCHEDULE_H

#include <stddef.h>

/* First element of slice `index` of `count` elements in `n` slices that differ by at most one element. */
static inline size_t sr_slice_begin(size_t count, int n, int index)
{
    size_t base = count / (size_t)n, extra = count % (size_t)n;
    return base * (size_t)index + ((size_t)index < extra ? (size_t)index : extra);
}

/* The same in steps of `grain` elements, so that slices meet at whole cache lines; the last ones may be empty. */
static inline size_t sr_slice_begin_grained(size_t count, int n, int index, size_t grain)
{
    size_t grains = (count + grain - 1) / grain;
    size_t begin = sr_slice_begin(grains, n, index) * grain;
    return begin < count ? begin : count;
}

/* Ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009): n-1 steps of reduce-scatter, then
   n-1 of all-gather; in step s = 1..n-1 of either, rank d sends to d-1 ... */
static inline int sr_ring_to(int rank, int n) { return (rank + n - 1) % n; }
static inline int sr_ring_from(int rank, int n) { return (rank + 1) % n; }

/* ... slice (d+s) mod n while reducing, so that after n-1 steps it owns slice d, ... */
static inline int sr_ring_reduce_slice(int rank, int n, int step) { return (rank + step) % n; }

/* ... and slice (d+s-1) mod n while gathering: first its own, then what it has just received. */
static inline int sr_ring_gather_slice(int rank, int n, int step) { return (rank + step - 1) % n; }

/* Binomial tree rooted at rank 0: ceil(log2 n) steps up, as many down. */
static inline int sr_tree_steps(int n)
{
    int steps = 0;
    while ((1L << steps) < n)
        steps++;
    return steps;
}

/* In step s = 0, 1, ... up, a rank whose lowest set bit is s sends to the rank without that bit; the
   receiver is the rank with s zero low bits whose partner exists. -1: this rank rests in this step. */
static inline int sr_tree_sends_to(int rank, int step)
{
    return (rank & ((1 << (step + 1)) - 1)) == (1 << step) ? rank - (1 << step) : -1;
}

static inline int sr_tree_receives_from(int rank, int n, int step)
{
    int from = rank + (1 << step);
    return (rank & ((1 << (step + 1)) - 1)) == 0 && from < n ? from : -1;
}

#endif
