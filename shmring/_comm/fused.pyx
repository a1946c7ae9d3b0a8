# Tensor fusion: reduce many small arrays as one bucket, with one synchronisation. The arrays are packed into a private
# buffer that is kept from call to call. If they are contiguous already, they are reduced in place, without a copy if
# their memory is shared. Elements are folded one by one, so fusing changes no bits.

from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memcpy, memset

from .._arrays.operands cimport Operand, release, storage_of, take
from .._core cimport numpy_api as cnp
from .._core.group cimport ALL_REDUCE, ALL_REDUCE_MANY, Call, fingerprint_of, mixed
from .._core.kernels cimport SR_DTYPES, SR_U8, SR_WIRE_NATIVE
from .._core.segment cimport SR_CACHE_LINE
from .._core.timeouts cimport timeout_ns_of
from .._engine.engine cimport IN_ANY
from .._engine.queue cimport Task
from .arguments cimport priority_code
from .vector cimport VectorCollectives
from .work cimport Work

import numpy as np

from .._arguments import integer
from .._diagnostics.flight_recorder import DTYPE_NBYTES, DTYPES
from .._engine.state import TAKEN

cnp.import_array()


cdef enum:
    # Size of the private buffer, and so of a bucket: fits a private L2 (bench/engine/bench_fusion.py).
    BUCKET_NBYTES = 256 << 10


# ---- the arrays of one call ----------------------------------------------------------------------------------

# One array of a call.
cdef struct Member:
    unsigned char *x
    unsigned char *out
    size_t count
    uint8_t itemsize, dtype, order


cdef class _Members:
    """The arrays of one call: addresses, dtypes, lengths, and a signature that is the same on all ranks."""

    cdef Member *member
    cdef size_t count, nelements
    cdef uint32_t dtypes        # a bit for each dtype that occurs
    cdef uint64_t signature     # hash of the dtypes and lengths, the same on all ranks
    cdef uint64_t places        # hash of the addresses
    cdef list arrays, kept
    cdef list works             # the Works of the call if it runs in the background, else None

    def __cinit__(self, size_t count):
        self.count = count
        self.kept = []
        self.member = <Member *> malloc((count + 1) * sizeof(Member))
        if self.member == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.member)

    cdef int add(self, object x, bint writable, size_t i) except -1:
        cdef Operand operand
        cdef Member *member = &self.member[i]
        try:
            kept = take(&operand, x, writable, "x", False)
        except Exception:
            kept = take(&operand, x, writable, f"arrays[{i}]", False)   # take it again to raise its error
        self.keep(&operand, kept, x)
        member.x = member.out = operand.data
        member.count = operand.count
        member.itemsize = operand.itemsize
        member.dtype = operand.dtype
        member.order = operand.fortran
        self.dtypes |= <uint32_t> 1 << operand.dtype
        self.nelements += operand.count
        self.signature = mixed(self.signature ^ (operand.count << 8 | member.dtype << 1 | member.order))
        self.places = mixed(self.places ^ <uintptr_t> member.x)
        return 0

    cdef int add_out(self, object out, size_t i) except -1:
        cdef Operand operand
        cdef Member *member = &self.member[i]
        kept = take(&operand, out, True, f"out[{i}]", False)
        self.keep(&operand, kept, out)
        if operand.dtype != member.dtype or operand.count != member.count or operand.fortran != member.order:
            raise ValueError(f"out[{i}] is {shown(operand.dtype, operand.count)}, its array is "
                             f"{shown(member.dtype, member.count)}: they must have the same dtype, count and order")
        member.out = operand.data
        self.places = mixed(self.places ^ ~<uint64_t> <uintptr_t> member.out)
        return 0

    # Keep an array, or what `take` returned to be kept in its place, until the end of the call, instead of the operand.
    cdef int keep(self, Operand *operand, object kept, object x) except -1:
        try:
            if operand.held or kept is not None:
                self.kept.append(kept if kept is not None else memoryview(x))
        finally:
            release(operand)
        return 0

    # Raise ValueError if arrays overlap: separate calls would reduce a repeated array once for each occurrence.
    cdef int check_disjoint(self) except -1:
        cdef Span *span = <Span *> malloc((2 * self.count + 1) * sizeof(Span))
        cdef size_t i, n = 0
        cdef bint ascending = True
        cdef Member *member
        if span == NULL:
            raise MemoryError()
        for i in range(self.count):
            member = &self.member[i]
            n = add_span(span, n, member.x, member.count * member.itemsize, &ascending)
            if member.out != member.x:
                n = add_span(span, n, member.out, member.count * member.itemsize, &ascending)
        if not ascending:
            qsort(span, n, sizeof(Span), compare_spans)
        for i in range(1, n):
            if span[i].begin < span[i - 1].end:
                free(span)
                raise ValueError("arrays of the list overlap; each must be there once, and disjoint from all others "
                                 "(out[i] may be the i-th array)")
        free(span)
        return 0


