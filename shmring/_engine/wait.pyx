# Run a call to its end in the foreground: pause, then yield, then sleep, and poll the conditions that end a wait early.

from libc.stdint cimport uint64_t

from .._core.group cimport (
    ABORTED, BLOCKED, DEAD, LATE, LEFT, PROGRESSED, SIGNALLED, SIGNAL_INTERVAL_NS, Call, Group, check_liveness, line_of,
    runs_here,
)
from .._core.segment cimport (
    SR_CHECKS, SR_CLOSED, SR_NO_ABORT, sr_flag_load, sr_flag_load_ordered, sr_flag_reached, sr_flag_spin,
    sr_liveness_died, sr_liveness_state, sr_liveness_wake_sleepers, sr_now_ns, sr_time_away, sr_waitset,
    sr_waitset_enter, sr_waitset_sleep_until_death, sr_waitset_watch_liveness, sr_yield,
)
from .._core.trace cimport step_call
from .._diagnostics.flight_recorder cimport (
    SR_IN_CALL, SR_WAIT_CALL, begin_call_wait, correct_wait, end_wait, give_up_wait,
)
from .._internode.context cimport InterNode, examine, furthest_behind, inter_of, move, sr_conn_sleep
from .._transport.channel cimport sr_channels_poll_abort


cdef inline int pauses_for(Group *g, Call *c, int pauses) noexcept nogil:
    return 0 if runs_here(g, c.awaited.rank) else pauses


# Step a call until it is done, or until another status ends or interrupts the wait.
cdef int step_to_end(Group *g, Call *c) noexcept nogil:
    cdef int status
    if c.interrupted:
        status = wait_and_unpublish(g, c)
        if status != PROGRESSED:
            return status
    while True:
        status = step_call(g, c)
        if status == PROGRESSED:
            continue
        if status != BLOCKED:
            return status
        if g.inter != NULL or not sr_flag_spin(c.awaited.flag, c.awaited.target, pauses_for(g, c, g.pauses)):
            status = wait_and_unpublish(g, c)
            if status != PROGRESSED:
                return status


# Step a call briefly with the GIL held: pause if every rank has a CPU, else yield a few times.
cdef int try_briefly(Group *g, Call *c) noexcept nogil:
    cdef int yields = 0
    cdef int status = PROGRESSED
    while status == PROGRESSED:
        status = step_call(g, c)
        if status == BLOCKED and g.inter == NULL:
            if sr_flag_spin(c.awaited.flag, c.awaited.target, pauses_for(g, c, g.brief_pauses)):
                status = PROGRESSED
            elif yields < g.brief_yields:
                sr_yield()
                yields += 1
                status = PROGRESSED
    return status


# As wait_for_flag, and end the published wait. A wait that was interrupted (SIGNALLED) stays published.
cdef int wait_and_unpublish(Group *g, Call *c) noexcept nogil:
    cdef int status = wait_for_flag(g, c)
    if status == PROGRESSED:
        end_wait(g, SR_WAIT_CALL)
    elif status != SIGNALLED:
        give_up_wait(g)
    return status


# Yield, then sleep, and poll from time to time. Return PROGRESSED once the flag has reached its target.
cdef int wait_for_flag(Group *g, Call *c) noexcept nogil:
    cdef uint64_t now = sr_now_ns()
    cdef int status
    g.next_poll_ns = now + g.poll_ns
    if not c.interrupted:
        g.polled_ns = c.wait_begin_ns = now
    c.interrupted = False
    while not sr_flag_reached(c.awaited.flag, c.awaited.target):
        if g.inter != NULL:
            status = move(g, c)
            if status != BLOCKED:
                return status
        status = poll_call(g, c, now)
        if status != PROGRESSED:
            c.interrupted = status == SIGNALLED
            return status
        if now - c.wait_begin_ns < g.yield_ns:
            sr_yield()
            now = sr_now_ns()
            continue
        begin_call_wait(g, c, c.wait_begin_ns)
        if g.inter != NULL:
            # move and poll_call receive notifications of other hosts, which may set the flag without waking this rank.
            if sr_flag_reached(c.awaited.flag, c.awaited.target):
                break
            sleep_internode(g, c, now)
        else:
            sleep_local(g, c, now)
        now = sr_now_ns()
    return PROGRESSED


# Return the longest sleep: until Python's signals have to be checked, or until the time ends for which an issued call
# waits in the foreground.
cdef inline uint64_t longest_sleep_ns(Group *g, uint64_t now) noexcept nogil:
    cdef uint64_t until_ns = max(g.next_poll_ns, g.signal_ns)
    return min(g.sleep_ns, until_ns - now) if until_ns > now else g.sleep_ns


