# May know: _group.

from libc.stdint cimport uint32_t, uint64_t

from ._group cimport Group


cdef class State:
    cdef Group g
    cdef readonly double timeout_s        # default of every call
    cdef uint64_t first_user_seq
    cdef object segment                   # keeps the mapping alive

    cdef bint find_block(self, const void *address, size_t nbytes, uint32_t *block, uint64_t *offset) noexcept
