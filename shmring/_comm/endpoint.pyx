# The point-to-point messages of one communicator. One thread at a time opens rings, moves posted messages, waits for
# them, and handles errors. `Transfer` is a message that outlives the call which began it. point_to_point makes messages
# from arguments.

from types import GenericAlias

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from .._arrays.operands cimport release
from .._core.group cimport (
    BLOCKED, DEAD, DONE, LATE, LEFT, OPAQUE, PROGRESSED, SIGNALLED, SIGNAL_INTERVAL_NS, Group, bytes_overlap,
)
from .._core.kernels cimport SR_DTYPES, dtype_nbytes
from .._core.path_trials cimport FIRST_CLASS_NBYTES, READ_IN_PLACE, SIZE_CLASSES, PathTrials
from .._core.segment cimport (
    SR_CACHE_LINE, SR_COMPLETE, SR_NO_ABORT, SR_PRIVATE, SR_RAISED, SR_RANK_FAILED, SR_TIMED_OUT,
    sr_flag_acquire, sr_flag_load, sr_flag_release, sr_flag_set, sr_flag_swap, sr_flag_take,
    sr_layout_message_ring_offset,
    sr_layout_message_room_nbytes, sr_now_ns, sr_yield,
)
from .._core.spsc_ring cimport (
    SR_FRAME_OFFER, SR_RECEIPTS, SR_RECEIPTS_WORDS, SR_RING_WHOLE, sr_frame, sr_message_ring, sr_receipt_new_number,
    sr_ring_is_valid_length, sr_ring_peek,
)
from .._core.timeouts cimport ns_of, wait_ns_of
from .._core.trace cimport TRACED_PROBE, TRACED_RECV, TRACED_SEND, Trace, note_message
from .._diagnostics.flight_recorder cimport SR_WAIT_MESSAGE, end_wait
from .._engine.engine cimport Engine
from .._engine.progress cimport delist, enlist, is_thread_running, start_thread, wake_thread
from .._engine.queue cimport BACKGROUND, WAITER
from .._engine.state cimport world_number
from .._engine.wait cimport BRIEF_NBYTES
from .._internode.context cimport inter_of, remote
from .._p2p.matching cimport (
    complete, deliver_to_self, discard_unexpected, has_moved, keep_unexpected, open_ring, poll_messages, post_receive,
    post_send, receive_unexpected, stage_offers, status_of_peers, step_messages, try_message_briefly, wait_for_message,
    withdraw, withdraw_all,
)
from .._p2p.message_path cimport is_streamed
from .._p2p.messages cimport (
    ANY, COMPLETE, DAMAGED, NEEDS_ROOM, NO_FAILURE, OTHER_ITEMS, POSTED, UNMATCHED, WITHDRAWN, Matching, Message, Peer,
    UnexpectedMessage, Wait, frame_tag, has_work, least_offered,
)
from .._transport.channel cimport sr_channel_probe, sr_channels_poll_abort

from . import awaitable
from .._diagnostics import failures
from .._diagnostics.flight_recorder import DTYPES
from .._system import procfs, segments
from ..errors import Closed, Error, Mismatch, Truncated


# ---- results ---------------------------------------------------------------------------------------------------------

cdef size_t item_nbytes(uint64_t kind) noexcept:
    cdef uint32_t dtype = <uint32_t> kind & 0xff
    if dtype == OPAQUE:
        return max(kind >> ITEM_SHIFT & MOST_ITEM_NBYTES, <uint64_t> 1)
    return dtype_nbytes(dtype) if dtype < SR_DTYPES else 1


cdef object dtype_name(uint64_t kind):
    cdef uint32_t dtype = <uint32_t> kind & 0xff
    return DTYPES[dtype] if dtype < SR_DTYPES else None


cdef str described(uint64_t kind, size_t nbytes):
    cdef uint32_t dtype = <uint32_t> kind & 0xff
    if is_object(dtype):
        return "an object"
    name = dtype_name(kind) or f"{item_nbytes(kind)}-byte items"
    return f"{name}[{nbytes // item_nbytes(kind)}]" + (" in Fortran order" if kind & FORTRAN else "")


@cython.final
@cython.freelist(16)
cdef class Status:
    """Properties of a received or waiting message. `recv` and `probe` return it.

    Attributes
    ----------
    source : int
        The rank that sent it.
    tag : int
        The tag that it was sent with.
    count : int
        Number of elements.
    nbytes : int
        Bytes of all elements.
    """

    @property
    def dtype(self):
        """Name of the dtype; None for one that cannot be reduced, such as a structure."""
        return dtype_name(self.kind)

    def __repr__(self):
        return (f"Status(source={self.source}, tag={self.tag}, count={self.count}, nbytes={self.nbytes}, "
                f"dtype={self.dtype!r})")

    def __reduce__(self):
        return new_status, (self.source, self.tag, self.nbytes, self.kind)