cdef struct Span:
    uintptr_t begin, end


cdef inline size_t add_span(Span *span, size_t n, unsigned char *data, size_t nbytes, bint *ascending) noexcept:
    if nbytes == 0:
        return n
    span[n].begin = <uintptr_t> data
    span[n].end = <uintptr_t> data + nbytes
    if n > 0 and span[n].begin < span[n - 1].begin:
        ascending[0] = False
    return n + 1


cdef int compare_spans(const void *a, const void *b) noexcept nogil:
    cdef uintptr_t left = (<const Span *> a).begin
    cdef uintptr_t right = (<const Span *> b).begin
    return (left > right) - (left < right)


cdef str shown(int dtype, size_t count):
    return f"{DTYPES[dtype]}[{count}]"


# ---- the call ------------------------------------------------------------------------------------------------

cdef class FusedCollectives(VectorCollectives):
    """The collective `all_reduce_many`, which reduces many arrays as one."""

    def all_reduce_many(self, arrays, op="sum", *, out=None, fuse_nbytes=None, async_op=False, timeout=None,
                        priority=None):
        """Combine each array of a list elementwise with those of all ranks, many small arrays as one; return None.

        Parameters
        ----------
        arrays : list of arrays
            Contiguous and disjoint, of any dtypes and lengths. Every rank passes the same number of arrays, with the
            same dtypes and numbers of elements, in the same order. They are overwritten unless `out` is given.
        op : str or Op
            The operation.
        out : list of arrays, optional
            As many arrays, with the same dtypes and numbers of elements. out[i] may be the i-th array, else it is
            disjoint from all other arrays of the call.
        fuse_nbytes : int, optional
            Bytes, the same on every rank; the tuned value if None. Arrays of at most this size are reduced together by
            dtype, larger arrays one by one. Values are folded in rank order, so the bits are those of separate calls.
            If `Comm.wire` is not "native", arrays that are reduced together are rounded and sent as one array.
        async_op, timeout, priority
            See `Comm`. Timeout and priority are those of each call that it makes.

        Returns
        -------
        None or Work
            One `Work` for all arrays with async_op=True. The arrays are then packed when their call runs.

        Raises
        ------
        TypeError, ValueError
            As in `all_reduce`, or for arrays that overlap.
        Error
            As every collective.

        Notes
        -----
        Small arrays are packed into a buffer, unless they are consecutive views of one array. Consecutive views of one
        array from `empty`, `zeros`, `full`, `copy_of` or `adopt` are reduced without any copy.

        Examples
        --------
        >>> weights, bias = np.ones((2, 2)), np.ones(2)
        >>> comm.all_reduce_many([weights, bias])
        >>> bias
        array([2., 2.])
        """
        cdef Call c
        cdef _Members members
        cdef size_t limit
        cdef int dtype
        cdef int outer
        check_alone(self)
        try:
            members = members_of(self, arrays, out)
            limit = self.engine.g.tuning.fuse_nbytes if fuse_nbytes is None else size_of(fuse_nbytes)
            members.signature = mixed(members.signature ^ limit)
            for dtype in range(SR_DTYPES):   # detect all errors before anything is overwritten
                if members.dtypes >> dtype & 1:
                    fill_reduction_of(self, &c, dtype, op, timeout, priority)
            if async_op:
                members.kept.append(storage_of([members.arrays, list(members.kept)]))
        except Exception:
            self.engine.refuse(ALL_REDUCE_MANY)
            raise
        check_alone(self)   # again: taking the arrays may run Python, and another thread may have begun meanwhile
        outer = self.engine.begin_compound(IN_ANY)
        self.fusing = True
        members.works = [] if async_op else None
        raised = None
        try:
            if not members.nelements:   # other ranks may have elements, and must not wait for a rank that has none
                fill_reduction_of(self, &c, SR_U8, "max", timeout, priority)
                reduce_at(self, &c, members, 0, 0, NULL, NULL, 0)
            for dtype in range(SR_DTYPES):
                if members.dtypes >> dtype & 1:
                    fill_reduction_of(self, &c, dtype, op, timeout, priority)
                    reduce_all_of_dtype(self, &c, members, limit)
            return issue_all(self, members.works) if async_op else None
        except BaseException as error:
            raised = error
            raise
        finally:
            self.fusing = False
            members.works = None   # they keep `members`
            self.engine.end_compound(outer, raised)


cdef int check_alone(FusedCollectives comm) except -1:
    if comm.fusing:
        raise RuntimeError(TAKEN)
    return 0


