# Point-to-point: from Python's arguments to posted messages, and from their ends to results and errors.
# May know: _delivery, _engine, _group, _messages, _operands, _progress, _ring, _status, _timeouts, errors, failures,
# fusion, liveness, objects.

import operator

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from ._delivery cimport Wait, deliver_briefly, deliver_patiently, run_errand
from ._group cimport (   # and not its Status
    BLOCKED, DEAD, DONE, LATE, LEFT, PROGRESSED, SIGNALLED, SR_ABORTED, SR_CACHE_LINE, SR_NO_ABORT,
    SR_RANK_FAILED, SR_TIMED_OUT, Group, sr_flag_load, sr_flag_set, sr_flag_swap, sr_flag_take,
    sr_layout_message_ring_offset, sr_layout_message_room_nbytes, sr_now_ns, sr_yield,
)
from ._messages cimport *
from ._operands cimport Operand, release, take
from ._ring cimport SR_RING_WHOLE, sr_frame, sr_ring_is_valid_length, sr_ring_peek
from ._progress cimport BACKGROUND, WAITER, delist, enlist, rouse
from ._status cimport OBJECT, kind_of, mismatch, status_of, tag_number, truncated, wish_text
from ._timeouts cimport timeout_ns_of
from .fusion cimport Fusion

import numpy as np

from . import failures, liveness, objects
from ._status import Status
from .errors import Closed, Error

ANY_SOURCE = ANY
ANY_TAG = ANY

cdef enum:
    BRIEF_NBYTES = 65536     # messages this small are copied sooner than the GIL is let go and taken again


# ---- sending and receiving ---------------------------------------------------------------------------------------

