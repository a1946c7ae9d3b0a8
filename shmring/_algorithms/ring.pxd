# The ring, and two opposite rings. They run only if they are named.
#
# A transfer is one chunk of one slice in one step. Two rings have half of the message each, and take turns. A slot is
# as large as the largest slice needs, so that positions are the same on all ranks.

from libc.stdint cimport uint64_t

from .._core.group cimport BIDIRECTIONAL_RING, BY_BIDIRECTIONAL_RING, BY_RING, DONE, RING, Call, Group, count_path
from .._core.schedule cimport sr_ring_from, sr_ring_gather_slice, sr_ring_mirrored, sr_ring_reduce_slice, sr_slice_begin
from .._core.staging cimport begin_named, fold_hop, slot
from .._core.transfers cimport Schedule, step_transfers


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
    return (slice_bound(g, c, 0, 1) + c.chunk_nbytes - 1) // c.chunk_nbytes   # the first slice is the largest


# The step of a transfer, counted from 1.
cdef inline int ring_step(Group *g, Call *c, size_t transfer) noexcept nogil:
    return <int> (transfer // nrings(c) // chunks_per_slice(g, c)) + 1


cdef inline size_t chunk_begin(Group *g, Call *c, size_t transfer) noexcept nogil:
    return transfer // nrings(c) % chunks_per_slice(g, c) * c.chunk_nbytes


cdef inline size_t ring_slot(Group *g, Call *c, size_t transfer) noexcept nogil:
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


cdef inline size_t send_on(Group *g, Call *c, size_t transfer, unsigned char *to) noexcept nogil:
    cdef size_t nbytes = 0
    cdef size_t begin = transfer_begin(g, c, place_in(g, ring_of(c, transfer), g.rank), transfer, &nbytes)
    if nbytes > 0:
        g.kernels.copy(to, (c.x if ring_step(g, c, transfer) == 1 else c.out) + begin, nbytes, 0)
    return nbytes


cdef inline int ring_source(Group *g, Call *c, size_t transfer, int index) noexcept nogil:
    cdef int ring = ring_of(c, transfer)
    return place_in(g, ring, sr_ring_from(place_in(g, ring, g.rank), g.size)) if index == 0 else -1


cdef inline void receive_on(Group *g, Call *c, size_t transfer, uint64_t slot_at) noexcept nogil:
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


cdef inline Schedule schedule_of_rings() noexcept nogil:
    cdef Schedule schedule
    schedule.slot_nbytes = ring_slot
    schedule.send = send_on
    schedule.source = ring_source
    schedule.receive = receive_on
    return schedule


cdef inline void enter_ring(Group *g, Call *c) noexcept nogil:
    begin_named(g, c, 4)


cdef inline int step_ring(Group *g, Call *c) noexcept nogil:
    cdef uint64_t steps = 2 * <uint64_t> (g.size - 1)
    cdef size_t ahead = nrings(c) * chunks_per_slice(g, c)
    cdef Schedule schedule = schedule_of_rings()
    cdef int status = step_transfers(g, c, &schedule, steps * ahead, ahead)
    if status == DONE:
        g.stats.steps += steps
        count_path(g, BY_RING if c.algorithm == RING else BY_BIDIRECTIONAL_RING)
    return status
