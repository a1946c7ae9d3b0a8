# The parts of calls over several hosts: messages to ranks of other hosts, confirmations between hosts, and local
# steps, which are collectives among the ranks of one host on their best path. No function blocks.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from .._algorithms.choice cimport choose_local_algorithm
from .._core.group cimport (
    ACROSS, BARRIER, BLOCKED, DONE, LOST, MISMATCHED, PROGRESSED, REMOTE_MISMATCH, Awaited, Call, Group, Piece,
    blocked_on, count_path, fingerprint_of, is_before, is_joined, is_split, line_of, verify,
)
from .._core.kernels cimport SR_AVG, SR_SUM
from .._core.segment cimport SR_CACHE_LINE, sr_flag, sr_flag_load, sr_flag_reached
from .._core.trace cimport step_call
from .._transport.channel cimport (
    SR_CHANNEL_CONFIRMED, SR_CHANNEL_OPEN, sr_channel, sr_channel_call, sr_channel_last_note, sr_channel_notify,
    sr_channel_probe, sr_channels_poll_abort,
)
from .._transport.channels cimport Channels

import math
import select


# ---- posting -------------------------------------------------------------------------------------------------

# Return the head of a message. number: of the message in its direction of the connection. Both ends post messages in
# the same order, so they give a message the same number.
cdef inline sr_conn_head head_of(InterNode *inter, Call *c, uint32_t number, size_t nbytes) noexcept nogil:
    cdef sr_conn_head head
    head.magic = SR_CONN_MAGIC
    head.number = number
    head.seq = inter.seq
    head.fingerprint = c.fingerprint
    head.count = c.count
    head.nbytes = nbytes
    return head


cdef inline bint is_busy(const sr_conn *conn) noexcept nogil:
    return sr_conn_is_busy(&conn.out) or sr_conn_is_busy(&conn.in_)


cdef inline void keep_busy(InterNode *inter, sr_conn *conn) noexcept nogil:
    if not is_busy(conn):
        inter.busy[inter.nbusy] = conn - inter.conns
        inter.nbusy += 1


# Post a message to a rank. *left is increased now, and decreased once the kernel has taken the whole message.
cdef void send_to(Group *g, Call *c, int rank, const void *data, size_t nbytes, uint32_t *left) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef sr_conn *conn = inter.conn[rank]
    cdef sr_conn_head head = head_of(inter, c, conn.out.end, nbytes)
    keep_busy(inter, conn)
    left[0] += 1
    sr_conn_post(&conn.out, &head, <void *> data, left)
    g.stats.bytes_over_wire += nbytes


# Post the receive of a message from a rank. *left is increased now, and decreased once the message is in `data`.
cdef void receive_from(Group *g, Call *c, int rank, void *data, size_t nbytes, uint32_t *left) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef sr_conn *conn = inter.conn[rank]
    cdef sr_conn_head head = head_of(inter, c, conn.in_.end, nbytes)
    keep_busy(inter, conn)
    left[0] += 1
    sr_conn_post(&conn.in_, &head, data, left)


# ---- moving --------------------------------------------------------------------------------------------------

