
from libc.stdint cimport uint64_t

from .._core.group cimport sr_waitset
from .._engine.progress cimport Pollable
from .matching cimport Matching, Message


cdef struct Wait:
    uint64_t deadline_ns
    uint64_t looked_ns        # when it was looked at the clock last; 0: not yet
    uint64_t awake_until_ns   # yields before, sleeps after
    uint64_t poll_ns          # when to look next at whatever may end the wait otherwise
    uint64_t signal_ns
    int culprit               # whose end or lateness ends it


cdef int deliver_briefly(Matching *m, Message *message) noexcept nogil
cdef int poll_messages(Pollable *e, sr_waitset *waitset) noexcept nogil
cdef int deliver_patiently(Matching *m, Message *message, Wait *wait) noexcept nogil
