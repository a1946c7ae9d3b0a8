from .fused cimport FusedCollectives
from .objects cimport Slots


cdef class ObjectCollectives(FusedCollectives):
    cdef Slots slots   # None before the first call

    cdef Slots slots_of_objects(self)
    cdef object frame_of(self, int kind, object item, object root, bint all_give)
