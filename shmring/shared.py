"""One array that all ranks see: the array, in NumPy's clothes, with its fence and its locks.

May know: _locks, errors; it is handed a communicator, its engine, and memory.
"""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from ._locks import LOCK_NBYTES, Lock, Locks
from .errors import Mismatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._engine import Engine
    from .comm import Comm

_MOST_LOCKS = 1 << 20


class _Home(NamedTuple):
    comm: Comm
    locks: Locks


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """An array in memory that is the same for all ranks of a communicator; made by `Comm.shared`.

    Indexed, sliced and computed with as any array; what is computed from it, and not stored in it, is
    private. The ranks order what they do with it by `fence` or `lock`. It outlives the communicator, whose
    end takes the fence and the locks away.
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
    """Bytes of an array of `nbytes` and, on lines of their own behind it, its locks."""
    return _locks_begin(nbytes) + nlocks * LOCK_NBYTES


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
    array._home = _Home(comm, Locks(engine, room, room.ctypes.data + _locks_begin(array.nbytes), nlocks))
    return array


def _locks_begin(nbytes: int) -> int:
    return -(-nbytes // LOCK_NBYTES) * LOCK_NBYTES
