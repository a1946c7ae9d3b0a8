"""Calls whose arguments were checked: run at once, begun, or kept to be begun again.

Every call makes a `Call`, which has the NumPy arrays and numbers that shmring takes. The calls of
`Caller` are in Cython since their own time counts beside that of shmring.
"""

from libc.stdint cimport int64_t, uint64_t

cimport cython

from .._comm.collectives cimport plan_of
from .._comm.comm cimport Comm as ShmringComm, raise_later
from .._comm.endpoint cimport Status as Received, Transfer
from .._comm.point_to_point cimport Envelope
from .._comm.work cimport Work
from .._core.group cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, EXSCAN, GATHER, REDUCE, REDUCE_SCATTER, SCAN, SCATTER,
)
from .messages cimport (
    WILD_TAG, ANY_PEER, Data, Handle, MOST_TAG, NO_PEER, Status, data_of, int_of, new_handle, without_gaps,
)

import functools
import threading

import numpy as np

from . import errors
from ..errors import Error, Mismatch, Truncated
from .messages import IN_PLACE
from .turns import Turns

cdef frozenset LOGICAL = frozenset(["land", "lor", "lxor"])
cdef dict threads_by_number = threading._active
cdef bint many_threads_call = True
cdef object default_op, request_type, prequest_type   # set by `register_classes`


def register_classes(op, request, prequest):
    """Make the default operation and the classes of requests known."""
    global default_op, request_type, prequest_type
    default_op, request_type, prequest_type = op, request, prequest


class Kind:
    """The numbers of the collectives, as the engine has them."""

    all_reduce, reduce, reduce_scatter = <int> ALL_REDUCE, <int> REDUCE, <int> REDUCE_SCATTER
    scan, exscan, barrier = <int> SCAN, <int> EXSCAN, <int> BARRIER
    broadcast, scatter, gather = <int> BROADCAST, <int> SCATTER, <int> GATHER
    all_gather, all_to_all = <int> ALL_GATHER, <int> ALL_TO_ALL


# ---- calls -------------------------------------------------------------------------------------------------------

def set_many_threads_call(bint is_true):
    """Set whether threads of the program may call at the same time."""
    global many_threads_call
    many_threads_call = is_true


# True if no other thread of the program can enter a call while this thread is inside one.
cdef bint is_only_thread(Context context) noexcept:
    cdef Py_ssize_t count = len(threads_by_number)
    if not many_threads_call or count < 2:
        return True
    return (count == 2 and context is not None and context.own_comm is not None
            and context.own_comm.endpoint.has_progress_thread())


cdef class Context:
    """A communicator of shmring, as the handles of the stand-in for mpi4py refer to it."""

    def __init__(self, rank, size, comm=None, open_comm=None):
        self.rank, self.size, self.own_comm, self.open_comm = rank, size, comm, open_comm
        self.turns = Turns()

    cdef ShmringComm opened(self):
        if self.own_comm is None:
            self.own_comm = self.open_comm()
        return self.own_comm

    @property
    def comm(self):
        """The communicator of shmring."""
        return self.opened()

    @property
    def is_open(self):
        """True if the communicator of shmring was made."""
        return self.own_comm is not None

    def open_group(self, Context made, ranks, secret, share, dict children, what, number):
        """Open the communicator of a group, whose ranks alone call this, and note its number.

        Both are in Cython, so no exception can occur between them: the other ranks count the group as well.
        """
        made.own_comm = self.opened()._group_of_callers(ranks, secret, share)
        children[what] = number

    def transfers(self, bint is_send):
        """Return the transfers of messages that this rank sends, or of those that it receives."""
        cdef Transfer transfer
        found = []
        if self.own_comm is not None and self.own_comm.endpoint.transfers is not None:   # None once it is closed
            for transfer in list(self.own_comm.endpoint.transfers):
                if transfer.message.is_send == is_send:
                    found.append(transfer)
        return found

    def probe(self, int peer, int tag, probe, iprobe):
        """Return what `probe` returns. While other threads may call, repeat `iprobe` instead."""
        if is_only_thread(self):
            return probe(peer, tag)
        return self.turns.repeat(lambda: iprobe(peer, tag), self.opened().engine.poll)

    # Return the number of a peer as shmring has it, or NO_RANK for PROC_NULL.
    cdef int peer(self, object rank, object tag, bint is_send) except? -9:
        cdef int64_t peer = int_of(rank), number = int_of(tag)
        if not (0 <= number <= MOST_TAG or number == WILD_TAG and not is_send):
            raise self.failure(errors.ERR_TAG, f"the tag is {tag}; tags are 0 to {MOST_TAG}")
        if 0 <= peer < self.size:
            return peer
        if peer == NO_PEER:
            return NO_RANK
        if peer == ANY_PEER and not is_send:
            return -1
        raise self.failure(errors.ERR_RANK, f"the rank is {rank}; the ranks are 0 to {self.size - 1}")

    cdef int root_of(self, object root) except -1:
        cdef int64_t number = int_of(root)
        if not 0 <= number < self.size:
            raise self.failure(errors.ERR_ROOT, f"the root is {root}; the ranks are 0 to {self.size - 1}")
        return number

    def lock_of(self, key):
        """Return the lock of a key, for compound calls while there are several threads."""
        raise NotImplementedError

    def failure(self, code, reason):
        """Return the exception for an error."""
        raise NotImplementedError


