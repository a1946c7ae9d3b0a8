# Algorithms of the literature whose steps all ranks make alike: the ring, two opposite rings, recursive halving and
# doubling, and the machinery that they share, a pipeline through the same slots as every other call. They do not fold
# in rank order, and they round at each hop, so they run only if the caller asks for them by name.

from libc.stdint cimport uint64_t

from .._core.group cimport *
from .._core.schedule cimport *
from .._core.staging cimport *


# ---- transfers -----------------------------------------------------------------------------------------------

# c.stage is the cursor of sending and c.fold that of receiving. Their offsets count transfers.
cdef inline uint64_t transfer_end(Group *g, Call *c, const Schedule *schedule, Cursor *cursor) noexcept nogil:
    return slot_end(g, cursor.position, schedule.slot_nbytes(g, c, cursor.offset))


# Return DONE once all transfers are done. A transfer sends data that arrived at least `ahead` transfers before.
cdef int step_transfers(Group *g, Call *c, const Schedule *schedule, size_t transfers, size_t ahead) noexcept nogil:
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
    if (c.stage.offset < transfers and c.stage.offset < c.fold.offset + ahead
            and has_credit(g, transfer_end(g, c, schedule, &c.stage))):
        send_transfer(g, c, schedule)
        return PROGRESSED
    if c.fold.offset == transfers:
        g.position = c.fold.position
        return DONE
    if c.fold.offset == c.stage.offset:
        # This rank has received all that it could; its next transfer lacks credit.
        return blocked_on_credit(g, c, transfer_end(g, c, schedule, &c.stage))
    status = await_sources(g, c, schedule)
    if status == DONE:
        receive_transfer(g, c, schedule)
        return PROGRESSED
    return status


cdef int await_sources(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.fold)
    cdef int index = 0
    cdef int source = schedule.source(g, c, c.fold.offset, 0)
    while source >= 0:
        if not sr_flag_reached(counter(g, source, SR_STAGED), end):
            return blocked_on(c, counter(g, source, SR_STAGED), end, source)
        index += 1
        source = schedule.source(g, c, c.fold.offset, index)
    return DONE


cdef void send_transfer(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.stage)
    cdef uint64_t slot_at = slot_begin(g, c.stage.position, schedule.slot_nbytes(g, c, c.stage.offset))
    g.stats.bytes_sent += schedule.send(g, c, c.stage.offset, slot(g, g.rank, slot_at))
    c.stage.position = end
    c.stage.offset += 1
    publish(g, SR_STAGED, end)


cdef void receive_transfer(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.fold)
    cdef uint64_t slot_at = slot_begin(g, c.fold.position, schedule.slot_nbytes(g, c, c.fold.offset))
    schedule.receive(g, c, c.fold.offset, slot_at)
    c.fold.position = end
    c.fold.offset += 1
    give_credit(g, end)


# ---- rings ---------------------------------------------------------------------------------------------------

# A transfer is one chunk of one slice in one step. Two rings have half of the message each, and take turns. A slot is
# as large as the largest slice needs, so that positions are the same on all ranks.

cdef Schedule RINGS
RINGS.slot_nbytes, RINGS.send, RINGS.source, RINGS.receive = ring_slot, send_on, ring_source, receive_on


cdef inline int nrings(const Call *c) noexcept nogil:
    return 2 if c.algorithm == BIDIRECTIONAL_RING else 1


cdef inline int ring_of(const Call *c, size_t transfer) noexcept nogil:
    return <int> (transfer % nrings(c))


# The place of a rank in a ring.
cdef inline int place_in(Group *g, int ring, int rank) noexcept nogil:
    return rank if ring == 0 else sr_ring_mirrored(rank, g.size)


# The begin of a slice of a ring's part, in bytes of the message.
cdef inline size_t slice_bound(Group *g, Call *c, int ring, int index) noexcept nogil:
    cdef size_t begin = sr_slice_begin(c.count, nrings(c), ring)
    cdef size_t count = sr_slice_begin(c.count, nrings(c), ring + 1) - begin
    return (begin + sr_slice_begin(count, g.size, index)) * c.itemsize


cdef inline size_t chunks_per_slice(Group *g, Call *c) noexcept nogil:
    cdef size_t largest = slice_bound(g, c, 0, 1)
    return (largest + c.chunk_nbytes - 1) // c.chunk_nbytes if largest > 0 else 1


