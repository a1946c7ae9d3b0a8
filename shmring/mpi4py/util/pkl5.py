"""Communicators whose objects travel by pickle protocol 5: large buffers are not copied into the pickle.

An object is one message with its pickle and the sizes of its buffers, and then a message for each buffer that
is not empty, from the same rank and with the same tag.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from ..calls import Call, Pending, end_after
from ..messages import handle

MPI: Any = import_module("shmring.mpi4py.MPI")
ANY_SOURCE, ANY_TAG, PROC_NULL, ROOT = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.PROC_NULL, MPI.ROOT
BYTE, Pickle, Status = MPI.BYTE, MPI.Pickle, MPI.Status

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "PROC_NULL",
    "ROOT",
    "Comm",
    "Intercomm",
    "Intracomm",
    "Message",
    "Request",
]

pickle = Pickle()


class _BigMPI:
    """The limit of a message, as a setting of mpi4py; shmring's messages have none."""

    blocksize = 1 << 30


_bigmpi = _BigMPI()


def _dumps(obj: Any) -> tuple[bytes, list[Any]]:
    """Return the first message of an object, and its buffers."""
    data, buffers = pickle.dumps_oob(obj)
    sizes = [buffer.nbytes for buffer in buffers]
    return struct.pack(f"<q{len(sizes)}q", len(sizes), *sizes) + data, buffers


def _sizes(head: memoryview) -> list[int]:
    """Return the sizes of the buffers of an object."""
    (number,) = struct.unpack_from("<q", head)
    return list(struct.unpack_from(f"<{number}q", head, 8))


def _loads(head: memoryview, buffers: list[Any]) -> Any:
    return pickle.loads_oob(head[8 * (1 + len(buffers)) :], buffers)


class _AsOneCall:
    """End the communicator after an exception such as a KeyboardInterrupt: an object may be lost in part."""

    def __init__(self, context: Any, *, beside: bool) -> None:
        self.context, self.beside = context, beside

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            end_after(self.context, error, self.beside)


class _Parts(Call):
    """The messages of an object, whose requests were begun, as one call. `finish` returns the object."""

    def __init__(self, parts: list[Any], finish: Callable[[], Any] | None = None, source: Any = None) -> None:
        self.parts, self.finish, self.empty = parts, finish, source
        self.failure: BaseException | None = None

    def begin(self) -> Any:
        return self if self.parts else None

    def done(self) -> bool:
        return all(part.Get_status() for part in self.parts)

    def wait(self) -> None:
        """Wait for all parts. After an exception such as a KeyboardInterrupt, this is called again."""
        for part in self.parts:
            try:
                part.Wait()
            except Exception as error:  # MPI's, or of the program's error handler
                if part:  # not complete: it can be waited for again
                    raise
                self.failure = self.failure or error

    def cancel(self, work: Any) -> bool:
        for part in self.parts:
            if part:  # else it is complete
                part.Cancel()
        return False

    def conclude(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return None if self.finish is None else self.finish()

    def issue(self) -> Request:
        """Return the request."""
        pending = Pending()
        pending.call = self
        pending.start()
        return handle(Request, pending)


class Request(MPI.Request):  # type: ignore[misc]
    """The sending or the receiving of an object, which was begun."""

    def __new__(cls, request: Any = None) -> Any:
        """Return a request of the same call; of several requests, one of all their calls."""
        if request is not None and not isinstance(request, MPI.Request):
            parts = [part for part in request if part]
            request = _Parts(parts).issue() if parts else None
        return super().__new__(cls, request)


class _Matched:
    """An object that has been matched: its first message is here, its buffers are not yet received."""

    def __init__(self, first: Any, comm: Any, status: Any) -> None:
        self.status, self.parts, self.buffers, self.context = status, [], [], comm and comm._ref
        self.is_none = first == MPI.MESSAGE_NO_PROC
        if self.is_none:
            return
        self.head = bytearray(status.Get_count(BYTE))
        first.Recv([self.head, BYTE])
        source, tag = status.Get_source(), status.Get_tag()
        for size in _sizes(memoryview(self.head)):
            self.buffers.append(bytearray(size))
            if size:
                # Matched now, so that another probe does not find them.
                self.parts.append((MPI.Comm.Mprobe(comm, source, tag), self.buffers[-1]))

    def load(self) -> Any:
        return None if self.is_none else _loads(memoryview(self.head), self.buffers)


class Message:
    """An object that a probe has matched, and that only this message receives. It is no `MPI.Message`."""

    def __init__(self, message: Any = None) -> None:
        self._matched: _Matched | None = None
        if isinstance(message, Message):
            self._matched = message._matched
        elif isinstance(message, MPI.Message) and message == MPI.MESSAGE_NO_PROC:
            self._matched = _no_process
        elif message:
            raise TypeError("a message of pkl5 is made by its own probes")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MPI.Message):
            return not self if not other else self._matched is _no_process and other == MPI.MESSAGE_NO_PROC
        if isinstance(other, Message):
            return self._matched is other._matched
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._matched is not None

    def free(self) -> None:
        """Forget the message; it cannot be received any more."""
        self._matched = None

    def recv(self, status: Any = None) -> Any:
        """Receive the object."""
        with _AsOneCall(self._matched and self._matched.context, beside=True):
            return self.irecv().wait(status)

    def irecv(self) -> Request:
        """Begin to receive the object."""
        matched, self._matched = self._matched, None
        if matched is None:
            raise MPI.Exception(MPI.ERR_REQUEST)
        parts = [message.Irecv([buffer, BYTE]) for message, buffer in matched.parts]
        return _Parts(parts, matched.load, matched.status).issue()

    @classmethod
    def probe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Message:
        """Block until there is a matching object, and return it as a message."""
        own = Status() if status is None else status
        first = MPI.Comm.Mprobe(comm, source, tag, own)
        return cls._match(first, comm, own if status is None else Status(own))

    @classmethod
    def iprobe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> Message | None:
        """Return a matching object as a message; None if none has come yet."""
        own = Status() if status is None else status
        first = MPI.Comm.Improbe(comm, source, tag, own)
        return None if first is None else cls._match(first, comm, own if status is None else Status(own))

    @classmethod
    def _match(cls, first: Any, comm: Any, status: Any) -> Message:
        message = cls()
        is_none = first == MPI.MESSAGE_NO_PROC
        with _AsOneCall(comm._ref, beside=True):
            message._matched = _no_process if is_none else _Matched(first, comm, status)
        return message


