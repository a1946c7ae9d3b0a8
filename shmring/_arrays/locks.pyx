# Locks in shared memory, taken by ranks. A waiting rank detects the owner's death. Without contention, taking a lock
# is one compare-and-swap. One-sided access to a shared array holds the lock of one range of the array after another.

import operator
import os

from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from .._core cimport numpy_api as cnp
from .._core.group cimport (
    ABORTED, BLOCKED, DEAD, DONE, LATE, PROGRESSED, SIGNALLED, SIGNAL_INTERVAL_NS, Group, bytes_overlap, check_liveness,
    peer_status,
)
from .._core.kernels cimport sr_float_env, sr_float_env_enter, sr_float_env_leave, sr_fold_fn
from .._core.segment cimport SR_NO_ABORT, sr_flag_load, sr_now_ns, sr_time_away
from .._core.timeouts cimport ns_of, timeout_s_of
from .._diagnostics.flight_recorder cimport SR_AT_LOCK, SR_WAIT_LOCK, begin_wait, correct_wait, end_wait
from .._engine.engine cimport Engine

from .._diagnostics import failures
from .._system import procfs
from ..errors import RankFailed, Timeout

cnp.import_array()

cdef extern from "sync/lock.h" nogil:
    int sr_lock_owner(const sr_lock *)
    bint sr_lock_spin(sr_lock *, int rank, int pauses)
    bint sr_lock_sleep(sr_lock *, int rank, uint64_t limit_ns)
    void sr_lock_pass_on(sr_lock *)

LOCK_NBYTES = sizeof(sr_lock)

cdef int forks = 0   # number of forks since the process that first imported this module


def _count_fork():
    global forks
    forks += 1


os.register_at_fork(after_in_child=_count_fork)


# ---- waiting ---------------------------------------------------------------------------------------------------

# DONE: this rank holds the lock. DEAD and LEFT: *owner died or left while it held the lock.
cdef int await_lock(Group *g, sr_lock *lock, uint64_t begin_ns, uint64_t *polled_ns, uint64_t *deadline_ns,
                    int *owner) noexcept nogil:
    cdef uint64_t now = sr_now_ns()
    cdef uint64_t signal_ns = now + SIGNAL_INTERVAL_NS
    cdef int status
    begin_wait(g, SR_WAIT_LOCK, SR_AT_LOCK, begin_ns, sr_lock_owner(lock))
    while not sr_lock_sleep(lock, g.rank, g.sleep_ns):
        if sr_flag_load(&g.header.abort) != SR_NO_ABORT:
            return ABORTED
        owner[0] = sr_lock_owner(lock)
        check_liveness(g)
        correct_wait(g, SR_WAIT_LOCK, SR_AT_LOCK, owner[0])
        status = owner_status(g, owner[0])
        if status != PROGRESSED and sr_lock_owner(lock) == owner[0]:   # it may have released the lock first
            return status
        now = sr_now_ns()
        deadline_ns[0] += sr_time_away(polled_ns[0], now)
        polled_ns[0] = now
        if now >= deadline_ns[0]:
            return LATE
        if now >= signal_ns:
            return SIGNALLED
    return DONE


cdef inline int owner_status(Group *g, int rank) noexcept nogil:
    if rank < 0 or rank >= g.size or rank == g.rank:
        return PROGRESSED
    return peer_status(&g.lane[rank].liveness)


# ---- locks -----------------------------------------------------------------------------------------------------

