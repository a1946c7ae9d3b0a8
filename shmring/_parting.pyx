# What ranks of other hosts have said that they call, beside what this one calls: for the words of a mismatch, and of a
# rank that is late. May know: _group, _leg, _state.

from libc.stdint cimport int64_t, uint64_t

from ._group cimport Call, Group, sr_now_ns
from ._leg cimport *
from ._state cimport State

from . import _state

# So long, or half of what makes it late, nobody asks whether who waits for whom is in the same call.
cdef uint64_t ASK_NS = 1_000_000_000


# What this rank called, what a rank says that it called, and as which of the user's calls, if not as this one: who had
# nothing to wait for in a call meets it in a later one.
cdef tuple parted_calls(State state, Call *c, int rank):
    cdef Leg *leg = leg_of(&state.g)
    cdef sr_wire *wire = leg.wire[rank]
    cdef sr_wire_head *head = &wire.arriving
    cdef uint64_t seq = leg.seq, fingerprint = c.fingerprint, count = c.count
    cdef sr_wire_head *wanted
    if sr_wire_is_busy(&wire.in_):   # it may be of a call before
        wanted = &wire.in_.message[wire.in_.first % SR_WIRE_QUEUE].head
        seq, fingerprint, count = wanted.seq, wanted.fingerprint, wanted.count
    return (_state.described(fingerprint, count), _state.described(head.fingerprint, head.count),
            None if head.seq == seq else call_number(leg, head.seq))


# Of a call that has waited for a while: a rank that waits in another one, what this rank calls, and what that one
# does; None: nobody has said so.
cdef tuple find_parted(State state, Call *c, object alarms):
    cdef Leg *leg = leg_of(&state.g)
    if leg == NULL or leg.fingerprint == 0 or sr_now_ns() - c.wait_begin_ns < min(ASK_NS, c.timeout_ns // 2):
        return None
    rank = alarms.compare_calls(leg.seq, leg.fingerprint, leg.count)
    if rank is None:
        return None
    return rank, _state.described(leg.fingerprint, leg.count), _state.described(*alarms.call_of(rank)[1:])


# By what came from a rank last: (which of the user's calls it was in, what that was); None: nothing came.
cdef tuple last_call_of(State state, int rank, object alarms):
    cdef Leg *leg = leg_of(&state.g)
    cdef sr_wire *wire = leg.wire[rank]
    heard = alarms.call_of(rank)
    if wire.nreceived > 0 and (heard is None or call_number(leg, heard[0]) < call_number(leg, wire.arriving.seq)):
        heard = wire.arriving.seq, wire.arriving.fingerprint, wire.arriving.count
    return None if heard is None else (call_number(leg, heard[0]), _state.described(*heard[1:]))


# Of the ranks of other hosts that a late call waits for, who is to blame. Whoever is behind most may be so because it
# waits itself, and then has said so: rather one of which nothing is heard.
cdef int most_suspect(State state, Call *c, object alarms) except -1:
    cdef Group *g = &state.g
    cdef Leg *leg = leg_of(g)
    cdef sr_wire *wire
    cdef int at, rank, culprit = c.awaited.rank
    cdef int64_t awaited, most = -1
    if culprit < g.size or leg.wire[culprit - g.size] == NULL or not says_that_it_waits(leg, culprit - g.size, alarms):
        return culprit
    for at in range(leg.nbusy):
        wire = &leg.wires[leg.busy[at]]
        rank, awaited = rank_at_end_of(leg, wire), sr_wire_length(&wire.in_)
        if awaited > most and not says_that_it_waits(leg, rank, alarms):
            culprit, most = remote(g, rank), awaited
    return culprit


# Whether the last that was heard of a rank is that it waits.
cdef bint says_that_it_waits(Leg *leg, int rank, object alarms):
    cdef sr_wire *wire = leg.wire[rank]
    said = alarms.call_of(rank)
    if said is None or wire.nreceived == 0:
        return said is not None
    return call_number(leg, wire.arriving.seq) <= call_number(leg, said[0])
