# Which rank keeps this one waiting, on this host and on others: for errors, and for the warning about a long wait.

import contextlib

from libc.stdint cimport int64_t, uint64_t

from .._core.group cimport DOUBLE_TREE, MASTER, REMOTE_MISMATCH, TREE, Call, Group, counter, line_of
from .._core.schedule cimport sr_double_tree_depth, sr_double_tree_is_inner, sr_tree_steps
from .._core.segment cimport (
    SR_COPIED, SR_HANDED, SR_NO_ABORT, SR_REDUCED, SR_STAGED, sr_flag_load, sr_flag_reached, sr_now_ns,
)
from .._diagnostics.flight_recorder cimport SR_WAITS
from .._internode.context cimport (
    InterNode, call_number, examine_confirmations, furthest_behind, inter_of, rank_at_end_of, remote, sr_conn,
    sr_conn_length,
)
from .state cimport State

import time

from .._diagnostics import stall_warning
from . import state as _state

assert <int> SR_WAITS <= <int> MOST_PLACES

# So long, or half of what makes it late, nobody asks whether who waits for whom is in the same call.
cdef uint64_t ASK_NS = 1_000_000_000
cdef uint64_t SAME_CALL_NS = 1_000_000_000


# ---- ranks of this host ----------------------------------------------------------------------------------------

# The first call that not everybody has come to; the next one if all are in this.
cdef uint64_t first_not_reached(Group *g, Call *c) noexcept nogil:
    cdef uint64_t seq = g.verified
    cdef int rank
    while seq != c.seq:
        seq += 1
        for rank in range(g.size):
            if not sr_flag_reached(&line_of(g, rank, seq).seq, seq):
                return seq
    return c.seq + 1


# How far a rank is from where this call begins; as far as that if it has come to the call, whatever it needed before.
# In a double tree no rank is behind the one that all wait for in any of the four ways in which each goes ahead.
cdef int64_t progress_of(Group *g, Call *c, int rank, bint has_come) noexcept nogil:
    cdef int64_t some, progress = 0
    cdef int which
    for which in range(SR_STAGED, (SR_HANDED if c.algorithm == DOUBLE_TREE else SR_STAGED) + 1):
        some = <int64_t> (sr_flag_load(counter(g, rank, which)) - g.position)
        progress += max(some, 0) if has_come else some
    return progress


# Where a rank is an inner node. Who is one in both trees, as the root of the first, waits upwards for all of that, and
# downwards for who is above it in the second.
cdef inline int depth_above(Group *g, int rank) noexcept nogil:
    return sr_double_tree_depth(rank, g.size, not sr_double_tree_is_inner(rank, g.size, 0))


cdef inline int depth_below(Group *g, int rank) noexcept nogil:
    return sr_double_tree_depth(rank, g.size, sr_double_tree_is_inner(rank, g.size, 1))


# Of ranks of a double tree that are as far as each other those below in it wait for those above if they have results to
# hand down; else it is the other way round. The least is to blame.
cdef int order_of(Group *g, Call *c, int rank) noexcept nogil:
    cdef uint64_t reduced = sr_flag_load(counter(g, rank, SR_REDUCED))
    if c.algorithm != DOUBLE_TREE:
        return 0
    if sr_flag_reached(counter(g, rank, SR_HANDED), reduced):
        return -depth_above(g, rank)
    return depth_below(g, rank)


# Who keeps this rank waiting in the end: who has not come to the call, else the rank awaited. Where that may be waiting
# itself for another, who is least far: of several that are as far the first, but for double trees.
cdef int latest(Group *g, Call *c) noexcept nogil:
    cdef uint64_t seq
    cdef bint all_came, relayed
    cdef int64_t progress, least = 0
    cdef int culprit = -1, first = 0
    cdef int order, rank
    if c.awaited.rank >= g.size:   # of another host, so that it has no lane here
        return furthest_behind(g, c)
    relayed = c.relayed and (c.algorithm == DOUBLE_TREE or c.awaited.flag == counter(g, c.awaited.rank, SR_STAGED))
    seq = first_not_reached(g, c)
    all_came = seq == c.seq + 1
    if all_came and not relayed:
        return c.awaited.rank
    for rank in range(g.size):
        if rank != g.rank and (all_came or not sr_flag_reached(&line_of(g, rank, seq).seq, seq)):
            progress = progress_of(g, c, rank, all_came) if c.relayed else 0
            order = order_of(g, c, rank)
            if culprit < 0 or progress < least or (progress == least and order < first):
                culprit, least, first = rank, progress, order
    return culprit if culprit >= 0 else c.awaited.rank


# Who waits for one that may wait itself would blame the wrong rank: it says so later, whoever knows better first. Up a
# tree that is who waits for the smaller subtree; down, and for a master, all wait for what is still on its way up.
cdef uint64_t courtesy_ns(Group *g, Call *c) noexcept nogil:
    cdef int waits = 0
    if c.algorithm == DOUBLE_TREE and c.awaited.rank < g.size:
        return <uint64_t> waits_in_double_tree(g, c) * COURTESY_NS
    if (c.algorithm != TREE and c.algorithm != MASTER) or c.awaited.rank >= g.size:
        return 0
    if c.awaited.flag == counter(g, c.awaited.rank, SR_REDUCED):
        waits = sr_tree_steps(g.size) + 1
    elif c.algorithm == TREE:
        while 1 << waits < c.awaited.rank - g.rank:
            waits += 1
    return <uint64_t> waits * COURTESY_NS


# A leaf has only itself to blame; of others the farther from the leaves, and then the farther from the root.
cdef int waits_in_double_tree(Group *g, Call *c) noexcept nogil:
    cdef int steps = sr_tree_steps(g.size)
    if c.awaited.flag == counter(g, c.awaited.rank, SR_REDUCED):
        return steps - depth_above(g, c.awaited.rank)
    if c.awaited.flag == counter(g, c.awaited.rank, SR_HANDED):
        return steps + 1 + depth_below(g, c.awaited.rank)
    return 2 * steps + 1 if c.awaited.flag == counter(g, c.awaited.rank, SR_COPIED) else 0


# ---- ranks of other hosts --------------------------------------------------------------------------------------

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


# ---- the warning -----------------------------------------------------------------------------------------------

cdef class Stalls:
    """What one rank has said of its waits, and when the next word is due."""

    def warn_after(self, State state, double limit_s):
        """From here on waits longer than that are told of; 0: none."""
        self.limit_ns = state.g.stall_ns = <uint64_t> (limit_s * 1e9)

    # Asked every few ms by who waits.
    cdef int heed(self, object engine, int place) except -1:
        cdef State state = engine
        cdef uint64_t since = sr_flag_load(&state.g.me.wait[place].since_ns)
        cdef uint64_t now
        if since == 0 or self.limit_ns == 0:
            return 0
        if self.since_ns[place] != since:
            self.since_ns[place] = since
            self.next_ns[place] = since + self.limit_ns
        now = sr_now_ns()
        if now < self.next_ns[place]:
            return 0
        self.next_ns[place] = now + (now - since)
        # Others that have waited about as long are quiet: until shortly before the next word is due.
        if state.flight.take_report_turn(now, now + (now - since) // 4 * 3):
            with contextlib.suppress(Exception):   # what a handler of the log raises is no error of the call
                stall_warning.warn(engine, place, since)
        return 0
