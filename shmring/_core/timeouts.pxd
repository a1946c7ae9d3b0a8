# Timeouts: the conversion from the seconds that Python passes to nanoseconds.

from libc.stdint cimport uint64_t

from .segment cimport sr_now_ns


cdef extern from "<stdint.h>" nogil:
    const uint64_t NEVER_NS "UINT64_MAX"   # a deadline that never comes


# The timeout as a number of seconds. Rejects bool: queue.Queue.put(x, block) takes a bool in the position in which
# calls here take their timeout. Raises TypeError.
cdef inline double timeout_as_number(object timeout) except? -1:
    try:
        if not isinstance(timeout, bool):
            return timeout
    except TypeError:
        pass
    raise TypeError(f"timeout is {timeout!r}; it must be a number of seconds, or None")


# Seconds, more than 0; default_s for None. Raises TypeError or ValueError.
cdef inline double timeout_s_of(double default_s, object timeout) except -1:
    cdef double seconds = default_s if timeout is None else timeout_as_number(timeout)
    if not seconds > 0:
        raise ValueError(f"timeout is {timeout!r}; it must be more than 0 seconds")
    return seconds


# Seconds as nanoseconds. Values above 1e9 s (about 32 years) become 1e9 s, so that the product fits into 64 bits.
cdef inline uint64_t ns_of(double seconds) noexcept nogil:
    return <uint64_t> (min(seconds, 1e9) * 1e9)


# A call's timeout in nanoseconds; default_ns for None. Raises TypeError or ValueError.
cdef inline uint64_t timeout_ns_of(uint64_t default_ns, object timeout) except? 0:
    return default_ns if timeout is None else ns_of(timeout_s_of(0, timeout))


# The timeout of a wait in nanoseconds, from seconds, which may be 0. Raises TypeError or ValueError.
cdef inline uint64_t wait_ns_of(object timeout) except? 0:
    cdef double seconds = timeout_as_number(timeout)
    if not seconds >= 0:
        raise ValueError(f"timeout is {timeout!r}; it must be 0 seconds or more")
    return ns_of(seconds)


# The time of CLOCK_MONOTONIC, in nanoseconds, at which a wait that begins now ends. NEVER_NS for None. Raises
# TypeError or ValueError.
cdef inline uint64_t deadline_ns_of(object timeout) except? 0:
    return NEVER_NS if timeout is None else sr_now_ns() + wait_ns_of(timeout)
