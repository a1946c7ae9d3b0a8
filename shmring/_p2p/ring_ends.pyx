# The ends of a ring that needs no communicator, from one writer to one or several readers: putting and getting items,
# the places of the processes, and waiting for items and room. The modules `ring` and `broadcast` have the public
# classes; `ring_common` allocates the memory, pickles the ring, and converts dtypes.

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from .._arrays.objects cimport bytes_room, pieces_of, unpack
from .._core cimport numpy_api as cnp
from .._core.kernels cimport find_kernels
from .._core.segment cimport (
    SR_CACHE_LINE, SR_PAGE, sr_event, sr_event_signal, sr_flag_load, sr_flag_load_ordered, sr_flag_set, sr_now_ns,
    sr_pause, sr_time_away,
)
from .._core.spsc_ring cimport (
    SR_CONSUMER, SR_FRAME_CONTINUED, SR_FRAME_CUT, SR_MOST_READERS, SR_ORIGIN_BEGIN, SR_ORIGIN_NBYTES, SR_PLACE_CLOSED,
    SR_PLACE_FREE, SR_PLACE_JOINED, SR_PLACE_RESERVED, SR_PRODUCER, SR_RING_CUT, SR_RING_DAMAGED, SR_RING_LEAST_NBYTES,
    SR_RING_WAIT, SR_RING_WHOLE, sr_broadcast, sr_broadcast_admit, sr_broadcast_drop, sr_broadcast_find_slowest,
    sr_broadcast_format, sr_broadcast_has_changed, sr_broadcast_has_readers, sr_broadcast_head_nbytes,
    sr_broadcast_is_valid, sr_broadcast_leave, sr_broadcast_open_writer, sr_broadcast_peek, sr_broadcast_pull,
    sr_broadcast_take_place, sr_broadcast_was_dropped, sr_event_sleep, sr_event_watch, sr_flag_mark,
    sr_flag_replace_ordered, sr_frame, sr_outgoing, sr_place, sr_place_get_state, sr_place_owner, sr_place_pid,
    sr_process_close, sr_process_has_ended, sr_process_open, sr_reader, sr_ring_end, sr_ring_frame_nbytes,
    sr_ring_has_frame, sr_ring_has_room, sr_ring_message_nbytes, sr_ring_open_end, sr_ring_publish_taken, sr_ring_push,
    sr_ring_push_part, sr_ring_put,
)
from .._core.timeouts cimport NEVER_NS, deadline_ns_of
from .ring_frames cimport (
    ARRAY, BRIEF_ITEM_NBYTES, BRIEF_PAUSES, BYTES, DESCRIPTION, FORTRAN_ARRAY, JOIN_NBYTES, KIND_BITS, LONG_POLL_NS,
    MOST_DIMENSIONS, NUMBER_BITS, OBJECT, PIECE_NBYTES, POLLS_AN_ABSENT_CHECK, POLLS_A_FULL_CHECK, POLLS_A_SIGNAL_CHECK,
    POLL_NS, WATCHED_POLL_NS, Shape, sr_watcher, sr_watcher_start, sr_watcher_stop,
)

import queue

from ..errors import Closed, Error, Timeout

cnp.import_array()

MOST_READERS = SR_MOST_READERS
LEAST_NBYTES = SR_RING_LEAST_NBYTES
ORIGIN_BEGIN, ORIGIN_NBYTES = SR_ORIGIN_BEGIN, SR_ORIGIN_NBYTES    # the place of what ring_common.py keeps

cdef object DISCARDED = object()   # in place of an item whose rest is discarded


# True if the caller cannot receive such an item: an object, or bytes into an array.
cdef inline bint is_unwanted(int kind, object out, bint takes_objects) noexcept:
    return (kind == OBJECT and not takes_objects) or (kind == BYTES and out is not None)


