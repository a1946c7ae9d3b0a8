# Recursive halving (reduce-scatter), then recursive doubling (all-gather). They run only if they are named; schedule.h
# has the schedule. Several ranks can read a slot, so the ranks beyond a power of two cost no extra step: they stage
# their whole chunk in the first step, for both halves, and read all results from the ranks that their core rank reads
# from.
#
# A message is cut into chunks, and each chunk goes through all steps. Two chunks take turns, so that a rank works on
# one while it waits for the other. A transfer is one step of one chunk; with an odd number of chunks some are empty.

from libc.stdint cimport uint64_t

from .._core.group cimport BY_HALVING_DOUBLING, DONE, Call, Group, count_path
from .._core.schedule cimport sr_halving_keeps, sr_halving_peer, sr_halving_steps, sr_slice_begin
from .._core.staging cimport begin_named, fold_hop, slot
from .._core.transfers cimport Schedule, step_transfers


# One step of a chunk. Step s of `steps` reduces or gathers the part that is left after s halvings.
cdef struct Step:
    int steps, step
    bint reduces, is_first, is_last   # is_first: of the reducing steps; is_last: of those, or the first that gathers
    size_t begin, count               # the chunk's begin in bytes of the message, and its elements


cdef inline size_t nchunks(Call *c) noexcept nogil:
    return (c.nbytes + c.chunk_nbytes - 1) // c.chunk_nbytes


cdef inline size_t abreast(Call *c) noexcept nogil:
    return min(nchunks(c), <size_t> 2)


