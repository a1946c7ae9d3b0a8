"""One array that all ranks see: the array, in NumPy's clothes, with its fence, locks and one-sided access.

It is handed a communicator, its engine, and memory.
"""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from ..errors import Mismatch
from . import onesided, striped_locks
from .locks import LOCK_NBYTES, Lock, Locks
from .striped_locks import Stripes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._comm.comm import Comm
    from .._engine.engine import Engine

_MOST_LOCKS = 1 << 20


class _Home(NamedTuple):
    comm: Comm
    locks: Locks
    stripes: Stripes


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """An array in memory that is the same for all ranks of a communicator; made by `Comm.shared`.

    Indexed, sliced and computed with as any array; what is computed from it, and not stored in it, is
    private. The ranks order what they do with it by `fence` or `lock`. It outlives the communicator, whose
    end takes all but the array itself away.

    `put`, `get`, `accumulate` and `fetch_and_add` are one-sided, as MPI-3's are: any rank calls them at any
    time, and no other takes part. They are atomic towards each other, not towards plain indexing: each
    element always, and of a slice what lies in one block of 32 KiB, counted from where the array begins; a
    longer one goes block by block. What a call has written is there for every `get` that begins after it;
    calls of different ranks are in an order only by `fence`, `lock` or messages. Elements are numbered in C
    order, as `np.put` does it, by an integer, a slice, integers of any shape (one by one, each as often as
    it is named), or `...` for all. They take every dtype that can be reduced, and views whose elements
    follow each other, such as `array[2:4]`. timeout: seconds of a wait for whoever is in a block; Timeout,
    and what interrupts it, leave done what is done. RankFailed: somebody died inside one. ValueError: a
    private copy, or it is read-only.
    """

    _home: _Home | None

    @property
    def one_for_all_ranks(self) -> bool:
        """Whether its memory is the same for all ranks: not that of a copy."""
        return self._home is not None

    def __array_finalize__(self, obj: Any) -> None:
        # As numpy.memmap does it: views share, copies do not.
        home = getattr(obj, "_home", None)
        self._home = home if home is not None and np.may_share_memory(self, obj) else None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self:
            return array
        return array[()] if array.ndim == 0 else np.asarray(array)  # as of any array: numbers, not 0-d arrays

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)

    def fence(self, *, timeout: float | None = None) -> None:
        """Collective: a barrier, after which every rank sees what any has written before it."""
        self._at_home().comm.barrier(timeout=timeout)

    def lock(self, number: SupportsIndex, *, timeout: float | None = None) -> Lock:
        """A context manager inside which no other rank, nor thread, has this lock of the array.

        What it guards is for the ranks to agree on. timeout: seconds; Timeout harms nothing. RankFailed: its
        owner is gone, and so is the communicator. A thread takes it once; a forked child does not have it.
        """
        return self._at_home().locks.lock(number, timeout)

    def put(self, indices: Any, values: Any, mode: str = "raise", *, timeout: float | None = None) -> None:
        """Elements become values, as with `np.put`: cast to the array's dtype, repeated as necessary.

        Of a private copy it is `np.ndarray.put` itself.
        """
        if self._home is None:
            super().put(indices, values, mode)  # type: ignore[arg-type]
        else:
            onesided.put(self._home.stripes, self, indices, values, mode, timeout)

    def get(
        self, where: Any = ..., *, out: np.ndarray[Any, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """A private copy of elements: of `...` in the array's shape, else in that of where; a number of one.

        out: of the same dtype, with as many elements, in C order; it is returned then.
        """
        return onesided.get(self._at_home().stripes, self, where, out, timeout)

    def accumulate(self, where: Any, values: Any, op: str = "sum", *, timeout: float | None = None) -> None:
        """Elements become `elements op values`; one named twice is combined twice, as by `np.add.at`.

        values: as many as there are elements, in C order, or one for all; cast to the array's dtype where
        that is of the same kind or a higher one. op: as in `all_reduce`, but for "avg".
        """
        onesided.accumulate(self._at_home().stripes, self, where, values, op, timeout)

    def fetch_and_add(self, where: Any, value: Any, *, timeout: float | None = None) -> Any:
        """`accumulate` of a sum that returns what was there before, in the shape that `get` has."""
        return onesided.fetch_and_add(self._at_home().stripes, self, where, value, timeout)

    def _at_home(self) -> _Home:
        if self._home is None:
            raise ValueError("this is a private copy; use what comm.shared returned, or a view of it")
        return self._home


def check_locks(locks: SupportsIndex) -> int:
    """How many locks, checked."""
    try:
        count = operator.index(locks)
    except TypeError:
        raise TypeError(f"locks is {locks!r}; it must be an integer") from None
    if not 0 <= count <= _MOST_LOCKS:
        raise ValueError(f"locks is {count}; allowed: 0 to {_MOST_LOCKS}")
    return count


def room_nbytes(nbytes: int, nlocks: int) -> int:
    """Bytes of an array of `nbytes` and, on lines of their own behind it, its locks and its stripes."""
    return _locks_begin(nbytes) + (nlocks + striped_locks.count_for(nbytes)) * LOCK_NBYTES


def check_same(comm: Comm, wanted: tuple[tuple[int, ...], np.dtype[Any], int], timeout_s: float) -> None:
    """Collective: every rank has to want the same; as many bytes may be another shape."""
    shape, dtype, nlocks = wanted
    call = f"shared({shape}, {dtype}, locks={nlocks})"
    digest = np.frombuffer(hashlib.blake2b(call.encode(), digest_size=16).digest(), np.uint8)
    digests = comm.all_gather(digest, timeout=timeout_s)
    other = next((rank for rank in range(comm.size) if (digests[rank] != digests[0]).any()), None)
    if other is not None:
        calls = tuple(comm.all_gather_object(call, timeout=timeout_s))
        told = f"rank 0 called {calls[0]}; rank {other} called {calls[other]}"
        text = f"the ranks' shared arrays do not match: {told}; every rank has to give the same"
        raise Mismatch(text, rank=other, op="shared", calls=calls)


def over(
    room: NDArray[np.uint8],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    nlocks: int,
    comm: Comm,
    engine: Engine,
) -> SharedArray:
    """The array over memory that all ranks map."""
    array = SharedArray(shape, dtype, buffer=room)
    begin, nstripes = room.ctypes.data, striped_locks.count_for(array.nbytes)
    locks_begin = begin + _locks_begin(array.nbytes)
    stripes_begin = locks_begin + nlocks * LOCK_NBYTES
    stripes = Stripes(engine, room, begin, stripes_begin, nstripes)
    array._home = _Home(comm, Locks(engine, room, locks_begin, nlocks), stripes)
    return array


def _locks_begin(nbytes: int) -> int:
    return -(-nbytes // LOCK_NBYTES) * LOCK_NBYTES
