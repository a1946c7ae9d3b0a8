# Chunks and slots: how a message is cut, where in the staging buffers its chunks lie, and when a place is free again.

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


cdef inline size_t whole_items(Call *c, size_t nbytes) noexcept nogil:
    return nbytes - nbytes % c.itemsize if nbytes > c.itemsize else c.itemsize


# Every other call goes from the last chunk to the first, and so begins with what the one before it, or who wrote x
# since, has left in the cache: calls on arrays that are a little longer than that, one after the other, would find
# nothing of them there if all went one way. An eighth of an all_reduce of 1 MiB to another place
# (bench/peers/peers.py).
cdef inline bint goes_backwards(const Call *c) noexcept nogil:
    return c.seq & 1 and c.chunk_nbytes < c.nbytes


# Bytes of the chunk that a stage comes to next: a message's last one may be shorter than the others.
cdef inline size_t next_chunk(const Call *c, const Cursor *cursor) noexcept nogil:
    if c.backwards and cursor.offset == 0:
        return (c.nbytes - 1) % c.chunk_nbytes + 1
    return min(c.nbytes - cursor.offset, c.chunk_nbytes)


# Where in the arrays it begins.
cdef inline size_t next_begin(const Call *c, const Cursor *cursor) noexcept nogil:
    return c.nbytes - cursor.offset - next_chunk(c, cursor) if c.backwards else cursor.offset


cdef inline uint64_t slot_nbytes(size_t nbytes) noexcept nogil:
    return (nbytes + SR_LINE - 1) & ~<uint64_t> (SR_LINE - 1)


cdef enum:
    WINDOW_SLOTS = 4   # CACHED_SLOTS of shmring/_config/thresholds.py
    TRADERS = 2        # so many ranks trade places to write to, see traded_slot and slice_result of direct


# Whether both stage: what goes one way gains nothing by it.
cdef inline bint trades(const Group *g, const Call *c) noexcept nogil:
    return g.size == TRADERS and gives(g, c, 0) and gives(g, c, 1)


# How much of the ring messages go through that keep to a few slots.
cdef inline uint64_t window_nbytes_of(const sr_tuning *tuning) noexcept nogil:
    return WINDOW_SLOTS * slot_nbytes(tuning.cached_chunk_nbytes + SR_CACHE_LINE)


# Between far cores a few slots in a private L2 beat a ring that fills it, which leaves nothing of it to the arrays that
# go by; near ones had better not write again at once what the others have just read. Who trades does it with messages
# of any length: what is traded is worth most where it is still cached.
cdef inline bint keeps_to_window(const Group *g, const Call *c, size_t nbytes) noexcept nogil:
    cdef bint is_worth_it = trades(g, c) or nbytes > g.tuning.one_chunk_nbytes
    return g.far and is_worth_it and c.nbytes <= g.tuning.cached_most_nbytes


# Where a slot of nbytes begins that lies at `position` or after it and in the ring's first bytes, `window_nbytes`.
cdef inline uint64_t slot_begin_within(Group *g, uint64_t position, size_t nbytes, size_t window_nbytes) noexcept nogil:
    cdef uint64_t offset = position & (g.lap_nbytes - 1)
    return position if offset + slot_nbytes(nbytes) <= window_nbytes else position - offset + g.lap_nbytes


cdef inline uint64_t slot_begin(Group *g, uint64_t position, size_t nbytes) noexcept nogil:
    return slot_begin_within(g, position, nbytes, g.ring_nbytes)


cdef inline uint64_t slot_end(Group *g, uint64_t position, size_t nbytes) noexcept nogil:
    return slot_begin(g, position, nbytes) + slot_nbytes(nbytes)


cdef inline unsigned char *slot(Group *g, int rank, uint64_t begin) noexcept nogil:
    return g.ring[rank] + (begin & (g.lap_nbytes - 1))


# The slot of a rank whose pieces others take: of two ranks that both give, these swap rings with each lap. What a rank
# has read there, and so has in its cache, is what it stages to next, and only data change cores, no lines that are to
# take them: an all_reduce of 64 KiB between far cores takes 0.8 of the time (bench/peers/peers.py).
cdef inline unsigned char *traded_slot(Group *g, Call *c, int rank, uint64_t begin) noexcept nogil:
    cdef bint are_traded = trades(g, c) and begin & g.lap_nbytes != 0
    return slot(g, 1 - rank if are_traded else rank, begin)


