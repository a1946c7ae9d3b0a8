# Python objects as bytes. Pickle protocol 5 leaves the arrays' memory out of the pickle, so arrays in an object are
# transferred as fast as plain arrays.
#
# A *frame* is an object as bytes. If the pickle left nothing out, the frame is the pickle, as bytes; it begins with the
# opcode of its protocol. Else the frame is an array: the number of parts, shifted so that the first byte is 0, the
# lengths of the parts, and the parts, each on a cache line. The first part is the pickle; the buffers that it left out
# follow. Ranks authenticated each other when they met, and trust each other's pickles.

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from .._core cimport numpy_api as cnp
from .._core.staging cimport whole_lines

import _pickle
import copyreg
import io
import pickle

import numpy as np

cnp.import_array()

cdef enum:
    PROTOCOL_OPCODE = 0x80   # the first byte of every pickle
    COUNT_SHIFT = 8
    LENGTH_NBYTES = 8        # a slot begins with the length of its frame
    # bench/peers: a broadcast of 256 bytes takes 0.16 us longer than one of 48 bytes; most small objects fit.
    SLOT_NBYTES = 256
    SEARCHED_ITEMS = 256     # of all containers
    SEARCHED_LEVELS = 3      # of containers in containers

cdef object dumps = pickle.dumps
cdef object loads = pickle.loads
cdef object BytesIO = io.BytesIO
cdef object PickleBuffer = pickle.PickleBuffer
cdef object ndarray = np.ndarray
cdef dict reducers = copyreg.dispatch_table


cpdef object pack(object item):
    """Return the object as a frame. Raise the errors of pickle."""
    cdef list left_out = []
    stream = pickled(item, left_out.append)
    return frame_of(stream, left_out) if left_out else stream


# Return the object as a pickle, bytes. leave_out: the `buffer_callback` of pickle, or None.
cdef object pickled(object item, object leave_out):
    cdef int left = SEARCHED_ITEMS
    # Programs may have set their own way to pickle arrays, or everything.
    if not holds_array(item, SEARCHED_LEVELS, &left) or ndarray in reducers or dumps is not _pickle.dumps:
        return dumps(item, PROTOCOL, buffer_callback=leave_out)
    file = BytesIO()
    ArrayPickler(file, PROTOCOL, buffer_callback=leave_out).dump(item)
    return file.getvalue()


class ArrayPickler(pickle.Pickler):
    """Pickle arrays of numbers as calls of `numpy.ndarray`, which takes half the time of NumPy's own way.

    To make one takes longer than to pickle a small object without arrays.
    """

    def reducer_override(self, item):
        return reduced_array(<cnp.ndarray> item) if cnp.PyArray_CheckExact(item) else NotImplemented


# Return how an array of numbers in one piece is pickled, and NotImplemented for others.
cdef object reduced_array(cnp.ndarray array):
    cdef int number = cnp.PyArray_TYPE(array)
    dtype = <object> cnp.PyArray_DESCR(array)
    if number > cnp.NPY_CLONGDOUBLE and number != cnp.NPY_HALF:
        return NotImplemented
    if dtype is not cnp.PyArray_DescrFromType(number):   # in another byte order, or with metadata
        return NotImplemented
    if cnp.PyArray_IS_C_CONTIGUOUS(array):
        return ndarray, (array.shape, dtype.str, PickleBuffer(array))
    if cnp.PyArray_CHKFLAGS(array, cnp.NPY_ARRAY_F_CONTIGUOUS):
        return ndarray, (array.shape, dtype.str, PickleBuffer(array), 0, None, "F")
    return NotImplemented


# Return whether an array is among the first items of the containers; *left: how many more may be looked at. Only the
# speed of `pickled` depends on it.
cdef bint holds_array(object item, int levels, int *left) except -1:
    cdef Py_ssize_t place = 0
    cdef PyObject *value = NULL
    if cnp.PyArray_CheckExact(item):
        return True
    if levels == 0:
        return False
    if type(item) is tuple or type(item) is list:
        while place < len(item) and left[0] > 0:
            left[0] -= 1
            if holds_array(item[place], levels - 1, left):
                return True
            place += 1
    elif type(item) is dict:
        while left[0] > 0 and PyDict_Next(item, &place, NULL, &value):
            left[0] -= 1
            if holds_array(<object> value, levels - 1, left):
                return True
    return False


cdef object frame_of(object stream, list left_out):
    cdef list parts = [stream]
    cdef size_t end = lengths_nbytes(1 + len(left_out))
    cdef Py_buffer view
    cdef char *begin
    for buffer in left_out:
        parts.append(buffer.raw())
    for part in parts:
        end = whole_lines(end) + len(part)   # of bytes, and of memoryviews of bytes
    frame = np.empty(whole_lines(end), np.uint8)
    begin = <char *> cnp.PyArray_DATA(<cnp.ndarray> frame)
    (<uint64_t *> begin)[0] = <uint64_t> len(parts) << COUNT_SHIFT
    end = lengths_nbytes(len(parts))
    for number, part in enumerate(parts, 1):
        PyObject_GetBuffer(part, &view, PyBUF_SIMPLE)
        end = whole_lines(end)
        (<uint64_t *> begin)[<size_t> number] = view.len
        memcpy(begin + end, view.buf, view.len)
        end += view.len
        PyBuffer_Release(&view)
    return frame


