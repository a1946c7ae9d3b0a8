# all_reduce, reduce and barrier of ranks of several hosts. The ranks of a host reduce among themselves first, so that
# every byte crosses the wire once for all of them; then hosts exchange partial results and fold them in the order of
# hosts; then each host hands the result to its ranks. Everybody takes part in the middle step: a local rank owns a
# slice and has connections of its own to those that own it elsewhere. (Hierarchical all-reduce, as in Horovod and
# NCCL; the exchange of large messages is a direct reduce-scatter and all-gather: 2(H-1)/H of a slice over the wire,
# for H hosts.)
# May know: _group, _leg, _local. Every function returns at once; what it waits for is in call.awaited.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t

from ._group cimport *
from ._leg cimport *
from ._local cimport begin_local, finish_crossing, new_local, step_crossing


# ---- both: partial results of hosts --------------------------------------------------------------------------

# Whether the result is wanted on a node.
cdef inline bint is_wanted_on(Leg *leg, Call *c, int node) noexcept nogil:
    return c.kind != REDUCE or node == leg.node_of[c.root]


# What a host of one rank has is its partial result, unless folding a single value changes it: as logical ops do.
cdef inline bint is_partial_itself(Group *g, Call *c) noexcept nogil:
    return g.size == 1 and c.op < SR_LAND and c.dtype != SR_BOOL


# The partial results of count elements, in the order of hosts: others' lie `skip` bytes into what came from them.
cdef void fold_nodes(Group *g, Call *c, const unsigned char *own, unsigned char *arrived, size_t pitch, size_t skip,
                     unsigned char *out, size_t count) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef int node
    for node in range(leg.nnodes):
        if node == leg.node:
            leg.source[node] = own
        else:
            leg.source[node] = arrived + skip
            arrived += pitch
    g.target[0] = out
    g.kernels.fold[c.dtype][c.op](g.target, 1, 0, leg.source, leg.nnodes, count, <uint32_t> leg.size)


# ---- small: one rank of each host exchanges all of it ----------------------------------------------------------

cdef enum:
    REDUCING, EXCHANGING, BROADCASTING   # stages of a small call


# Who does that: the root, where there is one.
cdef inline int leader_on(Leg *leg, Call *c, int node) noexcept nogil:
    return leg.local_of[c.root] if c.kind == REDUCE and node == leg.node_of[c.root] else 0


# Where there is nothing to be moved the ranks meet all the same.
cdef inline Call *new_small(Group *g, Call *c, int kind) noexcept nogil:
    return new_local(g, c, BARRIER if c.nbytes == 0 else kind, c.count if c.nbytes > 0 else 0)


