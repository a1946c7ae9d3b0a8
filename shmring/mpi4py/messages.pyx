"""Specifications of messages, and the calls made of them.

A specification (`buf`, `[buf, count]`, `[buf, (count, displ), type]` and so on) becomes a `Data`: an address, a number
of items and a datatype. `Data` is handed to shmring as a NumPy array over the same memory: as bytes where a call only
moves it, and with the datatype's dtype where a call reduces it.
"""

from cpython.buffer cimport PyObject_CheckBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport Py_EQ, Py_NE, PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from .._comm.comm cimport Comm as Engine
from .._comm.point_to_point cimport Status as Received, Transfer
from .._core.group cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, EXSCAN, GATHER, REDUCE, REDUCE_SCATTER, SCAN, SCATTER,
)
from .memory cimport buffer

import functools
import operator
import threading

import numpy as np

from . import device_arrays, errors
from ..errors import Error
from .memory import BOTTOM, IN_PLACE
from .turns import Turns

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(PyObject *kind, cnp.dtype descr, int nd, const cnp.npy_intp *dims,
                                const cnp.npy_intp *strides, void *data, int flags, PyObject *base)
    PyObject PyArray_Type
    int PyArray_SetBaseObject(cnp.ndarray array, object base) except -1

cdef enum:   # as MPI numbers them; shmring has -1 for any source and any tag
    ANY_PEER = -2
    NO_PEER = -1
    ANY = -1
    MOST_TAG = 0x7fffffff
    UNDEFINED = -32766

cdef cnp.dtype U8 = np.dtype(np.uint8)
cdef dict threads_by_number = threading._active
cdef dict types_by_code = {}     # "i", "f8", ... to Datatype
cdef list types_by_number = [None] * 32   # NumPy's number of a dtype to Datatype
cdef object byte_type, default_op, request_type, prequest_type, pickle   # set by `register`


def register(by_code, by_number, byte, op, request, prequest, pickler):
    """Make the classes and constants of the facade known that this module needs."""
    global byte_type, default_op, request_type, prequest_type, pickle
    types_by_code.update(by_code)
    for number, datatype in by_number.items():
        types_by_number[number] = datatype
    byte_type, default_op, request_type, prequest_type, pickle = byte, op, request, prequest, pickler


class Kind:
    """The numbers of the collectives, as the engine has them."""

    all_reduce, reduce, reduce_scatter = <int> ALL_REDUCE, <int> REDUCE, <int> REDUCE_SCATTER
    scan, exscan, barrier = <int> SCAN, <int> EXSCAN, <int> BARRIER
    broadcast, scatter, gather = <int> BROADCAST, <int> SCATTER, <int> GATHER
    all_gather, all_to_all = <int> ALL_GATHER, <int> ALL_TO_ALL


# ---- handles -----------------------------------------------------------------------------------------------------

cdef class Handle:
    """A reference to an object of MPI. Copies of a handle are equal, and refer to the same object."""

    cdef public object _ref       # shared by the copies of the handle; None: the null handle
    cdef object __weakref__

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


cdef class TypeInfo:
    """A datatype: its size, the distance of two items in memory, and the dtype that NumPy has for it."""

    cdef readonly Py_ssize_t size, extent
    cdef readonly cnp.dtype dtype
    cdef readonly str constant, letter, code
    cdef readonly object ops      # names of the reductions that shmring has for the dtype
    cdef public object name, attributes
    cdef object __weakref__

    def __init__(self, size, dtype, constant, letter, code, name, ops):
        self.size, self.extent, self.dtype = size, dtype.itemsize, dtype
        self.constant, self.letter, self.code, self.name, self.ops = constant, letter, code, name, ops


