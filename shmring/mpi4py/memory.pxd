cimport cython


@cython.final
cdef class buffer:
    cdef Py_buffer view          # of the object, if it exports the buffer protocol
    cdef object owner            # keeps the memory alive
    cdef char *data
    cdef Py_ssize_t length
    cdef bint is_readonly
    cdef bint is_device          # described as memory of a device, though this process can read it
    cdef str item_format

    cdef int take(self, object source, bint is_written) except -1
    cdef int check_host(self) except -1
    cdef buffer part(self, Py_ssize_t begin, Py_ssize_t end)
    cdef Py_ssize_t place_of(self, object item) except -1
    cdef tuple bounds_of(self, object item)
