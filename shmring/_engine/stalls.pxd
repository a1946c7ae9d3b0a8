
from libc.stdint cimport uint64_t

cdef enum:
    MOST_PLACES = 4   # where waits may be under way at the same time, see enum sr_wait_place


cdef class Stalls:
    cdef uint64_t limit_ns
    cdef uint64_t[MOST_PLACES] since_ns
    cdef uint64_t[MOST_PLACES] next_ns   # by place: of the wait that is under way

    cdef int heed(self, object engine, int place) except -1
