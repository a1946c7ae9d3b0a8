# The calls of point-to-point messages: from Python's arguments to posted messages, which `endpoint` moves.

import operator

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from .._arrays.objects cimport bytes_room, pack, unpack
from .._arrays.operands cimport Operand, release, storage_of, take
from .._core.group cimport OPAQUE, bytes_overlap
from .._core.kernels cimport SR_U8
from .._core.timeouts cimport timeout_ns_of
from .._p2p.messages cimport ANY, NO_FAILURE, Message, UnexpectedMessage
from .endpoint cimport (
    FORTRAN, ITEM_SHIFT, MOST_ITEM_NBYTES, OBJECT_ARRAY, OBJECT_PICKLE, SIGNATURE_SHIFT, Endpoint, Transfer, is_object,
    mismatch, result_of, status_of,
)
from .object_collectives cimport ObjectCollectives

ANY_SOURCE = ANY
ANY_TAG = ANY


# ---- descriptions of messages ----------------------------------------------------------------------------------

cdef enum:
    OUT_OF_RANGE = -3        # neither a rank nor a tag
    SMALL_OBJECT_NBYTES = 1024   # of a pickle that is received at once

cdef object PROGRAM = 0   # the object that is the default of context, so comparing identities is enough
cdef int64_t MOST_TAG = (<int64_t> 1 << 31) - 1


cdef uint64_t kind_of(Operand *operand) except? 0:
    cdef uint64_t nbytes, signature
    cdef uint64_t kind = operand.dtype | (FORTRAN if operand.fortran else 0)
    if operand.dtype != OPAQUE:
        return kind
    nbytes, signature = operand.items.nbytes, operand.items.signature & 0xffffff
    if nbytes > MOST_ITEM_NBYTES:
        raise ValueError(f"one item of x has {nbytes} bytes; items of a message may have {MOST_ITEM_NBYTES}")
    return kind | nbytes << ITEM_SHIFT | signature << SIGNATURE_SHIFT


# Return the number; OUT_OF_RANGE if 64 bits cannot hold it.
cdef int64_t integer_of(object number, str what) except? OUT_OF_RANGE:
    try:
        return number if PyLong_CheckExact(number) else operator.index(number)
    except TypeError:
        raise TypeError(f"{what} is {number!r}; it must be an integer") from None
    except OverflowError:
        pass
    return OUT_OF_RANGE


cdef int64_t tag_number(object tag, bint may_be_any) except -2:
    cdef int64_t number = integer_of(tag, "tag")
    if number < 0 and not (may_be_any and number == ANY) or number > MOST_TAG:
        raise ValueError(f"tag is {tag!r}; tags are 0 to {MOST_TAG}" + (", or ANY_TAG" if may_be_any else ""))
    return number


cdef uint32_t context_number(object context) except? 2:
    cdef int64_t number = integer_of(context, "context")
    if not 0 <= number <= 1:
        raise ValueError(f"context is {context!r}; it must be 0, or 1 for messages of a library")
    return number


cdef inline bint have_common_bytes(const Message *a, const Message *b) noexcept:
    return bytes_overlap(a.data, a.nbytes, b.data, b.nbytes)


cdef void fill_bytes(Message *message, bint is_send, const void *data, size_t nbytes, int peer,
                     int64_t tag) noexcept:
    memset(message, 0, sizeof(Message))
    message.is_send = is_send
    message.peer = peer
    message.tag = tag
    message.kind = SR_U8
    # memcpy needs a valid address even for 0 bytes; any will do.
    message.data = <unsigned char *> (message if data == NULL else data)
    message.nbytes = nbytes


# ---- sending and receiving ---------------------------------------------------------------------------------------

