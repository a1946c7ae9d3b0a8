# Collectives whose pieces differ in length. In a first call of the engine, each rank announces the number of rows that
# it gives to each rank, and their address or, for a few bytes, their contents. If that was not everything, the pieces
# move in a second call, by the algorithms of the collectives with equal pieces, with a length and a place for each
# piece.

from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove, memset

from .._algorithms.choice cimport enter_nothing, step_nothing
from .._arrays.operands cimport Operand, dtype_name, fill_items_of, has_items_of, release, storage_of, take
from .._core cimport numpy_api as cnp
from .._core.group cimport (
    ALL_GATHER, ALL_GATHER_V, ALL_TO_ALL, ALL_TO_ALL_V, GATHER, GATHER_V, MISMATCHED, SCATTER, SCATTER_V, Call, Group,
    Piece, bytes_overlap, fingerprint_of, goes_from_to, is_joined, is_split, shared_address,
)
from .._core.segment cimport SR_PRIVATE, sr_flag_set
from .._core.single_copy cimport can_be_read, least_single_copy, offers_single_copy
from .._core.timeouts cimport timeout_ns_of
from .._engine.engine cimport IN_ANY, Engine
from .._engine.queue cimport TO_BE_FILLED
from .._internode.context cimport remote
from .arguments cimport signature_of
from .collectives cimport Collectives
from .work cimport Work

import numpy as np

from .._arrays import shapes

cnp.import_array()


cdef enum:
    ANNOUNCED_NBYTES = 40       # pieces up to this size are sent with their count; both fill the payload of a call line
    EVERYWHERE_IN_PLACE = 1     # as Call.x_block: every piece is read at its announced address; not the id of a block


cdef struct _Place:
    uint64_t block              # 0: to be staged; SR_PRIVATE: as in sr_descriptor
    uint64_t offset             # in the giver's part of a shared block; for SR_PRIVATE its address in the giver
    uint64_t zero_copy_nbytes   # the giver prefers not to stage if the largest piece has at least this size


cdef union _What:
    _Place place
    unsigned char[ANNOUNCED_NBYTES] data   # the whole piece if it fits


# Announcement of one piece, before it is moved.
cdef struct Announced:
    uint64_t nrows
    _What what


cdef size_t MOST_NBYTES = <size_t> 1 << 48   # of one piece: keeps sums of announced sizes within 64 bits


# ---- the arrays of one call ----------------------------------------------------------------------------------

cdef class _Parts:
    """The pieces that this rank gives to and takes from each of `size` ranks, and all ranks' announcements of them."""

    cdef int size, npieces, nheld
    cdef Operand *held
    cdef Piece *given
    cdef Piece *taken
    cdef Announced *own
    cdef Announced *announced
    cdef size_t row_nbytes
    cdef cnp.ndarray like       # has the dtype and shape[1:] of all arrays of the call
    cdef list kept

    def __cinit__(self, int size, int npieces):
        self.size = size
        self.npieces = npieces     # number of pieces that each rank announces: one for each taker, or one for all
        self.kept = []
        self.held = <Operand *> calloc(2 * size + 1, sizeof(Operand))
        self.given = <Piece *> calloc(2 * size, sizeof(Piece))
        self.own = <Announced *> calloc((1 + size) * npieces, sizeof(Announced))
        if self.held == NULL or self.given == NULL or self.own == NULL:
            raise MemoryError()
        self.taken = self.given + size
        self.announced = self.own + npieces

    def __dealloc__(self):
        cdef int i
        for i in range(self.nheld):
            release(&self.held[i])
        free(self.held)
        free(self.given)
        free(self.own)

    # Take an array. index: its number in the list of arrays; negative if it is not in a list.
    cdef Operand *hold(self, object x, bint writable, str what, int index) except NULL:
        cdef Operand *operand = &self.held[self.nheld]
        try:
            kept = take(operand, x, writable, what, True)
        except Exception:
            kept = take(operand, x, writable, name_in(what, index), True)   # take it again to raise its error
        self.nheld += 1
        self.kept.append(x if kept is None else kept)
        if operand.fortran:
            what = name_in(what, index)
            raise ValueError(f"{what} is in Fortran order, whose memory is not split along the first dimension; "
                             f"pass np.ascontiguousarray({what})")
        return operand

    # Return a new array of nrows rows, of the call's dtype and shape[1:].
    cdef object room(self, uint64_t nrows):
        cdef cnp.npy_intp[64] lengths   # NPY_MAXDIMS
        cdef cnp.ndarray like = self.like
        cdef cnp.dtype dtype = like.dtype
        if cnp.PyArray_ITEMSIZE(like) == 0:
            return shapes.empty((nrows, *np.shape(like)[1:]), dtype)
        memcpy(lengths, cnp.PyArray_DIMS(like), cnp.PyArray_NDIM(like) * sizeof(cnp.npy_intp))
        lengths[0] = nrows
        Py_INCREF(dtype)
        return cnp.PyArray_Empty(cnp.PyArray_NDIM(like), lengths, dtype, False)

    cdef Announced *announced_of(self, int giver, int taker) noexcept:
        return &self.announced[giver * self.npieces + (taker if self.npieces > 1 else 0)]


