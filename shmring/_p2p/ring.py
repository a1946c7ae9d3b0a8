"""Ring: a fast queue of bytes and arrays between two processes, used alone or beside a communicator."""

from __future__ import annotations

from typing import SupportsIndex

from .ring_common import DEFAULT_NBYTES, RingBase


class Ring(RingBase):
    """A queue of bytes and arrays from one process to another, through shared memory; nothing is pickled.

    Create it and send it to the other process. It travels as an argument of `multiprocessing.Process`, and
    in any pickle: in a `Queue`, a `Pipe`, a `Pool` or a `ProcessPoolExecutor`. The processes must be of one
    user, on one machine, and see each other in `/proc`. The process that made the ring has to live until
    its pickles have been loaded, and may close the ring earlier; any other process that sends the ring has
    to keep it open until then. One process puts and the other gets: each side belongs to the process that
    uses it first. The memory has no name. `with` closes the ring and notifies the other side: if an
    exception leaves the block of the process that puts, the other one gets Aborted in place of Closed.

    Parameters
    ----------
    nbytes : int
        Size of the ring, rounded up to a power of two. Items may be larger.

    Raises
    ------
    TypeError
        For a size that is no integer.
    ValueError
        For a size that is not positive, or more than 1 TiB.
    OutOfMemory
        If there is no memory for it.

    Examples
    --------
    >>> import multiprocessing
    >>> def produce(ring):
    ...     with ring:
    ...         ring.put(np.arange(3))
    >>> with shmring.Ring() as ring:
    ...     child = multiprocessing.get_context("fork").Process(target=produce, args=[ring])
    ...     child.start()
    ...     ring.get()
    ...     child.join()
    array([0, 1, 2])
    """

    def __init__(self, nbytes: SupportsIndex = DEFAULT_NBYTES) -> None:
        self._make(nbytes, places=1, reserved=1, single_use=True)

    def __repr__(self) -> str:
        return "<shmring.Ring, closed>" if self.closed_because else f"<shmring.Ring of {self.nbytes} bytes>"