cpdef int end_after(Context context, object error, bint beside) except -1:
    """End the communicator after an exception behind a call, which the other ranks have completed.

    An error of the program, as of an object that cannot be unpickled, has no such effect: it comes again if the call is
    repeated. beside: this thread may not be that of the collectives.
    """
    if (context is not None and context.own_comm is not None
            and (not isinstance(error, Exception) or isinstance(error, MemoryError))):
        context.own_comm.engine.abort_by_exception(error, False, beside)
    return 0


cdef class Call:
    """A call whose arguments were checked: it is run at once, issued, or kept to be started many times."""

    cpdef object perform(self):
        """Run the call, and return what shmring returns."""

    cpdef object begin(self):
        """Begin the call, and return a Work or a Transfer; None if there is nothing to wait for."""

    # The same while the process has other threads: run the call, begin it, and use what `begin` returned. Collectives
    # need no other code.

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
        return self.run_now(status)

    cdef object run_now(self, Status status):
        try:
            outcome = self.perform() if is_only_thread(self.context) else self.perform_beside_threads()
        except Error as error:
            raise self.context.failure(None, error) from error
        if status is not None:
            set_status(status, self, outcome)
        try:
            return self.conclude()
        except BaseException as error:
            end_after(self.context, error, isinstance(self, MessageCall))
            raise

    cpdef object conclude(self):
        """Do what is left when the call is complete, and return the result of a request.

        After an exception such as a KeyboardInterrupt, a request calls this again.
        A subclass overrides this rather than set `finish` to a method of its own: that would be a circle, which keeps
        the caller's arrays until the garbage collector runs.
        """
        return None if self.finish is None else self.finish()

    cpdef object release(self):
        """Do what is left when the call is complete and its request is given up."""

    def issue(self):
        """Begin the call, and return a Request."""
        cdef Pending pending = Pending.__new__(Pending)
        pending.call = self
        pending.start()
        return new_handle(request_type, pending)

    cpdef object set_number(self, int number):
        """Let this persistent collective meet only those of the same number on other ranks, where that is possible."""

    def persist(self, bint is_collective=False, prepare=None):
        """Return a Prequest, which begins the call when it is started, or each time the one that `prepare` returns."""
        cdef Pending pending = Pending.__new__(Pending)
        pending.call, pending.is_persistent, pending.is_idle, pending.prepare = self, True, True, prepare
        if is_collective:
            self.context.npersistent += 1
            pending.number = self.context.npersistent
            if prepare is None:
                self.set_number(pending.number)
        return new_handle(prequest_type, pending)


