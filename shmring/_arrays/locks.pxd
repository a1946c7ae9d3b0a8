# Locks in shared memory, for who takes many of them without the GIL.

from .._engine.engine cimport Engine


cdef extern from "flag.h" nogil:
    struct sr_lock:
        pass
    bint sr_lock_try(sr_lock *, int rank)
    void sr_lock_leave(sr_lock *)


# See _arrays/locks.pyi.
cdef class Locks:
    cdef Engine engine
    cdef object memory
    cdef sr_lock *first
    cdef unsigned long *holder   # of each, the thread of this rank that has it, once it has said so; 0: none
    cdef readonly int count
    cdef str kind                # what errors call one of them

    cdef int check_open(self) except -1
    cdef int take(self, int index, double timeout_s) except -1
    cdef int wait(self, int index, double timeout_s) except -1   # it is this rank's then; whose thread is not noted
    cdef int be_late(self, int owner, int index, double timeout_s) except -1
    cdef int lament(self, int owner, int status, int index) except -1
    cdef int leave(self, int index) except -1