# ---- the collectives -----------------------------------------------------------------------------------------

cdef class VectorCollectives(Collectives):
    """The collectives whose pieces may differ in the length of dimension 0."""

    def all_gather_v(self, x, *, out=None, async_op=False, timeout=None):
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x.

        Parameters
        ----------
        x : array
            In C order with at least one dimension, of the same dtype and shape[1:] on every rank. Its length may differ
            between ranks, and may be 0. If x comes from `empty`, `zeros`, `full`, `copy_of` or `adopt` on all ranks,
            the data are copied once, without staging.
        out : list of arrays, optional
            `size` arrays of exactly the sizes of the result, disjoint from each other and from x; only out[rank] may be
            x.
        async_op, timeout
            See `Comm`. The timeout is for each of the call's two steps, which exchange lengths and data.

        Returns
        -------
        list of arrays, or Work
            `out` if given, else new arrays.

        Raises
        ------
        TypeError, ValueError
            For wrong arrays.
        Error
            As every collective (see `Comm`).

        Examples
        --------
        >>> comm.all_gather_v(np.arange(comm.rank + 1))
        [array([0]), array([0, 1])]
        """
        return run_vector(self, ALL_GATHER_V, x, 0, out, None, async_op, timeout)

    def gather_v(self, x, root=0, *, out=None, async_op=False, timeout=None):
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks.

        Parameters
        ----------
        x : array
            As in `all_gather_v`.
        root : int
            The rank that gets the result.
        out : list of arrays, optional
            As in `all_gather_v` on the root. It is ignored on other ranks.
        async_op, timeout
            As in `all_gather_v`.

        Returns
        -------
        list of arrays, None or Work
            On the root, `out` if given, else new arrays.

        Raises
        ------
        TypeError, ValueError, Error
            As in `all_gather_v`.

        Examples
        --------
        >>> comm.gather_v(np.arange(comm.rank + 1))  # None on rank 1
        [array([0]), array([0, 1])]
        """
        return run_vector(self, GATHER_V, x, root, out, None, async_op, timeout)

    def scatter_v(self, xs=None, root=0, *, out=None, like=None, async_op=False, timeout=None):
        """Return the root's xs[rank].

        Parameters
        ----------
        xs : list of arrays or None
            On the root, `size` arrays in C order, of one dtype and shape[1:] and of any lengths. Other ranks pass None,
            and either `out` or `like`.
        root : int
            The rank that sends.
        out : array, optional
            An array of exactly the size of the result. On the root it may be xs[root], else it is disjoint from all of
            xs.
        like : array, optional
            An array of the same dtype and shape[1:] and of any length. Its values are not read.
        async_op, timeout
            As in `all_gather_v`.

        Returns
        -------
        array or Work
            `out` if given, else a new array.

        Raises
        ------
        TypeError, ValueError, Error
            As in `all_gather_v`.

        Examples
        --------
        >>> xs = [np.arange(3), np.arange(1)] if comm.rank == 0 else None
        >>> comm.scatter_v(xs, like=np.empty(0, int))  # rank 1 gets [0]
        array([0, 1, 2])
        """
        return run_vector(self, SCATTER_V, xs, root, out, like, async_op, timeout)

    def all_to_all_v(self, xs, *, out=None, async_op=False, timeout=None):
        """Send xs[j] to rank j, and return a list whose array i comes from rank i.

        Parameters
        ----------
        xs : list of arrays
            `size` arrays in C order, of any lengths; all arrays of all ranks have one dtype and shape[1:].
        out : list of arrays, optional
            `size` arrays of exactly the sizes of the result. Each is disjoint from all other arrays of the call; only
            out[i] may be xs[i].
        async_op, timeout
            As in `all_gather_v`.

        Returns
        -------
        list of arrays, or Work
            `out` if given, else new arrays.

        Raises
        ------
        TypeError, ValueError, Error
            As in `all_gather_v`.

        Examples
        --------
        >>> comm.all_to_all_v([np.full(1, comm.rank), np.full(2, comm.rank)])  # rank 1 gets two arrays of 2
        [array([0]), array([1])]
        """
        return run_vector(self, ALL_TO_ALL_V, xs, 0, out, None, async_op, timeout)


