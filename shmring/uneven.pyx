# Collectives whose pieces differ in length. Two calls of the engine: first everyone says how many rows it gives to whom
# and where they lie, then they move, by the pipeline of the even ones with a length and a place for every piece.
# May know: _engine, _exchange, _group, _operands, _pipelines, collectives, shapes.

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from ._exchange cimport shared_address
from ._group cimport *
from ._operands cimport MOVED, Operand, release, take
from ._pipelines cimport choose_pipeline
from .collectives cimport Collectives, timeout_ns_of

from . import _engine, shapes


cdef size_t MOST_NBYTES = <size_t> 1 << 48   # of one piece: keeps sums of sizes that others told inside 64 bits


# ---- the arrays of one call ----------------------------------------------------------------------------------

cdef class _Parts:
    """What a rank gives to and takes from each of `size` ranks, and what everyone has told of it."""

    def __cinit__(self, int size, int npieces):
        self.size = size
        self.npieces = npieces     # that each rank tells of: one for each taker, or one for all
        self.kept = []
        self.held = <Operand *> calloc(2 * size + 1, sizeof(Operand))
        self.given = <Piece *> calloc(2 * size, sizeof(Piece))
        self.own = <Told *> calloc((1 + size) * npieces, sizeof(Told))
        if self.held == NULL or self.given == NULL or self.own == NULL:
            raise MemoryError()
        self.taken = self.given + size
        self.told = self.own + npieces

    def __dealloc__(self):
        cdef int i
        for i in range(self.nheld):
            release(&self.held[i])
        free(self.held)
        free(self.given)
        free(self.own)

    cdef Operand *hold(self, object x, bint writable, str what) except NULL:
        cdef Operand *operand = &self.held[self.nheld]
        self.kept.append(take(operand, x, writable, what, True))
        self.nheld += 1
        if operand.fortran:
            raise ValueError(f"{what} is in Fortran order, whose memory is not split along the first dimension; "
                             f"pass np.ascontiguousarray({what})")
        return operand

    cdef Told *told_of(self, int giver, int taker) noexcept:
        return &self.told[giver * self.npieces + (taker if self.npieces > 1 else 0)]


# ---- the collectives -----------------------------------------------------------------------------------------

