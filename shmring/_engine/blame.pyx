# Find the rank that this rank waits for, on this host or on others: for errors, and for the warning about a long wait.


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

# A wait compares the calls of other hosts with its own after this time, or after half of the timeout.
cdef uint64_t ASK_NS = 1_000_000_000
cdef uint64_t SAME_CALL_NS = 1_000_000_000   # limit of await_same_call


# ---- ranks of this host ----------------------------------------------------------------------------------------

# Return the first call that some rank has not entered, or the next call if all ranks have entered this one.
cdef uint64_t first_not_reached(Group *g, Call *c) noexcept nogil:
    cdef uint64_t seq = g.verified
    cdef int rank
    while seq != c.seq:
        seq += 1
        for rank in range(g.size):
            if not sr_flag_reached(&line_of(g, rank, seq).seq, seq):
                return seq
    return c.seq + 1


# Return the progress of a rank in this call, in bytes. It is at least the call's start if the rank has entered the
# call. In a double tree it sums four counters: the rank that all wait for is behind no other rank in any of them.
cdef int64_t progress_of(Group *g, Call *c, int rank, bint has_come) noexcept nogil:
    cdef int64_t some, progress = 0
    cdef int which
    for which in range(SR_STAGED, (SR_HANDED if c.algorithm == DOUBLE_TREE else SR_STAGED) + 1):
        some = <int64_t> (sr_flag_load(counter(g, rank, which)) - g.position)
        progress += max(some, 0) if has_come else some
    return progress


# Return the depth of a rank in the tree in which it is an inner node. A rank that is an inner node in both trees, such
# as the root of the first one, waits upwards for the whole first tree, and downwards for the ranks above it in the
# second.
cdef inline int depth_above(Group *g, int rank) noexcept nogil:
    return sr_double_tree_depth(rank, g.size, not sr_double_tree_is_inner(rank, g.size, 0))


cdef inline int depth_below(Group *g, int rank) noexcept nogil:
    return sr_double_tree_depth(rank, g.size, sr_double_tree_is_inner(rank, g.size, 1))


# Return the order in which ranks of a double tree with equal progress are to blame: the lowest first. Ranks wait for
# those above them if these have results to pass down, else for those below them.
cdef int order_of(Group *g, Call *c, int rank) noexcept nogil:
    cdef uint64_t reduced = sr_flag_load(counter(g, rank, SR_REDUCED))
    if c.algorithm != DOUBLE_TREE:
        return 0
    if sr_flag_reached(counter(g, rank, SR_HANDED), reduced):
        return -depth_above(g, rank)
    return depth_below(g, rank)


# Return the rank to blame for this rank's wait: a rank that has not entered the call, else the awaited rank. If the
# awaited rank may itself wait for another rank, return the rank with the least progress; among equal ones the first, or
# by order_of in a double tree.
cdef int rank_to_blame(Group *g, Call *c) noexcept nogil:
    cdef uint64_t seq
    cdef bint all_came, relayed
    cdef int64_t progress, least = 0
    cdef int culprit = -1, first = 0
    cdef int order, rank
    if c.awaited.rank >= g.size:   # a rank of another host has no lane here
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


# Return the time by which this rank delays its report of a late call. A rank that waits for a waiting rank would blame
# the wrong one, so ranks that know more report first. In a reduction up a tree, a rank that waits for a smaller subtree
# knows more. In a broadcast down a tree, and for a master, all ranks wait for the reduction.
cdef uint64_t report_delay_ns(Group *g, Call *c) noexcept nogil:
    cdef int waits = 0
    if c.algorithm == DOUBLE_TREE and c.awaited.rank < g.size:
        return <uint64_t> waits_in_double_tree(g, c) * REPORT_DELAY_NS
    if (c.algorithm != TREE and c.algorithm != MASTER) or c.awaited.rank >= g.size:
        return 0
    if c.awaited.flag == counter(g, c.awaited.rank, SR_REDUCED):
        waits = sr_tree_steps(g.size) + 1
    elif c.algorithm == TREE:
        while 1 << waits < c.awaited.rank - g.rank:
            waits += 1
    return <uint64_t> waits * REPORT_DELAY_NS


