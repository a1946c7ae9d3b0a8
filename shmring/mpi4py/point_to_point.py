"""Messages between two ranks: the ways of sending, probes, and messages that a probe took."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import errors, handles
from .calls import Call, Exchange, MessageCall, Pending, nothing
from .constants import INTEGERS
from .forms import add_forms
from .messages import BUFFER_AUTOMATIC, Handle, Status, buffer, handle, simple_with_gaps
from .objects import ObjectCaller, pickle
from .requests import Request

ANY_SOURCE, ANY_TAG, PROC_NULL = INTEGERS["ANY_SOURCE"], INTEGERS["ANY_TAG"], INTEGERS["PROC_NULL"]


class BufferedSends:
    """Copies of messages whose senders did not wait, until they are received."""

    def __init__(self) -> None:
        self.attached: Any = None
        self._pending: list[Pending] = []

    def attach(self, memory: Any) -> None:
        """Let messages be copied, as if to this memory; None stands for BUFFER_AUTOMATIC."""
        if self.attached is not None:
            raise errors.Exception(errors.ERR_BUFFER, "a buffer is attached already")
        memory = BUFFER_AUTOMATIC if memory is None else memory
        if memory is not BUFFER_AUTOMATIC and buffer(memory).readonly:
            raise BufferError("the buffer is read-only")
        self.attached = memory

    def detach(self) -> Any:
        """Wait until all messages were received, and return the memory."""
        self.flush()
        found, self.attached = self.attached, None
        return found

    def keep(self, pending: Pending) -> None:
        """Keep a message until it is received. One that has failed stays until `flush` raises its error."""
        self._pending = [kept for kept in self._pending if not kept.poll() or kept.failure is not None]
        self._pending.append(pending)

    def flush(self) -> None:
        """Wait until all messages were received."""
        while self._pending:
            self._pending.pop(0).settle()


BUFFERED = BufferedSends()  # of the process: MPI.Attach_buffer


class Buffered(MessageCall):
    """A message that is copied, so that its sender need not wait."""

    def __init__(self, context: Any, sent: Any, sends: BufferedSends) -> None:
        self.context, self.sent, self.sends, self.empty = context, sent, sends, sent.empty

    def perform(self) -> None:
        """Copy the message, and begin to send it."""
        if self.sends.attached is None:
            raise self.context.failure(errors.ERR_BUFFER, "no buffer is attached: call Attach_buffer")
        original, self.sent.x = self.sent.x, self.sent.x.copy()
        pending = Pending()
        pending.call = self.sent
        try:
            pending.start()
        finally:
            self.sent.x = original
        self.sends.keep(pending)

    begin = perform


class Synchronous(MessageCall):
    """A message whose send is complete only once the receiver has taken it."""

    def __init__(self, context: Any, sent: Any) -> None:
        self.context, self.sent, self.empty = context, sent, sent.empty

    def perform(self) -> None:
        self.context.comm.send(self.sent.x, self.sent.peer, self.sent.tag, matched=True)

    def begin(self) -> Any:
        return self.context.comm.isend(self.sent.x, self.sent.peer, self.sent.tag, matched=True)


class Arrived:
    """A message that a probe took; None for that of PROC_NULL."""

    def __init__(self, context: Any, message: Any) -> None:
        self.context, self.message = context, message


class Taking(MessageCall):
    """The receive of a message that a probe took."""

    def __init__(self, arrived: Arrived, room: Any) -> None:
        self.context, self.message, self.room = arrived.context, arrived.message, room

    def perform(self) -> Any:
        return self.message.recv(self.room)

    def begin(self) -> Any:
        return self.message.irecv(self.room)


class Message(handles.Named, Handle):
    """A message that `Mprobe` took out of the queue: only this object can receive it."""

    @classmethod
    def Probe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message:
        """Block until there is a message, and take it."""
        return _take(cls, comm, source, tag, status, True)

    @classmethod
    def Iprobe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Take a message if there is one; else return None."""
        return _take(cls, comm, source, tag, status, False)

    probe, iprobe = Probe, Iprobe

    def _taking(self, buf: Any) -> Call:
        arrived = self._arrived()
        if arrived.message is None:
            call = nothing(arrived.context)
        else:
            room = simple_with_gaps(buf, True)
            call = Taking(arrived, room.bytes)
            call.finish = room.finish
        return call

    def _arrived(self) -> Arrived:
        if self._ref is None:
            raise errors.Exception(errors.ERR_REQUEST, "the message was received already, or is null")
        return self._ref

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive the message."""
        self._receive(self._taking(buf), status)

    def Irecv(self, buf: Any) -> Request:
        """Receive the message, and return a request."""
        return self._begin(self._taking(buf))

    def recv(self, status: Status | None = None) -> Any:
        """Receive the object that the message is."""
        return self._receive(self._taking_object(), status)

    def irecv(self) -> Request:
        """Receive the object that the message is, and return a request."""
        return self._begin(self._taking_object())

    def _receive(self, call: Call, status: Status | None) -> Any:
        try:
            result = call.run(status)
        except Exception as error:
            if not isinstance(error, MemoryError):  # else the message can still be received
                self._forget()
            raise
        self._forget()
        return result

    def _begin(self, call: Call) -> Request:
        request = call.issue()
        self._forget()
        return request

    def _forget(self) -> None:
        if self is not MESSAGE_NO_PROC:
            self._ref = None

    def _taking_object(self) -> Call:
        message = self._arrived().message
        room = np.empty(0 if message is None else message.status.nbytes, np.uint8)
        call = self._taking(room)
        call.finish = lambda: pickle.loads(room) if room.nbytes else None
        return call


def _take(cls: Any, comm: Any, source: int, tag: int, status: Status | None, is_blocking: bool) -> Any:
    found = comm._probe(source, tag, status, is_blocking, True)
    if found is None:
        return None
    return handle(cls, MESSAGE_NO_PROC._ref if found is True else Arrived(comm._ref, found))


MESSAGE_NO_PROC: Message = handle(Message, Arrived(None, None))
MESSAGE_NULL = Message()
handles.predefine({"MESSAGE_NULL": MESSAGE_NULL, "MESSAGE_NO_PROC": MESSAGE_NO_PROC})


@functools.partial(add_forms, are_collective=False)
class PointToPoint(ObjectCaller):
    """Messages of a communicator."""

    def _prepare_Send(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message."""
        return self._sending(buf, dest, tag)

    _prepare_Rsend = _prepare_Send

    def _prepare_Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Any:
        """Receive a message."""
        return self._receiving(buf, source, tag)

    def _prepare_Ssend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a message; the call is complete once the receiver has taken it."""
        return self._synchronous(self._sending(buf, dest, tag))

    def _prepare_Bsend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Send a copy of a message, without waiting for the receiver."""
        return self._buffered(self._sending(buf, dest, tag))

    def _synchronous(self, sent: Call) -> Call:
        return sent if sent.empty is not None else Synchronous(self._ref, sent)

    def _buffered(self, sent: Call) -> Call:
        own = self._ref.buffered
        return (
            sent
            if sent.empty is not None
            else Buffered(self._ref, sent, own if own.attached is not None else BUFFERED)
        )

    def _prepare_Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Any:
        """Send a message and receive another one at the same time."""
        received = self._receiving(recvbuf, source, recvtag)
        return self._both(self._sending(sendbuf, dest, sendtag), received)

    def _prepare_Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Any:
        """Send a message and receive another one at its place."""
        received = self._receiving(buf, source, recvtag)
        copy = None if dest == PROC_NULL else simple_with_gaps(buf, False).bytes.copy()
        return self._both(self._sending(copy, dest, sendtag), received)

    def _both(self, sent: Any, received: Any) -> Exchange:
        outgoing, incoming = (
            [(call.x, call.peer, call.tag)] if call.empty is None else [] for call in (sent, received)
        )
        call = Exchange(self._ref, outgoing, incoming)
        call.empty, call.finish = received.empty, received.finish
        return call

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Block until a message can be received, and return True."""
        return self._probe(source, tag, status, True) is not None

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return whether a message can be received."""
        return self._probe(source, tag, status, False) is not None

    probe, iprobe = Probe, Iprobe

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Block until there is a message, and take it."""
        return Message.Probe(self, source, tag, status)

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Take a message if there is one; else return None."""
        return Message.Iprobe(self, source, tag, status)

    mprobe, improbe = Mprobe, Improbe

    def Attach_buffer(self, buf: Any) -> None:
        """Let `Bsend` on this communicator copy messages."""
        self._ref.buffered.attach(buf)

    def Detach_buffer(self) -> Any:
        """Wait until the copied messages were received, and return the buffer."""
        return self._ref.buffered.detach()

    def Flush_buffer(self) -> None:
        """Wait until the copied messages were received."""
        self._ref.buffered.flush()

    def Iflush_buffer(self) -> Request:
        """Wait until the copied messages were received, and return a request that is complete."""
        self._ref.buffered.flush()
        return completed(self._ref)


def completed(context: Any) -> Request:
    """Return a request that is complete."""
    call = Call()
    call.context = context
    return call.issue()


def Attach_buffer(buf: Any) -> None:
    """Let `Bsend` copy messages."""
    BUFFERED.attach(buf)


def Detach_buffer() -> Any:
    """Wait until the copied messages were received, and return the buffer."""
    return BUFFERED.detach()


def Flush_buffer() -> None:
    """Wait until the copied messages were received."""
    BUFFERED.flush()


def Iflush_buffer() -> Request:
    """Wait until the copied messages were received, and return a request that is complete."""
    BUFFERED.flush()
    return completed(None)
