
from .point_to_point cimport Messages


cdef class Comm(Messages):
    cdef object links, segment, arrays, settings
    cdef object internode            # to ranks of other hosts, or None
    cdef readonly object parent_ranks   # None: this is no group, but a world
    cdef readonly int epoch             # how often a communicator of these ranks has become one of fewer
    cdef object __weakref__
    cdef object tracer              # what `trace` has begun last, or None
    cdef object origin, world_ranks  # as tracing.Origin has the world; the ranks there, None for all
    cdef int fd                      # of the segment, for pages of its rings

    cdef object form(self, list members, double timeout_s)
    cdef object frame_of(self, int kind, object item, object root, bint all_give)
    cdef object lost(self)
    cdef int descend_from(self, Comm parent) except -1
    cdef int leave_others(self) except -1
    cdef object begin_trace(self, object path, bint is_automatic)
    cdef object traced_alike(self, Comm group)
    cdef int forget(self) except -1
    cdef int close_descriptor(self) except -1
