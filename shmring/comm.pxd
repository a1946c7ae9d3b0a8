# May know: _engine, _group.

from libc.stdint cimport uint64_t

from ._engine cimport Engine
from ._group cimport Call


cdef struct Operand:      # one array of a call, held from take() to release()
    Py_buffer view
    bint held
    unsigned char *data
    size_t count, itemsize
    int dtype
    bint fortran


cdef class Comm:
    cdef Engine engine
    cdef object links, segment, arrays
    cdef object __weakref__
    cdef int fd                      # of the segment, until the staging ring has its pages
    cdef int default_algorithm
    cdef uint64_t default_timeout_ns
    cdef bint staging_ready

    cdef int drive(self, Call *c) except -1
    cdef int prepare_staging(self, Call *c) except -1
    cdef int allocate_staging(self) except -1
    cdef int forget(self) except -1
    cdef int close_descriptor(self) except -1
    cdef object describe(self, Call *c, int kind, Operand *a, Operand *b, object x, object out, bint writes,
                         object timeout)
    cdef object describe_all_reduce(self, Call *c, Operand *a, Operand *b, object x, object op, object out,
                                    object algorithm, object timeout)
    cdef object describe_broadcast(self, Call *c, Operand *a, Operand *b, object x, object root, object out,
                                   object timeout)
    cdef int describe_barrier(self, Call *c, object timeout) except -1


cdef class Plan:
    cdef Comm comm
    cdef Call c
    cdef Operand a, b
    cdef object kept, arrays