# ---- from arguments to the two calls ---------------------------------------------------------------------------

cdef object run_vector(Collectives comm, int kind, object x, object root, object out, object like, object async_op,
                       object timeout):
    cdef Call c, counts
    cdef _Parts parts
    cdef int outer
    memset(&c, 0, sizeof(c))
    c.named = kind
    try:
        c.kind = equal_kind(kind)
        c.timeout_ns = timeout_ns_of(comm.default_timeout_ns, timeout)
        c.root = comm.root_number(root)
        parts = _Parts(comm.nranks, comm.nranks if is_split(&c) else 1)
        fill_given(comm, &c, parts, x, out if has_result(&c, comm.own_rank) else None, like)
        if async_op:
            parts.kept.append(storage_of(list(parts.kept)))
    except Exception:
        comm.engine.refuse(kind)
        raise
    fill_counts(comm, &counts, &c, parts)
    outer = comm.engine.begin_compound(IN_ANY)
    try:
        if async_op:
            result = issue_vector(comm, &counts, &c, parts, out)
        else:
            result = run_both(comm, kind, &counts, &c, parts, out)
    except BaseException as error:
        comm.engine.end_compound(outer, error)
        raise
    comm.engine.end_compound(outer, None)
    return result


cdef object run_both(Collectives comm, int kind, Call *counts, Call *c, _Parts parts, object out):
    comm.run_call(counts)
    check_counts(comm, c, parts)
    try:
        result = fill_taken(comm, c, parts, out)
    except Exception:
        comm.engine.refuse(kind)
        raise
    if c.nbytes <= ANNOUNCED_NBYTES:
        take_announced(c, parts, comm.own_rank)
    else:
        if not comm.staging_ready:
            comm.allocate_staging()
        comm.run_call(c)
    return result


# Issue both calls. The second call is filled when the first call is finished.
cdef object issue_vector(Collectives comm, Call *counts, Call *c, _Parts parts, object out):
    cdef Work first = comm.new_work()
    cdef _VectorWork second = _VectorWork.__new__(_VectorWork)
    if not comm.staging_ready:
        comm.allocate_staging()
    first.task.call = counts[0]
    first.kept = parts
    second.communicator = second.comm = comm
    second.engine = comm.engine
    second.task.call = c[0]
    sr_flag_set(&second.task.filling, TO_BE_FILLED)
    second.parts = parts
    second.out = out
    comm.engine.issue(first)
    comm.engine.issue(second)
    return second


# Fill in everything that does not depend on the other ranks' counts.
cdef int fill_given(Collectives comm, Call *c, _Parts parts, object x, object out, object like) except -1:
    cdef int taker = 0, size = parts.size
    if not is_split(c):
        give(c, parts, x, "x", -1, 0, size)
    elif c.kind == ALL_TO_ALL or comm.own_rank == c.root:
        x = shapes.list_for(x, size, "xs")
        parts.kept.append(x)   # keep the array: the caller's list may change
        for array in x:
            give(c, parts, array, "xs", taker, taker, taker + 1)
            taker += 1
    elif out is None and like is None:
        raise TypeError("a rank that is not the root must pass None and either out= or like=, "
                        "an array of the dtype and shape[1:] that it gets")
    else:
        what = "out" if like is None else "like"
        parts.like = as_array(out if like is None else like, what, -1)
        set_items_like(c, parts, parts.hold(parts.room(0), False, what, -1))
    if out is not None:
        fill_outs(c, parts, out)
    announce(comm, c, parts, out is not None)
    c.given, c.taken = parts.given, parts.taken
    c.fingerprint = fingerprint_of(c) ^ <uint64_t> signature_of(parts.like) << 32
    return 0