# Issue all calls; return the last Work. Calls of equal priority finish in order, so the last one finishes last.
cdef object issue_all(FusedCollectives comm, list works):
    cdef Work work = None
    for work in works:
        comm.engine.issue(work)
    return work


cdef object members_of(FusedCollectives comm, object arrays, object out):
    cdef _Members members
    cdef uint64_t found
    cdef size_t i
    arrays = list_of(arrays, "arrays")
    members = _Members(len(arrays))
    members.arrays = arrays   # keep the arrays: the caller's list may change
    i = 0
    for x in arrays:
        members.add(x, out is None, i)
        i += 1
    if out is not None:
        out = list_of(out, "out")
        members.kept.append(out)
        if len(out) != len(arrays):
            raise ValueError(f"out has {len(out)} arrays for {len(arrays)}; give as many")
        for i in range(members.count):
            members.add_out(out[i], i)
    found = mixed(members.places ^ members.signature)
    if comm.disjoint_places != found:   # else the same arrays were already found to be disjoint
        members.check_disjoint()
        comm.disjoint_places = found
    return members


# Fill a call except its addresses and lengths.
cdef int fill_reduction_of(FusedCollectives comm, Call *c, int dtype, object op, object timeout,
                           object priority) except -1:
    memset(c, 0, sizeof(Call))
    c.kind = ALL_REDUCE
    c.named = ALL_REDUCE_MANY
    c.dtype = dtype
    c.itemsize = DTYPE_NBYTES[dtype]
    c.timeout_ns = timeout_ns_of(comm.default_timeout_ns, timeout)
    c.priority = priority_code(priority)
    return comm.fill_reduction(c, op, "auto")


# Reduce all arrays of one dtype, in order: small ones in buckets, each large one by itself.
cdef int reduce_all_of_dtype(FusedCollectives comm, Call *c, _Members members, size_t fuse_nbytes) except -1:
    cdef size_t i, most = BUCKET_NBYTES // c.itemsize
    cdef Bucket bucket
    cdef Member *member
    bucket.member, bucket.first, bucket.count = members.member, 0, 0
    bucket.limit = min(fuse_nbytes, <size_t> BUCKET_NBYTES) // c.itemsize
    for i in range(members.count):
        member = &members.member[i]
        if member.dtype != c.dtype:
            continue
        if member.count > bucket.limit:
            reduce_at(comm, c, members, i, <uintptr_t> member.x, member.x, member.out, member.count)
        elif bucket.count + member.count <= most:
            bucket.count += member.count
        else:
            bucket.last = i
            reduce_bucket(comm, c, members, &bucket)
            bucket.first, bucket.count = i, member.count
    bucket.last = members.count
    if bucket.count > 0:
        reduce_bucket(comm, c, members, &bucket)
    return 0


cdef int reduce_bucket(FusedCollectives comm, Call *c, _Members members, Bucket *bucket) except -1:
    cdef Member *begin = NULL
    cdef uint64_t place = 0
    if are_consecutive(c, bucket, &begin):
        return reduce_at(comm, c, members, begin - bucket.member, <uintptr_t> begin.x, begin.x, begin.out, bucket.count)
    bucket.first = begin - bucket.member
    if comm.default_wire != SR_WIRE_NATIVE:
        place = place_of_bucket(c, bucket)
    if members.works is not None:
        return reduce_bucket_later(comm, c, members, bucket, place)
    bucket.buffer = room(comm, bucket.count * c.itemsize)
    with nogil:
        copy_members(c, bucket, True)
    reduce_at(comm, c, members, bucket.first, place, bucket.buffer, bucket.buffer, bucket.count)
    with nogil:
        copy_members(c, bucket, False)
    return 0


# Reduce `count` elements at x. first: number of the member at x, or of the first member packed there. place: tells the
# members apart from others, for the rounding errors of their transfer.
cdef int reduce_at(FusedCollectives comm, Call *c, _Members members, size_t first, uint64_t place, unsigned char *x,
                   unsigned char *out, size_t count) except -1:
    cdef Work work
    c.x, c.out, c.count = x, out, count
    c.nbytes = c.x_nbytes = c.out_nbytes = count * c.itemsize
    c.x_block = c.out_block = 0
    comm.find_shared(c)
    if comm.default_wire != SR_WIRE_NATIVE and count > 0:
        c.wire, c.residual = SR_WIRE_NATIVE, NULL
        members.kept.append(comm.fill_wire(c, members.arrays[first], place, None))
    c.fingerprint = fingerprint_of(c) ^ (members.signature >> 32) << 32
    comm.engine.g.choose_algorithm(&comm.engine.g, c)
    if members.works is None:
        return comm.run_call(c)
    work = comm.new_work()
    comm.prepare_staging(c)
    work.task.call = c[0]
    work.kept = members
    members.works.append(work)
    return 0


