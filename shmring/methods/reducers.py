"""Reduction servers: ranks that only reduce the data of hosts of workers and send back the result.

This module uses only a communicator's public API.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np

import shmring

from .._arguments import integer, refusing
from ..errors import agreed
from .flat import FOLDS, abort_after, check_folded, one_call_to_make

__all__ = ["ReductionServers"]

_Array = np.ndarray[Any, Any]
_OPS = tuple(FOLDS)
_DTYPES = ("float32", "float64", "int32", "int64", "complex64", "complex128")
_LEAST_CHUNK_NBYTES = 1 << 14  # below it a message costs more than its bytes
_END = -1  # in place of the number of elements


class ReductionServers:
    """Reduction servers on the ranks in `reducers`; the other ranks are the workers.

    Making one is collective. The workers of a host first reduce among themselves. Each worker then sends its
    slices to the reducers that own them. A reducer folds the slices of all hosts in host order and sends back
    the result. So a host of workers sends and receives the message once, whereas in a hierarchical all-reduce
    over H hosts it sends and receives 2(H - 1)/H times the message. Each of R reducers receives and sends H/R
    times the message, so reducers need links and hosts of their own. Compare Google's Reduction Server
    (2021), BytePS (Jiang et al. 2020), and the switches in SHARP (Graham et al. 2016).

    Call `all_reduce` on workers, `serve` on reducers, and `close` on all ranks, or use `with`. If a rank
    leaves the block with an exception, the others raise Aborted. A worker keeps buffers of 2 * chunk_nbytes *
    depth bytes, a reducer as much for each host of workers.

    Parameters
    ----------
    comm : Comm
        The communicator.
    reducers : iterable of int
        Ranks, the same on all ranks.
    chunk_nbytes : int
        The largest piece of a message, in bytes: a multiple of 16, 64 or more.
    depth : int
        The number of pieces in transit from each worker, so that sending, folding and returning overlap: 1 or
        more; it is raised to the number of reducers. Larger values of chunk_nbytes and depth than the
        defaults were slower (bench/methods/bench_reducers.py).

    Raises
    ------
    TypeError
        For a number that is no integer. The other ranks get `Mismatch`.
    ValueError
        On all ranks, if reducers has an invalid rank, no rank or all ranks, if chunk_nbytes or depth has a
        wrong value, or if the ranks give different arguments.
    Error
        As `Comm.split`.

    Examples
    --------
    >>> from shmring.methods.reducers import ReductionServers
    >>> with ReductionServers(comm, reducers=[1]) as servers:
    ...     if servers.is_reducer:
    ...         calls = servers.serve()
    ...     else:
    ...         x = np.ones(3)
    ...         servers.all_reduce(x)
    ...         print(x)
    [1. 1. 1.]
    """

    @one_call_to_make
    def __init__(
        self, comm: shmring.Comm, reducers: Iterable[int], *, chunk_nbytes: int = 1 << 16, depth: int = 4
    ) -> None:
        with refusing(comm, "all_gather"):
            self.reducers = tuple(integer("a reducer", rank) for rank in reducers)
            chunk_nbytes, depth = integer("chunk_nbytes", chunk_nbytes), integer("depth", depth)
        places = comm.all_gather_object((comm.node, (self.reducers, chunk_nbytes, depth)))
        if any(given != places[0][1] for _, given in places):
            raise agreed(
                ValueError("the ranks give different reducers, chunk_nbytes or depth; give all the same")
            )
        try:
            _check(self.reducers, comm.size, chunk_nbytes, depth)
        except (TypeError, ValueError) as error:
            raise agreed(error) from None
        self._hosts = _workers_by_host([node for node, _ in places], self.reducers)
        self._chunk_nbytes, self._depth = chunk_nbytes, max(depth, len(self.reducers))
        self._is_closed = False
        self._comm = comm.dup()
        try:
            # A split of comm: the rank at which it fails ends comm, and no other rank gives its own reason.
            self._here = comm.split(None if self.is_reducer else comm.node)
        except Exception as error:  # a group that cannot begin is an error on its own ranks alone
            comm.abort(f"rank {comm.rank} could not make a group of its host: {error}")
            raise
        if self._here is None:
            self._slots = np.empty((2 * self._depth, len(self._hosts), chunk_nbytes), np.uint8)
        elif self._here.size > 1:
            self._parts = np.empty((2, self._depth, chunk_nbytes), np.uint8)
            self._rows = np.empty((self._here.size, chunk_nbytes), np.uint8)

    @property
    def is_reducer(self) -> bool:
        """True if this rank is a reducer."""
        return self._comm.rank in self.reducers

    def all_reduce(self, x: _Array, op: shmring.Op | str = "sum") -> None:
        """Combine the workers' x elementwise, in place, with the same bits on all. Collective over workers.

        Ranks are folded in rank order within a host, then hosts in the order of their first workers.

        Parameters
        ----------
        x : numpy.ndarray
            Contiguous in C order and writable, of float32, float64, int32, int64, complex64 or complex128, of
            the same dtype and size on every worker.
        op : str or Op
            sum, avg (not of integers), prod, min or max (not of complex numbers).

        Raises
        ------
        TypeError, ValueError
            For a wrong argument of this rank. The other ranks get `Mismatch` or `Aborted`. It ends this
            object's communicators, so that no further call is possible.
        Error
            As `Comm.all_reduce`.
        """
        here = self._workers()
        try:
            op = check_folded(x, op, _DTYPES)
        except (TypeError, ValueError) as error:
            # Abort first: a rank that meets the refusal on this host then finds the reason of the abort.
            self._comm.abort(f"worker {self._comm.rank} refused its arguments: {error}")
            here.refuse("all_reduce")
            raise
        flat = x.reshape(-1)
        chunk = self._elements_of_chunk(flat)
        try:
            self._comm.run_steps(self._reduce_by_servers, flat, chunk, op, begun=True)
        except BaseException as error:
            here.abort("an all_reduce by reduction servers has failed")  # this host's workers wait in `here`
            if isinstance(error, shmring.Error):
                self._end(error)
            raise

    def _reduce_by_servers(self, flat: _Array, chunk: int, op: shmring.Op) -> None:
        number = _OPS.index(op)
        self._agree(flat.size, number)
        self._announce([flat.size, chunk, _DTYPES.index(flat.dtype.name), number])
        self._exchange(flat, chunk, shmring.Op.SUM if op is shmring.Op.AVG else op)

    def serve(self) -> int:
        """Reduce for the workers until they close; return the number of their calls. Reducers only.

        Returns
        -------
        int
            Number of calls.

        Raises
        ------
        ValueError
            On a worker.
        Error
            As `Comm.recv`.
        """
        if not self.is_reducer:
            raise ValueError(f"rank {self._comm.rank} is a worker; serve() is for reducers {self.reducers}")
        served: int = self._comm.run_steps(self._serve, begun=True)
        return served

    def _serve(self) -> int:
        for calls in itertools.count():
            count, chunk, dtype, op = self._await_call()
            if count == _END:
                return calls
            with np.errstate(all="ignore"):
                self._reduce(count, chunk, np.dtype(_DTYPES[dtype]), _OPS[op])
        raise AssertionError("unreachable")

    def _agree(self, count: int, op: int) -> None:
        """Abort if this host's workers have different numbers of elements or ops.

        Padding would hide the number of elements. A host adds for avg as for sum, and only its first worker
        tells the reducers the op.
        """
        here = self._workers()
        if here.size == 1:
            return
        given = np.array([count, -count, op, -op])
        here.all_reduce(given, "max")
        most, least, last_op, first_op = (given * (1, -1, 1, -1)).tolist()
        if most != least:
            shown = f"with {least} and with {most} elements"
        elif last_op != first_op:
            shown = f"with {_OPS[first_op]} and with {_OPS[last_op]}"
        else:
            return
        self._comm.abort(f"the workers' calls do not match: workers of one host called all_reduce {shown}")
        self._comm.iprobe()  # raises it

    def _end(self, error: shmring.Error) -> None:
        """Raise the error that has ended the call for all ranks, if it arose outside this host's workers."""
        here = self._workers()
        self._comm.iprobe()
        if isinstance(error, shmring.RankFailed) and here.parent_ranks and error.rank is not None:
            self._comm.probe(here.parent_ranks[error.rank])  # the same error, with the rank's number in comm
        self._comm.abort(f"worker {self._comm.rank} has failed: {error}")

    def close(self) -> None:
        """Close this object's communicators. The workers' `close` ends `serve`. No call may be in progress.

        A second close does nothing.

        Raises
        ------
        Error
            As `Comm.send`.
        """
        if self._is_closed:
            return
        try:
            if self._here is not None:
                self._announce([_END, 0, 0, 0])
        finally:
            if self._here is not None:
                self._here.close()
            self._comm.close()
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        text = f"rank {self._comm.rank} left with {type(error).__name__}: {error}"
        abort_after(self._comm, error, text)
        if self._here is not None:  # The other workers of this host may wait in `_here`.
            with contextlib.suppress(shmring.Error):
                self._here.abort(text)

    # ---- the description of a call: from the first worker of each host to each reducer ----

    def _announce(self, call: list[int]) -> None:
        if self._workers().rank == 0:
            words = np.array(call)
            for reducer in self.reducers:
                self._comm.send(words, reducer)

    def _await_call(self) -> list[int]:
        calls = np.empty((len(self._hosts), 4), int)
        for number, (host, words) in enumerate(zip(self._hosts, calls, strict=True)):
            self._comm.recv(words, host[0], timeout=None if number else float("inf"))
        if (calls != calls[0]).any():
            shown = ", ".join(
                f"worker {host[0]} {_call_text(words)}"
                for host, words in zip(self._hosts, calls, strict=True)
            )
            self._comm.abort(f"the workers' calls do not match: {shown}")
            self._comm.iprobe()  # raises it
        first: list[int] = calls[0].tolist()
        return first

    # ---- workers ----
    # Chunk c goes to reducer c mod R, from local rank c mod L of each host with L workers; L may differ by
    # host. A block is L consecutive chunks, one for each worker of the host.

    def _exchange(self, flat: _Array, chunk: int, op: shmring.Op) -> None:
        here, under_way = self._workers(), deque[Any]()
        for number, begin in enumerate(range(0, flat.size, here.size * chunk)):
            if len(under_way) == self._depth:
                self._finish(*under_way.popleft())
            block = flat[begin : begin + here.size * chunk]
            reducer = self.reducers[(number * here.size + here.rank) % len(self.reducers)]
            sent, back = self._reduce_here(block, chunk, op, number % self._depth)
            own = min(max(block.size - here.rank * chunk, 0), chunk)
            transfers = []
            if own:
                transfers = [self._comm.isend(sent[:own], reducer), self._comm.irecv(back[:own], reducer)]
            under_way.append((block, chunk, back, transfers))
        while under_way:
            self._finish(*under_way.popleft())

    def _reduce_here(self, block: _Array, chunk: int, op: shmring.Op, number: int) -> tuple[_Array, _Array]:
        """Return this rank's chunk of its host's sum, and the buffer for the sum over all hosts."""
        if self._workers().size == 1:
            return block, block  # the reducer sends the sum only after it has received all of the chunk
        sent, back = (part[number].view(block.dtype)[:chunk] for part in self._parts)
        self._workers().reduce_scatter(self._in_rows(block, chunk), op, out=sent)
        return sent, back

    def _finish(self, block: _Array, chunk: int, back: _Array, transfers: list[shmring.Transfer]) -> None:
        _wait(transfers)
        if self._workers().size > 1:
            rows = self._in_rows(block, chunk)
            self._workers().all_gather(back, out=rows)
            if rows.size > block.size:
                block[...] = rows.reshape(-1)[: block.size]

    def _in_rows(self, block: _Array, chunk: int) -> _Array:
        """Return the block in shape (L, chunk); the last block, if shorter, is copied and padded."""
        ranks = self._workers().size
        if block.size == ranks * chunk:
            return block.reshape(ranks, chunk)
        rows = self._rows.reshape(-1).view(block.dtype)[: ranks * chunk]
        rows[: block.size] = block
        rows[block.size :] = 0
        return rows.reshape(ranks, chunk)

    def _elements_of_chunk(self, flat: _Array) -> int:
        """Return the elements of a chunk, so that every worker and reducer has two rounds of chunks."""
        widest = max(len(self.reducers), *map(len, self._hosts))
        fair_nbytes = max(_LEAST_CHUNK_NBYTES, flat.nbytes // (2 * self._depth * widest))
        return max(1, min(self._chunk_nbytes, fair_nbytes) // flat.itemsize)

    def _workers(self) -> shmring.Comm:
        if self._here is None:
            raise ValueError(f"rank {self._comm.rank} is a reducer: it calls serve()")
        return self._here

    # ---- reducers ----

    def _reduce(self, count: int, chunk: int, dtype: np.dtype[Any], op: str) -> None:
        """Receive into one half of the slots while the other half is sent back."""
        receiving, sending = deque[Any](), deque[Any]()
        chunks = range(self.reducers.index(self._comm.rank), -(-count // chunk), len(self.reducers))
        for number, slot in zip(chunks, itertools.cycle(self._slots)):
            if len(receiving) == self._depth:
                sending.append(self._fold(op, *receiving.popleft()))
            if len(sending) > self._depth:  # the oldest send uses this slot
                _wait(sending.popleft())
            parts = slot.view(dtype)[:, : min(chunk, count - number * chunk)]
            owners = [host[number % len(host)] for host in self._hosts]
            arriving = [self._comm.irecv(part, owner) for part, owner in zip(parts, owners, strict=True)]
            receiving.append((parts, owners, arriving))
        while receiving:
            sending.append(self._fold(op, *receiving.popleft()))
        for transfers in sending:
            _wait(transfers)

    def _fold(
        self, op: str, parts: _Array, owners: list[int], arriving: list[shmring.Transfer]
    ) -> list[shmring.Transfer]:
        result = parts[0]
        fold = _multiply if op == "prod" and result.dtype.kind == "c" else FOLDS[op]
        arriving[0].wait()
        for part, transfer in zip(parts[1:], arriving[1:], strict=True):
            transfer.wait()
            fold(result, part, out=result)
        if op == "avg":
            numbers = result.view(result.real.dtype)  # a complex division would round otherwise
            np.divide(numbers, sum(map(len, self._hosts)), out=numbers)
        return [self._comm.isend(result, owner) for owner in owners]


def _multiply(a: _Array, b: _Array, out: _Array) -> None:
    """Multiply complex numbers with the roundings of the engine. NumPy fuses operations."""
    real = a.real * b.real - a.imag * b.imag
    imag = a.real * b.imag + a.imag * b.real
    out.real, out.imag = real, imag


def _wait(transfers: Iterable[shmring.Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _check(reducers: tuple[int, ...], size: int, chunk_nbytes: int, depth: int) -> None:
    strange = [rank for rank in reducers if not 0 <= rank < size]
    if strange:
        raise ValueError(f"reducer {strange[0]} is not a rank; the ranks are 0 to {size - 1}")
    if len(set(reducers)) < len(reducers):
        raise ValueError(f"reducers are {reducers}; name each once")
    if not 0 < len(reducers) < size:
        raise ValueError(f"{len(reducers)} of {size} ranks are reducers; give one or more, but not all")
    if chunk_nbytes < 64 or chunk_nbytes % 16 or depth < 1:
        raise ValueError(
            f"chunk_nbytes is {chunk_nbytes} and depth {depth}; chunk_nbytes must be 64 or more, a multiple "
            "of 16, and depth 1 or more"
        )


def _workers_by_host(nodes: list[int], reducers: tuple[int, ...]) -> list[list[int]]:
    """Return the workers of each host. Hosts are in the order of their first workers, as in all_reduce."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        if rank not in reducers:
            by_node.setdefault(node, []).append(rank)
    return list(by_node.values())


def _call_text(call: _Array) -> str:
    count, _, dtype, op = call.tolist()
    return "closed" if count == _END else f"called all_reduce({_DTYPES[dtype]}[{count}], {_OPS[op]})"