cdef void set_status(Status status, Call call, object outcome) noexcept:
    if isinstance(outcome, Received):
        status.set((<Received> outcome).source, (<Received> outcome).tag, (<Received> outcome).nbytes)
    elif call.empty is not None:
        status.copy(call.empty)
    else:
        status.set(ANY_PEER, WILD_TAG, 0)


@cython.final
@cython.freelist(16)
cdef class Pending:
    """A call that was begun; a request refers to it."""

    cpdef object start(self):
        """Begin the call."""
        cdef Call call = self.call
        self.is_complete = self.is_cancelled = False
        self.outcome = self.result = self.failure = None
        try:
            if self.prepare is not None:
                self.call = call = self.prepare()
                call.set_number(self.number)
            self.work = call.begin() if is_only_thread(call.context) else call.begin_beside_threads()
        except Error as error:
            raise self.exception_for(error) from error
        self.is_idle = False

    cpdef bint poll(self) except -1:
        """Return whether the call is complete, or has failed: `settle` then raises the error."""
        if not self.is_complete and (self.work is None or self.is_done()):
            self.wait()
        return self.is_complete

    cdef bint is_done(self) except -1:
        try:
            if is_only_thread(self.call.context):
                return self.work.done()
            return self.call.is_done_beside_threads(self.work)
        except Error as error:
            self.fail(error)
        return True

    # Return the exception for an error of the call.
    cdef object exception_for(self, object error):
        if self.number == 0 or not isinstance(error, Mismatch):
            return self.call.context.failure(None, error)
        return self.call.context.failure(errors.code_of(error), (
            f"a persistent collective has met another call: unless Startall starts them, all ranks have to start them "
            f"in the same order; {error}"))

    cdef int fail(self, object error) except -1:
        try:
            self.failure = self.exception_for(error)
            self.failure.__cause__ = error
        except BaseException as raised:   # of the program's error handler
            self.failure = raised
        return 0

    # Wait until the call is complete. An error of the call is kept until `settle` raises it. After any other exception,
    # such as a KeyboardInterrupt, the request is not complete, and can be waited for again.
    cdef int wait(self) except -1:
        try:
            if self.failure is not None:
                pass
            elif isinstance(self.work, Work):
                (<Work> self.work).finish()
            elif self.work is not None:
                if is_only_thread(self.call.context):
                    self.outcome = self.work.wait()
                else:
                    self.outcome = self.call.wait_beside_threads(self.work)
        except Error as error:
            self.fail(error)
        except (TypeError, ValueError) as error:   # a Work has found a wrong argument
            self.failure = error
        self.work = None
        if self.failure is None:
            try:
                self.result = self.call.conclude()
            except Exception as error:
                if isinstance(error, MemoryError):
                    raise
                self.failure = error
        self.is_complete = True
        return 0

    cpdef object settle(self):
        """Wait until the call is complete. Raise its error if it has failed."""
        if not self.is_complete:
            self.wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def cancel(self):
        """Cancel the call, where it can be cancelled."""
        if self.call.cancel(self.work):
            self.is_cancelled = True

    cpdef object report(self, Status status):
        """Set the status to that of the complete call."""
        set_status(status, self.call, self.outcome)
        if self.is_cancelled:
            status.fields[3] = True


cdef class BaseRequest(Handle):
    """The methods of requests that are called for each message."""

    cdef object complete(self, Status status):
        cdef Pending pending = self._ref
        if pending is None or pending.is_idle:
            if status is not None:
                status.set(ANY_PEER, WILD_TAG, 0)
            return None
        if not pending.is_complete:
            pending.wait()
        pending.is_idle = True
        if not pending.is_persistent:
            self._ref = None
            pending.call.release()
        pending.settle()
        if status is not None:
            pending.report(status)
        return pending.result

    cdef bint is_complete(self) except -1:
        cdef Pending pending = self._ref
        return pending is None or pending.is_idle or pending.poll()

    def _complete(self, Status status):
        return self.complete(status)

    def _is_complete(self):
        return self.is_complete()

    def _start(self):
        cdef Pending pending = self._ref
        if pending is None or not pending.is_idle:
            raise errors.Exception(errors.ERR_REQUEST, "the request is null, or was started already")
        pending.start()

    def Wait(self, Status status=None):
        """Block until the call is complete, and return True."""
        self.complete(status)
        return True

    def wait(self, Status status=None):
        """Block until the call is complete, and return its object, if it has one."""
        return self.complete(status)

    def Test(self, Status status=None):
        """Return whether the call is complete; if it is, this is the same as `Wait`."""
        if not self.is_complete():
            return False
        self.complete(status)
        return True

    def test(self, Status status=None):
        """Return whether the call is complete, and its object."""
        return (True, self.complete(status)) if self.is_complete() else (False, None)


