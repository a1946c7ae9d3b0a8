# The C declarations of schedule.h: the steps of the algorithms that have a name.


cdef extern from "schedule.h" nogil:
    size_t sr_slice_begin(size_t count, int n, int index)
    size_t sr_slice_begin_grained(size_t count, int n, int index, size_t grain)
    int sr_ring_from(int rank, int n)
    int sr_ring_reduce_slice(int rank, int n, int step)
    int sr_ring_gather_slice(int rank, int n, int step)
    int sr_ring_mirrored(int rank, int n)
    int sr_tree_steps(int n)
    int sr_tree_sends_to(int rank, int step)
    int sr_tree_receives_from(int rank, int n, int step)
    int sr_halving_steps(int n)
    int sr_halving_peer(int rank, int steps, int step)
    int sr_halving_keeps(int rank, int steps, int step)
    bint sr_double_tree_is_inner(int rank, int n, int tree)
    int sr_double_tree_parent(int rank, int n, int tree)
    int sr_double_tree_child(int rank, int n, int tree, int which)