# Fill in the array that goes to the ranks from `first` to before `last`.
cdef int give(Call *c, _Parts parts, object x, str what, int index, int first, int last) except -1:
    cdef Operand *operand = parts.hold(x, False, what, index)
    cdef cnp.ndarray array = as_array(x, what, index)
    cdef int taker
    if parts.like is None:
        parts.like = array
        set_items_like(c, parts, operand)
    elif not has_items_of(c, operand):
        raise ValueError(f"{name_in(what, index)} is {dtype_name(operand)}, {what}[0] is {parts.like.dtype}; all "
                         "must have one dtype")
    elif not have_like_rows(array, parts.like):
        raise ValueError(f"{name_in(what, index)} has shape {np.shape(array)}, {what}[0] has "
                         f"{np.shape(parts.like)}; only the first dimension may differ")
    parts.own[first].nrows = cnp.PyArray_DIM(array, 0)
    for taker in range(first, last):
        parts.given[taker].data = operand.data
        parts.given[taker].nbytes = operand.count * operand.itemsize
    return 0


# Set the dtype and shape[1:] that all arrays of the call share: those of the operand and of parts.like.
cdef int set_items_like(Call *c, _Parts parts, Operand *operand) except -1:
    cdef int axis
    fill_items_of(c, operand)
    parts.row_nbytes = cnp.PyArray_ITEMSIZE(parts.like)
    for axis in range(1, cnp.PyArray_NDIM(parts.like)):
        parts.row_nbytes *= cnp.PyArray_DIM(parts.like, axis)
    c.count = parts.row_nbytes // c.itemsize
    return 0


cdef int fill_outs(Call *c, _Parts parts, object out) except -1:
    cdef Operand *operand
    cdef int giver = c.root if c.kind == SCATTER else 0
    arrays = [out] if c.kind == SCATTER else shapes.list_for(out, parts.size, "out")
    parts.kept.append(arrays)
    for array in arrays:
        index = -1 if c.kind == SCATTER else giver
        operand = parts.hold(array, True, "out", index)
        if not has_items_of(c, operand):
            raise ValueError(f"{name_in('out', index)} is {dtype_name(operand)}, but the arrays of the call "
                             f"are {parts.like.dtype}")
        parts.taken[giver].data = operand.data
        parts.taken[giver].nbytes = operand.count * operand.itemsize
        giver += 1
    return 0


# Announce the contents of the pieces or, if they are too long, their addresses.
cdef int announce(Collectives comm, Call *c, _Parts parts, bint has_out) except -1:
    cdef Group *g = &comm.engine.g
    cdef bint in_place = has_out and overwrites_given(c, parts, comm.own_rank)
    cdef Announced *announced
    cdef Piece *piece
    cdef int i
    for i in range(parts.npieces):
        announced = &parts.own[i]
        piece = &parts.given[i]
        if piece.nbytes == 0:
            continue
        if piece.nbytes <= ANNOUNCED_NBYTES:
            memcpy(announced.what.data, piece.data, piece.nbytes)
        elif not in_place and g.inter == NULL:
            announce_place(comm.engine, c, &announced.what.place, piece)
    return 0


# Fill the first call, which exchanges the announcements.
cdef int fill_counts(Collectives comm, Call *counts, Call *c, _Parts parts) except -1:
    counts[0] = c[0]
    counts.kind = ALL_GATHER
    counts.given = counts.taken = NULL
    counts.nbytes = counts.x_nbytes = parts.npieces * sizeof(Announced)
    counts.out_nbytes = counts.nbytes * parts.size
    counts.x = <unsigned char *> parts.own
    counts.out = <unsigned char *> parts.announced
    comm.engine.g.choose_algorithm(&comm.engine.g, counts)
    return 0


cdef int check_counts(Collectives comm, Call *c, _Parts parts) except -1:
    if read_counts(c, parts):
        choose_place(c, parts)
        if c.x_block == 0 or find_places(comm, c, parts):
            return 0
    c.mismatch_seq = comm.engine.g.seq
    if comm.engine.g.inter != NULL:
        c.awaited.rank = remote(&comm.engine.g, c.awaited.rank)
    comm.engine.raise_for_status(c, MISMATCHED)
    return 0