def wait_for_all(requests):
    """Wait until the calls of all requests are complete. The requests stay as they are."""
    cdef Pending pending
    for request in requests:
        pending = (<BaseRequest?> request)._ref
        if pending is not None and not pending.is_idle and not pending.is_complete:
            pending.wait()


# ---- collectives -------------------------------------------------------------------------------------------------

@cython.final
cdef class Collective(Call):
    """A collective of shmring with pieces of equal length."""

    cpdef object perform(self):
        self.context.opened().run(self.kind, self.x, self.op, self.root, self.out, None, None, False, None)

    cpdef object begin(self):
        if self.plan is not None:
            return self.plan.issue()
        return self.context.opened().run(self.kind, self.x, self.op, self.root, self.out, None, None, True, None)

    cpdef object set_number(self, int number):
        # Calls of equal arguments then differ in the bits of hosts_in_group, which is 0 in all these calls.
        if number > 0:
            self.make_plan()
            self.plan.c.fingerprint ^= <uint64_t> (number & 0xffff) << 45

    def persist(self, bint is_collective=False, prepare=None):
        """Return a Prequest, which begins the call when it is started, or each time the one that `prepare` returns."""
        if prepare is None:
            self.make_plan()
        return Call.persist(self, is_collective, prepare)

    cdef int make_plan(self) except -1:
        cdef ShmringComm comm = self.context.opened()
        if self.plan is not None:
            return 0
        try:
            self.plan = plan_of(comm, self.kind, self.x, self.op, self.root, self.out)
        except Error as error:
            raise self.context.failure(None, error) from error
        except Exception:
            comm.engine.refuse(self.kind)
            raise
        return 0


# Run a collective without making a Call.
cdef int run_at_once(Context context, int kind, object x, object root) except -1:
    try:
        context.opened().run(kind, x, None, root, None, None, None, False, None)
    except Error as error:
        raise context.failure(None, error) from error
    return 0


# Return the memory of a broadcast; refuse it if an argument is wrong.
cdef Data broadcast_data(Context context, object buf, object root):
    try:
        return data_of(buf, context.rank != context.root_of(root))
    except Exception:
        context.opened().engine.refuse(BROADCAST)
        raise


# Return the collective; if an argument is wrong, refuse it, so that no other rank waits for this one.
cdef Call collective(Context context, int kind, object send, object recv, object op=None, object root=0):
    cdef Collective call = Collective.__new__(Collective)
    call.context, call.kind = context, kind
    try:
        call.root = context.root_of(root)
        if kind == BROADCAST:
            receive_into(call, data_of(recv, context.rank != call.root))
            call.x, call.out = call.out, None
            if context.rank == call.root:
                call.finish = None
        elif kind <= EXSCAN and kind != BARRIER and op is not None:
            return reduction(call, send, recv, op)
        elif kind != BARRIER:
            movement(call, send, recv)
    except Exception:
        context.opened().engine.refuse(kind)
        raise
    return call


cpdef bint is_in_place(object spec) noexcept:
    """Return whether this is IN_PLACE, or None, which stands for it."""
    return spec is None or spec is IN_PLACE


