# One-sided access to a shared array. A rank reads, writes and combines elements block by block, each block under its
# striped lock. No other rank takes part.

from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

cimport numpy as cnp

from .._core.group cimport *
from .._core.timeouts cimport timeout_s_of
from .._engine.engine cimport Engine
from .locks cimport Locks, sr_lock, sr_lock_leave, sr_lock_try

cnp.import_array()

cdef enum:
    BLOCK = 32 << 10     # bytes: a few microseconds of work, about half of an L1 cache
    MOST_STRIPES = 16    # usually more than the ranks in access() at a time; two cache lines each
    MOST_ELEMENTS = 1024   # indexed elements processed while a stripe is held

BLOCK_NBYTES = BLOCK


def count_for(nbytes):
    """Return the number of stripes of an array of `nbytes`."""
    return min(MOST_STRIPES, (nbytes + BLOCK - 1) // BLOCK)


# One access: copy the elements to `out`, then replace them by `values` or fold `values` into them.
cdef struct Access:
    unsigned char *array          # the caller's array: the whole array or a view
    size_t offset                 # of the view in the whole array, bytes
    size_t itemsize
    const Py_ssize_t *index       # of each element; NULL: `count` elements from `first` on
    size_t first, count, done
    const unsigned char *values   # NULL: do not write
    unsigned char *out            # NULL: do not read
    sr_fold_fn *fold              # NULL: values replace the elements


cdef inline size_t place_of(const Access *a, size_t k) noexcept nogil:
    return (<size_t> a.index[k] if a.index != NULL else a.first + k) * a.itemsize


cdef inline int stripe_of(const Access *a, size_t k, int nstripes) noexcept nogil:
    return <int> ((a.offset + place_of(a, k)) // BLOCK % nstripes)


# Number of elements from `done` on that are in one block or, if indexed, in one stripe.
cdef inline size_t count_in_stripe(const Access *a, int stripe, int nstripes) noexcept nogil:
    cdef size_t k
    if a.index == NULL:
        return min(a.count - a.done, (BLOCK - (a.offset + place_of(a, a.done)) % BLOCK) // a.itemsize)
    for k in range(a.done + 1, min(a.count, a.done + MOST_ELEMENTS)):
        if stripe_of(a, k, nstripes) != stripe:
            return k - a.done
    return min(a.count - a.done, <size_t> MOST_ELEMENTS)


# Process `count` elements, contiguous in the array, beginning with the k-th element of the access.
cdef inline void touch(const Access *a, size_t k, size_t count) noexcept nogil:
    cdef void *there = a.array + place_of(a, k)
    cdef const void *sources[2]
    cdef size_t nbytes = count * a.itemsize
    if a.out != NULL:
        memcpy(a.out + k * a.itemsize, there, nbytes)
    if a.values == NULL:
        return
    if a.fold == NULL:
        memcpy(there, a.values + k * a.itemsize, nbytes)
        return
    sources[0] = there
    sources[1] = a.values + k * a.itemsize
    a.fold(&there, 1, 0, sources, 2, count, 1)


# Proceed block by block. Return -1 when done, else the stripe that another thread or rank holds. had: a stripe that
# this thread already holds, or -1.
cdef int go_on(Access *a, sr_lock *first, int nstripes, int rank, int had) noexcept nogil:
    cdef size_t count, k
    cdef int stripe
    while a.done < a.count:
        stripe = stripe_of(a, a.done, nstripes)
        if stripe != had and not sr_lock_try(&first[stripe], rank):
            return stripe
        had = -1
        count = count_in_stripe(a, stripe, nstripes)
        if a.index == NULL:
            touch(a, a.done, count)
        else:
            for k in range(a.done, a.done + count):
                touch(a, k, 1)
        sr_lock_leave(&first[stripe])
        a.done += count
    return -1


cdef class Stripes:
    """The locks of an array's blocks of BLOCK_NBYTES. Block b uses lock b modulo the number of locks."""

    cdef Engine engine
    cdef Locks locks
    cdef uintptr_t begin   # of the array

    def __cinit__(self, Engine engine, memory, uintptr_t begin, uintptr_t locks, int count):
        self.engine = engine
        self.begin = begin
        self.locks = Locks(engine, memory, locks, count, "stripe")

    def access(self, cnp.ndarray array, size_t first, size_t count, cnp.ndarray index, cnp.ndarray values,
               cnp.ndarray out, int dtype, int op, timeout):
        """Copy elements to `out`, then set them to `values` or to elements op values, block by block.

        array: the shared array or a view of it. index: the elements as intp, or None for `count` elements from `first`
        on. values, out: contiguous, of the array's dtype, one for each element, or None. op: -1 to replace. The caller
        has checked indices, dtypes and sizes.
        """
        cdef Access a
        cdef double timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        self.locks.check_open()
        a.array = <unsigned char *> cnp.PyArray_DATA(array)
        a.offset = <uintptr_t> a.array - self.begin
        a.itemsize = cnp.PyArray_ITEMSIZE(array)
        if not cnp.PyArray_IS_C_CONTIGUOUS(array) or a.offset % a.itemsize != 0:
            raise ValueError("the elements of this view do not follow each other; index the array itself instead")
        if values is not None and not cnp.PyArray_ISWRITEABLE(array):
            raise ValueError("this view of a shared array is read-only")
        if out is not None and overlap(array, out):
            raise ValueError("out is part of the array itself; give other memory")
        if values is not None and overlap(array, values):
            values = values.copy()
        a.first, a.count, a.done = first, count, 0
        a.index = NULL
        if index is not None:
            a.index = <const Py_ssize_t *> cnp.PyArray_DATA(index)
        a.values = NULL
        if values is not None:
            a.values = <const unsigned char *> cnp.PyArray_DATA(values)
        a.out = NULL if out is None else <unsigned char *> cnp.PyArray_DATA(out)
        a.fold = NULL if op < 0 else self.engine.g.kernels.fold[dtype][op]
        self.run(&a, timeout_s)

    cdef int run(self, Access *a, double timeout_s) except -1:
        cdef sr_lock *first = self.locks.first
        cdef int nstripes = self.locks.count
        cdef int rank = self.engine.g.rank
        cdef int stripe = -1
        cdef sr_float_env modes
        while a.done < a.count:
            with nogil:
                modes = sr_float_env_enter()
                stripe = go_on(a, first, nstripes, rank, stripe)
                sr_float_env_leave(modes)
            if stripe >= 0:
                self.locks.wait(stripe, timeout_s)
        return 0


cdef bint overlap(cnp.ndarray one, cnp.ndarray other) noexcept:
    cdef uintptr_t begin = <uintptr_t> cnp.PyArray_DATA(one)
    cdef uintptr_t other_begin = <uintptr_t> cnp.PyArray_DATA(other)
    return begin < other_begin + cnp.PyArray_NBYTES(other) and other_begin < begin + cnp.PyArray_NBYTES(one)
