# What ranks of other hosts have said that they call, beside what this one calls: for the words of a mismatch, and of a
# rank that is late.

from libc.stdint cimport int64_t, uint64_t

from .._core.group cimport REMOTE_MISMATCH, SR_NO_ABORT, Call, Group, sr_flag_load, sr_now_ns
from .._internode.context cimport *
from .state cimport State

import time

from . import state as _state

# So long, or half of what makes it late, nobody asks whether who waits for whom is in the same call.
cdef uint64_t ASK_NS = 1_000_000_000
cdef uint64_t SAME_CALL_NS = 1_000_000_000


# Of calls that do not match where one rank is in a later call already, so that they are not those that differ: a host
# confirms soon what it called in this one, or somebody tells why it is over.
cdef int await_same_call(State state, Call *c, object notifications) except -1:
    cdef InterNode *inter = inter_of(&state.g)
    cdef uint64_t until_ns = sr_now_ns() + SAME_CALL_NS
    while inter.theirs.seq != inter.ours.seq and sr_now_ns() < until_ns:
        if notifications.poll() is not None or sr_flag_load(&state.g.header.abort) != SR_NO_ABORT:
            return 0
        if examine_confirmations(&state.g, c) != REMOTE_MISMATCH:
            time.sleep(0.001)
    return 0


# What this rank called, what a rank says that it called, and as which of the user's calls, if not as this one: who had
# nothing to wait for in a call meets it in a later one.
cdef tuple mismatched_calls(State state):
    cdef InterNode *inter = inter_of(&state.g)
    return (_state.described(inter.ours.fingerprint, inter.ours.count),
            _state.described(inter.theirs.fingerprint, inter.theirs.count),
            None if inter.theirs.seq == inter.ours.seq else call_number(inter, inter.theirs.seq))


# Of a call that has waited for a while: a rank that waits in another one, what this rank calls, and what that one
# does; None: nobody has said so.
cdef tuple find_remote_mismatch(State state, Call *c, object notifications):
    cdef InterNode *inter = inter_of(&state.g)
    if inter == NULL or inter.fingerprint == 0 or sr_now_ns() - c.wait_begin_ns < min(ASK_NS, c.timeout_ns // 2):
        return None
    rank = notifications.compare_calls(inter.seq, inter.fingerprint, inter.count)
    if rank is None:
        return None
    return rank, _state.described(inter.fingerprint, inter.count), _state.described(*notifications.call_of(rank)[1:])


# By what came from a rank last: (which of the user's calls it was in, what that was); None: nothing came.
cdef tuple last_call_of(State state, int rank, object notifications):
    cdef InterNode *inter = inter_of(&state.g)
    cdef sr_conn *conn = inter.conn[rank]
    last = notifications.call_of(rank)
    if conn.nreceived > 0 and (last is None or call_number(inter, last[0]) < call_number(inter, conn.arriving.seq)):
        last = conn.arriving.seq, conn.arriving.fingerprint, conn.arriving.count
    return None if last is None else (call_number(inter, last[0]), _state.described(*last[1:]))


# Of the ranks of other hosts that a late call waits for, who is to blame. Whoever is behind most may be so because it
# waits itself, and then has said so: rather one of which nothing is last.
cdef int most_suspect(State state, Call *c, object notifications) except -1:
    cdef Group *g = &state.g
    cdef InterNode *inter = inter_of(g)
    cdef sr_conn *conn
    cdef int at, rank, culprit = c.awaited.rank
    cdef int64_t awaited, most = -1
    if culprit < g.size or inter.conn[culprit - g.size] == NULL or not is_waiting(inter, culprit - g.size,
                                                                                  notifications):
        return culprit
    for at in range(inter.nbusy):
        conn = &inter.conns[inter.busy[at]]
        rank, awaited = rank_at_end_of(inter, conn), sr_conn_length(&conn.in_)
        if awaited > most and not is_waiting(inter, rank, notifications):
            culprit, most = remote(g, rank), awaited
    return culprit


# Whether the last that was heard of a rank is that it waits.
cdef bint is_waiting(InterNode *inter, int rank, object notifications):
    cdef sr_conn *conn = inter.conn[rank]
    last = notifications.call_of(rank)
    if last is None or conn.nreceived == 0:
        return last is not None
    return call_number(inter, conn.arriving.seq) <= call_number(inter, last[0])
