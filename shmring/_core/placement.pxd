# The policy for caches: where in the staging buffers data are placed, in which order the chunks of a message go, which
# stores bypass the caches, and what is prefetched. It changes speed, and never results. All ranks decide alike, since
# each must find what the others have placed.
#
# Most of it avoids one cost: if one core has read a cache line and another core overwrites it, the old content moves
# between them for nothing.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from .descriptor cimport descriptor
from .group cimport BROADCAST, MASTER, REDUCE, SCATTER, Call, Group, gives, is_folded, is_scan, is_split, piece_for
from .kernels cimport SR_COPY_IN_TURN, SR_COPY_ORDINARY, SR_COPY_STREAMING
from .segment cimport SR_CACHE_LINE, sr_prefetch_for_write, sr_tuning
from .staging cimport slot, slot_begin_within, slot_nbytes, whole_items, whole_lines


# ---- the order of chunks ---------------------------------------------------------------------------------------------

# True if this call goes from the last chunk to the first, as every other call does. It then begins with the data that
# the call before, or the user who wrote x since, has left in the cache. If all calls went in one direction, calls on
# arrays a little longer than the cache would find nothing of them there. This saves an eighth of an all_reduce of 1 MiB
# out of place (bench/peers/peers.py).
cdef inline bint goes_backwards(const Call *c) noexcept nogil:
    return c.seq & 1 and c.chunk_nbytes < c.nbytes


# ---- few slots: the window -------------------------------------------------------------------------------------------

cdef enum:
    WINDOW_SLOTS = 4     # CACHED_SLOTS of shmring/_config/thresholds.py


# True if two ranks swap their staging buffers with each lap: both stage. Data in one direction gain nothing by it.
cdef inline bint swaps_buffers(const Group *g, const Call *c) noexcept nogil:
    return g.size == 2 and gives(g, c, 0) and gives(g, c, 1)


# Return the bytes of the window: the slots that messages use if keeps_to_window.
cdef inline uint64_t window_nbytes_of(const sr_tuning *tuning) noexcept nogil:
    return WINDOW_SLOTS * slot_nbytes(tuning.cached_chunk_nbytes + SR_CACHE_LINE)


# True if a message keeps to a few slots, the window. Between far cores that is faster: a whole staging buffer fills a
# private L2 and leaves no room for the arrays. Near cores should not write at once to lines that other cores have just
# read. Two ranks that both stage also keep to it with messages of one chunk: each stages where it has read before,
# which helps while those lines are cached.
cdef inline bint keeps_to_window(const Group *g, const Call *c, size_t nbytes, bint two_stage) noexcept nogil:
    cdef bint is_worth_it = two_stage or nbytes > g.tuning.one_chunk_nbytes
    return g.far and is_worth_it and c.nbytes <= g.tuning.cached_most_nbytes


# ---- two ranks swap staging buffers ----------------------------------------------------------------------------------

# The slot of a rank whose pieces other ranks take. Two ranks that both give data swap staging buffers with each lap. So
# a rank stages to lines that it has read before and holds in its cache: only data move between the cores, no lines that
# are to be overwritten. An all_reduce of 64 KiB between far cores takes 0.8 of the time (bench/peers/peers.py).
cdef inline unsigned char *swapped_slot(Group *g, Call *c, int rank, uint64_t begin) noexcept nogil:
    cdef bint are_swapped = swaps_buffers(g, c) and begin & g.lap_nbytes != 0
    return slot(g, 1 - rank if are_swapped else rank, begin)


# ---- places of pieces: one slot has the pieces for all ranks ---------------------------------------------------------

# True if more than two ranks may stage in each other's slots. Ranks that share CPUs may not: one of them may go ahead,
# and read what a rank has staged before it is known whether the others make the same call.
cdef inline bint may_swap(const Group *g) noexcept nogil:
    return not g.oversubscribed


# The begin of the taker's piece in a slot: after the pieces of the ranks before it, without the giver, in cache lines.
cdef inline size_t piece_in_slot(int giver, int taker, size_t nbytes) noexcept nogil:
    return <size_t> (taker if taker < giver else taker - 1) * whole_lines(nbytes)


# The bytes of a slot that holds pieces of nbytes.
cdef inline size_t pieces_nbytes(Group *g, Call *c, size_t nbytes) noexcept nogil:
    return <size_t> (g.size - 1) * whole_lines(nbytes) if is_split(c) else nbytes


