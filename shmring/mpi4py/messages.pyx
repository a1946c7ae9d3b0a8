"""Memory as callers give it, handles, datatypes, statuses, and the specifications of messages.

A specification (`buf`, `[buf, count]`, `[buf, (count, displ), type]` and so on) becomes a `Data`: an address, a number
of items and a datatype. `Data` is handed to shmring as a NumPy array over the same memory: as bytes where a call only
moves it, and with the datatype's dtype where a call reduces it.
"""

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.object cimport Py_EQ, Py_NE, PyObject
from cpython.pyport cimport PY_SSIZE_T_MAX
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.string cimport memcpy, memmove, memset

cimport cython

from .._core cimport numpy_api as cnp

import operator

import numpy as np

from . import device_arrays, errors, layouts

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(PyObject *kind, cnp.dtype descr, int nd, const cnp.npy_intp *dims,
                                const cnp.npy_intp *strides, void *data, int flags, PyObject *base)
    PyObject PyArray_Type
    int PyArray_SetBaseObject(cnp.ndarray array, object base) except -1

cdef extern from "Python.h":
    ctypedef struct TypeObject "PyTypeObject":
        object (*tp_new)(TypeObject *cls, PyObject *arguments, PyObject *keywords)

cdef cnp.dtype U8 = np.dtype(np.uint8)
cdef tuple NOTHING = ()
cdef dict types_by_code = {}     # "i", "f8", ... to Datatype
cdef list types_by_number = [None] * 32   # NumPy's number of a dtype to Datatype
cdef object byte_type            # set by `register_types`


def register_types(by_code, by_number, byte):
    """Make the datatypes known that this module needs."""
    global byte_type
    types_by_code.update(by_code)
    for number, datatype in by_number.items():
        types_by_number[number] = datatype
    byte_type = byte


# ---- memory: `MPI.buffer`, and the constants that stand in its place -------------------------------------------------

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

    # has_format: get the format of the items. An array of datetime64 has none, but can be sent as another datatype.
    cdef int take(self, object given, bint is_written, bint has_format=False) except -1:
        cdef int flags = PyBUF_ANY_CONTIGUOUS | (PyBUF_FORMAT if has_format else 0)
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


# ---- handles -----------------------------------------------------------------------------------------------------

cdef class Handle:
    """A reference to an object of MPI. Copies of a handle are equal, and refer to the same object."""

    def __cinit__(self, other=None):
        if other is None:
            return
        if not isinstance(other, self._family):
            raise TypeError(f"{type(self).__name__}() takes a {self._family[0].__name__}, not {type(other).__name__}")
        self._check_ref((<Handle> other)._ref)
        self._ref = (<Handle> other)._ref

    def __bool__(self):
        return self._ref is not None

    def __richcmp__(self, other, int how):
        if how != Py_EQ and how != Py_NE or not isinstance(other, self._family):
            return NotImplemented
        return (self._ref is (<Handle> other)._ref) == (how == Py_EQ)

    __hash__ = None


cdef class MemoryHandle(Handle):
    """A handle of an object with memory, which it exports by the buffer protocol."""

    def tomemory(self):
        """Return the memory."""
        raise NotImplementedError

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyObject_GetBuffer(self.tomemory(), view, flags)


cdef class TypeInfo:
    """A datatype: its size, the distance of two items in memory, and the dtype that NumPy has for it."""

    def __init__(self, size, dtype, constant, letter, code, name, ops, made=None, layout=None):
        self.size, self.extent, self.dtype = size, dtype.itemsize, dtype
        self.constant, self.letter, self.code, self.name, self.ops = constant, letter, code, name, ops
        self.made, self.layout, self.basic = made, layout, NotImplemented
        if layout is not None and (
                not layout.is_dense or layout.offsets[0] or layout.lb or dtype.itemsize < layout.nbytes):
            self.has_gaps, self.extent = True, layout.extent
            self.packed = TypeInfo(layout.nbytes, U8, constant, letter, code, name, ops, made)
            self.packed.extent = layout.nbytes