# Let a collective write to memory, and copy items with gaps back to their places.
cdef object receive_into(Collective call, Data data):
    call.out = data.moved()
    if data.copies is not None:
        call.finish = data.restore


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
            if is_in_place(recv):
                call.out = data.block(call.root)
                if data.readonly:   # the root's part stays where it is, so any memory takes the copy
                    call.out = np.empty_like(call.out)
                return 0
        receive_into(call, data_of(recv, True))
        return 0
    if is_joined:
        data = data_of(recv, True, size)
        receive_into(call, data)
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
    without_gaps(given)
    without_gaps(taken)
    if (<Handle?> op)._ref is None:
        raise errors.Exception(errors.ERR_OP)
    name = op._ref.name
    # MPI leaves a single operand as it is; a logical operation of shmring makes it 0 or 1.
    keeps_operand = name in LOGICAL and (call.kind == SCAN or call.kind == EXSCAN or context.size == 1)
    if keeps_operand or name not in given.type.ops:
        return op._ref.fold_call(context, call.kind, call.root, given, taken, blocks)
    call.op = name
    call.x = given.reduced()
    if call.kind == REDUCE_SCATTER and given is taken:   # the result goes to the first block, the operands are in all
        call.out = np.empty(taken.count, taken.type.dtype)
        call.finish = functools.partial(np.copyto, taken.reduced_block(0), call.out)
    elif given is not taken and taken is not None:
        call.out = taken.reduced()
    return call


# ---- messages ----------------------------------------------------------------------------------------------------

cdef class MessageCall(Call):
    """A call that sends or receives messages."""

    cpdef object perform_beside_threads(self):
        return self.wait_or_withdraw(self.begin_beside_threads())

    def wait_or_withdraw(self, work):
        """Wait for what `begin` has returned, in a call that has no request."""
        if work is None:
            return None
        try:
            return work.wait() if is_only_thread(self.context) else self.wait_beside_threads(work)
        except BaseException as error:
            self.abandon(work, error)
            raise

    # After an exception such as a KeyboardInterrupt, withdraw the receives: they would take later messages. If a
    # message has moved, the communicator ends: a repeated call would send it again, or receive the next one instead.
    cdef int abandon(self, object work, object error) except -1:
        cdef bint is_withdrawn = True
        try:
            is_withdrawn = self.context.turns.take(work.withdraw if isinstance(work, Several) else work.cancel)
        except Error:   # the communicator has ended
            pass
        if not is_withdrawn and not isinstance(error, Error):
            self.context.opened().engine.abort_by_exception(error, False, True)
        return 0

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


@cython.final
cdef class Sending(Directed):
    """A message to a rank."""

    cpdef object perform(self):
        self.context.opened().send(self.x, self.peer, self.tag)

    cpdef object begin(self):
        return self.context.opened().isend(self.x, self.peer, self.tag)


@cython.final
cdef class Receiving(Directed):
    """A message from a rank."""

    cpdef object perform(self):
        return self.context.opened().recv(self.x, self.peer, self.tag)

    cpdef object begin(self):
        return self.context.opened().irecv(self.x, self.peer, self.tag)


@cython.final
cdef class Several:
    """The works of messages that were begun together."""

    def __cinit__(self):
        self.works = []

    def done(self):
        """Return whether all are complete."""
        for work in self.works:
            if not work.done():
                return False
        return True

    def withdraw(self):
        """Withdraw the receives that no message has matched, and return whether nothing else was begun."""
        cdef bint is_withdrawn = True
        for work in self.works:
            is_withdrawn = work.cancel() and is_withdrawn
        return is_withdrawn

    def wait(self, timeout=None):
        """Wait for all, `timeout` seconds for each. Return the status of a receive; raise Truncated at the end."""
        found = truncated = None
        for work in self.works:
            try:
                status = work.wait(timeout)
            except Truncated as error:
                truncated = error
            else:
                found = found if status is None else status
        if truncated is not None:
            raise truncated
        return found