cdef class Status:
    """Properties of a message that was received or probed."""

    cdef int32_t fields[4]   # source, tag, error, cancelled
    cdef int64_t nbytes
    cdef object __weakref__

    def __cinit__(self, status=None):
        if status is None:
            self.set(ANY_PEER, ANY, 0)
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
        return self.nbytes // info.extent if self.nbytes % info.extent == 0 else UNDEFINED

    def Get_elements(self, datatype):
        """Return the number of basic elements of a datatype in the message."""
        cdef TypeInfo info = type_of(datatype)
        return self.Get_count(datatype) * elements_of(info)

    def Set_elements(self, datatype, count):
        """Set the number of elements."""
        cdef TypeInfo info = type_of(datatype)
        self.nbytes = index_of(count) * info.extent // elements_of(info)

    def tomemory(self):
        """Return the fields as integers in memory, which may be changed."""
        cdef buffer memory = buffer.__new__(buffer)
        memory.owner, memory.data, memory.length = self, <char *> self.fields, sizeof(self.fields)
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
        self.fields[0] = index_of(source)

    def Get_tag(self):
        """Return the tag."""
        return self.fields[1]

    def Set_tag(self, tag):
        """Set the tag."""
        self.fields[1] = index_of(tag)

    def Get_error(self):
        """Return the error class."""
        return self.fields[2]

    def Set_error(self, error):
        """Set the error class."""
        self.fields[2] = index_of(error)

    def Is_cancelled(self):
        """Return whether the call was cancelled."""
        return self.fields[3] != 0

    def Set_cancelled(self, flag):
        """Set whether the call was cancelled."""
        self.fields[3] = bool(flag)

    def _set_count(self, count):
        self.nbytes = index_of(count)

    source = property(Get_source, Set_source, doc="The sender's rank.")
    tag = property(Get_tag, Set_tag, doc="The tag.")
    error = property(Get_error, Set_error, doc="The error class.")
    count = property(Get_count, _set_count, doc="The number of bytes.")
    cancelled = property(Is_cancelled, Set_cancelled, doc="Whether the call was cancelled.")


# Return the number of basic elements of an item: 2 for a pair.
cdef int elements_of(TypeInfo info) except -1:
    cdef object dtype = info.dtype   # NumPy's declarations in Cython fail for a dtype without names
    return len(dtype.names or (None,))


cdef TypeInfo type_of(object datatype):
    if not isinstance(datatype, Handle) or not isinstance((<Handle> datatype)._ref, TypeInfo):
        raise errors.Exception(errors.ERR_TYPE) if datatype == type(byte_type)() else TypeError(
            f"a Datatype is needed, not {type(datatype).__name__}")
    return (<Handle> datatype)._ref


# Return an integer, or an object with __index__, as a C integer.
cdef inline Py_ssize_t index_of(object number) except? -1:
    return number if PyLong_CheckExact(number) else operator.index(number)


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


@cython.freelist(16)
cdef class Data:
    """The memory that a specification describes: items of a type, `count` in each of several blocks."""

    cdef object owner
    cdef cnp.ndarray whole       # the caller's array, if it is the memory
    cdef char *data
    cdef readonly Py_ssize_t count, length
    cdef int blocks
    cdef readonly bint readonly
    cdef readonly TypeInfo type

    cdef inline Py_ssize_t nbytes(self) noexcept:
        return self.count * self.blocks * self.type.extent

    cdef inline object moved(self):
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

    @property
    def bytes(self):
        return self.moved()

    @property
    def items(self):
        return self.reduced()

    def part(self, Py_ssize_t displ, Py_ssize_t nbytes):
        """Return `nbytes` bytes from byte `displ` on, as an array."""
        if displ < 0 or nbytes < 0 or displ + nbytes > self.length:
            raise ValueError(f"{nbytes} bytes at byte {displ} are not in the buffer, which has {self.length}")
        return view_of(self.data + displ, nbytes, U8, self.owner, self.readonly)

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
        memory = buffer.__new__(buffer)
        memory.take(given, is_written)
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
            if items < 0 or items > self.length // extent // blocks:
                raise ValueError(f"the count is {items}; the buffer has {self.length // extent} items" +
                                 (f" for {blocks} ranks" if blocks > 1 else ""))
            self.count = items
        if self.length == self.nbytes() and cnp.PyArray_CheckExact(self.owner) and (
                (<cnp.ndarray> self.owner).dtype is self.type.dtype) and cnp.PyArray_NDIM(self.owner) > 0:
            self.whole = self.owner
        return 0


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
    return (<Handle> types_by_code[code.lstrip("@=<") if len(code) > 1 else code])._ref


