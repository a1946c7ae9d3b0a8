# Timeouts, from what Python gives to nanoseconds.

from libc.stdint cimport uint64_t


cdef extern from "<stdint.h>" nogil:
    const uint64_t NEVER_NS "UINT64_MAX"   # a deadline that does not come


# Seconds, more than 0; default_s for None. TypeError, ValueError.
cdef double timeout_s_of(double default_s, object timeout) except -1

# As nanoseconds; very long ones are cut to some thirty years.
cdef uint64_t ns_of(double seconds) noexcept nogil


# Both, for the calls of a communicator.
cdef inline uint64_t timeout_ns_of(uint64_t default_ns, object timeout) except? 0:
    return default_ns if timeout is None else ns_of(timeout_s_of(0, timeout))


# The clock's nanoseconds at the end of a wait of 0 seconds or more; NEVER_NS for None. TypeError, ValueError.
cdef uint64_t deadline_ns_of(object timeout) except? 0