@cython.no_gc_clear   # __dealloc__ needs `mapping`
cdef class RingEnds:
    """The writer's end and one reader's end of a ring, in one process.

    Each end belongs to the process that first puts or gets there.
    """

    def __cinit__(self, *_, **__):
        self.closed_because = "this ring was never made"
        self._fd = -1
        self.watched_fd[SR_PRODUCER] = self.watched_fd[SR_CONSUMER] = -1

    # Usually `close` has done all of this. In a destructor, an exception of a signal handler may have prevented that;
    # pickles of the ring that are under way then cannot be loaded any more. The garbage collector may have unmapped the
    # memory before, with the attributes of `mapping`.
    def __dealloc__(self):
        if self.shared != NULL and self.mapping.address != 0:
            self.leave()
        sr_process_close(self.watched_fd[SR_PRODUCER])
        sr_process_close(self.watched_fd[SR_CONSUMER])
        sr_process_close(self._fd)

    def __init__(self, mapping, int pauses):
        cdef uintptr_t address = mapping.address
        cdef sr_broadcast *shared = <sr_broadcast *> address
        cdef uint64_t nbytes = 0, places = 0
        if mapping.nbytes >= SR_PAGE:
            nbytes, places = shared.nbytes, shared.places
        if not sr_broadcast_is_valid(shared, mapping.nbytes, nbytes, places):
            raise Error("this memory is not a ring of this version of shmring")
        self.mapping = mapping
        self.nbytes_of_ring = nbytes
        self.places = <uint32_t> places
        self.keeps_readers = shared.reserved == places
        self.shared = shared
        self.tail = &shared.tail.value if shared.drops else NULL
        self.pauses = pauses
        self.closed_because = None

    @staticmethod
    def _format(uintptr_t address, uint64_t nbytes, uint32_t places, uint32_t reserved, bint drops, bint single_use):
        """Format a ring of nbytes, a power of two, in zeroed memory."""
        sr_broadcast_format(<sr_broadcast *> address, nbytes, places, reserved, drops, single_use, 0)

    @staticmethod
    def _head_nbytes(uint64_t places):
        """Return the bytes before the ring's data."""
        return sr_broadcast_head_nbytes(places)

    # -- putting --

    def put(self, item, timeout=None, *, bint block=True):
        """Put bytes or an array in, and wait until all of it is in the ring.

        Parameters
        ----------
        item : bytes or array
            Bytes-like, or a NumPy array of any shape and any dtype without objects. It is copied.
        timeout : float, optional
            Seconds; None waits for ever.
        block : bool
            False: raise queue.Full if there is no room now for the whole item. There never is for an item larger than
            the ring.

        Raises
        ------
        Timeout
            The other side then gets nothing of the item.
        Closed, RankFailed
            If the other side has closed the ring, or died.
        TypeError
            For any other item.
        """
        cdef uint64_t deadline = deadline_ns_of(timeout)
        self.begin_put()
        try:
            if not isinstance(item, cnp.ndarray) and type(item) is not bytes:
                item = self._as_item(item)
            if type(item) is bytes:
                self.check_room(sr_ring_message_nbytes(&self.writer.end, len(item)), block)
                self.send(BYTES, <const unsigned char *> PyBytes_AS_STRING(item), len(item), &deadline)
            else:
                self.put_array(item, block, &deadline)
            self.number += 1
        finally:
            self.is_putting = False

    def _put_object(self, obj, timeout, bint block):
        """Pickle an object, and put it in."""
        cdef uint64_t deadline = deadline_ns_of(timeout)
        cdef uint64_t room_nbytes = 0
        cdef size_t nbytes = 0
        cdef list parts = pieces_of(obj)
        for part in parts:
            nbytes += len(part)
        if nbytes <= JOIN_NBYTES:
            parts = [b"".join(parts)]
        self.begin_put()
        try:
            for part in parts:
                room_nbytes += sr_ring_message_nbytes(&self.writer.end, len(part))
            self.check_room(room_nbytes, block)
            self.send_parts(OBJECT, parts, nbytes, &deadline)
            self.number += 1
        finally:
            self.is_putting = False

    cdef int begin_put(self) except -1:
        if self.closed_because is not None:
            raise Closed(self.closed_because)
        if self.is_putting:
            raise RuntimeError("another thread is putting into this ring; only one at a time may put")
        self.is_putting = True   # before any code that may run Python: another thread may put or close meanwhile
        try:
            if not self.puts:
                self.take_side(SR_PRODUCER)
            self.check_readers()
        except BaseException:
            self.is_putting = False
            raise
        return 0

    cdef int put_array(self, object given, bint block, uint64_t *deadline) except -1:
        cdef cnp.ndarray x
        cdef int kind = ARRAY
        cdef size_t nbytes
        if type(given) is not cnp.ndarray:
            given = self._as_item(given)
        x = given
        if not cnp.PyArray_FLAGS(x) & cnp.NPY_ARRAY_C_CONTIGUOUS:
            if cnp.PyArray_FLAGS(x) & cnp.NPY_ARRAY_F_CONTIGUOUS:
                kind = FORTRAN_ARRAY
            else:
                x = x.copy()
        nbytes = cnp.PyArray_NBYTES(x)
        # An array whose description may be dropped before it needs one of its own.
        if self.tail != NULL or not self.is_described(x):
            self.send_description(x, nbytes, block, deadline)
        else:
            self.check_room(sr_ring_message_nbytes(&self.writer.end, nbytes), block)
        self.send(kind, <const unsigned char *> cnp.PyArray_DATA(x), nbytes, deadline)
        return 0

    cdef bint is_described(self, cnp.ndarray x) except -1:
        cdef int i
        if cnp.PyArray_DESCR(x) != <void *> self.put_dtype or cnp.PyArray_NDIM(x) != self.put_shape.ndim or \
                (self.put_names is not None and self.put_dtype.names is not self.put_names):
            return False
        for i in range(cnp.PyArray_NDIM(x)):
            if cnp.PyArray_DIM(x, i) != self.put_shape.length[i]:
                return False
        return True

    # Send the shape and dtype of the next arrays to the other side.
    cdef int send_description(self, cnp.ndarray x, size_t nbytes, bint block, uint64_t *deadline) except -1:
        cdef object dtype = <object> cnp.PyArray_DESCR(x)
        cdef Shape shape
        cdef int i
        text, names = self.put_text, dtype.names
        if dtype is not self.put_dtype or names is not self.put_names:
            text = self._text_of(dtype)
        shape.ndim = cnp.PyArray_NDIM(x)
        for i in range(cnp.PyArray_NDIM(x)):
            shape.length[i] = cnp.PyArray_DIM(x, i)
        words = PyBytes_FromStringAndSize(<const char *> &shape, 8 * (1 + shape.ndim)) + text
        self.check_room(sr_ring_message_nbytes(&self.writer.end, len(words)) +
                        sr_ring_message_nbytes(&self.writer.end, nbytes), block)
        self.put_dtype = None    # unless all of it gets there
        self.send(DESCRIPTION, <const unsigned char *> PyBytes_AS_STRING(words), len(words), deadline)
        self.put_dtype, self.put_names, self.put_text, self.put_shape = dtype, names, text, shape
        return 0

    # Without block, and in a ring that drops items, either the whole item fits or nothing is put in.
    cdef int check_room(self, uint64_t room_nbytes, bint block) except -1:
        if block and self.tail == NULL:
            return 0
        if self.must_send_cut:
            room_nbytes += sr_ring_frame_nbytes(0)
        if self.is_ready(SR_PRODUCER, room_nbytes):
            return 0
        if self.tail != NULL:
            return self.drop_for(room_nbytes)
        self.check_if_due(SR_PRODUCER, room_nbytes)
        if not self.is_ready(SR_PRODUCER, room_nbytes):
            raise queue.Full()
        return 0

    cdef int begin_message(self, sr_outgoing *message, int kind, uint64_t nbytes, uint64_t *deadline) except -1:
        if self.must_send_cut:
            self.send_cut(deadline)
        memset(message, 0, sizeof(sr_outgoing))
        message.head.kind = kind | self.number << KIND_BITS
        message.head.tag = SR_FRAME_CONTINUED if kind == DESCRIPTION else 0
        message.head.message_nbytes = nbytes
        return 0

    cdef int send(self, int kind, const unsigned char *data, size_t nbytes, uint64_t *deadline) except -1:
        cdef sr_outgoing message
        cdef int status
        self.begin_message(&message, kind, nbytes, deadline)
        message.data = data
        try:
            while True:
                if nbytes <= BRIEF_ITEM_NBYTES:
                    status = sr_ring_push(&self.writer.end, &message)
                else:
                    with nogil:
                        status = sr_ring_push(&self.writer.end, &message)
                if status == SR_RING_WHOLE:
                    return 0
                self.wait(SR_PRODUCER, sr_ring_frame_nbytes(message.head.nbytes), deadline)
        except BaseException:
            if message.offset > 0:
                self.void_message(&message)
            raise

    # As send, for a message of several bytes-like parts, which must not all be empty.
    cdef int send_parts(self, int kind, list parts, size_t nbytes, uint64_t *deadline) except -1:
        cdef sr_outgoing message
        self.begin_message(&message, kind, nbytes, deadline)
        try:
            for part in parts:
                self.send_part(part, &message, deadline)
        except BaseException:
            if message.offset > 0:
                self.void_message(&message)
            raise
        return 0

    cdef int send_part(self, object part, sr_outgoing *message, uint64_t *deadline) except -1:
        cdef Py_buffer view
        cdef uint64_t done = 0
        cdef int status
        PyObject_GetBuffer(part, &view, PyBUF_SIMPLE)
        try:
            while True:
                with nogil:
                    status = sr_ring_push_part(&self.writer.end, message, <const unsigned char *> view.buf, view.len,
                                               &done)
                if status == SR_RING_WHOLE:
                    return 0
                self.wait(SR_PRODUCER, sr_ring_frame_nbytes(message.head.nbytes), deadline)
        finally:
            PyBuffer_Release(&view)

    # Notify the other side that the message which it has begun to get is void: now, or before the next message.
    cdef int void_message(self, sr_outgoing *message) except -1:
        self.cut = message.head
        self.cut.nbytes = 0
        self.cut.flags = SR_FRAME_CUT
        self.must_send_cut = True
        if self.is_ready(SR_PRODUCER, sr_ring_frame_nbytes(0)):
            self.send_cut(NULL)
        return 0

    cdef int send_cut(self, uint64_t *deadline) except -1:
        while not self.is_ready(SR_PRODUCER, sr_ring_frame_nbytes(0)):
            self.wait(SR_PRODUCER, sr_ring_frame_nbytes(0), deadline)
        sr_ring_put(&self.writer.end, &self.cut, &self.cut)   # has no data
        self.must_send_cut = False
        return 0

    # -- getting --

    def get(self, timeout=None, *, bint block=True, out=None):
        """Return the next item: bytes as bytes, an array as a new array of its own, or in `out`.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits for ever.
        block : bool
            False: raise queue.Empty if the next item is not complete.
        out : numpy.ndarray, optional
            A contiguous array of the dtype and shape of the next item. It is filled and returned. After an exception
            it may hold a part of the item.

        Returns
        -------
        bytes or numpy.ndarray
            The item.

        Raises
        ------
        Timeout
            Nothing is lost.
        ValueError, TypeError
            If `out` differs from the item, or is no array or a masked one. The item stays for the next call.
        MemoryError
            If there is no memory for the item. It stays for the next call, unless `out` already has a part of it.
        Closed, Aborted, RankFailed
            Once the ring is empty: if the other side has closed it, left its `with` block by an exception, or died.
        """
        return self.next_item(timeout, block, out, False)

    def _get_object(self, timeout, bint block):
        """Return the next item, unpickled if it is an object."""
        return self.next_item(timeout, block, None, True)

    cdef object next_item(self, object timeout, bint block, object out, bint takes_objects):
        cdef uint64_t deadline = deadline_ns_of(timeout)
        self.begin_get()
        try:
            while True:
                if self.item is None and not self.begin_item(out, takes_objects, block, &deadline):
                    continue
                if not self.finish_item(block, &deadline):
                    continue
                if self.item_kind == DESCRIPTION:
                    item, self.item = self.item, None
                    self.keep_description(item)
                    continue
                if self.item is DISCARDED:
                    self.item = None
                    self.next_number += 1
                    raise MemoryError("an item is lost: a get(out=...) failed, and no memory was left for its part")
                item = self.deliver(out, takes_objects)
                if self.item_kind == OBJECT:
                    item = self.unpickled(item)
                self.next_number += 1
                return item
        except BaseException:
            self.release_given()
            raise
        finally:
            self.is_getting = False

    # Return the object of an item. If it cannot be unpickled it is lost, so that it is not in the way. After an
    # interrupt, or a lack of memory, it stays for the next call.
    cdef object unpickled(self, object item):
        try:
            return unpack(item)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, MemoryError):
                self.next_number += 1
            else:
                self.item = item
            raise

    # After an exception the caller's array is the caller's again: continue the item in a new array. Without memory for
    # that the rest of the item is discarded, and the next call raises MemoryError.
    cdef int release_given(self) except -1:
        if self.item is None or not self.item_is_given:
            return 0
        self.item_is_given = False
        try:
            item = self.new_array(self.item_kind == FORTRAN_ARRAY)
            memcpy(cnp.PyArray_DATA(<cnp.ndarray> item), self.incoming.data, self.incoming.offset)
            self.item, self.incoming.data = item, <unsigned char *> cnp.PyArray_DATA(<cnp.ndarray> item)
        except MemoryError:
            self.item, self.incoming.data = DISCARDED, NULL
        return 0

    # Return a new array of the received shape and dtype.
    cdef object new_array(self, bint is_fortran):
        cdef cnp.npy_intp[MOST_DIMENSIONS] lengths
        cdef int i
        for i in range(self.got_shape.ndim):
            lengths[i] = self.got_shape.length[i]
        Py_INCREF(self.got_dtype)
        return cnp.PyArray_Empty(<int> self.got_shape.ndim, lengths, self.got_dtype, is_fortran)

    cdef int begin_get(self) except -1:
        if self.closed_because is not None:
            raise Closed(self.closed_because)
        if self.is_getting:
            raise RuntimeError("another thread is getting from this ring; only one at a time may get")
        self.is_getting = True   # as in begin_put
        try:
            if not self.gets:
                self.take_side(SR_CONSUMER)
        except BaseException:
            self.is_getting = False
            raise
        return 0

    # Allocate the destination of the next message. Return False if no message has come yet.
    cdef bint begin_item(self, object out, bint takes_objects, bint block, uint64_t *deadline) except -1:
        cdef sr_frame head
        cdef int status = SR_RING_WAIT, kind
        cdef uint64_t nskipped
        if self.may_take():
            status = sr_broadcast_peek(&self.consumer, self.tail, &head)
        if status == SR_RING_WAIT:
            self.wait_for_frame(block, deadline)
            return False
        if status == SR_RING_CUT:    # items have been dropped
            return False
        if status != SR_RING_WHOLE or head.flags & SR_FRAME_CUT or head.message_nbytes > <uint64_t> 1 << 62:
            raise self._damaged()
        kind = head.kind & (1 << KIND_BITS) - 1
        nskipped = ((head.kind >> KIND_BITS) - self.next_number) & (<uint64_t> 1 << NUMBER_BITS) - 1
        if nskipped != 0:
            if self.tail == NULL or nskipped >> NUMBER_BITS - 1 != 0:
                raise self._damaged()
            self._nlost += nskipped
            self.next_number += nskipped
        if is_unwanted(kind, out, takes_objects):
            raise self._unwanted(kind == OBJECT, head.message_nbytes)
        self.item_is_given = self.item_is_whole = False
        if kind == BYTES or kind == DESCRIPTION:
            item = PyBytes_FromStringAndSize(NULL, head.message_nbytes)
            self.incoming.data = <unsigned char *> PyBytes_AS_STRING(item)
        elif kind == OBJECT:
            item = bytes_room(head.message_nbytes)
            self.incoming.data = <unsigned char *> cnp.PyArray_DATA(<cnp.ndarray> item)
        elif kind == ARRAY or kind == FORTRAN_ARRAY:
            item = self.room_for_array(&head, kind, out)
            self.incoming.data = <unsigned char *> cnp.PyArray_DATA(<cnp.ndarray> item)
        else:
            raise self._damaged()
        self.incoming.nbytes = head.message_nbytes
        self.incoming.offset = 0
        self.item_kind = kind
        self.item = item
        return True

    cdef object room_for_array(self, sr_frame *head, int kind, object out):
        cdef uint64_t nbytes
        cdef bint is_fortran = kind == FORTRAN_ARRAY
        cdef int i
        if self.got_text is None:
            raise self._damaged()
        if self.got_dtype is None or (self.got_names is not None and self.got_dtype.names is not self.got_names):
            self.got_dtype = self._dtype_of(self.got_text)
            self.got_names = self.got_dtype.names
        nbytes = cnp.PyDataType_ELSIZE(self.got_dtype)
        for i in range(self.got_shape.ndim):
            nbytes *= <uint64_t> self.got_shape.length[i]
        if nbytes != head.message_nbytes:
            raise self._damaged()
        if out is not None:
            self.check_out(out, is_fortran)
            self.item_is_given = True
            return out
        return self.new_array(is_fortran)

    cdef int check_out(self, object out, bint is_fortran) except -1:
        cdef int axis
        shape = ()
        for axis in range(self.got_shape.ndim):
            shape += (self.got_shape.length[axis],)
        if type(out) is not cnp.ndarray:
            self._check_class(out)
        if out.shape != shape or out.dtype != self.got_dtype:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}, the next item {self.got_dtype}{list(shape)}; "
                             "it stays for the next get")
        if not (out.flags.f_contiguous if is_fortran else out.flags.c_contiguous) or not out.flags.writeable:
            raise ValueError(f"out must be writable and contiguous, in {'Fortran' if is_fortran else 'C'} order "
                             "as the next item is")
        return 0

    # Return False if the message is void: its sender gave it up, or dropped it.
    cdef bint finish_item(self, bint block, uint64_t *deadline) except -1:
        cdef int status
        while not self.item_is_whole:
            if self.incoming.nbytes <= BRIEF_ITEM_NBYTES:
                status = sr_broadcast_pull(&self.consumer, self.tail, &self.incoming)
            else:
                with nogil:
                    status = sr_broadcast_pull(&self.consumer, self.tail, &self.incoming)
            if status == SR_RING_WHOLE:
                break
            if status == SR_RING_CUT:
                self.item = None
                return False
            if status == SR_RING_DAMAGED:
                raise self._damaged()
            self.wait_for_frame(block, deadline)
        self.item_is_whole = True
        return True

    # Return the item, which is whole, in `out` if that is given. An item that is refused stays for the next call.
    cdef object deliver(self, object out, bint takes_objects):
        item = self.item
        if self.item_kind == OBJECT or self.item_kind == BYTES:   # receiving may have begun in another call
            if is_unwanted(self.item_kind, out, takes_objects):
                raise self._unwanted(self.item_kind == OBJECT, len(item))
        elif out is not item and out is not None:
            self.check_out(out, self.item_kind == FORTRAN_ARRAY)
            out[...] = item
            item = out
        self.item = None
        return item

    cdef int keep_description(self, bytes words) except -1:
        cdef Shape shape
        cdef size_t nbytes = len(words)
        cdef int i
        memset(&shape, 0, sizeof(shape))
        memcpy(&shape, PyBytes_AS_STRING(words), min(nbytes, sizeof(shape)))
        if nbytes < 8 or not 0 <= shape.ndim <= MOST_DIMENSIONS or nbytes < 8 * (1 + <size_t> shape.ndim):
            raise self._damaged()
        for i in range(shape.ndim):
            if shape.length[i] < 0:
                raise self._damaged()
        text = words[8 * (1 + shape.ndim):]
        if text != self.got_text:
            self.got_dtype, self.got_text = None, text
        self.got_shape = shape
        return 0

    cdef int wait_for_frame(self, bint block, uint64_t *deadline) except -1:
        if not block:
            sr_ring_publish_taken(&self.consumer)
            self.check_if_due(SR_CONSUMER, 0)
            raise queue.Empty()
        self.wait(SR_CONSUMER, 0, deadline)
        return 0

    def _damaged(self):
        """Return the error of a ring that holds data which no process puts in."""
        return Error("the memory of this ring is damaged: it holds data that were never put in")

    # -- the places of the processes --

    # Make this process the owner of a side.
    cdef int take_side(self, int side) except -1:
        pid, start_time = self._use_side()
        if side == SR_PRODUCER:
            self.become_writer(pid, start_time)
        else:
            self.become_reader(pid, start_time)
        return 0

    cdef int become_writer(self, int pid, uint64_t start_time) except -1:
        cdef sr_place *place = &self.shared.writer
        if not sr_flag_replace_ordered(&place.owner, SR_PLACE_FREE, sr_place_owner(pid, SR_PLACE_JOINED)):
            raise RuntimeError(f"process {sr_place_pid(sr_flag_load(&place.owner))} puts into this ring already, or "
                               "has done so; a ring has one writer")
        sr_flag_set(&place.start_time, start_time)
        sr_broadcast_open_writer(&self.writer, self.shared, self.data(), self.nbytes_of_ring, 0,
                                 find_kernels(NULL).copy, PIECE_NBYTES)
        self.puts = self.has_readers = True
        return 0

    cdef int become_reader(self, int pid, uint64_t start_time) except -1:
        cdef int place = sr_broadcast_take_place(self.shared, self.places, pid)
        cdef uint32_t i
        if place < 0:
            for i in range(self.places):
                self.vacate_if_dead(i)
            place = sr_broadcast_take_place(self.shared, self.places, pid)
        if place < 0 and self.shared.single_use:
            raise RuntimeError(f"process {sr_place_pid(sr_flag_load(&self.shared.reader[0].place.owner))} gets from "
                               "this ring already, or has done so; each side is for one process")
        if place < 0:
            raise RuntimeError(f"{self.places} processes get from this ring already, as many as it was made for")
        sr_flag_set(&self.shared.reader[place].place.start_time, start_time)
        memset(&self.consumer, 0, sizeof(sr_ring_end))
        self.place, self.pid, self.has_entered = place, pid, False
        self.gets = True
        return 0

    # Free or close a reader's place whose owner is dead. Return whether this call has done so.
    cdef bint vacate_if_dead(self, uint32_t i) except -1:
        cdef sr_place *place = &self.shared.reader[i].place
        cdef uint64_t owner = sr_flag_load(&place.owner)
        if sr_place_pid(owner) == 0 or sr_place_get_state(owner) == SR_PLACE_CLOSED:
            return False
        cause = self._cause_of_death(sr_place_pid(owner), sr_flag_load(&place.start_time))
        if cause is None:
            return False
        self._last_death = cause
        sr_broadcast_leave(self.shared, i, owner)
        return True

    cdef unsigned char *data(self) noexcept nogil:
        return <unsigned char *> self.shared + sr_broadcast_head_nbytes(self.places)

    # Return whether this process may take frames now. False: the writer has yet to admit it.
    cdef bint may_take(self) except -1:
        cdef sr_reader *reader = &self.shared.reader[self.place]
        cdef uint64_t first
        if self.has_entered:
            return True
        if not self.is_admitted():
            return False
        first = sr_flag_load(&reader.place.first)
        if first % SR_CACHE_LINE:
            raise self._damaged()
        sr_ring_open_end(&self.consumer, &reader.ring, self.data(), self.nbytes_of_ring, first, &reader.event,
                         find_kernels(NULL).copy, PIECE_NBYTES)
        self.next_number = sr_flag_load(&reader.place.first_number)
        self._nlost = 0
        self.has_entered = True
        return True

    cdef bint is_admitted(self) noexcept nogil:
        return sr_place_get_state(sr_flag_load_ordered(&self.shared.reader[self.place].place.owner)) == SR_PLACE_JOINED

    # Begin a put: admit new readers, and raise if no process will ever get the item.
    cdef int check_readers(self) except -1:
        cdef uint64_t no_deadline = NEVER_NS
        if sr_broadcast_has_changed(&self.writer):
            # A reader's first frame must not be the end of an item that it has not seen.
            if self.must_send_cut and self.is_ready(SR_PRODUCER, sr_ring_frame_nbytes(0)):
                self.send_cut(&no_deadline)
            if not self.must_send_cut:
                if sr_broadcast_admit(&self.writer, self.places, self.number):
                    self.put_dtype = None    # describe the next array again
            self.has_readers = sr_broadcast_has_readers(self.shared, self.places)
        if self.keeps_readers and not self.has_readers:
            raise self._error_of_close(True)
        return 0

    # Return whether there is a frame (room_nbytes 0), or room for room_nbytes.
    cdef bint is_ready(self, int side, uint64_t room_nbytes) noexcept nogil:
        if side == SR_CONSUMER:
            if not self.has_entered:
                return self.is_admitted()
            return sr_ring_has_frame(&self.consumer) or sr_broadcast_was_dropped(self.tail, self.consumer.position)
        if sr_ring_has_room(&self.writer.end, room_nbytes):
            return True
        if self.tail != NULL:
            return False
        sr_broadcast_find_slowest(&self.writer, self.places)
        if self.writer.slowest < 0 and self.keeps_readers:
            return False
        return sr_ring_has_room(&self.writer.end, room_nbytes)

    # Return the event on which a side sleeps; NULL: it has nothing to sleep for.
    cdef sr_event *event_of(self, int side) noexcept nogil:
        if side == SR_CONSUMER:
            return &self.shared.event
        return &self.shared.reader[self.writer.slowest].event if self.writer.slowest >= 0 else NULL

    # Return whether the process for which a side waits has closed the ring.
    cdef bint is_closed_there(self, int side) noexcept nogil:
        if side == SR_CONSUMER:
            return sr_place_get_state(sr_flag_load(&self.shared.writer.owner)) == SR_PLACE_CLOSED
        return self.writer.slowest < 0 and self.keeps_readers

    # Return the process for which a side waits; 0 if that process has not come.
    cdef int awaited_pid(self, int side) noexcept nogil:
        if side == SR_CONSUMER:
            return sr_place_pid(sr_flag_load(&self.shared.writer.owner))
        if self.writer.slowest < 0:
            return 0
        return sr_place_pid(sr_flag_load(&self.shared.reader[self.writer.slowest].place.owner))

    # A reader: raise RankFailed if the writer is gone, or will never come. The writer: free or close the place of the
    # slowest reader, and every reserved place, if its process is gone or will never come.
    cdef int poll_awaited(self, int side) except -1:
        cdef sr_place *place = &self.shared.writer
        cdef int slowest = self.writer.slowest
        cdef uint32_t i
        if side == SR_CONSUMER:
            self._poll_writer(sr_place_pid(sr_flag_load(&place.owner)), sr_flag_load(&place.start_time),
                              set(self._pids_of_readers()))
        elif slowest >= 0 and not self.vacate_if_dead(slowest):
            if sr_place_pid(sr_flag_load(&self.shared.reader[slowest].place.owner)) == 0:
                cause = self._why_none_comes(set(self._pids_of_readers()))
                if cause is not None:
                    self._last_death = cause
                    for i in range(self.places):
                        if sr_flag_load(&self.shared.reader[i].place.owner) == SR_PLACE_RESERVED:
                            sr_broadcast_leave(self.shared, i, SR_PLACE_RESERVED)
        return 0

    def _pids_of_readers(self):
        """Return the processes that have places as readers."""
        cdef uint32_t i, pid
        cdef list pids = []
        for i in range(self.places):
            pid = sr_place_pid(sr_flag_load(&self.shared.reader[i].place.owner))
            if pid != 0:
                pids.append(pid)
        return pids

    # Make room by dropping the oldest items, in a ring that drops items.
    cdef int drop_for(self, uint64_t room_nbytes) except -1:
        if room_nbytes + SR_CACHE_LINE > self.nbytes_of_ring:
            raise ValueError(f"the item needs {room_nbytes} bytes; with drop=True it has to fit into the ring, which "
                             f"has {self.nbytes_of_ring - SR_CACHE_LINE}: make a larger ring")
        if not sr_broadcast_drop(&self.writer, room_nbytes):
            raise self._damaged()
        return 0

    # -- waiting --

    # Return when there may be a frame (room_nbytes 0) or room for room_nbytes.
    cdef int wait(self, int side, uint64_t room_nbytes, uint64_t *deadline) except -1:
        cdef uint64_t now, next_poll
        cdef int npolls = 0
        cdef bint ready
        if self.spin(side, room_nbytes, min(self.pauses, <int> BRIEF_PAUSES)):
            return 0
        next_poll = sr_now_ns() + POLL_NS
        # Pause, then sleep without yielding first: on busy CPUs a yield gives other processes a time slice, while a
        # sleeper is woken at once (bench/engine/bench_ring.py beside a compiler: 64 KiB in 8 us instead of 13 to 35).
        with nogil:
            if side == SR_CONSUMER:
                sr_ring_publish_taken(&self.consumer)
            ready = self.spin(side, room_nbytes, self.pauses) or \
                self.sleep(side, room_nbytes, min(deadline[0], next_poll))
        while not ready:
            now = sr_now_ns()
            if deadline[0] != NEVER_NS and now > self.slept_ns[side]:
                deadline[0] += sr_time_away(self.slept_ns[side], now)
            PyErr_CheckSignals()
            if not (self.gets if side == SR_CONSUMER else self.puts):
                raise Closed("this side of the ring belongs to the parent of this forked process")
            if sr_flag_load(&self.interrupted):
                raise Closed("interrupt() has ended the waits of this process on this ring")
            if self.is_closed_there(side):
                if side == SR_CONSUMER and self.is_ready(side, room_nbytes):
                    return 0
                raise self._error_of_close(side == SR_PRODUCER)
            if now >= next_poll:
                self.check_awaited(side, room_nbytes, npolls)
                npolls += 1
                next_poll = now + LONG_POLL_NS
            if now >= deadline[0]:
                self.check_if_due(side, room_nbytes)
                if side == SR_PRODUCER and self.is_ready(side, room_nbytes):
                    return 0
                what = "there was no room for the item" if side == SR_PRODUCER else "no item came"
                raise Timeout(f"{what} within the timeout; the ring can still be used")
            with nogil:
                ready = self.sleep_and_poll(side, room_nbytes, deadline[0], &next_poll, &npolls)
        return 0

    cdef bint spin(self, int side, uint64_t room_nbytes, int pauses) noexcept nogil:
        cdef int _pause
        for _pause in range(pauses):
            if self.is_ready(side, room_nbytes):
                return True
            sr_pause()
        return self.is_ready(side, room_nbytes)

    cdef bint sleep(self, int side, uint64_t room_nbytes, uint64_t until_ns) noexcept nogil:
        cdef uint64_t now = sr_now_ns()
        cdef sr_event *event = self.event_of(side)
        cdef uint32_t generation
        self.slept_ns[side] = until_ns
        if event == NULL:
            return self.is_ready(side, room_nbytes)
        generation = sr_event_watch(event)
        if self.is_ready(side, room_nbytes):
            return True
        if now < until_ns and self.event_of(side) == event and not self.is_closed_there(side) \
                and not sr_flag_load_ordered(&self.interrupted):
            sr_event_sleep(event, generation, until_ns - now)
        return self.is_ready(side, room_nbytes)

    # Sleep, and go on sleeping after a poll that finds nothing. Return if a poll finds something else than a frame or
    # room, too: the caller handles it with the GIL.
    cdef bint sleep_and_poll(self, int side, uint64_t room_nbytes, uint64_t deadline, uint64_t *next_poll,
                             int *npolls) noexcept nogil:
        cdef sr_watcher watcher
        cdef uint64_t now, interval = LONG_POLL_NS
        cdef bint is_watched = side == SR_CONSUMER and npolls[0] > 0 and self.watched_fd[side] >= 0 \
            and sr_watcher_start(&watcher, self.watched_fd[side], self.event_of(side))
        cdef bint ready = False
        if is_watched:
            interval = WATCHED_POLL_NS
            next_poll[0] = sr_now_ns() + interval
        while True:
            ready = self.sleep(side, room_nbytes, min(deadline, next_poll[0]))
            now = sr_now_ns()
            if not ready and self.watched_fd[side] >= 0 and sr_process_has_ended(self.watched_fd[side]):
                next_poll[0] = now
                break
            npolls[0] += now >= next_poll[0]
            if ready or errno == EINTR or now < next_poll[0] or now >= deadline \
                    or sr_time_away(self.slept_ns[side], now) or npolls[0] % POLLS_A_SIGNAL_CHECK == 0 \
                    or self.watched_fd[side] < 0 or self.awaited_pid(side) != self.watched_pid[side] \
                    or self.is_closed_there(side) or sr_flag_load(&self.interrupted):
                break
            next_poll[0] = now + interval
        if is_watched:
            sr_watcher_stop(&watcher)
        return ready

    # Raise if the process for which a side waits is gone. A descriptor of the process costs less than reading /proc,
    # which shows a death earlier: before the kernel has freed the memory.
    cdef int check_awaited(self, int side, uint64_t room_nbytes, int npolls) except -1:
        cdef int pid = self.awaited_pid(side)
        if pid == 0 and npolls % POLLS_AN_ABSENT_CHECK:
            return 0
        if pid != self.watched_pid[side]:
            self.stop_watching(side)
            self.watched_pid[side] = pid
            self.watched_fd[side] = sr_process_open(pid) if pid else -1
        elif self.watched_fd[side] >= 0 and npolls % POLLS_A_FULL_CHECK and \
                not sr_process_has_ended(self.watched_fd[side]):
            return 0
        try:
            self.poll_awaited(side)
        except Error:
            if not (side == SR_CONSUMER and self.is_ready(side, room_nbytes)):   # an item put in before it died
                raise
        return 0

    # For calls that wait for less than a poll: look at the other side as often as a long wait does.
    cdef int check_if_due(self, int side, uint64_t room_nbytes) except -1:
        cdef uint64_t now = sr_now_ns()
        self.check_closed(side, room_nbytes)
        if now - self.checked_ns[side] >= POLL_NS and self.awaited_pid(side):
            self.checked_ns[side] = now
            self.check_awaited(side, room_nbytes, 0)
            if not self.is_ready(side, room_nbytes):   # the last reader may just have been found dead
                self.check_closed(side, room_nbytes)
        return 0

    # Raise if nobody is left at the other side. A reader gets what is in the ring first.
    cdef int check_closed(self, int side, uint64_t room_nbytes) except -1:
        if self.is_closed_there(side) and not (side == SR_CONSUMER and self.is_ready(side, room_nbytes)):
            raise self._error_of_close(side == SR_PRODUCER)
        return 0

    cdef int stop_watching(self, int side) except -1:
        sr_process_close(self.watched_fd[side])
        self.watched_fd[side], self.watched_pid[side] = -1, 0
        return 0

    def interrupt(self):
        """Have every call that waits on this ring in this process raise Closed, now and later.

        Threads that wait wake at once. Calls that need not wait succeed as before: `get` still returns the items that
        are in the ring. The other processes notice nothing until `close`.
        """
        if self.closed_because is None:
            self.set_interrupted()

    # Set `interrupted`, and wake the threads of this process that sleep. The writer may sleep on any reader's event.
    cdef int set_interrupted(self) except -1:
        cdef uint32_t i
        sr_flag_mark(&self.interrupted, 1, &self.shared.event)
        for i in range(self.places):
            sr_flag_mark(&self.interrupted, 1, &self.shared.reader[i].event)
        return 0

    # -- closing --

    def _forget_sides(self):
        """Give up both sides in a forked child: they stay with the parent."""
        self.puts = self.gets = self.is_putting = self.is_getting = self.must_send_cut = False
        self.item = self.put_dtype = self.got_dtype = self.got_text = None
        self.number = self.next_number = self._nlost = 0
        sr_flag_set(&self.interrupted, 0)
        self.stop_watching(SR_PRODUCER)
        self.stop_watching(SR_CONSUMER)

    def _mark_aborted(self):
        """Have the processes that get raise Aborted in place of Closed, once this side closes."""
        if self.closed_because is None and self.puts:
            self.shared.aborted = 1

    def _is_aborted(self):
        """Return whether an exception left the `with` block of the writer."""
        return self.shared.aborted != 0

    def _close(self, str because):
        """Close the sides that this process uses, once."""
        if self.is_putting or self.is_getting:
            raise RuntimeError("close() was called while another thread is inside a call of this ring; "
                               "wait for that call first")
        self.closed_because = because
        self.stop_watching(SR_PRODUCER)
        self.stop_watching(SR_CONSUMER)
        self.leave()
        self.item = None

    # Notify the other processes that this one has closed the ring, and forget the memory.
    cdef int leave(self) except -1:
        cdef sr_place *place = &self.shared.writer
        cdef uint64_t owner
        cdef int _attempt
        if self.gets:
            for _attempt in range(2):    # in between the writer may admit this reader
                owner = sr_flag_load(&self.shared.reader[self.place].place.owner)
                if sr_place_pid(owner) == <uint32_t> self.pid:
                    sr_broadcast_leave(self.shared, self.place, owner)
        if self.puts:
            owner = sr_flag_load(&place.owner)
            sr_flag_replace_ordered(&place.owner, owner, sr_place_owner(sr_place_pid(owner), SR_PLACE_CLOSED))
            sr_event_signal(&self.shared.event)
        self.shared = NULL
        self.tail = NULL
        return 0

    @property
    def nbytes(self):
        """Bytes of the ring's data."""
        if self.closed_because is not None:
            raise Closed(self.closed_because)
        return self.nbytes_of_ring