cdef bint is_type(object what) noexcept:
    return isinstance(what, (str, Handle))


# Return the items of a specification: buffer, counts, displacements, datatype. None where it has no such item.
cdef tuple items_of(object spec):
    cdef Py_ssize_t n
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
            raise ValueError(f"{counts!r} is no pair (count, displacement)")
        return spec[0], counts[0], counts[1], datatype
    return spec[0], counts, None, datatype


cdef Data data_of(object spec, bint is_written, int blocks=1):
    """Return the memory of a specification whose count, if there is one, is that of each block."""
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
    """Return the `Data` of a specification with one count."""
    return data_of(spec, is_written, blocks)


def vector(spec, bint is_written, int blocks):
    """Return the `Data` of a specification with a count for each of `blocks` ranks, and its pieces as arrays."""
    cdef Data data = Data.__new__(Data)
    cdef Py_ssize_t extent, rank, at
    buf, counts, displs, datatype = vector_items_of(spec)
    data.take(buf, datatype, is_written)
    extent = data.type.extent
    if counts is None:
        if data.length % (extent * blocks):
            raise ValueError(f"the buffer has {data.length} bytes, not a multiple of {blocks} blocks of items of "
                             f"{extent} bytes")
        counts = data.length // extent // blocks
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
    """Return the pieces of a specification with a datatype for each rank, as arrays."""
    cdef Data data = Data.__new__(Data)
    if not isinstance(spec, (list, tuple)) or not 2 <= len(spec) <= 4:
        raise ValueError("a message with several datatypes is [buf, types] or [buf, counts, displs, types]")
    counts, displs = (spec[1] if len(spec) == 3 else spec[1:3] if len(spec) == 4 else (None, None))
    data.take(spec[0], None, is_written)
    if (counts is None) != (displs is None) or spec[0] is BOTTOM and counts is None and len(spec) > 2:
        raise ValueError("counts and displacements are given together, or neither")
    counts = [1] * blocks if counts is None else numbers_of(counts, blocks)
    displs = [0] * blocks if displs is None else numbers_of(displs, blocks)
    if len(spec[len(spec) - 1]) != blocks:
        raise ValueError(f"{len(spec[len(spec) - 1])} datatypes are given for {blocks} ranks")
    pieces = []
    for count, displ, datatype in zip(counts, displs, spec[len(spec) - 1]):
        nbytes = count * resolved(datatype).extent
        pieces.append(data.part(displ, nbytes) if spec[0] is not BOTTOM else at_address(displ, nbytes, is_written))
    return pieces


cdef object at_address(object address, object nbytes, bint is_written):
    if nbytes == 0:
        address = 0
    else:
        device_arrays.check_readable(address, nbytes)
    return view_of(<char *> <uintptr_t> address, nbytes, U8, None, not is_written)


# ---- calls -------------------------------------------------------------------------------------------------------

# True if no other thread of the program can enter a call while this thread is inside one.
cdef inline bint is_only_thread(Context context) noexcept:
    cdef Py_ssize_t count = len(threads_by_number)
    return count < 2 or count == 2 and context is not None and context.engine is not None and (
        context.engine.has_progress_thread())


