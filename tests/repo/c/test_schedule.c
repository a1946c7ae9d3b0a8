/* Slices, rings, trees and halvings as pure functions of integers. Every schedule is run with tokens, one for each
   rank's contribution to each slice. */
#include "schedule.h"

#include <string.h>

#include "check.h"

enum { MOST_RANKS = 40 };

/* ---- slices --------------------------------------------------------------------------------------------------- */

static const size_t counts[] = {0, 1, 2, 3, 7, 39, 40, 41, 63, 64, 65, 1000, 1797, 4096, 65537, ((size_t)1 << 32) - 1,
                                ((size_t)1 << 32) + 1, ((size_t)1 << 42) + 17};
enum { COUNTS = sizeof counts / sizeof *counts };

static void test_slices_cover_exactly_and_differ_by_one(void)
{
    for (int i = 0; i < COUNTS; i++)
        for (int n = 1; n <= MOST_RANKS; n++) {
            size_t count = counts[i], least = count / (size_t)n;
            CHECK(sr_slice_begin(count, n, 0) == 0);
            CHECK(sr_slice_begin(count, n, n) == count);
            for (int index = 0; index < n; index++) {
                size_t length = sr_slice_begin(count, n, index + 1) - sr_slice_begin(count, n, index);
                CHECK(length == least || length == least + 1);
                CHECK(length <= sr_slice_begin(count, n, 1)); /* the first is the largest: slots are sized by it */
            }
        }
}

static void check_grained(size_t count, int n, size_t grain)
{
    size_t shortest = SIZE_MAX, longest = 0;
    CHECK(sr_slice_begin_grained(count, n, 0, grain) == 0);
    CHECK(sr_slice_begin_grained(count, n, n, grain) == count);
    for (int index = 0; index < n; index++) {
        size_t begin = sr_slice_begin_grained(count, n, index, grain);
        size_t end = sr_slice_begin_grained(count, n, index + 1, grain);
        CHECK(begin <= end);
        CHECK(begin % grain == 0 || begin == count);
        if (end == count)
            break; /* the last slice with elements may be short, the ones after it are empty */
        shortest = end - begin < shortest ? end - begin : shortest;
        longest = end - begin > longest ? end - begin : longest;
    }
    CHECK(longest == 0 || longest - shortest <= grain);
}

static void test_grained_slices_cover_exactly_and_meet_at_grains(void)
{
    for (int i = 0; i < COUNTS; i++)
        for (int n = 1; n <= MOST_RANKS; n++)
            for (size_t grain = 1; grain <= 64; grain *= 2)
                check_grained(counts[i], n, grain);
}

/* ---- ring ----------------------------------------------------------------------------------------------------- */

/* held[rank][slice][source]: how often the value that `rank` holds of the slice contains the contribution of `source`.
   */
typedef unsigned char tokens[MOST_RANKS][MOST_RANKS][MOST_RANKS];
static tokens held, before;

static void deal_tokens(int n)
{
    memset(held, 0, sizeof held);
    for (int rank = 0; rank < n; rank++)
        for (int slice = 0; slice < n; slice++)
            held[rank][slice][rank] = 1;
}

static int holds_all_once(int rank, int slice, int n)
{
    for (int source = 0; source < n; source++)
        if (held[rank][slice][source] != 1)
            return 0;
    return 1;
}

/* One step of all ranks at once: each sends the values from before the step. Returns the elements sent. */
static size_t step_ring_once(int n, int step, int reduces, size_t count)
{
    size_t sent = 0;
    memcpy(before, held, sizeof held);
    for (int rank = 0; rank < n; rank++) {
        int to = (rank + n - 1) % n;
        int slice = reduces ? sr_ring_reduce_slice(rank, n, step) : sr_ring_gather_slice(rank, n, step);
        CHECK(sr_ring_from(to, n) == rank);
        CHECK(slice >= 0 && slice < n);
        for (int source = 0; source < n; source++)
            held[to][slice][source] = before[rank][slice][source] + (reduces ? before[to][slice][source] : 0);
        sent += sr_slice_begin(count, n, slice + 1) - sr_slice_begin(count, n, slice);
    }
    return sent;
}

static void test_ring_brings_every_contribution_everywhere_once(void)
{
    for (int n = 1; n <= MOST_RANKS; n++) {
        size_t count = 1797, sent = 0;
        deal_tokens(n);
        for (int step = 1; step < n; step++)
            sent += step_ring_once(n, step, 1, count);
        for (int rank = 0; rank < n; rank++)
            CHECK(holds_all_once(rank, rank, n));
        for (int step = 1; step < n; step++) {
            for (int rank = 0; rank < n; rank++)
                CHECK(holds_all_once(rank, sr_ring_gather_slice(rank, n, step), n)); /* only results are sent on */
            sent += step_ring_once(n, step, 0, count);
        }
        for (int rank = 0; rank < n; rank++)
            for (int slice = 0; slice < n; slice++)
                CHECK(holds_all_once(rank, slice, n));
        CHECK(sent == 2 * (size_t)(n - 1) * count);
    }
}