cdef class Status:
    """Properties of a message that was received or probed."""

    def __cinit__(self, status=None):
        if status is None:
            self.set(ANY_PEER, WILD_TAG, 0)
        elif isinstance(status, Status):
            self.copy(status)
        else:
            raise TypeError(f"Status() takes a Status, not {type(status).__name__}")

    cdef void set(self, int source, int tag, int64_t nbytes) noexcept:
        self.fields[0], self.fields[1], self.fields[2], self.fields[3] = source, tag, 0, 0
        self.nbytes = nbytes

    cdef void copy(self, Status other) noexcept:
        memcpy(self.fields, other.fields, sizeof(self.fields))
        self.nbytes = other.nbytes

    def __richcmp__(self, other, int how):
        if how != Py_EQ and how != Py_NE or not isinstance(other, Status):
            return NotImplemented
        return (self.__getstate__() == other.__getstate__()) == (how == Py_EQ)

    __hash__ = None

    def __reduce__(self):
        return type(self), (), self.__getstate__()

    def __getstate__(self):
        return {"source": self.source, "tag": self.tag, "error": self.error, "count": self.nbytes,
                "cancelled": self.cancelled}

    def __setstate__(self, state):
        for name, value in state.items():
            setattr(self, name, value)

    def Get_count(self, datatype=None):
        """Return the number of items of a datatype in the message; UNDEFINED if it is no whole number."""
        cdef TypeInfo info = type_of(byte_type if datatype is None else datatype)
        cdef Py_ssize_t nbytes = sent_nbytes_of(info)
        if nbytes == 0:
            return UNDEFINED if self.nbytes else 0
        return self.nbytes // nbytes if self.nbytes % nbytes == 0 else UNDEFINED

    def Get_elements(self, datatype):
        """Return the number of basic elements of a datatype in the message."""
        cdef TypeInfo info = type_of(datatype)
        count = self.Get_count(datatype)
        if count != UNDEFINED:
            return count * elements_of(info)
        if info.layout is not None and info.layout.basic:
            return self.nbytes // info.layout.basic if self.nbytes % info.layout.basic == 0 else UNDEFINED
        ends = np.cumsum(layouts.sizes_of_elements(info))
        if not len(ends):
            return UNDEFINED
        whole, rest = divmod(self.nbytes, int(ends[len(ends) - 1]))
        last = int(np.searchsorted(ends, rest))
        return whole * elements_of(info) + last + 1 if ends[last] == rest else UNDEFINED

    def Set_elements(self, datatype, count):
        """Set the number of elements."""
        cdef TypeInfo info = type_of(datatype)
        if info.layout is not None and info.layout.basic:
            self.nbytes = int_of(count) * info.layout.basic
            return
        whole, rest = divmod(int_of(count), elements_of(info))
        self.nbytes = whole * sent_nbytes_of(info)
        if rest:
            self.nbytes += int(layouts.sizes_of_elements(info)[:rest].sum())

    def tomemory(self):
        """Return the fields as integers in memory, which may be changed."""
        cdef buffer memory = buffer.__new__(buffer)
        memory.source = Source.__new__(Source)
        memory.source.owner, memory.data, memory.length = self, <char *> self.fields, sizeof(self.fields)
        return memory.cast("i")

    def py2f(self):
        """Return the fields as a list of integers."""
        return [self.source, self.tag, self.error, self.fields[3], self.nbytes & 0x7fffffff, self.nbytes >> 31]

    @classmethod
    def f2py(cls, arg):
        """Return the status of a list of integers."""
        status = cls()
        status.source, status.tag, status.error, status.cancelled = arg[:4]
        status.count = arg[4] | arg[5] << 31
        return status

    def Get_source(self):
        """Return the sender's rank."""
        return self.fields[0]

    def Set_source(self, source):
        """Set the sender's rank."""
        self.fields[0] = int32_of(source)

    def Get_tag(self):
        """Return the tag."""
        return self.fields[1]

    def Set_tag(self, tag):
        """Set the tag."""
        self.fields[1] = int32_of(tag)

    def Get_error(self):
        """Return the error class."""
        return self.fields[2]

    def Set_error(self, error):
        """Set the error class."""
        self.fields[2] = int32_of(error)

    def Is_cancelled(self):
        """Return whether the call was cancelled."""
        return self.fields[3] != 0

    def Set_cancelled(self, flag):
        """Set whether the call was cancelled."""
        self.fields[3] = bool(flag)

    def _set_count(self, count):
        self.nbytes = int_of(count)

    source = property(Get_source, Set_source, doc="The sender's rank.")
    tag = property(Get_tag, Set_tag, doc="The tag.")
    error = property(Get_error, Set_error, doc="The error class.")
    count = property(Get_count, _set_count, doc="The number of bytes.")
    cancelled = property(Is_cancelled, Set_cancelled, doc="Whether the call was cancelled.")