cdef class Context:
    """A communicator of shmring, as the facade's communicators refer to it."""

    cdef Engine engine
    cdef public object open_engine   # makes the communicator of shmring at its first use
    cdef readonly int rank, size
    cdef readonly object turns       # of the threads that send and receive, while there are several
    cdef object __weakref__

    def __init__(self, rank, size, engine=None, open_engine=None):
        self.rank, self.size, self.engine, self.open_engine = rank, size, engine, open_engine
        self.turns = Turns()

    cdef inline Engine opened(self):
        if self.engine is None:
            self.engine = self.open_engine()
        return self.engine

    @property
    def comm(self):
        """The communicator of shmring."""
        return self.opened()

    @property
    def is_open(self):
        """True if the communicator of shmring was made."""
        return self.engine is not None

    def sends(self):
        """Return the transfers of messages that this rank sends."""
        cdef Transfer transfer
        found = []
        if self.engine is not None and self.engine.transfers is not None:   # None once it is closed
            for transfer in list(self.engine.transfers):
                if transfer.message.is_send:
                    found.append(transfer)
        return found

    def probe(self, int peer, int tag, probe, iprobe):
        """Return what a blocking probe returns; beside other threads, by one that does not block."""
        if is_only_thread(self):
            return probe(peer, tag)
        return self.turns.repeat(lambda: iprobe(peer, tag), self.opened().engine.poll)

    # Return the number of a peer as shmring has it, or NO_PEER - 1 for PROC_NULL.
    cdef int peer(self, object rank, object tag, bint is_send) except? -9:
        cdef Py_ssize_t peer = index_of(rank), number = index_of(tag)
        if not (0 <= number <= MOST_TAG or number == ANY and not is_send):
            raise self.failure(errors.ERR_TAG, f"the tag is {tag}; tags are 0 to {MOST_TAG}")
        if 0 <= peer < self.size:
            return peer
        if peer == NO_PEER:
            return -2
        if peer == ANY_PEER and not is_send:
            return -1
        raise self.failure(errors.ERR_RANK, f"the rank is {rank}; the ranks are 0 to {self.size - 1}")

    cdef int root_of(self, object root) except -1:
        cdef Py_ssize_t number = index_of(root)
        if not 0 <= number < self.size:
            raise self.failure(errors.ERR_ROOT, f"the root is {root}; the ranks are 0 to {self.size - 1}")
        return number

    def failure(self, code, reason):
        """Return the exception for an error."""
        raise NotImplementedError


cdef class Call:
    """A call whose arguments were checked: it is run at once, issued, or kept to be started many times."""

    cdef public Context context
    cdef public object finish     # called when the call is complete; returns the result of a request
    cdef public Status empty      # status without a message, if it is not that of an empty request

    cpdef object perform(self):
        """Run the call, and return what shmring returns."""

    cpdef object begin(self):
        """Begin the call, and return a Work or a Transfer; None if there is nothing to wait for."""

    # As perform, begin, and done of what begin returned, while there are other threads. Collectives need nothing more.

    cpdef object perform_beside_threads(self):
        return self.perform()

    cpdef object begin_beside_threads(self):
        return self.begin()

    cpdef bint is_done_beside_threads(self, object work) except -1:
        return work.done()

    cpdef object wait_beside_threads(self, object work):
        return work.wait()

    def cancel(self, work):
        """Cancel the call, if it is a receive that no message has matched, and return whether it was."""
        return False

    def run(self, Status status=None):
        """Run the call; return what `finish` returns."""
        try:
            outcome = self.perform() if is_only_thread(self.context) else self.perform_beside_threads()
        except Error as error:
            raise self.context.failure(None, error) from error
        if status is not None:
            report(self, outcome, status)
        return self.conclude()

    cpdef object conclude(self):
        """Do what is left when the call is complete, and return the result of a request.

        A subclass overrides this rather than set `finish` to a method of its own: that would be a circle, which keeps
        the caller's arrays until the garbage collector runs.
        """
        return None if self.finish is None else self.finish()

    def issue(self):
        """Begin the call, and return a Request."""
        cdef Pending pending = Pending.__new__(Pending)
        pending.call = self
        pending.start()
        return handle(request_type, pending)

    def persist(self):
        """Return a Prequest, which begins the call when it is started."""
        cdef Pending pending = Pending.__new__(Pending)
        pending.call, pending.is_persistent, pending.is_idle = self, True, True
        return handle(prequest_type, pending)


def handle(cls, ref):
    """Return a new handle of a class."""
    cdef Handle new = cls.__new__(cls)
    new._ref = ref
    return new