static void test_ring_of_four_is_the_published_one(void)
{
    for (int rank = 0; rank < 4; rank++) {
        CHECK(sr_ring_from((rank + 3) % 4, 4) == rank);
        for (int step = 1; step <= 3; step++)
            CHECK(sr_ring_reduce_slice(rank, 4, step) == (rank + step) % 4);
    }
}

/* A rank's place in the mirrored ring: neighbours there are neighbours here, in the opposite direction. */
static void test_a_mirrored_ring_goes_the_other_way(void)
{
    for (int n = 1; n <= MOST_RANKS; n++)
        for (int rank = 0; rank < n; rank++) {
            int place = sr_ring_mirrored(rank, n);
            CHECK(place >= 0 && place < n && sr_ring_mirrored(place, n) == rank);
            CHECK(sr_ring_mirrored((place + n - 1) % n, n) == sr_ring_from(rank, n));
        }
}

/* ---- recursive halving and doubling --------------------------------------------------------------------------- */

static size_t length(size_t count, int steps, int first, int step)
{
    return sr_slice_begin(count, 1 << steps, first + (1 << (steps - step))) - sr_slice_begin(count, 1 << steps, first);
}

static void add(int to, int from, int first, int nslices)
{
    for (int slice = first; slice < first + nslices; slice++)
        for (int source = 0; source < MOST_RANKS; source++)
            held[to][slice][source] += before[from][slice][source];
}

static void take(int to, int from, int first, int nslices)
{
    for (int slice = first; slice < first + nslices; slice++)
        memcpy(held[to][slice], before[from][slice], sizeof held[to][slice]);
}

/* One step of the reduce-scatter. In the first step, the ranks beyond the power of two give their whole arrays. */
static size_t halve_once(int n, int steps, int step, size_t count)
{
    int core = 1 << steps, nslices = 1 << (steps - step);
    size_t sent = 0;
    memcpy(before, held, sizeof held);
    for (int rank = 0; rank < core; rank++) {
        int peer = sr_halving_peer(rank, steps, step), keeps = sr_halving_keeps(rank, steps, step);
        CHECK(sr_halving_peer(peer, steps, step) == rank && peer < core);
        CHECK(sr_halving_keeps(peer, steps, step) != keeps && keeps % nslices == 0);
        add(rank, peer, keeps, nslices);
        if (step == 1 && rank + core < n)
            add(rank, rank + core, keeps, nslices);
        if (step == 1 && peer + core < n)
            add(rank, peer + core, keeps, nslices);
        sent += length(count, steps, sr_halving_keeps(peer, steps, step), step);
    }
    return sent;
}

static size_t double_once(int n, int steps, int step, size_t count)
{
    int core = 1 << steps, nslices = 1 << (steps - step);
    size_t sent = 0;
    memcpy(before, held, sizeof held);
    for (int rank = 0; rank < n; rank++) {
        int peer = sr_halving_peer(rank % core, steps, step);
        take(rank, peer, sr_halving_keeps(peer, steps, step), nslices);
        if (rank >= core && step == steps)
            take(rank, rank - core, rank - core, 1);
        if (rank < core)
            sent += length(count, steps, sr_halving_keeps(rank, steps, step), step);
    }
    return sent;
}

static void test_halving_brings_every_contribution_everywhere_once(void)
{
    for (int n = 2; n <= MOST_RANKS; n++) {
        int steps = sr_halving_steps(n), core = 1 << steps;
        size_t count = 1797, sent = 0;
        CHECK(core <= n && n < 2 * core);
        deal_tokens(n);
        for (int step = 1; step <= steps; step++)
            sent += halve_once(n, steps, step, count);
        for (int rank = 0; rank < core; rank++) {
            CHECK(sr_halving_keeps(rank, steps, steps) == rank);
            CHECK(holds_all_once(rank, rank, n));
        }
        for (int step = steps; step >= 1; step--)
            sent += double_once(n, steps, step, count);
        for (int rank = 0; rank < n; rank++)
            for (int slice = 0; slice < core; slice++)
                CHECK(holds_all_once(rank, slice, n));
        CHECK(sent == 2 * (size_t)(core - 1) * count);
    }
}

/* ---- tree ----------------------------------------------------------------------------------------------------- */

static void climb_tree(int n)
{
    for (int step = 0; step < sr_tree_steps(n); step++)
        for (int rank = 0; rank < n; rank++) {
            int to = sr_tree_sends_to(rank, step), from = sr_tree_receives_from(rank, n, step);
            CHECK(to < 0 || from < 0); /* one message for each rank and step */
            CHECK(to < 0 || sr_tree_receives_from(to, n, step) == rank);
            CHECK(from < 0 || sr_tree_sends_to(from, step) == rank);
            if (to >= 0)
                for (int source = 0; source < n; source++)
                    held[to][0][source] += held[rank][0][source];
        }
}

