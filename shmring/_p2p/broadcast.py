"""Broadcast: a queue of bytes, arrays and objects from one process to several, through shared memory."""

from __future__ import annotations

from typing import Any, SupportsIndex

from .._arguments import integer
from ..errors import Closed
from .ring_common import DEFAULT_NBYTES, RingBase
from .ring_ends import MOST_READERS


class Broadcast(RingBase):
    """A queue from one process to several others: every reader gets every item, in order.

    Create it and send it to the other processes. It travels as an argument of `multiprocessing.Process`,
    and in any pickle: in a `Queue`, a `Pipe`, a `Pool` or a `ProcessPoolExecutor`. The processes must be of
    one user, on one machine, and see each other in `/proc`. The process that made the ring has to live
    until its pickles have been loaded, and may close the ring earlier; any other process that sends the
    ring has to keep it open until then. The process that puts first is the writer; each process that gets
    is a reader. The writer waits for the slowest reader, or with `drop` for none. A reader that closes or
    dies is no longer waited for. The memory has no name. `with` closes the ring and notifies the other
    processes: if an exception leaves the block of the writer, readers get Aborted in place of Closed.

    Parameters
    ----------
    nbytes : int
        Size of the ring, rounded up to a power of two. Items may be larger, unless `drop`.
    readers : int, optional
        Number of readers that get every item from the first one on, however late they come. Once all of
        them have left, `put` raises Closed, or RankFailed if the last one died.
    most_readers : int, optional
        Number of readers that there may be at the same time; `readers` by default. A reader for which no
        place was kept gets the items that are put in after its first `get`. If this is more than `readers`,
        `put` never raises because there is no reader.
    drop : bool
        True: the writer never waits. Items that a slow reader has not taken are dropped, the oldest first;
        `lost` counts them.

    Raises
    ------
    ValueError
        For a size that is not positive, or more than 1 TiB; for a number of readers below 1 or above 1024.
    TypeError
        If neither `readers` nor `most_readers` is given, or a number is no integer.
    OutOfMemory
        If there is no memory for it.

    Examples
    --------
    >>> import multiprocessing
    >>> def consume(ring):
    ...     with ring:
    ...         assert ring.get().sum() == 3
    >>> fork = multiprocessing.get_context("fork")
    >>> with shmring.Broadcast(readers=2) as ring:
    ...     children = [fork.Process(target=consume, args=[ring]) for _ in range(2)]
    ...     for child in children:
    ...         child.start()
    ...     ring.put(np.arange(3))
    ...     for child in children:
    ...         child.join()
    """

    _other_items = "; put_object takes any object"

    def __init__(
        self,
        nbytes: SupportsIndex = DEFAULT_NBYTES,
        *,
        readers: SupportsIndex | None = None,
        most_readers: SupportsIndex | None = None,
        drop: bool = False,
    ) -> None:
        if readers is None and most_readers is None:
            raise TypeError("give the number of processes that get from the ring: readers= or most_readers=")
        reserved = 0 if readers is None else integer("readers", readers)
        places = reserved if most_readers is None else integer("most_readers", most_readers)
        if not 1 <= places <= MOST_READERS or (readers is not None and not 1 <= reserved <= places):
            raise ValueError(
                f"readers is {readers} and most_readers is {most_readers}; there must be 1 to {MOST_READERS} "
                "readers, and no more readers than most_readers"
            )
        self._make(nbytes, places=places, reserved=reserved, drops=drop)

    def __repr__(self) -> str:
        if self.closed_because:
            return "<shmring.Broadcast, closed>"
        return f"<shmring.Broadcast of {self.nbytes} bytes, readers: {self.readers}>"

    def put_object(self, obj: object, timeout: float | None = None, *, block: bool = True) -> None:
        """Pickle an object, and wait until all of it is in the ring. Its arrays are not copied before.

        Parameters
        ----------
        obj : object
            Anything that can be pickled.
        timeout : float, optional
            Seconds; None waits for ever.
        block : bool
            As in `put`.

        Raises
        ------
        Timeout, Closed, RankFailed, ValueError
            As `put`.
        """
        self._put_object(obj, timeout, block)

    def get_object(self, timeout: float | None = None, *, block: bool = True) -> Any:
        """Return the next item: an object unpickled, bytes and arrays as `get` returns them.

        Unpickling runs code that the pickle names, so only get from processes that you trust.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits for ever.
        block : bool
            As in `get`.

        Returns
        -------
        object
            The item. Arrays in it are writable.

        Raises
        ------
        Timeout, Closed, RankFailed, MemoryError
            As `get`. After a Ctrl-C or a MemoryError while the item is unpickled, it stays for the next call.
        """
        return self._get_object(timeout, block)

    @property
    def lost(self) -> int:
        """Number of items that this reader has lost, since the writer dropped them before they were got."""
        return self._nlost

    @property
    def readers(self) -> int:
        """Number of readers that have come and not left. Those that were killed may still count."""
        if self.closed_because is not None:
            raise Closed(self.closed_because)
        return len(self._pids_of_readers())