cdef enum:
    SWAP_PIECES_NBYTES = 16 << 10   # with more than two ranks, pieces from here on


# True if each pair of ranks swaps the places of its pieces with every lap, so that each stages where it has read
# before. A reduce_scatter with pieces of 256 KiB takes 0.85 of the time with 8 and 16 ranks on as many CPUs of a Xeon,
# and 0.7 with 4; with pieces of 4 KiB it would take 1.2 times the time with 4 (bench/peers/matrix.py).
cdef inline bint swaps_pieces(const Group *g, const Call *c) noexcept nogil:
    return c.kind != SCATTER and (g.size == 2 or (c.nbytes >= SWAP_PIECES_NBYTES and may_swap(g)))


# The place of the giver's piece for the taker in a slot.
cdef inline unsigned char *place_of_piece(Group *g, Call *c, int giver, int taker, uint64_t slot_at,
                                          size_t nbytes) noexcept nogil:
    if not is_split(c):
        return swapped_slot(g, c, giver, slot_at)
    if giver != taker and slot_at & g.lap_nbytes != 0 and swaps_pieces(g, c):
        return slot(g, taker, slot_at) + piece_in_slot(taker, giver, nbytes)
    return slot(g, giver, slot_at) + piece_in_slot(giver, taker, nbytes)


# ---- places of slices: large all_reduce and reduce -------------------------------------------------------------------

# Each rank stages its data for the owner of each slice, in its own slot. The owner reads and reduces them, and returns
# the result in one of two ways. Both spare the transfer of lines that a core fetches only to overwrite them.
#
# - An all_reduce of up to WRITING_BACK_RANKS ranks, and every reduce: the owner writes the result over the data that it
#   has just read, and each rank finds all results in its own slot. Thus every line goes from a rank to the owner and
#   back. An all_reduce of 1 MiB takes 0.7 of the time with 2 ranks and 0.83 with 4 ranks on as many CPUs, 0.82 to 0.9
#   with 3 and 4 ranks on 2 CPUs; a reduce with 4 to 16 ranks takes 0.8.
# - More ranks: so many stores would take longer. The owner writes the result once, in its own slot, where all ranks
#   read it. In the window each pair of ranks swaps its two places with every lap, so that each stages where it has read
#   before. An all_reduce of 1 MiB takes 0.87 of the time with 6, 8 and 16 ranks on as many CPUs.
#
# Both were measured on a Xeon with bench/peers/peers.py and shmring.tools.tune.

cdef enum:
    WRITING_BACK_RANKS = 4   # the most ranks of an all_reduce that write results back


cdef inline bint streams_slots(Group *g, Call *c) noexcept nogil:
    return g.far and c.nbytes >= g.tuning.far_stream_nbytes


# True if the owner of a slice writes the result over every rank's data. Lines that are streamed are in no cache, so
# only two ranks do it then. The one owner of the algorithm "master" would write everything several times.
cdef inline bint writes_back(Group *g, Call *c) noexcept nogil:
    if g.size == 2:
        return True
    return ((c.kind == REDUCE or g.size <= WRITING_BACK_RANKS) and c.algorithm != MASTER
            and not streams_slots(g, c))


# True if pairs of ranks may swap places. This adds a line for each slice to a slot, which must be little of the slot.
cdef inline bint may_swap_places(Group *g, Call *c) noexcept nogil:
    cdef size_t added_nbytes = <size_t> g.size * SR_CACHE_LINE
    return (may_swap(g) and not writes_back(g, c) and c.algorithm != MASTER
            and g.tuning.cached_chunk_nbytes >= 16 * added_nbytes)


