"""Gradients that arrive one by one, last layers first, reduced bucket by bucket.

A user of the public API: what it is handed is a communicator. May know: the standard library.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .comm import Comm


class Bucketer:
    """Collects arrays and reduces them in place, together, whenever a bucket is full.

    Every rank adds the same arrays, alike in dtype and number of elements, in the same order; which order is
    free, and so are the moments. nbytes: a bucket is full with the array that brings it to so many bytes, so
    ranks fill the same buckets whatever their clocks say. delay_s: about how long an array may wait in a
    bucket. A clock alone would let ranks disagree: rank 0 measures how fast bytes arrive there and, whenever
    a bucket is reduced, tells all how many of them make up the next delay_s; never more than nbytes. op: as
    in `all_reduce`.

    After `flush` or `wait` every array that was added is reduced and forgotten. Errors are those of
    `Comm.all_reduce_many`; what was in the bucket then is neither reduced nor forgotten.
    """

    def __init__(
        self, comm: Comm, *, nbytes: int = 1 << 20, delay_s: float | None = None, op: str = "avg"
    ) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes is {nbytes}; a bucket takes 1 byte or more")
        if delay_s is not None and not delay_s > 0:
            raise ValueError(f"delay_s is {delay_s}; it must be more than 0 seconds, or None")
        self._comm = comm
        self._op = op
        self._most_nbytes = nbytes
        self._delay_s = delay_s
        self._full_nbytes = nbytes  # the same on every rank
        self._bucket: list[Any] = []
        self._filled_nbytes = 0
        self._idle_since_s: float | None = None  # None: the pace of what comes next says nothing
        self._waited_s, self._arrived_nbytes = 0.0, 0

    def add(self, array: Any) -> None:
        """Put an array into the bucket; it may be reduced now, or later: until then leave it alone."""
        nbytes = _nbytes_of(array)
        if self._idle_since_s is not None:
            self._waited_s += time.monotonic() - self._idle_since_s
            self._arrived_nbytes += nbytes
        self._bucket.append(array)
        self._filled_nbytes += nbytes
        if self._filled_nbytes >= self._full_nbytes:
            self._empty()
        self._idle_since_s = time.monotonic()

    def flush(self) -> None:
        """Collective: reduce what is in the bucket, full or not."""
        if self._bucket:
            self._empty()
        self._idle_since_s = None

    def wait(self) -> None:
        """Collective: every array that was added is reduced when it returns."""
        self.flush()

    def _empty(self) -> None:
        self._reduce(self._bucket)
        self._bucket = []
        self._filled_nbytes = 0
        if self._delay_s is not None:
            full_nbytes = np.array(self._arriving_within(self._delay_s))
            self._comm.broadcast(full_nbytes)
            self._full_nbytes = int(full_nbytes)

    def _reduce(self, arrays: list[Any]) -> None:
        """The one place where a bucket is reduced."""
        self._comm.all_reduce_many(arrays, self._op)

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
