"""All-reduce algorithms from the literature by point-to-point messages, for ranks on any number of hosts.

`Comm.all_reduce(algorithm=...)` has the same algorithms in the shared memory of one host. Here an algorithm
is a schedule: the parts that a rank receives and then sends in each step. One loop executes all schedules.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

import shmring

from .._arguments import integer, refusing
from .flat import FOLDS, check_folded

__all__ = ["ALGORITHMS", "Stepwise"]

_Array = np.ndarray[Any, Any]
_DTYPES = ("float32", "float64", "int32", "int64")


class _Receive(NamedTuple):
    part: _Array
    source: int
    folds: bool  # True: fold the message into the part. False: replace the part.


_Arriving = tuple[_Receive, _Array, "shmring.Transfer[shmring.Status]"]


class _Step(NamedTuple):
    """A step: all `receives` complete before any of `sends`, pairs of part and destination, starts.

    A rank receives the messages of a peer in the order in which the peer sends them, so messages need no
    numbers.
    """

    receives: list[_Receive]
    sends: list[tuple[_Array, int]]


_Schedule = Iterator[_Step]


# ---- the schedules of a rank, for x in one dimension -------------------------------------------------------


def _ring(rank: int, size: int, x: _Array, chunk: int = 0, direction: int = 1) -> _Schedule:
    """Send every slice around the ring once to be folded, and once more as a result."""
    slices = np.array_split(x, size)
    place = rank * direction  # direction -1 mirrors the ring
    for step in range(2 * size - 1):
        part = slices[(place + step + 1) % size]
        receives = [_Receive(part, (rank + direction) % size, folds=step < size)] if step > 0 else []
        yield _Step(receives, [(part, (rank - direction) % size)] if step < 2 * size - 2 else [])


def _bidirectional_ring(rank: int, size: int, x: _Array, chunk: int) -> _Schedule:
    halves = np.array_split(x, 2)
    return _side_by_side(_ring(rank, size, halves[0]), _ring(rank, size, halves[1], direction=-1))


def _halving_doubling(rank: int, size: int, x: _Array, chunk: int) -> _Schedule:
    """Halve and double over a power of two ranks; other ranks send x first, and receive the result last."""
    power = 1 << (size.bit_length() - 1)
    if rank >= power:
        yield _Step([], [(x, rank - power)])
        yield _Step([_Receive(x, rank - power, folds=False)], [])
        return
    if rank + power < size:
        yield _Step([_Receive(x, rank + power, folds=True)], [])
    slices = [1 << bit for bit in reversed(range(power.bit_length() - 1))]
    for many in slices:
        peer = rank ^ many
        yield _Step([], [(_span(x, power, peer & -many, many), peer)])
        yield _Step([_Receive(_span(x, power, rank & -many, many), peer, folds=True)], [])
    for many in reversed(slices):
        peer = rank ^ many
        yield _Step([], [(_span(x, power, rank & -many, many), peer)])
        yield _Step([_Receive(_span(x, power, peer & -many, many), peer, folds=False)], [])
    if rank + power < size:
        yield _Step([], [(x, rank + power)])


def _tree(rank: int, size: int, x: _Array, chunk: int) -> _Schedule:
    return _up_and_down(_binomial(size), rank, x, -(-x.size // chunk))


def _double_tree(rank: int, size: int, x: _Array, chunk: int) -> _Schedule:
    pairs = zip(_double(size), np.array_split(x, 2), strict=True)
    count = -(-x.size // (2 * chunk))
    return _side_by_side(*(_up_and_down(parents, rank, half, count) for parents, half in pairs))


def _master(rank: int, size: int, x: _Array, chunk: int) -> _Schedule:
    others = range(1, size)
    if rank > 0:
        yield _Step([], [(x, 0)])
        yield _Step([_Receive(x, 0, folds=False)], [])
        return
    for other in others:  # one rank a step, so that at most two buffers are in use
        yield _Step([_Receive(x, other, folds=True)], [])
    yield _Step([], [(x, other) for other in others])


def _side_by_side(one: _Schedule, other: _Schedule) -> _Schedule:
    for a, b in zip(one, other, strict=True):
        yield _Step(a.receives + b.receives, a.sends + b.sends)


def _span(x: _Array, power: int, first: int, many: int) -> _Array:
    """Return `many` consecutive slices of the `power` slices of x, from slice `first` on."""
    return x[x.size * first // power : x.size * (first + many) // power]


def _up_and_down(parents: tuple[int, ...], rank: int, x: _Array, count: int) -> _Schedule:
    """Pipeline the chunks from the leaves to the root and back.

    Steps are numbered alike on all ranks: a rank at depth d of D sends chunk c upwards in step c + D - d and
    downwards in step c + D + d. So two trees have the same steps, and their messages have one order.
    """
    chunks = np.array_split(x, max(count, 1))
    depth, deepest = _depth(parents, rank), max(_depth(parents, each) for each in range(len(parents)))
    parent, children = parents[rank], [child for child, above in enumerate(parents) if above == rank]
    for step in range(len(chunks) + 2 * deepest):
        receives: list[_Receive] = []
        sends: list[tuple[_Array, int]] = []
        up, down = step - deepest + depth, step - deepest - depth
        if 0 <= up < len(chunks):
            receives += [_Receive(chunks[up], child, folds=True) for child in children]
            sends += [(chunks[up], parent)] if parent >= 0 else []
        if 0 <= down < len(chunks):
            receives += [_Receive(chunks[down], parent, folds=False)] if parent >= 0 else []
            sends += [(chunks[down], child) for child in children]
        yield _Step(receives, sends)


@functools.cache
def _binomial(size: int) -> tuple[int, ...]:
    """Return by rank its parent, the rank without its lowest bit; -1 for the root."""
    return (-1, *(rank & (rank - 1) for rank in range(1, size)))


@functools.cache
def _double(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two binary trees, the second mirrored or shifted: leaves of one are inner nodes of the other."""
    nodes = [_binary_parent(node, size) for node in range(size)]
    ranks = [size - 1 - node if size % 2 == 0 else (node + 1) % size for node in range(size)]
    other = [-1] * size
    for node, parent in enumerate(nodes):
        other[ranks[node]] = ranks[parent] if parent >= 0 else -1
    return tuple(nodes), tuple(other)