cdef void report(Call call, object outcome, Status status) noexcept:
    if isinstance(outcome, Received):
        status.set((<Received> outcome).source, (<Received> outcome).tag, (<Received> outcome).nbytes)
    elif call.empty is not None:
        status.copy(call.empty)
    else:
        status.set(ANY_PEER, ANY, 0)


cdef class Pending:
    """A call that was begun; a request refers to it."""

    cdef public Call call
    cdef public object work          # a Work or a Transfer; None if there is nothing to wait for
    cdef public object result        # what `finish` returned
    cdef object outcome
    cdef bint is_complete
    cdef public bint is_idle         # the program was told that it is complete, or it was not started
    cdef public bint is_persistent
    cdef bint is_cancelled
    cdef object __weakref__

    def start(self):
        """Begin the call."""
        self.is_complete = self.is_cancelled = False
        self.outcome = self.result = None
        try:
            self.work = self.call.begin() if is_only_thread(self.call.context) else self.call.begin_beside_threads()
        except Error as error:
            raise self.call.context.failure(None, error) from error
        self.is_idle = False

    def poll(self):
        """Return whether the call is complete."""
        if not self.is_complete and (self.work is None or self.is_done()):
            self.settle()
        return self.is_complete

    cdef bint is_done(self) except -1:
        if is_only_thread(self.call.context):
            return self.work.done()
        return self.call.is_done_beside_threads(self.work)

    def settle(self):
        """Wait until the call is complete."""
        if self.is_complete:
            return
        try:
            if self.work is not None:
                if is_only_thread(self.call.context):
                    self.outcome = self.work.wait()
                else:
                    self.outcome = self.call.wait_beside_threads(self.work)
        except Error as error:
            raise self.call.context.failure(None, error) from error
        finally:
            self.is_complete, self.work = True, None
        self.result = self.call.conclude()

    def cancel(self):
        """Cancel the call, where it can be cancelled."""
        self.is_cancelled = self.call.cancel(self.work)

    def report(self, Status status):
        """Set the status to that of the complete call."""
        report(self.call, self.outcome, status)
        status.fields[3] = self.is_cancelled


cdef class Collective(Call):
    """A collective of shmring with pieces of equal length."""

    cdef readonly int kind, root
    cdef readonly object x, op, out

    cpdef object perform(self):
        self.context.opened().run(self.kind, self.x, self.op, self.root, self.out, None, None, False, None)

    cpdef object begin(self):
        return self.context.opened().run(self.kind, self.x, self.op, self.root, self.out, None, None, True, None)


cdef class MessageCall(Call):
    """A call that sends or receives messages."""

    cpdef object perform_beside_threads(self):
        work = self.begin_beside_threads()
        return None if work is None else self.wait_beside_threads(work)

    cpdef object begin_beside_threads(self):
        return self.context.turns.begin(self)

    cpdef bint is_done_beside_threads(self, object work) except -1:
        return self.context.turns.take(work.done)

    cpdef object wait_beside_threads(self, object work):
        return self.context.turns.wait_for(work)

    def cancel(self, work):
        """Cancel the call, if it is a receive that no message has matched, and return whether it was."""
        return hasattr(work, "cancel") and self.context.turns.take(work.cancel)


cdef class Directed(MessageCall):
    """A message between this rank and another one."""

    cdef public object x
    cdef readonly int peer, tag


cdef class Sending(Directed):
    """A message to a rank."""

    cdef public object way     # None, or the name of another method of the communicator

    cpdef object perform(self):
        self.context.opened().send(self.x, self.peer, self.tag)

    cpdef object begin(self):
        return self.context.opened().isend(self.x, self.peer, self.tag)


cdef class Receiving(Directed):
    """A message from a rank."""

    cpdef object perform(self):
        return self.context.opened().recv(self.x, self.peer, self.tag)

    cpdef object begin(self):
        return self.context.opened().irecv(self.x, self.peer, self.tag)


cdef Call nothing(Context context):
    cdef Call call = Call.__new__(Call)
    call.context, call.empty = context, Status.__new__(Status)
    call.empty.set(NO_PEER, ANY, 0)
    return call


