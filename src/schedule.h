/* Schedules as pure functions of integers: the slices of a message, the steps of rings, trees and recursive halving.
   The engine and the tests use the same functions. */
#ifndef SR_SCHEDULE_H
#define SR_SCHEDULE_H

#include <stddef.h>

/* Return the first element of slice `index`: `count` elements in `n` slices whose lengths differ by at most one. */
static inline size_t sr_slice_begin(size_t count, int n, int index)
{
    size_t base = count / (size_t)n, extra = count % (size_t)n;
    return base * (size_t)index + ((size_t)index < extra ? (size_t)index : extra);
}

/* As sr_slice_begin, in units of `grain` elements, so that slices meet at whole cache lines. The last slices may be
   empty. */
static inline size_t sr_slice_begin_grained(size_t count, int n, int index, size_t grain)
{
    size_t grains = (count + grain - 1) / grain;
    size_t begin = sr_slice_begin(grains, n, index) * grain;
    return begin < count ? begin : count;
}

/* Ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009): n-1 steps of reduce-scatter, then
   n-1 steps of all-gather. In step s = 1..n-1 of either, rank d sends to rank d-1 ... */
static inline int sr_ring_from(int rank, int n) { return (rank + 1) % n; }

/* ... slice (d+s) mod n in the reduce-scatter, so that after n-1 steps it owns slice d, ... */
static inline int sr_ring_reduce_slice(int rank, int n, int step) { return (rank + step) % n; }

/* ... and slice (d+s-1) mod n in the all-gather: first its own slice, then the slice that it has just received. */
static inline int sr_ring_gather_slice(int rank, int n, int step) { return (rank + step - 1) % n; }

/* Return the rank that has this rank's place in the ring of the opposite direction, which is the mirror image. */
static inline int sr_ring_mirrored(int rank, int n) { return (n - rank) % n; }

/* Binomial tree with root rank 0: ceil(log2 n) steps up, and as many down. */
static inline int sr_tree_steps(int n)
{
    int steps = 0;
    while ((1L << steps) < n)
        steps++;
    return steps;
}

/* In step s = 0, 1, ... up, a rank whose lowest set bit is bit s sends to the rank without that bit. A rank whose bits
   0 to s are zero receives, if its partner exists. -1: the rank does not send, or receive, in this step. */
static inline int sr_tree_sends_to(int rank, int step)
{
    return (rank & ((1 << (step + 1)) - 1)) == (1 << step) ? rank - (1 << step) : -1;
}

static inline int sr_tree_receives_from(int rank, int n, int step)
{
    int from = rank + (1 << step);
    return (rank & ((1 << (step + 1)) - 1)) == 0 && from < n ? from : -1;
}

/* Recursive halving and doubling (Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur,
   Rabenseifner and Gropp, 2005). The first 2^steps <= n ranks exchange, in steps s = 1..steps, halves of the part that
   they have kept so far, and then, in steps s = steps..1, the results of these parts. Each other rank gives its whole
   array in the first step, and takes the same results as its *core*, the rank 2^steps below it. */
static inline int sr_halving_steps(int n)
{
    int steps = 0;
    while ((2L << steps) <= n)
        steps++;
    return steps;
}

static inline int sr_halving_peer(int rank, int steps, int step) { return rank ^ (1 << (steps - step)); }

/* Return the first of the 2^(steps - step) slices, of 2^steps, that a rank has kept after a step: at the end slice
   `rank`. */
static inline int sr_halving_keeps(int rank, int steps, int step) { return rank & ~((1 << (steps - step)) - 1); }

/* Binary tree of nodes 0..n-1: odd nodes are leaves, even nodes are inner nodes, node 0 is the root and has one child.
   -1: there is no such node. */
static inline int sr_binary_parent(int node, int n)
{
    int bit = node & -node, up = (node ^ bit) | bit << 1;
    return node == 0 ? -1 : up < n ? up : node ^ bit;
}

static inline int sr_binary_child(int node, int n, int which)
{
    int bit = (node == 0 ? 1 << sr_tree_steps(n) : node & -node) >> 1;
    if (which == 0)
        return node == 0 || bit == 0 ? -1 : node - bit;
    while (bit > 0 && node + bit >= n)
        bit >>= 1;
    return bit > 0 ? node + bit : -1;
}

/* Double binary tree (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
   scan", 2009), built as in NCCL 2.4. Tree 0 is the binary tree above. Tree 1 is its mirror image, for odd n shifted by
   one rank. So the leaves of one tree are inner nodes of the other; only rank 0 of an odd n is an inner node of both,
   in one of them the root. */
static inline int sr_double_tree_node(int rank, int n, int tree)
{
    return tree == 0 ? rank : n % 2 == 0 ? n - 1 - rank : (rank + n - 1) % n;
}

static inline int sr_double_tree_rank(int node, int n, int tree)
{
    return node < 0 || tree == 0 ? node : n % 2 == 0 ? n - 1 - node : (node + 1) % n;
}

static inline int sr_double_tree_is_inner(int rank, int n, int tree)
{
    return sr_double_tree_node(rank, n, tree) % 2 == 0;
}

static inline int sr_double_tree_parent(int rank, int n, int tree)
{
    return sr_double_tree_rank(sr_binary_parent(sr_double_tree_node(rank, n, tree), n), n, tree);
}

static inline int sr_double_tree_child(int rank, int n, int tree, int which)
{
    return sr_double_tree_rank(sr_binary_child(sr_double_tree_node(rank, n, tree), n, which), n, tree);
}

#endif
