# Chunks and slots: the division of a message into chunks, their places in the staging buffers, and the credit for these
# places. Which places and which order are best for the caches: placement.pxd.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from .group cimport (
    PROGRESSED, Call, Cursor, Group, begin_call, blocked_on, counter, is_before, keeps_single, publish, publish_line,
)
from .kernels cimport SR_AVG, SR_SUM
from .segment cimport (
    SR_BEFORE_RELEASE, SR_CACHE_LINE, SR_COPIED, SR_FAULT, SR_LINE, sr_flag_load, sr_flag_reached,
)


# Round nbytes down to whole items, to one item at least.
cdef inline size_t whole_items(Call *c, size_t nbytes) noexcept nogil:
    return nbytes - nbytes % c.itemsize if nbytes > c.itemsize else c.itemsize


cdef enum:
    LEAST_REDUCED_NBYTES = 32 << 10
    MOST_REDUCED_NBYTES = 128 << 10


# The length of a chunk of a reduce that other calls would move as one chunk. Data go one way, so the root folds or
# copies a chunk while other ranks stage or fold the next. If calls are apart, 64 to 256 KiB between two ranks then take
# 0.6 to 0.8 of the time; if they follow each other, up to a twelfth longer. Whole lines are whole items.
cdef inline size_t chunk_of_reduce(const Call *c) noexcept nogil:
    cdef size_t quarter = max(min(c.nbytes // 4, <size_t> MOST_REDUCED_NBYTES), <size_t> LEAST_REDUCED_NBYTES)
    return min(c.nbytes, quarter & ~<size_t> (SR_CACHE_LINE - 1))


# The bytes of the next chunk of a stage. The last chunk of a message may be shorter than the others.
cdef inline size_t next_chunk(const Call *c, const Cursor *cursor) noexcept nogil:
    if c.backwards and cursor.offset == 0:
        return (c.nbytes - 1) % c.chunk_nbytes + 1
    return min(c.nbytes - cursor.offset, c.chunk_nbytes)


# The offset in the arrays at which that chunk begins.
cdef inline size_t next_begin(const Call *c, const Cursor *cursor) noexcept nogil:
    return c.nbytes - cursor.offset - next_chunk(c, cursor) if c.backwards else cursor.offset


# Round nbytes up to whole cache lines.
cdef inline size_t whole_lines(size_t nbytes) noexcept nogil:
    return (nbytes + SR_CACHE_LINE - 1) & ~<size_t> (SR_CACHE_LINE - 1)


cdef inline uint64_t slot_nbytes(size_t nbytes) noexcept nogil:
    return (nbytes + SR_LINE - 1) & ~<uint64_t> (SR_LINE - 1)


# The begin of a slot of nbytes that lies at `position` or after it, and within the first window_nbytes of the buffer.
cdef inline uint64_t slot_begin_within(Group *g, uint64_t position, size_t nbytes, size_t window_nbytes) noexcept nogil:
    cdef uint64_t offset = position & (g.lap_nbytes - 1)
    return position if offset + slot_nbytes(nbytes) <= window_nbytes else position - offset + g.lap_nbytes


cdef inline uint64_t slot_begin(Group *g, uint64_t position, size_t nbytes) noexcept nogil:
    return slot_begin_within(g, position, nbytes, g.staging_nbytes)


cdef inline uint64_t slot_end(Group *g, uint64_t position, size_t nbytes) noexcept nogil:
    return slot_begin(g, position, nbytes) + slot_nbytes(nbytes)


# Return the begin of the slot of the next chunk of a stage.
cdef inline uint64_t cursor_slot(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return slot_begin(g, cursor.position, next_chunk(c, cursor))


cdef inline uint64_t cursor_end(Group *g, Call *c, Cursor *cursor) noexcept nogil:
    return slot_end(g, cursor.position, next_chunk(c, cursor))


cdef inline unsigned char *slot(Group *g, int rank, uint64_t begin) noexcept nogil:
    return g.staging[rank] + (begin & (g.lap_nbytes - 1))


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


# Block on the first rank that has not given credit. The caller has nothing else to do: not even data to read, for which
# other ranks may wait. PROGRESSED if all ranks have given credit meanwhile. Pairs with give_credit.
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


# Fold the items of the sources into every target. The data of a single source are copied, unless the op changes them:
# the loop for one source is slow, and in place there is nothing to do. divisor: of an average.
cdef inline void fold_sources(Group *g, Call *c, int op, int nsources, int ntargets, uint32_t stream, size_t count,
                              uint32_t divisor) noexcept nogil:
    cdef int i
    if nsources == 1 and keeps_single(c) and (op != SR_AVG or divisor == 1):
        for i in range(ntargets):
            if g.target[i] != g.source[0]:
                g.kernels.copy(g.target[i], g.source[0], count * c.itemsize, stream >> i & 1)
    elif count > 0:
        g.kernels.fold[c.dtype][op](g.target, ntargets, stream, g.source, nsources, count, divisor)


# One of several successive folds of the same data. For an average, all folds but the last only sum.
cdef inline void fold_hop(Group *g, Call *c, int nsources, int ntargets, uint32_t stream, size_t count,
                          bint last) noexcept nogil:
    cdef int op = SR_SUM if c.op == SR_AVG and not last else c.op
    fold_sources(g, c, op, nsources, ntargets, stream, count, g.size)


# ---- algorithms that the caller has named ----------------------------------------------------------------------

# Begin a call of an algorithm that the caller has named.
# slots_per_chunk: the number of slots of a chunk that must fit into the staging buffer. Half of them may be skipped at
# its end.
cdef inline void begin_named(Group *g, Call *c, int slots_per_chunk) noexcept nogil:
    begin_call(g, c)
    publish_line(g, c)
    c.chunk_nbytes = whole_items(c, min(<size_t> g.tuning.chunk_nbytes, g.staging_nbytes // slots_per_chunk))
    c.stage.position = c.fold.position = c.down.position = c.copy.position = g.position
    c.stage.offset = c.fold.offset = c.down.offset = c.copy.offset = 0
    c.fold_peer = 0