# Return a number as an int of C; see int_of.
cdef int32_t int32_of(object number) except? -1:
    cdef int64_t value = int_of(number)
    if value != <int32_t> value:
        raise OverflowError(f"{number} is too large for an int of C")
    return <int32_t> value


def integer_of(number):
    """Return a number that is an argument of its own as an int: as in mpi4py, a float loses its fraction."""
    return int_of(number)


# Return the bytes of an item in a message.
cdef inline Py_ssize_t sent_nbytes_of(TypeInfo info) noexcept:
    return info.packed.extent if info.has_gaps else info.extent


# Return the number of basic elements of an item: 2 for a pair.
cdef Py_ssize_t elements_of(TypeInfo info) except -1:
    if info.layout is not None:
        return info.layout.elements or 1
    cdef object dtype = info.dtype   # NumPy's declarations in Cython fail for a dtype without names
    return len(dtype.names or (None,))


cdef TypeInfo type_of(object datatype):
    if not isinstance(datatype, Handle) or not isinstance((<Handle> datatype)._ref, TypeInfo):
        raise errors.Exception(errors.ERR_TYPE) if datatype == type(byte_type)() else TypeError(
            f"a Datatype is needed, not {type(datatype).__name__}")
    return (<Handle> datatype)._ref


def handle(cls, ref):
    """Return a new handle of a class."""
    return new_handle(cls, ref)


cdef object new_handle(object cls, object ref):
    cdef Handle new = (<TypeObject *> cls).tp_new(<TypeObject *> cls, <PyObject *> NOTHING, NULL)
    new._ref = ref
    return new


# ---- specifications of messages ----------------------------------------------------------------------------------

cdef cnp.ndarray view_of(char *data, Py_ssize_t count, cnp.dtype dtype, object owner, bint readonly):
    cdef cnp.npy_intp extent = count
    cdef cnp.ndarray view
    Py_INCREF(dtype)
    view = PyArray_NewFromDescr(&PyArray_Type, dtype, 1, &extent, NULL, data,
                                cnp.NPY_ARRAY_C_CONTIGUOUS if readonly else cnp.NPY_ARRAY_CARRAY, NULL)
    if owner is not None:
        Py_INCREF(owner)
        PyArray_SetBaseObject(view, owner)
    return view


cdef cnp.ndarray bytes_at(char *data, Py_ssize_t count, object owner, bint readonly):
    return view_of(data, count, U8, owner, readonly)


