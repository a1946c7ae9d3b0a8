"""Python objects as messages: they are pickled, and sent as plain bytes. The calls on objects that have to be fast."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

cimport cython

from .._arrays.objects cimport PROTOCOL, pickled
from .._core cimport numpy_api as cnp
from .._comm.collectives cimport Plan, plan_of
from .._comm.comm cimport Comm as ShmringComm
from .._comm.point_to_point cimport Envelope
from .._core.group cimport ALL_GATHER, BROADCAST
from .calls cimport NO_RANK, Caller, Context, context_of, end_after, is_only_thread, sending
from .messages cimport WILD_TAG, ANY_PEER, Status, bytes_at, int_of

import pickle as _pickle
import warnings

import numpy as np

from ..errors import Error
from .messages import buffer
from .rc import integer_of_variable

cnp.import_array()

cdef enum:
    # With its length, an object of this size fits into a call line of the engine. bench/peers/bench_mpi4py.py: an
    # allgather of longer frames takes 0.2 us longer, also of small objects.
    MOST_NBYTES = 40

DEFAULT_PROTOCOL = integer_of_variable("MPI4PY_PICKLE_PROTOCOL", _pickle.HIGHEST_PROTOCOL)
DEFAULT_THRESHOLD = integer_of_variable("MPI4PY_PICKLE_THRESHOLD", 1 << 18)


# ---- pickles -----------------------------------------------------------------------------------------------------

cdef class Pickle:
    """The conversion of objects to bytes. `dumps` and `loads` may be replaced, as by cloudpickle's."""

    cdef object dumps_function, loads_function
    cdef object protocol      # None: the function's own
    cdef Py_ssize_t threshold

    def __cinit__(self, *_, **__):
        self.dumps_function, self.loads_function = _pickle.dumps, _pickle.loads
        self.PROTOCOL = self.THRESHOLD = None

    def __init__(self, dumps=None, loads=None, protocol=None, threshold=None):
        self.dumps_function, self.loads_function = dumps or _pickle.dumps, loads or _pickle.loads
        self.PROTOCOL, self.THRESHOLD = protocol, threshold

    cdef bytes dumped(self, object obj):
        if self.protocol is None:
            return self.dumps_function(obj)
        if self.dumps_function is _pickle.dumps and self.protocol == PROTOCOL:
            return pickled(obj, None)
        return self.dumps_function(obj, self.protocol)

    cdef object loaded(self, object data):
        return self.loads_function(data)

    @property
    def PROTOCOL(self):
        """The protocol that `dumps` is called with; None: the function's own."""
        return self.protocol

    @PROTOCOL.setter
    def PROTOCOL(self, protocol):
        if protocol is None and self.dumps_function is _pickle.dumps:
            protocol = DEFAULT_PROTOCOL
        self.protocol = protocol

    @property
    def THRESHOLD(self):
        """The size in bytes from which `dumps_oob` leaves a buffer out of the pickle."""
        return self.threshold

    @THRESHOLD.setter
    def THRESHOLD(self, threshold):
        self.threshold = DEFAULT_THRESHOLD if threshold is None else threshold

    def dumps(self, obj):
        """Return an object as bytes."""
        return self.dumped(obj)

    def loads(self, data):
        """Return the object of the bytes."""
        return self.loaded(data)

    def dumps_oob(self, obj):
        """Return an object as bytes, and its large buffers."""
        cdef Py_ssize_t threshold = self.threshold
        left_out = []

        def leave_out(part):
            memory = buffer(part)
            if memory.nbytes < threshold:
                return True
            left_out.append(memory)
            return False

        protocol = _pickle.HIGHEST_PROTOCOL if self.protocol is None else max(PROTOCOL, self.protocol)
        if self.dumps_function is _pickle.dumps and protocol == PROTOCOL:
            return pickled(obj, leave_out), left_out
        return self.dumps_function(obj, protocol, buffer_callback=leave_out), left_out

    def loads_oob(self, data, buffers):
        """Return the object of the bytes and the buffers."""
        return self.loads_function(data, buffers=buffers)