cdef class Exchange(MessageCall):
    """Messages that are sent and received at the same time, each an array, a rank and a tag.

    It is in Cython, so an exception such as a KeyboardInterrupt cannot occur while they are begun.
    """

    def __init__(self, Context context, list sent, list received, int messages_context=0):
        self.context, self.sent, self.received, self.messages_context = context, sent, received, messages_context

    cpdef object perform(self):
        return self.wait_or_withdraw(self.begin())

    cpdef object begin(self):
        cdef ShmringComm comm = self.context.opened()
        cdef Several begun = Several.__new__(Several)
        try:
            for x, peer, tag in self.received:
                begun.works.append(comm.irecv(x, peer, tag, context=self.messages_context))
            for x, peer, tag in self.sent:
                begun.works.append(comm.isend(x, peer, tag, context=self.messages_context))
        except BaseException as error:
            self.abandon(begun, error)
            raise
        return begun


def exchange(Call sent, Call received, Status status):
    """Send a message, receive one whose length is not known before, and return the result of the latter."""
    cdef Pending pending = Pending.__new__(Pending)
    pending.call = sent
    pending.start()
    try:
        result = received.run_now(status)
        pending.settle()
    except BaseException as error:
        if sent.empty is None:
            end_after(sent.context, error, True)
        raise
    return result


cpdef Call nothing(Context context):
    """Return the call of a message from or to PROC_NULL, which does nothing."""
    cdef Call call = Call.__new__(Call)
    call.context, call.empty = context, Status.__new__(Status)
    call.empty.set(NO_PEER, WILD_TAG, 0)
    return call


# Fill in the call. For PROC_NULL, return a call that does nothing; its message may be anything.
cdef Call directed(Directed call, Context context, object buf, object rank, object tag, bint is_send):
    cdef int peer = context.peer(rank, tag, is_send)
    cdef Data data
    if peer == NO_RANK:
        return nothing(context)
    data = data_of(buf, not is_send)
    call.context, call.x, call.peer, call.tag = context, data.moved(), peer, tag
    if data.copies is not None and not is_send:
        call.finish = data.restore
    return call


cdef Call sending(Context context, object buf, object dest, object tag):
    return directed(Sending.__new__(Sending), context, buf, dest, tag, True)


cdef Call receiving(Context context, object buf, object source, object tag):
    return directed(Receiving.__new__(Receiving), context, buf, source, tag, False)


# Copy received items with gaps to their places. beside: see `end_after`.
cdef int restore(Context context, Data data, bint beside) except -1:
    try:
        data.restore()
    except BaseException as error:
        end_after(context, error, beside)
        raise
    return 0


@cython.final
cdef class HeldLocks:
    """Locks that this rank holds until `release`, or until nothing refers to this object.

    It is in Cython, so an exception such as a KeyboardInterrupt cannot occur between two locks.
    """

    cdef list held

    def __cinit__(self, list locks):
        cdef Py_ssize_t place
        self.held = [None] * len(locks)   # first: without memory for it, no lock is taken
        try:
            for place in range(len(locks)):
                locks[place].__enter__()
                self.held[place] = locks[place]
        except BaseException:
            self.release()
            raise

    def __del__(self):
        try:
            self.release()
        except Exception:   # the communicator has ended, and its locks with it
            pass
        except BaseException as error:   # of a signal handler; by a SystemExit, Cython would end the process here
            raise_later(error)

    def release(self):
        """Release all locks."""
        cdef Py_ssize_t place
        failure = None
        for place in range(len(self.held)):
            lock, self.held[place] = self.held[place], None
            if lock is not None:
                try:
                    lock.__exit__(None, None, None)
                except BaseException as error:
                    failure = error
        if failure is not None:
            raise failure


# ---- the calls of communicators ------------------------------------------------------------------------------------

# Return what a communicator refers to.
cdef Context context_of(Handle communicator):
    if communicator._ref is None:
        raise errors.Exception(errors.ERR_COMM)
    return <Context> communicator._ref