cdef class Locks:
    """`count` locks at `address`, zeros at first; `memory` keeps them mapped.

    of_stripes: they are those of `Stripes`, for errors.
    """

    def __cinit__(self, Engine engine, memory, uintptr_t address, int count, bint of_stripes=False):
        self.engine = engine
        self.memory = memory
        self.first = <sr_lock *> address
        self.count = count
        self.of_stripes = of_stripes
        self.holder = <unsigned long *> calloc(count + 1, sizeof(unsigned long))
        if self.holder == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.holder)

    def lock(self, number, timeout=None):
        """Return lock `number` as a context manager. Entering raises Timeout after `timeout` seconds."""
        cdef double timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        try:
            index = operator.index(number)
        except TypeError:
            raise TypeError(f"the number of a lock is {number!r}; it must be an integer") from None
        if not 0 <= index < self.count:
            raise IndexError(f"there is no lock {index}; this array has {self.count}, as given by locks=")
        return Lock(self, index, timeout_s)

    # An error makes the array private to each rank before it is raised: a lock there would exclude no other rank, and
    # no other rank would see what is written.
    cdef int check_usable(self) except -1:
        self.engine.check_open()
        if sr_flag_load(&self.engine.g.header.abort) != SR_NO_ABORT:
            self.engine.raise_abort_error(beside=True)
        return 0

    cdef int acquire(self, int index, double timeout_s) except -1:
        self.check_usable()
        if not sr_lock_try_acquire(&self.first[index], self.engine.g.rank):
            self.wait(index, timeout_s)
        self.holder[index] = PyThread_get_thread_ident()
        return 0

    cdef int wait(self, int index, double timeout_s) except -1:
        cdef Group *g = &self.engine.g
        cdef sr_lock *lock = &self.first[index]
        cdef bint is_taken
        if sr_lock_owner(lock) == g.rank and self.holder[index] == <unsigned long> PyThread_get_thread_ident():
            raise RuntimeError(f"this thread holds lock {index} already; taking it again would deadlock")
        with nogil:
            is_taken = sr_lock_spin(lock, g.rank, g.pauses)
        if is_taken:
            return 0
        try:
            self.sleep(index, timeout_s)
        except BaseException:
            sr_lock_pass_on(lock)
            raise
        return 0

    cdef int sleep(self, int index, double timeout_s) except -1:
        cdef Group *g = &self.engine.g
        cdef sr_lock *lock = &self.first[index]
        cdef uint64_t begin_ns = sr_now_ns()
        cdef uint64_t polled_ns = begin_ns
        cdef uint64_t deadline_ns = begin_ns + ns_of(timeout_s)
        cdef int owner = sr_lock_owner(lock)
        cdef int status = BLOCKED
        while status != DONE:
            with nogil:
                status = await_lock(g, lock, begin_ns, &polled_ns, &deadline_ns, &owner)
                if status != SIGNALLED:
                    end_wait(g, SR_WAIT_LOCK)
            if status == SIGNALLED:
                try:
                    self.engine.check_signals()
                    self.engine.stalls.warn_if_due(self.engine, SR_WAIT_LOCK)
                except BaseException:
                    if self.engine.closed_because is None:
                        end_wait(g, SR_WAIT_LOCK)
                    raise
            elif status == ABORTED:
                self.engine.raise_abort_error(beside=True)
            elif status == LATE:
                self.raise_late(owner, index, timeout_s)
            elif status != DONE:
                self.report_owner(owner, status, index)
        return 0

    cdef int raise_late(self, int owner, int index, double timeout_s) except -1:
        if not 0 <= owner < self.engine.g.size:   # the owner has just released it, and another rank took it first
            raise Timeout(f"{self.name_of(index)} could not be taken within {timeout_s:g} s")
        rank = self.engine.world_rank(owner)
        did = "accessed" if self.of_stripes else "held"
        raise Timeout(f"rank {rank} still {did} {self.name_of(index)} after {timeout_s:g} s; "
                      + failures.describe_doing(self.engine, owner), rank=rank)

    # A lock whose owner is gone is never released, so this rank aborts the communicator.
    cdef int report_owner(self, int owner, int status, int index) except -1:
        how = "closed the communicator"
        if status == DEAD:
            how = procfs.how_it_ended(*self.engine.flight.liveness_of(owner))
        did = "accessed" if self.of_stripes else "held"
        text = f"rank {owner} {how} while it {did} {self.name_of(index)}"
        self.engine.abort_outside_call(RankFailed(text, rank=owner))
        return 0

    # Return the name of a lock in errors. A stripe is the lock of several ranges, so its number means nothing.
    cdef str name_of(self, int index):
        return "a range of a shared array" if self.of_stripes else f"lock {index} of a shared array"

    cdef int release(self, int index) except -1:
        if sr_lock_owner(&self.first[index]) != self.engine.g.rank:
            raise RuntimeError(f"this rank does not hold lock {index}")
        # Clear first: until the next thread records itself, it would be mistaken for this one.
        self.holder[index] = 0
        sr_lock_release(&self.first[index])
        return 0


cdef class Lock:
    """One lock of a shared array, made by `SharedArray.lock`. `with` takes and releases it. A forked child does not
    hold it.
    """

    cdef Locks locks
    cdef int index, forks
    cdef double timeout_s

    def __cinit__(self, Locks locks, int index, double timeout_s):
        self.locks = locks
        self.index = index
        self.timeout_s = timeout_s

    def __enter__(self):
        self.locks.acquire(self.index, self.timeout_s)
        self.forks = forks
        return self

    def __exit__(self, kind, error, traceback):
        if self.forks == forks:
            self.locks.release(self.index)