@cython.final
@cython.freelist(16)
cdef class Data:
    """The memory that a specification describes: items of a type, `count` in each of several blocks."""

    cdef Py_ssize_t nbytes(self) noexcept:
        return self.count * self.blocks * self.type.extent

    cdef object moved(self):
        return view_of(self.data, self.nbytes(), U8, self.owner, self.readonly)

    cdef object reduced(self):
        if self.whole is not None:
            return self.whole
        return view_of(self.data, self.count * self.blocks, self.type.dtype, self.owner, self.readonly)

    cdef object block(self, int number):
        cdef Py_ssize_t nbytes = self.count * self.type.extent
        return view_of(self.data + number * nbytes, nbytes, U8, self.owner, self.readonly)

    cdef object reduced_block(self, int number):
        return view_of(self.data + number * self.count * self.type.extent, self.count, self.type.dtype, self.owner,
                       self.readonly)

    # Return a copy of the bytes of `count` items with gaps, the first of them at byte `displ`; note it for `restore`.
    cdef object copy_of(self, Py_ssize_t displ, Py_ssize_t count, TypeInfo info):
        if count < 0:
            raise ValueError(f"the count is {count}; it must not be negative")
        begin, end = info.layout.bounds(count)
        region = self.stretch(displ + begin, displ + end)
        copy = info.layout.gather(region, count)
        if self.copies is None:
            self.copies = []
        self.copies.append((info.layout, region, copy, count))
        return copy

    def restore(self, nbytes=None):
        """Copy items back to their places in the caller's memory, when they have been received.

        nbytes: the number of bytes that were received, where these may be fewer and there is one block.
        """
        for layout, region, copy, count in self.copies:
            layout.scatter(copy[:nbytes], region, count)

    @property
    def finish(self):
        return None if self.copies is None else self.restore

    @property
    def layout(self):
        return None if self.copies is None else self.copies[0][0]

    @property
    def bytes(self):
        return self.moved()

    @property
    def items(self):
        return self.reduced()

    def part(self, Py_ssize_t displ, Py_ssize_t nbytes):
        """Return `nbytes` bytes from byte `displ` on, as an array."""
        if nbytes < 0 or displ > PY_SSIZE_T_MAX - nbytes:
            raise ValueError(f"{nbytes} bytes at byte {displ} are not in the buffer, which has {self.length}")
        return self.stretch(displ, displ + nbytes)

    # Return the bytes of the buffer between two places as an array. No bytes may be anywhere: MPI ignores the
    # displacement of a part without items.
    cdef object stretch(self, Py_ssize_t begin, Py_ssize_t end):
        if begin == end:
            return view_of(self.data, 0, U8, self.owner, self.readonly)
        if begin < 0 and end > PY_SSIZE_T_MAX + begin:
            raise ValueError(f"bytes {begin} to {end} are more than memory has")
        if (begin < 0 or end > self.length) and not self.has_bytes(begin, end):
            raise ValueError(f"{end - begin} bytes at byte {begin} are not in the buffer, which has {self.length}")
        return view_of(self.data + begin, end - begin, U8, self.owner, self.readonly)

    # Return whether there is memory beyond the buffer: the array that it is a part of, or any at an address without
    # a length, as BOTTOM is.
    cdef bint has_bytes(self, Py_ssize_t begin, Py_ssize_t end) except -1:
        cdef object array = self.owner
        cdef Py_ssize_t before
        if array is None or self.is_address():
            if end > begin:
                device_arrays.check_readable(<uintptr_t> self.data + begin, end - begin)
            return True
        while cnp.PyArray_CheckExact(array) and cnp.PyArray_CheckExact((<cnp.ndarray> array).base):
            array = (<cnp.ndarray> array).base
        if array is self.owner or not array.flags.forc:
            return False
        before = self.data - <char *> cnp.PyArray_DATA(array)
        return begin >= -before and end <= cnp.PyArray_NBYTES(array) - before

    # Return whether the memory is an address without a length, as that of `buffer.fromaddress(address, 0)`.
    cdef bint is_address(self) noexcept:
        cdef buffer memory
        if not isinstance(self.owner, buffer):
            return False
        memory = self.owner
        while memory.source is not None and isinstance(memory.source.owner, buffer):
            memory = memory.source.owner
        return memory.source is None and memory.length == 0 and memory.data != NULL

    # Take the memory; set the type to that of the memory unless one is given.
    cdef int take(self, object given, object datatype, bint is_written) except -1:
        cdef buffer memory
        cdef cnp.ndarray array
        if cnp.PyArray_CheckExact(given):
            array = given
            known = types_by_number[cnp.PyArray_TYPE(array)] if cnp.PyArray_TYPE(array) < 32 else None
            if known is not None and cnp.PyArray_CHKFLAGS(array, cnp.NPY_ARRAY_C_CONTIGUOUS) and (
                    not is_written or cnp.PyArray_ISWRITEABLE(array)) and cnp.PyArray_ISNOTSWAPPED(array):
                self.owner, self.data = array, <char *> cnp.PyArray_DATA(array)
                self.length = cnp.PyArray_NBYTES(array)
                self.readonly = not cnp.PyArray_ISWRITEABLE(array)
                self.type = (<Handle> known)._ref if datatype is None else resolved(datatype)
                return 0
        if given is None or given is BOTTOM:
            self.type = resolved(byte_type if datatype is None else datatype)
            return 0
        if cnp.PyArray_Check(given) and datatype is not None and given.dtype.hasobject:
            raise TypeError("an array of Python objects is no message: send the array itself by a call in lower case")
        memory = buffer.__new__(buffer)
        memory.take(given, is_written, datatype is None)
        self.owner, self.data, self.length = memory, memory.data, memory.length
        self.readonly = memory.is_readonly
        if datatype is None:
            self.type = type_of_format(memory.item_format, not PyObject_CheckBuffer(given))
        else:
            self.type = resolved(datatype)
        return 0

    # Set the count, and move to the displacement, in items.
    cdef int place(self, object count, object displ, int blocks) except -1:
        cdef Py_ssize_t extent = self.type.extent, items, first
        self.blocks = blocks
        if self.type.has_gaps:
            return self.place_copy(count, displ, blocks)
        if displ is not None:
            first = index_of(displ)
            if first < 0 or first > self.length // extent:
                raise ValueError(f"the displacement is {first}; the buffer has {self.length // extent} items")
            self.data += first * extent
            self.length -= first * extent
        if count is None:
            if self.length % (extent * blocks):
                raise ValueError(f"the buffer has {self.length} bytes, not a multiple of {blocks} blocks of items of "
                                 f"{extent} bytes")
            self.count = self.length // extent // blocks
        else:
            items = index_of(count)
            if items < 0 or items > self.length // extent // blocks and not (
                    self.is_address() and items <= PY_SSIZE_T_MAX // (blocks * extent) and (
                        self.has_bytes(0, items * blocks * extent))):
                raise ValueError(f"the count is {items}; the buffer has {self.length // extent} items" +
                                 (f" for {blocks} ranks" if blocks > 1 else ""))
            self.count = items
        if cnp.PyArray_CheckExact(self.owner) and cnp.PyArray_NDIM(self.owner) == 1 and (
                cnp.PyArray_NBYTES(self.owner) == self.nbytes()) and (
                (<cnp.ndarray> self.owner).dtype is self.type.dtype):
            self.whole = self.owner
        return 0

    # As `place`, for a type with gaps. From here on this is the memory of the copy.
    cdef int place_copy(self, object count, object displ, int blocks) except -1:
        cdef Py_ssize_t extent = self.type.extent, first = 0 if displ is None else operator.index(displ) * extent
        cdef cnp.ndarray copy
        if count is not None:
            self.count = index_of(count)
        elif self.owner is not None:
            self.count = whole_count(self.length - first, <object> extent * blocks)
        if self.count < 0:
            raise ValueError(f"the count is {self.count}; it must not be negative")
        copy = self.copy_of(first, <object> self.count * blocks, self.type)
        self.owner, self.data, self.length = copy, <char *> cnp.PyArray_DATA(copy), cnp.PyArray_NBYTES(copy)
        self.readonly, self.type = False, self.type.packed
        return 0


