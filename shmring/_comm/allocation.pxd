from .point_to_point cimport Messages


cdef class Allocation(Messages):
    cdef object arrays   # the allocator's Arrays

    cdef int begin_arrays(self, object local_sockets, str segment) except -1
