# How far the ranks' cores are from each other: rank 0 and each other rank in turn flip a line, the slowest pair
# counts.

from libc.stdint cimport uint64_t

from .group cimport *


cdef enum:
    PING_BATCH = 4
    PING_ROUNDS = 32            # a rank, a multiple of the batch
    FAR_NS = 180                # nothing was ever seen between near (below 130) and far (above 200)
    PREEMPTED_NS = 3000         # round trips this slow tell of the scheduler, not of the distance


cdef void begin_ping(Group *g, Call *c) noexcept nogil:
    c.round_trips = 0                 # round trips of this measurement so far
    g.pings += <uint64_t> PING_ROUNDS * (g.size - 1)
    if g.rank == 0:
        g.round_trip_ns = 0


cdef int step_ping(Group *g, Call *c) noexcept nogil:
    cdef uint64_t base = g.pings - <uint64_t> PING_ROUNDS * (g.size - 1)
    if g.rank == 0:
        return step_ping_rank0(g, c, base)
    return step_pong(g, c, base)


cdef int step_ping_rank0(Group *g, Call *c, uint64_t base) noexcept nogil:
    cdef int peer
    cdef uint64_t begin, took
    cdef uint64_t fastest = ~<uint64_t> 0
    cdef sr_flag *pong
    cdef bint whole
    while c.round_trips < PING_ROUNDS * (g.size - 1):
        peer = 1 + c.round_trips // PING_ROUNDS
        pong = counter(g, peer, SR_PINGED)
        # A batch that had to wait for the scheduler is taken up again here, its time lost.
        whole = c.round_trips % PING_BATCH == 0 and not sr_flag_reached(pong, base + c.round_trips + 1)
        begin = sr_now_ns()
        while True:
            publish(g, SR_PINGED, base + c.round_trips + 1)
            if not sr_flag_spin(pong, base + c.round_trips + 1, g.pauses):
                return blocked_on(c, pong, base + c.round_trips + 1, peer)
            c.round_trips += 1
            if c.round_trips % PING_BATCH == 0:
                break
        took = (sr_now_ns() - begin) // PING_BATCH
        if whole and took < fastest:
            fastest = took
        if c.round_trips % PING_ROUNDS == 0:
            if fastest < PREEMPTED_NS and fastest > g.round_trip_ns:
                g.round_trip_ns = fastest
            fastest = ~<uint64_t> 0
    g.pinged_ns = sr_now_ns()
    if g.round_trip_ns and not g.header.forced_path:
        g.next_far = g.round_trip_ns >= FAR_NS
    return DONE


cdef int step_pong(Group *g, Call *c, uint64_t base) noexcept nogil:
    cdef uint64_t first = base + <uint64_t> PING_ROUNDS * (g.rank - 1)
    cdef sr_flag *ping = counter(g, 0, SR_PINGED)
    while c.round_trips < PING_ROUNDS:
        if not sr_flag_spin(ping, first + c.round_trips + 1, g.pauses):
            return blocked_on(c, ping, first + c.round_trips + 1, 0)
        c.round_trips += 1
        publish(g, SR_PINGED, first + c.round_trips)
    return DONE


cdef void enter_ping(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    begin_ping(g, c)
    publish_line(g, c)


cdef int step_ping_call(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
    return step_ping(g, c)