# Return how many items there are in memory, of which items take `nbytes` each.
cdef Py_ssize_t whole_count(Py_ssize_t length, Py_ssize_t nbytes) except -1:
    if length < 0 or nbytes <= 0 or length % nbytes:
        raise ValueError(f"the buffer has {length} bytes, not a multiple of {nbytes}: give the count")
    return length // nbytes


cdef TypeInfo resolved(object datatype):
    if isinstance(datatype, str):
        datatype = types_by_code[datatype]
    if not isinstance(datatype, Handle):
        raise TypeError(f"a Datatype or its code is needed, not {type(datatype).__name__}")
    if not isinstance((<Handle> datatype)._ref, TypeInfo):
        raise ValueError("the datatype of a message must not be DATATYPE_NULL")
    return (<Handle> datatype)._ref


cdef TypeInfo type_of_format(str code, bint is_described):
    if code[0] in ">!" and len(code) > 1:
        raise BufferError(f"the buffer has format {code!r}: the byte order is not that of this machine")
    if is_described and code not in types_by_code:
        return (<Handle> byte_type)._ref
    if len(code) > 1:
        code = code.lstrip("@=<")
    return (<Handle> types_by_code[code[1:] if code in ("1s", "1w") else code])._ref


cdef bint is_type(object what) noexcept:
    return isinstance(what, (str, Handle))


