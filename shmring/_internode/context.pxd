# InterNode: the state of a rank for calls over several hosts: the host of each rank, the connections to ranks of other
# hosts, and the messages posted on them.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from .._core.group cimport BROADCAST, GATHER, REDUCE, SCATTER, Call, Group, Piece, record_call, reset_waits
from .._core.kernels cimport SR_WIRE_NATIVE
from .._transport.channel cimport sr_channel, sr_channel_call, sr_channels
from .._transport.channels cimport Channels


cdef extern from "conn.h" nogil:
    cdef struct sr_conn_head:
        uint32_t magic, number
        uint64_t seq, fingerprint, count, nbytes
    cdef struct sr_conn_message:
        sr_conn_head head
    ctypedef struct sr_conn_queue "struct sr_conn_queue":
        sr_conn_message *message
        uint32_t first, end
    cdef struct sr_conn:
        int fd, error
        uint64_t nreceived
        sr_conn_queue out
        sr_conn_queue in_ "in"
        sr_conn_head arriving
    cdef enum:
        SR_CONN_MAGIC, SR_CONN_QUEUE
        SR_CONN_PROGRESSED, SR_CONN_CLOSED, SR_CONN_FAILED, SR_CONN_MISMATCH
    void sr_conn_open(sr_conn *, int fd)
    bint sr_conn_is_busy(const sr_conn_queue *)
    uint32_t sr_conn_length(const sr_conn_queue *)
    void sr_conn_post(sr_conn_queue *, const sr_conn_head *, void *data, uint32_t *left)
    int sr_conn_step(sr_conn *)
    bint sr_conn_is_cut(sr_conn *, uint64_t limit_ns)
    bint sr_conn_peek(sr_conn *)
    void sr_conn_sleep(int news, uint64_t limit_ns)
    void sr_conn_sleep_or(int news, int other, uint64_t limit_ns)
    void sr_conn_take_news(int news)


cdef enum:
    MOST_UNDER_WAY = 8   # fragments of one call that are in progress at once
    OTHER_SLICES = 2     # slices of room for a fragment, besides one for each host; see room_of in reductions
    SLACK_NBYTES = 64    # room behind each slice: a few elements may be longer in their wire format than in memory


# A part of a message that hosts exchange at once.
cdef struct Fragment:
    size_t begin, count    # elements of the message
    uint32_t sending       # number of posted sends that are not complete
    uint32_t receiving     # number of posted receives that are not complete


