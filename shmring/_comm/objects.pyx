# Python objects as bytes. Pickle protocol 5 leaves the arrays' memory out of the pickle, so arrays in an object are
# transferred as fast as plain arrays.
#
# A *frame* is an object as bytes. If the pickle left nothing out, the frame is the pickle, as bytes; it begins with the
# opcode of its protocol. Else the frame is an array: the number of parts, shifted so that the first byte is 0, the
# lengths of the parts, and the parts, each on a cache line. The first part is the pickle; the buffers that it left out
# follow. Ranks authenticated each other when they met, and trust each other's pickles.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from .._core cimport numpy_api as cnp

import pickle

import numpy as np

cnp.import_array()

cdef enum:
    PROTOCOL_OPCODE = 0x80   # the first byte of every pickle
    COUNT_SHIFT = 8
    LINE_NBYTES = 64
    LENGTH_NBYTES = 8        # a slot begins with the length of its frame
    # bench/peers: a broadcast of 256 bytes takes 0.16 us longer than one of 48 bytes; most small objects fit.
    SLOT_NBYTES = 256

cdef object dumps = pickle.dumps
cdef object loads = pickle.loads


cpdef object pack(object item):
    """Return the object as a frame. Raise the errors of pickle."""
    cdef list left_out = []
    stream = dumps(item, 5, buffer_callback=left_out.append)
    return frame_of(stream, left_out) if left_out else stream


cdef object frame_of(object stream, list left_out):
    parts = [memoryview(stream)]
    for buffer in left_out:
        parts.append(buffer.raw())
    numbers = [len(parts) << COUNT_SHIFT]
    for part in parts:
        numbers.append(part.nbytes)
    lengths = np.array(numbers, "i8")
    places = places_of(lengths)
    frame = np.empty(places.pop(), np.uint8)
    frame[: lengths.nbytes] = lengths.view(np.uint8)
    for part, begin in zip(parts, places, strict=False):
        frame[begin : begin + part.nbytes] = part
    return frame


cpdef object unpack(object frame):
    """Return the object of a frame. Its arrays are writable and use the frame's memory."""
    if frame[0] == PROTOCOL_OPCODE:
        return loads(frame)
    count = int(frame[:LENGTH_NBYTES].view("i8")[0]) >> COUNT_SHIFT
    lengths = frame[: 8 * (count + 1)].view("i8")
    places = places_of(lengths)
    parts = []
    for begin, nbytes in zip(places, lengths[1:].tolist(), strict=False):
        parts.append(frame[begin : begin + nbytes])
    return loads(parts[0].data, buffers=parts[1:])


# Return the offset of each part, and the end of the frame.
cdef list places_of(object lengths):
    cdef object end = whole_lines(lengths.nbytes)
    places = [end]
    for nbytes in lengths[1:].tolist():
        end += whole_lines(nbytes)
        places.append(end)
    return places


cdef object whole_lines(object nbytes):
    return (nbytes + LINE_NBYTES - 1) // LINE_NBYTES * LINE_NBYTES


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
