from libc.stdint cimport int32_t, int64_t

cimport cython

from .._core cimport numpy_api as cnp


cdef enum:   # as MPI numbers them; shmring has -1 for any source and any tag
    ANY_PEER = -2
    NO_PEER = -1
    WILD_TAG = -1
    MOST_TAG = 0x7fffffff
    UNDEFINED = -32766


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

    cdef int take(self, object given, bint is_written, bint has_format=*) except -1
    cdef int check_host(self) except -1
    cdef buffer part(self, Py_ssize_t begin, Py_ssize_t end)
    cdef Py_ssize_t place_of(self, object item) except -1
    cdef tuple bounds_of(self, object item)


cdef class Handle:
    cdef public object _ref       # shared by the copies of the handle; None: the null handle
    cdef object __weakref__


cdef class TypeInfo:
    cdef readonly Py_ssize_t size, extent
    cdef readonly cnp.dtype dtype
    cdef readonly str constant, letter, code
    cdef readonly object ops      # names of the reductions that shmring has for the dtype
    cdef readonly object made     # how the program made it: combiner, datatype, arguments; None: predefined
    cdef readonly object layout   # places of its bytes; None: predefined
    cdef readonly bint has_gaps   # its bytes are copied to contiguous memory to be sent, and back when received
    cdef readonly TypeInfo packed   # of items in that memory
    cdef public object basic      # the datatype that it is made of, or None; NotImplemented: not asked yet
    cdef public object name, attributes
    cdef object __weakref__


cdef class Status:
    cdef int32_t[4] fields   # source, tag, error, cancelled
    cdef int64_t nbytes
    cdef object __weakref__

    cdef void set(self, int source, int tag, int64_t nbytes) noexcept
    cdef void copy(self, Status other) noexcept


cdef class Data:
    cdef object owner
    cdef cnp.ndarray whole       # the caller's array, if it is the memory and has one dimension
    cdef char *data
    cdef readonly Py_ssize_t count, length
    cdef int blocks
    cdef readonly bint readonly
    cdef readonly TypeInfo type
    cdef list copies             # of items with gaps: (layout, the memory with the items, the copy, the count)

    cdef Py_ssize_t nbytes(self) noexcept
    cdef object moved(self)
    cdef object reduced(self)
    cdef object block(self, int number)
    cdef object reduced_block(self, int number)
    cdef int take(self, object given, object datatype, bint is_written) except -1
    cdef int place(self, object count, object displ, int blocks) except -1
    cdef int place_copy(self, object count, object displ, int blocks) except -1
    cdef object copy_of(self, Py_ssize_t displ, Py_ssize_t count, TypeInfo info)
    cdef object stretch(self, Py_ssize_t begin, Py_ssize_t end)
    cdef bint is_address(self) noexcept
    cdef bint has_bytes(self, Py_ssize_t begin, Py_ssize_t end) except -1


cdef object new_handle(object cls, object ref)   # of a class of handles
cdef Data data_of(object spec, bint is_written, int blocks=*)
cdef Data without_gaps(Data data)
cdef cnp.ndarray bytes_at(char *data, Py_ssize_t count, object owner, bint readonly)


# Return an integer, or an object with __index__, as a C integer.
cdef inline Py_ssize_t index_of(object number) except? -1:
    return number


# Return a number that is an argument of its own, not an item of a list: as in mpi4py, a float loses its fraction.
cdef inline int64_t int_of(object number) except? -1:
    return number