cdef class Uneven(Collectives):
    """The collectives whose pieces may have another length of dimension 0 on every rank."""

    def all_gather_v(self, x, *, out=None, timeout=None):
        """Every rank's x on every rank: returns a list of arrays by rank, of as many rows as each gave.

        x: at least 1-d, C order; dtype and shape[1:] the same on every rank, its length, which may be 0, of its own.
        out: a list of `size` arrays that fit exactly, disjoint but that out[rank] may be x. timeout: seconds, of
        each of the call's two steps, lengths and data. Arrays from `empty` and its kin on all ranks are copied once.
        """
        return self.run_uneven(ALL_GATHER_V, x, None, out, None, timeout)

    def gather_v(self, x, root=0, *, out=None, timeout=None):
        """Every rank's x on the root, which returns them as a list of arrays by rank; the others return None.

        x, out and timeout as in `all_gather_v`; out on the root only, ignored elsewhere.
        """
        return self.run_uneven(GATHER_V, x, root, out, None, timeout)

    def scatter_v(self, xs=None, root=0, *, out=None, like=None, timeout=None):
        """One of the root's arrays for each rank: returns xs[rank].

        xs: on the root a list of `size` arrays of one dtype and shape[1:], C order, of any lengths. None elsewhere,
        with `out`, or `like`: an array of that dtype and shape[1:], of any length. out: an array that fits exactly;
        on the root xs[root] or disjoint from all of xs. timeout as in `all_gather_v`.
        """
        return self.run_uneven(SCATTER_V, xs, root, out, like, timeout)

    def all_to_all_v(self, xs, *, out=None, timeout=None):
        """xs[j] of rank i becomes result[i] of rank j: returns a list of arrays by rank.

        xs: a list of `size` arrays, C order, of any lengths; one dtype and shape[1:] on all ranks. out: a list of
        `size` arrays that fit exactly, each disjoint from all others, but that out[i] may be xs[i]. timeout as in
        `all_gather_v`.
        """
        return self.run_uneven(ALL_TO_ALL_V, xs, None, out, None, timeout)

    # -- from arguments to the two calls --

    cdef object run_uneven(self, int kind, object x, object root, object out, object like, object timeout):
        cdef Call c
        cdef _Parts parts
        memset(&c, 0, sizeof(c))
        c.named = kind
        try:
            c.kind = even_kind(kind)
            c.timeout_ns = self.default_timeout_ns if timeout is None else timeout_ns_of(timeout)
            c.root = 0 if root is None else self.root_number(root)
            parts = _Parts(self.engine.g.size, self.engine.g.size if is_split(&c) else 1)
            self.describe_given(&c, parts, x, out if has_result(&c, self.engine.g.rank) else None, like)
        except Exception:
            self.engine.refuse(kind)
            raise
        self.exchange_counts(&c, parts)
        try:
            result = self.describe_taken(&c, parts, out)
        except Exception:
            self.engine.refuse(kind)
            raise
        if not self.staging_ready:
            self.allocate_staging()
        self.drive(&c)
        return result

    # Everything that can be said before the others' counts are known.
    cdef int describe_given(self, Call *c, _Parts parts, object x, object out, object like) except -1:
        cdef int rank = self.engine.g.rank, size = parts.size
        if not is_split(c):
            self.give(c, parts, x, "x", 0, size)
        elif c.kind == ALL_TO_ALL or rank == c.root:
            for taker, array in enumerate(shapes.list_for(x, size, "xs")):
                self.give(c, parts, array, f"xs[{taker}]", taker, taker + 1)
        elif out is None and like is None:
            raise TypeError("a rank that is not the root scatters None with out= or like=, "
                            "an array of the dtype and shape[1:] that it gets")
        else:
            self.take_after(c, parts, out if like is None else like, "out" if like is None else "like")
        if out is not None:
            self.describe_out(c, parts, out)
        self.offer_shared(c, parts)
        c.given, c.taken = parts.given, parts.taken
        c.fingerprint = fingerprint_of(c) ^ <uint64_t> parts.signature << 32
        return 0

    # x is what the ranks from `first` to before `last` get.
    cdef int give(self, Call *c, _Parts parts, object x, str what, int first, int last) except -1:
        cdef Operand *operand = parts.hold(x, False, what)
        cdef int taker
        if parts.model is None:
            self.take_after(c, parts, x, what)
        shape = shapes.shape_of(x)
        if operand.dtype != c.dtype or (operand.dtype == MOVED and shapes.dtype_of(x) != parts.model.dtype):
            raise ValueError(f"{what} has another dtype than xs[0], which is {shown(c)}; all must have one")
        if not shape or shape[1:] != parts.trailing:
            raise ValueError(f"{what} has shape {shape}; only the first dimension may differ, "
                             f"the others are {parts.trailing} in xs[0]")
        parts.own[first].nrows = shape[0]
        for taker in range(first, last):
            parts.given[taker].data = operand.data
            parts.given[taker].nbytes = operand.count * operand.itemsize
        return 0

    # The dtype and shape[1:] that all arrays of the call have in common are those of this one.
    cdef int take_after(self, Call *c, _Parts parts, object x, str what) except -1:
        cdef Operand *operand
        parts.model = shapes.without_rows(x, what)
        parts.trailing = parts.model.shape[1:]
        operand = parts.hold(parts.model, False, what)
        c.dtype, c.itemsize = operand.dtype, operand.itemsize
        parts.row_nbytes = shapes.row_nbytes(parts.model)
        parts.signature = shapes.signature(parts.trailing, parts.model.dtype if c.dtype == MOVED else None)
        c.count = parts.row_nbytes // c.itemsize
        return 0

    cdef int describe_out(self, Call *c, _Parts parts, object out) except -1:
        cdef Operand *operand
        cdef int giver
        arrays = {c.root: out} if c.kind == SCATTER else dict(enumerate(shapes.list_for(out, parts.size, "out")))
        for giver, array in arrays.items():
            what = "out" if c.kind == SCATTER else f"out[{giver}]"
            operand = parts.hold(array, True, what)
            if operand.dtype != c.dtype:
                raise ValueError(f"{what} has another dtype than what it is for, which is {shown(c)}")
            parts.taken[giver].data = operand.data
            parts.taken[giver].nbytes = operand.count * operand.itemsize
        return 0

    # Where the pieces lie, for the others to read.
    cdef int offer_shared(self, Call *c, _Parts parts) except -1:
        cdef Group *g = &self.engine.g
        cdef bint in_place = is_in_place(c, parts, g.rank)
        cdef Piece *piece
        cdef int i
        for i in range(parts.npieces):
            parts.own[i].zero_copy_nbytes = <uint32_t> min(g.zero_copy_nbytes, <size_t> 0xffffffff)
            piece = &parts.given[i]
            if g.nblocks > 0 and not in_place and piece.nbytes > 0:
                self.engine.find_block(piece.data, piece.nbytes, &parts.own[i].block, &parts.own[i].offset)
        return 0

    # The first call: everyone's counts.
    cdef int exchange_counts(self, Call *c, _Parts parts) except -1:
        cdef Call counts = c[0]
        counts.kind = ALL_GATHER
        counts.given = counts.taken = NULL
        counts.nbytes = counts.x_nbytes = parts.npieces * sizeof(Told)
        counts.out_nbytes = counts.nbytes * parts.size
        counts.x = <unsigned char *> parts.own
        counts.out = <unsigned char *> parts.told
        choose_pipeline(&self.engine.g, &counts)
        self.drive(&counts)
        c.awaited.rank = self.read_counts(c, parts)
        if c.awaited.rank >= 0:
            c.seq = self.engine.g.seq
            self.engine.surface(c, MISMATCHED)
        return 0

    # Checks what was told, for it may be damaged, and finds the largest piece: the same on every rank. Returns a rank
    # that told nonsense, or -2.
    cdef int read_counts(self, Call *c, _Parts parts) except -1:
        cdef Told *told
        cdef int giver, taker
        cdef size_t nbytes, most = MOST_NBYTES // max(parts.row_nbytes, <size_t> 1)
        c.nbytes = 0
        for giver in range(parts.size):
            for taker in range(parts.size):
                told = parts.told_of(giver, taker)
                if told.nrows > most:
                    c.awaited.rank = giver
                    return giver
                nbytes = told.nrows * parts.row_nbytes
                if is_given(c, giver, taker) and (giver != taker or parts.size == 1) and nbytes > c.nbytes:
                    c.nbytes = nbytes
        return self.find_shared(c, parts)

    # Zero-copy if all that moves lies in shared arrays, and is worth its second synchronisation.
    cdef int find_shared(self, Call *c, _Parts parts) except -1:
        cdef Told *told
        cdef Piece *piece
        cdef int giver, taker, rank = self.engine.g.rank
        c.x_block = c.nbytes > 0
        for giver in range(parts.size):
            for taker in range(parts.size):
                told = parts.told_of(giver, taker)
                if is_given(c, giver, taker) and giver != taker and told.nrows * parts.row_nbytes > 0:
                    c.x_block = c.x_block and told.block != 0 and c.nbytes >= told.zero_copy_nbytes
        if c.x_block:
            for giver in range(parts.size):
                told = parts.told_of(giver, rank)
                if giver != rank and is_given(c, giver, rank) and told.nrows * parts.row_nbytes > 0:
                    piece = &parts.taken[giver]
                    piece.there = shared_address(&self.engine.g, told.block, giver, told.offset,
                                                 told.nrows * parts.row_nbytes)
                    if piece.there == NULL:
                        return giver
        return -2

    # The second call: arrays that fit the counts.
    cdef object describe_taken(self, Call *c, _Parts parts, object out):
        cdef Group *g = &self.engine.g
        cdef Piece *piece
        cdef size_t nbytes
        cdef int giver
        result = []
        for giver in range(parts.size):
            if not is_given(c, giver, g.rank):
                continue
            piece = &parts.taken[giver]
            nrows = parts.told_of(giver, g.rank).nrows
            nbytes = nrows * parts.row_nbytes
            if out is not None and piece.nbytes != nbytes:
                what = f"out[{giver}]" if is_joined(c) else "out"
                raise ValueError(f"{what} has {piece.nbytes // c.itemsize} elements, but {nbytes // c.itemsize} "
                                 f"come from rank {giver}: shape {(nrows, *parts.trailing)}")
            if out is None:
                array = shapes.with_rows(parts.model, nrows)
                piece.data = parts.hold(array, True, "out").data
                piece.nbytes = nbytes
                result.append(array)
            c.out_nbytes += nbytes
        c.x, c.out = parts.given[g.rank].data, parts.taken[g.rank].data   # of a single rank
        choose_pipeline(g, c)
        if not has_result(c, g.rank):
            return None
        if out is not None:
            return out
        return result if is_joined(c) else result[0]


