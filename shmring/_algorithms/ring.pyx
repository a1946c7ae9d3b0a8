# The ring algorithm, two opposite rings, and the machinery that all stepped algorithms share: a pipeline through the
# same slots as every other call. These algorithms do not fold in rank order, and they round at each hop, so they run
# only if the caller asks for them by name.

from libc.stdint cimport uint64_t

from .._core.group cimport *
from .._core.schedule cimport *
from .._core.staging cimport *


# `slots`: how many slots of a chunk must fit into the staging buffer. Half of them may be skipped at its end.
cdef void begin_stepped(Group *g, Call *c, int slots) noexcept nogil:
    begin_call(g, c)
    publish_line(g, c)
    c.chunk_nbytes = whole_items(c, min(<size_t> g.tuning.chunk_nbytes, g.ring_nbytes // slots))
    c.stage.position = c.fold.position = c.down.position = c.copy.position = g.position
    c.stage.offset = c.fold.offset = c.down.offset = c.copy.offset = 0
    c.fold_peer = 0


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
