# May know: fusion.

from .fusion cimport Fusion


cdef class Comm(Fusion):
    cdef object links, segment, arrays, settings
    cdef readonly object parent_ranks   # None: this is no group, but a world
    cdef object __weakref__
    cdef int fd                      # of the segment, until the staging ring has its pages

    cdef object form(self, list members, double timeout_s)
    cdef object frame_of(self, int kind, object item, object root, bint all_give)
    cdef int forget(self) except -1
    cdef int close_descriptor(self) except -1