def _binary_parent(node: int, size: int) -> int:
    """Return a node's parent in a tree whose odd nodes are leaves and whose even nodes are not."""
    bit = node & -node
    up = (node ^ bit) | bit << 1
    return -1 if node == 0 else up if up < size else node ^ bit


def _depth(parents: tuple[int, ...], rank: int) -> int:
    return 0 if parents[rank] < 0 else 1 + _depth(parents, parents[rank])


_SCHEDULES: dict[str, Callable[[int, int, _Array, int], _Schedule]] = {
    "ring": _ring,
    "bidirectional_ring": _bidirectional_ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "double_tree": _double_tree,
    "master": _master,
}
ALGORITHMS = tuple(_SCHEDULES)


# ---- executing a schedule ----------------------------------------------------------------------------------


class Stepwise:
    """All-reduces by messages, with buffers and a communicator of their own. Making one is collective.

    `ring` and `bidirectional_ring`: Patarasuk and Yuan 2009. `halving_doubling`: Rabenseifner 2004; Thakur,
    Rabenseifner and Gropp 2005. `tree` is binomial. `double_tree`: Sanders, Speck and Träff 2009, as in NCCL
    2.4. Both trees pipeline chunks. `master`: all ranks send to rank 0, which sends the result to all. The
    buffers take at most twice the bytes that one step receives to fold. Call `close`, or use `with`.

    Parameters
    ----------
    comm : Comm
        The communicator.
    chunk_nbytes : int
        Bytes of a chunk, 8 or more, the same on all ranks.

    Raises
    ------
    TypeError, ValueError
        For a wrong number of this rank. The other ranks get `Mismatch`.
    Error
        As `Comm.dup`.

    Examples
    --------
    >>> from shmring.methods.stepwise import Stepwise
    >>> x = np.full(4, comm.rank + 1.0)
    >>> with Stepwise(comm) as steps:
    ...     steps.all_reduce(x, algorithm="double_tree")
    >>> x
    array([3., 3., 3., 3.])
    """

    def __init__(self, comm: shmring.Comm, *, chunk_nbytes: int = 1 << 16) -> None:
        with refusing(comm, "all_gather"):
            self._chunk_nbytes = integer("chunk_nbytes", chunk_nbytes, "8")
        self._comm = comm.dup()
        self._spare = [np.empty(0, np.uint8), np.empty(0, np.uint8)]  # buffers of this step and of the next

    def all_reduce(self, x: _Array, op: shmring.Op | str = "sum", *, algorithm: str) -> None:
        """Combine x of all ranks elementwise and in place, with the same bits on all; return None.
        Collective.

        Parameters
        ----------
        x : numpy.ndarray
            Contiguous in C order and writable, of float32, float64, int32 or int64, of the same dtype and
            size on every rank.
        op : str or Op
            sum, avg (of floats), prod, min or max.
        algorithm : str
            One of ALGORITHMS. It sets the order of folding.

        Raises
        ------
        TypeError, ValueError
            For a wrong argument of this rank. The other ranks get `Aborted`. It ends this object's
            communicator, so that no further call is possible.
        Error
            As `Comm.recv`. Calls that differ are `Aborted` when a message of one reaches the other.
        """
        try:
            op = check_folded(x, op, _DTYPES)
            if algorithm not in _SCHEDULES:
                raise ValueError(f"algorithm is {algorithm!r}; there are {', '.join(ALGORITHMS)}")
        except (TypeError, ValueError) as error:
            self._comm.abort(f"rank {self._comm.rank} refused its arguments: {error}")
            raise
        flat = x.reshape(-1)
        call = zlib.crc32(f"{algorithm} {op} {x.dtype} {x.size} {self._chunk_nbytes}".encode()) >> 1
        chunk = max(1, self._chunk_nbytes // x.itemsize)
        steps = _SCHEDULES[algorithm](self._comm.rank, self._comm.size, flat, chunk)
        divisor = self._comm.size if op == "avg" else 1
        with np.errstate(all="ignore"):
            self._comm.run_steps(self._carry_out, steps, FOLDS[op], call, flat, divisor, begun=True)

    def close(self) -> None:
        """Close this object's communicator. Local."""
        self._comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _carry_out(
        self, steps: _Schedule, fold: Callable[..., Any], call: int, flat: _Array, divisor: int
    ) -> None:
        """Execute the steps, then divide.

        A step's receives are posted before the previous step's are awaited. So a result may arrive
        in a part that is being sent. That is safe: the result is computed from the part, hence the part has
        arrived by then.
        """
        sending: list[shmring.Transfer] = []
        arriving: list[_Arriving] = []
        sends: list[tuple[_Array, int]] = []
        for number, step in enumerate(itertools.chain(steps, [_Step([], [])])):
            following = self._begin(step.receives, number % 2)
            self._finish(arriving, fold, call)
            sending += [self._comm.isend(part, dest, call) for part, dest in sends]
            arriving, sends = following, step.sends
        for transfer in sending:
            transfer.wait()
        if divisor > 1:
            np.divide(flat, divisor, out=flat)

    def _begin(self, receives: list[_Receive], turn: int) -> list[_Arriving]:
        need = sum(each.part.nbytes for each in receives if each.folds)
        if need > len(self._spare[turn]):
            self._spare[turn] = np.empty(need, np.uint8)
        spare, begun = self._spare[turn], []
        for each in receives:
            into = each.part
            if each.folds:
                into, spare = spare[: into.nbytes].view(into.dtype), spare[into.nbytes :]
            begun.append((each, into, self._comm.irecv(into, each.source)))
        return begun

    def _finish(
        self,
        arriving: list[_Arriving],
        fold: Callable[..., Any],
        call: int,
    ) -> None:
        for (part, source, folds), came, transfer in arriving:
            try:
                status = transfer.wait()
            except (shmring.Mismatch, shmring.Truncated):
                status = None
            if status is None or status.tag != call or status.count != part.size:
                self._comm.abort(f"ranks {self._comm.rank} and {source} do not make the same call")
                self._comm.iprobe()  # raises it
            if folds:
                fold(part, came, out=part)