# Ranks are numbered over all hosts, unless they are called local.
cdef struct InterNode:
    int rank, size
    int host, nhosts
    int *host_of           # by rank: its host
    int *local_of          # by rank: its local rank on its host
    int *nlocal            # by host: number of its ranks
    int *first             # by host: index of its first rank in rank_at
    int *rank_at           # all ranks, by host and local rank
    sr_conn **conn         # by rank: the connection to it; NULL for a rank of this host
    sr_conn *conns         # all connections
    int nconns
    int *busy              # numbers of the connections with posted messages that are not complete
    int nbusy
    int next_examined      # the next connection that a long wait checks
    uint64_t cut_ns        # a connection counts as cut if the other end has not answered for this time
    int news               # an epoll descriptor of all connections and of `channels`
    sr_channels *channels  # the channels to ranks of other hosts
    uint64_t seq           # number of the last call begun, as all ranks count
    uint64_t first_user_seq   # number of the first call that is not the engine's own
    uint64_t fingerprint, count   # of the last call begun; fingerprint 0: see its record
    uint64_t first_local   # sequence number of the first local step of the last call
    # Confirmations between hosts, see await_confirmations. Only the first rank of each host sends and awaits them.
    sr_channel **confirmer  # by host: the channel to its first rank; NULL: this rank is not the first of its host
    sr_channel_call last_confirmed   # the last call that this host has confirmed
    int nconfirmed         # hosts 0 to nconfirmed - 1 have confirmed it
    sr_channel_call ours, theirs   # once the status is REMOTE_MISMATCH: the two calls that do not match
    const void **source    # by host, valid within one step
    const void **by_rank   # by rank, valid within one step
    # the call in progress
    bint previous_is_confirmed   # every host has confirmed the previous call
    bint is_to_confirm     # this rank has yet to confirm the call
    Call local             # the current local step, or the last one
    bint runs_locally      # a local step is in progress
    int round, stage       # place in the schedule
    int batch              # number of the next batch of ranks within a round
    int lag                # rounds from the beginning of a fragment to its end
    int fold_lag           # rounds from the beginning of a fragment to its first fold
    bint in_parts          # each host folds a part of a slice for all hosts; else each host folds the whole slice
    bint through_room      # received data go through `room`, since they would overwrite data not yet sent
    int per_group          # hosts of a group, which exchange among themselves first; nhosts if there are no groups
    int dtype              # of partial results
    size_t itemsize        # bytes of an element of partial results
    int format             # wire format of partial results
    size_t fragment_count   # elements of a fragment
    size_t part_nbytes     # bytes of a part of a piece
    Fragment[MOST_UNDER_WAY] fragment
    Piece *given           # by local rank, of the local step
    Piece *taken
    # sizes that are the same for all calls
    size_t small_nbytes    # up to this size one rank of each host exchanges the whole message
    size_t parts_nbytes    # from this size on, two hosts fold half of a message each
    size_t slice_nbytes    # the most bytes of a fragment that one rank owns
    size_t fragment_nbytes, least_fragment_nbytes
    size_t pair_nbytes     # half of `room` holds one part of this size for each rank
    size_t even_nbytes     # in a multiple of this size, all ranks of every host own slices of equal length
    int most_parts         # limit for the parts into which borders between owners, on any host, cut the slice of a rank
    unsigned char *room    # for fragments in progress: MOST_UNDER_WAY * (OTHER_SLICES + nhosts) slices
    unsigned char *scratch  # valid within one local step or one fold: a fragment, and a slice for each host


cdef inline InterNode *inter_of(const Group *g) noexcept nogil:
    return <InterNode *> g.inter


# Return the rank that has this local rank on a host.
cdef inline int rank_at(const InterNode *inter, int host, int local) noexcept nogil:
    return inter.rank_at[inter.first[host] + local]


cdef inline Fragment *fragment_at(InterNode *inter, int number) noexcept nogil:
    return &inter.fragment[number % MOST_UNDER_WAY]