# ---- what kinds have in common -------------------------------------------------------------------------------

# The even kind whose data go the same ways.
cdef inline int even_kind(int kind) noexcept:
    if kind == ALL_GATHER_V:
        return ALL_GATHER
    if kind == GATHER_V:
        return GATHER
    return SCATTER if kind == SCATTER_V else ALL_TO_ALL


# Whether something of giver's x ends up at taker, the own piece included.
cdef inline bint is_given(Call *c, int giver, int taker) noexcept:
    if c.kind == SCATTER:
        return giver == c.root
    return c.kind != GATHER or taker == c.root


cdef inline bint has_result(Call *c, int rank) noexcept:
    return c.kind != GATHER or rank == c.root


cdef str shown(Call *c):
    return (_engine.DTYPES + (_engine.MOVED_DTYPE,))[c.dtype]


# ---- where out may touch what is given -----------------------------------------------------------------------

cdef inline bint overlap(const Piece *a, const Piece *b) noexcept:
    return a.nbytes > 0 and b.nbytes > 0 and a.data < b.data + b.nbytes and b.data < a.data + a.nbytes


# Whether this rank overwrites what others need of it, which goes well through slots: a chunk is staged before. What
# comes from a rank may lie where begins what goes to it; all else has to be disjoint.
cdef bint is_in_place(Call *c, _Parts parts, int rank) except -1:
    cdef int giver, other
    cdef bint found = False
    for giver in range(parts.size):
        for other in range(parts.size):
            if other < giver and overlap(&parts.taken[giver], &parts.taken[other]):
                raise ValueError(f"out[{other}] and out[{giver}] overlap; they have to be disjoint")
            if overlap(&parts.taken[giver], &parts.given[other]):
                if parts.taken[giver].data != parts.given[other].data or giver != (other if is_split(c) else rank):
                    raise ValueError(f"out overlaps what this rank gives, where it comes from rank {giver}; only "
                                     "the own piece, and in all_to_all_v xs[i] for out[i], may be in place")
                found = found or giver != rank
    return found
