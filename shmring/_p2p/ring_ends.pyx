# The two ends of a ring that needs no communicator: putting and getting items, and waiting for items and room. The
# module `ring` allocates the memory, pickles the ring and converts dtypes.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from .._core cimport numpy_api as cnp
from .._core.kernels cimport find_kernels
from .._core.segment cimport (
    SR_CLOSED, SR_PAGE, sr_event_signal, sr_flag_load, sr_liveness, sr_liveness_set_state, sr_liveness_state,
    sr_now_ns, sr_time_away,
)
from .._core.spsc_ring cimport (
    SR_CONSUMER, SR_FRAME_CUT, SR_PRODUCER, SR_QUEUE_MAGIC, SR_RING_CUT, SR_RING_DAMAGED, SR_RING_LEAST_NBYTES,
    SR_RING_WAIT, SR_RING_WHOLE, sr_event_sleep, sr_event_watch, sr_frame, sr_incoming, sr_liveness_acquire,
    sr_outgoing, sr_pause, sr_queue, sr_ring_end, sr_ring_format, sr_ring_frame_nbytes, sr_ring_has_frame,
    sr_ring_has_room, sr_ring_is_valid_length, sr_ring_message_nbytes, sr_ring_open_end, sr_ring_peek,
    sr_ring_publish_taken, sr_ring_pull, sr_ring_push, sr_ring_put,
)
from .._core.timeouts cimport NEVER_NS, deadline_ns_of

import queue

from ..errors import Closed, Error, Timeout

cdef extern from "<numpy/arrayobject.h>":
    object PyArray_Empty(int ndim, cnp.npy_intp *lengths, cnp.dtype dtype, bint fortran)   # steals a reference to dtype

cnp.import_array()

HEAD_NBYTES = SR_PAGE       # bytes before the ring's data
LEAST_NBYTES = SR_RING_LEAST_NBYTES

cdef enum:
    # Measured with bench/engine/bench_ring.py: one piece is put in while the previous one is taken out.
    PIECE_NBYTES = 16384
    BRIEF_NBYTES = 65536        # copying such a small item takes less time than releasing and taking the GIL
    BRIEF_PAUSES = 50           # pauses with the GIL held
    POLL_NS = 20000000          # interval of checks for signals
    POLLS_A_PEER_CHECK = 5      # the other process is checked once in so many intervals
    MOST_DIMENSIONS = 64        # NPY_MAXDIMS of numpy 2

cdef enum Kind:      # kind of a frame
    BYTES, ARRAY, FORTRAN_ARRAY, DESCRIPTION


# Shape and dtype of the arrays that follow, as transferred: ndim, the lengths, then the dtype's text.
cdef struct Shape:
    int64_t ndim
    int64_t length[MOST_DIMENSIONS]


cdef inline bint is_ready(sr_ring_end *end, uint64_t room_nbytes) noexcept nogil:
    return sr_ring_has_room(end, room_nbytes) if room_nbytes else sr_ring_has_frame(end)


cdef inline bint spin(sr_ring_end *end, uint64_t room_nbytes, int pauses) noexcept nogil:
    cdef int _turn
    for _turn in range(pauses):
        if is_ready(end, room_nbytes):
            return True
        sr_pause()
    return is_ready(end, room_nbytes)