# Fill in the call, or return one that does nothing, for PROC_NULL.
cdef Call directed(Directed call, Context context, object x, object rank, object tag, bint is_send):
    cdef int peer = context.peer(rank, tag, is_send)
    if peer == -2:
        return nothing(context)
    call.context, call.x, call.peer, call.tag = context, x, peer, tag
    return call


cdef Call sending(Context context, object x, object dest, object tag):
    return directed(Sending.__new__(Sending), context, x, dest, tag, True)


cdef Call receiving(Context context, object x, object source, object tag):
    return directed(Receiving.__new__(Receiving), context, x, source, tag, False)


cdef Call collective(Context context, int kind, object send, object recv, object op=None, object root=0):
    """Return the collective; if an argument is wrong, refuse it, so that no other rank waits for this one."""
    cdef Collective call = Collective.__new__(Collective)
    call.context, call.kind = context, kind
    try:
        call.root = context.root_of(root)
        if kind == BROADCAST:
            call.x = data_of(recv, context.rank != call.root).moved()
        elif kind <= EXSCAN and kind != BARRIER and op is not None:
            return reduction(call, send, recv, op)
        elif kind != BARRIER:
            movement(call, send, recv)
    except Exception:
        context.opened().engine.refuse(kind)
        raise
    return call


# True for IN_PLACE, and for None, which stands for it.
cdef inline bint is_in_place(object spec) noexcept:
    return spec is None or spec is IN_PLACE


cdef int movement(Collective call, object send, object recv) except -1:
    cdef Context context = call.context
    cdef int size = context.size
    cdef bint is_joined = call.kind == ALL_GATHER or call.kind == ALL_TO_ALL or (
        call.kind == GATHER and context.rank == call.root)
    cdef bint is_split = call.kind == ALL_TO_ALL or call.kind == SCATTER and context.rank == call.root
    cdef Data data
    if call.kind == SCATTER:
        if is_split:
            data = data_of(send, False, size)
            call.x = data.moved()
            call.out = data.block(call.root) if is_in_place(recv) else data_of(recv, True).moved()
        else:
            call.out = data_of(recv, True).moved()
        return 0
    if is_joined:
        data = data_of(recv, True, size)
        call.out = data.moved()
        if is_in_place(send):
            call.x = call.out if is_split else data.block(context.rank)
            return 0
    call.x = data_of(send, False, size if is_split else 1).moved()
    return 0


cdef object reduction(Collective call, object send, object recv, object op):
    cdef Context context = call.context
    cdef bint has_out = call.kind != REDUCE or context.rank == call.root
    cdef int blocks = context.size if call.kind == REDUCE_SCATTER else 1
    cdef Data taken = None, given = None
    if not has_out:
        given = data_of(send, False)
    elif is_in_place(send):
        taken = data_of(recv, True, blocks)
        given = taken
    else:
        given = data_of(send, False, blocks)
        taken = data_of(recv, True)
        if given.type.dtype is not taken.type.dtype and given.type.dtype != taken.type.dtype:
            raise ValueError(f"{given.type.name} is sent, {taken.type.name} received; both must be one datatype")
        if given.count != taken.count:
            raise ValueError(f"{given.count} items are sent, {taken.count} received; both must be one count")
    name = (<Handle?> op)._ref.name
    if name not in given.type.ops:
        return op._ref.fold_call(context, call.kind, call.root, given, taken, blocks)
    call.op = name
    call.x = given.reduced()
    if call.kind == REDUCE_SCATTER and given is taken:   # the result goes to the first block, the operands are in all
        call.out = np.empty(taken.count, taken.type.dtype)
        call.finish = functools.partial(np.copyto, taken.reduced_block(0), call.out)
    elif given is not taken and taken is not None:
        call.out = taken.reduced()
    return call


# ---- the calls of communicators ------------------------------------------------------------------------------------

