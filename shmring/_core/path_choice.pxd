# Data go through slots, or other ranks read them in place: shared arrays as these ranks map them, private ones by
# single copies through the kernel, unless they are reduced. A table of sizes cannot know which is faster: slots are
# faster for data that were just written, reading in place for data that were not. The results have the same bits either
# way. So one rank chooses by trials (path_trials.pxd).
#
# If one rank alone gives data, that rank chooses. It takes the path at once: the other ranks see in its call line where
# the data are. In other calls rank 0 chooses, and all ranks must take the same path. So rank 0 writes into its
# descriptor of each call the path of the next call of the class.

from libc.stddef cimport size_t

from .group cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, AUTO, BROADCAST, GATHER, REDUCE, REDUCE_SCATTER, SCATTER, Call, Group, is_moved,
    is_scan, is_sliced, takes,
)
from .path_trials cimport (
    FASTEST_CALL, MEAN_CALL, MEAN_ON_SHARED_CPUS, MOST_PATIENCE, READ_IN_PLACE, THROUGH_SLOTS, WINDOW_CALLS, PathTrials,
    Timing, init_trials, note_call, note_distance, size_class,
)


cdef enum:
    LEAST_SHARED_NBYTES = 8 << 10     # of a piece in a shared array, ...
    LEAST_BROADCAST_NBYTES = 2 << 10  # ... in a broadcast, ...
    LEAST_SLICED_NBYTES = 16 << 10    # ... in an all_reduce or reduce, ...
    LEAST_PRIVATE_NBYTES = 32 << 10   # ... and of a piece in a private one
    FIRST_SHARED_CALLS = 64   # shared arrays are read in place so often before the first trial
    MOST_CALL_GAPS = 4   # the gap before a call counts at most so many times the time of the call
    NOBODY = -1


# True if one rank alone gives data.
cdef inline bint has_one_giver(const Group *g, const Call *c) noexcept nogil:
    return c.kind == BROADCAST or c.kind == SCATTER or (g.size == 2 and (c.kind == GATHER or is_scan(c)))


# Return the rank that chooses the path of a call: the one that alone gives data, or rank 0 if all ranks await each
# other's lines. On shared CPUs they do not in a reduce. NOBODY: the path is not measured.
cdef inline int chooser_of(const Group *g, const Call *c) noexcept nogil:
    if has_one_giver(g, c):
        return 1 - c.root if c.kind == GATHER else c.root   # the root of a scan is 0
    if c.kind == ALL_REDUCE or c.kind == REDUCE_SCATTER or c.kind == ALL_GATHER or c.kind == ALL_TO_ALL:
        return 0
    if c.kind == REDUCE and not g.oversubscribed:
        return 0
    return NOBODY


# Return the least length of pieces whose path is measured. It is less in a broadcast, whose root does not wait until
# the others have read if the data go through slots: 4 and 6 KiB that are written before each call then take 0.7 of the
# time in place (bench/peers/matrix.py). On shared CPUs shorter pieces than g.zero_copy_nbytes count as private.
cdef inline size_t least_measured(const Call *c, bint shared) noexcept nogil:
    if not shared:
        return LEAST_PRIVATE_NBYTES
    if c.kind == BROADCAST:
        return LEAST_BROADCAST_NBYTES
    return LEAST_SLICED_NBYTES if is_sliced(c) else LEAST_SHARED_NBYTES


# Return the trials that hold for the call, or NULL if this rank uses none.
cdef inline PathTrials *trials_of(Group *g, const Call *c) noexcept nogil:
    cdef bint shared = c.x_block != 0
    cdef int chooser
    if c.nbytes < least_measured(c, shared) or c.given != NULL or c.algorithm != AUTO:
        return NULL
    chooser = chooser_of(g, c)
    if (chooser == NOBODY or not g.tuning.single_copy_measured or (has_one_giver(g, c) and chooser != g.rank)
            or not (shared or (g.single_copy and is_moved(g, c)))
            or (is_sliced(c) and takes(c, g.rank) and c.out_block == 0)):   # never in place
        return NULL
    return &g.path_trials[shared][c.kind][size_class(c.nbytes)]


# On every rank: begin to measure the class of a call: shared arrays are first read in place, private ones are not.
cdef inline void begin_path(const Group *g, const Call *c) noexcept nogil:
    cdef bint shared = c.x_block != 0
    init_trials(c.trials, READ_IN_PLACE if shared else THROUGH_SLOTS, g.far, c.nbytes,
                FIRST_SHARED_CALLS if shared else WINDOW_CALLS, MOST_CALL_GAPS, g.staging_nbytes,
                MOST_PATIENCE if is_sliced(c) else 1)
    c.trials.in_place = shared


# True if the time of a call includes the wait for other ranks' lines: for a rank that alone gives data, since the
# others copy the data of the call before in that time; in a reduce, since the root folds in it.
cdef inline bint counts_waits(const Group *g, const Call *c) noexcept nogil:
    return has_one_giver(g, c) or c.kind == REDUCE


cdef inline Timing timing_of(const Group *g, const Call *c) noexcept nogil:
    if g.oversubscribed:
        return MEAN_ON_SHARED_CPUS
    return MEAN_CALL if counts_waits(g, c) else FASTEST_CALL


# The chooser: note a call that has ended. A rank that alone gives data takes the new path in its next call, since no
# other rank has to know the path in advance.
cdef inline void note_path(const Group *g, const Call *c, bint in_place) noexcept nogil:
    if not g.oversubscribed:   # else the distance changes with every switch between ranks
        note_distance(c.trials, c.nbytes, g.far)
    note_call(c.trials, timing_of(g, c), READ_IN_PLACE if in_place else THROUGH_SLOTS, c.nbytes, c.begin_ns, c.gap_ns)
    if has_one_giver(g, c):
        c.trials.in_place = c.trials.path
