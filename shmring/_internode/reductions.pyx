# The reductions of ranks of several hosts: all_reduce and reduce, small and large, and reduce_scatter. The ranks of a
# host reduce among themselves first, so that every byte crosses the wire once for all of them; then hosts exchange
# partial results and fold them in the order of hosts; then each host hands the result to its ranks. (Hierarchical
# all-reduce, as in Horovod and NCCL.)
# Every function returns at once; what it waits for is in call.awaited.

from libc.stddef cimport size_t

from .._core.group cimport (
    ACROSS, ALL_GATHER, BARRIER, BLOCKED, BROADCAST, DONE, GATHER, PROGRESSED, REDUCE, REDUCE_SCATTER, Call, Group,
    count_path,
)
from .._core.kernels cimport SR_AVG, SR_WIRE_NATIVE
from .._core.segment cimport SR_CACHE_LINE, sr_slice_begin_grained
from .context cimport (
    MOST_UNDER_WAY, OTHER_SLICES, SR_CONN_QUEUE, Fragment, InterNode, blocked_on_conns, fragment_at, have_room,
    inter_of, lay_out, nfragments, node_of_group, place_of, rank_at, receive_from, send_to,
)
from .local_step cimport (
    are_results_encoded, begin_local, choose_partials, encode_alike, encode_and_keep, finish_internode, fold_nodes,
    fold_some, is_partial_itself, is_wanted_on, nbytes_on_wire, new_local, new_reduction, receive_partial,
    result_nbytes, send_partial, step_internode, summands,
)


# ---- small all_reduce and reduce, and barrier ----------------------------------------------------------------------

# One rank of each host, its leader, exchanges all of the message with the leaders of all other hosts: one hop.
cdef enum:
    SMALL_REDUCING, SMALL_EXCHANGING, SMALL_BROADCASTING   # stages of a small call


# Who does that on a node: the root, where there is one.
cdef inline int leader_on(InterNode *inter, Call *c, int node) noexcept nogil:
    return inter.local_of[c.root] if c.kind == REDUCE and node == inter.node_of[c.root] else 0


cdef inline bint leads(InterNode *inter, Call *c) noexcept nogil:
    return inter.local_of[inter.rank] == leader_on(inter, c, inter.node)


