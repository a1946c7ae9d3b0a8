"""Bucketer: reduce gradients, which arrive one by one from the last layer to the first, in buckets.

It uses only the public API of a communicator.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arguments import seconds
from .ops import Op

if TYPE_CHECKING:
    from ..methods.compression import Compressor, Reduction
    from .comm import Comm
    from .work import Work


class Bucketer:
    """Collect arrays, and reduce those of a full bucket together, in place and in the background.

    Every rank must add arrays of the same dtypes and lengths in the same order, at any time. Do not touch an
    array after it is added until `wait` has returned. Every added array is then reduced and released.

    Parameters
    ----------
    comm : Comm
        The communicator.
    nbytes : int
        A bucket is full when an array brings it to this size, so all ranks fill the same buckets.
    delay_s : float, optional
        Approximate seconds that an array may wait in a bucket. Ranks with a clock each would disagree, so
        rank 0 measures the rate at which bytes arrive there. With each bucket it broadcasts the number of
        bytes that arrive in delay_s, at most nbytes, which is the size of buckets from the next one on.
    op : str
        As in `Comm.all_reduce`.
    compressor : Compressor, optional
        One of shmring.methods.compression.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument.

    Examples
    --------
    >>> gradients = [np.ones(3), np.full(2, comm.rank)]
    >>> bucketer = shmring.Bucketer(comm, op="sum")
    >>> for gradient in gradients:
    ...     bucketer.add(gradient)
    >>> bucketer.wait()
    >>> gradients[0]
    array([2., 2., 2.])
    """

    def __init__(
        self,
        comm: Comm,
        *,
        nbytes: int = 1 << 20,
        delay_s: float | None = None,
        op: str = "avg",
        compressor: Compressor | None = None,
    ) -> None:
        if not nbytes > 0:
            raise ValueError(f"nbytes is {nbytes}; a bucket takes 1 byte or more")
        if delay_s is not None and not seconds("delay_s", delay_s) > 0:
            raise ValueError(f"delay_s is {delay_s}; it must be more than 0 seconds, or None")
        if op not in tuple(Op):
            raise ValueError(f"op is {op!r}; allowed: {', '.join(Op)}")
        if isinstance(compressor, type) or not (compressor is None or hasattr(compressor, "all_reduce_many")):
            raise TypeError(f"compressor is {compressor!r}; give one that is made, as in compressor=FP16()")
        self._comm = comm
        self._op: Any = op
        self._reduce: Callable[..., Any] = comm.all_reduce_many
        if compressor is not None:
            self._reduce = functools.partial(compressor.all_reduce_many, comm)
        self._most_nbytes = nbytes
        self._delay_s = delay_s
        self._full_nbytes = nbytes  # the same on every rank
        self._works: list[Work[None] | Reduction] = []  # calls under way
        self._agreed: tuple[Work[None], np.ndarray[Any, Any]] | None = None  # size of later buckets
        self._bucket: list[Any] = []
        self._filled_nbytes = 0
        self._idle_since_s: float | None = None  # None: the rate of the next arrays must not be measured
        self._waited_s, self._arrived_nbytes = 0.0, 0

    def add(self, array: Any) -> None:
        """Add an array to the bucket. Begin to reduce the bucket if it is full.

        An exception in the middle, such as that of a signal handler, ends the communicator.

        Parameters
        ----------
        array : array
            As in `Comm.all_reduce_many`. Do not touch it until `wait` has returned.

        Raises
        ------
        TypeError, ValueError, Error
            As `Comm.all_reduce_many`, when it begins to reduce the bucket, for any array in it. None of the
            bucket's arrays is then reduced.
        """
        self._comm.run_steps(self._add, array, _nbytes_of(array), begun=True)

    def flush(self) -> None:
        """Collective: begin to reduce the arrays in the bucket, full or not.

        Raises
        ------
        TypeError, ValueError, Error
            As `Comm.all_reduce_many`.
        """
        if self._bucket:
            self._comm.run_steps(self._reduce_bucket, begun=True)
        self._idle_since_s = None

    def wait(self) -> None:
        """Collective: return when every array that was added is reduced.

        Raises
        ------
        TypeError, ValueError, Error
            As `Comm.all_reduce_many`.
        """
        self.flush()
        while self._works:  # each stays until it is finished, so `wait` can be called again after Ctrl-C
            self._works[0].wait()
            del self._works[0]

    def _add(self, array: Any, nbytes: int) -> None:
        """Execute `add`. An exception must end the communicator: the bucket may have an array not counted."""
        if self._idle_since_s is not None:
            self._waited_s += time.monotonic() - self._idle_since_s
            self._arrived_nbytes += nbytes
        self._bucket.append(array)
        self._filled_nbytes += nbytes
        if self._filled_nbytes >= self._full_nbytes:
            self._reduce_bucket()
        self._idle_since_s = time.monotonic()

    def _reduce_bucket(self) -> None:
        """Begin to reduce the bucket. An exception must end the communicator: other ranks reduce it."""
        bucket, self._bucket = self._bucket, []
        self._filled_nbytes = 0
        self._works.append(self._reduce(bucket, self._op, async_op=True))
        if self._delay_s is not None:
            self._agree(self._delay_s)

    def _agree(self, delay_s: float) -> None:
        """Apply the size agreed one bucket ago, the same on every rank, and start the next agreement."""
        if self._agreed is not None:
            asked, full_nbytes = self._agreed
            asked.wait()
            self._full_nbytes = int(full_nbytes)
        full_nbytes = np.array(self._arriving_within(delay_s))
        self._agreed = self._comm.broadcast(full_nbytes, async_op=True), full_nbytes
        self._works.append(self._agreed[0])

    def _arriving_within(self, delay_s: float) -> int:
        """Return a bucket size in bytes from the rate since the last bucket. Reducing time is not counted."""
        waited_s, nbytes = self._waited_s, self._arrived_nbytes
        self._waited_s, self._arrived_nbytes = 0.0, 0
        if nbytes == 0:
            return self._full_nbytes
        return max(1, min(self._most_nbytes, int(nbytes * delay_s / max(waited_s, 1e-9))))


def _nbytes_of(array: Any) -> int:
    nbytes = getattr(array, "nbytes", None)
    return memoryview(array).nbytes if nbytes is None else int(nbytes)
