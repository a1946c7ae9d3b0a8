"""The collectives on buffers, in three forms each. `calls` makes those with pieces of equal length."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from . import errors
from .calls import Call, Kind, is_in_place
from .forms import add_forms
from .messages import handle, simple, simple_with_gaps, typed_pieces, vector
from .ops import SUM, Op
from .point_to_point import PointToPoint
from .types import Datatype

_Prepare = TypeVar("_Prepare", bound=Callable[..., Any])


class VectorCall(Call):
    """A collective of shmring whose pieces differ in length: a method, and its arguments.

    `taken` is the memory to which this rank receives, or None.
    """

    def __init__(self, taken: Any, context: Any, name: str, *arguments: Any, **keywords: Any) -> None:
        self.context, self.name, self.arguments, self.keywords = context, name, arguments, keywords
        self.finish = taken and taken.finish

    def perform(self) -> None:
        getattr(self.context.comm, self.name)(*self.arguments, **self.keywords)

    def begin(self) -> Any:
        return getattr(self.context.comm, self.name)(*self.arguments, **self.keywords, async_op=True)


def _checked(kind: str) -> Callable[[_Prepare], _Prepare]:
    """Return a decorator of methods that prepare a call; see `Collectives._refusing`."""

    def decorate(prepare: Any) -> Any:
        @functools.wraps(prepare)
        def checked(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return self._refusing(kind, prepare, self, *arguments, **keywords)

        return checked

    return decorate


@add_forms
class Collectives(PointToPoint):
    """The collectives of a communicator."""

    def _prepare_Barrier(self) -> Any:
        """Block until all ranks have called this."""
        return self._collective(Kind.barrier, None, None)

    def _prepare_Bcast(self, buf: Any, root: int = 0) -> Any:
        """Copy the root's message to all ranks."""
        return self._collective(Kind.broadcast, None, buf, None, root)

    def _prepare_Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        """Collect the messages of all ranks on the root."""
        return self._collective(Kind.gather, sendbuf, recvbuf, None, root)

    def _prepare_Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        """Give each rank its part of the root's message."""
        return self._collective(Kind.scatter, sendbuf, recvbuf, None, root)

    def _prepare_Allgather(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Collect the messages of all ranks on each rank."""
        return self._collective(Kind.all_gather, sendbuf, recvbuf)

    def _prepare_Alltoall(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Give part j of each rank's message to rank j."""
        return self._collective(Kind.all_to_all, sendbuf, recvbuf)

    def _prepare_Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Any:
        """Combine the messages of all ranks; the root gets the result."""
        return self._collective(Kind.reduce, sendbuf, recvbuf, op, root)

    def _prepare_Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Any:
        """Combine the messages of all ranks; every rank gets the result."""
        return self._collective(Kind.all_reduce, sendbuf, recvbuf, op)

    def _prepare_Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Any:
        """Combine the messages of all ranks; each rank gets its part of the result, all of one length."""
        return self._collective(Kind.reduce_scatter, sendbuf, recvbuf, op)

    @_checked("reduce_scatter")
    def _prepare_Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Any:
        """Combine the messages of all ranks; each rank gets its part of the result."""
        taken = simple(recvbuf, True)
        counts = self._counts_of(taken, recvcounts, is_in_place(sendbuf))
        given = taken if is_in_place(sendbuf) else simple(sendbuf, False)
        own = counts[self._ref.rank]
        if given.type.dtype != taken.type.dtype:
            raise ValueError("both messages must have the same datatype")
        if given.count != sum(counts) or (given is not taken and taken.count != own):
            raise ValueError(f"{given.count} items are combined into {counts}, {taken.count} of them here")
        result, datatype = np.empty_like(given.items), handle(Datatype, given.type)
        call = self._collective(Kind.all_reduce, [given.items, datatype], [result, datatype], op)
        first = sum(counts[: self._ref.rank])
        call.finish = functools.partial(np.copyto, taken.items[:own], result[first : first + own])
        return call

    def _counts_of(self, taken: Any, recvcounts: Any, in_place: bool) -> list[int]:
        if recvcounts is not None:
            counts = [operator.index(count) for count in recvcounts]
            if len(counts) != self._ref.size:
                raise ValueError(f"{len(counts)} counts are given for {self._ref.size} ranks")
            return counts
        if in_place:
            if taken.count % self._ref.size:
                raise ValueError(f"{taken.count} items are not a multiple of {self._ref.size} ranks")
            return [taken.count // self._ref.size] * self._ref.size
        counts_of_all = np.empty(self._ref.size, np.int64)
        with errors.Translating(self._ref):
            self._ref.comm.all_gather(np.array([taken.count], np.int64), out=counts_of_all)
        return counts_of_all.tolist()

    @_checked("gather")
    def _prepare_Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        """Collect the messages of all ranks, of different lengths, on the root."""
        data, pieces = None, None
        root = self._check_root(root)
        if root == self._ref.rank:
            data, pieces = vector(recvbuf, True, self._ref.size)
        x = pieces[root] if pieces and is_in_place(sendbuf) else simple_with_gaps(sendbuf, False).bytes
        return VectorCall(data, self._ref, "gather_v", x, root, out=pieces)

    @_checked("scatter")
    def _prepare_Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        """Give each rank its part of the root's message, of different lengths."""
        pieces = None
        root = self._check_root(root)
        if root == self._ref.rank:
            _, pieces = vector(sendbuf, False, self._ref.size)
        if pieces and is_in_place(recvbuf):
            return VectorCall(None, self._ref, "scatter_v", pieces, root)
        taken = simple_with_gaps(recvbuf, True)
        return VectorCall(taken, self._ref, "scatter_v", pieces, root, out=taken.bytes)

    @_checked("all_gather")
    def _prepare_Allgatherv(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Collect the messages of all ranks, of different lengths, on each rank."""
        data, pieces = vector(recvbuf, True, self._ref.size)
        x = pieces[self._ref.rank] if is_in_place(sendbuf) else simple_with_gaps(sendbuf, False).bytes
        return VectorCall(data, self._ref, "all_gather_v", x, out=pieces)

    @_checked("all_to_all")
    def _prepare_Alltoallv(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Give part j of each rank's message to rank j; the parts differ in length."""
        data, taken = vector(recvbuf, True, self._ref.size)
        given = taken if is_in_place(sendbuf) else vector(sendbuf, False, self._ref.size)[1]
        return VectorCall(data, self._ref, "all_to_all_v", given, out=taken)

    @_checked("all_to_all")
    def _prepare_Alltoallw(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Give part j of each rank's message to rank j; the parts differ in length and datatype."""
        data, taken = typed_pieces(recvbuf, True, self._ref.size)
        given = taken if is_in_place(sendbuf) else typed_pieces(sendbuf, False, self._ref.size)[1]
        return VectorCall(data, self._ref, "all_to_all_v", given, out=taken)

    def _refusing(self, kind: str, prepare: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Prepare a call. If an argument is wrong, refuse it, so that no other rank waits for this one."""
        self.Get_rank()
        try:
            return prepare(*arguments, **keywords)
        except Exception:
            self._ref.comm.refuse(kind)
            raise

    def barrier(self) -> None:
        """Block until all ranks have called this."""
        self.Barrier()
