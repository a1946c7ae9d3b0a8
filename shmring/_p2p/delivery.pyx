# Wait until a message is complete: pause, then yield, then sleep on the rank's event for messages or on news from other
# hosts. A waiting rank advances all its posted messages. The progress thread does so when no call waits. Nothing here
# touches a Python object.

from libc.stdint cimport uint64_t

from .._core.group cimport *
from .._core.spsc_ring cimport sr_pause
from .._diagnostics.flight_recorder cimport (
    ANYBODY, SR_IN_PROBE, SR_IN_RECV, SR_IN_SEND, SR_WAIT_MESSAGE, begin_wait, end_wait,
)
from .._engine.progress cimport ACTIVE, BACKGROUND, IDLE, REAPABLE, WAITING, WANTS_PYTHON, Pollable
from .._engine.wait cimport sleep_ns_after, sleep_until_death
from .._internode.context cimport inter_of, remote, sr_conn_sleep
from .._transport.channel cimport (
    SR_CHANNEL_DAMAGED, SR_CHANNEL_OPEN, sr_channels_attend, sr_channels_poll_abort, sr_channels_wake,
    sr_channel_check_link,
)
from .matching cimport (
    ANY, COMPLETE, DAMAGED, FAR_SIDE, NEAR_SIDE, Matching, Message, awaited_sides, step_messages, publish_all_taken,
)


cdef enum:
    WATCH_NS = 50000000      # the progress thread polls an idle communicator for this long
    FAR_POLLS = 3            # polls in a short try: a poll of other hosts is a system call


# Return DONE, BLOCKED after `pauses` pauses without progress, or another result of a step.
cdef int step_until_complete(Matching *m, Message *message, int pauses) noexcept nogil:
    cdef int left = pauses
    cdef int status
    while message.state != COMPLETE:
        status = step_messages(m)
        if message.state == COMPLETE:
            break
        if status == PROGRESSED:
            left = pauses
            continue
        if status != BLOCKED or left <= 0:
            return status
        left -= 1
        sr_pause()
    return DONE


# Choose the number of pauses before a wait for this message, and set far_later: whether polls of other hosts can be
# rare. With polls in between, yields cost little. If the sender shares this CPU, pausing is useless.
cdef inline int pauses_for(Matching *m, Message *message, int pauses) noexcept nogil:
    m.far_later = m.channels == NULL or (message.peer != ANY and m.peer[message.peer].channel == NULL)
    if not m.far_later:
        return min(pauses, FAR_POLLS)
    return 0 if message.peer != ANY and runs_here(m.g, m.peer[message.peer].lane) else pauses


# Try briefly with the GIL held, as a small collective does.
cdef int deliver_briefly(Matching *m, Message *message) noexcept nogil:
    cdef int status
    cdef int yields = 0
    while True:
        status = step_until_complete(m, message, pauses_for(m, message, m.g.brief_pauses))
        if status != BLOCKED or yields >= m.g.brief_yields:
            return status
        sr_yield()
        yields += 1


# As wait_until_delivered; ends the published wait, unless the caller goes on waiting after SIGNALLED.
cdef int deliver_patiently(Matching *m, Message *message, Wait *wait) noexcept nogil:
    cdef int status = wait_until_delivered(m, message, wait)
    if status != SIGNALLED:
        end_wait(m.g, SR_WAIT_MESSAGE)
    return status


# Number of the awaited rank in published waits; see `remote`.
cdef inline int awaited_by(Matching *m, const Message *message) noexcept nogil:
    if message.peer == ANY:
        return ANYBODY
    return m.peer[message.peer].lane if m.peer[message.peer].channel == NULL else remote(m.g, message.peer)


cdef inline void publish_wait(Matching *m, const Message *message, uint64_t since_ns) noexcept nogil:
    cdef int kind = SR_IN_SEND if message.is_send else SR_IN_PROBE if message.is_probe else SR_IN_RECV
    begin_wait(m.g, SR_WAIT_MESSAGE, kind, since_ns, awaited_by(m, message))


# Return the time. Postpone the deadline by the time that this process was stopped since the last call.
cdef inline uint64_t check_clock(Wait *wait) noexcept nogil:
    cdef uint64_t now = sr_now_ns()
    if wait.looked_ns != 0:
        wait.deadline_ns += sr_time_away(wait.looked_ns, now)
    wait.looked_ns = now
    return now


# Return when the message is complete, when something else ends the wait, or when work needs the GIL.
cdef int wait_until_delivered(Matching *m, Message *message, Wait *wait) noexcept nogil:
    cdef Group *g = m.g
    cdef uint64_t now
    cdef int status
    cdef int pauses = pauses_for(m, message, g.pauses)
    if wait.awake_until_ns == 0:
        status = step_until_complete(m, message, pauses)
        if status != BLOCKED:
            return status
    now = check_clock(wait)
    if wait.awake_until_ns == 0:
        wait.awake_until_ns = now + g.yield_ns
        wait.poll_ns = now + g.poll_ns
        wait.signal_ns = now + SIGNAL_INTERVAL_NS
        publish_all_taken(m)
    while True:
        status = step_messages(m)
        if message.state == COMPLETE:
            return DONE
        if status == PROGRESSED:
            wait.awake_until_ns = now + g.yield_ns
            continue
        if status != BLOCKED:
            return status
        if sr_flag_load(&g.header.abort) != SR_NO_ABORT:
            return ABORTED
        if now >= wait.poll_ns:
            status = poll_peers(m, message, wait, now)
            if status != PROGRESSED:
                return status
            wait.poll_ns = now + g.poll_ns
        if now < wait.awake_until_ns:
            sr_yield()
        else:
            publish_wait(m, message, wait.awake_until_ns)
            if sleep(m, message, now - wait.awake_until_ns):
                wait.poll_ns = 0
        now = check_clock(wait)