cpdef object unpack(object frame):
    """Return the object of a frame. Its arrays are writable and use the frame's memory."""
    if frame[0] == PROTOCOL_OPCODE:
        return loads(frame)
    return object_of(frame)


cdef object object_of(cnp.ndarray frame):
    cdef const uint64_t *lengths = <const uint64_t *> cnp.PyArray_DATA(frame)
    cdef uint64_t left = cnp.PyArray_NBYTES(frame)
    cdef uint64_t count, end, number
    cdef list parts = []
    count = lengths[0] >> COUNT_SHIFT if left >= LENGTH_NBYTES else 0
    if not 0 < count < left // LENGTH_NBYTES:
        raise pickle.UnpicklingError("an object arrived damaged: it has no valid number of parts")
    end = lengths_nbytes(count)
    for number in range(1, count + 1):
        end = whole_lines(end)
        if end > left or lengths[number] > left - end:
            raise pickle.UnpicklingError("an object arrived damaged: its parts are longer than the object")
        parts.append(frame[end : end + lengths[number]])
        end += lengths[number]
    return loads(parts.pop(0), buffers=parts)


# The bytes of the number of parts and of their lengths.
cdef inline size_t lengths_nbytes(size_t count) noexcept:
    return LENGTH_NBYTES * (count + 1)


cpdef object as_array(object frame):
    """Return the frame as an array, without a copy."""
    return np.frombuffer(frame, np.uint8) if PyBytes_CheckExact(frame) else frame


# Return an array of uninitialised bytes.
cdef object bytes_room(uint64_t nbytes):
    return np.empty(nbytes, np.uint8)


# ---- slots -----------------------------------------------------------------------------------------------------

# The first call of a collective of objects moves a slot of fixed size from each rank: the length of the frame, and the
# frame itself if it fits. Only for a longer frame there is a second call. All ranks see the same lengths.

cdef bint fits_in_slot(uint64_t nbytes) noexcept:
    return nbytes <= SLOT_NBYTES - LENGTH_NBYTES


cdef uint64_t nbytes_in(cnp.ndarray slot) noexcept:
    return (<uint64_t *> cnp.PyArray_DATA(slot))[0]


# Return a copy of the frame in a slot.
cdef object frame_at(const char *slot):
    cdef uint64_t nbytes = (<const uint64_t *> slot)[0]
    cdef const char *data = slot + LENGTH_NBYTES
    if <unsigned char> data[0] == PROTOCOL_OPCODE:
        return PyBytes_FromStringAndSize(data, nbytes)
    frame = np.empty(nbytes, np.uint8)
    memcpy(cnp.PyArray_DATA(<cnp.ndarray> frame), data, nbytes)
    return frame


cdef object frame_in(cnp.ndarray slot):
    return frame_at(<const char *> cnp.PyArray_DATA(slot))


cdef class Slots:
    """The slots of one communicator: this rank's own, and all ranks' that an all_gather collects."""

    def __cinit__(self, int size):
        self.size = size
        self.own = np.zeros(SLOT_NBYTES, np.uint8)
        self.every = np.zeros((size, SLOT_NBYTES), np.uint8)

    # Put the length of a frame into the own slot, and the frame if it fits.
    cdef void put(self, object frame) noexcept:
        cdef char *slot = <char *> cnp.PyArray_DATA(self.own)
        cdef bint is_pickle = PyBytes_CheckExact(frame)
        cdef uint64_t nbytes = PyBytes_GET_SIZE(frame) if is_pickle else cnp.PyArray_SIZE(<cnp.ndarray> frame)
        (<uint64_t *> slot)[0] = nbytes
        if fits_in_slot(nbytes):
            memcpy(slot + LENGTH_NBYTES,
                   PyBytes_AS_STRING(frame) if is_pickle else <char *> cnp.PyArray_DATA(<cnp.ndarray> frame), nbytes)

    # Return the length of the longest frame of all ranks.
    cdef uint64_t largest(self) noexcept:
        cdef const char *slot = <const char *> cnp.PyArray_DATA(self.every)
        cdef uint64_t most = 0
        cdef int rank
        for rank in range(self.size):
            most = max(most, (<const uint64_t *> (slot + rank * SLOT_NBYTES))[0])
        return most

    # Return copies of all ranks' frames: an object that is unpacked may make a collective, which overwrites the slots.
    cdef list frames(self):
        cdef const char *slot = <const char *> cnp.PyArray_DATA(self.every)
        cdef list frames = []
        cdef int rank
        for rank in range(self.size):
            frames.append(frame_at(slot + rank * SLOT_NBYTES))
        return frames