cdef class Messages(ObjectCollectives):
    """Point-to-point messages of a communicator. Messages of one tag between two ranks are received in sending order.

    These calls never wait for a collective. One thread at a time may make them, while another one calls collectives.

    context: 0 or 1. A message that is sent in one context is received and probed only in the same context, also by
    ANY_TAG. Programs use 0. A library that sends messages on a communicator of the program uses 1, so that wildcards
    of the program do not receive them.
    """

    def __cinit__(self, *_, **__):
        self.endpoint = Endpoint()

    def send(self, x, dest, tag=0, *, matched=False, context=0, timeout=None):
        """Send x to rank `dest`. Return when x may be changed: it is then received, or in the ring to `dest`.

        Parameters
        ----------
        x : array
            Contiguous, with items of a fixed size.
        dest : int
            The rank that receives. A message that does not fit into the ring blocks until `dest` receives it. A rank
            can send messages of any size to itself.
        tag : int
            0 to 2**31 - 1.
        matched : bool
            True: return once `dest` has matched the message with a receive, which need not be complete; a probe does
            not match it. So the sender knows that `dest` has asked for it.
        context, timeout
            See `Comm`.

        Raises
        ------
        TypeError, ValueError
            For a wrong argument. No other rank is affected.
        Error
            Every other error, such as `Timeout` and `RankFailed`. It ends the communicator on all ranks.

        Examples
        --------
        >>> if comm.rank == 1:
        ...     comm.send(np.arange(3), dest=0, tag=5)
        ... else:
        ...     x = np.zeros(4, int)
        ...     status = comm.recv(x, source=1, tag=5)
        ...     print(x, status.count)
        [0 1 2 0] 3
        """
        cdef Message message
        cdef Operand operand
        operand.held = False
        self.endpoint.begin()
        try:
            _kept = self.fill_message(&message, &operand, x, True, dest, tag, context, "x")
            message.wants_receipt = matched
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.endpoint.post_and_wait(&message, timeout_ns)
        finally:
            release(&operand)
            self.endpoint.end()

    def recv(self, x, source=ANY_SOURCE, tag=ANY_TAG, *, context=0, timeout=None):
        """Receive a message into x and return its `Status`: `.source`, `.tag`, `.count` (elements), `.nbytes`.

        Parameters
        ----------
        x : array
            Writable and contiguous, of the message's dtype and at least of its length. Elements beyond the message keep
            their values.
        source, tag : int
            Those of the message, or `ANY_SOURCE`, `ANY_TAG`.
        context, timeout
            See `Comm`.

        Returns
        -------
        Status
            The properties of the message.

        Raises
        ------
        Truncated, Mismatch
            If the message is longer than x, or its items differ. Then x is unchanged, the message is lost, and the
            communicator stays usable.
        TypeError, ValueError, Error
            As `send`.

        Examples
        --------
        See `send`.
        """
        cdef Message message
        cdef Operand operand
        operand.held = False
        self.endpoint.begin()
        try:
            _kept = self.fill_message(&message, &operand, x, False, source, tag, context, "x")
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.endpoint.post_and_wait(&message, timeout_ns)
        finally:
            release(&operand)
            self.endpoint.end()
        return self.result_of_received(&message)

    def sendrecv(self, x, dest, out, source=ANY_SOURCE, sendtag=0, recvtag=ANY_TAG, *, context=0, timeout=None):
        """Send x to `dest`, receive a message into `out` at the same time, and return the `Status` of the latter.

        Two ranks can exchange messages of any size with it, without deadlock.

        Parameters
        ----------
        x : array
            As in `send`.
        dest : int
            The rank that receives x.
        out : array
            As in `recv`, disjoint from x.
        source, sendtag, recvtag : int
            As in `send` and `recv`.
        context, timeout
            See `Comm`.

        Returns
        -------
        Status
            The properties of the received message.

        Raises
        ------
        TypeError, ValueError, Error
            As `send` and `recv`.

        Examples
        --------
        >>> other, x = 1 - comm.rank, np.empty(1, int)
        >>> comm.sendrecv(np.array([comm.rank]), other, x, other).source
        1
        >>> x
        array([1])
        """
        cdef Message sent, received
        cdef Operand a, b
        a.held = b.held = False
        self.endpoint.begin()
        try:
            _kept = self.fill_message(&sent, &a, x, True, dest, sendtag, context, "x")
            _kept_out = self.fill_message(&received, &b, out, False, source, recvtag, context, "out")
            if have_common_bytes(&sent, &received):
                raise ValueError("out and x have memory in common; receive into another array")
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.endpoint.post(&received)
            try:
                self.endpoint.post_and_wait(&sent, timeout_ns)
                self.endpoint.wait_complete(&received, timeout_ns, True)
            except BaseException as error:
                self.endpoint.abandon(&sent, error)   # it may be complete; the communicator then ends
                self.endpoint.abandon(&received, error)
                raise
        finally:
            release(&a)
            release(&b)
            self.endpoint.end()
        return self.result_of_received(&received)

    def isend(self, x, dest, tag=0, *, matched=False, context=0):
        """Begin to send x and return a `Transfer`. Do not change x until it is complete.

        Every call that sends or receives on this communicator advances it. Without such a call it advances in the
        background.

        Parameters
        ----------
        x, dest, tag, matched, context
            As in `send`.

        Returns
        -------
        Transfer
            Its `wait` returns None.

        Raises
        ------
        RuntimeError
            For more than 16383 incomplete transfers to one rank with matched=True.
        TypeError, ValueError, Error
            As `send`.

        Examples
        --------
        >>> other, x = 1 - comm.rank, np.empty(1, int)
        >>> received = comm.irecv(x, source=other)
        >>> sent = comm.isend(np.array([comm.rank]), other)
        >>> sent.wait()
        >>> received.wait().count
        1
        """
        return self.begin_transfer(x, True, dest, tag, context, matched, NULL)

    def irecv(self, x, source=ANY_SOURCE, tag=ANY_TAG, *, context=0):
        """Begin to receive into x and return a `Transfer`. Do not touch x until it is complete.

        Parameters
        ----------
        x, source, tag, context
            As in `recv`.

        Returns
        -------
        Transfer
            Its `wait` returns the `Status`, or None after `Transfer.cancel`.

        Raises
        ------
        TypeError, ValueError, Error
            As `recv`; the errors of a message are raised by `Transfer.wait`.

        Examples
        --------
        See `isend`.
        """
        return self.begin_transfer(x, False, source, tag, context, False, NULL)

    def probe(self, source=ANY_SOURCE, tag=ANY_TAG, *, context=0, timeout=None):
        """Block until a message can be received, and return its `Status`. The message stays for `recv`.

        Parameters
        ----------
        source, tag : int
            As in `recv`.
        context, timeout
            See `Comm`.

        Returns
        -------
        Status
            The properties of the message.

        Raises
        ------
        TypeError, ValueError, Error
            As `send`.

        Examples
        --------
        >>> if comm.rank == 1:
        ...     comm.send(np.ones(6), dest=0)
        ... else:
        ...     x = np.empty(comm.probe(source=1).count)
        ...     print(comm.recv(x, source=1).nbytes)
        48
        """
        cdef Message message
        self.endpoint.begin()
        try:
            self.set_pattern(&message, source, tag, context)
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.endpoint.post_and_wait(&message, timeout_ns)
        finally:
            self.endpoint.end()
        return status_of(&message)

    def iprobe(self, source=ANY_SOURCE, tag=ANY_TAG, *, context=0):
        """Return the `Status` of a message as `probe` does, or None if there is no such message yet.

        Parameters
        ----------
        source, tag, context : int
            As in `recv`.

        Returns
        -------
        Status or None
            Does not block. None also if the other ranks have left.

        Raises
        ------
        TypeError, ValueError, Error
            As `send`.

        Examples
        --------
        >>> print(comm.iprobe(tag=99))
        None
        """
        cdef Message message
        self.endpoint.begin()
        try:
            self.set_pattern(&message, source, tag, context)
            is_there = self.endpoint.probe_once(&message)
        finally:
            self.endpoint.end()
        return status_of(&message) if is_there else None

    def mprobe(self, source=ANY_SOURCE, tag=ANY_TAG, *, context=0, timeout=None):
        """Block until a message can be received, take it, and return it as a `ProbedMessage`.

        No other receive or probe finds the message any more. So a program can allocate memory for the message that it
        has seen, and receives no other one into it. The message is kept in private memory until it is received.

        Parameters
        ----------
        source, tag : int
            As in `recv`.
        context, timeout
            See `Comm`.

        Returns
        -------
        ProbedMessage
            Its methods receive it.

        Raises
        ------
        TypeError, ValueError, Error
            As `send`.

        Examples
        --------
        >>> if comm.rank == 1:
        ...     comm.send(np.ones(6), dest=0)
        ... else:
        ...     message = comm.mprobe(source=1)
        ...     x = np.empty(message.status.count)
        ...     print(message.recv(x).count)
        6
        """
        cdef ProbedMessage taken = self.new_probe()
        self.endpoint.begin()
        try:
            self.set_pattern(&taken.probe, source, tag, context)
            taken.probe.takes = True
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.endpoint.post_and_wait(&taken.probe, timeout_ns)
        finally:
            self.endpoint.end()
        return taken

    def improbe(self, source=ANY_SOURCE, tag=ANY_TAG, *, context=0):
        """Return a `ProbedMessage` as `mprobe` does, or None if there is no such message yet.

        Parameters
        ----------
        source, tag, context : int
            As in `recv`.

        Returns
        -------
        ProbedMessage or None
            Does not block. None also if the other ranks have left.

        Raises
        ------
        TypeError, ValueError, Error
            As `send`.

        Examples
        --------
        >>> print(comm.improbe(tag=99))
        None
        """
        cdef ProbedMessage taken = self.new_probe()
        self.endpoint.begin()
        try:
            self.set_pattern(&taken.probe, source, tag, context)
            taken.probe.takes = True
            is_there = self.endpoint.probe_once(&taken.probe)
        finally:
            self.endpoint.end()
        return taken if is_there else None

    def send_object(self, item, dest, tag=0, *, matched=False, context=0, timeout=None):
        """Send any object that can be pickled. Arrays in it are sent outside the pickle.

        Parameters
        ----------
        item : object
            The object. The receiver gets a copy.
        dest, tag, matched, context, timeout
            As in `send`.

        Raises
        ------
        TypeError, ValueError, Error
            As `send`, or what pickling the object raises.

        Examples
        --------
        >>> if comm.rank == 1:
        ...     comm.send_object({"loss": 0.5}, dest=0)
        ... else:
        ...     print(comm.recv_object(source=1))
        {'loss': 0.5}
        """
        cdef Message message
        cdef Operand operand
        operand.held = False
        frame = pack(item)
        self.endpoint.begin()
        try:
            self.fill_frame(&message, &operand, frame, True, dest, tag, context)
            message.wants_receipt = matched
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.endpoint.post_and_wait(&message, timeout_ns)
        finally:
            release(&operand)
            self.endpoint.end()

    def recv_object(self, source=ANY_SOURCE, tag=ANY_TAG, *, with_status=False, context=0, timeout=None):
        """Receive an object that was sent by `send_object`, and return a copy of it.

        Parameters
        ----------
        source, tag : int
            As in `recv`.
        with_status : bool
            True: return (copy, `Status`).
        context, timeout
            See `Comm`.

        Returns
        -------
        object or tuple
            The copy.

        Raises
        ------
        Mismatch
            If the message is an array, which then stays for `recv`.
        TypeError, ValueError, Error
            As `send`.

        Examples
        --------
        See `send_object`.
        """
        cdef Message message
        cdef Operand operand
        cdef char[SMALL_OBJECT_NBYTES] room
        operand.held = False
        frame = None
        self.endpoint.begin()
        try:
            self.set_pattern(&message, source, tag, context)
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            # A small pickle comes at once. For others this is a probe, which gives their length.
            message.is_probe, message.probes_others = False, True
            message.kind, message.data, message.nbytes = OBJECT_PICKLE, <unsigned char *> room, sizeof(room)
            self.endpoint.post_and_wait(&message, timeout_ns)
            if message.is_probe:
                frame = self.fill_object(&message, &operand, &message)
                self.endpoint.post_and_wait(&message, timeout_ns)
        finally:
            release(&operand)
            self.endpoint.end()
        return self.unpack_received(frame, &message, with_status)

    # -- from arguments to messages --

    cdef object fill_message(self, Message *message, Operand *operand, object x, bint is_send, object peer,
                             object tag, object context, str what):
        memset(message, 0, sizeof(Message))
        kept = take(operand, x, not is_send, what, True)
        self.set_envelope(message, is_send, peer, tag, context)
        message.kind = kind_of(operand)
        message.data = operand.data
        message.nbytes = operand.count * operand.itemsize
        return kept

    # Fill a receive of the object that a probe has found; `found` may be the same structure. Return its room.
    cdef object fill_object(self, Message *message, Operand *operand, const Message *found):
        cdef Message probe = found[0]
        probe.kind = OBJECT_ARRAY
        if not is_object(probe.came_kind):
            raise mismatch(&probe, self.own_rank, "it stays for recv")
        frame = (PyBytes_FromStringAndSize(NULL, probe.came_nbytes) if probe.came_kind == OBJECT_PICKLE
                 else bytes_room(probe.came_nbytes))
        self.fill_frame(message, operand, frame, False, probe.source, probe.came_tag, probe.context)
        return frame

    # Fill a message of a frame, which the caller keeps.
    cdef int fill_frame(self, Message *message, Operand *operand, object frame, bint is_send, object peer,
                        object tag, object context) except -1:
        if not PyBytes_CheckExact(frame):
            self.fill_message(message, operand, frame, is_send, peer, tag, context, "item")
            message.kind = OBJECT_ARRAY
            return 0
        memset(message, 0, sizeof(Message))
        self.set_envelope(message, is_send, peer, tag, context)
        message.kind = OBJECT_PICKLE
        message.data = <unsigned char *> PyBytes_AS_STRING(frame)
        message.nbytes = PyBytes_GET_SIZE(frame)
        return 0

    # frame: None for one that is at message.data.
    cdef object unpack_received(self, object frame, Message *message, bint with_status):
        try:
            if frame is None:
                frame = PyBytes_FromStringAndSize(<char *> message.data, message.came_nbytes)
            item = unpack(frame)
            return (item, status_of(message)) if with_status else item
        except BaseException as error:
            if not isinstance(error, Exception) or isinstance(error, MemoryError):   # else it cannot be unpickled
                self.engine.abort_by_exception(error, False, True)
            raise

    cdef int set_pattern(self, Message *message, object source, object tag, object context) except -1:
        memset(message, 0, sizeof(Message))
        message.is_probe = True
        self.set_envelope(message, False, source, tag, context)
        return 0

    cdef int set_envelope(self, Message *message, bint is_send, object peer, object tag,
                          object context) except -1:
        message.is_send = is_send
        message.peer = self.rank_number(peer, "dest" if is_send else "source", not is_send)
        message.tag = tag_number(tag, not is_send)
        if context is not PROGRAM:
            message.context = context_number(context)
        return 0

    cdef int rank_number(self, object rank, str what, bint may_be_any) except -2:
        cdef int64_t number = integer_of(rank, what)
        cdef int size = self.nranks
        if not 0 <= number < size and not (may_be_any and number == ANY):
            raise ValueError(f"{what} is {rank!r}; the ranks are 0 to {size - 1}"
                             + (", or ANY_SOURCE" if may_be_any else ""))
        return number

    cdef ProbedMessage new_probe(self):
        cdef ProbedMessage taken = ProbedMessage.__new__(ProbedMessage)
        taken.comm, taken.endpoint = self, self.endpoint
        return taken

    cdef object begin_transfer(self, object x, bint is_send, object peer, object tag, object context,
                               bint wants_receipt, UnexpectedMessage *taken):
        cdef Transfer transfer = Transfer.__new__(Transfer)
        self.endpoint.begin()
        try:
            transfer.comm, transfer.endpoint = self, self.endpoint
            kept = self.fill_message(&transfer.message, &transfer.operand, x, is_send, peer, tag, context, "x")
            transfer.message.wants_receipt = wants_receipt
            transfer.message.taken = taken
            transfer.kept = x, kept, storage_of(x)
            transfer.message.owner = <void *> transfer
            if not self.endpoint.is_enlisted:
                self.endpoint.enlist()
            self.endpoint.transfers.add(transfer)
            self.endpoint.matching.npending += 1
            try:
                self.endpoint.post(&transfer.message)
            except BaseException:   # before it is posted
                self.endpoint.transfers.discard(transfer)
                self.endpoint.matching.npending -= 1
                raise
            with nogil:
                self.endpoint.advance_quietly()   # an error is raised by the call that waits for the transfer
        finally:
            self.endpoint.end()
        return transfer

    # -- bytes, for callers in Cython that have checked ranks and tags, and keep the memory --

    # As send, for items of uint8.
    cdef int send_bytes(self, const void *data, size_t nbytes, int dest, int64_t tag) except -1:
        cdef Message message
        self.endpoint.begin()
        try:
            fill_bytes(&message, True, data, nbytes, dest, tag)
            self.endpoint.post_and_wait(&message, self.default_timeout_ns)
        finally:
            self.endpoint.end()
        return 0

    # As recv, for items of uint8.
    cdef int recv_bytes(self, void *data, size_t nbytes, int source, int64_t tag, Envelope *envelope) except -1:
        cdef Message message
        self.endpoint.begin()
        try:
            fill_bytes(&message, False, data, nbytes, source, tag)
            self.endpoint.post_and_wait(&message, self.default_timeout_ns)
        finally:
            self.endpoint.end()
        return self.set_envelope_of(&message, envelope)

    # As recv_bytes, into new bytes of the message's length.
    cdef bytes recv_new_bytes(self, int source, int64_t tag, Envelope *envelope):
        cdef Message message
        cdef bytes data
        self.endpoint.begin()
        try:
            fill_bytes(&message, False, NULL, 0, source, tag)
            message.is_probe = True
            self.endpoint.post_and_wait(&message, self.default_timeout_ns)
            data = PyBytes_FromStringAndSize(NULL, message.came_nbytes)   # without memory, the message stays
            fill_bytes(&message, False, PyBytes_AS_STRING(data), message.came_nbytes, message.source,
                       message.came_tag)
            self.endpoint.post_and_wait(&message, self.default_timeout_ns)
        finally:
            self.endpoint.end()
        self.set_envelope_of(&message, envelope)
        return data

    cdef int set_envelope_of(self, Message *message, Envelope *envelope) except -1:
        if message.failure != NO_FAILURE:
            result_of(message, self.own_rank)   # raises
        envelope.source, envelope.tag, envelope.nbytes = message.source, message.came_tag, message.came_nbytes
        return 0

    # -- results --

    # The message has left its ring. An error in place of its status, such as a lack of memory, loses the message, so it
    # ends the communicator.
    cdef object result_of_received(self, Message *message):
        try:
            return result_of(message, self.own_rank)
        except BaseException as error:
            if message.failure == NO_FAILURE:
                self.engine.abort_by_exception(error, False, True)
            raise