# Nobody reads any more what lay where the bytes up to `end` will be written: no other rank, and of two that trade not
# this one either.
cdef inline bint has_credit(Group *g, uint64_t end) noexcept nogil:
    cdef uint64_t needed = end - g.lap_nbytes
    cdef uint64_t seen
    cdef int rank
    if not is_before(g.credit, needed):
        return True
    g.credit = end
    for rank in range(g.size):
        if rank != g.rank or g.size == TRADERS:
            seen = sr_flag_load(counter(g, rank, SR_COPIED))
            if is_before(seen, g.credit):
                g.credit = seen
    return not is_before(g.credit, needed)


# For a rank that has nothing else to do, not even to read: wait for the first rank that withholds credit.
cdef inline int blocked_on_credit(Group *g, Call *c, uint64_t end) noexcept nogil:
    cdef uint64_t needed = end - g.lap_nbytes
    cdef int rank
    for rank in range(g.size):
        if rank != g.rank and not sr_flag_reached(counter(g, rank, SR_COPIED), needed):
            return blocked_on(c, counter(g, rank, SR_COPIED), needed, rank)
    return PROGRESSED


# The ring up to `position` is free as far as this rank is concerned. Published, since a writer may sleep on it.
cdef inline void give_credit(Group *g, uint64_t position) noexcept nogil:
    SR_FAULT(SR_BEFORE_RELEASE)
    publish(g, SR_COPIED, position)


# ---- folding and streaming -----------------------------------------------------------------------------------

# Whether what a rank gets goes past the cache. Where it is folded in place that saves no load, as the line has just
# been read, and in new pages none either: the kernel has just cleared them.
cdef inline uint32_t streams_out(Group *g, Call *c) noexcept nogil:
    if c.out_is_new:
        return False
    if is_folded(c) and c.x == c.out:
        return c.out_nbytes >= g.tuning.stream_in_place_nbytes
    return c.out_nbytes >= g.tuning.stream_out_nbytes


# One of several folds of the same data, from hop to hop: of an average all but the last only sum.
cdef inline void fold_hop(Group *g, Call *c, int nsources, int ntargets, uint32_t stream, size_t count,
                          bint last) noexcept nogil:
    cdef int op = SR_SUM if c.op == SR_AVG and not last else c.op
    if count > 0:
        g.kernels.fold[c.dtype][op](g.target, ntargets, stream, g.source, nsources, count, g.size)


cdef enum:
    PREFETCH_NBYTES = 4 << 10


# A fold of all sources of which one target has been read by others before: asking for many of its lines at once takes
# a tenth off an all_reduce of 1 MiB between far cores, a fifth if they have just read it (bench/peers/peers.py).
cdef inline void fold_prefetching(Group *g, Call *c, int ntargets, int prefetched, size_t nbytes) noexcept nogil:
    cdef size_t done = 0
    cdef size_t part
    cdef int i
    while done < nbytes:   # up to the end of a line, where that is between two items
        part = whole_items(c, PREFETCH_NBYTES - (<uintptr_t> g.target[prefetched] & (SR_CACHE_LINE - 1)))
        part = min(part, nbytes - done)
        sr_prefetch_for_write(g.target[prefetched], part)
        g.kernels.fold[c.dtype][c.op](g.target, ntargets, 0, g.source, g.size, part // c.itemsize, <uint32_t> g.size)
        for i in range(ntargets):
            g.target[i] = <unsigned char *> g.target[i] + part
        for i in range(g.size):
            g.source[i] = <const unsigned char *> g.source[i] + part
        done += part


# Of lines that a far core holds more are on their way if two places are read in turn: a sixth of a broadcast of 64 KiB
# to 1 MiB, a twentieth of an all_reduce (bench/peers/peers.py).
cdef inline void copy_from_far(Group *g, unsigned char *to, const unsigned char *there, size_t nbytes,
                               uint32_t stream) noexcept nogil:
    cdef size_t half = nbytes // 2 & ~<size_t> (SR_CACHE_LINE - 1)
    if stream or not g.far or half == 0 or nbytes >= g.tuning.far_stream_nbytes:   # what was streamed nobody holds
        g.kernels.copy(to, there, nbytes, stream)
        return
    g.kernels.copy_two(to, there, 0, to + half, there + half, 0, half)
    g.kernels.copy(to + 2 * half, there + 2 * half, nbytes - 2 * half, 0)


# Begin a call of an algorithm that the caller has named.
# `slots`: how many slots of a chunk must fit into the staging buffer. Half of them may be skipped at its end.
cdef inline void begin_stepped(Group *g, Call *c, int slots) noexcept nogil:
    begin_call(g, c)
    publish_line(g, c)
    c.chunk_nbytes = whole_items(c, min(<size_t> g.tuning.chunk_nbytes, g.ring_nbytes // slots))
    c.stage.position = c.fold.position = c.down.position = c.copy.position = g.position
    c.stage.offset = c.fold.offset = c.down.offset = c.copy.offset = 0
    c.fold_peer = 0
