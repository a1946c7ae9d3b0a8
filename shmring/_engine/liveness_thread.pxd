from posix.types cimport pid_t

from .._core.segment cimport sr_lane


cdef extern from "layout.h" nogil:
    ctypedef struct sr_leave "_Atomic uint32_t":
        pass


cdef class ParkedThread:
    cdef sr_lane *lane
    cdef sr_leave leave_word
    cdef pid_t pid           # of the process that has started the thread; 0: none has
    cdef unsigned long ident
    cdef bint has_ended
    cdef object at_end       # a lock, held until the thread has ended
    cdef list kept           # the object that keeps the lane mapped, until the thread takes it

    cdef int begin(self, sr_lane *lane, object owner) except -1
    cdef int hold_word(self) except -1
    cdef int write_stacks(self) except -1
    cdef int leave(self) except -1