cdef inline int nfragments(InterNode *inter, Call *c) noexcept nogil:
    return <int> ((c.count + inter.fragment_count - 1) // inter.fragment_count)


# Set begin and count of a new fragment.
cdef inline void lay_out(InterNode *inter, const Call *c, int number) noexcept nogil:
    cdef Fragment *fragment = fragment_at(inter, number)
    fragment.begin = <size_t> number * inter.fragment_count
    fragment.count = min(inter.fragment_count, c.count - fragment.begin)


# Return the number of batches of ranks of a host, if a batch has one rank for each local rank of this host.
cdef inline int nbatches(Group *g, InterNode *inter, int host) noexcept nogil:
    return (inter.nlocal[host] + g.size - 1) // g.size


# Return the host of a batch. Set *first to the batch's first local rank there.
cdef inline int host_of_batch(Group *g, InterNode *inter, int batch, int *first) noexcept nogil:
    cdef int host = 0
    while host < inter.nhosts and batch >= nbatches(g, inter, host):
        batch -= nbatches(g, inter, host)
        host += 1
    first[0] = batch * g.size
    return host


# Return the index of a host among the other hosts: data received from other hosts are stored in this order.
cdef inline int index_of_other(const InterNode *inter, int host) noexcept nogil:
    return host if host < inter.host else host - 1


# Return the number of a rank of another host in waits, where local ranks are numbered first.
cdef inline int remote(const Group *g, int rank) noexcept nogil:
    return g.size + rank


# Return the number of the user's call with this sequence number. The first one is 1; the engine's own are 0 or less.
cdef inline int64_t call_number(const InterNode *inter, uint64_t seq) noexcept nogil:
    return <int64_t> (seq - inter.first_user_seq) + 1


# Return the number of the user's call with this sequence number. Over several hosts: of the last call begun.
cdef inline int64_t number_in(const Group *g, uint64_t seq) noexcept nogil:
    if g.inter != NULL:
        return call_number(inter_of(g), inter_of(g).seq)
    return <int64_t> (seq - g.first_user_seq) + 1


# True if a host may receive nothing from another host in this call. Such calls are confirmed.
cdef inline bint is_one_sided(const Call *c) noexcept nogil:
    return c.kind == BROADCAST or c.kind == REDUCE or c.kind == GATHER or c.kind == SCATTER


# Begin a call over several hosts. Its first step starts it; see step_internode.
cdef inline void begin_internode(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int i
    inter.seq += 1
    inter.fingerprint, inter.count = c.fingerprint, c.count
    inter.first_local = g.seq + 1
    c.number = call_number(inter, inter.seq)
    c.seq = g.seq + 1   # for the record: sequence number of its first local step, if it has one
    record_call(g, c)
    inter.round = inter.stage = 0
    inter.runs_locally = inter.previous_is_confirmed = False
    inter.is_to_confirm = inter.confirmer != NULL and is_one_sided(c)
    inter.dtype, inter.itemsize = c.dtype, max(c.itemsize, <size_t> 1)
    inter.format = SR_WIRE_NATIVE
    inter.per_group = inter.nhosts
    for i in range(MOST_UNDER_WAY):
        inter.fragment[i].sending = inter.fragment[i].receiving = 0
    c.seq = c.mismatch_seq = g.seq   # for a wait before the first local step
    reset_waits(c)


cdef inline int rank_at_end_of(const InterNode *inter, const sr_conn *conn) noexcept nogil:
    cdef int rank = 0
    while inter.conn[rank] != conn:
        rank += 1
    return rank


# True if nmessages more messages can be posted for every rank.
cdef inline bint have_room(const InterNode *inter, int nmessages) noexcept nogil:
    cdef int at
    cdef sr_conn *conn
    for at in range(inter.nbusy):
        conn = &inter.conns[inter.busy[at]]
        if max(sr_conn_length(&conn.out), sr_conn_length(&conn.in_)) + nmessages > SR_CONN_QUEUE:
            return False
    return True


cdef void send_to(Group *g, Call *c, int rank, const void *data, size_t nbytes, uint32_t *left) noexcept nogil
cdef void receive_from(Group *g, Call *c, int rank, void *data, size_t nbytes, uint32_t *left) noexcept nogil
cdef int move(Group *g, Call *c) noexcept nogil
cdef int examine(Group *g, Call *c) noexcept nogil
cdef int blocked_on_conns(Group *g, Call *c) noexcept nogil
cdef int furthest_behind(Group *g, Call *c) noexcept nogil
cdef void confirm(Group *g, Call *c) noexcept nogil
cdef int await_confirmations(Group *g, Call *c) noexcept nogil
cdef int examine_confirmations(Group *g, Call *c) noexcept nogil

cdef Call *new_local(Group *g, Call *c, int kind, size_t count) noexcept nogil
cdef void begin_local(Group *g, Call *c) noexcept nogil
cdef int begin_barrier(Group *g, Call *c) noexcept nogil
cdef int step_internode(Group *g, Call *c) noexcept nogil
cdef int finish_internode(Group *g, Call *c) noexcept nogil


# True if a rank of `host` needs the result.
cdef inline bint is_wanted_on(InterNode *inter, Call *c, int host) noexcept nogil:
    return c.kind != REDUCE or host == inter.host_of[c.root]


cdef class InterNodeConns:
    cdef InterNode inter
    cdef object news, data, channels

    cdef int allocate(self, int size) except -1
    cdef int find_confirmers(self, Channels channels) except -1
