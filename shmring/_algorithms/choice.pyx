# The choice of an algorithm for every call among the ranks of one host, and calls that need none: those of one rank,
# refused ones and empty ones. The algorithms are in staged (tiny and small messages, data movement), in_place (arrays
# are read where they are), direct (large reductions), chain (more ranks than CPUs), ring, halving and trees (only if
# they are named).
#
# Every function runs without the GIL, returns at once, and records in call.awaited what the call waits for.

from libc.string cimport memmove

from .._core.group cimport (
    AUTO, BIDIRECTIONAL_RING, DONE, DOUBLE_TREE, EXSCAN, HALVING_DOUBLING, INVALID, MOST_AHEAD, REDUCE, RING, TREE,
    Call, Group, begin_call, fingerprint_of, is_folded, is_sliced, keeps_single, publish_line, verify,
)
from .._core.kernels cimport sr_dtype_is_widened
from .._core.segment cimport SR_PAYLOAD_NBYTES
from .chain cimport enter_chain, may_be_chain, step_chain
from .direct cimport enter_direct, step_direct
from .halving cimport enter_halving, step_halving
from .ring cimport enter_ring, step_ring
from .staged cimport enter_staged, enter_tiny, step_staged, step_tiny
from .trees cimport enter_double_tree, enter_tree, step_double_tree, step_tree


# ---- refused and empty calls ---------------------------------------------------------------------------------

# Enter a call whose arguments this rank refuses. Its record has the call, its line says that the call is invalid. The
# lines of the next call show whether all ranks have refused it.
cdef void enter_refused(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    g.recorded.invalid = True
    c.kind = INVALID
    c.fingerprint = fingerprint_of(c)
    publish_line(g, c)


cdef int step_refused(Group *g, Call *c) noexcept nogil:
    return verify(g, c, c.seq - MOST_AHEAD)


cdef void enter_nothing(Group *g, Call *c) noexcept nogil:
    pass


cdef int step_nothing(Group *g, Call *c) noexcept nogil:
    return DONE


# ---- choice --------------------------------------------------------------------------------------------------

cdef void enter_alone(Group *g, Call *c) noexcept nogil:
    begin_call(g, c)
    g.verified = c.seq


cdef int step_alone(Group *g, Call *c) noexcept nogil:
    if c.nbytes == 0 or c.kind == EXSCAN:
        return DONE
    if is_folded(c) and not keeps_single(c):
        g.source[0] = c.x
        g.target[0] = c.out
        g.kernels.fold[c.dtype][c.op](g.target, 1, 0, g.source, 1, c.count, 1)
    elif c.out != c.x:
        memmove(c.out, c.x, c.nbytes)
    return DONE


cdef enum:
    MOST_READ_NBYTES = 512 << 10   # by the root of a reduce on shared CPUs; measured with 4 and 8 ranks on 2 CPUs


# The most bytes of other ranks' arrays that a rank reads in an all_reduce or reduce in which it folds whole arrays.
# - In a reduce of two ranks the root folds a chunk while the other rank stages the next, so both work. With slices
#   16 KiB to 64 MiB take up to 1.4 times as long (bench/peers/peers.py --call reduce).
# - If ranks share CPUs, slices of few data save no time either.
# - Folds of 16- and 8-bit floats take longer than copies, so ranks share them.
cdef inline size_t most_read(const Group *g, const Call *c) noexcept nogil:
    if c.kind == REDUCE and g.size == 2 and not sr_dtype_is_widened(c.dtype):
        return <size_t> -1
    if c.kind == REDUCE and g.oversubscribed and not sr_dtype_is_widened(c.dtype):
        return MOST_READ_NBYTES
    if c.kind == REDUCE or g.oversubscribed:
        return g.tuning.small_nbytes
    return g.tuning.small_all_reduce_nbytes


# Choose the algorithm only by the call and by values that are the same on all ranks, so that all ranks choose alike.
cdef void choose_local_algorithm(Group *g, Call *c) noexcept nogil:
    if g.size == 1:
        c.enter, c.step = enter_alone, step_alone
    elif c.given != NULL:
        c.enter, c.step = enter_staged, step_staged
    elif c.nbytes == 0:
        c.enter, c.step = enter_tiny, step_tiny
    elif c.algorithm == RING or c.algorithm == BIDIRECTIONAL_RING:
        c.enter, c.step = enter_ring, step_ring
    elif c.algorithm == HALVING_DOUBLING:
        c.enter, c.step = enter_halving, step_halving
    elif c.algorithm == TREE:
        c.enter, c.step = enter_tree, step_tree
    elif c.algorithm == DOUBLE_TREE:
        c.enter, c.step = enter_double_tree, step_double_tree
    elif c.algorithm != AUTO:
        c.enter, c.step = enter_direct, step_direct
    elif c.x_nbytes <= SR_PAYLOAD_NBYTES:
        c.enter, c.step = enter_tiny, step_tiny
    elif may_be_chain(g, c):
        c.enter, c.step = enter_chain, step_chain
    elif is_sliced(c) and c.nbytes * (g.size - 1) > most_read(g, c):
        c.enter, c.step = enter_direct, step_direct
    else:
        c.enter, c.step = enter_staged, step_staged
