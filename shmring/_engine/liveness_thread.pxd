
from .._core.group cimport sr_lane


cdef class ParkedLife:
    cdef sr_lane *lane
    cdef object leave_word, thread
    cdef list kept   # what keeps the lane mapped, until the thread takes it

    cdef int begin(self, sr_lane *lane, object owner) except -1
    cdef int tell(self) except -1
    cdef int leave(self) except -1