cdef class Messages(Fusion):
    """What goes from one rank to one other. It never waits for a collective, and may be called from another thread
    than those; by one thread at a time. Between two ranks messages of one tag keep their order.
    """

    def __dealloc__(self):
        cdef Aside *aside = self.mail.first_aside
        if self.is_enlisted:
            delist(&self.mail.errand)
        while aside != NULL:
            self.mail.first_aside = aside.next
            free(aside)
            aside = self.mail.first_aside
        free(self.mail.peer)
        free(self.mail.seen)
        free(self.mail.source)

    def send(self, x, dest, tag=0, *, timeout=None):
        """Send x to rank `dest`; returns when x may be used again: it is then with `dest` or in the ring to it.

        x: a contiguous array of items of a fixed size. tag: 0 to 2**31 - 1. timeout: seconds. A message that does
        not fit into the ring waits until `dest` receives it; to itself a rank can send any. Raises ValueError or
        TypeError for a wrong argument, else one of `shmring.Error`, final for the communicator on all ranks.
        """
        cdef Message message
        cdef Operand operand
        operand.held = False
        self.begin_messaging()
        try:
            kept = self.describe_message(&message, &operand, x, True, dest, tag, "x")
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.post_and_carry(&message, timeout_ns)
        finally:
            release(&operand)
            self.end_messaging()

    def recv(self, x, source=ANY, tag=ANY, *, timeout=None):
        """Receive a message into x and return its `Status`: `.source`, `.tag`, `.count` (elements), `.nbytes`.

        x: a writable contiguous array with room for the message, of its dtype; what is beyond the message keeps its
        values. source, tag: of the message, or ANY_SOURCE, ANY_TAG. timeout: seconds. A message longer than x raises
        `Truncated`, one of other items `Mismatch`: x is as before, that message is lost, and all goes on. Other
        errors as in `send`.
        """
        cdef Message message
        cdef Operand operand
        operand.held = False
        self.begin_messaging()
        try:
            kept = self.describe_message(&message, &operand, x, False, source, tag, "x")
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.post_and_carry(&message, timeout_ns)
        finally:
            release(&operand)
            self.end_messaging()
        return self.result_of(&message)

    def sendrecv(self, x, dest, out, source=ANY, sendtag=0, recvtag=ANY, *, timeout=None):
        """Send x to `dest` and receive into `out` at once, in whatever order; returns the `Status` of what came.

        x and out: as in `send` and `recv`, without common memory. Two ranks may exchange messages of any size so.
        """
        cdef Message sent, received
        cdef Operand a, b
        a.held = b.held = False
        self.begin_messaging()
        try:
            kept = self.describe_message(&sent, &a, x, True, dest, sendtag, "x")
            kept_out = self.describe_message(&received, &b, out, False, source, recvtag, "out")
            if sent.data < received.data + received.nbytes and received.data < sent.data + sent.nbytes:
                raise ValueError("out and x have memory in common; receive into another array")
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.post(&received)
            try:
                self.post_and_carry(&sent, timeout_ns)
                self.carry(&received, timeout_ns, True)
            except BaseException:
                self.abandon(&received)
                raise
        finally:
            release(&a)
            release(&b)
            self.end_messaging()
        return self.result_of(&received)

    def isend(self, x, dest, tag=0):
        """Begin to send x; returns a `Transfer`, until whose end x must not change. Arguments as in `send`.

        It goes on within any call of this kind, and in the background where there is none.
        """
        return self.begin_transfer(x, True, dest, tag)

    def irecv(self, x, source=ANY, tag=ANY):
        """Begin to receive into x; returns a `Transfer` whose `wait` returns the `Status`. Arguments as in `recv`."""
        return self.begin_transfer(x, False, source, tag)

    def probe(self, source=ANY, tag=ANY, *, timeout=None):
        """The `Status` of the message that `recv` would receive, once there is one; it stays where it is."""
        cdef Message message
        self.begin_messaging()
        try:
            self.describe_wish(&message, source, tag)
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.post_and_carry(&message, timeout_ns)
        finally:
            self.end_messaging()
        return status_of(&message)

    def iprobe(self, source=ANY, tag=ANY):
        """`probe` that does not wait: None when there is no such message yet."""
        cdef Message message
        self.begin_messaging()
        try:
            self.describe_wish(&message, source, tag)
            self.post(&message)
            try:
                self.advance()
            finally:
                withdraw(&self.mail, &message)
        finally:
            self.end_messaging()
        return status_of(&message) if message.state == COMPLETE else None

    def send_object(self, item, dest, tag=0, *, timeout=None):
        """Send anything that pickles; arrays inside travel beside the pickle. Otherwise as `send`."""
        cdef Message message
        cdef Operand operand
        operand.held = False
        frame = objects.pack(item)
        self.begin_messaging()
        try:
            kept = self.describe_message(&message, &operand, frame, True, dest, tag, "item")
            message.kind = OBJECT
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.post_and_carry(&message, timeout_ns)
        finally:
            release(&operand)
            self.end_messaging()

    def recv_object(self, source=ANY, tag=ANY, *, with_status=False, timeout=None):
        """Receive what `send_object` sent: a copy of it; (copy, `Status`) with_status. Otherwise as `recv`.

        Raises `Mismatch` when the message is an array; it then stays for `recv`.
        """
        cdef Message message
        cdef Operand operand
        operand.held = False
        self.begin_messaging()
        try:
            self.describe_wish(&message, source, tag)
            timeout_ns = timeout_ns_of(self.default_timeout_ns, timeout)
            self.post_and_carry(&message, timeout_ns)
            message.kind = OBJECT
            if message.came_kind != OBJECT:
                raise mismatch(&message, self.engine.g.rank, "it stays for recv")
            frame = np.empty(message.came_nbytes, np.uint8)
            kept = self.describe_message(&message, &operand, frame, False, message.source, message.came_tag, "item")
            message.kind = OBJECT
            self.post_and_carry(&message, timeout_ns)
        finally:
            release(&operand)
            self.end_messaging()
        item = objects.unpack(frame)
        return (item, status_of(&message)) if with_status else item

    # -- from arguments to messages --

    cdef object describe_message(self, Message *message, Operand *operand, object x, bint is_send, object peer,
                                 object tag, str what):
        memset(message, 0, sizeof(Message))
        kept = take(operand, x, not is_send, what, True)
        message.is_send = is_send
        message.peer = self.rank_number(peer, "dest" if is_send else "source", not is_send)
        message.tag = tag_number(tag, not is_send)
        message.kind = kind_of(operand, x)
        message.data = operand.data
        message.nbytes = operand.count * operand.itemsize
        return kept

    cdef int describe_wish(self, Message *message, object source, object tag) except -1:
        memset(message, 0, sizeof(Message))
        message.is_probe = True
        message.peer = self.rank_number(source, "source", True)
        message.tag = tag_number(tag, True)
        return 0

    cdef int rank_number(self, object rank, str what, bint may_be_any) except -2:
        cdef int64_t number
        cdef int size = self.engine.g.size
        try:
            number = rank if PyLong_CheckExact(rank) else operator.index(rank)
        except TypeError:
            raise TypeError(f"{what} is {rank!r}; it must be an integer") from None
        except OverflowError:
            number = -3
        if not 0 <= number < size and not (may_be_any and number == ANY):
            raise ValueError(f"{what} is {rank!r}; the ranks are 0 to {size - 1}"
                             + (", or ANY_SOURCE" if may_be_any else ""))
        return number

    cdef object begin_transfer(self, object x, bint is_send, object peer, object tag):
        cdef Transfer transfer = Transfer.__new__(Transfer)
        self.begin_messaging()
        try:
            transfer.comm = self
            kept = self.describe_message(&transfer.message, &transfer.operand, x, is_send, peer, tag, "x")
            transfer.kept = x, kept
            transfer.message.owner = <void *> transfer
            if not self.is_enlisted:
                self.enlist()
            self.transfers.add(transfer)
            self.mail.npending += 1
            try:
                self.post(&transfer.message)
                self.advance()
            except BaseException:
                if transfer.message.state != COMPLETE:
                    self.abandon(&transfer.message)
                    self.transfers.discard(transfer)
                    self.mail.npending -= 1
                raise
        finally:
            self.end_messaging()
        return transfer

    # -- one thread at a time --

    cdef int begin_messaging(self) except -1:
        if self.engine.closed_because is not None:
            raise Closed(self.engine.closed_because, rank=self.engine.g.rank)
        if self.is_messaging:
            raise RuntimeError("another thread is sending or receiving on this communicator; give each thread its own")
        if sr_flag_load(&self.engine.g.header.abort) != SR_NO_ABORT:
            failures.raise_aborted(self.engine)
        if self.mail.peer == NULL:
            self.open_mail()
        self.is_messaging = True
        if self.is_enlisted:
            self.take_turn()
        return 0

    cdef int end_messaging(self) except -1:
        cdef bint leaves_something = self.mail.npending > 0
        if self.mail.completed != NULL:
            self.let_go_of_completed()
        self.is_messaging = False
        if self.is_enlisted:
            sr_flag_set(&self.mail.stepper, 0)
            if leaves_something and sr_flag_swap(&self.mail.resting, 0):
                rouse()
        return 0

    # The thread in the background has it for a step, for which it does not need the GIL, or while it attends.
    cdef int take_turn(self) except -1:
        if not sr_flag_take(&self.mail.stepper, WAITER):
            with nogil:
                while not sr_flag_take(&self.mail.stepper, WAITER):
                    sr_yield()
        self.mail.stuck = False
        return 0

    cdef int enlist(self) except -1:
        self.mail.errand.step = run_errand
        self.take_turn()
        sr_flag_set(&self.mail.resting, 1)
        self.is_enlisted = True
        enlist(&self.mail.errand, self)
        return 0

    def _attend(self):
        """What the thread that carries transfers on cannot do without the GIL."""
        cdef Mail *m = &self.mail
        if self.is_messaging or self.engine.closed_because is not None or not self.is_enlisted:
            return
        if not sr_flag_take(&m.stepper, BACKGROUND):
            return
        try:
            if m.npending > 0 and sr_flag_load(&m.g.header.abort) == SR_NO_ABORT:
                self.advance()
        except Exception:   # who waits comes upon it again, and hears of it
            m.stuck = True
        finally:
            self.let_go_of_completed()
            sr_flag_set(&m.stepper, 0)

    # What has completed meanwhile lets go of its arrays.
    cdef int let_go_of_completed(self) except -1:
        cdef Transfer transfer
        cdef Message *message
        while self.mail.completed != NULL:
            message = self.mail.completed
            self.mail.completed = message.next
            transfer = <Transfer> message.owner
            transfer.let_go()
            self.transfers.discard(transfer)
        return 0

    cdef int open_mail(self) except -1:
        cdef Mail *m = &self.mail
        cdef Group *g = &self.engine.g
        if not sr_ring_is_valid_length(g.header.message_ring_nbytes):
            raise Error("the segment of this communicator is damaged: its message rings have no valid length")
        m.g = g
        m.ring_nbytes = g.header.message_ring_nbytes
        m.seen = <uint64_t *> calloc((g.size + 63) // 64, sizeof(uint64_t))
        m.source = <int *> calloc(g.size, sizeof(int))
        m.peer = <Peer *> calloc(g.size, sizeof(Peer))
        if m.seen == NULL or m.source == NULL or m.peer == NULL:
            raise MemoryError()
        self.transfers = set()
        return 0

    cdef int close_mail(self) except -1:
        if self.is_enlisted:
            delist(&self.mail.errand)
            self.take_turn()
            self.let_go_of_completed()
            self.is_enlisted = False
            sr_flag_set(&self.mail.stepper, 0)
        if self.transfers is not None:
            self.transfers.clear()
        return 0

    # -- moving --

    cdef int post(self, Message *message) except -1:
        if not message.is_send:
            post_receive(&self.mail, message)
        elif message.peer == self.engine.g.rank:
            if not deliver_to_self(&self.mail, message):
                self.put_own_aside(message)
        else:
            if not self.mail.peer[message.peer].out_open:
                self.open_way_to(message.peer)
            post_send(&self.mail, message)
        return 0

    cdef int put_own_aside(self, Message *message) except -1:
        cdef Aside *aside = new_aside(self.engine.g.rank, <uint32_t> message.tag, message.kind, message.nbytes)
        memcpy(aside.data, message.data, message.nbytes)
        aside.whole = True
        put_aside(&self.mail, aside)
        message.state = COMPLETE
        if message.owner != NULL:
            message.next = self.mail.completed
            self.mail.completed = message
            self.mail.npending -= 1
        return 0

    cdef int open_way_to(self, int rank) except -1:
        cdef Group *g = &self.engine.g
        cdef size_t nbytes = self.mail.ring_nbytes
        self.allocate_message_ring(
            sr_layout_message_ring_offset(g.size, g.header.ring_nbytes, nbytes, g.rank, rank),
            sr_layout_message_room_nbytes(nbytes))
        open_way(&self.mail, rank)
        return 0

    cdef int allocate_message_ring(self, size_t offset, size_t nbytes) except -1:
        raise NotImplementedError("Comm has the memory")

    # The message at the head of a ring, which nobody waits for, makes way for one behind it.
    cdef int make_room(self) except -1:
        cdef sr_frame head
        cdef int source = self.mail.needy
        if sr_ring_peek(&self.mail.peer[source].inward, &head) != SR_RING_WHOLE:
            raise self.damaged(source)
        put_aside(&self.mail, new_aside(source, head.tag, head.kind, head.message_nbytes))
        return 0

    # As far as it goes at once.
    cdef int advance(self) except -1:
        cdef int status = NEEDS_ROOM
        while status == NEEDS_ROOM:
            if self.transfers:
                with nogil:
                    status = step_mail(&self.mail)
            else:
                status = step_mail(&self.mail)
            if status == NEEDS_ROOM:
                self.make_room()
            elif status == DAMAGED:
                raise self.damaged(self.mail.needy)
        return 0

    # A call that does not outlive its message.
    cdef int post_and_carry(self, Message *message, uint64_t timeout_ns) except -1:
        self.post(message)
        try:
            self.carry(message, timeout_ns, True)
        except BaseException:
            self.abandon(message)
            raise
        return 0

    # Returns when the message is complete; what ends the wait otherwise is raised, and leaves it posted. is_final:
    # coming too late is the end of the communicator, as it is for a collective.
    cdef int carry(self, Message *message, uint64_t timeout_ns, bint is_final) except -1:
        cdef Wait wait
        cdef int status = BLOCKED
        if message.state == COMPLETE:
            return 0
        if message.nbytes <= BRIEF_NBYTES and self.mail.nsends <= message.is_send:
            status = deliver_briefly(&self.mail, message)
            if status == DONE:
                return 0
        memset(&wait, 0, sizeof(wait))
        wait.deadline_ns = sr_now_ns() + timeout_ns
        while message.state != COMPLETE:
            if status == NEEDS_ROOM:
                self.make_room()
            elif status == DAMAGED:
                raise self.damaged(self.mail.needy)
            elif status == SIGNALLED:
                PyErr_CheckSignals()
            elif status != BLOCKED:
                self.raise_for(status, message, wait.culprit, timeout_ns, is_final)
            with nogil:
                status = deliver_patiently(&self.mail, message, &wait)
        return 0

    # A message that is given up. One that has left in part cannot be taken back: then all is given up.
    cdef int abandon(self, Message *message) except -1:
        if message.state != COMPLETE and message.is_send and message.out.offset > 0:
            self.engine.give_up(SR_ABORTED, self.engine.g.rank, self.engine.first_user_seq - 1,
                                f"rank {self.engine.g.rank} left a send to rank {message.peer} in the middle")
        withdraw(&self.mail, message)
        return 0

    # -- results and errors --

    cdef object result_of(self, Message *message):
        cdef int rank = self.engine.g.rank
        if message.failure == NO_FAILURE:
            return None if message.is_send else status_of(message)
        if message.failure == OTHER_ITEMS:
            raise mismatch(message, rank, "that message is lost, others are not")
        raise truncated(message, rank)

    cdef int raise_for(self, int status, Message *message, int culprit, uint64_t timeout_ns, bint is_final) except -1:
        cdef Group *g = &self.engine.g
        seq = self.engine.first_user_seq - 1   # of no collective
        wanted = wish_text(message)
        if status == LATE and not is_final:
            raise TimeoutError(f"{wanted} is not complete within {timeout_ns * 1e-9:g} s; it goes on")
        if status == LATE:
            what_was = f"did not answer rank {g.rank}'s {wanted} within {timeout_ns * 1e-9:g} s"
            if culprit == g.rank:
                what_was = f"waited {timeout_ns * 1e-9:g} s in vain in {wanted}"
            life = liveness.state(*self.engine.life_of(culprit))
            self.engine.give_up(SR_TIMED_OUT, culprit, seq, f"{what_was}; it is {life}")
        elif status == DEAD:
            self.engine.give_up(SR_RANK_FAILED, culprit, seq, liveness.how_it_ended(*self.engine.life_of(culprit)))
        elif status == LEFT:
            self.engine.give_up(SR_RANK_FAILED, culprit, seq,
                                f"closed the communicator before rank {g.rank}'s {wanted} was complete")
        try:
            failures.raise_aborted(self.engine)
        except Error as error:
            error.op = "send" if message.is_send else "probe" if message.is_probe else "recv"
            error.seq = None
            raise

    # The error for a ring that holds what no sender writes; it ends the communicator.
    cdef object damaged(self, int source):
        text = f"the message ring from rank {source} is damaged"
        self.engine.give_up(SR_ABORTED, self.engine.g.rank, self.engine.first_user_seq - 1, text)
        return Error(text, rank=source)


# Private memory for a message and what is known of it.
cdef Aside *new_aside(int source, uint32_t tag, uint32_t kind, size_t nbytes) except NULL:
    cdef Aside *aside = NULL
    if nbytes < <size_t> 1 << 62:
        aside = <Aside *> malloc(sizeof(Aside) + SR_CACHE_LINE + nbytes)
    if aside == NULL:
        raise MemoryError(f"no memory for a message of {nbytes} bytes from rank {source}, which came before the one "
                          "that is received; receive them in the order in which they are sent")
    memset(aside, 0, sizeof(Aside))
    aside.source = source
    aside.tag = tag
    aside.kind = kind
    aside.nbytes = nbytes
    aside.data = <unsigned char *> aside + sizeof(Aside)
    return aside


# ---- what has been begun -------------------------------------------------------------------------------------------

@cython.final
cdef class Transfer:
    """A message that has been begun by `isend` or `irecv`. It goes on within any call that sends or receives, and in
    the background."""

    def __init__(self):
        raise TypeError("a transfer is made by isend or irecv")

    def __dealloc__(self):
        release(&self.operand)

    def done(self):
        """Whether it is complete; carries it on, and does not wait."""
        if not self.is_over:
            self.comm.begin_messaging()
            try:
                self.comm.advance()
            finally:
                self.comm.end_messaging()
        return self.is_over

    def wait(self, timeout=None):
        """Wait until it is complete: None for a send, the `Status` for a receive, or the error that `recv` raises.

        timeout: seconds; after it TimeoutError, and the message goes on. Without it the communicator's timeout,
        which is final.
        """
        cdef uint64_t timeout_ns
        if not self.is_over:
            timeout_ns = timeout_ns_of(self.comm.default_timeout_ns, timeout)
            self.comm.begin_messaging()
            try:
                self.comm.carry(&self.message, timeout_ns, timeout is None)
            finally:
                self.comm.end_messaging()
        return self.comm.result_of(&self.message)

    def result(self, timeout=None):
        """What `wait` returns, as a `Work` has it."""
        return self.wait(timeout)

    def __await__(self):
        """For asyncio: looks now and then whether it is complete, and lets others run meanwhile."""
        import asyncio

        pause_s = 0.0
        while not self.done():
            yield from asyncio.sleep(pause_s).__await__()
            pause_s = min(0.002, 2 * pause_s + 0.00005)
        return self.result()

    cdef int let_go(self) except -1:
        release(&self.operand)
        self.kept = None
        self.is_over = True
        return 0

    def __repr__(self):
        state = "complete" if self.is_over else "on its way"
        return f"<shmring.Transfer: {wish_text(&self.message)}, {state}>"