cdef void sleep_local(Group *g, Call *c, uint64_t now) noexcept nogil:
    cdef sr_waitset waitset
    cdef bint is_alive
    waitset.n = 0
    if not sr_waitset_enter(&waitset, c.awaited.flag, c.awaited.target, &g.lane[c.awaited.rank].event):
        return
    is_alive = sr_waitset_watch_liveness(&waitset, &g.lane[c.awaited.rank].liveness)
    if (sr_flag_load_ordered(&g.header.abort) == SR_NO_ABORT
            and (not is_alive or sleep_until_death(g, &waitset, longest_sleep_ns(g, now)))):
        g.next_poll_ns = 0


# Sleep on a wait set whose events were polled after they were entered. Return True if one of the watched ranks has
# died: those after this rank, and those whose liveness is in the set.
cdef bint sleep_until_death(Group *g, sr_waitset *waitset, uint64_t longest_ns) noexcept nogil:
    cdef int rank, step, ndead = 0
    for step in range(1, min(g.size, MOST_WATCHED + 1)):
        rank = (g.rank + step) % g.size
        if not sr_waitset_watch_liveness(waitset, &g.lane[rank].liveness):
            ndead += 1
    if ndead == g.ndead:
        return sr_waitset_sleep_until_death(waitset, longest_ns)
    # The kernel wakes only one sleeper, which may not wait for the dead rank: wake the others.
    for rank in range(g.size):
        if rank != g.rank and sr_liveness_died(&g.lane[rank].liveness):
            sr_liveness_wake_sleepers(&g.lane[rank].liveness)
    g.ndead = ndead
    return True


cdef void sleep_internode(Group *g, Call *c, uint64_t now) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef uint64_t longest_ns
    cdef bint awaits_local_rank = c.awaited.rank < g.size
    if inter.nbusy == 0 and awaits_local_rank:
        sleep_local(g, c, now)
    else:
        longest_ns = longest_sleep_ns(g, now)
        sr_conn_sleep(inter.news, min(longest_ns,
                                      sleep_ns_after(now - c.wait_begin_ns)) if awaits_local_rank else longest_ns)


# Poll the conditions other than its flag that end the wait of a blocked call. Return PROGRESSED if there is none.
cdef int poll_call(Group *g, Call *c, uint64_t now) noexcept nogil:
    if not SR_CHECKS:
        return PROGRESSED
    if c.deadline_ns == 0:
        c.deadline_ns = now + c.timeout_ns
    else:
        c.deadline_ns += sr_time_away(g.polled_ns, now)
    g.polled_ns = now
    if sr_flag_load(&g.header.abort) != SR_NO_ABORT:
        return ABORTED
    if now < g.next_poll_ns:
        return PROGRESSED
    g.next_poll_ns = now + g.poll_ns
    return poll_peers(g, c, now)


# True if a dead rank has not done its part of this call. A rank that has done its part may end without closing.
cdef inline bint is_missed(Group *g, Call *c, int rank) noexcept nogil:
    if rank == c.awaited.rank:
        return not sr_flag_reached(c.awaited.flag, c.awaited.target)
    return not sr_flag_reached(&line_of(g, rank, c.seq).seq, c.seq)


# Return DEAD, LEFT, LATE, SIGNALLED or a status of `examine` if something ends or interrupts the wait, else PROGRESSED.
# c.awaited.rank becomes the rank to name.
cdef int poll_peers(Group *g, Call *c, uint64_t now) noexcept nogil:
    cdef int rank, status
    check_liveness(g)
    for rank in range(g.size):
        if rank != g.rank and sr_liveness_died(&g.lane[rank].liveness) and is_missed(g, c, rank):
            c.awaited.rank = rank
            return DEAD
    if c.awaited.rank < g.size and sr_liveness_state(&g.lane[c.awaited.rank].liveness) == SR_CLOSED:
        # It may have published before it left.
        return PROGRESSED if sr_flag_reached(c.awaited.flag, c.awaited.target) else LEFT
    if now >= c.deadline_ns:
        c.awaited.rank = furthest_behind(g, c)
        return LATE
    if now >= g.signal_ns or (g.inter != NULL and sr_channels_poll_abort(inter_of(g).channels)):
        g.signal_ns = now + SIGNAL_INTERVAL_NS
        correct_wait(g, SR_WAIT_CALL, SR_IN_CALL, furthest_behind(g, c))
        status = examine(g, c) if g.inter != NULL else PROGRESSED
        return SIGNALLED if status == PROGRESSED else status
    return PROGRESSED
