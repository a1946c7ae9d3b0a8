cimport cython


# The owner of memory. All buffers over the memory share it, and so do views that others take of them: the memory stays
# until the last of these is gone, also if it is freed before.
@cython.final
cdef class Source:
    cdef Py_buffer view          # of the owner, if it exports the buffer protocol
    cdef object owner


@cython.final
cdef class buffer:
    cdef Source source           # None once the memory is released, and if the caller keeps the memory alive
    cdef char *data
    cdef Py_ssize_t length
    cdef bint is_readonly
    cdef bint is_device          # described as memory of a device, though this process can read it
    cdef str item_format

    cdef int take(self, object given, bint is_written) except -1
    cdef int check_host(self) except -1
    cdef buffer part(self, Py_ssize_t begin, Py_ssize_t end)
    cdef Py_ssize_t place_of(self, object item) except -1
    cdef tuple bounds_of(self, object item)