static void descend_tree(int n)
{
    for (int step = sr_tree_steps(n) - 1; step >= 0; step--)
        for (int rank = 0; rank < n; rank++) {
            int to = sr_tree_receives_from(rank, n, step);
            if (to < 0)
                continue;
            CHECK(holds_all_once(rank, 0, n));
            memcpy(held[to][0], held[rank][0], sizeof held[to][0]);
        }
}

static void test_tree_brings_every_contribution_everywhere_once(void)
{
    for (int n = 1; n <= MOST_RANKS; n++) {
        deal_tokens(n);
        climb_tree(n);
        CHECK(holds_all_once(0, 0, n));
        descend_tree(n);
        for (int rank = 0; rank < n; rank++)
            CHECK(holds_all_once(rank, 0, n));
    }
}

static void test_every_rank_but_the_root_sends_up_once(void)
{
    for (int n = 1; n <= 1100; n++)
        for (int rank = 0; rank < n; rank++) {
            int sends = 0;
            for (int step = 0; step < sr_tree_steps(n); step++)
                sends += sr_tree_sends_to(rank, step) >= 0;
            CHECK(sends == (rank != 0));
        }
}

static void test_tree_takes_logarithmically_many_steps(void)
{
    static const int steps[][2] = {{1, 0}, {2, 1}, {3, 2}, {4, 2}, {5, 3}, {8, 3}, {9, 4}, {1023, 10}, {1024, 10},
                                   {1025, 11}, {4096, 12}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        CHECK(sr_tree_steps(steps[i][0]) == steps[i][1]);
}

/* ---- double tree ---------------------------------------------------------------------------------------------- */

static void check_double_tree(int n, int tree)
{
    int roots = 0, edges = 0;
    for (int rank = 0; rank < n; rank++) {
        int parent = sr_double_tree_parent(rank, n, tree), children = 0;
        CHECK(sr_double_tree_rank(sr_double_tree_node(rank, n, tree), n, tree) == rank);
        for (int which = 0; which < 2; which++) {
            int child = sr_double_tree_child(rank, n, tree, which);
            CHECK(child < n && (child < 0 || sr_double_tree_parent(child, n, tree) == rank));
            children += child >= 0;
        }
        CHECK((children > 0) == sr_double_tree_is_inner(rank, n, tree));
        int depth = 0;
        for (int above = parent; above >= 0 && depth <= n; above = sr_double_tree_parent(above, n, tree))
            depth++;
        CHECK(depth <= sr_tree_steps(n)); /* so every rank is connected with the root */
        roots += parent < 0;
        edges += children;
    }
    CHECK(roots == 1 && edges == n - 1);
}

static void test_both_trees_span_all_ranks_in_logarithmically_many_steps(void)
{
    for (int n = 2; n <= 1100; n++)
        for (int tree = 0; tree < 2; tree++)
            check_double_tree(n, tree);
}

static void test_leaves_of_one_tree_are_inner_nodes_of_the_other(void)
{
    for (int n = 2; n <= 1100; n++)
        for (int rank = 0; rank < n; rank++) {
            int first = sr_double_tree_is_inner(rank, n, 0), second = sr_double_tree_is_inner(rank, n, 1);
            CHECK(first != second || (rank == 0 && n % 2 == 1));
            CHECK(!(first && second) || sr_double_tree_parent(rank, n, 0) < 0);
        }
}

/* As in NCCL 2.4: 14 ranks. */
static void test_the_double_tree_is_the_published_one(void)
{
    static const int parent[] = {-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12};
    for (int rank = 0; rank < 14; rank++) {
        CHECK(sr_double_tree_parent(rank, 14, 0) == parent[rank]);
        CHECK(sr_double_tree_parent(13 - rank, 14, 1) == (rank == 0 ? -1 : 13 - parent[rank]));
    }
}

int main(void)
{
    check_begin("slices cover exactly and differ by one");
    test_slices_cover_exactly_and_differ_by_one();
    check_begin("grained slices cover exactly and meet at grains");
    test_grained_slices_cover_exactly_and_meet_at_grains();
    check_begin("ring brings every contribution everywhere once");
    test_ring_brings_every_contribution_everywhere_once();
    check_begin("the ring of four ranks is the published one");
    test_ring_of_four_is_the_published_one();
    check_begin("a mirrored ring goes in the opposite direction");
    test_a_mirrored_ring_goes_the_other_way();
    check_begin("halving brings every contribution everywhere once");
    test_halving_brings_every_contribution_everywhere_once();
    check_begin("tree brings every contribution everywhere once");
    test_tree_brings_every_contribution_everywhere_once();
    check_begin("every rank but the root sends up once");
    test_every_rank_but_the_root_sends_up_once();
    check_begin("tree takes logarithmically many steps");
    test_tree_takes_logarithmically_many_steps();
    check_begin("both trees span all ranks in logarithmically many steps");
    test_both_trees_span_all_ranks_in_logarithmically_many_steps();
    check_begin("leaves of one tree are inner nodes of the other");
    test_leaves_of_one_tree_are_inner_nodes_of_the_other();
    check_begin("the double tree is the published one");
    test_the_double_tree_is_the_published_one();
    return 0;
}