cdef Status status_of(Message *message):
    return new_status(message.source, message.came_tag, message.came_nbytes, message.came_kind)


cpdef Status new_status(int source, int64_t tag, uint64_t nbytes, uint64_t kind):
    """Return a status, as its pickle does."""
    cdef Status status = Status.__new__(Status)
    status.source, status.tag, status.nbytes, status.kind = source, tag, nbytes, kind
    status.count = nbytes // item_nbytes(kind)
    return status


# Return the name of the call that posted the message.
cdef str op_of(Message *message):
    return "send" if message.is_send else "probe" if message.is_probe else "recv"


cdef str pattern_text(Message *message):
    tag = "any tag" if message.tag == ANY else f"tag {message.tag}"
    if message.context != 0:
        tag += f" in context {message.context}"
    if message.is_send:
        return f"{op_of(message)} to rank {message.peer} with {tag}"
    source = "any rank" if message.peer == ANY else f"rank {message.peer}"
    return f"{op_of(message)} from {source} with {tag}"


cdef object mismatch(Message *message, int rank, str what_now):
    came = described(message.came_kind, message.came_nbytes)
    wanted = "an object" if is_object(message.kind) else described(message.kind, message.nbytes)
    if came == wanted:
        came += " of another dtype"
    differ_in = "memory order" if (message.came_kind ^ message.kind) == FORTRAN else "dtype"
    text = (f"rank {message.source} sent {came} with tag {message.came_tag}, rank {rank} receives {wanted}: "
            f"{what_now}; both ends need the same {differ_in}")
    return Mismatch(text, rank=message.source, op="recv", calls=(f"send({came})", f"recv({wanted})"))


cdef object truncated(Message *message, int rank):
    return Truncated(
        f"the message from rank {message.source} with tag {message.came_tag} is "
        f"{described(message.came_kind, message.came_nbytes)}, rank {rank} has room for "
        f"{described(message.kind, message.nbytes)}: this message is lost; probe() returns the size beforehand",
        rank=message.source, op="recv")


# Return what the call that waited for a message returns. Raise the error of one that could not be received.
cdef object result_of(Message *message, int rank):
    if message.failure == NO_FAILURE:
        return None if message.is_send or message.state == WITHDRAWN else status_of(message)
    if message.failure == OTHER_ITEMS:
        raise mismatch(message, rank, "that message is lost, others are not")
    raise truncated(message, rank)


# ---- transfers ------------------------------------------------------------------------------------------------------