# Return the items of a specification: buffer, counts, displacements, datatype. None where it has no such item.
cdef tuple items_of(object spec):
    cdef Py_ssize_t n
    if spec is None:
        raise TypeError("a message is a buffer or a list such as [buf, count, displ, type], not None")
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    n = len(spec)
    if n == 4:
        return tuple(spec)
    if n == 2:
        if is_type(spec[1]) or spec[1] is None:
            return spec[0], None, None, spec[1]
        counts, datatype = spec[1], None
    elif n == 3:
        counts, datatype = spec[1], spec[2]
    else:
        raise ValueError(f"a message is a buffer, or 2 to 4 items; these are {n}: [buf, count, displ, type]")
    if isinstance(counts, (list, tuple)):
        if len(counts) != 2:
            raise ValueError(f"{counts!r} is not a pair (count, displacement)")
        return spec[0], counts[0], counts[1], datatype
    return spec[0], counts, None, datatype


# Return the memory of a specification whose count, if there is one, is that of each block.
cdef Data data_of(object spec, bint is_written, int blocks=1):
    cdef Data data = Data.__new__(Data)
    if cnp.PyArray_CheckExact(spec):
        data.take(spec, None, is_written)
        data.place(None, None, blocks)
        return data
    buf, count, displ, datatype = items_of(spec)
    data.take(buf, datatype, is_written)
    data.place(count, displ, blocks)
    return data


def simple(object spec, bint is_written, int blocks=1):
    """Return the `Data` of a specification with one count. Its items have no gaps."""
    return without_gaps(data_of(spec, is_written, blocks))


def simple_with_gaps(object spec, bint is_written, int blocks=1):
    """As `simple`, for calls that use `finish` where they receive. The items may have gaps."""
    return data_of(spec, is_written, blocks)


# Refuse items with gaps, for calls that work on the items where they are.
cdef Data without_gaps(Data data):
    if data is not None and data.copies is not None:
        raise errors.refuse("reductions, Fetch_and_op and Compare_and_swap of datatypes with gaps",
                            "copy the part to a contiguous array")
    return data


def has_gaps(object spec):
    """Return whether a specification names a datatype with gaps, or a list of datatypes with one."""
    if not isinstance(spec, (list, tuple)) or not spec:
        return False
    last = spec[len(spec) - 1]
    for datatype in last if isinstance(last, (list, tuple)) else (last, ):
        if isinstance(datatype, Handle) and isinstance((<Handle> datatype)._ref, TypeInfo) and (
                (<TypeInfo> (<Handle> datatype)._ref).has_gaps):
            return True
    return False