_status = Status()
_status.source = PROC_NULL
_no_process = _Matched(MPI.MESSAGE_NO_PROC, None, _status)


class Comm(MPI.Comm):  # type: ignore[misc]
    """A communicator whose lower-case methods leave large buffers out of the pickle."""

    def _begin(self, begin: Callable[..., Any], obj: Any, dest: int, tag: int) -> Request:
        """Begin to send an object, with a method that begins to send a message."""
        head, buffers = (b"", []) if dest == PROC_NULL else _dumps(obj)
        messages = (head, *(b for b in buffers if b.nbytes))
        with _AsOneCall(self._ref, beside=True):
            parts = [begin(self, [part, BYTE], dest, tag) for part in messages]
        return _Parts(parts).issue()

    def _send(self, begin: Callable[..., Any], obj: Any, dest: int, tag: int) -> None:
        request = self._begin(begin, obj, dest, tag)
        with _AsOneCall(self._ref, beside=True):
            request.wait()

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self._send(MPI.Comm.Isend, obj, dest, tag)

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object through the attached buffer."""
        self._send(MPI.Comm.Ibsend, obj, dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and wait until its receiver has matched it."""
        self._send(MPI.Comm.Issend, obj, dest, tag)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object."""
        return self._begin(MPI.Comm.Isend, obj, dest, tag)

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object through the attached buffer."""
        return self._begin(MPI.Comm.Ibsend, obj, dest, tag)

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object; the request is complete once its receiver has matched it."""
        return self._begin(MPI.Comm.Issend, obj, dest, tag)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Receive an object. `buf` is not used."""
        return Message.probe(self, source, tag).recv(status)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Refuse: the number of messages of an object is known only once the first has come."""
        raise RuntimeError("pkl5 has no irecv: use mprobe or improbe, and Message.irecv")

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Any = None,
    ) -> Any:
        """Send an object, and receive one. `recvbuf` is not used."""
        self._peer(source, recvtag)  # before the send: it checks the arguments
        request = self.isend(sendobj, dest, sendtag)
        with _AsOneCall(None if dest == PROC_NULL else self._ref, beside=True):
            received = self.recv(None, source, recvtag, status)
            request.wait()
        return received

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Message:
        """Block until there is a matching object, and return it as a message."""
        return Message.probe(self, source, tag, status)

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Message | None:
        """Return a matching object as a message; None if none has come yet."""
        return Message.iprobe(self, source, tag, status)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Give the root's object to all ranks."""
        root = self._refusing("broadcast", self._check_root, root)
        is_root = self.Get_rank() == root
        head, buffers = self._refusing("broadcast", _dumps, obj) if is_root else (b"", [])
        head, buffers = self._ref.comm.run_steps(self._bcast, head, buffers, root)
        with _AsOneCall(self._ref, beside=False):
            return _loads(memoryview(head), buffers)

    def _bcast(self, head: bytes, buffers: list[Any], root: int) -> tuple[Any, list[Any]]:
        head = super().bcast(head, root)
        if self.Get_rank() != root:
            buffers = [bytearray(size) for size in _sizes(memoryview(head))]
        for buffer in buffers:
            self.Bcast([buffer, BYTE], root)
        return head, buffers

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Give the objects of all ranks to the root."""
        head, buffers = self._refusing("gather", _dumps, sendobj)
        return self._load(self._ref.comm.run_steps(self._gather, head, buffers, root))

    def _gather(self, head: bytes, buffers: list[Any], root: int) -> _Room | None:
        heads = super().gather(head, root)
        room = None if heads is None else _Room(heads)
        self.Gatherv(_joined(buffers), None if room is None else room.specification, root)
        return room

    def _load(self, room: _Room | None) -> list[Any] | None:
        """Return the objects that a collective has moved."""
        with _AsOneCall(self._ref, beside=False):
            return None if room is None else room.load()

    def scatter(self, sendobj: Iterable[Any] | None, root: int = 0) -> Any:
        """Give each rank one of the root's objects; None stands for as many of None."""
        root, parts = self._refusing("scatter", self._check_root, root), []
        if self.Get_rank() == root:
            parts = self._refusing("scatter", self._dumps_for_all, sendobj)
        found = self._load(self._ref.comm.run_steps(self._scatter, parts, root))
        assert found is not None
        return found[0]

    def _scatter(self, parts: list[tuple[bytes, list[Any]]], root: int) -> _Room:
        room = _Room([super().scatter([head for head, _ in parts], root)])
        self.Scatterv(_specification_of(parts) if parts else None, [room.memory, BYTE], root)
        return room

    def allgather(self, sendobj: Any) -> list[Any]:
        """Give the objects of all ranks to all ranks."""
        head, buffers = self._refusing("all_gather", _dumps, sendobj)
        found = self._load(self._ref.comm.run_steps(self._allgather, head, buffers))
        assert found is not None
        return found

    def _allgather(self, head: bytes, buffers: list[Any]) -> _Room:
        room = _Room(super().allgather(head))
        self.Allgatherv(_joined(buffers), room.specification)
        return room

    def alltoall(self, sendobj: Iterable[Any] | None) -> list[Any]:
        """Give each rank one of the objects; None stands for as many of None."""
        parts = self._refusing("all_to_all", self._dumps_for_all, sendobj)
        found = self._load(self._ref.comm.run_steps(self._alltoall, parts))
        assert found is not None
        return found

    def _alltoall(self, parts: list[tuple[bytes, list[Any]]]) -> _Room:
        room = _Room(super().alltoall([head for head, _ in parts]))
        self.Alltoallv(_specification_of(parts), room.specification)
        return room

    def _dumps_for_all(self, objects: Iterable[Any] | None) -> list[tuple[bytes, list[Any]]]:
        return [_dumps(one) for one in ([None] * self.Get_size() if objects is None else objects)]