cdef void start_small(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Call *step
    choose_partials(inter, c, SR_WIRE_NATIVE)
    if is_partial_itself(g, c):
        return
    if c.nbytes == 0:   # the ranks meet all the same
        new_local(g, c, BARRIER, 0)
    else:
        step = new_reduction(g, c, REDUCE, c.count)
        step.root = leader_on(inter, c, inter.node)
        step.x = summands(g, c, c.x, c.count, inter.scratch)
        step.out = inter.room
    begin_local(g, c)


cdef int step_small(Group *g, Call *c) noexcept nogil:
    return step_internode(g, c, start_small, stage_small)


cdef int stage_small(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *whole = &inter.fragment[0]
    if inter.stage == SMALL_REDUCING:
        inter.stage = SMALL_EXCHANGING
        if leads(inter, c):
            exchange_partials(g, c)
    if inter.stage == SMALL_EXCHANGING:
        if whole.receiving > 0 or whole.sending > 0:
            return blocked_on_conns(g, c)
        inter.stage = SMALL_BROADCASTING
        if leads(inter, c) and is_wanted_on(inter, c, inter.node) and c.nbytes > 0:
            fold_nodes(g, c, own_partial(g, c), inter.room + inter.slice_nbytes, inter.slice_nbytes, inter.room, c.out,
                       c.count)
        if c.kind != REDUCE and g.size > 1:
            hand_out_small(g, c)
            return PROGRESSED
    count_path(g, ACROSS)
    return DONE


cdef inline const unsigned char *own_partial(Group *g, Call *c) noexcept nogil:
    return c.x if is_partial_itself(g, c) else inter_of(g).room


# The partial result of this host is there: its leader sends it to all others that fold.
cdef void exchange_partials(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *whole = &inter.fragment[0]
    cdef unsigned char *arrived = inter.room
    cdef size_t count = c.count if c.nbytes > 0 else 0   # of what moves nothing it only says what the call is
    cdef int node, other
    for node in range(inter.nnodes):
        if node == inter.node:
            continue
        arrived += inter.slice_nbytes
        other = rank_at(inter, node, leader_on(inter, c, node))
        if is_wanted_on(inter, c, node):
            send_partial(g, c, other, own_partial(g, c), count, NULL, NULL, &whole.sending)
        if is_wanted_on(inter, c, inter.node):
            receive_partial(g, c, other, arrived, count, &whole.receiving)


# From the leader to the other ranks of the host.
cdef void hand_out_small(Group *g, Call *c) noexcept nogil:
    cdef Call *step = new_local(g, c, BROADCAST if c.nbytes > 0 else BARRIER, c.count if c.nbytes > 0 else 0)
    step.x = c.out
    step.out = c.out
    begin_local(g, c)


# ---- large all_reduce and reduce: slices of fragments --------------------------------------------------------------

# Every rank takes part in the exchange: a local rank owns a slice and has connections of its own to the ranks that own
# it on other hosts. The exchange is a direct reduce-scatter and all-gather: 2(H-1)/H of a slice over the wire, for H
# hosts.

# A message goes in fragments, so that one is on the wire while the next is reduced and the one before is handed out.
# The order in which local ranks take their steps, and in which messages follow each other on a connection, is fixed: a
# *turn* reduces one fragment locally, folds an earlier one, posts the first one's exchange, and gathers a third. Where
# nodes are in groups each folds in its group first, and then what the nodes in its place made of it in other groups.
cdef enum:
    REDUCING, FOLDING, JOINING, POSTING, GATHERING   # stages of a turn
    FOLD_LAG = 3         # turns from reducing a fragment locally to folding what other hosts made of it
    FOLD_LAG_IN_GROUPS = 2   # ... and from there to folding what other groups made of it


# Slices begin at whole cache lines, as far as the message does.
cdef inline size_t grain_of(InterNode *inter) noexcept nogil:
    return SR_CACHE_LINE // inter.itemsize


# Where the slice of a local rank of a node begins, in elements of a fragment of `count`.
cdef size_t slice_at(InterNode *inter, int node, int local, size_t count) noexcept nogil:
    return sr_slice_begin_grained(count, inter.nlocal[node], local, grain_of(inter))


cdef inline size_t own_slice(InterNode *inter, size_t count) noexcept nogil:
    return slice_at(inter, inter.node, inter.local_of[inter.rank], count)


cdef inline size_t end_of_own_slice(InterNode *inter, size_t count) noexcept nogil:
    return slice_at(inter, inter.node, inter.local_of[inter.rank] + 1, count)


# Which rank of a node owns an element, and where its slice ends.
cdef inline int owner_on(InterNode *inter, int node, size_t element, size_t count, size_t *end) noexcept nogil:
    cdef int local = 0
    while slice_at(inter, node, local + 1, count) <= element:
        local += 1
    end[0] = slice_at(inter, node, local + 1, count)
    return rank_at(inter, node, local)


cdef inline bint is_even(Group *g, size_t count) noexcept nogil:
    return count % (<size_t> g.size * grain_of(inter_of(g))) == 0


# Some fragments even of a short message, as long as they are worth a step each. itemsize: of partial results.
cdef size_t fragment_count_of(InterNode *inter, size_t count, size_t itemsize) noexcept nogil:
    cdef size_t nbytes = max(min(count * itemsize // 4, inter.fragment_nbytes), inter.least_fragment_nbytes)
    return max(nbytes // inter.even_nbytes, <size_t> 1) * inter.even_nbytes // itemsize


# Of the room for a fragment: this rank's partial result where it has no other place, its final one, what is sent of
# them where that is written shorter, and what comes from other nodes.
cdef inline unsigned char *room_of(InterNode *inter, int number, int which) noexcept nogil:
    cdef size_t slice_number = <size_t> (number % MOST_UNDER_WAY) * (OTHER_SLICES + inter.nnodes) + which
    return inter.room + slice_number * inter.slice_nbytes


cdef enum:
    PARTIAL, RESULT, ENCODED, ARRIVED   # places in it


cdef inline unsigned char *arrived_from(InterNode *inter, int number, int node) noexcept nogil:
    return room_of(inter, number, ARRIVED + place_of(inter, node))


# The own slice of a fragment, reduced on this host; and where its result belongs, which may be the same place.
cdef inline const unsigned char *partial_of(Group *g, Call *c, int number) noexcept nogil:
    if is_partial_itself(g, c):
        return c.x + fragment_at(inter_of(g), number).begin * c.itemsize
    return place_for_partial(g, c, number)


cdef inline unsigned char *place_for_partial(Group *g, Call *c, int number) noexcept nogil:
    if c.kind == REDUCE or inter_of(g).dtype != c.dtype:
        return room_of(inter_of(g), number, PARTIAL)
    return result_of(g, c, number)


cdef inline unsigned char *result_of(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    if c.kind == REDUCE:
        return room_of(inter, number, RESULT)
    return c.out + (s.begin + own_slice(inter, s.count)) * c.itemsize


# Where all fold all, and what is sent is written shorter, a host has to fold that, too.
cdef inline bint keeps_what_it_sends(InterNode *inter, Call *c) noexcept nogil:
    return inter.format != SR_WIRE_NATIVE and not inter.in_parts and c.kind != REDUCE


# What of the partial result this host goes on with.
cdef inline const unsigned char *kept_of(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if keeps_what_it_sends(inter, c):
        return room_of(inter, number, PARTIAL)
    return partial_of(g, c, number)


# Elements of the own slices of all fragments, with room for some more: for each what was lost by sending it shorter.
cdef inline size_t residual_pitch(InterNode *inter, size_t fragment_count) noexcept nogil:
    return fragment_count // inter.nlocal[inter.node] + SR_CACHE_LINE


cdef size_t residual_count(InterNode *inter, size_t count) noexcept nogil:
    cdef size_t length = fragment_count_of(inter, count, sizeof(float))
    return (count + length - 1) // length * residual_pitch(inter, length)


cdef inline float *residual_of(InterNode *inter, Call *c, int number) noexcept nogil:
    return NULL if c.residual == NULL else c.residual + number * residual_pitch(inter, inter.fragment_count)


cdef void start_large(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    inter.in_parts = goes_in_parts(inter, c)
    choose_partials(inter, c, c.wire if inter.in_parts or inter.nnodes == 2 else <int> SR_WIRE_NATIVE)
    inter.fragment_count = fragment_count_of(inter, c.count, inter.itemsize)
    inter.fold_lag = FOLD_LAG
    inter.lag = 2 * FOLD_LAG if inter.in_parts else FOLD_LAG
    if c.nodes_in_group > 0 and inter.in_parts:
        inter.per_group = c.nodes_in_group
        inter.fold_lag = FOLD_LAG_IN_GROUPS
        inter.lag = 3 * FOLD_LAG_IN_GROUPS


# That each host folds a part for all is less on the wire with three hosts and more. With two it is as much, one hop
# more, and half the work, which counts where a message is long.
cdef inline bint goes_in_parts(const InterNode *inter, const Call *c) noexcept nogil:
    if inter.nborders > SR_CONN_QUEUE // 2:
        return False
    return inter.nnodes > 2 or (c.kind != REDUCE and c.nbytes >= inter.parts_nbytes)


cdef inline bint are_grouped(const InterNode *inter) noexcept nogil:
    return inter.per_group < inter.nnodes


# The first node of the own group, and the own place in it.
cdef inline int own_group(const InterNode *inter) noexcept nogil:
    return inter.node - inter.node % inter.per_group


cdef inline int own_place(const InterNode *inter) noexcept nogil:
    return inter.node % inter.per_group


cdef int step_large(Group *g, Call *c) noexcept nogil:
    return step_internode(g, c, start_large, stage_large)


cdef inline void next_stage(InterNode *inter) noexcept nogil:
    inter.stage += 1
    if inter.stage > GATHERING:
        inter.stage = REDUCING
        inter.turn += 1


cdef int stage_large(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int last = nfragments(inter, c)
    cdef int status = DONE
    if inter.stage == REDUCING:
        if inter.turn == last + inter.lag:
            return finish_internode(g, c)
        if inter.turn < last:
            status = reduce_locally(g, c, inter.turn)
    elif inter.stage == FOLDING:
        if 0 <= inter.turn - inter.fold_lag < last:
            status = fold_fragment(g, c, inter.turn - inter.fold_lag)
    elif inter.stage == JOINING:
        if are_grouped(inter) and 0 <= inter.turn - 2 * inter.fold_lag < last:
            status = join_groups(g, c, inter.turn - 2 * inter.fold_lag)
    elif inter.stage == POSTING:
        if inter.turn < last:
            status = exchange_slices(g, c, inter.turn)
    elif 0 <= inter.turn - inter.lag < last:
        status = gather_result(g, c, inter.turn - inter.lag)
    if status != BLOCKED:   # a local step has to end first
        next_stage(inter)
        return PROGRESSED
    return status


# DONE: nothing is to be done locally. PROGRESSED: a local step has begun.
cdef int reduce_locally(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef const unsigned char *x
    cdef Call *step
    cdef size_t begin
    cdef int local
    if s.sending > 0:   # of the fragment that was there before
        return blocked_on_conns(g, c)
    lay_out(inter, c, number)
    x = c.x + s.begin * c.itemsize
    if is_partial_itself(g, c):
        return DONE
    if g.size == 1 and inter.dtype != c.dtype:
        summands(g, c, x, s.count, place_for_partial(g, c, number))
        return DONE
    step = new_reduction(g, c, REDUCE_SCATTER, slice_at(inter, inter.node, 1, s.count))
    step.x = summands(g, c, x, s.count, inter.scratch)
    step.out = place_for_partial(g, c, number)
    if not is_even(g, s.count):
        for local in range(g.size):
            begin = slice_at(inter, inter.node, local, s.count)
            inter.given[local].data = <unsigned char *> step.x + begin * inter.itemsize
            inter.given[local].nbytes = (slice_at(inter, inter.node, local + 1, s.count) - begin) * inter.itemsize
        step.given = inter.given
    begin_local(g, c)
    return PROGRESSED


# ---- between hosts ---------------------------------------------------------------------------------------------

# Up to where the elements from `at` on have the same owner on every node.
cdef inline size_t next_border(InterNode *inter, size_t at, size_t count) noexcept nogil:
    cdef size_t next = count
    cdef size_t end = 0
    cdef int node
    for node in range(inter.nnodes):
        owner_on(inter, node, at, count, &end)
        next = min(next, end)
    return next


# What a node folds of the elements from `at` to before `end`: *begin and its length. All fold all, or each a part.
cdef inline size_t part_of(InterNode *inter, int node, size_t at, size_t end, size_t *begin) noexcept nogil:
    if not inter.in_parts:
        begin[0] = at
        return end - at
    node %= inter.per_group
    begin[0] = at + sr_slice_begin_grained(end - at, inter.per_group, node, grain_of(inter))
    return at + sr_slice_begin_grained(end - at, inter.per_group, node + 1, grain_of(inter)) - begin[0]


# Of the own slice: to everyone on other hosts that owns some of it. In parts, each host gets the part that it folds of
# every run of elements with the same owners everywhere; else there is one message for each that owns some.
cdef int exchange_slices(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef size_t end = end_of_own_slice(inter, s.count)
    cdef size_t at, next = 0
    cdef int node
    if not have_room(inter, inter.nborders if inter.in_parts else 1):
        return blocked_on_conns(g, c)
    for node in range(own_group(inter), own_group(inter) + inter.per_group):
        at = own_slice(inter, s.count) if node != inter.node else end
        while at < end:
            owner_on(inter, node, at, s.count, &next)
            next = next_border(inter, at, s.count) if inter.in_parts else min(next, end)
            exchange_part(g, c, number, node, at, next)
            at = next
    return DONE


cdef void exchange_part(Group *g, Call *c, int number, int node, size_t at, size_t end) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, s.count)
    cdef float *residual = residual_of(inter, c, number)
    cdef unsigned char *encoded
    cdef size_t begin = 0, length
    cdef int other = owner_on(inter, node, at, s.count, &begin)
    length = part_of(inter, node, at, end, &begin)
    if length > 0 and (inter.in_parts or is_wanted_on(inter, c, node)):
        begin -= own
        encoded = room_of(inter, number, ENCODED) + begin * inter.itemsize
        send_partial(g, c, other, partial_of(g, c, number) + begin * inter.itemsize, length, encoded,
                     NULL if residual == NULL else residual + begin, &s.sending)
        if keeps_what_it_sends(inter, c):
            g.kernels.decode[inter.format](<float *> (kept_of(g, c, number) + begin * inter.itemsize), encoded, length)
    length = part_of(inter, inter.node, at, end, &begin)
    if length > 0 and (inter.in_parts or is_wanted_on(inter, c, inter.node)):
        receive_partial(g, c, other, arrived_from(inter, number, node) + (begin - own) * inter.itemsize, length,
                        &s.receiving)


cdef int fold_fragment(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, s.count)
    cdef size_t at = own, end = end_of_own_slice(inter, s.count)
    cdef size_t next, begin = 0, length
    # What is still being sent would change, unless it is what others fold.
    if s.receiving > 0 or (s.sending > 0 and not inter.in_parts):
        return blocked_on_conns(g, c)
    if inter.in_parts and not have_room(inter, inter.nborders):
        return blocked_on_conns(g, c)
    while at < end:
        next = next_border(inter, at, s.count)
        length = part_of(inter, inter.node, at, next, &begin)
        if length > 0 and (inter.in_parts or is_wanted_on(inter, c, inter.node)):
            begin -= own
            fold_some(g, c, own_group(inter), 1, not are_grouped(inter), kept_of(g, c, number) + begin * inter.itemsize,
                      room_of(inter, number, ARRIVED) + begin * inter.itemsize, inter.slice_nbytes,
                      room_of(inter, number, PARTIAL) + begin * inter.itemsize,
                      result_of(g, c, number) + begin * c.itemsize, length)
            if are_grouped(inter):
                exchange_between_groups(g, c, number, at, begin, length)
        if inter.in_parts and not are_grouped(inter):
            exchange_results(g, c, number, at, next)
        at = next
    return DONE


# What this group has made of the part that this node folds: with the nodes in its place in other groups. begin: in
# the own slice.
cdef void exchange_between_groups(Group *g, Call *c, int number, size_t at, size_t begin, size_t length) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef unsigned char *partial = room_of(inter, number, PARTIAL) + begin * inter.itemsize
    cdef unsigned char *sent = partial
    cdef float *residual = residual_of(inter, c, number)
    cdef int node = own_place(inter)
    cdef int other
    cdef size_t unused = 0
    if inter.format != SR_WIRE_NATIVE:
        sent = room_of(inter, number, ENCODED) + begin * inter.itemsize
        encode_and_keep(g, sent, NULL if residual == NULL else residual + begin, <float *> partial, length)
    while node < inter.nnodes:
        if node != inter.node:
            other = owner_on(inter, node, at, s.count, &unused)
            send_to(g, c, other, sent, nbytes_on_wire(inter, length), &s.sending)
            receive_partial(g, c, other, arrived_from(inter, number, node) + begin * inter.itemsize, length,
                            &s.receiving)
        node += inter.per_group


cdef int join_groups(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, s.count)
    cdef size_t at = own, end = end_of_own_slice(inter, s.count)
    cdef size_t next, begin = 0, length
    if s.receiving > 0 or s.sending > 0 or not have_room(inter, inter.nborders):
        return blocked_on_conns(g, c)
    while at < end:
        next = next_border(inter, at, s.count)
        length = part_of(inter, inter.node, at, next, &begin)
        if length > 0:
            begin -= own
            fold_some(g, c, own_place(inter), inter.per_group, True, room_of(inter, number,
                                                                             PARTIAL) + begin * inter.itemsize,
                      room_of(inter, number, ARRIVED) + begin * inter.itemsize, inter.slice_nbytes,
                      room_of(inter, number, PARTIAL) + begin * inter.itemsize,
                      result_of(g, c, number) + begin * c.itemsize, length)
        exchange_results(g, c, number, at, next)
        at = next
    return DONE


# The part that this host has folded to those that want it, and theirs.
cdef void exchange_results(Group *g, Call *c, int number, size_t at, size_t end) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, s.count)
    cdef size_t begin = 0, length, unused = 0
    cdef const unsigned char *sent
    cdef int node, other
    length = part_of(inter, inter.node, at, end, &begin)
    sent = write_result(g, c, number, begin - own, length)
    for node in range(own_group(inter), own_group(inter) + inter.per_group):
        if node == inter.node:
            continue
        other = owner_on(inter, node, at, s.count, &unused)
        length = part_of(inter, inter.node, at, end, &begin)
        if length > 0 and is_wanted_on(inter, c, node):
            send_to(g, c, other, sent, result_nbytes(inter, c, length), &s.sending)
        length = part_of(inter, node, at, end, &begin)
        if length > 0 and is_wanted_on(inter, c, inter.node):
            receive_from(g, c, other, place_of_result(g, c, number, node, begin - own),
                         result_nbytes(inter, c, length), &s.receiving)


# As it is sent; what the owner keeps is what it sends.
cdef const unsigned char *write_result(Group *g, Call *c, int number, size_t begin, size_t length) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef unsigned char *result = result_of(g, c, number) + begin * c.itemsize
    cdef unsigned char *encoded = room_of(inter, number, ENCODED) + begin * c.itemsize
    cdef float *residual = residual_of(inter, c, number)
    if not are_results_encoded(inter, c) or length == 0:
        return result
    if residual != NULL:
        residual += begin
    if not are_grouped(inter):
        encode_and_keep(g, encoded, residual, <float *> result, length)
    else:   # each group has somebody who writes it: the first's has what is lost in what it sends to others next time
        encode_alike(g, encoded, residual if own_group(inter) == 0 else NULL, inter.size if c.op == SR_AVG else 1,
                     <float *> result, length)
    return encoded


# Where the result of another node's part comes to: into place, or where it can be read from.
cdef inline unsigned char *place_of_result(Group *g, Call *c, int number, int node, size_t begin) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if are_results_encoded(inter, c):
        return arrived_from(inter, number, node) + begin * c.itemsize
    return result_of(g, c, number) + begin * c.itemsize


# What has come of other nodes' results, as elements.
cdef void read_results(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, s.count)
    cdef size_t at = own, end = end_of_own_slice(inter, s.count)
    cdef size_t next, begin = 0, length
    cdef int node
    while at < end:
        next = next_border(inter, at, s.count)
        for node in range(own_group(inter), own_group(inter) + inter.per_group):
            length = part_of(inter, node, at, next, &begin)
            if node != inter.node and length > 0:
                g.kernels.decode[inter.format](<float *> (result_of(g, c, number) + (begin - own) * c.itemsize),
                                               place_of_result(g, c, number, node, begin - own), length)
        at = next


cdef int gather_result(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if fragment_at(inter, number).receiving > 0:
        return blocked_on_conns(g, c)
    if inter.in_parts and are_results_encoded(inter, c) and is_wanted_on(inter, c, inter.node):
        read_results(g, c, number)
    return gather_fragment(g, c, number)


# The slices of a fragment, which are in place, to the ranks of this host that want them. Returns as reduce_locally.
cdef int gather_fragment(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef unsigned char *out = c.out + s.begin * c.itemsize
    cdef Call *step
    if not is_wanted_on(inter, c, inter.node):
        return DONE
    if g.size == 1:
        if c.kind == REDUCE:
            g.kernels.copy(out, result_of(g, c, number), s.count * c.itemsize, 0)
        return DONE
    step = new_local(g, c, GATHER if c.kind == REDUCE else ALL_GATHER, slice_at(inter, inter.node, 1, s.count))
    step.x = result_of(g, c, number)
    step.out = out
    step.root = inter.local_of[c.root]
    if c.kind == REDUCE or not is_even(g, s.count):
        describe_slices(g, c, number, step)
    begin_local(g, c)
    return PROGRESSED


cdef void describe_slices(Group *g, Call *c, int number, Call *step) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = fragment_at(inter, number)
    cdef bint takes_them = c.kind != REDUCE or inter.rank == c.root
    cdef size_t begin, end
    cdef int local
    for local in range(g.size):
        begin = slice_at(inter, inter.node, local, s.count)
        end = slice_at(inter, inter.node, local + 1, s.count)
        inter.taken[local].data = step.out + begin * c.itemsize
        inter.taken[local].nbytes = (end - begin) * c.itemsize if takes_them else 0
        inter.given[local].data = <unsigned char *> step.x
        inter.given[local].nbytes = (end_of_own_slice(inter, s.count) - own_slice(inter, s.count)) * c.itemsize
    step.given, step.taken = inter.given, inter.taken


# ---- reduce_scatter ------------------------------------------------------------------------------------------------

# Every piece is reduced on each host by one of its ranks, and folded by the rank that gets it.
cdef enum:
    PIECES_ASKING, PIECES_REDUCING, PIECES_FOLDING   # stages of a turn of reduce_scatter


# Which local rank of a node reduces the pieces of a rank.
cdef inline int reducer_on(InterNode *inter, int node, int rank) noexcept nogil:
    return rank_at(inter, node, inter.local_of[rank] % inter.nlocal[node])


# Elements of this turn's part of every piece.
cdef inline size_t part_count(InterNode *inter, Call *c) noexcept nogil:
    return min(c.count - <size_t> inter.turn * inter.fragment_count, inter.fragment_count)


cdef void start_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    choose_partials(inter, c, SR_WIRE_NATIVE)
    inter.fragment_count = inter.pair_nbytes // inter.itemsize


# A turn for each part of the pieces: partial results are asked for, reduced here for everyone, and folded.
cdef int stage_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *s = &inter.fragment[0]
    cdef unsigned char *out = c.out + <size_t> inter.turn * inter.fragment_count * c.itemsize
    if inter.stage == PIECES_ASKING:
        await_partials(g, c)
        inter.group = 0
        inter.stage = PIECES_REDUCING
    if inter.stage == PIECES_REDUCING:
        if reduce_group(g, c):
            return PROGRESSED
        inter.stage = PIECES_FOLDING
    if s.receiving > 0 or s.sending > 0:
        return blocked_on_conns(g, c)
    fold_nodes(g, c, place_for_own(g, c), inter.room, inter.pair_nbytes, place_for_own(g, c), out, part_count(inter, c))
    inter.turn += 1
    inter.stage = PIECES_ASKING
    if <size_t> inter.turn * inter.fragment_count < c.count:
        return PROGRESSED
    count_path(g, ACROSS)
    return DONE


cdef void await_partials(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef unsigned char *arrived = inter.room
    cdef int node
    for node in range(inter.nnodes):
        if node != inter.node:
            receive_partial(g, c, reducer_on(inter, node, inter.rank), arrived, part_count(inter, c),
                            &inter.fragment[0].receiving)
            arrived += inter.pair_nbytes


# The partial result for this rank itself: where the result belongs, or before what is made for others.
cdef inline unsigned char *place_for_own(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if inter.dtype == c.dtype:
        return c.out + <size_t> inter.turn * inter.fragment_count * c.itemsize
    return inter.scratch


# What this rank reduces in one group, for another host.
cdef inline unsigned char *place_for_group(InterNode *inter, int group) noexcept nogil:
    return inter.room + <size_t> (inter.nnodes - 1 + group) * inter.pair_nbytes


# The pieces of as many ranks of a node as this one has, a local rank reducing that of each. What this rank reduced in
# the step before is for another host. False: there is no group left.
cdef bint reduce_group(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int first = 0
    cdef int node = node_of_group(g, inter, inter.group, &first)
    if inter.group > 0:
        send_group(g, c, inter.group - 1)
    if node == inter.nnodes:
        return False
    begin_group(g, c, node, first, place_for_own(g, c) if node == inter.node else place_for_group(inter, inter.group))
    inter.group += 1
    return True


cdef void send_group(Group *g, Call *c, int group) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int first = 0
    cdef int node = node_of_group(g, inter, group, &first)
    first += inter.local_of[inter.rank]
    if node != inter.node and first < inter.nlocal[node]:
        send_partial(g, c, rank_at(inter, node, first), place_for_group(inter, group), part_count(inter, c), NULL,
                     NULL, &inter.fragment[0].sending)


cdef void begin_group(Group *g, Call *c, int node, int first, unsigned char *partial) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef size_t count = part_count(inter, c)
    cdef const unsigned char *x = c.x + <size_t> inter.turn * inter.fragment_count * c.itemsize
    cdef unsigned char *wide = inter.scratch + inter.pair_nbytes   # behind the partial result for this rank
    cdef Call *step = new_reduction(g, c, REDUCE_SCATTER, count)
    cdef int local
    for local in range(g.size):
        inter.given[local].nbytes = 0
        if first + local < inter.nlocal[node]:
            inter.given[local].data = <unsigned char *> summands(
                g, c, x + rank_at(inter, node, first + local) * c.nbytes, count, wide)
            inter.given[local].nbytes = step.nbytes
            wide += inter.pair_nbytes
    if g.size == 1:
        step.x = inter.given[0].data
    else:
        step.given = inter.given
    step.out = partial
    begin_local(g, c)


cdef int step_reduce_scatter(Group *g, Call *c) noexcept nogil:
    return step_internode(g, c, start_reduce_scatter, stage_reduce_scatter)
