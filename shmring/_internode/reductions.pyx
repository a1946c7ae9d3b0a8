# The reductions over several hosts: all_reduce and reduce, small and large, and reduce_scatter. The ranks of a host
# reduce among themselves first, so each byte is sent between hosts once for all of them. Then hosts exchange partial
# results and fold them in the order of hosts. Then each host distributes the result to its ranks (hierarchical
# all-reduce, as in Horovod and NCCL). No function blocks; call.awaited holds the flag that the call waits for.

from libc.stddef cimport size_t

from .._core.group cimport (
    ACROSS, ALL_GATHER, BARRIER, BLOCKED, BROADCAST, DONE, GATHER, PROGRESSED, REDUCE, REDUCE_SCATTER, Call, Group,
    count_path,
)
from .._core.kernels cimport SR_AVG, SR_WIRE_NATIVE
from .._core.schedule cimport sr_slice_begin_grained
from .._core.segment cimport SR_CACHE_LINE
from .context cimport (
    MOST_UNDER_WAY, OTHER_SLICES, SR_CONN_QUEUE, Fragment, InterNode, begin_local, blocked_on_conns, finish_internode,
    fragment_at, have_room, host_of_batch, index_of_other, inter_of, is_wanted_on, lay_out, new_local, nfragments,
    rank_at, receive_from, send_to,
)
from .partials cimport (
    are_results_encoded, choose_partials, encode_alike, encode_and_keep, fold_hosts, fold_some, is_partial_itself,
    nbytes_on_wire, new_reduction, receive_partial, result_nbytes, send_partial, summands,
)


# ---- small all_reduce and reduce, and barrier ----------------------------------------------------------------------

# One rank of each host, its leader, exchanges the whole message with the leaders of all other hosts, in one hop.
cdef enum:
    SMALL_REDUCING, SMALL_EXCHANGING, SMALL_BROADCASTING   # stages of a small call


# Return the local rank of the leader of a host: the root of a reduce on its host, else 0.
cdef inline int leader_on(InterNode *inter, Call *c, int host) noexcept nogil:
    return inter.local_of[c.root] if c.kind == REDUCE and host == inter.host_of[c.root] else 0


cdef inline bint leads(InterNode *inter, Call *c) noexcept nogil:
    return inter.local_of[inter.rank] == leader_on(inter, c, inter.host)