class _Room:
    """Memory for the buffers of several objects, of which the first messages are here."""

    def __init__(self, heads: list[Any]) -> None:
        self.heads = [memoryview(head) for head in heads]
        sizes = [_sizes(head) for head in self.heads]
        self.counts = [sum(of_one) for of_one in sizes]
        self.memory = bytearray(sum(self.counts))
        self.specification = [self.memory, self.counts, BYTE]
        self._sizes = sizes

    def load(self) -> list[Any]:
        objects, begin, memory = [], 0, memoryview(self.memory)
        for head, sizes in zip(self.heads, self._sizes, strict=True):
            buffers = []
            for size in sizes:
                buffers.append(memory[begin : begin + size])
                begin += size
            objects.append(_loads(head, buffers))
        return objects


def _joined(buffers: list[Any]) -> list[Any]:
    """Return the message of several buffers. One alone is not copied."""
    return [buffers[0] if len(buffers) == 1 else b"".join(buffers), BYTE]


def _specification_of(parts: list[tuple[bytes, list[Any]]]) -> list[Any]:
    """Return the message with the buffers of several objects, one for each rank."""
    counts = [sum(buffer.nbytes for buffer in buffers) for _, buffers in parts]
    return [b"".join(buffer for _, buffers in parts for buffer in buffers), counts, BYTE]


class Intracomm(Comm, MPI.Intracomm):  # type: ignore[misc]
    """A communicator whose lower-case methods leave large buffers out of the pickle."""


class Intercomm(Comm, MPI.Intercomm):  # type: ignore[misc]
    """The name of a class that mpi4py has; shmring's MPI has no intercommunicators."""
