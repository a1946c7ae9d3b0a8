# The distance of the ranks' cores: near or far. Rank 0 and each other rank in turn pass a cache line back and forth,
# and the slowest pair decides. If ranks share CPUs, a few of them do it for all. The measurement is a collective of its
# own (enter_ping, step_ping_call), or a part of another call (begin_ping, step_ping: see descriptor.pxd).

from libc.stdint cimport uint64_t

from .group cimport DONE, Call, Group, await_lines, begin_call, blocked_on, counter, publish, publish_line
from .segment cimport SR_PINGED, sr_flag, sr_flag_reached, sr_flag_spin, sr_now_ns


cdef enum:
    PING_BATCH = 4              # round trips that are timed together
    PING_ROUNDS = 32            # round trips with each rank, a multiple of PING_BATCH
    FAR_NS = 180                # round trips of near cores took below 130 ns, those of far ones above 200 ns
    PREEMPTED_NS = 3000         # a round trip as slow as this measures the scheduler, not the distance
    MOST_SHARING = 7            # so many ranks answer rank 0 if ranks share CPUs, where each round trip may be a switch


# Return the number of ranks that answer rank 0: ranks 1 to this one.
cdef inline int answering_ranks(Group *g) noexcept nogil:
    return min(g.size - 1, <int> MOST_SHARING) if g.oversubscribed else g.size - 1


cdef inline void begin_ping(Group *g, Call *c) noexcept nogil:
    c.round_trips = 0
    g.pings += <uint64_t> PING_ROUNDS * answering_ranks(g)
    if g.rank == 0:
        g.round_trip_ns = 0


# Rank 0's part: time round trips with each other rank in turn. Its publish and its wait pair with those of step_pong.
cdef inline int step_ping_rank0(Group *g, Call *c, uint64_t base) noexcept nogil:
    cdef int peer
    cdef uint64_t begin, took
    cdef uint64_t fastest = ~<uint64_t> 0
    cdef sr_flag *pong
    cdef bint whole
    while c.round_trips < PING_ROUNDS * answering_ranks(g):
        peer = 1 + c.round_trips // PING_ROUNDS
        pong = counter(g, peer, SR_PINGED)
        # A batch that a BLOCKED return has interrupted goes on here, but its time does not count.
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


# Every other rank's part: answer rank 0. Until its turn it waits for the rank before it, since each signal of rank 0
# wakes all ranks that wait for rank 0.
cdef inline int step_pong(Group *g, Call *c, uint64_t base) noexcept nogil:
    cdef uint64_t first = base + <uint64_t> PING_ROUNDS * (g.rank - 1)
    cdef sr_flag *ping = counter(g, 0, SR_PINGED)
    if g.rank > answering_ranks(g):
        return DONE
    if g.rank > 1 and not sr_flag_spin(counter(g, g.rank - 1, SR_PINGED), first, g.pauses):
        return blocked_on(c, counter(g, g.rank - 1, SR_PINGED), first, g.rank - 1)
    while c.round_trips < PING_ROUNDS:
        if not sr_flag_spin(ping, first + c.round_trips + 1, g.pauses):
            return blocked_on(c, ping, first + c.round_trips + 1, 0)
        c.round_trips += 1
        publish(g, SR_PINGED, first + c.round_trips)
    return DONE


cdef inline int step_ping(Group *g, Call *c) noexcept nogil:
    cdef uint64_t base = g.pings - <uint64_t> PING_ROUNDS * answering_ranks(g)
    if g.rank == 0:
        return step_ping_rank0(g, c, base)
    return step_pong(g, c, base)


cdef inline void enter_ping(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    begin_ping(g, c)
    publish_line(g, c)


cdef inline int step_ping_call(Group *g, Call *c) noexcept nogil:
    cdef int status
    if not c.lines_seen:
        status = await_lines(g, c)
        if status != DONE:
            return status
    return step_ping(g, c)