def vector(spec, bint is_written, int blocks):
    """Return the `Data` of a specification with a count for each of `blocks` ranks, and its pieces as arrays.

    Without counts, the first ranks get one item more than the others if the number of items is no multiple of `blocks`.
    """
    cdef Data data = Data.__new__(Data)
    cdef Py_ssize_t extent, rank, at, items
    buf, counts, displs, datatype = vector_items_of(spec)
    data.take(buf, datatype, is_written)
    extent = data.type.extent
    if counts is None:
        items = whole_count(data.length, extent)
        counts = []
        for rank in range(blocks):
            counts.append(items // blocks + (rank < items % blocks))
    counts = numbers_of(counts, blocks)
    if displs is None:
        at, displs = 0, []
        for count in counts:
            displs.append(at)
            at += count
    else:
        displs = numbers_of(displs, blocks, is_stride=True)
    pieces = []
    for rank in range(blocks):
        if data.type.has_gaps:
            pieces.append(data.copy_of(displs[rank] * extent, counts[rank], data.type))
        else:
            pieces.append(data.part(displs[rank] * extent, counts[rank] * extent))
    return data, pieces


# As items_of, for a vector: a list of two is (counts, displs) only in a tuple.
cdef tuple vector_items_of(object spec):
    if isinstance(spec, (list, tuple)) and len(spec) in (2, 3) and isinstance(spec[1], list):
        return spec[0], spec[1], None, spec[2] if len(spec) == 3 else None
    return items_of(spec)


# Return one number for each rank: those of a sequence, or multiples or copies of one number.
cdef list numbers_of(object numbers, Py_ssize_t count, bint is_stride=False):
    cdef Py_ssize_t at
    found = []
    if hasattr(numbers, "__index__") and np.ndim(numbers) == 0:
        for at in range(count):
            found.append(operator.index(numbers) * (at if is_stride else 1))
        return found
    for number in numbers:
        found.append(operator.index(number))
    if len(found) != count:
        raise ValueError(f"{len(found)} counts or displacements are given for {count} ranks")
    return found


def typed_pieces(spec, bint is_written, int blocks):
    """Return the `Data` of a specification with a datatype for each rank, and its pieces as arrays."""
    cdef Data data = Data.__new__(Data)
    cdef TypeInfo info
    if not isinstance(spec, (list, tuple)) or not 2 <= len(spec) <= 4:
        raise ValueError("a message with several datatypes is [buf, types] or [buf, counts, displs, types]")
    counts, displs = (spec[1] if len(spec) == 3 else spec[1:3] if len(spec) == 4 else (None, None))
    data.take(spec[0], byte_type, is_written)   # each piece has its own type
    if (counts is None) != (displs is None) or spec[0] is BOTTOM and counts is None and len(spec) > 2:
        raise ValueError("counts and displacements are given together, or neither")
    counts = [1] * blocks if counts is None else numbers_of(counts, blocks)
    displs = [0] * blocks if displs is None else numbers_of(displs, blocks)
    if len(spec[len(spec) - 1]) != blocks:
        raise ValueError(f"{len(spec[len(spec) - 1])} datatypes are given for {blocks} ranks")
    pieces = []
    for count, displ, datatype in zip(counts, displs, spec[len(spec) - 1]):
        info = resolved(datatype)
        if info.has_gaps:
            pieces.append(data.copy_of(displ, count, info))
        elif spec[0] is BOTTOM:
            pieces.append(at_address(displ, count * info.extent, is_written))
        else:
            pieces.append(data.part(displ, count * info.extent))
    return data, pieces


cdef object at_address(object address, object nbytes, bint is_written):
    if nbytes == 0:
        address = 0
    else:
        device_arrays.check_readable(address, nbytes)
    return view_of(<char *> <uintptr_t> address, nbytes, U8, None, not is_written)
