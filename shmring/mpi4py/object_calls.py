"""The calls on Python objects, in lower case."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import errors
from .calls import MessageCall, end_after, exchange
from .collectives import Collectives
from .messages import Status, simple
from .objects import loaded, pickle
from .ops import SUM
from .point_to_point import ANY_SOURCE, ANY_TAG, PROC_NULL
from .rc import rc
from .requests import Request


def bytes_of(obj: Any) -> Any:
    return np.frombuffer(pickle.dumps(obj), np.uint8)


def object_in(data: Any) -> Any:
    return pickle.loads(data) if data.nbytes else None


class ReceiveObject(MessageCall):
    """The receive of an object: a probe returns its length."""

    def __init__(self, context: Any, source: int, tag: int) -> None:
        self.context, self.source, self.tag = context, source, tag
        self.data: Any = None

    def perform(self) -> Any:
        found = self.context.comm.probe(self.source, self.tag)
        self.data = np.empty(found.nbytes, np.uint8)
        return self.context.comm.recv(self.data, found.source, found.tag)

    def perform_beside_threads(self) -> Any:
        """Receive the object. No other thread can receive a message that was taken."""
        comm, turns = self.context.comm, self.context.turns
        message = self.context.probe(self.source, self.tag, comm.mprobe, comm.improbe)
        try:
            self.data = np.empty(message.status.nbytes, np.uint8)
            return turns.wait_for(turns.take(message.irecv, self.data))
        except BaseException as error:
            end_after(self.context, error, True)
            raise

    def conclude(self) -> Any:
        return object_in(self.data)


class ReceiveObjectInto(MessageCall):
    """The receive of an object into memory that the caller gave, or that is large enough for most."""

    def __init__(self, received: Any, room: Any) -> None:
        self.context, self.received, self.room = received.context, received, room
        self.transfer: Any = None

    def begin(self) -> Any:
        self.transfer = self.received.begin()
        return self.transfer

    def conclude(self) -> Any:
        found = self.transfer.wait()
        return object_in(self.room[: found.nbytes]) if found is not None else None


class Objects(Collectives):
    """The calls of a communicator on Python objects."""

    def _sending_object(self, obj: Any, dest: int, tag: int) -> Any:
        return self._sending(None if dest == PROC_NULL else bytes_of(obj), dest, tag)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object, and return a request."""
        return self._sending_object(obj, dest, tag).issue()

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; return once the receiver has taken it."""
        self._synchronous(self._sending_object(obj, dest, tag)).run()

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object, and return a request that is complete once the receiver has taken it."""
        return self._synchronous(self._sending_object(obj, dest, tag)).issue()

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, without waiting for the receiver."""
        self._buffered(self._sending_object(obj, dest, tag)).run()

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object, without waiting for the receiver, and return a request."""
        return self._buffered(self._sending_object(obj, dest, tag)).issue()

    def _asking(self, source: int, tag: int) -> Any:
        checked = self._receiving([None, 0], source, tag)
        return checked if checked.empty is not None else ReceiveObject(self._ref, checked.peer, checked.tag)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Begin to receive an object, and return a request. buf: memory for its bytes, or their number."""
        if buf is None or isinstance(buf, int):
            room = np.empty(buf or rc.irecv_bufsz, np.uint8)
        else:
            room = simple(buf, True).bytes
        call = self._receiving(room, source, tag)
        if call.empty is None:
            call = ReceiveObjectInto(call, room)
        return call.issue()

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Send an object and receive another one at the same time."""
        asking = self._asking(source, recvtag)  # before the send: it checks the arguments
        return exchange(self._sending_object(sendobj, dest, sendtag), asking, status)

    def _run_alone(self, key: str, function: Any, *arguments: Any) -> Any:
        """Call a function that takes several steps, while no other thread calls one with this key.

        It is here, not beside its callers, since a `with` in Cython is unsafe without memory.
        """
        with self._ref.lock_of(key):
            return function(*arguments)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on the root, and None on the others."""
        root = self._refusing("gather", self._check_root, root)
        given = self._refusing("gather", bytes_of, sendobj)
        with errors.Translating(self._ref):
            pieces = self._ref.comm.gather_v(given, root)
        return None if pieces is None else self._loaded(pieces)

    def scatter(self, sendobj: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Return this rank's object of the root's sequence. None stands for as many of None."""
        pieces = None
        root = self._refusing("scatter", self._check_root, root)
        if root == self._ref.rank:
            pieces = self._refusing("scatter", self._pickled_for_all, sendobj)
        with errors.Translating(self._ref):
            piece = self._ref.comm.scatter_v(pieces, root, like=np.empty(0, np.uint8))
        return loaded(self._ref, piece, False)

    def alltoall(self, sendobj: Sequence[Any] | None) -> list[Any]:
        """Give object j of each rank to rank j; return those that came. None stands for as many of None."""
        given = self._refusing("all_to_all", self._pickled_for_all, sendobj)
        with errors.Translating(self._ref):
            pieces = self._ref.comm.all_to_all_v(given)
        return self._loaded(pieces)

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Combine the objects of all ranks in rank order; the root gets the result."""
        objects = self.gather(sendobj, root)
        return None if objects is None else self._combined(objects, op)

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Combine the objects of all ranks in rank order; every rank gets the result."""
        return self._combined(self.allgather(sendobj), op)

    def _loaded(self, pieces: Sequence[Any]) -> list[Any]:
        return [loaded(self._ref, piece, False) for piece in pieces]

    def _combined(self, objects: Sequence[Any], op: Any) -> Any:
        """Combine the objects that a collective has moved."""
        try:
            return functools.reduce(op, objects)
        except BaseException as error:
            end_after(self._ref, error, False)
            raise

    def _pickled_for_all(self, objects: Any) -> list[Any]:
        objects = [None] * self._ref.size if objects is None else list(objects)
        pieces = [bytes_of(obj) for obj in objects]
        if len(pieces) != self._ref.size:
            raise ValueError(f"{len(pieces)} objects are given for {self._ref.size} ranks")
        return pieces