OBJECTS = "bcast"   # key of the lock for frames; mpi4py has one of this name
pickle = Pickle()
cdef Pickle pickler = pickle


# ---- frames ------------------------------------------------------------------------------------------------------

# The first step of a collective on objects moves a frame from each rank: the length of the pickled object, and its
# first bytes. There is a second step only if an object is longer. All ranks see the same lengths.
cdef struct Frame:
    uint64_t nbytes
    char[MOST_NBYTES] data


cdef bytes bytes_in(const Frame *frame):
    return PyBytes_FromStringAndSize(frame.data, frame.nbytes)


@cython.final
cdef class Frames:
    """The frames of a communicator: this rank's, and those of all ranks. Plans move them."""

    cdef int size
    cdef cnp.ndarray own, every
    cdef Plan gather
    cdef dict broadcasts      # Plan by root

    def __cinit__(self, int size):
        self.size, self.broadcasts = size, {}
        self.own = np.zeros(sizeof(Frame), np.uint8)
        self.every = np.zeros(sizeof(Frame) * size, np.uint8)

    cdef void put(self, bytes data) noexcept:
        cdef Frame *frame = <Frame *> cnp.PyArray_DATA(self.own)
        frame.nbytes = PyBytes_GET_SIZE(data)
        memcpy(frame.data, PyBytes_AS_STRING(data), min(frame.nbytes, <uint64_t> MOST_NBYTES))

    # Broadcast the root's frame to `own`.
    cdef Frame *broadcast(self, ShmringComm comm, int root) except NULL:
        cdef Plan plan = self.broadcasts.get(root)
        if plan is None:
            plan = plan_of(comm, BROADCAST, self.own, None, root, None)
            self.broadcasts[root] = plan
        plan.run_call()
        return <Frame *> cnp.PyArray_DATA(self.own)

    # Gather the frames of all ranks. Return True if each holds all of its object.
    cdef bint all_gather(self, ShmringComm comm) except -1:
        cdef Frame *frame = <Frame *> cnp.PyArray_DATA(self.every)
        cdef int rank
        if self.gather is None:
            self.gather = plan_of(comm, ALL_GATHER, self.own, None, None, self.every)
        self.gather.run_call()
        for rank in range(self.size):
            if frame[rank].nbytes > MOST_NBYTES:
                return False
        return True

    # Return copies of the objects in all frames: an object that is unpickled may make a call, which overwrites them.
    cdef list objects(self):
        cdef Frame *frame = <Frame *> cnp.PyArray_DATA(self.every)
        cdef list found = []
        cdef int rank
        for rank in range(self.size):
            found.append(bytes_in(&frame[rank]))
        return found


# ---- calls -------------------------------------------------------------------------------------------------------

