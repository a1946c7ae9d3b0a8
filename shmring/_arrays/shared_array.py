"""SharedArray: one array that all ranks see, an np.ndarray with a fence, locks and one-sided access.

`over` constructs it from a communicator, its engine, and memory.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from .._arguments import integer
from ..errors import Mismatch
from . import locks, onesided
from .locks import LOCK_NBYTES, Lock, Locks, Stripes

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
    """An array in one memory that all ranks of a communicator share; made by `Comm.shared`.

    Index, slice and compute with it as with any array. Results that are not stored in it are private. The
    ranks order their accesses by `fence` or `lock`. The array outlives the communicator; after the
    communicator's end, only plain access to the array remains. After an end by an error each rank has a copy
    of its own, with the values of that moment.

    `put`, `get`, `accumulate` and `fetch_and_add` are one-sided, as in MPI-3: any rank may call them at any
    time, and no other rank takes part. They are atomic towards each other, but not towards plain indexing.
    Each element is atomic. A slice is atomic within a range of 32 KiB, counted from the array's start; a
    longer slice is processed range by range. A `get` sees the writes of every call that returned before the
    `get` began. Calls of different ranks are ordered only by `fence`, `lock` or messages. The array may have
    any dtype that can be reduced, and may be a view whose elements are contiguous, such as `array[2:4]`.

    Parameters of several methods
    -----------------------------
    where, indices : int, slice, array of int, or ...
        The elements, numbered in C order, as in `np.put`: one, a slice, integers of any shape (one by one,
        each as often as it occurs), or all. For an array of two or more dimensions, only `put` takes a tuple,
        as `np.put` does: it looks like an index of axes, for which `np.ravel_multi_index` gives the number.
    timeout : float, optional
        Seconds to wait for a rank that accesses the same range. None: the communicator's timeout.

    Errors of one-sided methods
    ---------------------------
    IndexError, TypeError, ValueError
        As NumPy; ValueError also for a private copy or a read-only array. TypeError also for masked arrays,
        except in `put`, which ignores their masks as `np.put` does.
    Timeout
        The elements processed before it stay changed, as they do after an interruption.
    RankFailed
        If a rank died while it accessed a range.
    Error
        If the communicator has ended: `Closed`, or the error that ended it.

    Examples
    --------
    >>> tickets = comm.shared(1, "int64")
    >>> mine = [int(tickets.fetch_and_add(0, 1)) for _ in range(3)]
    >>> sorted(sum(comm.all_gather_object(mine), []))
    [0, 1, 2, 3, 4, 5]
    """

    _home: _Home | None

    @property
    def one_for_all_ranks(self) -> bool:
        """True if all ranks of the host share its memory; False for a copy.

        It stays True when an error has made the memory private to each rank.
        """
        return self._home is not None

    def __array_finalize__(self, obj: Any) -> None:
        # As in numpy.memmap: views share the memory, copies do not. A view of no elements has no memory; it
        # keeps the fence and the locks, which a rank with an empty part needs as the others do.
        home = getattr(obj, "_home", None)
        if home is not None and not np.may_share_memory(self, obj):
            home = home if self.size == 0 and self.base is not None else None
        self._home = home

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self:
            return array
        return array[()] if array.ndim == 0 else np.asarray(array)  # numbers, not 0-d arrays

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)

    def fence(self, *, timeout: float | None = None) -> None:
        """Collective: a barrier. After it, every rank sees what any rank wrote before it.

        Parameters
        ----------
        timeout : float, optional
            Seconds, as in `Comm.barrier`.

        Raises
        ------
        Error
            As `Comm.barrier`.

        Examples
        --------
        >>> table = comm.shared(2, "int64")
        >>> table[comm.rank] = 5
        >>> table.fence()
        >>> table.tolist()
        [5, 5]
        """
        self._at_home().comm.barrier(timeout=timeout)

    def lock(self, number: SupportsIndex, *, timeout: float | None = None) -> Lock:
        """Return a context manager. Inside it, no other rank or thread holds this lock of the array.

        The ranks agree among themselves what the lock protects. A thread cannot take a lock that it already
        holds. A forked child does not hold it.

        Parameters
        ----------
        number : int
            0 to `locks` - 1, as given to `Comm.shared`.
        timeout : float, optional
            Seconds to wait for the lock.

        Returns
        -------
        Lock
            Taken by `with`, and released at the end of the block.

        Raises
        ------
        IndexError, TypeError, ValueError
            For a number that is no lock, and for a wrong timeout. The block of `with` raises `Timeout`, after
            which the communicator is still usable, and `RankFailed` if the owner is gone; the communicator is
            then aborted. If the communicator has ended, the block raises its error.

        Examples
        --------
        >>> total = comm.shared(1, locks=1)
        >>> with total.lock(0):
        ...     total[0] += 1
        >>> total.fence()
        >>> float(total[0])
        2.0
        """
        return self._at_home().locks.lock(number, timeout)

    def put(self, indices: Any, values: Any, mode: str = "raise", *, timeout: float | None = None) -> None:
        """Write values to elements as `np.put` does: cast to the array's dtype, repeated as necessary.

        On a private copy this is `np.ndarray.put` itself.

        Parameters
        ----------
        indices
            The elements; see `SharedArray`.
        values : array or number
            The new values.
        mode : str
            For indices out of bounds: "raise", "wrap" or "clip", as in `np.put`. A slice is never out of
            bounds.
        timeout : float, optional
            Seconds; see `SharedArray`.

        Raises
        ------
        IndexError, TypeError, ValueError, Timeout, RankFailed
            See `SharedArray`.

        Examples
        --------
        >>> table = comm.shared(4, "int64")
        >>> table.put([2 * comm.rank, 2 * comm.rank + 1], 7)
        >>> table.fence()
        >>> table.tolist()
        [7, 7, 7, 7]
        """
        if self._home is None:
            super().put(indices, values, mode)  # type: ignore[arg-type]
        else:
            onesided.put(self._home.stripes, self, indices, values, mode, timeout)

    def get(
        self, where: Any = ..., *, out: np.ndarray[Any, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """Return a private copy of elements, in the shape of `where` (of the array for `...`).

        Parameters
        ----------
        where
            The elements; see `SharedArray`.
        out : numpy.ndarray, optional
            An array of the same dtype and number of elements, in C order. It is filled and returned.
        timeout : float, optional
            Seconds; see `SharedArray`.

        Returns
        -------
        numpy.ndarray or number
            A number for a single element.

        Raises
        ------
        IndexError, TypeError, ValueError, Timeout, RankFailed
            See `SharedArray`.

        Examples
        --------
        >>> table = comm.shared((2, 2), "int64")
        >>> table.get([0, 3])
        array([0, 0])
        """
        return onesided.get(self._at_home().stripes, self, where, out, timeout)

    def accumulate(self, where: Any, values: Any, op: str = "sum", *, timeout: float | None = None) -> None:
        """Set elements to `elements op values`. An element named twice is combined twice.

        Parameters
        ----------
        where
            The elements; see `SharedArray`.
        values : array or number
            One for each element, in C order, or a single one. They are cast to the array's dtype, which must
            be of the same kind or a higher one.
        op : str or Op
            As in `Comm.all_reduce`, except "avg".
        timeout : float, optional
            Seconds; see `SharedArray`.

        Raises
        ------
        IndexError, TypeError, ValueError, Timeout, RankFailed
            See `SharedArray`.

        Examples
        --------
        >>> table = comm.shared(3, "int64")
        >>> table.accumulate([0, 2, 2], 1)
        >>> table.fence()
        >>> table.tolist()
        [2, 0, 4]
        """
        onesided.accumulate(self._at_home().stripes, self, where, values, op, timeout)

    def fetch_and_add(self, where: Any, value: Any, *, timeout: float | None = None) -> Any:
        """Add value to elements as `accumulate` does, and return the previous elements as `get` does.

        Parameters
        ----------
        where
            The elements; see `SharedArray`.
        value : array or number
            As in `accumulate`.
        timeout : float, optional
            Seconds; see `SharedArray`.

        Returns
        -------
        numpy.ndarray or number
            As `get`.

        Raises
        ------
        IndexError, TypeError, ValueError, Timeout, RankFailed
            See `SharedArray`.

        Examples
        --------
        >>> tickets = comm.shared(1, "int64")
        >>> int(tickets.fetch_and_add(0, 1)) in (0, 1)
        True
        """
        return onesided.fetch_and_add(self._at_home().stripes, self, where, value, timeout)

    def _at_home(self) -> _Home:
        if self._home is None:
            raise ValueError("this is a private copy; use what comm.shared returned, or a view of it")
        return self._home


def check_locks(locks: SupportsIndex) -> int:
    """Return the number of locks, checked."""
    count = integer("locks", locks)
    if not 0 <= count <= _MOST_LOCKS:
        raise ValueError(f"locks is {count}; allowed: 0 to {_MOST_LOCKS}")
    return count


def room_nbytes(nbytes: int, nlocks: int) -> int:
    """Return the bytes of an array of `nbytes` with its locks and stripes, on lines of their own after it."""
    return _locks_begin(nbytes) + (nlocks + locks.count_for(nbytes)) * LOCK_NBYTES


def check_same(comm: Comm, wanted: tuple[tuple[int, ...], np.dtype[Any], int], timeout_s: float) -> None:
    """Collective: raise Mismatch unless all ranks want the same shape, dtype and number of locks."""
    shape, dtype, nlocks = wanted
    call = f"shared({shape}, {dtype}, locks={nlocks})"
    digest = np.frombuffer(hashlib.blake2b(call.encode(), digest_size=16).digest(), np.uint8)
    digests = comm.all_gather(digest, timeout=timeout_s)
    other = next((rank for rank in range(comm.size) if (digests[rank] != digests[0]).any()), None)
    if other is not None:
        calls = tuple(comm.all_gather_object(call, timeout=timeout_s))
        shown = f"rank 0 called {calls[0]}; rank {other} called {calls[other]}"
        text = f"the ranks' shared arrays do not match: {shown}; every rank must give the same arguments"
        raise Mismatch(text, rank=other, op="shared", calls=calls)


def over(
    room: NDArray[np.uint8],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    nlocks: int,
    comm: Comm,
    engine: Engine,
) -> SharedArray:
    """Return the array in `room`, memory that all ranks map."""
    array = SharedArray(shape, dtype, buffer=room)
    if not array.flags.writeable:  # NumPy takes a buffer that it cannot describe for read-only
        raise MemoryError("no memory to describe a shared array")
    begin, nstripes = room.ctypes.data, locks.count_for(array.nbytes)
    locks_begin = begin + _locks_begin(array.nbytes)
    stripes_begin = locks_begin + nlocks * LOCK_NBYTES
    stripes = Stripes(engine, room, begin, stripes_begin, nstripes)
    array._home = _Home(comm, Locks(engine, room, locks_begin, nlocks), stripes)
    return array


def _locks_begin(nbytes: int) -> int:
    return -(-nbytes // LOCK_NBYTES) * LOCK_NBYTES
