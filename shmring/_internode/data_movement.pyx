# The collectives over several hosts that move pieces between ranks. A piece is sent once to each host that needs it,
# from the sender's array to the array of one receiver; the other ranks of that host get it in a local step. Long pieces
# are sent in parts, so that one part is sent while another is distributed locally. No function blocks; call.awaited
# holds the flag that the call waits for.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.string cimport memcpy, memmove

from .._core.group cimport (
    ALL_GATHER, ALL_TO_ALL, BROADCAST, PROGRESSED, SCAN, Call, Group, bytes_within, goes_from_to, is_scan, piece_for,
    piece_from,
)
from .context cimport (
    Fragment, InterNode, begin_barrier, begin_local, blocked_on_conns, finish_internode, fragment_at, host_of_batch,
    inter_of, lay_out, new_local, nfragments, rank_at, receive_from, send_to,
)
from .reductions cimport fragment_count_of, gather_fragment, slice_at


# ---- pieces, by rank -----------------------------------------------------------------------------------------

cdef inline size_t part_for(Call *c, int rank, size_t offset, size_t most) noexcept nogil:
    return bytes_within(c.nbytes if c.given == NULL else c.given[rank].nbytes, offset, most)


cdef inline size_t part_from(Call *c, int rank, size_t offset, size_t most) noexcept nogil:
    return bytes_within(c.nbytes if c.taken == NULL else c.taken[rank].nbytes, offset, most)


# ---- rounds, each with a local part ------------------------------------------------------------------------------