# As reduce_bucket, in the background: use a buffer of its own, which is packed when the bucket runs.
cdef int reduce_bucket_later(FusedCollectives comm, Call *c, _Members members, Bucket *bucket,
                             uint64_t place) except -1:
    cdef _QueuedBucket kept = _QueuedBucket()
    cdef Work work
    kept.members = members
    kept.room = np.empty(bucket.count * c.itemsize, np.uint8)
    bucket.buffer = <unsigned char *> cnp.PyArray_DATA(<cnp.ndarray> kept.room)
    kept.bucket = bucket[0]
    reduce_at(comm, c, members, bucket.first, place, bucket.buffer, bucket.buffer, bucket.count)
    work = members.works[len(members.works) - 1]
    work.kept = kept
    work.task.argument = &kept.bucket
    work.task.before, work.task.after = pack_bucket, unpack_bucket
    return 0


cdef unsigned char *room(FusedCollectives comm, size_t nbytes) except NULL:
    cdef uintptr_t begin
    if comm.fused_buffer is None or cnp.PyArray_SIZE(comm.fused_buffer) < <Py_ssize_t> nbytes + SR_CACHE_LINE:
        comm.fused_buffer = np.empty(nbytes + SR_CACHE_LINE, np.uint8)
    begin = <uintptr_t> cnp.PyArray_DATA(<cnp.ndarray> comm.fused_buffer) + SR_CACHE_LINE - 1
    return <unsigned char *> (begin & ~<uintptr_t> (SR_CACHE_LINE - 1))


# ---- a bucket ------------------------------------------------------------------------------------------------

# The members from `first` to before `last` that have the call's dtype, and 1 to `limit` elements.
cdef struct Bucket:
    Member *member
    size_t first, last, limit
    size_t count             # elements of all these members
    unsigned char *buffer    # in which they are packed


cdef inline bint is_in_bucket(const Call *c, const Member *member, size_t limit) noexcept nogil:
    return member.dtype == c.dtype and 0 < member.count <= limit


# True if the members of the bucket are contiguous in memory, as in the buffer. Set *begin to its first member.
cdef bint are_consecutive(const Call *c, const Bucket *bucket, Member **begin) noexcept nogil:
    cdef size_t i, offset = 0
    cdef Member *member = bucket.member
    for i in range(bucket.first, bucket.last):
        if not is_in_bucket(c, &member[i], bucket.limit):
            continue
        if begin[0] == NULL:
            begin[0] = &member[i]
        elif member[i].x != begin[0].x + offset or member[i].out != begin[0].out + offset:
            return False
        offset += member[i].count * c.itemsize
    return True


# Return a hash of the addresses and lengths of the bucket's members.
cdef uint64_t place_of_bucket(const Call *c, const Bucket *bucket) noexcept nogil:
    cdef uint64_t place = 0
    cdef const Member *member = bucket.member
    cdef size_t i
    for i in range(bucket.first, bucket.last):
        if is_in_bucket(c, &member[i], bucket.limit):
            place = mixed(mixed(place ^ <uintptr_t> member[i].x) ^ member[i].count)
    return place


# Copy the members into the buffer, or the results out of it.
cdef void copy_members(const Call *c, const Bucket *bucket, bint into_buffer) noexcept nogil:
    cdef unsigned char *buffer = bucket.buffer
    cdef const Member *member = bucket.member
    cdef size_t i, nbytes
    for i in range(bucket.first, bucket.last):
        if is_in_bucket(c, &member[i], bucket.limit):
            nbytes = member[i].count * c.itemsize
            if into_buffer:
                memcpy(buffer, member[i].x, nbytes)
            else:
                memcpy(member[i].out, buffer, nbytes)
            buffer += nbytes


cdef class _QueuedBucket:
    """A bucket that is reduced in the background, and the objects that must stay alive until then."""

    cdef Bucket bucket
    cdef object members, room


cdef void pack_bucket(Task *t) noexcept nogil:
    copy_members(&t.call, <const Bucket *> t.argument, True)


cdef void unpack_bucket(Task *t) noexcept nogil:
    copy_members(&t.call, <const Bucket *> t.argument, False)


# ---- small arguments -----------------------------------------------------------------------------------------

cdef list list_of(object arrays, str what):
    try:
        return list(arrays)
    except TypeError:
        raise TypeError(f"{what} is a {type(arrays).__name__}; give a list of arrays") from None


cdef size_t size_of(object fuse_nbytes) except? 0:
    number = integer("fuse_nbytes", fuse_nbytes)
    if number < 0:
        raise ValueError(f"fuse_nbytes is {number}; it must be 0 or more bytes")
    return min(number, <object> BUCKET_NBYTES)