@cython.final
cdef class Transfer:
    """A message that `isend` or `irecv` has begun. Calls that send or receive advance it, else the background does.

    In asyncio, `await transfer` returns what `wait` returns.
    """

    __class_getitem__ = classmethod(GenericAlias)   # Transfer[None] in annotations

    def __init__(self):
        raise TypeError("a transfer is made by isend or irecv")

    def __dealloc__(self):
        release(&self.operand)

    cdef void release_arrays(self) noexcept:
        self.is_released = True
        release(&self.operand)
        self.kept = None

    @cython.nonecheck(True)   # Transfer.__new__ alone makes one without a communicator
    def done(self):
        """Advance the transfer without blocking, and return whether it is complete.

        Returns
        -------
        bool
            True if x may be used again.

        Raises
        ------
        Error
            If the communicator has ended, or a rank that the transfer needs has died or left, as `wait`. There is no
            timeout.
        """
        if not self.is_released:
            self.endpoint.begin()
            try:
                is_complete = self.endpoint.poll_message(&self.message, True)
            finally:
                self.endpoint.end()
            return is_complete
        return True

    @cython.nonecheck(True)
    def wait(self, timeout=None):
        """Block until the transfer is complete.

        Parameters
        ----------
        timeout : float, optional
            Seconds, 0 or more. None: the communicator's timeout, which ends the communicator.

        Returns
        -------
        Status or None
            The `Status` for a receive. None for a send, and for a receive that `cancel` has withdrawn.

        Raises
        ------
        TimeoutError
            After `timeout` seconds. The transfer goes on.
        TypeError, ValueError
            For a wrong timeout.
        Error
            As `recv`.
        """
        cdef uint64_t timeout_ns = ns_of(self.endpoint.engine.timeout_s) if timeout is None else wait_ns_of(timeout)
        if not self.is_released:
            self.endpoint.begin()
            try:
                self.endpoint.wait_complete(&self.message, timeout_ns, timeout is None)
            finally:
                self.endpoint.end()
        return result_of(&self.message, self.endpoint.matching.rank)

    def result(self, timeout=None):
        """Return what `wait` returns. `Work` has a method of the same name.

        Parameters
        ----------
        timeout : float, optional
            Seconds, as in `wait`.

        Returns
        -------
        Status or None
            As `wait`.

        Raises
        ------
        TimeoutError, TypeError, ValueError, Error
            As `wait`.
        """
        return self.wait(timeout)

    @cython.nonecheck(True)
    def cancel(self):
        """Withdraw a receive that has not matched a message, and return whether it is withdrawn.

        Returns
        -------
        bool
            True: x is unchanged and may be used again, and the transfer is done. False if a message has matched the
            receive, which then goes on, and for a send: sends are not withdrawn.

        Raises
        ------
        Error
            If the communicator has ended.
        """
        cdef bint is_withdrawn
        if self.is_released:
            return self.message.state == WITHDRAWN
        self.endpoint.begin()
        try:
            is_withdrawn = not self.message.is_send and self.message.state == POSTED
            if is_withdrawn:
                withdraw(&self.endpoint.matching, &self.message)
                self.message.state = WITHDRAWN
                self.endpoint.matching.npending -= 1
        finally:
            self.endpoint.end()
        if is_withdrawn:
            self.release_arrays()
            self.endpoint.transfers.discard(self)
        return is_withdrawn

    def _wait_no_longer(self, waited_s):
        """Wait without a timeout, for a caller that has already waited `waited_s` seconds in parts.

        If it is not complete and `waited_s` has reached the communicator's timeout, the communicator ends, as in
        `wait`.
        """
        if not self.done():
            self._check_waited(waited_s)
        return self.wait()

    def __await__(self):
        """Wait in asyncio: poll the transfer, and let other coroutines run between polls.

        It raises if the peer ends, or after the communicator's timeout, as `wait` without a timeout does.
        """
        return awaitable.result_of_transfer(self).__await__()

    def _check_waited(self, double waited_s):
        """Raise as `wait` does after the communicator's timeout, if `waited_s` has reached it."""
        cdef uint64_t timeout_ns = ns_of(self.endpoint.engine.timeout_s)
        cdef int culprit = self.endpoint.matching.rank if self.message.peer == ANY else self.message.peer
        if not self.is_released and waited_s * 1e9 >= timeout_ns:
            self.endpoint.raise_for(LATE, &self.message, culprit, timeout_ns, True)

    def __repr__(self):
        progress = "not complete"
        if self.is_released:
            progress = "cancelled" if self.message.state == WITHDRAWN else "complete"
        return f"<shmring.Transfer: {pattern_text(&self.message)}, {progress}>"


# ---- the endpoint ---------------------------------------------------------------------------------------------------

