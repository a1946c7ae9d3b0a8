# Chunks and slots: the division of a message into chunks, their places in the staging buffers, and the credit for these
# places.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from .group cimport (
    PROGRESSED, Call, Cursor, Group, begin_call, blocked_on, counter, gives, is_before, is_folded, publish,
    publish_line,
)
from .kernels cimport SR_AVG, SR_SUM
from .segment cimport (
    SR_BEFORE_RELEASE, SR_CACHE_LINE, SR_COPIED, SR_FAULT, SR_LINE, sr_flag_load, sr_flag_reached,
    sr_prefetch_for_write, sr_tuning,
)


# Round nbytes down to whole items, to one item at least.
cdef inline size_t whole_items(Call *c, size_t nbytes) noexcept nogil:
    return nbytes - nbytes % c.itemsize if nbytes > c.itemsize else c.itemsize


# True if this call goes from the last chunk to the first, as every other call does. It then begins with the data that
# the call before, or the user who wrote x since, has left in the cache. If all calls went in one direction, calls on
# arrays a little longer than the cache would find nothing of them there. This saves an eighth of an all_reduce of 1 MiB
# out of place (bench/peers/peers.py).
cdef inline bint goes_backwards(const Call *c) noexcept nogil:
    return c.seq & 1 and c.chunk_nbytes < c.nbytes


# The bytes of the next chunk of a stage. The last chunk of a message may be shorter than the others.
cdef inline size_t next_chunk(const Call *c, const Cursor *cursor) noexcept nogil:
    if c.backwards and cursor.offset == 0:
        return (c.nbytes - 1) % c.chunk_nbytes + 1
    return min(c.nbytes - cursor.offset, c.chunk_nbytes)


# The offset in the arrays at which that chunk begins.
cdef inline size_t next_begin(const Call *c, const Cursor *cursor) noexcept nogil:
    return c.nbytes - cursor.offset - next_chunk(c, cursor) if c.backwards else cursor.offset


cdef inline uint64_t slot_nbytes(size_t nbytes) noexcept nogil:
    return (nbytes + SR_LINE - 1) & ~<uint64_t> (SR_LINE - 1)


cdef enum:
    WINDOW_SLOTS = 4     # CACHED_SLOTS of shmring/_config/thresholds.py
    SWAPPING_RANKS = 2   # so many ranks swap whole staging buffers: swapped_slot


# True if two ranks swap their staging buffers with each lap: both stage. Data in one direction gain nothing by it.
cdef inline bint swaps_buffers(const Group *g, const Call *c) noexcept nogil:
    return g.size == SWAPPING_RANKS and gives(g, c, 0) and gives(g, c, 1)


# The part of the staging buffer that messages use which keep to a few slots.
cdef inline uint64_t window_nbytes_of(const sr_tuning *tuning) noexcept nogil:
    return WINDOW_SLOTS * slot_nbytes(tuning.cached_chunk_nbytes + SR_CACHE_LINE)


# True if a message keeps to a few slots, the window. Between far cores that is faster: a whole staging buffer fills a
# private L2 and leaves no room for the arrays. Near cores should not write at once to lines that other cores have just
# read. Two ranks that swap buffers keep to the window with messages of any length, since a swapped buffer helps most
# while it is cached.
cdef inline bint keeps_to_window(const Group *g, const Call *c, size_t nbytes) noexcept nogil:
    cdef bint is_worth_it = swaps_buffers(g, c) or nbytes > g.tuning.one_chunk_nbytes
    return g.far and is_worth_it and c.nbytes <= g.tuning.cached_most_nbytes


# The begin of a slot of nbytes that lies at `position` or after it, and within the first window_nbytes of the buffer.
cdef inline uint64_t slot_begin_within(Group *g, uint64_t position, size_t nbytes, size_t window_nbytes) noexcept nogil:
    cdef uint64_t offset = position & (g.lap_nbytes - 1)
    return position if offset + slot_nbytes(nbytes) <= window_nbytes else position - offset + g.lap_nbytes


cdef inline uint64_t slot_begin(Group *g, uint64_t position, size_t nbytes) noexcept nogil:
    return slot_begin_within(g, position, nbytes, g.ring_nbytes)


cdef inline uint64_t slot_end(Group *g, uint64_t position, size_t nbytes) noexcept nogil:
    return slot_begin(g, position, nbytes) + slot_nbytes(nbytes)


cdef inline unsigned char *slot(Group *g, int rank, uint64_t begin) noexcept nogil:
    return g.ring[rank] + (begin & (g.lap_nbytes - 1))


# True if more than two ranks may stage in each other's slots. Ranks that share CPUs may not: one of them may go ahead,
# and read what a rank has staged before it is known whether the others make the same call.
cdef inline bint may_swap(const Group *g) noexcept nogil:
    return not g.oversubscribed


# The slot of a rank whose pieces other ranks take. Two ranks that both give data swap staging buffers with each lap. So
# a rank stages to lines that it has read before and holds in its cache: only data move between the cores, no lines that
# are to be overwritten. An all_reduce of 64 KiB between far cores takes 0.8 of the time (bench/peers/peers.py).
cdef inline unsigned char *swapped_slot(Group *g, Call *c, int rank, uint64_t begin) noexcept nogil:
    cdef bint are_swapped = swaps_buffers(g, c) and begin & g.lap_nbytes != 0
    return slot(g, 1 - rank if are_swapped else rank, begin)


