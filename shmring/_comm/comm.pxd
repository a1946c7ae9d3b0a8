from .allocation cimport Allocation

cdef int raise_later(object error) except -1


cdef class Comm(Allocation):
    cdef object local_sockets, settings
    cdef object internode            # InterNodeLinks, or None if all ranks are on one host
    cdef readonly object parent_ranks   # None for a world, which is not a group
    cdef readonly int epoch             # number of `shrink`s and `grow`s that led to this communicator
    cdef bint is_unconfirmed            # a new rank of `grow` that does not know whether the old ones go on here
    cdef object __weakref__
    cdef object tracer               # the last Trace that `trace` has begun, or None
    cdef object origin, world_ranks  # the world's Origin; the ranks' numbers in the world, None for all ranks

    cdef object form(self, list members, double timeout_s)
    cdef int pass_settings(self, Comm made) except -1
    cdef object group_of(self, parts, ranks)
    cdef object abort_for_shrink(self)
    cdef object traced_alike(self, Comm group)
    cdef object report_untraced(self, object error)
    cdef bint is_in_use(self) noexcept
    cdef int release_resources(self) except -1
    cdef int close_fd(self) except -1
