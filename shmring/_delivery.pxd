# May know: _messages.

from libc.stdint cimport uint64_t

from ._messages cimport Mail, Message


cdef struct Wait:
    uint64_t deadline_ns
    uint64_t awake_until_ns   # yields before, sleeps after
    uint64_t look_ns          # when to look next at whatever may end the wait otherwise
    uint64_t signal_ns
    int culprit               # whose end or lateness ends it


cdef int deliver_briefly(Mail *m, Message *message) noexcept nogil
cdef int deliver_patiently(Mail *m, Message *message, Wait *wait) noexcept nogil
