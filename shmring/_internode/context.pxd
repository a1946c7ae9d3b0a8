# InterNode: what a rank of one host has to do with ranks of others. Where everybody is, the connections, and moving
# what was posted on them.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from .._core.group cimport BROADCAST, GATHER, REDUCE, SCATTER, Call, Group, Piece, record_call
from .._core.kernels cimport SR_WIRE_NATIVE
from .._transport.channel cimport sr_channel, sr_channel_call, sr_channels
from .._transport.channels cimport Channels


cdef extern from "conn.h" nogil:
    cdef struct sr_conn_head:
        uint32_t magic, part
        uint64_t seq, fingerprint, count, nbytes
    cdef struct sr_conn_message:
        sr_conn_head head
    ctypedef struct sr_conn_queue "struct sr_conn_queue":
        sr_conn_message *message
        uint32_t first, end
    cdef struct sr_conn:
        int fd, error
        uint64_t nsent, nreceived
        sr_conn_queue out
        sr_conn_queue in_ "in"
        sr_conn_head arriving
    cdef enum:
        SR_CONN_MAGIC, SR_CONN_QUEUE
        SR_CONN_IDLE, SR_CONN_BLOCKED, SR_CONN_PROGRESSED, SR_CONN_CLOSED, SR_CONN_FAILED, SR_CONN_MISMATCH
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
    MOST_UNDER_WAY = 8   # fragments of one call
    OTHER_SLICES = 2     # of a fragment that is under way, beside one of every node: see room_of in allreduce
    SLACK_NBYTES = 64    # behind each: a few elements may be longer on the wire than they are here


# A part of a message that is on its way between hosts.
cdef struct Fragment:
    size_t begin, count    # elements of the message
    uint32_t sending       # messages of this rank's that are not sent yet
    uint32_t receiving     # ... that have not arrived


# Ranks are those of the world, unless they are called local.
cdef struct InterNode:
    int rank, size
    int node, nnodes
    int *node_of           # by rank
    int *local_of          # by rank: its number on its node
    int *nlocal            # by node
    int *first             # by node: where its ranks begin in ...
    int *rank_at           # ... this list of all ranks, in local order
    sr_conn **conn         # by rank; NULL: of this node
    sr_conn *conns         # all of them
    int nconns
    int *busy              # numbers of the connections on which something was posted and is not done
    int nbusy
    int next_examined      # the connection that a long wait looks at next
    uint64_t cut_ns        # a connection whose other end has not answered for so long is taken for cut
    int news               # an epoll descriptor of all of them, and of ...
    sr_channels *channels  # the channels to ranks of other hosts
    uint64_t seq           # of the last call begun, of all ranks
    uint64_t first_user_seq   # ... and of the first that is not the engine's own
    uint64_t fingerprint, count   # ... and what it is; 0: see its record
    uint64_t first_local   # the sequence number of its first local step
    # what hosts confirm to each other, see await_confirmations: only the first rank of each host does
    sr_channel **confirmer  # by node: the channel to its first rank; NULL: this rank is not the first of its own
    sr_channel_call due       # the last call that this host has confirmed, ...
    int nconfirmed         # ... and up to which node all have
    sr_channel_call ours, theirs   # once the status is REMOTE_MISMATCH: the two calls that do not match
    const void **source    # by node, valid within one step
    const void **by_rank   # by rank, valid within one step
    # the call under way
    bint has_started       # every host has confirmed the call before
    bint is_to_confirm     # this rank has to confirm it, and has not
    Call local             # the local step that is under way, or was last
    bint runs_locally
    int turn, stage        # where in the schedule
    int group              # ... and which local step of a turn
    int lag                # turns from the beginning of a fragment to its end
    int fold_lag           # ... to what is folded first
    bint in_parts          # each host folds a part of a slice for all, rather than all of it for itself
    bint through_room      # what arrives would overwrite what is yet to be sent
    int per_group          # nodes that exchange with each other first, or all; then groups do
    int dtype              # of partial results
    size_t itemsize        # ... and bytes of one
    int format             # ... and how they are written on the wire
    size_t fragment_count   # elements of a fragment
    size_t part_nbytes     # of a part of a piece
    Fragment[MOST_UNDER_WAY] fragment
    Piece *given           # by local rank, of the local step
    Piece *taken
    # what is the same for all calls
    size_t small_nbytes    # up to here one rank of each host exchanges all of a message
    size_t parts_nbytes    # from here on two hosts fold half of it each
    size_t slice_nbytes    # of a fragment, what one rank owns at most
    size_t fragment_nbytes, least_fragment_nbytes
    size_t pair_nbytes     # of room for everyone's part: half of it holds one of each rank
    size_t even_nbytes     # of a multiple of it all ranks of every node own slices of the same length
    int nborders           # where owners change on any node, within the slice of one rank, at most
    unsigned char *room    # for what is under way: MOST_UNDER_WAY * (OTHER_SLICES + nnodes) slices
    unsigned char *scratch  # valid within one local step or one fold: a fragment, and a slice of every node


