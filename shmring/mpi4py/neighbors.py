"""Collectives among the neighbours of a topology: each rank exchanges messages along its edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import errors
from .calls import Exchange, end_after
from .constants import INTEGERS, LIBRARY_CONTEXT
from .forms import add_forms
from .messages import simple_with_gaps, typed_pieces, vector
from .object_calls import bytes_of
from .objects import loaded
from .point_to_point import PointToPoint

_PROC_NULL = INTEGERS["PROC_NULL"]
_REFUSED = -1  # in the place of a length: the argument of the sender was wrong
_MOST_EDGES, _NUMBERS = 2**10, 2**19  # tags of a persistent call, and numbers of such calls: see comm.py
_NOTHING = np.empty(0, np.uint8)


class NeighborCall(Exchange):
    """Messages along all edges of this rank, in their order: `sent` goes out, `received` comes in.

    `taken` is the memory of the latter, if the program gave it.
    """

    def __init__(self, context: Any, sent: Sequence[Any], received: Sequence[Any], taken: Any = None) -> None:
        topology = context.topology
        sources, destinations = topology.edges()
        outgoing = [
            (x, peer, topology.tag_to(edge))
            for edge, (x, peer) in enumerate(zip(sent, destinations, strict=True))
            if peer != _PROC_NULL
        ]
        incoming = [
            (x, peer, topology.tag_from(edge))
            for edge, (x, peer) in enumerate(zip(received, sources, strict=True))
            if peer != _PROC_NULL
        ]
        super().__init__(context, outgoing, incoming, LIBRARY_CONTEXT)
        self.finish = taken and taken.finish

    def set_number(self, number: int) -> None:
        """Give the messages tags of their own, so that ranks may start persistent calls in any order."""
        first_tag = number % _NUMBERS * _MOST_EDGES
        self.sent = [(x, peer, first_tag + tag) for x, peer, tag in self.sent]
        self.received = [(x, peer, first_tag + tag) for x, peer, tag in self.received]


@add_forms
class Neighbors(PointToPoint):
    """The collectives among neighbours of a communicator with a topology."""

    __slots__ = ()
    _topology: Callable[[], Any]

    def _degrees(self) -> tuple[int, int]:
        sources, destinations = self._topology().edges()
        return len(sources), len(destinations)

    def _prepare_Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Send one message to all out-neighbours, and collect those of the in-neighbours."""
        return self._call(_same, sendbuf, _blocks, recvbuf)

    def _prepare_Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Send one message to all out-neighbours, and collect the in-neighbours'; the lengths differ."""
        return self._call(_same, sendbuf, _pieces, recvbuf)

    def _prepare_Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Send each out-neighbour its part of the message, and collect those of the in-neighbours."""
        return self._call(_blocks, sendbuf, _blocks, recvbuf)

    def _prepare_Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Send each out-neighbour its part, and collect the in-neighbours'; the parts differ in length."""
        return self._call(_pieces, sendbuf, _pieces, recvbuf)

    def _prepare_Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Send each out-neighbour its part, and collect the in-neighbours'; the parts differ in datatype."""
        return self._call(typed_pieces, sendbuf, typed_pieces, recvbuf)

    def _call(self, split_sent: Any, sendbuf: Any, split_taken: Any, recvbuf: Any) -> NeighborCall:
        """Return the call. The functions return the memory of a message, and its part for each edge."""
        indegree, outdegree = self._degrees()
        taken, received = split_taken(recvbuf, True, indegree)
        return NeighborCall(self._ref, split_sent(sendbuf, False, outdegree)[1], received, taken)

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send an object to all out-neighbours, and return the in-neighbours'; None where there is none."""
        outdegree = self._degrees()[1]
        return self._exchange(lambda: [bytes_of(sendobj)] * outdegree)

    def neighbor_alltoall(self, sendobj: Sequence[Any] | None) -> list[Any]:
        """Send each out-neighbour its object, and return the in-neighbours'; None where there is none.

        None as the argument stands for as many of None.
        """
        outdegree = self._degrees()[1]

        def pickled() -> list[Any]:
            objects = [None] * outdegree if sendobj is None else list(sendobj)
            if len(objects) != outdegree:
                raise ValueError(f"{len(objects)} objects are given for {outdegree} neighbours")
            return [bytes_of(obj) for obj in objects]

        return self._exchange(pickled)

    def _exchange(self, pickled: Callable[[], list[Any]]) -> list[Any]:
        """Send the pickled objects, and return those of the in-neighbours.

        If `pickled` raises, the out-neighbours get an error, and this rank receives the messages to it.
        """
        try:
            sent = pickled()
        except Exception:
            self._move([None] * self._degrees()[1])
            raise
        lengths, received = self._move(sent)
        for length, source in zip(lengths, self._topology().edges()[0], strict=True):
            if length == _REFUSED:
                reason = f"rank {source} has called this with a wrong argument"
                raise self._ref.failure(errors.ERR_OTHER, reason)
        return [loaded(self._ref, x, True) if x.nbytes else None for x in received]

    def _move(self, sent: list[Any]) -> tuple[list[int], list[Any]]:
        """Exchange the lengths of messages, and then the messages. None stands for a refused one."""
        lengths = np.zeros(self._degrees()[0], np.int64)
        one_each = [lengths[edge : edge + 1].view(np.uint8) for edge in range(len(lengths))]
        given = [np.array([_REFUSED if x is None else x.nbytes], np.int64).view(np.uint8) for x in sent]
        NeighborCall(self._ref, given, one_each).run()
        try:
            received = [np.empty(max(0, nbytes), np.uint8) for nbytes in lengths]
            NeighborCall(self._ref, [_NOTHING if x is None else x for x in sent], received).run()
        except BaseException as error:  # the neighbours may have completed both calls
            end_after(self._ref, error, True)
            raise
        return lengths.tolist(), received


def _same(spec: Any, is_written: bool, count: int) -> tuple[Any, list[Any]]:
    """Return the memory of a message, and as an array `count` times the whole of it."""
    data = simple_with_gaps(spec, is_written)
    return data, [data.bytes] * count


def _blocks(spec: Any, is_written: bool, count: int) -> tuple[Any, list[Any]]:
    """Return the memory of a message, and its `count` equal parts as arrays."""
    if count == 0:
        return None, []
    data = simple_with_gaps(spec, is_written, count)
    nbytes = data.count * data.type.extent
    return data, [data.part(place * nbytes, nbytes) for place in range(count)]


def _pieces(spec: Any, is_written: bool, count: int) -> tuple[Any, list[Any]]:
    """Return the memory of a message, and its `count` parts, which differ in length, as arrays."""
    return vector(spec, is_written, count) if count else (None, [])