cdef class ObjectCaller(Caller):
    """The calls of a communicator on objects that have to be fast."""

    def send(self, obj, dest, tag=0):
        """Send an object."""
        cdef Context context = context_of(self)
        cdef int peer = context.peer(dest, tag, True)
        cdef bytes data
        if peer == NO_RANK:
            return
        data = pickler.dumped(obj)
        if not is_only_thread(context):
            sending(context, bytes_at(PyBytes_AS_STRING(data), len(data), data, True), dest, tag).run_now(None)
            return
        try:
            context.opened().send_bytes(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), peer, int_of(tag))
        except Error as error:
            raise context.failure(None, error) from error

    def recv(self, buf=None, source=ANY_PEER, tag=WILD_TAG, Status status=None):
        """Receive an object, and return it."""
        cdef Context context = context_of(self)
        cdef int peer = context.peer(source, tag, False)
        cdef Envelope envelope
        cdef bytes data
        if buf is not None:
            warnings.warn("the 'buf' argument is ignored", UserWarning, stacklevel=1)   # of the caller
        if peer == NO_RANK or not is_only_thread(context):
            return self._asking(source, tag).run(status)
        try:
            data = context.opened().recv_new_bytes(peer, int_of(tag), &envelope)
        except Error as error:
            raise context.failure(None, error) from error
        if status is not None:
            status.set(envelope.source, envelope.tag, envelope.nbytes)
        return loaded(context, data, True) if envelope.nbytes > 0 else None

    def bcast(self, obj=None, root=0):
        """Return the root's object on all ranks; the root gets a copy, too."""
        cdef Context context = context_of(self)
        cdef int number
        try:
            number = context.root_of(root)
        except Exception:
            context.opened().engine.refuse(BROADCAST)
            raise
        if is_only_thread(context):
            data = broadcast(context, obj, number)
        else:
            data = self._run_alone(OBJECTS, broadcast, context, obj, number)
        return loaded(context, data, False)

    def allgather(self, sendobj):
        """Return the objects of all ranks."""
        cdef Context context = context_of(self)
        cdef list objects
        cdef Py_ssize_t rank
        if is_only_thread(context):
            objects = all_gather(context, sendobj)
        else:
            objects = self._run_alone(OBJECTS, all_gather, context, sendobj)
        for rank in range(len(objects)):
            objects[rank] = loaded(context, objects[rank], False)
        return objects


cpdef object loaded(Context context, object data, bint beside):
    """Return the object in data that were received. beside: see `end_after`."""
    try:
        return pickler.loaded(data)
    except BaseException as error:
        end_after(context, error, beside)
        raise


cdef Frames frames_of(Context context):
    if context.frames is None:
        context.frames = Frames(context.size)
        context.lock_of(OBJECTS)   # so that MPI._comm_lock_table shows it
    return context.frames


cdef bytes dumped_for(Context context, int kind, object obj):
    try:
        return pickler.dumped(obj)
    except Exception:
        context.opened().engine.refuse(kind)
        raise


cpdef bytes broadcast(Context context, object obj, int root):
    """Return the root's pickled object."""
    cdef Frames frames = frames_of(context)
    cdef bint is_root = context.rank == root
    cdef bytes data = None
    cdef Frame *frame
    if is_root:
        data = dumped_for(context, BROADCAST, obj)
        frames.put(data)
    try:
        frame = frames.broadcast(context.opened(), root)
    except Error as error:
        raise context.failure(None, error) from error
    try:
        if frame.nbytes > MOST_NBYTES:
            return broadcast_rest(context, data, frame.nbytes, root)
        return data if is_root else bytes_in(frame)
    except Error as error:
        raise context.failure(None, error) from error
    except BaseException as error:
        end_after(context, error, False)
        raise


def broadcast_rest(Context context, bytes data, Py_ssize_t nbytes, root):
    """Return the root's data, of which the others know only the length."""
    cdef bint is_root = data is not None
    if not is_root:
        data = PyBytes_FromStringAndSize(NULL, nbytes)
    context.opened().broadcast(bytes_at(PyBytes_AS_STRING(data), nbytes, data, is_root), root)
    return data


cpdef list all_gather(Context context, object obj):
    """Return the pickled objects of all ranks."""
    cdef Frames frames = frames_of(context)
    cdef bytes data = dumped_for(context, ALL_GATHER, obj)
    cdef bint is_whole
    frames.put(data)
    try:
        is_whole = frames.all_gather(context.opened())
    except Error as error:
        raise context.failure(None, error) from error
    try:
        return frames.objects() if is_whole else all_gather_rest(context, data)
    except Error as error:
        raise context.failure(None, error) from error
    except BaseException as error:
        end_after(context, error, False)
        raise


def all_gather_rest(Context context, bytes data):
    """Return the data of all ranks."""
    return context.opened().all_gather_v(bytes_at(PyBytes_AS_STRING(data), len(data), data, True))