# Set c.nbytes to the size of the largest piece to move, which is the same on every rank. Return False if rank
# c.awaited.rank announced invalid data.
cdef bint read_counts(Call *c, _Parts parts) noexcept:
    cdef Announced *announced
    cdef int giver, taker
    cdef size_t most = MOST_NBYTES // max(parts.row_nbytes, <size_t> 1)
    c.nbytes = 0
    for giver in range(parts.size):
        c.awaited.rank = giver
        for taker in range(parts.size):
            announced = parts.announced_of(giver, taker)
            if announced.nrows > most:
                return False
            if goes_from_to(c, giver, taker) and giver != taker:
                c.nbytes = max(c.nbytes, announced.nrows * parts.row_nbytes)
    return True


# Choose to stage nothing if every piece was announced with its contents, or can be read in place and is large
# enough for the second synchronisation that this takes.
cdef int choose_place(Call *c, _Parts parts) noexcept:
    cdef Announced *announced
    cdef _Place *place
    cdef int giver, taker
    c.x_block = EVERYWHERE_IN_PLACE
    for giver in range(parts.size):
        for taker in range(parts.size):
            announced = parts.announced_of(giver, taker)
            if (goes_from_to(c, giver, taker) and giver != taker
                    and announced.nrows * parts.row_nbytes > ANNOUNCED_NBYTES):
                place = &announced.what.place
                if place.block == 0 or c.nbytes < place.zero_copy_nbytes:
                    c.x_block = 0
                    return 0
                if place.block == SR_PRIVATE:
                    c.x_block = SR_PRIVATE
    return 0


# Set the addresses to read from. Return False if rank c.awaited.rank announced invalid data.
cdef bint find_places(Collectives comm, Call *c, _Parts parts) noexcept:
    cdef Announced *announced
    cdef _Place *place
    cdef Piece *piece
    cdef size_t nbytes
    cdef int giver, rank = comm.own_rank
    for giver in range(parts.size):
        announced = parts.announced_of(giver, rank)
        piece = &parts.taken[giver]
        place = &announced.what.place
        nbytes = announced.nrows * parts.row_nbytes
        if nbytes <= ANNOUNCED_NBYTES:
            piece.there = announced.what.data
        elif goes_from_to(c, giver, rank) and giver != rank:
            c.awaited.rank = giver
            piece.there_is_private = place.block == SR_PRIVATE
            if piece.there_is_private:
                piece.there = <unsigned char *> <uintptr_t> place.offset
            else:
                piece.there = shared_address(&comm.engine.g, place.block, giver, place.offset, nbytes)
            if piece.there == NULL:
                return False
    return True


# Fill in the arrays of the result of the second call; allocate them if out is None. Return the result.
cdef object fill_taken(Collectives comm, Call *c, _Parts parts, object out):
    cdef Group *g = &comm.engine.g
    cdef Piece *piece
    cdef uint64_t nrows
    cdef size_t nbytes
    cdef int giver
    result = []
    c.out_is_new = out is None
    for giver in range(parts.size):
        if not goes_from_to(c, giver, comm.own_rank):
            continue
        piece = &parts.taken[giver]
        nrows = parts.announced_of(giver, comm.own_rank).nrows
        nbytes = nrows * parts.row_nbytes
        if out is None:
            array = parts.room(nrows)
            piece.data = <unsigned char *> cnp.PyArray_DATA(<cnp.ndarray> array)
            piece.nbytes = nbytes
            result.append(array)
        elif piece.nbytes != nbytes:
            what, items = f"out[{giver}]" if is_joined(c) else "out", "bytes" if c.itemsize == 1 else "elements"
            raise ValueError(f"{what} has {piece.nbytes // c.itemsize} {items}, but {nbytes // c.itemsize} "
                             f"come from rank {giver}: shape {(nrows, *np.shape(parts.like)[1:])}")
        c.out_nbytes += nbytes
    g.choose_algorithm(g, c)
    if not has_result(c, comm.own_rank):
        return None
    if out is not None:
        return out
    return result if is_joined(c) else result[0]


# Announce the address of a piece if the other ranks can read the piece there.
cdef void announce_place(Engine engine, Call *c, _Place *place, Piece *piece) noexcept:
    cdef Group *g = &engine.g
    cdef size_t least = g.zero_copy_nbytes
    if not engine.find_block(piece.data, piece.nbytes, &place.block, &place.offset):
        if not offers_single_copy(g, c, piece.nbytes) or piece.nbytes == 0 or not can_be_read(g, piece.data):
            return
        place.block, place.offset = SR_PRIVATE, <uintptr_t> piece.data
        least = max(least, least_single_copy(g, c))
    place.zero_copy_nbytes = least