# Return True if a rank has died.
cdef bint sleep(Matching *m, Message *message, uint64_t asleep_ns) noexcept nogil:
    cdef sr_waitset waitset
    cdef int sides = awaited_sides(m) if m.channels != NULL else NEAR_SIDE
    publish_all_taken(m)
    if sides & FAR_SIDE:
        sleep_far(m, message, m.g.sleep_ns if sides == FAR_SIDE else sleep_ns_after(asleep_ns))
        return False
    waitset.n = 0
    sr_waitset_watch(&waitset, &m.g.me.p2p_event)
    return (step_messages(m) == BLOCKED and message.state != COMPLETE
            and sr_flag_load_ordered(&m.g.header.abort) == SR_NO_ABORT and sleep_until_death(m.g, &waitset,
                                                                                             m.g.sleep_ns))


cdef void sleep_far(Matching *m, Message *message, uint64_t limit_ns) noexcept nogil:
    m.far_later = False
    if not sr_channels_attend(m.channels) and step_messages(m) == BLOCKED and message.state != COMPLETE:
        sr_conn_sleep(m.channels.news, limit_ns)
    sr_channels_wake(m.channels)


# True if the message is incomplete after everything its peer sent was processed.
cdef inline bint is_stuck(Matching *m, Message *message) noexcept nogil:
    return step_messages(m) == BLOCKED and message.state != COMPLETE


# Return PROGRESSED if the rank is alive, else DEAD, LEFT, or DAMAGED if its data are invalid.
cdef int p2p_peer_status(Matching *m, int rank) noexcept nogil:
    if m.peer[rank].channel != NULL:
        if sr_flag_load(&m.peer[rank].channel.left) != 0:
            return LEFT
        if sr_flag_load(&m.peer[rank].channel.end) == SR_CHANNEL_DAMAGED:
            return DAMAGED
        return PROGRESSED if sr_flag_load(&m.peer[rank].channel.end) == SR_CHANNEL_OPEN else DEAD
    return peer_status(&m.g.lane[m.peer[rank].lane].liveness)


cdef int poll_peers(Matching *m, Message *message, Wait *wait, uint64_t now) noexcept nogil:
    cdef int rank, peer_status, nleft = 0
    check_liveness(m.g)
    if m.channels != NULL and sr_channels_poll_abort(m.channels):
        return SIGNALLED
    for rank in range(m.size):
        if rank == m.rank or (message.peer != ANY and message.peer != rank):
            continue
        peer_status = p2p_peer_status(m, rank)
        if peer_status == PROGRESSED:
            continue
        wait.culprit = m.unmatched_source = rank
        if peer_status != LEFT:
            return peer_status if is_stuck(m, message) else PROGRESSED
        nleft += 1
    if nleft > 0 and (message.peer != ANY or nleft == m.size - 1):
        return LEFT if is_stuck(m, message) else PROGRESSED
    if now >= wait.deadline_ns:
        wait.culprit = m.rank if message.peer == ANY else message.peer
        return LATE
    if now >= wait.signal_ns:
        wait.signal_ns = now + SIGNAL_INTERVAL_NS
        if message.peer != ANY and m.peer[message.peer].channel != NULL:
            sr_channel_check_link(m.channels, m.peer[message.peer].channel, inter_of(m.g).cut_ns)
        return SIGNALLED
    return PROGRESSED


# ---- in the background -----------------------------------------------------------------------------------------

# Advance one communicator's messages in the progress thread. The thread keeps polling while transfers were pending
# recently, so that a caller need not wake it for each transfer. It waits for the event only if a message is partly
# transferred.
cdef int poll_messages(Pollable *e, sr_waitset *waitset) noexcept nogil:
    cdef Matching *m = <Matching *> e
    cdef uint64_t now = sr_now_ns()
    cdef int found
    e.news = 0
    if not sr_flag_take(&m.stepper, BACKGROUND):   # a caller advances the messages
        if now < m.watched_until_ns:
            return WAITING
        sr_flag_swap(&m.resting, 1)
        if not sr_flag_take(&m.stepper, BACKGROUND):
            return IDLE
    if m.npending == 0 and m.completed != NULL:
        found = REAPABLE
    elif m.npending == 0 or m.stuck or sr_flag_load(&m.g.header.abort) != SR_NO_ABORT:
        found = IDLE
        if now < m.watched_until_ns and m.npending == 0:
            found = WAITING
        else:
            sr_flag_swap(&m.resting, 1)
    else:
        m.watched_until_ns = now + WATCH_NS
        found = step_pollable(m, waitset)
    sr_flag_set(&m.stepper, 0)
    return found


cdef int step_pollable(Matching *m, sr_waitset *waitset) noexcept nogil:
    cdef int status
    if waitset != NULL:
        publish_all_taken(m)
        if is_flowing(m):
            sr_waitset_watch(waitset, &m.g.me.p2p_event)
    m.far_later = False
    if m.channels != NULL and awaited_sides(m) & FAR_SIDE:
        m.pollable.news, m.pollable.waker = m.channels.news, m.channels.waker
    status = step_messages(m)
    if status == PROGRESSED:
        return ACTIVE
    return WAITING if status == BLOCKED else WANTS_PYTHON


cdef bint is_flowing(Matching *m) noexcept nogil:
    cdef int i
    for i in range(m.nsources):
        if m.peer[m.source[i]].receiving:
            return True
    return m.nsends > 0