# The step of a transfer, counted from 1.
cdef inline int ring_step(Group *g, Call *c, size_t transfer) noexcept nogil:
    return <int> (transfer // nrings(c) // chunks_per_slice(g, c)) + 1


cdef inline size_t chunk_begin(Group *g, Call *c, size_t transfer) noexcept nogil:
    return transfer // nrings(c) % chunks_per_slice(g, c) * c.chunk_nbytes


cdef size_t ring_slot(Group *g, Call *c, size_t transfer) noexcept nogil:
    return min(slice_bound(g, c, 0, 1) - chunk_begin(g, c, transfer), c.chunk_nbytes)


# The bytes of the message that the rank at `place` of a ring sends in a transfer: their begin, and *nbytes.
cdef inline size_t transfer_begin(Group *g, Call *c, int place, size_t transfer, size_t *nbytes) noexcept nogil:
    cdef int step = ring_step(g, c, transfer)
    cdef int ring = ring_of(c, transfer)
    cdef int slice
    cdef size_t begin, end
    if step < g.size:
        slice = sr_ring_reduce_slice(place, g.size, step)
    else:
        slice = sr_ring_gather_slice(place, g.size, step - g.size + 1)
    begin = slice_bound(g, c, ring, slice) + chunk_begin(g, c, transfer)
    end = slice_bound(g, c, ring, slice + 1)
    nbytes[0] = 0 if begin >= end else min(end - begin, c.chunk_nbytes)
    return begin


cdef size_t send_on(Group *g, Call *c, size_t transfer, unsigned char *to) noexcept nogil:
    cdef size_t nbytes = 0
    cdef size_t begin = transfer_begin(g, c, place_in(g, ring_of(c, transfer), g.rank), transfer, &nbytes)
    if nbytes > 0:
        g.kernels.copy(to, (c.x if ring_step(g, c, transfer) == 1 else c.out) + begin, nbytes, 0)
    return nbytes


cdef int ring_source(Group *g, Call *c, size_t transfer, int index) noexcept nogil:
    cdef int ring = ring_of(c, transfer)
    return place_in(g, ring, sr_ring_from(place_in(g, ring, g.rank), g.size)) if index == 0 else -1


cdef void receive_on(Group *g, Call *c, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef int source = ring_source(g, c, transfer, 0)
    cdef int step = ring_step(g, c, transfer)
    cdef size_t nbytes = 0
    cdef size_t begin = transfer_begin(g, c, place_in(g, ring_of(c, transfer), source), transfer, &nbytes)
    if step < g.size:
        g.source[0] = slot(g, source, slot_at)
        g.source[1] = c.x + begin
        g.target[0] = c.out + begin
        fold_hop(g, c, 2, 1, 0, nbytes // c.itemsize, step == g.size - 1)
    elif nbytes > 0:
        g.kernels.copy(c.out + begin, slot(g, source, slot_at), nbytes, 0)


cdef void enter_ring(Group *g, Call *c) noexcept nogil:
    begin_stepped(g, c, 4)
    c.relayed = True


cdef int step_ring(Group *g, Call *c) noexcept nogil:
    cdef uint64_t steps = 2 * <uint64_t> (g.size - 1)
    cdef size_t ahead = nrings(c) * chunks_per_slice(g, c)
    cdef int status = step_transfers(g, c, &RINGS, steps * ahead, ahead)
    if status == DONE:
        g.stats.steps += steps
        count_path(g, BY_RING if c.algorithm == RING else BY_BIDIRECTIONAL_RING)
    return status


# ---- recursive halving and doubling ---------------------------------------------------------------------------

# Recursive halving (reduce-scatter), then recursive doubling (all-gather); schedule.h has the schedule. Several ranks
# can read a slot, so the ranks beyond a power of two cost no extra step: they stage their whole block in the first
# step, for both halves, and read all results from the ranks that their core rank reads from.
#
# A message is cut into blocks, and each block goes through all steps. Two blocks take turns, so that a rank works on
# one while it waits for the other. A transfer is one step of one block; with an odd number of blocks some are empty.

cdef Schedule HALVING
HALVING.slot_nbytes, HALVING.send, HALVING.source, HALVING.receive = slot_of_step, send_half, partner, receive_half

# One step of a block. Step s of `steps` reduces or gathers the part that is left after s halvings.
cdef struct Step:
    int steps, step
    bint reduces, is_first, is_last   # is_first: of the reducing steps; is_last: of those, or the first that gathers
    size_t begin, count               # the block's begin in bytes of the message, and its elements


cdef inline size_t nblocks(Call *c) noexcept nogil:
    return (c.nbytes + c.chunk_nbytes - 1) // c.chunk_nbytes


cdef inline size_t abreast(Call *c) noexcept nogil:
    return min(nblocks(c), <size_t> 2)


cdef inline Step step_of(Group *g, Call *c, size_t transfer) noexcept nogil:
    cdef Step s
    cdef size_t turn, block
    s.steps = sr_halving_steps(g.size)
    turn = 2 * <size_t> s.steps * abreast(c)
    block = transfer // turn * abreast(c) + transfer % abreast(c)
    s.step = <int> (transfer % turn // abreast(c)) + 1
    s.reduces = s.step <= s.steps
    if not s.reduces:
        s.step = 2 * s.steps + 1 - s.step
    s.is_first = s.reduces and s.step == 1
    s.is_last = s.step == s.steps
    s.begin = min(block * c.chunk_nbytes, c.nbytes)
    s.count = min(c.nbytes - s.begin, c.chunk_nbytes) // c.itemsize
    return s


# The part of the block that is left after a step: of its 2^steps slices those from `first` on. Return its begin.
cdef inline size_t part_begin(Call *c, const Step *s, int first, size_t *nbytes) noexcept nogil:
    cdef size_t begin = sr_slice_begin(s.count, 1 << s.steps, first)
    nbytes[0] = (sr_slice_begin(s.count, 1 << s.steps, first + (1 << (s.steps - s.step))) - begin) * c.itemsize
    return s.begin + begin * c.itemsize


cdef inline bint is_core(const Step *s, int rank) noexcept nogil:
    return rank < 1 << s.steps


cdef size_t slot_of_step(Group *g, Call *c, size_t transfer) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef size_t nbytes = 0
    if s.is_first and not is_core(&s, g.size - 1):
        return s.count * c.itemsize
    part_begin(c, &s, 0, &nbytes)   # the first slices are the largest
    return nbytes


cdef size_t send_half(Group *g, Call *c, size_t transfer, unsigned char *to) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef size_t nbytes = 0, begin
    cdef int owner
    if is_core(&s, g.rank):
        owner = sr_halving_peer(g.rank, s.steps, s.step) if s.reduces else g.rank
        begin = part_begin(c, &s, sr_halving_keeps(owner, s.steps, s.step), &nbytes)
    else:
        begin, nbytes = s.begin, (s.count * c.itemsize if s.is_first else 0)
    if nbytes > 0:
        g.kernels.copy(to, (c.x if s.is_first else c.out) + begin, nbytes, 0)
    return nbytes


# The index-th rank from which this rank takes data in a transfer; -1: there are no more. In the first step a core rank
# takes data from every rank with the same remainder, later from its peer alone. The other ranks do not reduce; they
# take what their core rank reduced, and then what it takes.
cdef int partner(Group *g, Call *c, size_t transfer, int index) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef int core = g.rank & ((1 << s.steps) - 1)
    cdef int half = 1 << (s.steps - 1)
    cdef int source
    if s.is_first and is_core(&s, g.rank):
        source = (g.rank & (half - 1)) + index * half
        source += half if source >= g.rank else 0
        return source if source < g.size else -1
    if not is_core(&s, g.rank) and (s.reduces or (s.is_last and index == 1)):
        return -1 if s.reduces else core
    return sr_halving_peer(core, s.steps, s.step) if index == 0 else -1


cdef void receive_half(Group *g, Call *c, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    if not s.reduces:
        take_results(g, c, &s, transfer, slot_at)
    elif is_core(&s, g.rank):
        fold_half(g, c, &s, transfer, slot_at)


# Fold the sources and this rank's own part in rank order.
cdef void fold_half(Group *g, Call *c, const Step *s, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef size_t nbytes = 0
    cdef size_t begin = part_begin(c, s, sr_halving_keeps(g.rank, s.steps, s.step), &nbytes)
    cdef const unsigned char *own = (c.x if s.is_first else c.out) + begin
    cdef bint own_is_in = False
    cdef int nsources = 0
    cdef int source = partner(g, c, transfer, 0)
    while source >= 0:
        if not own_is_in and source > g.rank:
            g.source[nsources] = own
            nsources += 1
            own_is_in = True
        g.source[nsources] = slot(g, source, slot_at) + (0 if is_core(s, source) else begin - s.begin)
        nsources += 1
        source = partner(g, c, transfer, nsources - own_is_in)
    if not own_is_in:
        g.source[nsources] = own
        nsources += 1
    g.target[0] = c.out + begin
    fold_hop(g, c, nsources, 1, 0, nbytes // c.itemsize, s.is_last)


cdef void take_results(Group *g, Call *c, const Step *s, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef size_t nbytes = 0, begin
    cdef int index = 0
    cdef int source = partner(g, c, transfer, 0)
    while source >= 0:
        begin = part_begin(c, s, sr_halving_keeps(source, s.steps, s.step), &nbytes)
        if nbytes > 0:
            g.kernels.copy(c.out + begin, slot(g, source, slot_at), nbytes, 0)
        index += 1
        source = partner(g, c, transfer, index)


cdef void enter_halving(Group *g, Call *c) noexcept nogil:
    cdef size_t slices_nbytes = c.itemsize << sr_halving_steps(g.size)
    begin_stepped(g, c, 4)
    c.relayed = True
    if c.chunk_nbytes >= slices_nbytes:   # so that the slices of a block are equal wherever those of the message are
        c.chunk_nbytes -= c.chunk_nbytes % slices_nbytes


cdef int step_halving(Group *g, Call *c) noexcept nogil:
    cdef uint64_t steps = 2 * <uint64_t> sr_halving_steps(g.size)
    cdef size_t turns = (nblocks(c) + abreast(c) - 1) // abreast(c)
    cdef int status = step_transfers(g, c, &HALVING, turns * steps * abreast(c), abreast(c))
    if status == DONE:
        g.stats.steps += steps
        count_path(g, BY_HALVING_DOUBLING)
    return status
