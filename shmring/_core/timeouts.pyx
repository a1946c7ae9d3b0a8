# Timeouts, from what Python gives to nanoseconds.

from libc.stdint cimport uint64_t

from .group cimport sr_now_ns


# A bool is none: queue.Queue has its `block` where calls here have their timeout.
cdef double number_of(object timeout) except? -1:
    try:
        if not isinstance(timeout, bool):
            return timeout
    except TypeError:
        pass
    raise TypeError(f"timeout is {timeout!r}; it must be a number of seconds, or None")


cdef double timeout_s_of(double default_s, object timeout) except -1:
    cdef double seconds = default_s if timeout is None else number_of(timeout)
    if not seconds > 0:
        raise ValueError(f"timeout is {timeout!r}; it must be more than 0 seconds")
    return seconds


cdef uint64_t ns_of(double seconds) noexcept nogil:
    return <uint64_t> (min(seconds, 1e9) * 1e9)


cdef uint64_t deadline_ns_of(object timeout) except? 0:
    cdef double seconds
    if timeout is None:
        return NEVER_NS
    seconds = number_of(timeout)
    if not seconds >= 0:
        raise ValueError(f"timeout is {timeout!r}; it must be 0 seconds or more")
    return sr_now_ns() + ns_of(seconds)
