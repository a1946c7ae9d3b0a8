from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from .channel cimport sr_channels, sr_channel


cdef class Channels:
    cdef sr_channels *channels
    cdef sr_channel *channel
    cdef void *memory             # of the rings, and of data that sockets did not accept yet
    cdef size_t memory_nbytes
    cdef object socks, news
    cdef int waker
    cdef dict number_of           # number of the channel by rank

    cdef int allocate(self, int nchannels, size_t room_nbytes) except -1
    cdef bint is_delivering(self, uint64_t cut_ns)
    cdef sr_channel *channel_of(self, int rank) except NULL
