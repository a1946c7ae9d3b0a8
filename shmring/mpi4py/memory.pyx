"""Memory as callers give it: `MPI.buffer`, and the constants that stand in its place."""

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from libc.stdint cimport uint8_t, uintptr_t
from libc.string cimport memmove, memset

cimport cython

import operator

import numpy as np

from . import device_arrays


@cython.final
@cython.freelist(8)
cdef class Source:
    """The owner of memory, which all buffers and views of the memory share."""

    def __dealloc__(self):
        PyBuffer_Release(&self.view)
        self.owner = None   # here an exception that is on its way survives the destructor of a DLPack capsule


@cython.final
cdef class buffer:
    """Contiguous memory: a one-dimensional array of bytes that exports the buffer protocol."""

    def __cinit__(self, *_):
        self.item_format = "B"

    def __init__(self, *args):
        if args:
            self.take(args[0], False)

    cdef int take(self, object given, bint is_written) except -1:
        cdef int flags = PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT
        cdef Source source = Source.__new__(Source)
        cdef Py_buffer *view = &source.view
        if PyObject_CheckBuffer(given):
            PyObject_GetBuffer(given, view, flags | PyBUF_WRITABLE if is_written else flags)
            source.owner = given
            self.data, self.length, self.is_readonly = <char *> view.buf, view.len, view.readonly
            if view.format != NULL:
                self.item_format = (<bytes> view.format).decode()
        else:
            found = device_arrays.describe(given)
            source.owner = found.owner
            self.data, self.length = <char *> <uintptr_t> found.address, found.nbytes
            self.is_readonly, self.is_device, self.item_format = found.readonly, found.is_device, found.format
        self.source = source
        if is_written and self.is_readonly:
            raise BufferError("the memory is read-only, and this call writes to it")
        return 0

    cdef int check_host(self) except -1:
        if self.is_device:
            raise BufferError("this is memory of a device; copy it to the host for this")
        return 0

    cdef buffer part(self, Py_ssize_t begin, Py_ssize_t end):
        cdef buffer new = buffer.__new__(buffer)
        new.source, new.is_readonly, new.is_device = self.source, self.is_readonly, self.is_device
        new.data, new.length = self.data + begin, end - begin
        return new

    @staticmethod
    def allocate(nbytes, bint clear=False):
        """Return new memory of `nbytes` bytes, set to zero if `clear`."""
        cdef buffer new = buffer.__new__(buffer)
        if operator.index(nbytes) < 0:
            raise ValueError(f"nbytes is {nbytes}; it must not be negative")
        new.take(np.zeros(nbytes, np.uint8) if clear else np.empty(nbytes, np.uint8), False)
        return new

    @staticmethod
    def frombuffer(obj, bint readonly=False):
        """Return the memory of an object that exports it."""
        cdef buffer new = buffer.__new__(buffer)
        new.take(obj, False)
        new.is_readonly = new.is_readonly or readonly
        new.item_format = "B"
        return new

    @staticmethod
    def fromaddress(address, Py_ssize_t nbytes, bint readonly=False):
        """Return `nbytes` bytes at an address. The caller keeps the memory alive."""
        cdef buffer new = buffer.__new__(buffer)
        if nbytes < 0 or nbytes > 0 and not address:
            raise ValueError(f"{nbytes} bytes at address {address}: neither may be negative, nor the address 0")
        new.data, new.length, new.is_readonly = <char *> <uintptr_t> address, nbytes, readonly
        return new

    def toreadonly(self):
        """Return the same memory, read-only."""
        cdef buffer new = self.part(0, self.length)
        new.is_readonly = True
        return new

    def cast(self, format, shape=None):
        """Return a memoryview of the memory, of another format and shape."""
        self.check_host()
        view = memoryview(self).cast("B")
        return view.cast(format) if shape is None else view.cast(format, shape)

    def tobytes(self, order=None):
        """Return a copy as bytes."""
        self.check_host()
        return self.data[:self.length]

    def release(self):
        """Give the memory back; this buffer is empty afterwards. Other buffers and views of the memory stay valid."""
        self.source, self.data, self.length = None, NULL, 0
        self.is_readonly = self.is_device = False

    @property
    def address(self):
        return <uintptr_t> self.data

    @property
    def obj(self):
        owner = None if self.source is None else self.source.owner
        return (<buffer> owner).obj if isinstance(owner, buffer) else owner

    @property
    def nbytes(self):
        return self.length

    @property
    def readonly(self):
        return self.is_readonly

    @property
    def format(self):
        return "B"

    @property
    def itemsize(self):
        return 1

    def __len__(self):
        return self.length

    def __getitem__(self, item):
        self.check_host()
        if isinstance(item, slice):
            begin, end = self.bounds_of(item)
            return self.part(begin, end)
        return <uint8_t> self.data[self.place_of(item)]

    def __setitem__(self, item, value):
        cdef Py_ssize_t begin, end
        cdef buffer given
        self.check_host()
        if self.is_readonly:
            raise TypeError("this buffer is read-only")
        if not isinstance(item, slice):
            self.data[self.place_of(item)] = <char> <uint8_t> value
            return
        begin, end = self.bounds_of(item)
        if isinstance(value, int):
            memset(self.data + begin, <uint8_t> value, end - begin)
            return
        given = buffer(value)
        if given.length != end - begin:
            raise ValueError(f"the slice has {end - begin} bytes, the value has {given.length}")
        memmove(self.data + begin, given.data, given.length)

    def __delitem__(self, item):
        raise NotImplementedError("memory has no items to delete")

    cdef Py_ssize_t place_of(self, object item) except -1:
        cdef Py_ssize_t index = operator.index(item)
        if index < 0:
            index += self.length
        if not 0 <= index < self.length:
            raise IndexError("index out of range")
        return index

    cdef tuple bounds_of(self, object item):
        begin, end, step = item.indices(self.length)
        if step != 1:
            raise IndexError("a slice of memory has step 1")
        return begin, max(begin, end)

    def __getbuffer__(self, Py_buffer *view, int flags):
        self.check_host()
        exporter = self if self.source is None else self.source
        PyBuffer_FillInfo(view, exporter, self.data, self.length, self.is_readonly, flags)


cdef class _Constant:
    """A constant in place of memory: an address without bytes."""

    cdef int number
    cdef str name

    def __eq__(self, other):
        return self.number == int(other) if isinstance(other, (int, _Constant)) else False

    def __hash__(self):
        return hash(self.number)

    def __bool__(self):
        return self.number != 0

    def __int__(self):
        return self.number

    def __repr__(self):
        return self.name

    def __reduce__(self):
        return self.name

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, <void *> <uintptr_t> self.number, 0, False, flags)
        view.obj = None   # so that memoryview(constant).obj is None


@cython.final
cdef class BottomType(_Constant):
    """Type of BOTTOM."""

    def __cinit__(self):
        self.number, self.name = 0, "BOTTOM"

    def __index__(self):
        return self.number


@cython.final
cdef class InPlaceType(_Constant):
    """Type of IN_PLACE."""

    def __cinit__(self):
        self.number, self.name = -1, "IN_PLACE"


@cython.final
cdef class BufferAutomaticType(_Constant):
    """Type of BUFFER_AUTOMATIC."""

    def __cinit__(self):
        self.number, self.name = -2, "BUFFER_AUTOMATIC"


BOTTOM = BottomType()
IN_PLACE = InPlaceType()
BUFFER_AUTOMATIC = BufferAutomaticType()


def get_address(location):
    """Return the address of an object's memory, or of a constant."""
    return int(location) if isinstance(location, _Constant) else buffer(location).address
