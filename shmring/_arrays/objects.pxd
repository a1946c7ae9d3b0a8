from libc.stdint cimport uint64_t

cdef enum:
    PROTOCOL = 5             # of pickles
    PROTOCOL_OPCODE = 0x80   # the first byte of every pickle

cpdef list pieces_of(object item)
cpdef object pack(object item)
cdef object pickled(object item, object leave_out)
cpdef object unpack(object frame)
cpdef object as_array(object frame)
cdef object bytes_room(uint64_t nbytes)