cdef class Caller(Handle):
    """The calls of a communicator that have to be fast, and those that prepare the others."""

    def Get_size(self):
        """Return the number of ranks."""
        return context_of(self).size

    def Get_rank(self):
        """Return the rank of this process."""
        return context_of(self).rank

    def Send(self, buf, dest, tag=0):
        """Send a message; return when `buf` may be changed."""
        cdef Context context = context_of(self)
        cdef int peer = context.peer(dest, tag, True)
        cdef Data data
        if peer == NO_RANK or not is_only_thread(context):
            sending(context, buf, dest, tag).run_now(None)
            return
        data = data_of(buf, False)
        try:
            context.opened().send_bytes(data.data, data.nbytes(), peer, int_of(tag))
        except Error as error:
            raise context.failure(None, error) from error

    def Recv(self, buf, source=ANY_PEER, tag=WILD_TAG, Status status=None):
        """Receive a message."""
        cdef Context context = context_of(self)
        cdef int peer = context.peer(source, tag, False)
        cdef Data data
        cdef Envelope envelope
        if peer == NO_RANK or not is_only_thread(context):
            receiving(context, buf, source, tag).run_now(status)
            return
        data = data_of(buf, True)
        try:
            context.opened().recv_bytes(data.data, data.nbytes(), peer, int_of(tag), &envelope)
        except Error as error:
            raise context.failure(None, error) from error
        if data.copies is not None:
            restore(context, data, True)
        if status is not None:
            status.set(envelope.source, envelope.tag, envelope.nbytes)

    def Isend(self, buf, dest, tag=0):
        """Begin to send a message, and return a request."""
        return sending(context_of(self), buf, dest, tag).issue()

    def Irecv(self, buf, source=ANY_PEER, tag=WILD_TAG):
        """Begin to receive a message, and return a request."""
        return receiving(context_of(self), buf, source, tag).issue()

    def Barrier(self):
        """Block until all ranks have called this."""
        run_at_once(context_of(self), BARRIER, None, None)

    def Bcast(self, buf, root=0):
        """Copy the root's message to all ranks."""
        cdef Context context = context_of(self)
        cdef Data data = broadcast_data(context, buf, root)
        cdef int number = <int> int_of(root)
        run_at_once(context, BROADCAST, data.moved(), number)
        if data.copies is not None and context.rank != number:
            restore(context, data, False)

    def Allreduce(self, sendbuf, recvbuf, op=None):
        """Combine the messages of all ranks; every rank gets the result."""
        collective(context_of(self), ALL_REDUCE, sendbuf, recvbuf, default_op if op is None else op).run_now(None)

    def Iallreduce(self, sendbuf, recvbuf, op=None):
        """Combine the messages of all ranks; every rank gets the result. Return a request."""
        return collective(context_of(self), ALL_REDUCE, sendbuf, recvbuf, default_op if op is None else op).issue()

    def _sending(self, buf, dest, tag=0):
        return sending(context_of(self), buf, dest, tag)

    def _receiving(self, buf, source=ANY_PEER, tag=WILD_TAG):
        return receiving(context_of(self), buf, source, tag)

    def _collective(self, int kind, sendbuf, recvbuf, op=None, root=0):
        return collective(context_of(self), kind, sendbuf, recvbuf, op, root)

    def _probe(self, source, tag, Status status, bint is_blocking, bint is_taken=False):
        """Return what is known of a message, or if it is to be taken, the message; None if there is none.

        Wait for one if the probe is blocking. True stands for the message of PROC_NULL.
        """
        cdef Context context = context_of(self)
        cdef int peer = context.peer(source, tag, False)
        cdef ShmringComm comm
        cdef Received known
        if peer == NO_RANK:
            if status is not None:
                status.set(NO_PEER, WILD_TAG, 0)
            return True
        try:
            comm = context.opened()
            iprobe = comm.improbe if is_taken else comm.iprobe
            if is_blocking:
                found = context.probe(peer, tag, comm.mprobe if is_taken else comm.probe, iprobe)
            else:
                found = context.turns.take(iprobe, peer, <int> int_of(tag))
        except Error as error:
            raise context.failure(None, error) from error
        if found is not None and status is not None:
            known = found.status if is_taken else found
            status.set(known.source, known.tag, known.nbytes)
        return found

    def _peer(self, source, tag):
        """Return the number that shmring has for a source; None for PROC_NULL."""
        cdef int peer = context_of(self).peer(source, tag, False)
        return None if peer == NO_RANK else peer

    def _check_root(self, root):
        return context_of(self).root_of(root)