cdef inline Step step_of(Group *g, Call *c, size_t transfer) noexcept nogil:
    cdef Step s
    cdef size_t per_round, chunk   # transfers of the chunks that take turns, from their first step to the last
    s.steps = sr_halving_steps(g.size)
    per_round = 2 * <size_t> s.steps * abreast(c)
    chunk = transfer // per_round * abreast(c) + transfer % abreast(c)
    s.step = <int> (transfer % per_round // abreast(c)) + 1
    s.reduces = s.step <= s.steps
    if not s.reduces:
        s.step = 2 * s.steps + 1 - s.step
    s.is_first = s.reduces and s.step == 1
    s.is_last = s.step == s.steps
    s.begin = min(chunk * c.chunk_nbytes, c.nbytes)
    s.count = min(c.nbytes - s.begin, c.chunk_nbytes) // c.itemsize
    return s


# The part of the chunk that is left after a step: of its 2^steps slices those from `first` on. Return its begin.
cdef inline size_t part_begin(Call *c, const Step *s, int first, size_t *nbytes) noexcept nogil:
    cdef size_t begin = sr_slice_begin(s.count, 1 << s.steps, first)
    nbytes[0] = (sr_slice_begin(s.count, 1 << s.steps, first + (1 << (s.steps - s.step))) - begin) * c.itemsize
    return s.begin + begin * c.itemsize


cdef inline bint is_core(const Step *s, int rank) noexcept nogil:
    return rank < 1 << s.steps


cdef inline size_t slot_of_step(Group *g, Call *c, size_t transfer) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef size_t nbytes = 0
    if s.is_first and not is_core(&s, g.size - 1):
        return s.count * c.itemsize
    part_begin(c, &s, 0, &nbytes)   # the first slices are the largest
    return nbytes


cdef inline size_t send_half(Group *g, Call *c, size_t transfer, unsigned char *to) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef size_t nbytes = 0, begin
    cdef int owner
    if is_core(&s, g.rank):
        owner = sr_halving_peer(g.rank, s.steps, s.step) if s.reduces else g.rank
        begin = part_begin(c, &s, sr_halving_keeps(owner, s.steps, s.step), &nbytes)
    else:
        begin, nbytes = s.begin, (s.count * c.itemsize if s.is_first else 0)
    if nbytes > 0:
        g.kernels.copy(to, (c.x if s.is_first else c.out) + begin, nbytes, 0)
    return nbytes


# The index-th rank from which this rank takes data in a transfer; -1: there are no more. In the first step a core rank
# takes data from every rank that has the same remainder modulo `half`, later from its peer alone. The other ranks do
# not reduce; they take what their core rank reduced, and then what it takes.
cdef inline int partner(Group *g, Call *c, size_t transfer, int index) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    cdef int core = g.rank & ((1 << s.steps) - 1)
    cdef int half = 1 << (s.steps - 1)
    cdef int source
    if s.is_first and is_core(&s, g.rank):
        source = (g.rank & (half - 1)) + index * half
        source += half if source >= g.rank else 0
        return source if source < g.size else -1
    if not is_core(&s, g.rank) and (s.reduces or (s.is_last and index == 1)):
        return -1 if s.reduces else core
    return sr_halving_peer(core, s.steps, s.step) if index == 0 else -1


cdef inline void receive_half(Group *g, Call *c, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef Step s = step_of(g, c, transfer)
    if not s.reduces:
        take_results(g, c, &s, transfer, slot_at)
    elif is_core(&s, g.rank):
        fold_half(g, c, &s, transfer, slot_at)


# Fold the sources and this rank's own part in rank order.
cdef inline void fold_half(Group *g, Call *c, const Step *s, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef size_t nbytes = 0
    cdef size_t begin = part_begin(c, s, sr_halving_keeps(g.rank, s.steps, s.step), &nbytes)
    cdef const unsigned char *own = (c.x if s.is_first else c.out) + begin
    cdef bint own_is_in = False
    cdef int nsources = 0
    cdef int source = partner(g, c, transfer, 0)
    while source >= 0:
        if not own_is_in and source > g.rank:
            g.source[nsources] = own
            nsources += 1
            own_is_in = True
        g.source[nsources] = slot(g, source, slot_at) + (0 if is_core(s, source) else begin - s.begin)
        nsources += 1
        source = partner(g, c, transfer, nsources - own_is_in)
    if not own_is_in:
        g.source[nsources] = own
        nsources += 1
    g.target[0] = c.out + begin
    fold_hop(g, c, nsources, 1, 0, nbytes // c.itemsize, s.is_last)


cdef inline void take_results(Group *g, Call *c, const Step *s, size_t transfer, uint64_t slot_at) noexcept nogil:
    cdef size_t nbytes = 0, begin
    cdef int index = 0
    cdef int source = partner(g, c, transfer, 0)
    while source >= 0:
        begin = part_begin(c, s, sr_halving_keeps(source, s.steps, s.step), &nbytes)
        if nbytes > 0:
            g.kernels.copy(c.out + begin, slot(g, source, slot_at), nbytes, 0)
        index += 1
        source = partner(g, c, transfer, index)


cdef inline Schedule schedule_of_halving() noexcept nogil:
    cdef Schedule schedule
    schedule.slot_nbytes = slot_of_step
    schedule.send = send_half
    schedule.source = partner
    schedule.receive = receive_half
    return schedule


cdef inline void enter_halving(Group *g, Call *c) noexcept nogil:
    cdef size_t slices_nbytes = c.itemsize << sr_halving_steps(g.size)
    begin_named(g, c, 4)
    if c.chunk_nbytes >= slices_nbytes:   # so that the slices of a chunk are equal wherever those of the message are
        c.chunk_nbytes -= c.chunk_nbytes % slices_nbytes


cdef inline int step_halving(Group *g, Call *c) noexcept nogil:
    cdef uint64_t steps = 2 * <uint64_t> sr_halving_steps(g.size)
    cdef size_t rounds = (nchunks(c) + abreast(c) - 1) // abreast(c)
    cdef Schedule schedule = schedule_of_halving()
    cdef int status = step_transfers(g, c, &schedule, rounds * steps * abreast(c), abreast(c))
    if status == DONE:
        g.stats.steps += steps
        count_path(g, BY_HALVING_DOUBLING)
    return status
