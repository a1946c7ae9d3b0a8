# Which of the calls with a priority runs next, of those that every rank has issued: all have to pick the same. And
# large ones in parts, so that an urgent one waits for a part at most (Peng et al. 2019, ByteScheduler; Jayarajan et al.
# 2019, P3).
#
# A queue holds calls as they were issued, and the oldest runs. Calls with a priority that follow each other are a
# *priority run*; one without is its end:
#
#       finished |  a   B   C   D  |  e   F ...       capitals: with a priority; B, C and D are a run once a is done
#                   oldest
#
# When the oldest has a priority, what is stepped first is the queue's own *election*, a tiny all_reduce(min) of how
# many calls there are from the oldest to the end of its run on each rank. So many every rank has issued and, as they
# were issued alike everywhere and reordered alike, all ranks know which: that with the greatest priority, of several
# the first, is taken to the front. The queue is then what it would be had it been issued there, and goes on as always:
# numbers, waits, reaping and the end know nothing of it.
#
#       B2 C1 D7 | e    min 2: C was issued by all, D was not     ->   choose among B, C   ->   B2 C1 D7
#       C1 D7    | e    min 2 once D has come                     ->   choose among C, D   ->   D7 C1
#
#                   append                the election is done, it is the first
#    Task.turn: ------------>  CANDIDATE  ----------------------------------->  CHOSEN  --->  finished
#                                  ^                                               |
#                                  +-----------  a part is done, more is left  <---+
#
# An election says in its fingerprint which call is the oldest and what was chosen before: where ranks give a call
# different priorities they part in it, at the latest in the one after a pick that differed. It has a sequence number
# and a record as every call, but counts as none: neither in stats nor among the user's calls.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from .._core.group cimport *
from .._core.trace cimport end_call
from .._diagnostics.flight_recorder cimport SR_WAIT_CALL, end_wait
from .._internode.context cimport inter_of
from .._internode.data_movement cimport choose_way
from .queue cimport *


cdef enum:
    MOST_PART_NBYTES = 4 << 20   # of a call that is run in parts (bench/engine/bench_priority.py)


# ---- the election ------------------------------------------------------------------------------------------------

cdef void prepare_election(Queue *q) noexcept:
    cdef Call *c = &q.election.call
    q.election.turn = CHOSEN
    q.election.bunch = q
    c.kind, c.named = ALL_REDUCE, ELECTION
    c.dtype, c.op = SR_U64, SR_MIN
    c.count = 1
    c.itemsize = c.nbytes = c.x_nbytes = c.out_nbytes = sizeof(q.nready)
    c.x = c.out = <unsigned char *> &q.nready
    c.enter = enter_election


cdef void enter_election(Group *g, Call *c) noexcept nogil:
    cdef Queue *q = <Queue *> (<Task *> c).bunch
    cdef Task *first = oldest(q)
    q.election.number = first.number
    q.stats = g.stats
    q.nready = nready(q)
    c.timeout_ns = first.call.timeout_ns
    c.fingerprint = fingerprint_of(c) ^ mixed(q.chosen ^ first.fingerprint) >> 32 << 32
    choose_way(g, c)
    c.enter(g, c)
    c.enter = enter_election
    record_candidate(g.recorded, first)


# From the oldest to the end of its run.
cdef uint64_t nready(const Queue *q) noexcept nogil:
    cdef uint64_t first = sr_flag_load(&q.finished) + 1
    cdef uint64_t end = sr_flag_load(&q.issued) + 1
    cdef uint64_t number = first
    while number != end and q.task[number & q.mask].turn != IN_ORDER:
        number += 1
    return number - first


# What others read of it names the call that is the oldest.
cdef void record_candidate(sr_record *record, const Task *first) noexcept nogil:
    cdef const Call *c = &first.call
    memcpy(&record.kind, &c.kind, 8)
    record.named = ELECTION
    record.root, record.count = <uint32_t> c.root, c.count + first.left
    record.nodes_in_group, record.priority = c.nodes_in_group, c.priority


# Every rank has issued the first q.nready.
cdef void choose(Queue *q) noexcept nogil:
    cdef uint64_t first = sr_flag_load(&q.finished) + 1
    cdef uint64_t best = first
    cdef uint64_t number
    cdef Task *t
    for number in range(first + 1, first + q.nready):
        if q.task[number & q.mask].call.priority > q.task[best & q.mask].call.priority:
            best = number
    t = q.task[best & q.mask]
    q.chosen = mixed(q.chosen ^ t.fingerprint ^ best - first)
    number = best
    while number != first:
        put(q, number, q.task[(number - 1) & q.mask])
        number -= 1
    put(q, first, t)
    t.turn = CHOSEN


cdef inline void put(Queue *q, uint64_t number, Task *t) noexcept nogil:
    q.task[number & q.mask] = t
    sr_flag_set(&t.number, number)


# ---- parts -----------------------------------------------------------------------------------------------------

# Whether every element comes to the same bits in whatever part it is, and lies at the same place in x and out.
cdef inline bint may_go_in_parts(const Call *c) noexcept nogil:
    if c.kind != BROADCAST and (not is_sliced(c) or c.wire != SR_WIRE_NATIVE):
        return False
    return c.nbytes > MOST_PART_NBYTES and (c.algorithm == AUTO or c.algorithm == DIRECT)


# The part behind the one that the call is.
cdef void take_part(Group *g, Task *t) noexcept nogil:
    cdef Call *c = &t.call
    cdef uint64_t signature = c.fingerprint ^ fingerprint_of(c)   # of a list of arrays that it is of
    c.x += c.nbytes
    c.out += c.nbytes
    c.x_offset += c.nbytes
    c.out_offset += c.nbytes
    c.count = min(t.left, max(MOST_PART_NBYTES // c.itemsize, <size_t> 1))
    c.nbytes = c.x_nbytes = c.out_nbytes = c.count * c.itemsize
    t.left -= c.count
    c.fingerprint = fingerprint_of(c) ^ signature
    choose_way(g, c)


# Of a call that is about to be appended.
cdef void become_candidate(Queue *q, Task *t) noexcept:
    t.turn = CANDIDATE
    t.fingerprint = t.call.fingerprint
    if may_go_in_parts(&t.call):
        t.left = t.call.count
        t.call.nbytes = 0
        take_part(q.group, t)


# What is to be done instead of finishing a task whose call is done: False, nothing.
cdef bint goes_on(Queue *q, Task *t) noexcept nogil:
    cdef Group *g = q.group
    cdef bint is_election = t == &q.election
    if not is_election and t.left == 0:
        return False
    end_call(g, SR_COMPLETE)
    end_wait(g, SR_WAIT_CALL)
    g.first_user_seq += 1   # what comes next has the same number among the user's calls
    if g.inter != NULL:
        inter_of(g).first_user_seq += 1
    t.begun = False
    if is_election:
        g.stats = q.stats
        choose(q)
    else:
        take_part(g, t)
        t.turn = CANDIDATE
    return True
