
from libc.stdint cimport uint64_t

from .._core.group cimport sr_waitset
from .._engine.progress cimport Pollable
from .matching cimport Matching, Message


cdef struct Wait:
    uint64_t deadline_ns
    uint64_t looked_ns        # time of the last clock reading; 0: none yet
    uint64_t awake_until_ns   # the waiter yields before this time and sleeps after it
    uint64_t poll_ns          # time of the next poll of peers and the deadline
    uint64_t signal_ns
    int culprit               # rank whose end or lateness ends the wait


cdef int deliver_briefly(Matching *m, Message *message) noexcept nogil
cdef int poll_messages(Pollable *e, sr_waitset *waitset) noexcept nogil
cdef int deliver_patiently(Matching *m, Message *message, Wait *wait) noexcept nogil