# ---- messages that a matched probe took ---------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear   # __dealloc__ needs the endpoint
cdef class ProbedMessage:
    """A message that `mprobe` or `improbe` has taken. Only the methods of this object can receive it.

    A message that is never received is discarded when this object is deleted, at the communicator's next call that
    sends or receives. A send with matched=True is complete once `recv`, `irecv` or `recv_object` has been called, or
    the message is discarded.
    """

    def __init__(self):
        raise TypeError("a message is taken by mprobe or improbe")

    def __dealloc__(self):
        if self.probe.taken != NULL:
            self.endpoint.drop(self.probe.taken)

    @property
    def status(self):
        """The `Status` of the message."""
        return status_of(&self.probe)

    def recv(self, x, *, timeout=None):
        """Receive the message into x and return its `Status`.

        Parameters
        ----------
        x : array
            As in `Comm.recv`.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        Status
            The properties of the message.

        Raises
        ------
        RuntimeError
            If the message has been received.
        Truncated, Mismatch, TypeError, ValueError, Error
            As `Comm.recv`.
        """
        cdef Message message
        cdef Operand operand
        operand.held = False
        self.check_unreceived()
        self.endpoint.begin()
        try:
            _kept = self.comm.fill_message(&message, &operand, x, False, self.probe.source, self.probe.came_tag,
                                           self.probe.context, "x")
            message.taken = self.probe.taken
            timeout_ns = timeout_ns_of(self.comm.default_timeout_ns, timeout)
            self.endpoint.post_and_wait(&message, timeout_ns)
        finally:
            release(&operand)
            self.endpoint.end()
        return self.comm.result_of_received(&message)

    def irecv(self, x):
        """Begin to receive the message into x and return a `Transfer`.

        Parameters
        ----------
        x : array
            As in `Comm.recv`.

        Returns
        -------
        Transfer
            Its `wait` returns the `Status`.

        Raises
        ------
        RuntimeError, TypeError, ValueError, Error
            As `recv`.
        """
        self.check_unreceived()
        return self.comm.begin_transfer(x, False, self.probe.source, self.probe.came_tag, self.probe.context, False,
                                        self.probe.taken)

    def recv_object(self, *, timeout=None):
        """Receive an object that was sent by `send_object`, and return a copy of it.

        Parameters
        ----------
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        object
            The copy.

        Raises
        ------
        Mismatch
            If the message is an array, which then stays for `recv`.
        RuntimeError, Error
            As `recv`.
        """
        cdef Message message
        cdef Operand operand
        operand.held = False
        self.check_unreceived()
        self.endpoint.begin()
        try:
            frame = self.comm.fill_object(&message, &operand, &self.probe)
            message.taken = self.probe.taken
            timeout_ns = timeout_ns_of(self.comm.default_timeout_ns, timeout)
            self.endpoint.post_and_wait(&message, timeout_ns)
        finally:
            release(&operand)
            self.endpoint.end()
        return self.comm.unpack_received(frame, &message, False)

    cdef int check_unreceived(self) except -1:
        if self.probe.taken == NULL:
            raise RuntimeError("this message has been received")
        return 0

    def __repr__(self):
        return f"<shmring.ProbedMessage: {self.status}, {'received' if self.probe.taken == NULL else 'not received'}>"