cdef void start_small(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Call *local_call
    choose_partials(inter, c, SR_WIRE_NATIVE)
    if is_partial_itself(g, c):
        return
    if c.nbytes == 0:   # the ranks synchronise nevertheless
        new_local(g, c, BARRIER, 0)
    else:
        local_call = new_reduction(g, c, REDUCE, c.count)
        local_call.root = leader_on(inter, c, inter.host)
        local_call.x = summands(g, c, c.x, c.count, inter.scratch)
        local_call.out = inter.room
    begin_local(g, c)


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
        if leads(inter, c) and is_wanted_on(inter, c, inter.host) and c.nbytes > 0:
            fold_hosts(g, c, own_partial(g, c), inter.room + inter.slice_nbytes, inter.slice_nbytes, inter.room, c.out,
                       c.count)
        if c.kind != REDUCE and g.size > 1:
            hand_out_small(g, c)
            return PROGRESSED
    count_path(g, ACROSS)
    return DONE


cdef inline const unsigned char *own_partial(Group *g, Call *c) noexcept nogil:
    return c.x if is_partial_itself(g, c) else inter_of(g).room


# Send this host's partial result to all other leaders that fold, and receive theirs if this one folds.
cdef void exchange_partials(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *whole = &inter.fragment[0]
    cdef unsigned char *arrived = inter.room
    cdef size_t count = c.count if c.nbytes > 0 else 0   # if nothing is moved, c.count only identifies the call
    cdef int host, other
    for host in range(inter.nhosts):
        if host == inter.host:
            continue
        arrived += inter.slice_nbytes
        other = rank_at(inter, host, leader_on(inter, c, host))
        if is_wanted_on(inter, c, host):
            send_partial(g, c, other, own_partial(g, c), count, NULL, NULL, &whole.sending)
        if is_wanted_on(inter, c, inter.host):
            receive_partial(g, c, other, arrived, count, &whole.receiving)


# Distribute the result from the leader to the other ranks of the host.
cdef void hand_out_small(Group *g, Call *c) noexcept nogil:
    cdef Call *local_call = new_local(g, c, BROADCAST if c.nbytes > 0 else BARRIER, c.count if c.nbytes > 0 else 0)
    local_call.x = c.out
    local_call.out = c.out
    begin_local(g, c)


# ---- large all_reduce and reduce: slices of fragments --------------------------------------------------------------

# Every rank takes part in the exchange: a local rank owns a slice, and has connections of its own to the ranks that own
# parts of this slice on other hosts. The exchange is a direct reduce-scatter and all-gather: with H hosts, 2(H-1)/H of
# a slice is sent.

# A message is split into fragments, so that one is sent while the next one is reduced and the previous one is
# distributed. The order of local steps, and of messages on a connection, is fixed: a *round* reduces one fragment
# locally, folds an earlier one, posts the exchange of the one just reduced, and gathers the oldest one. If hosts form
# groups, each host folds within its group first, and then with the hosts at the same place in the other groups.
cdef enum:
    REDUCING, FOLDING, JOINING, POSTING, GATHERING   # stages of a round
    FOLD_LAG = 3         # rounds from reducing a fragment locally to folding the partial results of other hosts
    FOLD_LAG_IN_GROUPS = 2   # the same with groups; also rounds from there to folding the results of other groups


# Elements of a cache line. Slices begin at cache lines if the message does.
cdef inline size_t grain_of(InterNode *inter) noexcept nogil:
    return SR_CACHE_LINE // inter.itemsize


# Return the first element of the slice of a local rank of a host, in a fragment of `count` elements.
cdef size_t slice_at(InterNode *inter, int host, int local, size_t count) noexcept nogil:
    return sr_slice_begin_grained(count, inter.nlocal[host], local, grain_of(inter))


cdef inline size_t own_slice(InterNode *inter, size_t count) noexcept nogil:
    return slice_at(inter, inter.host, inter.local_of[inter.rank], count)


cdef inline size_t end_of_own_slice(InterNode *inter, size_t count) noexcept nogil:
    return slice_at(inter, inter.host, inter.local_of[inter.rank] + 1, count)


# Return the rank of a host that owns an element. Set *end to the end of its slice.
cdef inline int owner_on(InterNode *inter, int host, size_t element, size_t count, size_t *end) noexcept nogil:
    cdef int local = 0
    while slice_at(inter, host, local + 1, count) <= element:
        local += 1
    end[0] = slice_at(inter, host, local + 1, count)
    return rank_at(inter, host, local)


cdef inline bint is_even(Group *g, size_t count) noexcept nogil:
    return count % (<size_t> g.size * grain_of(inter_of(g))) == 0


# Return the elements of a fragment: a quarter of a short message, within the limits of a fragment's size. itemsize: of
# partial results.
cdef size_t fragment_count_of(InterNode *inter, size_t count, size_t itemsize) noexcept nogil:
    cdef size_t nbytes = max(min(count * itemsize // 4, inter.fragment_nbytes), inter.least_fragment_nbytes)
    return max(nbytes // inter.even_nbytes, <size_t> 1) * inter.even_nbytes // itemsize


# Return a slice of the room for a fragment: PARTIAL, this rank's partial result if it has no other place; RESULT, its
# final result; ENCODED, their wire format; ARRIVED and the following slices, the data received from each other host.
cdef inline unsigned char *room_of(InterNode *inter, int number, int which) noexcept nogil:
    cdef size_t slice_number = <size_t> (number % MOST_UNDER_WAY) * (OTHER_SLICES + inter.nhosts) + which
    return inter.room + slice_number * inter.slice_nbytes


cdef enum:
    PARTIAL, RESULT, ENCODED, ARRIVED   # slices of the room for a fragment


cdef inline unsigned char *arrived_from(InterNode *inter, int number, int host) noexcept nogil:
    return room_of(inter, number, ARRIVED + index_of_other(inter, host))


# Return this host's partial result of this rank's slice of a fragment. It may be at the place of the final result.
cdef inline const unsigned char *own_partial_of(Group *g, Call *c, int number) noexcept nogil:
    if is_partial_itself(g, c):
        return c.x + fragment_at(inter_of(g), number).begin * c.itemsize
    return place_for_partial(g, c, number)


cdef inline unsigned char *place_for_partial(Group *g, Call *c, int number) noexcept nogil:
    if c.kind == REDUCE or inter_of(g).dtype != c.dtype:
        return room_of(inter_of(g), number, PARTIAL)
    return result_of(g, c, number)


cdef inline unsigned char *result_of(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    if c.kind == REDUCE:
        return room_of(inter, number, RESULT)
    return c.out + (fragment.begin + own_slice(inter, fragment.count)) * c.itemsize


# True if this host must fold its own partial result in the decoded form in which it is sent: every host folds the whole
# slice, from encoded partial results, and all must get the same bits.
cdef inline bint keeps_what_it_sends(InterNode *inter, Call *c) noexcept nogil:
    return inter.format != SR_WIRE_NATIVE and not inter.in_parts and c.kind != REDUCE


# Return the partial result that this host folds: as it is sent if keeps_what_it_sends.
cdef inline const unsigned char *kept_of(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if keeps_what_it_sends(inter, c):
        return room_of(inter, number, PARTIAL)
    return own_partial_of(g, c, number)


# Return the number of residuals for this rank's slice of one fragment: one rounding error for each element, and some
# spare ones.
cdef inline size_t residual_pitch(InterNode *inter, size_t fragment_count) noexcept nogil:
    return fragment_count // inter.nlocal[inter.host] + SR_CACHE_LINE


cdef size_t residual_count(InterNode *inter, size_t count) noexcept nogil:
    cdef size_t length = fragment_count_of(inter, count, sizeof(float))
    return (count + length - 1) // length * residual_pitch(inter, length)


cdef inline float *residual_of(InterNode *inter, Call *c, int number) noexcept nogil:
    return NULL if c.residual == NULL else c.residual + number * residual_pitch(inter, inter.fragment_count)


cdef void start_large(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    inter.in_parts = goes_in_parts(inter, c)
    choose_partials(inter, c, c.wire if inter.in_parts or inter.nhosts == 2 else <int> SR_WIRE_NATIVE)
    inter.fragment_count = fragment_count_of(inter, c.count, inter.itemsize)
    inter.fold_lag = FOLD_LAG
    inter.lag = 2 * FOLD_LAG if inter.in_parts else FOLD_LAG
    if c.hosts_in_group > 0 and inter.in_parts:
        inter.per_group = c.hosts_in_group
        inter.fold_lag = FOLD_LAG_IN_GROUPS
        inter.lag = 3 * FOLD_LAG_IN_GROUPS


# True if each host folds a part of a slice for all hosts. With three or more hosts this sends less. With two hosts it
# sends the same amount in one hop more, with half the folding, which pays for a long message.
cdef inline bint goes_in_parts(const InterNode *inter, const Call *c) noexcept nogil:
    if inter.most_parts > SR_CONN_QUEUE // 2:
        return False
    return inter.nhosts > 2 or (c.kind != REDUCE and c.nbytes >= inter.parts_nbytes)


cdef inline bint are_grouped(const InterNode *inter) noexcept nogil:
    return inter.per_group < inter.nhosts


# Return the first host of this host's group.
cdef inline int own_group(const InterNode *inter) noexcept nogil:
    return inter.host - inter.host % inter.per_group


# Return this host's place in its group.
cdef inline int own_place(const InterNode *inter) noexcept nogil:
    return inter.host % inter.per_group


cdef inline void next_stage(InterNode *inter) noexcept nogil:
    inter.stage += 1
    if inter.stage > GATHERING:
        inter.stage = REDUCING
        inter.round += 1


cdef int stage_large(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int last = nfragments(inter, c)
    cdef int status = DONE
    if inter.stage == REDUCING:
        if inter.round == last + inter.lag:
            return finish_internode(g, c)
        if inter.round < last:
            status = reduce_locally(g, c, inter.round)
    elif inter.stage == FOLDING:
        if 0 <= inter.round - inter.fold_lag < last:
            status = fold_fragment(g, c, inter.round - inter.fold_lag)
    elif inter.stage == JOINING:
        if are_grouped(inter) and 0 <= inter.round - 2 * inter.fold_lag < last:
            status = join_groups(g, c, inter.round - 2 * inter.fold_lag)
    elif inter.stage == POSTING:
        if inter.round < last:
            status = exchange_slices(g, c, inter.round)
    elif 0 <= inter.round - inter.lag < last:
        status = gather_result(g, c, inter.round - inter.lag)
    if status != BLOCKED:   # if a local step has begun, the next stage runs after it
        next_stage(inter)
        return PROGRESSED
    return status


# Reduce a fragment on this host. Return DONE if that takes no local step, PROGRESSED if one has begun, or BLOCKED.
cdef int reduce_locally(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef const unsigned char *x
    cdef Call *local_call
    cdef size_t begin, end
    cdef int local
    if fragment.sending > 0:   # sends of the previous fragment in this place
        return blocked_on_conns(g, c)
    lay_out(inter, c, number)
    x = c.x + fragment.begin * c.itemsize
    if is_partial_itself(g, c):
        return DONE
    if g.size == 1 and inter.dtype != c.dtype:
        summands(g, c, x, fragment.count, place_for_partial(g, c, number))
        return DONE
    local_call = new_reduction(g, c, REDUCE_SCATTER, slice_at(inter, inter.host, 1, fragment.count))
    local_call.x = summands(g, c, x, fragment.count, inter.scratch)
    local_call.out = place_for_partial(g, c, number)
    if not is_even(g, fragment.count):
        for local in range(g.size):
            begin = slice_at(inter, inter.host, local, fragment.count)
            inter.given[local].data = <unsigned char *> local_call.x + begin * inter.itemsize
            end = slice_at(inter, inter.host, local + 1, fragment.count)
            inter.given[local].nbytes = (end - begin) * inter.itemsize
        local_call.given = inter.given
    begin_local(g, c)
    return PROGRESSED


# ---- between hosts ---------------------------------------------------------------------------------------------

# Return the end of the run of elements from `at` on that have the same owner on every host.
cdef inline size_t next_border(InterNode *inter, size_t at, size_t count) noexcept nogil:
    cdef size_t next = count
    cdef size_t end = 0
    cdef int host
    for host in range(inter.nhosts):
        owner_on(inter, host, at, count, &end)
        next = min(next, end)
    return next


# Return the length of the part of [at, end) that a host folds, and set *begin to its first element. If not in_parts,
# every host folds all of it.
cdef inline size_t folded_part(InterNode *inter, int host, size_t at, size_t end, size_t *begin) noexcept nogil:
    if not inter.in_parts:
        begin[0] = at
        return end - at
    host %= inter.per_group
    begin[0] = at + sr_slice_begin_grained(end - at, inter.per_group, host, grain_of(inter))
    return at + sr_slice_begin_grained(end - at, inter.per_group, host + 1, grain_of(inter)) - begin[0]


# Post the exchange of this rank's slice with all ranks of other hosts that own parts of it. If in_parts, each host gets
# the part that it folds of every run of elements with the same owners; else each owner gets one message.
cdef int exchange_slices(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef size_t end = end_of_own_slice(inter, fragment.count)
    cdef size_t at, next = 0
    cdef int host
    if not have_room(inter, inter.most_parts if inter.in_parts else 1):
        return blocked_on_conns(g, c)
    for host in range(own_group(inter), own_group(inter) + inter.per_group):
        at = own_slice(inter, fragment.count) if host != inter.host else end
        while at < end:
            owner_on(inter, host, at, fragment.count, &next)
            next = next_border(inter, at, fragment.count) if inter.in_parts else min(next, end)
            exchange_part(g, c, number, host, at, next)
            at = next
    return DONE


cdef void exchange_part(Group *g, Call *c, int number, int host, size_t at, size_t end) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, fragment.count)
    cdef float *residual = residual_of(inter, c, number)
    cdef unsigned char *encoded
    cdef size_t begin = 0, length
    cdef int other = owner_on(inter, host, at, fragment.count, &begin)
    length = folded_part(inter, host, at, end, &begin)
    if length > 0 and (inter.in_parts or is_wanted_on(inter, c, host)):
        begin -= own
        encoded = room_of(inter, number, ENCODED) + begin * inter.itemsize
        send_partial(g, c, other, own_partial_of(g, c, number) + begin * inter.itemsize, length, encoded,
                     NULL if residual == NULL else residual + begin, &fragment.sending)
        if keeps_what_it_sends(inter, c):
            g.kernels.decode[inter.format](<float *> (kept_of(g, c, number) + begin * inter.itemsize), encoded, length)
    length = folded_part(inter, inter.host, at, end, &begin)
    if length > 0 and (inter.in_parts or is_wanted_on(inter, c, inter.host)):
        receive_partial(g, c, other, arrived_from(inter, number, host) + (begin - own) * inter.itemsize, length,
                        &fragment.receiving)


cdef int fold_fragment(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, fragment.count)
    cdef size_t at = own, end = end_of_own_slice(inter, fragment.count)
    cdef size_t next, begin = 0, length
    # A fold overwrites data that are still being sent, unless in_parts: then this rank sends parts that others fold.
    if fragment.receiving > 0 or (fragment.sending > 0 and not inter.in_parts):
        return blocked_on_conns(g, c)
    if inter.in_parts and not have_room(inter, inter.most_parts):
        return blocked_on_conns(g, c)
    while at < end:
        next = next_border(inter, at, fragment.count)
        length = folded_part(inter, inter.host, at, next, &begin)
        if length > 0 and (inter.in_parts or is_wanted_on(inter, c, inter.host)):
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


# Exchange this group's partial result of the part that this host folds with the hosts at the same place in the other
# groups. begin: first element of the part, within this rank's slice.
cdef void exchange_between_groups(Group *g, Call *c, int number, size_t at, size_t begin, size_t length) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef unsigned char *partial = room_of(inter, number, PARTIAL) + begin * inter.itemsize
    cdef unsigned char *sent = partial
    cdef float *residual = residual_of(inter, c, number)
    cdef int host = own_place(inter)
    cdef int other
    cdef size_t unused = 0
    if inter.format != SR_WIRE_NATIVE:
        sent = room_of(inter, number, ENCODED) + begin * inter.itemsize
        encode_and_keep(g, sent, NULL if residual == NULL else residual + begin, <float *> partial, length)
    while host < inter.nhosts:
        if host != inter.host:
            other = owner_on(inter, host, at, fragment.count, &unused)
            send_to(g, c, other, sent, nbytes_on_wire(inter, length), &fragment.sending)
            receive_partial(g, c, other, arrived_from(inter, number, host) + begin * inter.itemsize, length,
                            &fragment.receiving)
        host += inter.per_group


# Fold the partial results of all groups, and post the exchange of the results within this group.
cdef int join_groups(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, fragment.count)
    cdef size_t at = own, end = end_of_own_slice(inter, fragment.count)
    cdef size_t next, begin = 0, length
    if fragment.receiving > 0 or fragment.sending > 0 or not have_room(inter, inter.most_parts):
        return blocked_on_conns(g, c)
    while at < end:
        next = next_border(inter, at, fragment.count)
        length = folded_part(inter, inter.host, at, next, &begin)
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


# Send the part that this host has folded to the owners on other hosts that need it, and receive their parts.
cdef void exchange_results(Group *g, Call *c, int number, size_t at, size_t end) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, fragment.count)
    cdef size_t begin = 0, length, unused = 0
    cdef const unsigned char *sent
    cdef int host, other
    length = folded_part(inter, inter.host, at, end, &begin)
    sent = write_result(g, c, number, begin - own, length)
    for host in range(own_group(inter), own_group(inter) + inter.per_group):
        if host == inter.host:
            continue
        other = owner_on(inter, host, at, fragment.count, &unused)
        length = folded_part(inter, inter.host, at, end, &begin)
        if length > 0 and is_wanted_on(inter, c, host):
            send_to(g, c, other, sent, result_nbytes(inter, c, length), &fragment.sending)
        length = folded_part(inter, host, at, end, &begin)
        if length > 0 and is_wanted_on(inter, c, inter.host):
            receive_from(g, c, other, receive_place_of(g, c, number, host, begin - own),
                         result_nbytes(inter, c, length), &fragment.receiving)


# Return the result as it is sent. If it is encoded, the owner's result is replaced by its decoded form, so that all
# ranks have the same bits.
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
    else:   # one host of each group encodes this result; that of the first group keeps the rounding errors
        encode_alike(g, encoded, residual if own_group(inter) == 0 else NULL, inter.size if c.op == SR_AVG else 1,
                     <float *> result, length)
    return encoded


# Return the place where the result of another host's part is received: its final place, or room if it is encoded.
cdef inline unsigned char *receive_place_of(Group *g, Call *c, int number, int host, size_t begin) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if are_results_encoded(inter, c):
        return arrived_from(inter, number, host) + begin * c.itemsize
    return result_of(g, c, number) + begin * c.itemsize


# Decode the results received from other hosts into their final place.
cdef void read_results(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef size_t own = own_slice(inter, fragment.count)
    cdef size_t at = own, end = end_of_own_slice(inter, fragment.count)
    cdef size_t next, begin = 0, length
    cdef int host
    while at < end:
        next = next_border(inter, at, fragment.count)
        for host in range(own_group(inter), own_group(inter) + inter.per_group):
            length = folded_part(inter, host, at, next, &begin)
            if host != inter.host and length > 0:
                g.kernels.decode[inter.format](<float *> (result_of(g, c, number) + (begin - own) * c.itemsize),
                                               receive_place_of(g, c, number, host, begin - own), length)
        at = next


cdef int gather_result(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if fragment_at(inter, number).receiving > 0:
        return blocked_on_conns(g, c)
    if inter.in_parts and are_results_encoded(inter, c) and is_wanted_on(inter, c, inter.host):
        read_results(g, c, number)
    return gather_fragment(g, c, number)


# Distribute the slices of a fragment, which are in place, to the ranks of this host that need them. Return as
# reduce_locally does.
cdef int gather_fragment(Group *g, Call *c, int number) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef unsigned char *out = c.out + fragment.begin * c.itemsize
    cdef Call *local_call
    if not is_wanted_on(inter, c, inter.host):
        return DONE
    if g.size == 1:
        if c.kind == REDUCE:
            g.kernels.copy(out, result_of(g, c, number), fragment.count * c.itemsize, 0)
        return DONE
    local_call = new_local(g, c, GATHER if c.kind == REDUCE else ALL_GATHER,
                           slice_at(inter, inter.host, 1, fragment.count))
    local_call.x = result_of(g, c, number)
    local_call.out = out
    local_call.root = inter.local_of[c.root]
    if c.kind == REDUCE or not is_even(g, fragment.count):
        fill_slices(g, c, number, local_call)
    begin_local(g, c)
    return PROGRESSED


cdef void fill_slices(Group *g, Call *c, int number, Call *local_call) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = fragment_at(inter, number)
    cdef bint takes_them = c.kind != REDUCE or inter.rank == c.root
    cdef size_t begin, end
    cdef size_t own_count = end_of_own_slice(inter, fragment.count) - own_slice(inter, fragment.count)
    cdef int local
    for local in range(g.size):
        begin = slice_at(inter, inter.host, local, fragment.count)
        end = slice_at(inter, inter.host, local + 1, fragment.count)
        inter.taken[local].data = local_call.out + begin * c.itemsize
        inter.taken[local].nbytes = (end - begin) * c.itemsize if takes_them else 0
        inter.given[local].data = <unsigned char *> local_call.x
        inter.given[local].nbytes = own_count * c.itemsize
    local_call.given, local_call.taken = inter.given, inter.taken


# ---- reduce_scatter ------------------------------------------------------------------------------------------------

# On each host one rank reduces a piece. The rank that gets the piece folds the partial results of all hosts.
cdef enum:
    PIECES_ASKING, PIECES_REDUCING, PIECES_FOLDING   # stages of a round of reduce_scatter


# Return the rank of a host that reduces the piece of `rank` there.
cdef inline int reducer_on(InterNode *inter, int host, int rank) noexcept nogil:
    return rank_at(inter, host, inter.local_of[rank] % inter.nlocal[host])


# Return the number of elements of this round's part of every piece.
cdef inline size_t part_count(InterNode *inter, Call *c) noexcept nogil:
    return min(c.count - <size_t> inter.round * inter.fragment_count, inter.fragment_count)


cdef void start_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    choose_partials(inter, c, SR_WIRE_NATIVE)
    inter.fragment_count = inter.pair_nbytes // inter.itemsize


# A round handles one part of all pieces: it posts the receives of partial results, reduces the pieces of all ranks on
# this host, and folds the partial results of this rank's piece.
cdef int stage_reduce_scatter(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef Fragment *fragment = &inter.fragment[0]
    cdef unsigned char *out = c.out + <size_t> inter.round * inter.fragment_count * c.itemsize
    if inter.stage == PIECES_ASKING:
        await_partials(g, c)
        inter.batch = 0
        inter.stage = PIECES_REDUCING
    if inter.stage == PIECES_REDUCING:
        if reduce_batch(g, c):
            return PROGRESSED
        inter.stage = PIECES_FOLDING
    if fragment.receiving > 0 or fragment.sending > 0:
        return blocked_on_conns(g, c)
    fold_hosts(g, c, place_for_own(g, c), inter.room, inter.pair_nbytes, place_for_own(g, c), out, part_count(inter, c))
    inter.round += 1
    inter.stage = PIECES_ASKING
    if <size_t> inter.round * inter.fragment_count < c.count:
        return PROGRESSED
    count_path(g, ACROSS)
    return DONE


cdef void await_partials(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef unsigned char *arrived = inter.room
    cdef int host
    for host in range(inter.nhosts):
        if host != inter.host:
            receive_partial(g, c, reducer_on(inter, host, inter.rank), arrived, part_count(inter, c),
                            &inter.fragment[0].receiving)
            arrived += inter.pair_nbytes


# Return the place of this host's partial result of this rank's piece: the result's place, or scratch if dtypes differ.
cdef inline unsigned char *place_for_own(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    if inter.dtype == c.dtype:
        return c.out + <size_t> inter.round * inter.fragment_count * c.itemsize
    return inter.scratch


# Return the place of the partial result that this rank reduces in a batch, for another host.
cdef inline unsigned char *place_for_batch(InterNode *inter, int batch) noexcept nogil:
    return inter.room + <size_t> (inter.nhosts - 1 + batch) * inter.pair_nbytes


# Send the partial result of the previous batch to its host, and begin the next batch: the pieces of as many ranks of a
# host as this host has, where each local rank reduces one piece. Return False if no batch is left.
cdef bint reduce_batch(Group *g, Call *c) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int first = 0
    cdef int host = host_of_batch(g, inter, inter.batch, &first)
    if inter.batch > 0:
        send_batch(g, c, inter.batch - 1)
    if host == inter.nhosts:
        return False
    begin_reduction_batch(g, c, host, first,
                          place_for_own(g, c) if host == inter.host else place_for_batch(inter, inter.batch))
    inter.batch += 1
    return True


cdef void send_batch(Group *g, Call *c, int batch) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef int first = 0
    cdef int host = host_of_batch(g, inter, batch, &first)
    first += inter.local_of[inter.rank]
    if host != inter.host and first < inter.nlocal[host]:
        send_partial(g, c, rank_at(inter, host, first), place_for_batch(inter, batch), part_count(inter, c), NULL,
                     NULL, &inter.fragment[0].sending)


cdef void begin_reduction_batch(Group *g, Call *c, int host, int first, unsigned char *partial) noexcept nogil:
    cdef InterNode *inter = inter_of(g)
    cdef size_t count = part_count(inter, c)
    cdef const unsigned char *x = c.x + <size_t> inter.round * inter.fragment_count * c.itemsize
    cdef unsigned char *wide = inter.scratch + inter.pair_nbytes   # after the partial result of this rank's piece
    cdef Call *local_call = new_reduction(g, c, REDUCE_SCATTER, count)
    cdef int local
    for local in range(g.size):
        inter.given[local].nbytes = 0
        if first + local < inter.nlocal[host]:
            inter.given[local].data = <unsigned char *> summands(
                g, c, x + rank_at(inter, host, first + local) * c.nbytes, count, wide)
            inter.given[local].nbytes = local_call.nbytes
            wide += inter.pair_nbytes
    if g.size == 1:
        local_call.x = inter.given[0].data
    else:
        local_call.given = inter.given
    local_call.out = partial
    begin_local(g, c)