# Return the number of delays in a double tree: none for a rank that waits for a leaf, more with the awaited rank's
# distance from the leaves on the way up, and then more with its distance from the root on the way down.
cdef int waits_in_double_tree(Group *g, Call *c) noexcept nogil:
    cdef int steps = sr_tree_steps(g.size)
    if c.awaited.flag == counter(g, c.awaited.rank, SR_REDUCED):
        return steps - depth_above(g, c.awaited.rank)
    if c.awaited.flag == counter(g, c.awaited.rank, SR_HANDED):
        return steps + 1 + depth_below(g, c.awaited.rank)
    return 2 * steps + 1 if c.awaited.flag == counter(g, c.awaited.rank, SR_COPIED) else 0


# ---- ranks of other hosts --------------------------------------------------------------------------------------

# Wait for the call that differs, after a mismatch with a rank that is in a later call already. Its host soon confirms
# the call that it made in place of this one, or a notification gives the reason why the communicator has ended.
cdef int await_same_call(State state, Call *c, object notifications) except -1:
    cdef InterNode *inter = inter_of(&state.g)
    cdef uint64_t until_ns = sr_now_ns() + SAME_CALL_NS
    while inter.theirs.seq != inter.ours.seq and sr_now_ns() < until_ns:
        if notifications.poll() is not None or sr_flag_load(&state.g.header.abort) != SR_NO_ABORT:
            return 0
        if examine_confirmations(&state.g, c) != REMOTE_MISMATCH:
            time.sleep(0.001)
    return 0


# Return this rank's call, the other rank's call, and the number of the latter if it differs: a rank that waits for
# nothing in a call detects the mismatch in a later one.
cdef tuple mismatched_calls(State state):
    cdef InterNode *inter = inter_of(&state.g)
    return (_state.described(inter.ours.fingerprint, inter.ours.count),
            _state.described(inter.theirs.fingerprint, inter.theirs.count),
            None if inter.theirs.seq == inter.ours.seq else call_number(inter, inter.theirs.seq))


# Return (rank, this rank's call, its call) for a rank of another host that waits in a different call, once this call
# has waited for ASK_NS. Return None if no such rank is known.
cdef tuple find_remote_mismatch(State state, Call *c, object notifications):
    cdef InterNode *inter = inter_of(&state.g)
    if inter == NULL or inter.fingerprint == 0 or sr_now_ns() - c.wait_begin_ns < min(ASK_NS, c.timeout_ns // 2):
        return None
    rank = notifications.compare_calls(inter.seq, inter.fingerprint, inter.count)
    if rank is None:
        return None
    return rank, _state.described(inter.fingerprint, inter.count), _state.described(*notifications.call_of(rank)[1:])


# Return (number, call) of the call that the last data or notification from a rank belongs to; None if nothing came.
cdef tuple last_call_of(State state, int rank, object notifications):
    cdef InterNode *inter = inter_of(&state.g)
    cdef sr_conn *conn = inter.conn[rank]
    last = notifications.call_of(rank)
    if conn.nreceived > 0 and (last is None or call_number(inter, last[0]) < call_number(inter, conn.arriving.seq)):
        last = conn.arriving.seq, conn.arriving.fingerprint, conn.arriving.count
    return None if last is None else (call_number(inter, last[0]), _state.described(*last[1:]))


# Return the rank of another host to blame for a late call. The rank with the most outstanding messages may wait itself,
# and has then sent a notification of its wait. A rank without such a notification is more suspect.
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


# True if the last thing received from a rank is the notification that it waits.
cdef bint is_waiting(InterNode *inter, int rank, object notifications):
    cdef sr_conn *conn = inter.conn[rank]
    last = notifications.call_of(rank)
    if last is None or conn.nreceived == 0:
        return last is not None
    return call_number(inter, conn.arriving.seq) <= call_number(inter, last[0])


# ---- the warning -----------------------------------------------------------------------------------------------

cdef class Stalls:
    """The long waits of one rank, and the times when their next warnings are due."""

    def warn_after(self, State state, double limit_s):
        """Log a warning about waits longer than limit_s seconds from now on; 0 disables it."""
        self.limit_ns = state.g.stall_ns = <uint64_t> (limit_s * 1e9)

    # Log the warning if it is due. A waiting rank calls this every few milliseconds.
    cdef int warn_if_due(self, object engine, int place) except -1:
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
        # Other ranks that have waited about as long log nothing until shortly before this rank's next warning is due.
        if state.flight.take_report_turn(now, now + (now - since) // 4 * 3):
            try:
                stall_warning.warn(engine, place, since)
            except Exception:   # an exception of a log handler is not an error of the call
                pass
        return 0