# Move posted messages. Return PROGRESSED, BLOCKED (also if nothing is posted), or a status that ends the communicator.
cdef int move(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int outcome = BLOCKED
    cdef int at = 0
    cdef int status
    cdef sr_conn *conn
    if not inter.previous_is_confirmed and inter.nconfirmed < inter.nhosts:   # confirmations arrive on the channels
        sr_channels_poll_abort(inter.channels)
    while at < inter.nbusy:
        conn = &inter.conns[inter.busy[at]]
        status = sr_conn_step(conn)
        if status >= SR_CONN_CLOSED:
            return lost_conn(g, c, conn, status)
        if status == SR_CONN_PROGRESSED:
            outcome = PROGRESSED
        if is_busy(conn):
            at += 1
        else:
            inter.nbusy -= 1
            inter.busy[at] = inter.busy[inter.nbusy]
    return outcome


cdef int lost_conn(Group *g, Call *c, sr_conn *conn, int status) noexcept nogil:
    c.awaited.rank = remote(g, rank_at_end_of(inter_of(g), conn))
    c.error = conn.error if status == SR_CONN_FAILED else 0
    if status != SR_CONN_MISMATCH:
        return LOST
    if sr_conn_is_busy(&conn.in_):   # the awaited message may belong to an earlier call
        return remote_mismatch(g, c, c.awaited.rank, call_in(&conn.in_.message[conn.in_.first % SR_CONN_QUEUE].head),
                               call_in(&conn.arriving))
    return remote_mismatch(g, c, c.awaited.rank, call_of(g, c), call_in(&conn.arriving))


cdef inline sr_channel_call call_in(const sr_conn_head *head) noexcept nogil:
    return sr_channel_call(head.seq, head.fingerprint, head.count)


cdef inline sr_channel_call call_of(const Group *g, const Call *c) noexcept nogil:
    return sr_channel_call(inter_of(g).seq, c.fingerprint, c.count)


cdef int remote_mismatch(Group *g, Call *c, int rank, sr_channel_call ours, sr_channel_call theirs) noexcept nogil:
    inter_of(g).ours, inter_of(g).theirs = ours, theirs
    c.awaited.rank = rank
    return REMOTE_MISMATCH


# Check one connection in a long wait, the next one with each call. Return LOST if the other end does not answer any
# more, REMOTE_MISMATCH if it sent a message of another call where this rank expects none, else PROGRESSED.
cdef int examine(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef sr_conn *conn
    cdef int status = examine_confirmations(g, c)
    if status != PROGRESSED or inter.nconns == 0:
        return status
    conn = &inter.conns[inter.next_examined]
    inter.next_examined = (inter.next_examined + 1) % inter.nconns
    if is_busy(conn) and sr_conn_is_cut(conn, inter.cut_ns):
        return lost_conn(g, c, conn, SR_CONN_FAILED)
    if not sr_conn_peek(conn) or conn.arriving.seq != inter.seq:
        return PROGRESSED
    if conn.arriving.fingerprint == c.fingerprint and conn.arriving.count == c.count:
        return PROGRESSED
    return lost_conn(g, c, conn, SR_CONN_MISMATCH)


# A flag that is never set, for a call that waits for connections only: a blocked call has to name a flag.
cdef sr_flag never
memset(&never, 0, sizeof(never))


# Block the call until a connection progresses. The awaited rank is the one at the first busy connection.
cdef int blocked_on_conns(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int rank = inter.rank if inter.nbusy == 0 else rank_at_end_of(inter, &inter.conns[inter.busy[0]])
    return blocked_on(c, &never, 1, remote(g, rank))


# ---- confirmations between hosts -----------------------------------------------------------------------------------

# No rank completes a call before all ranks have begun the previous call with the same arguments, so a mismatch shows in
# that call or in the next one. Most calls ensure this themselves, since every host receives data from every other host.
# The other calls are confirmed: once the first rank of a host has seen in the call lines that all ranks of its host
# have begun the call, it sends a confirmation to the first ranks of the other hosts. It starts the next call when it
# has the confirmations of all hosts. The other ranks synchronise with it in a local step.

# Confirm the call to the first ranks of all other hosts.
cdef void confirm(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int host
    inter.last_confirmed = call_of(g, c)
    inter.nconfirmed = 0
    inter.is_to_confirm = False
    for host in range(inter.nhosts):
        if host != inter.host:
            sr_channel_notify(inter.channels, inter.confirmer[host], SR_CHANNEL_CONFIRMED, &inter.last_confirmed,
                              sizeof(inter.last_confirmed))


# Return DONE once every host has confirmed `last_confirmed`, the last call that this host has confirmed. A host that
# has confirmed a later call has compared `last_confirmed` itself.
cdef int await_confirmations(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef sr_channel_call theirs
    cdef sr_channel *channel
    while inter.nconfirmed < inter.nhosts:
        if inter.nconfirmed != inter.host:
            channel = inter.confirmer[inter.nconfirmed]
            if not sr_flag_reached(&channel.confirmed, inter.last_confirmed.seq):
                return blocked_on(c, &channel.confirmed, inter.last_confirmed.seq, remote(g, channel.rank))
            sr_channel_last_note(inter.channels, channel, SR_CHANNEL_CONFIRMED, &theirs)
            if differ(&theirs, &inter.last_confirmed):
                inter.seq = inter.last_confirmed.seq
                inter.fingerprint, inter.count = inter.last_confirmed.fingerprint, inter.last_confirmed.count
                return remote_mismatch(g, c, remote(g, channel.rank), inter.last_confirmed, theirs)
        inter.nconfirmed += 1
    return DONE


cdef inline bint differ(const sr_channel_call *one, const sr_channel_call *other) noexcept nogil:
    return one.seq == other.seq and (one.fingerprint != other.fingerprint or one.count != other.count)


# Check confirmations in a long wait. Return REMOTE_MISMATCH if a host has confirmed a different call, for which it may
# send nothing; LOST if a host whose confirmation is awaited has ended or left; else PROGRESSED.
cdef int examine_confirmations(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef sr_channel_call own = call_of(g, c)
    cdef sr_channel_call theirs
    cdef sr_channel *channel
    cdef int host
    for host in range(inter.nhosts if inter.confirmer != NULL else 0):
        channel = inter.confirmer[host]
        if channel == NULL:
            continue
        if sr_flag_load(&channel.confirmed) == inter.seq:
            sr_channel_last_note(inter.channels, channel, SR_CHANNEL_CONFIRMED, &theirs)
            if differ(&theirs, &own):
                return remote_mismatch(g, c, remote(g, channel.rank), own, theirs)
        if host == inter.nconfirmed and not inter.previous_is_confirmed:
            sr_channel_probe(inter.channels, channel, inter.cut_ns)
            if has_gone(channel) and not sr_flag_reached(&channel.confirmed, inter.last_confirmed.seq):
                c.awaited.rank = remote(g, channel.rank)
                c.error = channel.error
                return LOST
    return PROGRESSED


cdef inline bint has_gone(const sr_channel *channel) noexcept nogil:
    return sr_flag_load(&channel.end) != SR_CHANNEL_OPEN or sr_flag_load(&channel.left) != 0


# Return the awaited rank. Of several ranks of other hosts, return the one with the most messages not yet received: the
# others may wait for it themselves, and have sent everything that does not depend on it.
cdef int furthest_behind(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int culprit = c.awaited.rank
    cdef uint32_t awaited, most = 0
    cdef int at
    if culprit < g.size:
        return culprit
    for at in range(inter.nbusy):
        awaited = sr_conn_length(&inter.conns[inter.busy[at]].in_)
        if awaited > most:
            culprit, most = remote(g, rank_at_end_of(inter, &inter.conns[inter.busy[at]])), awaited
    return culprit


# ---- one local step --------------------------------------------------------------------------------------------

# Make the next local step. The caller sets x, out and root, and given and taken if the pieces differ in length.
# count: number of elements that one rank takes from one other rank.
cdef Call *new_local(Group *g, Call *c, int kind, size_t count) noexcept nogil:
    cdef Call *local_call = &inter_of(g).local
    memset(local_call, 0, sizeof(Call))
    local_call.kind = kind
    local_call.dtype = c.dtype
    local_call.op = SR_SUM if c.op == SR_AVG else c.op   # the sum is divided once, when all hosts are added
    local_call.order = c.order
    local_call.count = count
    local_call.itemsize = c.itemsize
    local_call.nbytes = count * c.itemsize
    local_call.timeout_ns = c.timeout_ns
    local_call.recorded_as = c if c.recorded_as == NULL else c.recorded_as
    return local_call


cdef void begin_local(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Call *local_call = &inter.local
    local_call.x_nbytes = local_call.nbytes * g.size if is_split(local_call) else local_call.nbytes
    local_call.out_nbytes = local_call.nbytes * g.size if is_joined(local_call) else local_call.nbytes
    # Steps of different calls may have equal arguments.
    local_call.fingerprint = fingerprint_of(local_call) ^ c.fingerprint * <uint64_t> 0x9E3779B97F4A7C15
    choose_local_algorithm(g, local_call)
    local_call.enter(g, local_call)
    inter.runs_locally = True
    c.seq = local_call.seq
    c.mismatch_seq = local_call.mismatch_seq


# Begin a local barrier, if there are other local ranks. Return PROGRESSED.
cdef int begin_barrier(Group *g, Call *c) noexcept nogil:
    if g.size > 1:
        new_local(g, c, BARRIER, 0)
        begin_local(g, c)
    return PROGRESSED


# Advance the local step. Return DONE when it is done. Any other status is that of the whole call.
cdef int step_local(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Call *local_call = &inter.local
    cdef int status = step_call(g, local_call)
    if status == DONE:
        inter.runs_locally = False
    elif status != PROGRESSED:
        c.awaited = local_call.awaited
        c.mismatch_seq = local_call.mismatch_seq
        c.error = local_call.error
    return status


# ---- the whole call ------------------------------------------------------------------------------------------

# True if all ranks of this host are known to have begun the current call.
cdef inline bint has_met(Group *g) noexcept nogil:
    return g.size == 1 or not is_before(g.verified, inter_of(g).first_local)


# Publish the line of a call that is about to end with REMOTE_MISMATCH. The message that did not match may belong to a
# later call than the one that differs; the other ranks of this host then see the difference in the line.
cdef int show_call(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Awaited awaited = c.awaited
    cdef int status = PROGRESSED
    while status == PROGRESSED and not sr_flag_reached(&line_of(g, g.rank, inter.first_local).seq, inter.first_local):
        status = step_local(g, c) if inter.runs_locally else c.stage_across(g, c)
    if status == MISMATCHED:
        return status
    c.awaited = awaited
    return REMOTE_MISMATCH


# Advance a call over several hosts, and its connections. c.start_across begins the call once the previous call is
# confirmed. c.stage_across does the next action of the schedule when no local step is in progress. Neither waits for
# another host before the first local step has begun, so ranks of one host that make different calls always detect that
# in this step.
cdef int step_internode(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int moved, status
    if not inter.previous_is_confirmed:
        status = await_confirmations(g, c)
        if status != DONE:
            return status
        inter.previous_is_confirmed = True
        c.start_across(g, c)
    moved = move(g, c)
    if moved != PROGRESSED and moved != BLOCKED:
        return show_call(g, c) if moved == REMOTE_MISMATCH and g.size > 1 else moved
    if inter.runs_locally:
        status = step_local(g, c)
        if status == DONE:
            return PROGRESSED
    elif inter.is_to_confirm and is_before(g.verified, inter.first_local) and not is_before(g.seq, inter.first_local):
        status = verify(g, c, inter.first_local)   # a rank that went ahead has not compared all lines yet
        if status == DONE:
            return PROGRESSED
    else:
        status = c.stage_across(g, c)
        if inter.is_to_confirm and (status == BLOCKED or status == DONE) and has_met(g):
            moved = move(g, c)   # send data before the confirmation
            if moved != PROGRESSED and moved != BLOCKED:
                return moved
            confirm(g, c)
    return PROGRESSED if status == BLOCKED and moved == PROGRESSED else status


# Return DONE once all messages are sent and received.
cdef int finish_internode(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int i
    for i in range(MOST_UNDER_WAY):
        if inter.fragment[i].sending > 0 or inter.fragment[i].receiving > 0:
            return blocked_on_conns(g, c)
    count_path(g, ACROSS)
    return DONE


# ---- construction --------------------------------------------------------------------------------------------

cdef enum:
    SLICE_NBYTES = 1 << 20     # default length of a slice
    SMALL_PER_SLICE = 32       # a message is small up to 1/32 of a slice
    LEAST_PER_SLICE = 16       # a fragment has at least 1/16 of a slice for each rank
    SLICES_FOR_PARTS = 2       # from 2 slices on, two hosts fold in parts, which takes one hop more


# Return the least common multiple of the counts, or 1 if so many cache lines are more than least_nbytes.
cdef object common_multiple(counts, size_t least_nbytes):
    multiple = math.lcm(*counts)
    return multiple if multiple * SR_CACHE_LINE <= least_nbytes else 1


def most_parts(counts):
    """Return a limit for the parts into which the borders of the slices on all hosts cut the slice of one rank.

    counts: numbers of ranks of the hosts. Slices end between two grains, so the slices of one host differ by a grain.
    In a slice of a host of `own` ranks, fewer than 2 * other / own + 1 slices of a host of `other` ranks can end.
    """
    most = 1
    for own in set(counts):
        nparts = 1
        for other in set(counts) - {own}:   # hosts of as many ranks have the same borders
            nparts += min(other - 1, -(-2 * other // own))
        most = max(most, nparts)
    return most


cdef class InterNodeConns:
    """The connections of one communicator on one rank to ranks of other hosts, and the host of every rank.

    hosts: the ranks of each host, in local order. data: a connected, non-blocking socket to every rank of another
    host, by rank. This object keeps the sockets; the caller closes them. channels: those to the same ranks, which
    every wait polls. cut_s: a connection counts as cut if its other end does not answer for so many
    seconds.
    """

    def __cinit__(self, *, int rank, hosts, dict data, Channels channels, double cut_s):
        cdef InterNode *inter = &self.inter
        cdef int at = 0, size = 0
        cdef int host, local, number
        for ranks in hosts:
            size += len(ranks)
        memset(inter, 0, sizeof(InterNode))
        self.news = select.epoll()
        self.data = data
        inter.rank, inter.size, inter.nhosts = rank, size, len(hosts)
        inter.nconns = len(data)
        inter.news = self.news.fileno()
        inter.channels, self.channels = channels.channels, channels
        inter.cut_ns = <uint64_t> (cut_s * 1e9)
        self.news.register(channels.fileno(), select.EPOLLIN)
        self.allocate(size)
        for host, ranks in enumerate(hosts):
            inter.first[host] = at
            inter.nlocal[host] = len(ranks)
            for local, number in enumerate(ranks):
                inter.rank_at[at] = number
                inter.host_of[number], inter.local_of[number] = host, local
                at += 1
        inter.host = inter.host_of[rank]
        at = 0
        for number, connection in sorted(data.items()):
            inter.conn[number] = &inter.conns[at]
            sr_conn_open(inter.conn[number], connection.fileno())
            # Edge-triggered: a step empties a socket before the rank sleeps, and a socket with data of a later call
            # wakes the rank only once.
            self.news.register(connection, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
            at += 1
        self.find_confirmers(channels)
        self.measure_out(SLICE_NBYTES)

    cdef int find_confirmers(self, Channels channels) except -1:
        cdef InterNode *inter = &self.inter
        cdef int host
        inter.nconfirmed = inter.nhosts   # nothing is due
        if inter.local_of[inter.rank] != 0:
            return 0
        inter.confirmer = <sr_channel **> calloc(inter.nhosts, sizeof(void *))
        if inter.confirmer == NULL:
            raise MemoryError()
        for host in range(inter.nhosts):
            if host != inter.host:
                inter.confirmer[host] = channels.channel_of(rank_at(inter, host, 0))
        return 0

    def measure_out(self, size_t slice_nbytes):
        """Set the length of a slice, the same on all ranks, and allocate room for slices. Call it between calls."""
        cdef InterNode *inter = &self.inter
        cdef size_t room_nbytes = max(<size_t> MOST_UNDER_WAY * (OTHER_SLICES + inter.nhosts) * slice_nbytes,
                                      <size_t> 2 * inter.size * SR_CACHE_LINE)   # pair_nbytes is not 0
        cdef size_t least_nbytes = slice_nbytes // LEAST_PER_SLICE
        cdef int host
        counts = []
        for host in range(inter.nhosts):
            counts.append(inter.nlocal[host])
        inter.most_parts = most_parts(counts)
        inter.even_nbytes = common_multiple(counts, least_nbytes) * SR_CACHE_LINE
        inter.small_nbytes = slice_nbytes // SMALL_PER_SLICE
        inter.parts_nbytes = slice_nbytes * SLICES_FOR_PARTS
        inter.slice_nbytes = slice_nbytes
        inter.fragment_nbytes = min(counts) * (slice_nbytes - SLACK_NBYTES)
        inter.least_fragment_nbytes = min(counts) * least_nbytes
        inter.pair_nbytes = room_nbytes // (2 * inter.size) & ~<size_t> (SR_CACHE_LINE - 1)
        free(inter.room)
        free(inter.scratch)
        inter.room = <unsigned char *> malloc(room_nbytes)   # pages are allocated when touched
        inter.scratch = <unsigned char *> malloc((min(counts) + inter.nhosts) * slice_nbytes + room_nbytes // 2)
        if inter.room == NULL or inter.scratch == NULL:
            raise MemoryError()

    cdef int allocate(self, int size) except -1:
        cdef InterNode *inter = &self.inter
        inter.host_of = <int *> calloc(size, sizeof(int))
        inter.local_of = <int *> calloc(size, sizeof(int))
        inter.nlocal = <int *> calloc(inter.nhosts, sizeof(int))
        inter.first = <int *> calloc(inter.nhosts, sizeof(int))
        inter.rank_at = <int *> calloc(size, sizeof(int))
        inter.conn = <sr_conn **> calloc(size, sizeof(void *))
        inter.conns = <sr_conn *> calloc(inter.nconns + 1, sizeof(sr_conn))
        inter.busy = <int *> calloc(inter.nconns + 1, sizeof(int))
        inter.source = <const void **> calloc(inter.nhosts, sizeof(void *))
        inter.by_rank = <const void **> calloc(size, sizeof(void *))
        inter.given = <Piece *> calloc(size, sizeof(Piece))
        inter.taken = <Piece *> calloc(size, sizeof(Piece))
        if (inter.host_of == NULL or inter.local_of == NULL or inter.nlocal == NULL or inter.first == NULL
                or inter.rank_at == NULL or inter.conn == NULL or inter.conns == NULL or inter.busy == NULL
                or inter.source == NULL or inter.by_rank == NULL or inter.given == NULL or inter.taken == NULL):
            raise MemoryError()
        return 0

    def __dealloc__(self):
        cdef InterNode *inter = &self.inter
        free(inter.host_of)
        free(inter.local_of)
        free(inter.nlocal)
        free(inter.first)
        free(inter.rank_at)
        free(inter.conn)
        free(inter.conns)
        free(inter.busy)
        free(inter.confirmer)
        free(inter.source)
        free(inter.by_rank)
        free(inter.given)
        free(inter.taken)
        free(inter.room)
        free(inter.scratch)

    def close(self):
        """Close the epoll descriptor. The caller of the constructor closes the connections."""
        self.news.close()