# Copy the announced contents of the pieces. Call this only if every piece was announced with its contents.
cdef void take_announced(Call *c, _Parts parts, int rank) noexcept:
    cdef int giver
    for giver in range(parts.size):
        if giver != rank and goes_from_to(c, giver, rank):
            memcpy(parts.taken[giver].data, parts.announced_of(giver, rank).what.data, parts.taken[giver].nbytes)
    if parts.taken[rank].nbytes > 0:
        memmove(parts.taken[rank].data, parts.given[rank].data, parts.taken[rank].nbytes)


cdef class _VectorWork(Work):
    """The second call, in the background."""

    cdef Collectives comm
    cdef _Parts parts
    cdef object out

    cdef void let_go(self) noexcept:
        self.parts = self.out = None

    cdef int finish_filling(self) except -1:
        cdef Call *c = &self.task.call
        cdef int kind = c.named
        cdef _Parts parts = self.parts   # an abort in another thread may drop it meanwhile
        try:
            check_counts(self.comm, c, parts)
            self.return_value = fill_taken(self.comm, c, parts, self.out)
        except Exception as error:
            self.refusal = error
            memset(c, 0, sizeof(Call))
            self.engine.fill_refusal(c, kind)
        if self.refusal is None and c.nbytes <= ANNOUNCED_NBYTES:
            take_announced(c, parts, self.comm.own_rank)
            c.enter, c.step = enter_nothing, step_nothing
        return 0


# ---- arrays --------------------------------------------------------------------------------------------------

cdef str name_in(str what, int index):
    return what if index < 0 else f"{what}[{index}]"


# Return x, or a NumPy view of the same memory, for its shape and dtype.
cdef cnp.ndarray as_array(object x, str what, int index):
    cdef cnp.ndarray array = x if cnp.PyArray_CheckExact(x) else shapes.as_numpy(x)
    if cnp.PyArray_NDIM(array) == 0:
        what = name_in(what, index)
        raise ValueError(f"{what} is 0-d; it must have a first dimension, pass {what}.reshape(1)")
    return array


cdef bint have_like_rows(cnp.ndarray a, cnp.ndarray b) noexcept:
    cdef int axis
    if cnp.PyArray_NDIM(a) != cnp.PyArray_NDIM(b):
        return False
    for axis in range(1, cnp.PyArray_NDIM(a)):
        if cnp.PyArray_DIM(a, axis) != cnp.PyArray_DIM(b, axis):
            return False
    return True


# ---- properties of kinds -------------------------------------------------------------------------------

# Return the kind with pieces of equal length that moves data in the same way.
cdef inline int equal_kind(int kind) noexcept:
    if kind == ALL_GATHER_V:
        return ALL_GATHER
    if kind == GATHER_V:
        return GATHER
    return SCATTER if kind == SCATTER_V else ALL_TO_ALL


cdef inline bint has_result(Call *c, int rank) noexcept:
    return c.kind != GATHER or rank == c.root


# ---- overlap of out and the given arrays ---------------------------------------------------------------------

cdef inline bint overlap(const Piece *a, const Piece *b) noexcept:
    return bytes_overlap(a.data, a.nbytes, b.data, b.nbytes)


# True if this rank overwrites pieces that other ranks read from it. Such pieces must be staged: a chunk is copied to a
# slot before it is overwritten. The piece from a rank may begin at the address of the piece for that rank (of x, if it
# goes to all ranks). Raise ValueError if other pieces overlap.
cdef bint overwrites_given(Call *c, _Parts parts, int rank) except -1:
    cdef int giver, other
    cdef bint found = False
    for giver in range(parts.size):
        for other in range(parts.size):
            if other < giver and overlap(&parts.taken[giver], &parts.taken[other]):
                raise ValueError(f"out[{other}] and out[{giver}] overlap; they have to be disjoint")
            if overlap(&parts.taken[giver], &parts.given[other]):
                if parts.taken[giver].data != parts.given[other].data or giver != (other if is_split(c) else rank):
                    raise ValueError(f"out overlaps an array that this rank gives, at the piece from rank {giver}; "
                                     "only the own piece, and in all_to_all_v out[i] with xs[i], may be in place")
                found = found or giver != rank
    return found