# The bytes from one place to the next in a slot in which ranks swap places: the longest slice of the chunk, and a line,
# since the data of each rank begin as far into a line as its array.
cdef inline size_t pitch_of(Group *g, size_t nbytes) noexcept nogil:
    cdef size_t nlines = (nbytes + SR_CACHE_LINE - 1) // SR_CACHE_LINE
    return ((nlines + g.size - 1) // g.size + 1) * SR_CACHE_LINE


# The place in which `rank` stages its data for the owner of the slice that begins at `begin`. If `rank` is the owner,
# this is the place of the result, which all ranks read.
cdef inline unsigned char *place_of_slice(Group *g, Call *c, int rank, int owner, uint64_t slot_at, size_t nbytes,
                                          size_t begin) noexcept nogil:
    cdef size_t skew = descriptor(g, c, rank).skew & (SR_CACHE_LINE - 1)
    if not c.swaps_places:
        return slot(g, rank, slot_at) + skew + begin
    if rank != owner and slot_at & g.lap_nbytes != 0:
        return slot(g, owner, slot_at) + skew + rank * pitch_of(g, nbytes)
    return slot(g, rank, slot_at) + skew + owner * pitch_of(g, nbytes)


# The place of the result of the owner's slice, for this rank.
cdef inline unsigned char *place_of_result(Group *g, Call *c, int owner, uint64_t slot_at, size_t nbytes,
                                           size_t begin) noexcept nogil:
    return place_of_slice(g, c, g.rank if writes_back(g, c) else owner, owner, slot_at, nbytes, begin)


# ---- stores that bypass the caches -----------------------------------------------------------------------------------

# True if the result is written by streaming stores, which bypass the cache. They save no load in new pages, which the
# kernel has just cleared. In place the line has just been read, so they pay only in longer arrays. A reduce_scatter is
# in place if out is this rank's piece of x.
cdef inline uint32_t streams_out(Group *g, Call *c) noexcept nogil:
    if c.out_is_new:
        return False
    if is_folded(c) and piece_for(c, g.rank) == c.out:
        return c.out_nbytes >= g.tuning.stream_in_place_nbytes
    if is_folded(c) and not is_scan(c):
        return c.out_nbytes >= g.tuning.stream_reduced_nbytes
    if c.kind == BROADCAST:   # each rank has one array: the caches hold longer ones
        return c.out_nbytes >= 2 * g.tuning.stream_out_nbytes
    return c.out_nbytes >= g.tuning.stream_out_nbytes


# ---- prefetching and reading in turn ---------------------------------------------------------------------------------

cdef enum:
    PREFETCH_NBYTES = 4 << 10


# Fold all sources, and prefetch for write the lines of the last target, which other ranks have read before. Requesting
# many lines at once takes a tenth off an all_reduce of 1 MiB between far cores, and a fifth if they have just read the
# target (bench/peers/peers.py).
cdef inline void fold_prefetching(Group *g, Call *c, int ntargets, size_t nbytes) noexcept nogil:
    cdef size_t done = 0
    cdef size_t part
    cdef int i, prefetched = ntargets - 1
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


cdef enum:
    PREFETCH_SLOT_NBYTES = 16 << 10


# While a far core waits for the others' lines it prefetches, for writing, the slot that the next equal call will stage
# to. The other ranks read that slot a lap ago. At 4 and 16 KiB this takes an eighth off an all_reduce, and a sixth if
# calls are apart (bench/peers/peers.py). At 64 KiB the requests delay the awaited lines.
cdef inline void prefetch_next_slot(Group *g, Call *c) noexcept nogil:
    cdef size_t nbytes = pieces_nbytes(g, c, c.nbytes)
    cdef bint is_one_slot = c.chunk_nbytes == c.nbytes and nbytes <= PREFETCH_SLOT_NBYTES
    cdef uint64_t slot_at
    if is_one_slot and g.far and not g.oversubscribed and c.nbytes < g.tuning.far_stream_nbytes:
        slot_at = slot_begin_within(g, c.stage.position, nbytes, c.window_nbytes)
        sr_prefetch_for_write(swapped_slot(g, c, g.rank, slot_at), nbytes)


# True if data that another core has stored are copied in turn (kernels.h): the cores are far apart, and copies of so
# few bytes were not streamed, so the other core holds the lines.
cdef inline bint reads_in_turn(const Group *g, size_t nbytes) noexcept nogil:
    return g.far and nbytes < g.tuning.far_stream_nbytes


# Copy data from a slot of another rank, in turn between far cores. Against an ordinary copy this saves a fifth of a
# broadcast of 128 and 256 KiB and a sixth of an all_gather (bench/peers/peers.py).
cdef inline void copy_from_far(Group *g, unsigned char *to, const unsigned char *there, size_t nbytes,
                               uint32_t stream) noexcept nogil:
    cdef uint32_t way = SR_COPY_IN_TURN if reads_in_turn(g, nbytes) else SR_COPY_ORDINARY
    g.kernels.copy(to, there, nbytes, SR_COPY_STREAMING if stream else way)
