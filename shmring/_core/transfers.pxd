# Algorithms that are a sequence of transfers: rings, and recursive halving and doubling.

from libc.stdint cimport uint64_t

from .group cimport DONE, PROGRESSED, Call, Cursor, Group, await_lines, blocked_on, counter, publish
from .segment cimport SR_STAGED, sr_flag_reached
from .staging cimport blocked_on_credit, give_credit, has_credit, slot, slot_begin, slot_end, slot_nbytes


# In each transfer a rank stages data for others, and takes data that others staged in the same transfer. All ranks
# count transfers alike, and reserve slots of the same length for them.
cdef struct Schedule:
    size_t (*slot_nbytes)(Group *, Call *, size_t transfer) noexcept nogil
    size_t (*send)(Group *, Call *, size_t transfer, unsigned char *slot) noexcept nogil      # bytes staged
    int (*source)(Group *, Call *, size_t transfer, int index) noexcept nogil                 # a rank; -1: no more
    void (*receive)(Group *, Call *, size_t transfer, uint64_t slot_at) noexcept nogil


# c.stage is the cursor of sending and c.fold that of receiving. Their offsets count transfers.
cdef inline uint64_t transfer_end(Group *g, Call *c, const Schedule *schedule, Cursor *cursor) noexcept nogil:
    return slot_end(g, cursor.position, schedule.slot_nbytes(g, c, cursor.offset))


# Return DONE once all transfers are done. A transfer sends data that arrived at least `ahead` transfers before.
cdef inline int step_transfers(Group *g, Call *c, const Schedule *schedule, size_t transfers,
                               size_t ahead) noexcept nogil:
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


cdef inline int await_sources(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.fold)
    cdef int index = 0
    cdef int source = schedule.source(g, c, c.fold.offset, 0)
    while source >= 0:
        if not sr_flag_reached(counter(g, source, SR_STAGED), end):
            return blocked_on(c, counter(g, source, SR_STAGED), end, source)
        index += 1
        source = schedule.source(g, c, c.fold.offset, index)
    return DONE


cdef inline void send_transfer(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.stage)
    cdef uint64_t slot_at = slot_begin(g, c.stage.position, schedule.slot_nbytes(g, c, c.stage.offset))
    g.stats.bytes_sent += schedule.send(g, c, c.stage.offset, slot(g, g.rank, slot_at))
    c.stage.position = end
    c.stage.offset += 1
    publish(g, SR_STAGED, end)


cdef inline void receive_transfer(Group *g, Call *c, const Schedule *schedule) noexcept nogil:
    cdef uint64_t end = transfer_end(g, c, schedule, &c.fold)
    cdef uint64_t slot_at = slot_begin(g, c.fold.position, schedule.slot_nbytes(g, c, c.fold.offset))
    schedule.receive(g, c, c.fold.offset, slot_at)
    c.fold.position = end
    c.fold.offset += 1
    give_credit(g, end)