# True if no rank still reads the memory to which this rank writes up to `end`. This rank is one of the readers: ranks
# swap places, and find results in their own slots. Pairs with give_credit.
cdef inline bint has_credit(Group *g, uint64_t end) noexcept nogil:
    cdef uint64_t needed = end - g.lap_nbytes
    cdef uint64_t seen
    cdef int rank
    if not is_before(g.credit, needed):
        return True
    g.credit = end
    for rank in range(g.size):
        seen = sr_flag_load(counter(g, rank, SR_COPIED))
        if is_before(seen, g.credit):
            g.credit = seen
    return not is_before(g.credit, needed)


# Block on the first rank that has not given credit. For a rank that can do nothing else, not even read. Pairs with
# give_credit.
cdef inline int blocked_on_credit(Group *g, Call *c, uint64_t end) noexcept nogil:
    cdef uint64_t needed = end - g.lap_nbytes
    cdef int rank
    for rank in range(g.size):
        if rank != g.rank and not sr_flag_reached(counter(g, rank, SR_COPIED), needed):
            return blocked_on(c, counter(g, rank, SR_COPIED), needed, rank)
    return PROGRESSED


# Give credit up to `position`: this rank reads nothing before it any more. Published, since a writer may sleep on it.
# Pairs with has_credit and blocked_on_credit.
cdef inline void give_credit(Group *g, uint64_t position) noexcept nogil:
    SR_FAULT(SR_BEFORE_RELEASE)
    publish(g, SR_COPIED, position)


# ---- folding and streaming -----------------------------------------------------------------------------------

# True if the result is written by streaming stores, which bypass the cache. They save no load in new pages, which the
# kernel has just cleared, nor in place, where the line has just been read.
cdef inline uint32_t streams_out(Group *g, Call *c) noexcept nogil:
    if c.out_is_new:
        return False
    if is_folded(c) and c.x == c.out:
        return c.out_nbytes >= g.tuning.stream_in_place_nbytes
    return c.out_nbytes >= g.tuning.stream_out_nbytes


# One of several successive folds of the same data. For an average, all folds but the last only sum.
cdef inline void fold_hop(Group *g, Call *c, int nsources, int ntargets, uint32_t stream, size_t count,
                          bint last) noexcept nogil:
    cdef int op = SR_SUM if c.op == SR_AVG and not last else c.op
    if count > 0:
        g.kernels.fold[c.dtype][op](g.target, ntargets, stream, g.source, nsources, count, g.size)


cdef enum:
    PREFETCH_NBYTES = 4 << 10


# Fold all sources, and prefetch for write the lines of one target, which other ranks have read before. Requesting many
# lines at once takes a tenth off an all_reduce of 1 MiB between far cores, and a fifth if they have just read the
# target (bench/peers/peers.py).
cdef inline void fold_prefetching(Group *g, Call *c, int ntargets, int prefetched, size_t nbytes) noexcept nogil:
    cdef size_t done = 0
    cdef size_t part
    cdef int i
    while done < nbytes:   # each part ends with a line, if a line ends between two items
        part = whole_items(c, PREFETCH_NBYTES - (<uintptr_t> g.target[prefetched] & (SR_CACHE_LINE - 1)))
        part = min(part, nbytes - done)
        sr_prefetch_for_write(g.target[prefetched], part)
        g.kernels.fold[c.dtype][c.op](g.target, ntargets, 0, g.source, g.size, part // c.itemsize, <uint32_t> g.size)
        for i in range(ntargets):
            g.target[i] = <unsigned char *> g.target[i] + part
        for i in range(g.size):
            g.source[i] = <const unsigned char *> g.source[i] + part
        done += part


# Copy data that a far core has written. More lines are under way at once if two places are read in turn: this saves a
# sixth of a broadcast of 64 KiB to 1 MiB, and a twentieth of an all_reduce (bench/peers/peers.py).
cdef inline void copy_from_far(Group *g, unsigned char *to, const unsigned char *there, size_t nbytes,
                               uint32_t stream) noexcept nogil:
    cdef size_t half = nbytes // 2 & ~<size_t> (SR_CACHE_LINE - 1)
    if stream or not g.far or half == 0 or nbytes >= g.tuning.far_stream_nbytes:   # no core holds streamed lines
        g.kernels.copy(to, there, nbytes, stream)
        return
    g.kernels.copy_two(to, there, 0, to + half, there + half, 0, half)
    g.kernels.copy(to + 2 * half, there + 2 * half, nbytes - 2 * half, 0)


# Begin a call of an algorithm that the caller has named.
# `slots`: the number of slots of a chunk that must fit into the staging buffer. Half of them may be skipped at its end.
cdef inline void begin_stepped(Group *g, Call *c, int slots) noexcept nogil:
    begin_call(g, c)
    publish_line(g, c)
    c.chunk_nbytes = whole_items(c, min(<size_t> g.tuning.chunk_nbytes, g.ring_nbytes // slots))
    c.stage.position = c.fold.position = c.down.position = c.copy.position = g.position
    c.stage.offset = c.fold.offset = c.down.offset = c.copy.offset = 0
    c.fold_peer = 0