# Return the number of parts of the longest piece; 1 if only heads are exchanged.
cdef inline int nparts(InterNode *inter, Call *c) noexcept nogil:
    return <int> ((c.nbytes + inter.part_nbytes - 1) // inter.part_nbytes) if c.nbytes > 0 else 1


# Make a local step whose pieces are in inter.given and inter.taken, by local rank. nbytes: size of the longest piece.
cdef Call *new_vector_local(Group *g, Call *c, int kind, size_t nbytes) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Call *local_call = new_local(g, c, kind, nbytes // c.itemsize if c.itemsize > 0 else 0)
    local_call.nbytes = nbytes
    if nbytes > 0:
        local_call.given, local_call.taken = inter.given, inter.taken
    return local_call


# ---- all_to_all, gather, scatter: each piece goes to one rank ------------------------------------------------------

# True if received pieces would overwrite pieces that are not sent yet.
cdef inline bint takes_in_place(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int rank
    for rank in range(inter.size):
        if inter.conn[rank] != NULL and c.kind == ALL_TO_ALL and piece_from(c, rank) == piece_for(c, rank):
            if part_from(c, rank, 0, 1) > 0 and part_for(c, rank, 0, 1) > 0:
                return True
    return False


cdef void start_pairwise(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    inter.part_nbytes = inter.pair_nbytes
    inter.through_room = takes_in_place(g, c)
    exchange_pieces(g, c)


# Post the sends and receives of this round's parts, with all ranks of other hosts.
cdef void exchange_pieces(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, 0)
    cdef size_t offset = <size_t> inter.round * inter.part_nbytes
    cdef size_t nbytes
    cdef unsigned char *there
    cdef int rank
    for rank in range(inter.size):
        if inter.conn[rank] == NULL:
            continue
        if goes_from_to(c, inter.rank, rank):
            nbytes = part_for(c, rank, offset, inter.part_nbytes)
            if nbytes > 0 or inter.round == 0:
                send_to(g, c, rank, piece_for(c, rank) + offset, nbytes, &fragment.sending)
        if goes_from_to(c, rank, inter.rank):
            nbytes = part_from(c, rank, offset, inter.part_nbytes)
            there = inter.room + rank * inter.pair_nbytes if inter.through_room else piece_from(c, rank) + offset
            if nbytes > 0 or inter.round == 0:
                receive_from(g, c, rank, there, nbytes, &fragment.receiving)


cdef void take_from_room(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef size_t offset = <size_t> inter.round * inter.part_nbytes
    cdef int rank
    for rank in range(inter.size):
        if inter.conn[rank] != NULL:
            memcpy(piece_from(c, rank) + offset, inter.room + rank * inter.pair_nbytes,
                   part_from(c, rank, offset, inter.part_nbytes))


# Stage 0: exchange the pieces among the ranks of this host. Stage 1: that is done; exchange parts with other hosts.
cdef int stage_pairwise(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, 0)
    if inter.stage == 0:
        inter.stage = 1
        return exchange_locally(g, c)
    if fragment.sending > 0 or fragment.receiving > 0:
        return blocked_on_conns(g, c)
    if inter.through_room:
        take_from_room(g, c)
    inter.round += 1
    if inter.round == nparts(inter, c):
        return finish_internode(g, c)
    exchange_pieces(g, c)
    return PROGRESSED


cdef int exchange_locally(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Call *local_call
    cdef int local, rank
    if c.kind != ALL_TO_ALL and inter.host_of[c.root] != inter.host:
        return begin_barrier(g, c)
    if g.size == 1:
        keep_own(g, c)
        return PROGRESSED
    for local in range(g.size):
        rank = rank_at(inter, inter.host, local)
        inter.given[local].data = <unsigned char *> piece_for(c, rank)
        inter.given[local].nbytes = part_for(c, rank, 0, c.nbytes)
        inter.taken[local].data = piece_from(c, rank)
        inter.taken[local].nbytes = part_from(c, rank, 0, c.nbytes) if goes_from_to(c, rank, inter.rank) else 0
    keep_length_of_own(c, inter)
    local_call = new_vector_local(g, c, c.kind, c.nbytes)
    local_call.root = inter.local_of[c.root]
    begin_local(g, c)
    return PROGRESSED


# The own piece of a vector call goes to no other rank, and may be longer than all pieces that do.
cdef inline void keep_length_of_own(Call *c, InterNode *inter) noexcept nogil:
    cdef int local = inter.local_of[inter.rank]
    if c.given != NULL:
        inter.given[local].nbytes = c.given[inter.rank].nbytes
        if goes_from_to(c, inter.rank, inter.rank):
            inter.taken[local].nbytes = c.taken[inter.rank].nbytes


cdef inline void keep_own(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef size_t nbytes = c.nbytes if c.taken == NULL else c.taken[inter.rank].nbytes
    if nbytes > 0 and piece_from(c, inter.rank) != piece_for(c, inter.rank):
        memmove(piece_from(c, inter.rank), piece_for(c, inter.rank), nbytes)


# ---- all_gather, scan, exscan: each piece goes to every host -------------------------------------------------------

cdef enum:
    GATHER_LAG = 2   # rounds from posting a part to distributing it locally


# Return the place of a part of a rank's piece. A scan gathers a part of every rank's x in inter.room, and folds those
# that it needs in rank order.
cdef inline unsigned char *part_of_rank(Group *g, Call *c, int rank, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if is_scan(c):
        return inter.room + rank * inter.part_nbytes
    return piece_from(c, rank) + <size_t> number * inter.part_nbytes


cdef inline size_t part_nbytes_of(Group *g, Call *c, int rank, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    return part_from(c, rank, <size_t> number * inter.part_nbytes, inter.part_nbytes)


cdef void start_all_gather(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    inter.part_nbytes = inter.pair_nbytes if is_scan(c) else inter.slice_nbytes
    inter.lag = 0 if is_scan(c) else GATHER_LAG
    inter.batch = 0


cdef void exchange_parts(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef int local = inter.local_of[inter.rank]
    cdef int host, other
    cdef size_t nbytes = part_nbytes_of(g, c, inter.rank, number)
    for host in range(inter.nhosts):
        if host == inter.host:
            continue
        if nbytes > 0 or number == 0:
            send_to(g, c, rank_at(inter, host, local % inter.nlocal[host]),
                    piece_for(c, inter.rank) + <size_t> number * inter.part_nbytes, nbytes, &fragment.sending)
        other = local
        while other < inter.nlocal[host]:
            receive_part(g, c, rank_at(inter, host, other), number)
            other += g.size


cdef inline void receive_part(Group *g, Call *c, int rank, int number) noexcept nogil:
    cdef size_t nbytes = part_nbytes_of(g, c, rank, number)
    if nbytes > 0 or number == 0:
        receive_from(g, c, rank, part_of_rank(g, c, rank, number), nbytes, &fragment_at(inter_of(g), number).receiving)


# Stage 0: post the part of this round. Stage 1: distribute the batches of an earlier round's part, one local step for
# each batch. The first batch is this host's own, which needs no data from other hosts.
cdef int stage_all_gather(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int last = nparts(inter, c)
    cdef int number = inter.round - inter.lag
    if inter.round == last + inter.lag:
        return finish_internode(g, c)
    if inter.stage == 0:
        if inter.round < last:
            if fragment_at(inter, inter.round).sending > 0:
                return blocked_on_conns(g, c)
            exchange_parts(g, c, inter.round)
        inter.stage = 1
    if number >= 0:
        if inter.batch > 0 and fragment_at(inter, number).receiving > 0:
            return blocked_on_conns(g, c)
        if hand_out_batch(g, c, number):
            return PROGRESSED
        if is_scan(c):
            if fragment_at(inter, number).sending > 0:
                return blocked_on_conns(g, c)
            fold_part(g, c, number)
    inter.stage = inter.batch = 0
    inter.round += 1
    return PROGRESSED


# As host_of_batch, for the next batch to distribute. The ranks of this host are the first batch.
cdef inline int host_of_next_batch(Group *g, InterNode *inter, int *begin) noexcept nogil:
    cdef int host
    begin[0] = 0
    if inter.batch == 0:
        return inter.host
    host = host_of_batch(g, inter, inter.batch - 1, begin)
    return host if host < inter.host else host_of_batch(g, inter, inter.batch, begin)


# Distribute the next batch of pieces, of which every local rank holds one. Return False if no batch is left.
cdef bint hand_out_batch(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int begin = 0
    cdef int host = host_of_next_batch(g, inter, &begin)
    if host == inter.nhosts:
        return False
    inter.batch += 1
    if g.size == 1:
        if host == inter.host:
            keep_own_part(g, c, number)
    else:
        begin_gather_batch(g, c, number, host, begin)
    return True


cdef inline void keep_own_part(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef const unsigned char *own = piece_for(c, inter.rank) + <size_t> number * inter.part_nbytes
    cdef unsigned char *there = part_of_rank(g, c, inter.rank, number)
    if own != there:
        memmove(there, own, part_nbytes_of(g, c, inter.rank, number))


cdef void begin_gather_batch(Group *g, Call *c, int number, int host, int begin) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int own = inter.local_of[inter.rank]
    cdef size_t longest = 0
    cdef int local, rank
    for local in range(g.size):
        inter.taken[local].nbytes = 0
        inter.taken[local].data = inter.room
        if begin + local < inter.nlocal[host]:
            rank = rank_at(inter, host, begin + local)
            inter.taken[local].data = part_of_rank(g, c, rank, number)
            inter.taken[local].nbytes = part_nbytes_of(g, c, rank, number)
        longest = max(longest, inter.taken[local].nbytes)
    for local in range(g.size):
        inter.given[local] = inter.taken[own]
        if host == inter.host:
            inter.given[local].data = <unsigned char *> piece_for(c, inter.rank) + <size_t> number * inter.part_nbytes
    new_vector_local(g, c, ALL_GATHER, longest)
    begin_local(g, c)


cdef void fold_part(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int nsources = inter.rank + (c.kind == SCAN)
    cdef size_t count = part_nbytes_of(g, c, inter.rank, number) // c.itemsize if c.itemsize > 0 else 0
    cdef int rank
    for rank in range(nsources):
        inter.by_rank[rank] = inter.room + rank * inter.part_nbytes
    g.target[0] = c.out + <size_t> number * inter.part_nbytes
    if nsources > 0 and count > 0:
        g.kernels.fold[c.dtype][c.op](g.target, 1, 0, inter.by_rank, nsources, count, <uint32_t> nsources)


# ---- broadcast -----------------------------------------------------------------------------------------------------

# A small message goes from the root to one rank of each host. A large one goes in fragments along a chain of hosts:
# each rank passes its own slice on, so every host sends the whole message once.
cdef enum:
    CHAIN_LAG = 2   # rounds from posting the receives of a fragment to sending it to the next host


cdef void start_broadcast(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    inter.fragment_count = c.count if c.nbytes <= inter.small_nbytes else fragment_count_of(inter, c.count, c.itemsize)
    inter.lag = CHAIN_LAG if c.nbytes > inter.small_nbytes and inter.host != inter.host_of[c.root] else 0


cdef int stage_small_broadcast(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, 0)
    cdef Call *local_call
    cdef int host
    if inter.stage == 0:
        inter.stage = 1
        for host in range(inter.nhosts):
            if inter.rank == c.root and host != inter.host:
                send_to(g, c, rank_at(inter, host, 0), c.x, c.nbytes, &fragment.sending)
        if inter.host != inter.host_of[c.root] and inter.local_of[inter.rank] == 0:
            receive_from(g, c, c.root, c.out, c.nbytes, &fragment.receiving)
        if inter.host != inter.host_of[c.root]:
            return begin_barrier(g, c)
    if inter.stage == 2:
        return finish_internode(g, c)
    if fragment.receiving > 0:
        return blocked_on_conns(g, c)
    inter.stage = 2
    local_call = new_local(g, c, BROADCAST, c.count)
    local_call.x = c.x if inter.host == inter.host_of[c.root] else c.out
    local_call.out = c.out
    local_call.root = inter.local_of[c.root] if inter.host == inter.host_of[c.root] else 0
    begin_local(g, c)
    return PROGRESSED


# Stage 0: begin this round's fragment, by a local broadcast on the root's host, by posting its receives on others.
# Stage 1: send an earlier fragment to the next host. Stage 2: distribute that fragment among the ranks of this host.
cdef int stage_large_broadcast(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int last = nfragments(inter, c)
    cdef int number = inter.round - inter.lag
    cdef bint begins = inter.host == inter.host_of[c.root]
    if inter.round == last + inter.lag:
        return finish_internode(g, c)
    if inter.stage == 0:
        if inter.round < last:
            if fragment_at(inter, inter.round).sending > 0:
                return blocked_on_conns(g, c)
            begin_fragment(g, c, inter.round)
        inter.stage = 1
        return begin_barrier(g, c) if inter.round == 0 and not begins else PROGRESSED
    if inter.stage == 1:
        if number >= 0:
            if fragment_at(inter, number).receiving > 0:
                return blocked_on_conns(g, c)
            pass_on(g, c, number)
        inter.stage = 2
    if number >= 0 and not begins and inter.stage == 2:
        inter.stage = 3
        if gather_fragment(g, c, number) == PROGRESSED:
            return PROGRESSED
    inter.stage = 0
    inter.round += 1
    return PROGRESSED


cdef void begin_fragment(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef Call *local_call
    lay_out(inter, c, number)
    if inter.host == inter.host_of[c.root]:
        local_call = new_local(g, c, BROADCAST, fragment.count)
        local_call.x = c.x + fragment.begin * c.itemsize
        local_call.out = c.out + fragment.begin * c.itemsize
        local_call.root = inter.local_of[c.root]
        begin_local(g, c)
    else:
        exchange_slice(g, c, number, (inter.host + inter.nhosts - 1) % inter.nhosts, True)


cdef inline void pass_on(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int next = (inter.host + 1) % inter.nhosts
    if next != inter.host_of[c.root]:
        exchange_slice(g, c, number, next, False)


# Post the sends or receives of the parts of this rank's slice that ranks of another host own.
cdef void exchange_slice(Group *g, Call *c, int number, int host, bint receives) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef unsigned char *out = c.out + fragment.begin * c.itemsize
    cdef int own = inter.local_of[inter.rank]
    cdef size_t begin, end
    cdef int local
    for local in range(inter.nlocal[host]):
        begin = max(slice_at(inter, host, local, fragment.count), slice_at(inter, inter.host, own, fragment.count))
        end = min(slice_at(inter, host, local + 1, fragment.count),
                  slice_at(inter, inter.host, own + 1, fragment.count))
        if begin >= end:
            continue
        if receives:
            receive_from(g, c, rank_at(inter, host, local), out + begin * c.itemsize, (end - begin) * c.itemsize,
                         &fragment.receiving)
        else:
            send_to(g, c, rank_at(inter, host, local), out + begin * c.itemsize, (end - begin) * c.itemsize,
                    &fragment.sending)