cdef class Ends:
    """Both ends of one ring. Each end belongs to the process that first puts or gets there."""

    cdef sr_queue *q
    cdef sr_ring_end producer, consumer
    cdef object mapping                 # keeps the memory mapped
    cdef bint puts, gets                # this process uses that side
    cdef bint is_putting, is_getting    # a thread of this process is in put or get
    cdef int pauses
    cdef uint64_t[2] slept_ns           # by side, start of the last sleep
    cdef bint must_send_cut             # the last put was interrupted: the frame `cut` must still be sent
    cdef sr_frame cut
    cdef object put_dtype, put_text     # from the last description sent; None: the next array sends one
    cdef Shape put_shape
    cdef object got_dtype, got_text     # from the last description received
    cdef Shape got_shape
    cdef sr_incoming incoming           # the message being received
    cdef object item                    # its destination; None: no message is being received
    cdef object item_kind
    cdef bint item_is_given             # ... and it is the caller's array
    cdef readonly object closed_because

    def __cinit__(self, *_, **__):
        self.closed_because = "this ring was never made"

    def __init__(self, mapping, int pauses):
        cdef uintptr_t address = mapping.address
        cdef sr_queue *q = <sr_queue *> address
        if mapping.nbytes < SR_PAGE or q.magic != SR_QUEUE_MAGIC or not sr_ring_is_valid_length(q.nbytes) \
                or mapping.nbytes - SR_PAGE < q.nbytes:
            raise Error("this memory is not a ring of this version of shmring")
        self.mapping = mapping
        self.q = q
        self.pauses = pauses
        self.closed_because = None

    @staticmethod
    def _format(uintptr_t address, uint64_t nbytes, int pid, uint64_t start_time):
        """Format a ring of nbytes, a power of two, in zeroed memory, and record its creator."""
        cdef sr_queue *q = <sr_queue *> address
        sr_ring_format(&q.ring, 0)
        q.nbytes = nbytes
        q.creator.pid = pid
        q.creator.start_time = start_time
        q.magic = SR_QUEUE_MAGIC

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
            if not isinstance(item, (bytes, cnp.ndarray)):
                item = self._as_item(item)
            if type(item) is bytes:
                self.check_room(len(item), 0, block)
                self.send(BYTES, <const unsigned char *> PyBytes_AS_STRING(item), len(item), block, &deadline)
            else:
                self.put_array(item, block, &deadline)
        finally:
            self.is_putting = False

    def put_nowait(self, item):
        """Put an item in as `put(item, block=False)` does.

        Parameters
        ----------
        item : bytes or array
            As in `put`.

        Raises
        ------
        queue.Full, Closed, RankFailed, TypeError
            As `put`.
        """
        self.put(item, block=False)

    cdef int begin_put(self) except -1:
        if self.closed_because is not None:
            raise Closed(self.closed_because)
        if self.is_putting:
            raise RuntimeError("another thread is putting into this ring; it takes one at a time")
        if not self.puts:
            self.take_side(SR_PRODUCER)
        if sr_liveness_state(&self.q.liveness[SR_CONSUMER]) == SR_CLOSED:
            raise Closed("the process that gets from this ring has closed it")
        self.is_putting = True
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
        if not self.is_described(x):
            self.describe(x, nbytes, block, deadline)
        else:
            self.check_room(nbytes, 0, block)
        self.send(kind, <const unsigned char *> cnp.PyArray_DATA(x), nbytes, block, deadline)
        return 0

    cdef bint is_described(self, cnp.ndarray x) noexcept:
        cdef int i
        if cnp.PyArray_DESCR(x) != <void *> self.put_dtype or cnp.PyArray_NDIM(x) != self.put_shape.ndim:
            return False
        for i in range(cnp.PyArray_NDIM(x)):
            if cnp.PyArray_DIM(x, i) != self.put_shape.length[i]:
                return False
        return True

    # Send the shape and dtype of the next arrays to the other side.
    cdef int describe(self, cnp.ndarray x, size_t nbytes, bint block, uint64_t *deadline) except -1:
        cdef object dtype = <object> cnp.PyArray_DESCR(x)
        cdef Shape shape
        cdef int i
        text = self.put_text
        if dtype is not self.put_dtype:
            text = self._text_of(dtype)
        shape.ndim = cnp.PyArray_NDIM(x)
        for i in range(cnp.PyArray_NDIM(x)):
            shape.length[i] = cnp.PyArray_DIM(x, i)
        words = PyBytes_FromStringAndSize(<const char *> &shape, 8 * (1 + shape.ndim)) + text
        self.check_room(len(words), sr_ring_message_nbytes(&self.producer, nbytes), block)
        self.put_dtype = None    # unless all of it gets there
        self.send(DESCRIPTION, <const unsigned char *> PyBytes_AS_STRING(words), len(words), block, deadline)
        self.put_dtype, self.put_text, self.put_shape = dtype, text, shape
        return 0

    # With block=False, either the whole item fits or nothing is put in.
    cdef int check_room(self, size_t nbytes, uint64_t more_nbytes, bint block) except -1:
        if block:
            return 0
        more_nbytes += sr_ring_message_nbytes(&self.producer, nbytes)
        if self.must_send_cut:
            more_nbytes += sr_ring_frame_nbytes(0)
        if not sr_ring_has_room(&self.producer, more_nbytes):
            raise queue.Full()
        return 0

    cdef int send(self, int kind, const unsigned char *data, size_t nbytes, bint block, uint64_t *deadline) except -1:
        cdef sr_outgoing message
        cdef int status
        if self.must_send_cut:
            self.pay_cut(deadline)
        memset(&message, 0, sizeof(message))
        message.head.kind = kind
        message.head.message_nbytes = nbytes
        message.data = data
        try:
            while True:
                if nbytes <= BRIEF_NBYTES:
                    status = sr_ring_push(&self.producer, &message)
                else:
                    with nogil:
                        status = sr_ring_push(&self.producer, &message)
                if status == SR_RING_WHOLE:
                    return 0
                self.wait(SR_PRODUCER, sr_ring_frame_nbytes(message.head.nbytes), deadline)
        except BaseException:
            if message.offset > 0:
                self.give_up(&message)
            raise

    # Tell the other side that the message it has begun to get is void.
    cdef int give_up(self, sr_outgoing *message) except -1:
        self.cut = message.head
        self.cut.nbytes = 0
        self.cut.flags = SR_FRAME_CUT
        self.must_send_cut = True
        if sr_ring_has_room(&self.producer, sr_ring_frame_nbytes(0)):
            self.pay_cut(NULL)
        return 0

    cdef int pay_cut(self, uint64_t *deadline) except -1:
        while not sr_ring_has_room(&self.producer, sr_ring_frame_nbytes(0)):
            self.wait(SR_PRODUCER, sr_ring_frame_nbytes(0), deadline)
        sr_ring_put(&self.producer, &self.cut, &self.cut)   # has no data
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
            A contiguous array of the dtype and shape of the next item. It is filled and returned.

        Returns
        -------
        bytes or numpy.ndarray
            The item.

        Raises
        ------
        Timeout
            Nothing is lost.
        ValueError
            If `out` differs from the item, which stays for the next call.
        Closed, RankFailed
            Once the ring is empty, if the other side has closed it, or died.
        """
        cdef uint64_t deadline = deadline_ns_of(timeout)
        self.begin_get()
        try:
            while True:
                if self.item is None and not self.begin_item(out, block, &deadline):
                    continue
                if self.finish_item(block, &deadline):
                    if self.item_kind == DESCRIPTION:
                        self.keep_description(self.take_item())
                    else:
                        return self.deliver(out)
        finally:
            self.is_getting = False

    def get_nowait(self, *, out=None):
        """Return the next item as `get(block=False)` does.

        Parameters
        ----------
        out : numpy.ndarray, optional
            As in `get`.

        Returns
        -------
        bytes or numpy.ndarray
            The item.

        Raises
        ------
        queue.Empty, ValueError, Closed, RankFailed
            As `get`.
        """
        return self.get(block=False, out=out)

    cdef int begin_get(self) except -1:
        if self.closed_because is not None:
            raise Closed(self.closed_because)
        if self.is_getting:
            raise RuntimeError("another thread is getting from this ring; it serves one at a time")
        if not self.gets:
            self.take_side(SR_CONSUMER)
        self.is_getting = True
        return 0

    # Allocate the destination of the next message. Return False if no message has come yet.
    cdef bint begin_item(self, object out, bint block, uint64_t *deadline) except -1:
        cdef sr_frame head
        cdef int status = sr_ring_peek(&self.consumer, &head)
        if status == SR_RING_WAIT:
            self.wait_for_frame(block, deadline)
            return False
        if status != SR_RING_WHOLE or head.flags & SR_FRAME_CUT or head.message_nbytes > <uint64_t> 1 << 62:
            raise self.damaged()
        self.item_is_given = False
        if head.kind == BYTES or head.kind == DESCRIPTION:
            if head.kind == BYTES and out is not None:
                raise ValueError(f"the next item is {head.message_nbytes} bytes and no array; get it without out=")
            item = PyBytes_FromStringAndSize(NULL, head.message_nbytes)
            self.incoming.data = <unsigned char *> PyBytes_AS_STRING(item)
        elif head.kind == ARRAY or head.kind == FORTRAN_ARRAY:
            item = self.room_for_array(&head, out)
            self.incoming.data = <unsigned char *> cnp.PyArray_DATA(<cnp.ndarray> item)
        else:
            raise self.damaged()
        self.incoming.nbytes = head.message_nbytes
        self.incoming.offset = 0
        self.item_kind = head.kind
        self.item = item
        return True

    cdef object room_for_array(self, sr_frame *head, object out):
        cdef cnp.npy_intp[MOST_DIMENSIONS] lengths
        cdef uint64_t nbytes
        cdef bint is_fortran = head.kind == FORTRAN_ARRAY
        cdef int i
        if self.got_dtype is None:
            raise self.damaged()
        nbytes = cnp.PyDataType_ELSIZE(self.got_dtype)
        for i in range(self.got_shape.ndim):
            lengths[i] = self.got_shape.length[i]
            nbytes *= <uint64_t> lengths[i]
        if nbytes != head.message_nbytes:
            raise self.damaged()
        if out is not None:
            self.check_out(out, is_fortran)
            self.item_is_given = True
            return out
        Py_INCREF(self.got_dtype)
        return PyArray_Empty(<int> self.got_shape.ndim, lengths, self.got_dtype, is_fortran)

    cdef int check_out(self, object out, bint is_fortran) except -1:
        cdef int axis
        lengths = []
        for axis in range(self.got_shape.ndim):
            lengths.append(self.got_shape.length[axis])
        shape = tuple(lengths)
        if not isinstance(out, cnp.ndarray):
            raise TypeError(f"out is a {type(out).__name__}; it must be a NumPy array")
        if out.shape != shape or out.dtype != self.got_dtype:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}, the next item {self.got_dtype}{list(shape)}; "
                             "it stays for the next get")
        if not (out.flags.f_contiguous if is_fortran else out.flags.c_contiguous) or not out.flags.writeable:
            raise ValueError(f"out must be writable and contiguous, in {'Fortran' if is_fortran else 'C'} order "
                             "as the next item is")
        return 0

    # Return False if the message is void: its sender gave it up.
    cdef bint finish_item(self, bint block, uint64_t *deadline) except -1:
        cdef int status
        while True:
            if self.incoming.nbytes <= BRIEF_NBYTES:
                status = sr_ring_pull(&self.consumer, &self.incoming)
            else:
                with nogil:
                    status = sr_ring_pull(&self.consumer, &self.incoming)
            if status == SR_RING_WHOLE:
                return True
            if status == SR_RING_CUT:
                self.item = None
                return False
            if status == SR_RING_DAMAGED:
                raise self.damaged()
            self.wait_for_frame(block, deadline)

    cdef object take_item(self):
        item = self.item
        self.item = None
        return item

    cdef object deliver(self, object out):
        item = self.take_item()
        if out is item or (out is None and not self.item_is_given):
            return item
        if out is None:
            return item.copy()
        if self.item_kind == BYTES:   # receiving began in a call without out
            self.item = item
            raise ValueError(f"the next item is {len(item)} bytes and no array; get it without out=")
        try:
            self.check_out(out, self.item_kind == FORTRAN_ARRAY)
        except BaseException:
            self.item = item
            raise
        out[...] = item
        return out

    cdef int keep_description(self, bytes words) except -1:
        cdef Shape shape
        cdef size_t nbytes = len(words)
        cdef int i
        memset(&shape, 0, sizeof(shape))
        memcpy(&shape, PyBytes_AS_STRING(words), min(nbytes, sizeof(shape)))
        if nbytes < 8 or not 0 <= shape.ndim <= MOST_DIMENSIONS or nbytes < 8 * (1 + <size_t> shape.ndim):
            raise self.damaged()
        for i in range(shape.ndim):
            if shape.length[i] < 0:
                raise self.damaged()
        text = words[8 * (1 + shape.ndim):]
        if text != self.got_text:
            self.got_dtype = None
            self.got_dtype = self._dtype_of(text)
            self.got_text = text
        self.got_shape = shape
        return 0

    cdef int wait_for_frame(self, bint block, uint64_t *deadline) except -1:
        if not block:
            sr_ring_publish_taken(&self.consumer)
            raise queue.Empty()
        self.wait(SR_CONSUMER, 0, deadline)
        return 0

    cdef object damaged(self):
        return Error("the memory of this ring is damaged: it holds data that were never put in")

    # -- sides --

    cdef int take_side(self, int side) except -1:
        cdef sr_liveness *liveness = &self.q.liveness[side]
        cdef sr_ring_end *end = &self.producer if side == SR_PRODUCER else &self.consumer
        if not sr_liveness_acquire(liveness):
            what = "puts into" if side == SR_PRODUCER else "gets from"
            raise RuntimeError(f"process {liveness.pid} {what} this ring already; each side is for one process")
        liveness.pid, liveness.start_time = self._come()
        sr_ring_open_end(end, &self.q.ring, <unsigned char *> self.q + SR_PAGE, self.q.nbytes,
                         sr_flag_load(&self.q.ring.taken.value), &self.q.event[1 - side],
                         find_kernels(NULL).copy, PIECE_NBYTES)
        if side == SR_PRODUCER:
            self.puts = True
        else:
            self.gets = True
        return 0

    def _liveness_of(self, int side):
        """Return (pid, start time) of the process at a side; None if no process uses it yet."""
        cdef sr_liveness *liveness = &self.q.liveness[side]
        return (liveness.pid, liveness.start_time) if sr_liveness_state(liveness) and liveness.pid else None

    def _creator(self):
        """Return (pid, start time) of the process that created the ring."""
        return self.q.creator.pid, self.q.creator.start_time

    def _forget_sides(self):
        """Give up both sides in a forked child: they stay with the parent."""
        self.puts = self.gets = self.is_putting = self.is_getting = self.must_send_cut = False
        self.item = self.put_dtype = self.got_dtype = self.got_text = None

    def _close(self, str because):
        """Close the sides that this process uses. Return True if the ring was open."""
        cdef int side
        if self.closed_because is not None:
            return False
        if self.is_putting or self.is_getting:
            raise RuntimeError("close() while another thread is inside a call of this ring")
        self.closed_because = because
        if self.gets:
            sr_ring_publish_taken(&self.consumer)
        for side in range(2):
            if self.puts if side == SR_PRODUCER else self.gets:
                sr_liveness_set_state(&self.q.liveness[side], SR_CLOSED)
                sr_event_signal(&self.q.event[1 - side])
        self.q = NULL
        self.item = None
        return True

    @property
    def nbytes(self):
        """Bytes of the ring's data."""
        if self.closed_because is not None:
            raise Closed(self.closed_because)
        return self.q.nbytes

    # -- waiting --

    # Return when there may be a frame (room_nbytes 0) or room for room_nbytes.
    cdef int wait(self, int side, uint64_t room_nbytes, uint64_t *deadline) except -1:
        cdef sr_ring_end *end = &self.producer if side == SR_PRODUCER else &self.consumer
        cdef uint64_t now
        cdef int npolls = 0
        cdef bint ready
        if spin(end, room_nbytes, min(self.pauses, <int> BRIEF_PAUSES)):
            return 0
        with nogil:
            ready = self.wait_awake(end, side, room_nbytes, deadline[0])
        while not ready:
            now = sr_now_ns()
            if deadline[0] != NEVER_NS:
                deadline[0] += sr_time_away(self.slept_ns[side], now)
            PyErr_CheckSignals()
            if sr_liveness_state(&self.q.liveness[1 - side]) == SR_CLOSED:
                if is_ready(end, room_nbytes) and side == SR_CONSUMER:
                    return 0
                raise Closed("the process at the other side has closed this ring")
            if npolls % POLLS_A_PEER_CHECK == POLLS_A_PEER_CHECK - 1:
                self.check_peer(end, side, room_nbytes)
            if now >= deadline[0]:
                what = "there is no room for it" if side == SR_PRODUCER else "nothing has come"
                raise Timeout(f"{what} within the timeout; the ring stays as it is")
            npolls += 1
            with nogil:
                ready = self.sleep(end, side, room_nbytes, deadline[0])
        return 0

    # Pause, then sleep without yielding first: on busy CPUs a yield gives other processes a time slice, while a sleeper
    # is woken at once (bench/engine/bench_ring.py beside a compiler: 64 KiB in 8 us instead of 13 to 35).
    cdef bint wait_awake(self, sr_ring_end *end, int side, uint64_t room_nbytes, uint64_t deadline) noexcept nogil:
        if side == SR_CONSUMER:
            sr_ring_publish_taken(end)
        return spin(end, room_nbytes, self.pauses) or self.sleep(end, side, room_nbytes, deadline)

    cdef bint sleep(self, sr_ring_end *end, int side, uint64_t room_nbytes, uint64_t deadline) noexcept nogil:
        cdef uint64_t now = sr_now_ns()
        cdef uint32_t generation = sr_event_watch(&self.q.event[side])
        self.slept_ns[side] = now
        if is_ready(end, room_nbytes):
            return True
        if now < deadline and sr_liveness_state(&self.q.liveness[1 - side]) != SR_CLOSED:
            sr_event_sleep(&self.q.event[side], generation, min(deadline - now, <uint64_t> POLL_NS))
        return is_ready(end, room_nbytes)

    cdef int check_peer(self, sr_ring_end *end, int side, uint64_t room_nbytes) except -1:
        try:
            self._poll_peer(1 - side)
        except Error:
            if not (side == SR_CONSUMER and is_ready(end, room_nbytes)):   # an item put in before it died
                raise
        return 0
