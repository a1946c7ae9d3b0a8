# The descriptors in the call lines of direct, staged and chain calls: the places of the arrays, the distance that
# rank 0 announces, and the path of the next call.

from libc.stdint cimport uint32_t, uintptr_t

from .core_distance cimport begin_ping, step_ping
from .group cimport (
    AUTO, DONE, SINGLE_COPY, ZERO_COPY, Call, Group, await_lines, count_path, gives, gives_in_place, is_sliced, line_of,
    set_far, takes,
)
from .path_choice cimport begin_path, chooser_of, counts_waits, has_one_giver, note_path, trials_of
from .path_trials cimport is_timed
from .segment cimport SR_CACHE_LINE, SR_PRIVATE, sr_descriptor, sr_now_ns
from .single_copy cimport can_be_read, is_worth_single_copy


cdef enum:
    CLOCK_CALLS = 64     # small calls between two readings of the clock, one of which costs a twentieth of a call


cdef inline sr_descriptor *descriptor(Group *g, Call *c, int rank) noexcept nogil:
    return <sr_descriptor *> line_of(g, rank, c.seq).payload


# True if `rank` offers its arrays in place; it has then staged nothing before its line. Its x, if other ranks read it,
# is shared, or private and readable; its out, if other ranks put results into it (all_reduce, reduce), is shared.
cdef inline bint offers_in_place(Group *g, Call *c, int rank) noexcept nogil:
    cdef sr_descriptor *theirs = descriptor(g, c, rank)
    if c.algorithm != AUTO or (theirs.x_block == 0 and gives_in_place(g, c, rank)):
        return False
    return theirs.out_block != 0 or not is_sliced(c) or not takes(c, rank)


# The skew of this call's slots: data that have the same offset in a cache line as in the user's array are moved by
# whole lines on both sides. This saves a fifth of the time between far cores, and a twentieth between near ones
# (bench/peers/peers.py, 1 MiB; large arrays of NumPy begin 16 bytes into a line). Only slices have a skew, whose items
# have 1, 2, 4, 8 or 16 bytes.
cdef inline uint32_t skew_of(Call *c) noexcept nogil:
    cdef uint32_t skew = <uint32_t> (<uintptr_t> c.out & (SR_CACHE_LINE - 1))
    return skew if skew & (c.itemsize - 1) == 0 else 0


# True if rank 0 may announce something about the distance in this call: all ranks then wait for its line. That costs
# little in a large call, unless ranks share CPUs: a broadcast of 64 KiB to 4 ranks is a fifth faster without it.
cdef inline bint may_ping(Group *g, Call *c) noexcept nogil:
    cdef bint large = c.nbytes >= g.tuning.ping_nbytes and not g.oversubscribed
    return (large or c.seq % CLOCK_CALLS == 0) and not g.header.forced_path


# Begin a measured call: time it, if this rank chooses the path.
cdef inline void begin_measured(Group *g, Call *c) noexcept nogil:
    if not c.trials.used:
        begin_path(g, c)
    c.runs_trials = chooser_of(g, c) == g.rank
    if c.runs_trials and is_timed(c.trials):
        c.begin_ns = sr_now_ns()
        c.gap_ns = c.begin_ns - c.trials.ended_ns
        c.lines_awaited_ns = 0


# Fill this rank's descriptor, which the caller publishes, and set the call's progress to its begin.
cdef inline void write_descriptor(Group *g, Call *c) noexcept nogil:
    cdef sr_descriptor *mine = descriptor(g, c, g.rank)
    c.trials = trials_of(g, c)
    c.runs_trials = False
    c.begin_ns = 0
    if c.trials != NULL:
        begin_measured(g, c)
    mine.next_in_place = c.trials != NULL and c.trials.path
    mine.x_block = c.x_block if c.trials == NULL or c.trials.in_place else 0
    mine.x_offset = c.x_offset
    mine.out_block = c.out_block
    mine.out_offset = c.out_offset
    if c.x_block == 0 and gives(g, c, g.rank) and is_worth_single_copy(g, c) and can_be_read(g, c.x):
        mine.x_block, mine.x_offset = SR_PRIVATE, <uintptr_t> c.x
    c.single_copy = mine.x_block == SR_PRIVATE
    mine.skew = skew_of(c)
    mine.far = g.far
    mine.ping = 0
    if may_ping(g, c):
        mine.far = g.next_far
        mine.ping = g.rank == 0 and sr_now_ns() - g.pinged_ns >= g.ping_interval_ns
    c.in_place = offers_in_place(g, c, g.rank)
    c.ping = False
    c.has_finished = False
    c.fold_peer = c.copy_peer = 0
    c.stage.offset = c.fold.offset = c.copy.offset = 0
    c.announced = False


# Read the descriptors of all ranks: the call is in place only if every rank offers it. Rank 0's descriptor has the new
# distance, says whether to measure it again, and has the path of the next call, unless one rank alone gives data.
cdef inline void read_descriptors(Group *g, Call *c) noexcept nogil:
    cdef sr_descriptor *rank_0 = descriptor(g, c, 0)
    cdef int rank
    if c.in_place:
        for rank in range(g.size):
            if not offers_in_place(g, c, rank):
                c.in_place = False
    g.announced_far = rank_0.far
    c.ping = rank_0.ping != 0
    if c.trials != NULL and not has_one_giver(g, c):
        c.trials.in_place = rank_0.next_in_place != 0


# Rank 0: leave the wait for other ranks' lines out of the time of a measured call; see counts_waits.
cdef inline void leave_out_wait(Call *c, int status) noexcept nogil:
    if status != DONE and c.lines_awaited_ns == 0:
        c.lines_awaited_ns = sr_now_ns()
    elif status == DONE and c.lines_awaited_ns != 0:
        c.begin_ns += sr_now_ns() - c.lines_awaited_ns


# Return DONE once the lines of all ranks have arrived and agree, and the distance is measured if rank 0 has asked for
# it.
cdef inline int step_lines(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if c.begin_ns and not g.oversubscribed and not counts_waits(g, c):
            leave_out_wait(c, status)
        if status != DONE:
            return status
        read_descriptors(g, c)
        if c.ping:
            begin_ping(g, c)
    if c.ping:
        status = step_ping(g, c)
        if status != DONE:
            return status
        c.ping = False
    return DONE


# End a call: count its path, and note its time if this rank chooses the path of such calls. Set the distance from the
# next call on.
cdef inline void finish(Group *g, Call *c, int path) noexcept nogil:
    count_path(g, path)
    if c.runs_trials:
        note_path(g, c, path == SINGLE_COPY or path == ZERO_COPY)
    if g.far != g.announced_far:
        set_far(g, g.announced_far != 0)