cdef inline InterNode *inter_of(const Group *g) noexcept nogil:
    return <InterNode *> g.inter


# The rank that is `local` on a node.
cdef inline int rank_at(const InterNode *inter, int node, int local) noexcept nogil:
    return inter.rank_at[inter.first[node] + local]


cdef inline Fragment *fragment_at(InterNode *inter, int number) noexcept nogil:
    return &inter.fragment[number % MOST_UNDER_WAY]


cdef inline int nfragments(InterNode *inter, Call *c) noexcept nogil:
    return <int> ((c.count + inter.fragment_count - 1) // inter.fragment_count)


# Where a fragment that begins to be under way lies.
cdef inline void lay_out(InterNode *inter, const Call *c, int number) noexcept nogil:
    cdef Fragment *s = fragment_at(inter, number)
    s.begin = <size_t> number * inter.fragment_count
    s.count = min(inter.fragment_count, c.count - s.begin)


# Where every local rank has one rank of a node to do something for, that takes so many groups of ranks.
cdef inline int ngroups(Group *g, InterNode *inter, int node) noexcept nogil:
    return (inter.nlocal[node] + g.size - 1) // g.size


# Which node a group is of; *first: its first local rank there.
cdef inline int node_of_group(Group *g, InterNode *inter, int group, int *first) noexcept nogil:
    cdef int node = 0
    while node < inter.nnodes and group >= ngroups(g, inter, node):
        group -= ngroups(g, inter, node)
        node += 1
    first[0] = group * g.size
    return node


# In the order of nodes without the own one: where what comes from a node lies among what comes from all.
cdef inline int place_of(const InterNode *inter, int node) noexcept nogil:
    return node if node < inter.node else node - 1


# A rank of another host, where a wait tells whom it is for: local ranks come first in that numbering.
cdef inline int remote(const Group *g, int rank) noexcept nogil:
    return g.size + rank


# Which of the user's calls of all ranks a sequence number means: the first is 1, the engine's own are 0 or less.
cdef inline int64_t call_number(const InterNode *inter, uint64_t seq) noexcept nogil:
    return <int64_t> (seq - inter.first_user_seq) + 1


# In these calls a host may hear nothing from another one: they are confirmed.
cdef inline bint is_one_sided(const Call *c) noexcept nogil:
    return c.kind == BROADCAST or c.kind == REDUCE or c.kind == GATHER or c.kind == SCATTER


# A call of all ranks begins; what it does starts with the first step, see step_internode.
cdef inline void begin_internode(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int i
    inter.seq += 1
    inter.fingerprint, inter.count = c.fingerprint, c.count
    inter.first_local = g.seq + 1
    c.number = call_number(inter, inter.seq)
    c.seq = g.seq + 1   # of its first local step, if there is to be one
    record_call(g, c, False)
    inter.turn = inter.stage = 0
    inter.runs_locally = inter.has_started = False
    inter.is_to_confirm = inter.confirmer != NULL and is_one_sided(c)
    inter.dtype, inter.itemsize = c.dtype, max(c.itemsize, <size_t> 1)
    inter.format = SR_WIRE_NATIVE
    inter.per_group = inter.nnodes
    for i in range(MOST_UNDER_WAY):
        inter.fragment[i].sending = inter.fragment[i].receiving = 0
    c.seq = c.mismatch_seq = g.seq
    c.peer = 0
    c.deadline_ns = 0
    c.interrupted = False
    c.relayed = False
    c.lines_seen = False


cdef inline int rank_at_end_of(const InterNode *inter, const sr_conn *conn) noexcept nogil:
    cdef int rank = 0
    while inter.conn[rank] != conn:
        rank += 1
    return rank


# Whether so many messages more can be posted for every rank.
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


cdef class InterNodeConns:
    cdef InterNode inter
    cdef object news, data, channels

    cdef int allocate(self, int size) except -1
    cdef int find_confirmers(self, Channels channels) except -1
