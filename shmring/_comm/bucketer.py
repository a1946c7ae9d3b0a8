"""Gradients that arrive one by one, last layers first, reduced bucket by bucket.

A user of the public API: what it is handed is a communicator.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..methods.compression import Compressor, Reduction
    from .comm import Comm
    from .work import Work


class Bucketer:
    """Collects arrays and reduces them in place, together and in the background, whenever a bucket is full.

    Every rank adds the same arrays, alike in dtype and number of elements, in the same order; which order is
    free, and so are the moments. nbytes: a bucket is full with the array that brings it to so many bytes, so
    ranks fill the same buckets whatever their clocks say. delay_s: about how long an array may wait in a
    bucket. A clock alone would let ranks disagree: rank 0 measures how fast bytes arrive there and, with each
    bucket, tells all how many of them make up a delay_s, which holds from the next one on; never more than
    nbytes. op: as in `all_reduce`. compressor: one of shmring.methods.compression.

    Leave an array alone from when it is added until `wait` has returned: then every array that was added is
    reduced and forgotten. Errors are those of `Comm.all_reduce_many`.
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
        if nbytes <= 0:
            raise ValueError(f"nbytes is {nbytes}; a bucket takes 1 byte or more")
        if delay_s is not None and not delay_s > 0:
            raise ValueError(f"delay_s is {delay_s}; it must be more than 0 seconds, or None")
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
        self._works: list[Work[None] | Reduction] = []  # under way
        self._agreed: tuple[Work[None], np.ndarray[Any, Any]] | None = None  # on the size of buckets to come
        self._bucket: list[Any] = []
        self._filled_nbytes = 0
        self._idle_since_s: float | None = None  # None: the pace of what comes next says nothing
        self._waited_s, self._arrived_nbytes = 0.0, 0

    def add(self, array: Any) -> None:
        """Put an array into the bucket, which begins to be reduced when it is full."""
        nbytes = _nbytes_of(array)
        if self._idle_since_s is not None:
            self._waited_s += time.monotonic() - self._idle_since_s
            self._arrived_nbytes += nbytes
        self._bucket.append(array)
        self._filled_nbytes += nbytes
        if self._filled_nbytes >= self._full_nbytes:
            self._comm.run_steps(self._empty, begun=True)
        self._idle_since_s = time.monotonic()

    def flush(self) -> None:
        """Collective: begin to reduce what is in the bucket, full or not."""
        if self._bucket:
            self._comm.run_steps(self._empty, begun=True)
        self._idle_since_s = None

    def wait(self) -> None:
        """Collective: every array that was added is reduced when it returns."""
        self.flush()
        while self._works:  # which stay until they are finished: after Ctrl-C it can be called again
            self._works[0].wait()
            del self._works[0]

    def _empty(self) -> None:
        """An exception in the middle of it ends the communicator: the other ranks reduce this bucket."""
        bucket, self._bucket = self._bucket, []
        self._filled_nbytes = 0
        self._works.append(self._reduce(bucket, self._op, async_op=True))
        if self._delay_s is not None:
            self._agree(self._delay_s)

    def _agree(self, delay_s: float) -> None:
        """What was asked a bucket ago holds from now on, on every rank; ask again."""
        if self._agreed is not None:
            asked, full_nbytes = self._agreed
            asked.wait()
            self._full_nbytes = int(full_nbytes)
        full_nbytes = np.array(self._arriving_within(delay_s))
        self._agreed = self._comm.broadcast(full_nbytes, async_op=True), full_nbytes
        self._works.append(self._agreed[0])

    def _arriving_within(self, delay_s: float) -> int:
        """Bytes, by the pace since the last bucket; what the ranks do while they reduce does not count."""
        waited_s, nbytes = self._waited_s, self._arrived_nbytes
        self._waited_s, self._arrived_nbytes = 0.0, 0
        if nbytes == 0:
            return self._full_nbytes
        return max(1, min(self._most_nbytes, int(nbytes * delay_s / max(waited_s, 1e-9))))


def _nbytes_of(array: Any) -> int:
    nbytes = getattr(array, "nbytes", None)
    return memoryview(array).nbytes if nbytes is None else int(nbytes)
