# Locks in shared memory, for callers that take many of them without the GIL.

from .._engine.engine cimport Engine


cdef extern from "sync/lock.h" nogil:
    struct sr_lock:
        pass
    bint sr_lock_try_acquire(sr_lock *, int rank)
    void sr_lock_release(sr_lock *)


# See _arrays/locks.pyi.
cdef class Locks:
    cdef Engine engine
    cdef object memory
    cdef sr_lock *first
    cdef unsigned long *holder   # for each lock, the thread of this rank that holds it; 0: none, or not recorded yet
    cdef readonly int count
    cdef bint of_stripes         # they are those of Stripes

    cdef int check_usable(self) except -1
    cdef int acquire(self, int index, double timeout_s) except -1
    cdef int wait(self, int index, double timeout_s) except -1   # takes the lock for this rank; does not set holder
    cdef int sleep(self, int index, double timeout_s) except -1
    cdef int raise_late(self, int owner, int index, double timeout_s) except -1
    cdef int report_owner(self, int owner, int status, int index) except -1
    cdef str name_of(self, int index)
    cdef int release(self, int index) except -1