@cython.no_gc_clear   # __dealloc__ needs the engine
cdef class Endpoint:
    """The posted messages of one communicator. They never wait for a collective.

    One thread at a time may use it, while another thread calls collectives.
    """

    def __dealloc__(self):
        cdef UnexpectedMessage *unexpected = self.matching.first_unexpected
        if self.is_enlisted:
            delist(&self.matching.pollable)
        while unexpected != NULL:
            self.matching.first_unexpected = unexpected.next
            free(unexpected)
            unexpected = self.matching.first_unexpected
        free_tables(&self.matching)

    cdef void attach(self, Engine engine, int rank, int size, object segment, int fd) noexcept:
        self.engine, self.segment, self.fd = engine, segment, fd
        self.matching.rank, self.matching.size = rank, size

    # -- one thread at a time --

    cdef int begin(self) except -1:
        if self.engine.closed_because is not None:
            raise Closed(self.engine.closed_because, rank=self.matching.rank)
        if self.is_messaging:
            raise RuntimeError("another thread is sending or receiving on this communicator; give each thread its own")
        if sr_flag_load(&self.engine.g.header.abort) != SR_NO_ABORT:
            self.engine.raise_abort_error(beside=True)
        self.is_messaging = True   # before any code that may run Python, and so let another thread in
        try:
            if self.matching.peer == NULL:
                self.open_messages()
            if self.matching.channels != NULL and sr_flag_load(&self.matching.channels.aborted_by) != 0:
                self.engine.poll_abort(None, beside=True)
        except BaseException:
            self.is_messaging = False
            raise
        if self.is_enlisted:
            self.acquire_stepper()
        if self.dropped != NULL or self.matching.ndiscarded > 0:
            self.discard_dropped()
        self.matching.begun_ns = sr_now_ns() if self.engine.g.p2p_trace != NULL else 0
        return 0

    cdef void end(self) noexcept:
        cdef bint has_pending = has_work(&self.matching)
        cdef bint has_completed = self.matching.completed != NULL
        self.is_messaging = False
        if self.is_enlisted:
            sr_flag_release(&self.matching.stepper)
            if has_pending and sr_flag_swap(&self.matching.resting, 0):
                wake_thread()
        if has_completed:
            self.release_completed()

    # Take the stepper from the progress thread, which holds it for one step at a time. That step does not need the GIL.
    cdef void acquire_stepper(self) noexcept:
        if not sr_flag_take(&self.matching.stepper, WAITER):
            with nogil:
                sr_flag_acquire(&self.matching.stepper, WAITER)
        self.matching.lacks_memory = False

    cdef int enlist(self) except -1:  # no-cython-lint: a method of that name
        start_thread()
        self.matching.pollable.step = poll_messages
        self.acquire_stepper()
        sr_flag_set(&self.matching.resting, 1)
        self.is_enlisted = True
        enlist(&self.matching.pollable, self)
        return 0

    # True if the process has a progress thread, which `threading` counts as one of the program's.
    cdef bint has_progress_thread(self) noexcept:
        return is_thread_running()

    def _attend(self):
        """Do the work of the progress thread that needs the GIL.

        It advances messages that need private memory, and releases the arrays of completed transfers.
        It makes no Python object while it holds the stepper: that could run a destructor that sends a message, which
        would wait for the stepper forever.
        """
        cdef Matching *m = &self.matching
        if self.is_messaging or self.engine.closed_because is not None or not self.is_enlisted:
            return
        if not sr_flag_take(&m.stepper, BACKGROUND):
            return
        if has_work(m) and sr_flag_load(&m.g.header.abort) == SR_NO_ABORT:
            with nogil:
                m.lacks_memory = not self.advance_quietly()   # a call that waits meets the error again and raises it
        sr_flag_release(&m.stepper)
        self.release_completed()

    # As acquire_stepper, but return False if a call of another thread has the stepper, maybe for as long as it waits.
    cdef bint acquire_stepper_between_calls(self) noexcept:
        while not sr_flag_take(&self.matching.stepper, WAITER):
            if sr_flag_load(&self.matching.stepper) == WAITER:
                return False
            with nogil:
                sr_yield()
        return True

    # Release the arrays of completed transfers, one by one. The stepper is not held then: any destructor may run.
    # If another thread has begun a call meanwhile, that call releases the rest at its end. Waiting for it could
    # deadlock: it may wait for a collective that only this thread, the progress thread, advances.
    cdef void release_completed(self) noexcept:
        cdef Transfer transfer
        while self.acquire_stepper_between_calls():
            transfer = self.next_completed()
            sr_flag_release(&self.matching.stepper)
            if transfer is None:
                return
            transfer.release_arrays()
            if self.transfers is not None:
                self.transfers.discard(transfer)
            transfer = None   # before the stepper is taken again

    cdef Transfer next_completed(self):
        cdef Message *message = self.matching.completed
        if message == NULL:
            return None
        self.matching.completed = message.next
        return <Transfer> message.owner

    # Keep a message that a matched probe took and that is not received, until the next call discards it. Any destructor
    # may run this at any time.
    cdef void drop(self, UnexpectedMessage *unexpected) noexcept:
        unexpected.holder = NULL
        unexpected.next_dropped = self.dropped
        self.dropped = unexpected

    # The progress thread takes the rest of a message that has not arrived: this rank may make no other call.
    cdef int discard_dropped(self) except -1:
        cdef UnexpectedMessage *unexpected = self.dropped
        while unexpected != NULL:
            self.dropped = unexpected.next_dropped
            discard_unexpected(&self.matching, unexpected)
            unexpected = self.dropped
        if self.matching.ndiscarded > 0 and not self.is_enlisted:
            try:
                self.enlist()
            except Error:   # the process may start no thread: this rank's next calls on messages take the rest
                pass
            except BaseException:
                self.end()
                raise
        return 0

    cdef int open_messages(self) except -1:
        cdef Matching *m = &self.matching
        cdef Group *g = &self.engine.g
        if not sr_ring_is_valid_length(g.header.message_ring_nbytes):
            raise Error("the segment of this communicator is damaged: its message rings have no valid length")
        transfers = set()
        m.g = g
        m.ring_nbytes = g.header.message_ring_nbytes
        m.seen = <uint64_t *> calloc((g.size + 63) // 64, sizeof(uint64_t))
        m.source = <int *> calloc(m.size, sizeof(int))
        m.rank_of = <int *> calloc(g.size, sizeof(int))
        m.peer = <Peer *> calloc(m.size, sizeof(Peer))
        if m.seen == NULL or m.source == NULL or m.rank_of == NULL or m.peer == NULL:
            free_tables(m)
            raise MemoryError()
        self.transfers = transfers
        self.find_peers()
        return 0

    cdef void find_peers(self) noexcept:
        cdef Matching *m = &self.matching
        cdef int i
        for i in range(m.g.size):
            m.rank_of[i] = world_number(m.g, i)
            m.peer[m.rank_of[i]].lane = i
        if m.g.inter != NULL:
            m.channels = inter_of(m.g).channels
            for i in range(m.channels.nchannels):
                m.peer[m.channels.channel[i].rank].lane = -1
                m.peer[m.channels.channel[i].rank].channel = &m.channels.channel[i]

    # Before this rank leaves: let offered messages be received afterwards, if their rings have room for them.
    cdef void stage_sends(self) noexcept:
        if self.matching.nsends > 0:
            if self.is_enlisted:
                self.acquire_stepper()
            stage_offers(&self.matching)   # with the GIL: no other thread may begin a message meanwhile
            if self.is_enlisted:
                sr_flag_release(&self.matching.stepper)

    cdef int close_messages(self) except -1:
        if self.is_enlisted:
            delist(&self.matching.pollable)
            self.release_completed()
            self.is_enlisted = False
        if self.transfers is not None:
            withdraw_all(&self.matching)
            self.transfers.clear()
        return 0

    # True if a call of another thread may send or receive any of these bytes, or if a pending transfer does. False once
    # the communicator has ended.
    cdef bint is_in_transfer(self, uintptr_t address, size_t nbytes) except -1:
        cdef Transfer transfer
        if self.engine.closed_because is not None or sr_flag_load(&self.engine.g.header.abort) != SR_NO_ABORT:
            return False
        if self.is_messaging:
            return True
        if self.transfers is not None:
            for transfer in self.transfers:
                if transfer.message.state != COMPLETE and bytes_overlap(
                        transfer.message.data, transfer.message.nbytes, <const void *> address, nbytes):
                    return True
        return False

    # -- moving --

    cdef int post(self, Message *message) except -1:
        if not message.is_send:
            if message.taken != NULL:
                receive_unexpected(&self.matching, message, message.taken)
            else:
                post_receive(&self.matching, message)
        elif message.peer == self.matching.rank:
            if not deliver_to_self(&self.matching, message):
                self.keep_own_message(message)
        else:
            if self.matching.peer[message.peer].channel != NULL:
                # Poll here: a send that fits into the socket does not wait, so it polls nowhere else.
                if sr_channels_poll_abort(self.matching.channels):
                    self.engine.poll_abort(None, beside=True)
            else:
                if self.matching.peer[message.peer].out.ring == NULL:
                    self.open_ring_to(message.peer)
                self.find_address(message)
            if message.wants_receipt:
                self.number_receipt(message)
            post_send(&self.matching, message)
        return 0

    # Find the address of the message if it is so long that the receiver may copy it from there.
    cdef void find_address(self, Message *message) noexcept:
        cdef Group *g = &self.engine.g
        if message.nbytes < least_offered(g):
            return
        if g.nblocks > 0 and self.engine.find_block(message.data, message.nbytes, &message.block, &message.address):
            message.can_be_offered = True
        elif g.single_copy and message.nbytes >= g.tuning.single_copy_message_nbytes:
            message.can_be_offered = True
            message.block, message.address = SR_PRIVATE, <uintptr_t> message.data

    # Return the paths of the next messages: {dest: {"private" or "shared": {least bytes of the class: path}}}.
    cdef dict chosen_paths(self):
        cdef Peer *p
        cdef PathTrials *trials
        cdef size_t nbytes
        cdef int rank, shared, at
        found = {}
        for rank in range(self.matching.size if self.matching.peer != NULL else 0):
            p = &self.matching.peer[rank]
            for shared in range(2 if p.trials != NULL else 0):
                for at in range(SIZE_CLASSES):
                    trials = &p.trials[shared][at]
                    if not trials.used:
                        continue
                    nbytes = FIRST_CLASS_NBYTES << at
                    if trials.path == READ_IN_PLACE:
                        path = "zero_copy" if shared else "single_copy"
                    else:
                        path = "streamed_ring" if is_streamed(&self.engine.g, p, nbytes) else "ring"
                    of_class = found.setdefault(rank, {}).setdefault("shared" if shared else "private", {})
                    of_class[nbytes] = path
        return found

    cdef int number_receipt(self, Message *message) except -1:
        cdef Peer *p = &self.matching.peer[message.peer]
        if p.numbers_in_use == NULL:
            p.numbers_in_use = <uint64_t *> calloc(SR_RECEIPTS_WORDS, sizeof(uint64_t))
            if p.numbers_in_use == NULL:
                raise MemoryError()
            p.receipts = &p.channel.receipts if p.channel != NULL else &(<sr_message_ring *> p.out.ring).receipts
        message.receipt = sr_receipt_new_number(p.numbers_in_use)
        if message.receipt == 0:
            raise RuntimeError(f"{SR_RECEIPTS - 1} sends to rank {message.peer} wait until they are matched; wait for "
                               "some of them before this one")
        return 0

    cdef int keep_own_message(self, Message *message) except -1:
        cdef UnexpectedMessage *unexpected = new_unexpected(self.matching.rank, frame_tag(message), message.kind,
                                                            message.nbytes)
        if unexpected == NULL:
            raise MemoryError(f"no memory for a message of {message.nbytes} bytes from rank {self.matching.rank} to "
                              "itself; post its receive before the send")
        memcpy(unexpected.data, message.data, message.nbytes)
        unexpected.whole = True
        keep_unexpected(&self.matching, unexpected)
        if message.wants_receipt:
            unexpected.sender = message
            message.state = UNMATCHED
            return 0
        complete(&self.matching, message)
        return 0

    # Allocate the pages of the ring to another rank before it is first touched, and open the ring.
    cdef int open_ring_to(self, int rank) except -1:
        cdef Group *g = &self.engine.g
        cdef size_t nbytes = self.matching.ring_nbytes
        cdef Peer *p = &self.matching.peer[rank]
        if p.trials == NULL:
            p.trials = <PathTrials[SIZE_CLASSES] *> calloc(2, sizeof(p.trials[0]))
            if p.trials == NULL:
                raise MemoryError()
        offset = sr_layout_message_ring_offset(g.size, g.header.staging_nbytes, nbytes, g.rank, p.lane)
        nbytes = sr_layout_message_room_nbytes(nbytes)
        segments.allocate(self.fd, offset, nbytes, purpose="a message ring")
        self.segment.populate(offset, nbytes)
        open_ring(&self.matching, rank)
        return 0

    # Move the unmatched message at the head of a ring to private memory, so that messages behind it can be received.
    cdef int make_room(self) except -1:
        cdef sr_frame head
        cdef int status = self.make_room_quietly(&head)
        if status == DAMAGED:
            self.raise_damaged(self.matching.unmatched_source)
        if status == NEEDS_ROOM:
            raise no_room(self.matching.unmatched_source, head.message_nbytes)
        return 0

    # As make_room, but raise nothing. Return PROGRESSED, NEEDS_ROOM if there is no memory, or DAMAGED.
    cdef int make_room_quietly(self, sr_frame *head) noexcept nogil:
        cdef int source = self.matching.unmatched_source
        cdef UnexpectedMessage *unexpected
        if sr_ring_peek(&self.matching.peer[source].inward, head) != SR_RING_WHOLE:
            return DAMAGED
        unexpected = new_unexpected(source, head.tag, head.kind, head.message_nbytes)
        if unexpected == NULL:
            return NEEDS_ROOM
        unexpected.receipt = head.receipt
        unexpected.is_offered = head.flags & SR_FRAME_OFFER != 0
        keep_unexpected(&self.matching, unexpected)
        return PROGRESSED

    # As advance, but raise nothing. Return False if there is an error, which a later call has to raise.
    cdef bint advance_quietly(self) noexcept nogil:
        cdef sr_frame head
        cdef int status = NEEDS_ROOM
        self.matching.polls_remote_rarely = False
        while status == NEEDS_ROOM:
            status = step_messages(&self.matching)
            if status == NEEDS_ROOM and self.make_room_quietly(&head) != PROGRESSED:
                return False
        return status != DAMAGED

    # Advance all posted messages as far as possible without waiting.
    cdef int advance(self) except -1:
        cdef int status = NEEDS_ROOM
        self.matching.polls_remote_rarely = False
        while status == NEEDS_ROOM:
            if self.transfers:
                with nogil:
                    status = step_messages(&self.matching)
            else:
                status = step_messages(&self.matching)
            if status == NEEDS_ROOM:
                self.make_room()
            elif status == DAMAGED:
                self.raise_damaged(self.matching.unmatched_source)
        return 0

    # Advance a message without blocking, and return whether it is complete. Raise if a rank that it needs has ended, or
    # its connection is cut: a program that only polls makes no call that waits, so nothing else would notice.
    # leaving_ends: also if it has left.
    cdef bint poll_message(self, Message *message, bint leaving_ends) except -1:
        cdef int culprit = ANY
        cdef int status
        try:
            self.advance()
        except MemoryError:   # for another message, which stays: a later call meets it again
            if message.state != COMPLETE:
                raise
        if message.state == COMPLETE:
            return True
        self.probe_connection(message)
        status = status_of_peers(&self.matching, message, &culprit)
        if status == DAMAGED:
            self.raise_damaged(culprit)
        if status == DEAD or (status == LEFT and leaving_ends):
            self.raise_for(status, message, culprit, 0, True)
        return message.state == COMPLETE

    # Notice that the connection to a message's peer is cut, as a wait does.
    cdef void probe_connection(self, const Message *message) noexcept:
        cdef Peer *p
        cdef uint64_t now
        if message.peer == ANY or self.matching.peer[message.peer].channel == NULL:
            return
        p = &self.matching.peer[message.peer]
        now = sr_now_ns()
        if now - p.probed_ns >= SIGNAL_INTERVAL_NS:
            p.probed_ns = now
            sr_channel_probe(self.matching.channels, p.channel, inter_of(self.matching.g).cut_ns)

    # Poll once for a probe's message, and return whether there is one.
    cdef bint probe_once(self, Message *probe) except -1:
        self.post(probe)
        try:
            return self.poll_message(probe, False)   # a rank that has left sends nothing: the answer is known
        finally:
            withdraw(&self.matching, probe)

    # Post a message and wait until it is complete. On an error the message is withdrawn.
    cdef int post_and_wait(self, Message *message, uint64_t timeout_ns) except -1:
        self.post(message)
        try:
            self.wait_complete(message, timeout_ns, True)
        except BaseException as error:
            self.abandon(message, error)
            raise
        return 0

    # Wait until the message is complete. An error is raised and leaves the message posted. is_final: a timeout ends the
    # communicator, as it does for a collective.
    cdef int wait_complete(self, Message *message, uint64_t timeout_ns, bint is_final) except -1:
        try:
            if message.state != COMPLETE:
                self.await_message(message, timeout_ns, is_final)
        finally:
            if self.engine.g.p2p_trace != NULL:
                self.trace_message(message)
        return 0

    cdef int trace_message(self, Message *message) noexcept:
        cdef Matching *m = &self.matching
        cdef int what = TRACED_SEND if message.is_send else TRACED_PROBE if message.is_probe else TRACED_RECV
        cdef bint has_come = message.state == COMPLETE and not message.is_send
        cdef int rank = message.source if has_come else message.peer
        cdef uint64_t nbytes = message.nbytes if message.is_send else message.came_nbytes if has_come else 0
        cdef int outcome = SR_COMPLETE if message.state == COMPLETE else SR_RAISED
        if m.begun_ns != 0:   # else the call began before the trace
            m.begun_ns = note_message(<Trace *> m.g.p2p_trace, what, m.begun_ns, rank, nbytes, outcome)
        return 0

    cdef int await_message(self, Message *message, uint64_t timeout_ns, bint is_final) except -1:
        cdef Wait wait
        cdef int status = BLOCKED
        if message.nbytes <= BRIEF_NBYTES and self.matching.nsends <= message.is_send:   # no other send is under way
            status = try_message_briefly(&self.matching, message)
            if status == DONE:
                return 0
        memset(&wait, 0, sizeof(wait))
        wait.deadline_ns = sr_now_ns() + timeout_ns
        while message.state != COMPLETE:
            if status == NEEDS_ROOM:
                self.make_room()
            elif status == DAMAGED:
                self.raise_damaged(self.matching.unmatched_source)
            elif status == SIGNALLED:
                try:
                    self.engine.check_signals()
                    self.engine.stalls.warn_if_due(self.engine, SR_WAIT_MESSAGE)
                except BaseException:
                    if self.engine.closed_because is None:
                        end_wait(self.matching.g, SR_WAIT_MESSAGE)
                    raise
                self.engine.poll_abort(None, beside=True)
            elif status != BLOCKED:
                self.raise_for(status, message, wait.culprit, timeout_ns, is_final)
            with nogil:
                status = wait_for_message(&self.matching, message, &wait)
        return 0

    # Withdraw a message because of an error. If bytes of it have moved, the communicator ends: a repeated call would
    # receive or send the next message in its place.
    cdef int abandon(self, Message *message, object error) except -1:
        cdef char[96] doing
        cdef bint moved = has_moved(&self.matching, message)
        if self.engine.closed_because is not None:   # in a forked child: the message in the ring is the parent's
            return 0
        withdraw(&self.matching, message)
        if moved:
            if message.is_send:
                snprintf(doing, sizeof(doing), b"in the middle of a send to rank %d", message.peer)
            else:
                snprintf(doing, sizeof(doing), b"in the middle of a message from rank %d", message.source)
            self.engine.abort_by_exception(error, False, True, doing)
        return 0

    # -- errors --

    cdef int number_in_engine(self, int rank) noexcept:
        cdef Peer *p = &self.matching.peer[rank]
        return remote(&self.engine.g, rank) if p.channel != NULL else p.lane

    cdef int raise_for(self, int status, Message *message, int culprit, uint64_t timeout_ns, bint is_final) except -1:
        op, wanted = op_of(message), pattern_text(message)
        number = self.number_in_engine(culprit)
        if status == LATE and not is_final:
            raise TimeoutError(f"{wanted} is not complete within {timeout_ns * 1e-9:g} s; it goes on")
        if status == LATE:
            what_was = f"did not answer rank {self.matching.rank}'s {wanted} within {timeout_ns * 1e-9:g} s"
            if culprit == self.matching.rank:
                what_was = f"waited {timeout_ns * 1e-9:g} s in vain in {wanted}"
            did = failures.describe_doing(self.engine, number)
            self.engine.abort_with(SR_TIMED_OUT, number, None, f"{what_was}; {did}", op)
        elif status == DEAD:
            self.engine.abort_with(SR_RANK_FAILED, number, None, self.cause_of_death(culprit), op)
        elif status == LEFT:
            left = f"closed the communicator before rank {self.matching.rank}'s {wanted} was complete"
            self.engine.abort_with(SR_RANK_FAILED, number, None, left, op)
        self.engine.raise_abort_error(beside=True)
        return 0

    cdef str cause_of_death(self, int rank):
        cdef Peer *p = &self.matching.peer[rank]
        if p.channel == NULL:
            return procfs.how_it_ended(*self.engine.flight.liveness_of(p.lane))
        return failures.describe_lost(p.channel.error)

    # End the communicator because of data that no sender of this version writes.
    cdef int raise_damaged(self, int source) except -1:
        is_local = self.matching.peer[source].channel == NULL
        cause = "its message ring is damaged" if is_local else failures.DAMAGED
        self.engine.abort_with(SR_RANK_FAILED, self.number_in_engine(source), None, cause)
        self.engine.raise_abort_error(beside=True)
        return 0


# Return private memory for an unexpected message, with its envelope; NULL if there is no memory.
cdef UnexpectedMessage *new_unexpected(int source, uint32_t tag, uint64_t kind, size_t nbytes) noexcept nogil:
    cdef UnexpectedMessage *unexpected = NULL
    if nbytes < <size_t> 1 << 62:
        unexpected = <UnexpectedMessage *> malloc(sizeof(UnexpectedMessage) + SR_CACHE_LINE + nbytes)
    if unexpected == NULL:
        return NULL
    memset(unexpected, 0, sizeof(UnexpectedMessage))
    unexpected.source = source
    unexpected.tag = tag
    unexpected.kind = kind
    unexpected.nbytes = nbytes
    unexpected.data = <unsigned char *> unexpected + sizeof(UnexpectedMessage)
    return unexpected


cdef object no_room(int source, size_t nbytes):
    return MemoryError(f"no memory for a message of {nbytes} bytes from rank {source}, which came before the one "
                       "that is received; receive them in the order in which they are sent")


cdef void free_tables(Matching *m) noexcept:
    cdef int rank
    if m.peer != NULL:
        for rank in range(m.size):
            free(m.peer[rank].numbers_in_use)
            free(m.peer[rank].trials)
    free(m.peer)
    free(m.seen)
    free(m.source)
    free(m.rank_of)
    m.peer, m.seen, m.source, m.rank_of = NULL, NULL, NULL, NULL
