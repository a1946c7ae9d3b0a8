# Python objects as bytes. Pickle protocol 5 leaves the arrays' memory out of the pickle, so arrays in an object are
# transferred as fast as plain arrays.
#
# A *frame* is an object as bytes. If the pickle left nothing out, the frame is the pickle, which begins with the opcode
# of its protocol. Else the frame is the number of parts, shifted so that the first byte is 0, the lengths of the parts,
# and the parts, each on a cache line. The first part is the pickle; the buffers that it left out follow. Collectives,
# messages and `Broadcast` move frames. Ranks authenticated each other when they met, and trust each other's pickles.

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from .._core cimport numpy_api as cnp
from .._core.segment cimport SR_CACHE_LINE
from .._core.staging cimport whole_lines

import _pickle
import copyreg
import io
import pickle

import numpy as np

cnp.import_array()

cdef enum:
    COUNT_SHIFT = 8
    LENGTH_NBYTES = 8
    SEARCHED_ITEMS = 256     # of all containers
    SEARCHED_LEVELS = 3      # of containers in containers

cdef object dumps = pickle.dumps
cdef object loads = pickle.loads
cdef object BytesIO = io.BytesIO
cdef object PickleBuffer = pickle.PickleBuffer
cdef object ndarray = np.ndarray
cdef bytes padding = bytes(SR_CACHE_LINE)
cdef dict reducers = copyreg.dispatch_table


cpdef object pack(object item):
    """Return the object as a frame: bytes if it is a pickle, else an array. Raise the errors of pickle."""
    cdef list left_out = []
    stream = pickled(item, left_out.append)
    return joined(pieces(stream, left_out)) if left_out else stream


cpdef list pieces_of(object item):
    """Return the frame that `pack` returns in pieces: bytes, and the memory of the object's arrays, not copied."""
    cdef list left_out = []
    stream = pickled(item, left_out.append)
    return pieces(stream, left_out) if left_out else [stream]


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


# Return the pieces of a frame: all before the buffers that the pickle left out, then each buffer, and the rest of its
# last line.
cdef list pieces(bytes stream, list left_out):
    cdef list found = [None]
    cdef size_t nbytes
    for buffer in left_out:
        part = buffer.raw()
        nbytes = len(part)
        found.append(part)
        found.append(padding[:whole_lines(nbytes) - nbytes])
    found[0] = head_of(stream, found)
    return found


# Return the first piece of a frame, before the others.
cdef bytes head_of(bytes stream, list pieces):
    cdef size_t number, nparts = 1 + len(pieces) // 2
    cdef size_t begin = whole_lines(lengths_nbytes(nparts))
    cdef size_t end = begin + PyBytes_GET_SIZE(stream)
    cdef bytes head = PyBytes_FromStringAndSize(NULL, whole_lines(end))
    cdef char *data = PyBytes_AS_STRING(head)
    cdef uint64_t *lengths = <uint64_t *> data
    memset(data, 0, begin)
    lengths[0] = <uint64_t> nparts << COUNT_SHIFT
    lengths[1] = PyBytes_GET_SIZE(stream)
    for number in range(1, nparts):
        lengths[1 + number] = len(pieces[2 * number - 1])
    memcpy(data + begin, PyBytes_AS_STRING(stream), end - begin)
    memset(data + end, 0, whole_lines(end) - end)
    return head


cdef object joined(list pieces):
    cdef size_t end = 0
    cdef Py_buffer view
    cdef char *data
    for piece in pieces:
        end += len(piece)   # of bytes, and of memoryviews of bytes
    frame = np.empty(end, np.uint8)
    data = <char *> cnp.PyArray_DATA(<cnp.ndarray> frame)
    for piece in pieces:
        PyObject_GetBuffer(piece, &view, PyBUF_SIMPLE)
        memcpy(data, view.buf, view.len)
        data += view.len
        PyBuffer_Release(&view)
    return frame


cpdef object unpack(object frame):
    """Return the object of a frame. Its arrays are writable and use the frame's memory."""
    if len(frame) > 0 and frame[0] == PROTOCOL_OPCODE:
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


# Return an array of uninitialised bytes that begins on a cache line, and so do the arrays of a frame that is put there.
cdef object bytes_room(uint64_t nbytes):
    cdef cnp.ndarray room = np.empty(nbytes + SR_CACHE_LINE, np.uint8)
    cdef size_t begin = -<uintptr_t> cnp.PyArray_DATA(room) % SR_CACHE_LINE
    return room[begin : begin + nbytes]