cdef void enter_small(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Call *step
    begin_crossing(g, c)
    if is_partial_itself(g, c):
        return
    step = new_small(g, c, REDUCE)
    step.root = leader_on(leg, c, leg.node)
    step.x = c.x
    step.out = leg.room
    begin_local(g, c)


cdef int step_small(Group *g, Call *c) noexcept nogil:
    return step_crossing(g, c, stage_small)


cdef int stage_small(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *whole = &leg.stretch[0]
    cdef bint leads = leg.local_of[leg.rank] == leader_on(leg, c, leg.node)
    if leg.stage == REDUCING:
        leg.stage = EXCHANGING
        if leads:
            exchange_partials(g, c)
    if leg.stage == EXCHANGING:
        if whole.receiving > 0 or whole.sending > 0:
            return blocked_on_wires(g, c)
        leg.stage = BROADCASTING
        if leads and is_wanted_on(leg, c, leg.node) and c.nbytes > 0:
            fold_nodes(g, c, c.x if is_partial_itself(g, c) else leg.room, leg.room + c.nbytes, c.nbytes, 0, c.out,
                       c.count)
        if c.kind != REDUCE and g.size > 1:
            hand_out_small(g, c)
            return PROGRESSED
    count_path(g, ACROSS)
    return DONE


# The partial result of this host is there: its leader sends it to all others that fold.
cdef void exchange_partials(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *whole = &leg.stretch[0]
    cdef const unsigned char *partial = c.x if is_partial_itself(g, c) else leg.room
    cdef unsigned char *arrived = leg.room + c.nbytes
    cdef int node, other
    for node in range(leg.nnodes):
        if node == leg.node:
            continue
        other = rank_at(leg, node, leader_on(leg, c, node))
        if is_wanted_on(leg, c, node):
            send_to(g, c, other, partial, c.nbytes, &whole.sending)
        if is_wanted_on(leg, c, leg.node):
            receive_from(g, c, other, arrived, c.nbytes, &whole.receiving)
            arrived += c.nbytes


# From the leader to the other ranks of the host.
cdef void hand_out_small(Group *g, Call *c) noexcept nogil:
    cdef Call *step = new_small(g, c, BROADCAST)
    step.x = c.out
    step.out = c.out
    begin_local(g, c)


# ---- large: slices of stretches ----------------------------------------------------------------------------------

# A message goes in stretches, so that one is on the wire while the next is reduced and the one before is handed out.
# The order in which local ranks take their steps, and in which messages follow each other on a connection, is fixed: a
# *turn* reduces one stretch locally, folds an earlier one, posts the first one's exchange, and gathers a third.
cdef enum:
    FOLDING = 1, POSTING = 2, GATHERING = 3   # stages of a turn, after REDUCING
    FOLD_LAG = 3         # turns from reducing a stretch locally to folding what other hosts made of it


cdef inline size_t grain_of(Call *c) noexcept nogil:
    return SR_CACHE_LINE // c.itemsize


# Where the slice of a local rank of a node begins, in elements of a stretch of `count`.
cdef size_t slice_at(Leg *leg, Call *c, int node, int local, size_t count) noexcept nogil:
    return sr_slice_begin_grained(count, leg.nlocal[node], local, grain_of(c))


cdef inline size_t own_slice(Leg *leg, Call *c, size_t count) noexcept nogil:
    return slice_at(leg, c, leg.node, leg.local_of[leg.rank], count)


cdef inline size_t end_of_own_slice(Leg *leg, Call *c, size_t count) noexcept nogil:
    return slice_at(leg, c, leg.node, leg.local_of[leg.rank] + 1, count)


# Which local rank of a node owns an element, and where its slice ends.
cdef inline int owner_on(Leg *leg, Call *c, int node, size_t element, size_t count, size_t *end) noexcept nogil:
    cdef int local = 0
    while slice_at(leg, c, node, local + 1, count) <= element:
        local += 1
    end[0] = slice_at(leg, c, node, local + 1, count)
    return rank_at(leg, node, local)


cdef inline Stretch *stretch_at(Leg *leg, int number) noexcept nogil:
    return &leg.stretch[number % MOST_UNDER_WAY]


# Some stretches even of a short message, and as long as they are worth a step each.
cdef size_t stretch_count_of(Leg *leg, Call *c) noexcept nogil:
    cdef size_t nbytes = max(min(c.nbytes // 4, leg.stretch_nbytes), leg.least_stretch_nbytes)
    return max(nbytes // leg.even_nbytes, <size_t> 1) * leg.even_nbytes // c.itemsize


cdef inline int nstretches(Leg *leg, Call *c) noexcept nogil:
    return <int> ((c.count + leg.stretch_count - 1) // leg.stretch_count)


# Of the room for a stretch: this rank's partial result, where it has no other place, then those of other hosts.
cdef inline unsigned char *room_of(Leg *leg, int number) noexcept nogil:
    return leg.room + <size_t> (number % MOST_UNDER_WAY) * leg.nnodes * leg.slice_nbytes


cdef inline unsigned char *arrived_from(Leg *leg, int number, int node) noexcept nogil:
    return room_of(leg, number) + <size_t> (node + 1 if node < leg.node else node) * leg.slice_nbytes


# The own slice of a stretch, reduced on this host; and where its result belongs, which may be the same place.
cdef inline const unsigned char *partial_of(Group *g, Call *c, int number) noexcept nogil:
    if is_partial_itself(g, c):
        return c.x + stretch_at(leg_of(g), number).begin * c.itemsize
    return result_of(g, c, number)


cdef inline unsigned char *result_of(Group *g, Call *c, int number) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *s = stretch_at(leg, number)
    if c.kind == REDUCE:
        return room_of(leg, number)
    return c.out + (s.begin + own_slice(leg, c, s.count)) * c.itemsize


cdef void enter_large(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    begin_crossing(g, c)
    leg.stretch_count = stretch_count_of(leg, c)
    leg.in_parts = leg.nnodes > 2
    leg.lag = 2 * FOLD_LAG if leg.in_parts else FOLD_LAG
    

cdef int step_large(Group *g, Call *c) noexcept nogil:
    return step_crossing(g, c, stage_large)


cdef inline void next_stage(Leg *leg) noexcept nogil:
    leg.stage += 1
    if leg.stage > GATHERING:
        leg.stage = REDUCING
        leg.turn += 1


cdef int stage_large(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef int last = nstretches(leg, c)
    cdef int status = DONE
    if leg.stage == REDUCING:
        if leg.turn == last + leg.lag:
            return finish_crossing(g, c)
        if leg.turn < last:
            status = reduce_locally(g, c, leg.turn)
    elif leg.stage == FOLDING:
        if 0 <= leg.turn - FOLD_LAG < last:
            status = fold_stretch(g, c, leg.turn - FOLD_LAG)
    elif leg.stage == POSTING:
        if leg.turn < last:
            exchange_slices(g, c, leg.turn)
    elif 0 <= leg.turn - leg.lag < last:
        status = gather_stretch(g, c, leg.turn - leg.lag)
    if status != BLOCKED:   # a local step has to end first
        next_stage(leg)
        return PROGRESSED
    return status


# DONE: nothing is to be done locally. PROGRESSED: a local step has begun.
cdef int reduce_locally(Group *g, Call *c, int number) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *s = stretch_at(leg, number)
    cdef Call *step
    cdef size_t begin
    cdef int local
    if s.sending > 0:   # of the stretch that was there before
        return blocked_on_wires(g, c)
    s.begin = <size_t> number * leg.stretch_count
    s.count = min(leg.stretch_count, c.count - s.begin)
    if is_partial_itself(g, c):
        return DONE
    step = new_local(g, c, REDUCE_SCATTER, slice_at(leg, c, leg.node, 1, s.count))
    step.x = c.x + s.begin * c.itemsize
    step.out = result_of(g, c, number)
    if s.count % (<size_t> g.size * grain_of(c)) != 0:
        for local in range(g.size):
            begin = slice_at(leg, c, leg.node, local, s.count)
            leg.given[local].data = <unsigned char *> step.x + begin * c.itemsize
            leg.given[local].nbytes = (slice_at(leg, c, leg.node, local + 1, s.count) - begin) * c.itemsize
        step.given = leg.given
    begin_local(g, c)
    return PROGRESSED


# Of the own slice: to everyone on other hosts that owns some of it. In parts, each host gets the part that it folds.
cdef void exchange_slices(Group *g, Call *c, int number) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *s = stretch_at(leg, number)
    cdef const unsigned char *partial = partial_of(g, c, number)
    cdef size_t own = own_slice(leg, c, s.count)
    cdef size_t at = own, end = end_of_own_slice(leg, c, s.count)
    cdef size_t next, begin, length
    cdef int node, other
    while at < end:
        next = next_border(leg, c, at, s.count)
        for node in range(leg.nnodes):
            if node == leg.node:
                continue
            other = owner_on(leg, c, node, at, s.count, &begin)
            length = part_of(leg, c, node, at, next, &begin)
            if length > 0 and (leg.in_parts or is_wanted_on(leg, c, node)):
                send_to(g, c, other, partial + (begin - own) * c.itemsize, length * c.itemsize, &s.sending)
            length = part_of(leg, c, leg.node, at, next, &begin)
            if length > 0 and (leg.in_parts or is_wanted_on(leg, c, leg.node)):
                receive_from(g, c, other, arrived_from(leg, number, node) + (begin - own) * c.itemsize,
                             length * c.itemsize, &s.receiving)
        at = next


# Up to where the elements from `at` on have the same owner on every node.
cdef inline size_t next_border(Leg *leg, Call *c, size_t at, size_t count) noexcept nogil:
    cdef size_t next = count
    cdef size_t end
    cdef int node
    for node in range(leg.nnodes):
        owner_on(leg, c, node, at, count, &end)
        next = min(next, end)
    return next


# What a node folds of the elements from `at` to before `end`: *begin and its length. All fold all, or each a part.
cdef inline size_t part_of(Leg *leg, Call *c, int node, size_t at, size_t end, size_t *begin) noexcept nogil:
    if not leg.in_parts:
        begin[0] = at
        return end - at
    begin[0] = at + sr_slice_begin_grained(end - at, leg.nnodes, node, grain_of(c))
    return at + sr_slice_begin_grained(end - at, leg.nnodes, node + 1, grain_of(c)) - begin[0]


cdef int fold_stretch(Group *g, Call *c, int number) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *s = stretch_at(leg, number)
    cdef size_t own = own_slice(leg, c, s.count)
    cdef size_t at = own, end = end_of_own_slice(leg, c, s.count)
    cdef size_t next, begin, length
    # What is still being sent would change, unless it is what others fold.
    if s.receiving > 0 or (s.sending > 0 and not leg.in_parts):
        return blocked_on_wires(g, c)
    while at < end:
        next = next_border(leg, c, at, s.count)
        length = part_of(leg, c, leg.node, at, next, &begin)
        if length > 0 and (leg.in_parts or is_wanted_on(leg, c, leg.node)):
            fold_nodes(g, c, partial_of(g, c, number) + (begin - own) * c.itemsize,
                       room_of(leg, number) + leg.slice_nbytes, leg.slice_nbytes, (begin - own) * c.itemsize,
                       result_of(g, c, number) + (begin - own) * c.itemsize, length)
        at = next
    if leg.in_parts:
        exchange_results(g, c, number)
    return DONE


# Of the parts that this host has folded to those that want them, and theirs.
cdef void exchange_results(Group *g, Call *c, int number) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *s = stretch_at(leg, number)
    cdef unsigned char *result = result_of(g, c, number)
    cdef size_t own = own_slice(leg, c, s.count)
    cdef size_t at = own, end = end_of_own_slice(leg, c, s.count)
    cdef size_t next, begin, length
    cdef int node, other
    while at < end:
        next = next_border(leg, c, at, s.count)
        for node in range(leg.nnodes):
            if node == leg.node:
                continue
            other = owner_on(leg, c, node, at, s.count, &begin)
            length = part_of(leg, c, leg.node, at, next, &begin)
            if length > 0 and is_wanted_on(leg, c, node):
                send_to(g, c, other, result + (begin - own) * c.itemsize, length * c.itemsize, &s.sending)
            length = part_of(leg, c, node, at, next, &begin)
            if length > 0 and is_wanted_on(leg, c, leg.node):
                receive_from(g, c, other, result + (begin - own) * c.itemsize, length * c.itemsize, &s.receiving)
        at = next


# The slices of a stretch to the ranks of this host that want them. Returns as reduce_locally.
cdef int gather_stretch(Group *g, Call *c, int number) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *s = stretch_at(leg, number)
    cdef unsigned char *out = c.out + s.begin * c.itemsize
    cdef unsigned char *result = result_of(g, c, number)
    cdef Call *step
    cdef size_t begin
    cdef int local
    if s.receiving > 0:
        return blocked_on_wires(g, c)
    if not is_wanted_on(leg, c, leg.node):
        return DONE
    if g.size == 1:
        if c.kind == REDUCE:
            g.kernels.copy(out, result, s.count * c.itemsize, 0)
        return DONE
    step = new_local(g, c, GATHER if c.kind == REDUCE else ALL_GATHER, slice_at(leg, c, leg.node, 1, s.count))
    step.x = result
    step.out = out
    step.root = leg.local_of[c.root]
    if c.kind == REDUCE or s.count % (<size_t> g.size * grain_of(c)) != 0:
        for local in range(g.size):
            begin = slice_at(leg, c, leg.node, local, s.count)
            leg.taken[local].data = out + begin * c.itemsize
            leg.taken[local].nbytes = (slice_at(leg, c, leg.node, local + 1, s.count) - begin) * c.itemsize
            if c.kind == REDUCE and leg.rank != c.root:
                leg.taken[local].nbytes = 0
            leg.given[local].data = result
            leg.given[local].nbytes = (end_of_own_slice(leg, c, s.count) - own_slice(leg, c, s.count)) * c.itemsize
        step.given, step.taken = leg.given, leg.taken
    begin_local(g, c)
    return PROGRESSED


# ---- reduce_scatter: every piece is reduced on each host, and folded by who gets it --------------------------------

cdef enum:
    ASKING = 4   # a stage of a turn, before REDUCING


cdef inline int ngroups(Group *g, Leg *leg, int node) noexcept nogil:
    return (leg.nlocal[node] + g.size - 1) // g.size


# Which local rank of a node reduces the pieces of a rank.
cdef inline int reducer_on(Leg *leg, int node, int rank) noexcept nogil:
    return rank_at(leg, node, leg.local_of[rank] % leg.nlocal[node])


cdef inline size_t part_of_piece(Leg *leg, Call *c) noexcept nogil:
    return min(c.nbytes - <size_t> leg.turn * leg.part_nbytes, leg.part_nbytes)


cdef void enter_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    begin_crossing(g, c)
    leg.part_nbytes = leg.pair_nbytes
    leg.stage = ASKING


# A turn for each part of the pieces: partial results are asked for, reduced here for everyone, and folded.
cdef int stage_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef Stretch *s = &leg.stretch[0]
    cdef unsigned char *out = c.out + <size_t> leg.turn * leg.part_nbytes
    if leg.stage == ASKING:
        await_partials(g, c)
        leg.group = 0
        leg.stage = REDUCING
    if leg.stage == REDUCING:
        if reduce_group(g, c):
            return PROGRESSED
        leg.stage = FOLDING
    if s.receiving > 0 or s.sending > 0:
        return blocked_on_wires(g, c)
    fold_nodes(g, c, out, leg.room, leg.part_nbytes, 0, out, part_of_piece(leg, c) // c.itemsize)
    leg.turn += 1
    leg.stage = ASKING
    if <size_t> leg.turn * leg.part_nbytes < c.nbytes:
        return PROGRESSED
    count_path(g, ACROSS)
    return DONE


cdef void await_partials(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef unsigned char *arrived = leg.room
    cdef int node
    for node in range(leg.nnodes):
        if node != leg.node:
            receive_from(g, c, reducer_on(leg, node, leg.rank), arrived, part_of_piece(leg, c),
                         &leg.stretch[0].receiving)
            arrived += leg.part_nbytes


# The pieces of as many ranks of a node as this one has, a local rank reducing that of each. What this rank reduced in
# the step before is for another host. False: there is no group left.
cdef bint reduce_group(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef int node = 0, group = leg.group
    cdef unsigned char *partial = leg.room + <size_t> (leg.nnodes - 1 + leg.group) * leg.part_nbytes
    cdef int first
    if group > 0:
        send_partial(g, c, group - 1, partial - leg.part_nbytes)
    while node < leg.nnodes and group >= ngroups(g, leg, node):
        group -= ngroups(g, leg, node)
        node += 1
    if node == leg.nnodes:
        return False
    leg.group += 1
    first = group * g.size
    if node == leg.node:
        partial = c.out + <size_t> leg.turn * leg.part_nbytes
    begin_reducing(g, c, node, first, partial)
    return True


cdef void send_partial(Group *g, Call *c, int group, unsigned char *partial) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef int node = 0
    while group >= ngroups(g, leg, node):
        group -= ngroups(g, leg, node)
        node += 1
    group = group * g.size + leg.local_of[leg.rank]
    if node != leg.node and group < leg.nlocal[node]:
        send_to(g, c, rank_at(leg, node, group), partial, part_of_piece(leg, c), &leg.stretch[0].sending)


cdef void begin_reducing(Group *g, Call *c, int node, int first, unsigned char *partial) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    cdef size_t nbytes = part_of_piece(leg, c)
    cdef const unsigned char *x = c.x + <size_t> leg.turn * leg.part_nbytes
    cdef Call *step = new_local(g, c, REDUCE_SCATTER, nbytes // c.itemsize)
    cdef int local
    if g.size == 1:
        step.x = x + rank_at(leg, node, first) * c.nbytes
    else:
        for local in range(g.size):
            leg.given[local].nbytes = 0
            if first + local < leg.nlocal[node]:
                leg.given[local].data = <unsigned char *> x + rank_at(leg, node, first + local) * c.nbytes
                leg.given[local].nbytes = nbytes
        step.given = leg.given
    step.out = partial
    begin_local(g, c)


cdef int step_reduce_scatter(Group *g, Call *c) noexcept nogil:
    return step_crossing(g, c, stage_reduce_scatter)


# ---- large or small ---------------------------------------------------------------------------------------

# A pure function of the call and of what all ranks share.
cdef void choose_reduction(Group *g, Call *c) noexcept nogil:
    cdef Leg *leg = leg_of(g)
    if c.kind == REDUCE_SCATTER and c.nbytes > 0:
        c.enter, c.step = enter_reduce_scatter, step_reduce_scatter
    elif c.nbytes <= leg.small_nbytes:
        c.enter, c.step = enter_small, step_small
    else:
        c.enter, c.step = enter_large, step_large