cdef class Caller(Handle):
    """The calls of a communicator that have to be fast, and those that prepare the others."""

    cdef inline Context context(self):
        if self._ref is None:
            raise errors.Exception(errors.ERR_COMM)
        return <Context> self._ref

    def Get_size(self):
        """Return the number of ranks."""
        return self.context().size

    def Get_rank(self):
        """Return the rank of this process."""
        return self.context().rank

    def Send(self, buf, dest, tag=0):
        """Send a message; return when `buf` may be changed."""
        cdef Context context = self.context()
        sending(context, data_of(buf, False).moved(), dest, tag).run()

    def Recv(self, buf, source=ANY_PEER, tag=ANY, Status status=None):
        """Receive a message."""
        cdef Context context = self.context()
        receiving(context, data_of(buf, True).moved(), source, tag).run(status)

    def Isend(self, buf, dest, tag=0):
        """Begin to send a message, and return a request."""
        cdef Context context = self.context()
        return sending(context, data_of(buf, False).moved(), dest, tag).issue()

    def Irecv(self, buf, source=ANY_PEER, tag=ANY):
        """Begin to receive a message, and return a request."""
        cdef Context context = self.context()
        return receiving(context, data_of(buf, True).moved(), source, tag).issue()

    def Barrier(self):
        """Block until all ranks have called this."""
        collective(self.context(), BARRIER, None, None).run()

    def Bcast(self, buf, root=0):
        """Copy the root's message to all ranks."""
        collective(self.context(), BROADCAST, None, buf, None, root).run()

    def Allreduce(self, sendbuf, recvbuf, op=None):
        """Combine the messages of all ranks; every rank gets the result."""
        collective(self.context(), ALL_REDUCE, sendbuf, recvbuf, default_op if op is None else op).run()

    def _sending(self, buf, dest, tag=0):
        cdef Context context = self.context()
        return sending(context, data_of(buf, False).moved(), dest, tag)

    def _receiving(self, buf, source=ANY_PEER, tag=ANY):
        cdef Context context = self.context()
        return receiving(context, data_of(buf, True).moved(), source, tag)

    def _collective(self, int kind, sendbuf, recvbuf, op=None, root=0):
        return collective(self.context(), kind, sendbuf, recvbuf, op, root)

    def _probe(self, source, tag, Status status, bint is_blocking):
        """Return whether a message can be received; wait for one if it is blocking."""
        cdef Context context = self.context()
        cdef int peer = context.peer(source, tag, False)
        cdef Received found = None
        if peer == -2:
            if status is not None:
                status.set(NO_PEER, ANY, 0)
            return True
        try:
            if is_blocking:
                found = context.probe(peer, tag, context.opened().probe, context.opened().iprobe)
            else:
                found = context.turns.take(context.opened().iprobe, peer, tag)
        except Error as error:
            raise context.failure(None, error) from error
        if found is not None and status is not None:
            status.set(found.source, found.tag, found.nbytes)
        return found is not None

    def send(self, obj, dest, tag=0):
        """Send an object."""
        cdef Context context = self.context()
        cdef bytes data = pickle.dumps(obj) if index_of(dest) != NO_PEER else b""
        sending(context, view_of(PyBytes_AS_STRING(data), len(data), U8, data, True), dest, tag).run()

    # Receive an object. Return it, and whether that was done: it is not beside other threads, nor for PROC_NULL.
    def _recv_directly(self, source, tag, Status status):
        cdef Context context = self.context()
        cdef int peer = context.peer(source, tag, False)
        cdef Received found
        cdef bytes data
        if peer == -2 or not is_only_thread(context):
            return None, False
        try:
            found = context.opened().probe(peer, tag)
            data = PyBytes_FromStringAndSize(NULL, found.nbytes)
            room = view_of(PyBytes_AS_STRING(data), found.nbytes, U8, data, False)
            context.engine.recv(room, found.source, found.tag)
        except Error as error:
            raise context.failure(None, error) from error
        if status is not None:
            status.set(found.source, found.tag, found.nbytes)
        return pickle.loads(data) if found.nbytes > 0 else None, True

    def _peer(self, source, tag):
        """Return the number that shmring has for a source; None for PROC_NULL."""
        cdef int peer = self.context().peer(source, tag, False)
        return None if peer == -2 else peer

    def _check_root(self, root):
        return self.context().root_of(root)