# ---- one-sided access ------------------------------------------------------------------------------------------

# A rank reads, writes and combines elements range by range, each range under its lock. No other rank takes part.
cdef enum:
    LOCKED_NBYTES = 32 << 10   # of a range: a few microseconds of work, about half of an L1 cache
    MOST_STRIPES = 16    # usually more than the ranks in access() at a time; two cache lines each
    MOST_ELEMENTS = 1024   # indexed elements processed while a stripe is held


def count_for(nbytes):
    """Return the number of stripes of an array of `nbytes`."""
    return min(MOST_STRIPES, (nbytes + LOCKED_NBYTES - 1) // LOCKED_NBYTES)


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


cdef inline size_t element_offset(const Access *a, size_t k) noexcept nogil:
    return (<size_t> a.index[k] if a.index != NULL else a.first + k) * a.itemsize


cdef inline int stripe_of(const Access *a, size_t k, int nstripes) noexcept nogil:
    return <int> ((a.offset + element_offset(a, k)) // LOCKED_NBYTES % nstripes)


# Number of elements from `done` on that are in one range or, if indexed, in one stripe.
cdef inline size_t count_in_stripe(const Access *a, int stripe, int nstripes) noexcept nogil:
    cdef size_t k, nbytes
    if a.index == NULL:
        nbytes = LOCKED_NBYTES - (a.offset + element_offset(a, a.done)) % LOCKED_NBYTES
        return min(a.count - a.done, nbytes // a.itemsize)
    for k in range(a.done + 1, min(a.count, a.done + MOST_ELEMENTS)):
        if stripe_of(a, k, nstripes) != stripe:
            return k - a.done
    return min(a.count - a.done, <size_t> MOST_ELEMENTS)


# Process `count` elements, contiguous in the array, beginning with the k-th element of the access.
cdef inline void access_elements(const Access *a, size_t k, size_t count) noexcept nogil:
    cdef void *there = a.array + element_offset(a, k)
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


# Proceed range by range. Return -1 when done, else the stripe that another thread or rank holds. held: a stripe that
# this thread already holds, or -1.
cdef int access_ranges(Access *a, sr_lock *first, int nstripes, int rank, int held) noexcept nogil:
    cdef size_t count, k
    cdef int stripe
    while a.done < a.count:
        stripe = stripe_of(a, a.done, nstripes)
        if stripe != held and not sr_lock_try_acquire(&first[stripe], rank):
            return stripe
        held = -1
        count = count_in_stripe(a, stripe, nstripes)
        if a.index == NULL:
            access_elements(a, a.done, count)
        else:
            for k in range(a.done, a.done + count):
                access_elements(a, k, 1)
        sr_lock_release(&first[stripe])
        a.done += count
    return -1


cdef class Stripes:
    """The locks of an array's ranges of 32 KiB. Range i uses lock i modulo the number of locks."""

    cdef Engine engine
    cdef Locks locks
    cdef uintptr_t begin   # of the array

    def __cinit__(self, Engine engine, memory, uintptr_t begin, uintptr_t locks, int count):
        self.engine = engine
        self.begin = begin
        self.locks = Locks(engine, memory, locks, count, of_stripes=True)

    def access(self, cnp.ndarray array, size_t first, size_t count, cnp.ndarray index, cnp.ndarray values,
               cnp.ndarray out, int dtype, int op, timeout):
        """Copy elements to `out`, then set them to `values` or to elements op values, range by range.

        array: the shared array or a view of it. index: the elements as intp, or None for `count` elements from `first`
        on. values, out: contiguous, of the array's dtype, one for each element, or None. op: -1 to replace. The caller
        has checked indices, dtypes and sizes.
        """
        cdef Access a
        cdef double timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        self.locks.check_usable()
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
                stripe = access_ranges(a, first, nstripes, rank, stripe)
                sr_float_env_leave(modes)
            if stripe >= 0:
                self.locks.wait(stripe, timeout_s)
        return 0


cdef bint overlap(cnp.ndarray one, cnp.ndarray other) noexcept:
    return bytes_overlap(cnp.PyArray_DATA(one), cnp.PyArray_NBYTES(one),
                         cnp.PyArray_DATA(other), cnp.PyArray_NBYTES(other))
