"""Ring: a fast queue of bytes and arrays between two processes, used alone or beside a communicator.

This module allocates the memory, pickles the ring, converts dtypes to text, and detects the death of the
other process.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import os
import sys
import weakref
from types import TracebackType
from typing import Any, Self

import numpy as np

from .._config.settings import Settings
from .._system import procfs, segments
from .._system.limits import usable_cpus
from ..errors import RankFailed
from .ring_ends import HEAD_NBYTES, LEAST_NBYTES, Ends

# Measured with bench/engine/bench_ring.py: a smaller ring needs more switches between processes on shared
# CPUs, and its lines are rewritten while the other side's L2 cache (2 MiB) still holds them; with a larger
# ring long items no longer stay in the cache.
DEFAULT_NBYTES = 4 << 20
PAUSES = 500  # if each of the two processes has a CPU

_SIDES = ("puts into", "gets from")
_GONE = ("gone", "dead")
_EXTENSION_TYPES = "ml_dtypes"
_open: weakref.WeakSet[Ring] = weakref.WeakSet()


class Ring(Ends):
    """A queue of bytes and arrays from one process to another, through shared memory; nothing is pickled.

    Create it and pass it to a child as an argument of `multiprocessing.Process` (any start method). One
    process puts and the other gets: each side belongs to the process that uses it first. The memory has no
    name. `with` closes the ring and notifies the other side.

    Parameters
    ----------
    nbytes : int
        Size of the ring, rounded up to a power of two. Items may be larger.

    Raises
    ------
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

    def __init__(self, nbytes: int = DEFAULT_NBYTES) -> None:
        if not 0 < nbytes <= 1 << 40:
            raise ValueError(f"nbytes is {nbytes}; it must be more than 0, and at most 1 TiB")
        nbytes = max(LEAST_NBYTES, 1 << (nbytes - 1).bit_length())
        fd = segments.create(HEAD_NBYTES + nbytes, kind=Settings.from_environment().segment)
        try:
            segments.allocate(fd, 0, HEAD_NBYTES + nbytes, purpose="a ring")
            mapping = segments.Mapping(fd, HEAD_NBYTES + nbytes)
            mapping.populate()
            self._format(mapping.address, nbytes, *_myself())
        except BaseException:
            os.close(fd)
            raise
        self._begin(fd, mapping)

    @classmethod
    def _attach(cls, wrapped: Any) -> Ring:
        """Return the ring of another process, from the descriptor in the pickle."""
        ring: Ring = cls.__new__(cls)
        fd = wrapped.detach()
        try:
            mapping = segments.Mapping(fd, os.fstat(fd).st_size)
            ring._begin(fd, mapping)
        except BaseException:
            os.close(fd)
            raise
        return ring

    def _begin(self, fd: int, mapping: segments.Mapping) -> None:
        super().__init__(mapping, PAUSES if usable_cpus(len(os.sched_getaffinity(0))) > 1 else 0)
        self._fd = fd
        self._given_away = False
        _open.add(self)

    def close(self) -> None:
        """Close this side. The other gets the remaining items, then Closed. Another call does nothing.

        Raises
        ------
        RuntimeError
            While another thread is inside a call of this ring.
        """
        if self._close("this ring is closed here"):
            os.close(self._fd)
            _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # close() raises if another thread is in a call, or if the ring was never opened.
        with contextlib.suppress(Exception):
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import context, reduction

        if context.get_spawning_popen() is None:
            raise RuntimeError(
                "a ring travels only while a process is started, as an argument of multiprocessing.Process"
            )
        if self.closed_because is not None:
            raise ValueError("this ring is closed; make another one")
        self._given_away = True
        return Ring._attach, (reduction.DupFd(self._fd),)

    def __repr__(self) -> str:
        return "<shmring.Ring, closed>" if self.closed_because else f"<shmring.Ring of {self.nbytes} bytes>"

    # -- methods that Ends calls --

    def _come(self) -> tuple[int, int]:
        """Register this process as the user of a side: it will close the ring when it ends."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # children of multiprocessing do not run atexit handlers
            util.Finalize(self, _close_quietly, args=(weakref.ref(self),), exitpriority=0)
        return _myself()

    def _poll_peer(self, side: int) -> None:
        """Raise RankFailed if the process at the other side is gone, or can never come."""
        liveness = self._liveness_of(side)
        if liveness is not None:
            if procfs.state(*liveness) in _GONE:
                cause = f"process {liveness[0]} died without closing the ring"
                raise RankFailed(f"the process that {_SIDES[side]} this ring is gone: {cause}", cause=cause)
        elif self._creator() != _myself():
            if procfs.state(*self._creator()) in _GONE:
                cause = f"process {self._creator()[0]}, which made the ring, died"
                raise RankFailed(f"nobody {_SIDES[side]} this ring: {cause}", cause=cause)
        elif self._given_away:
            from multiprocessing import active_children

            if not active_children():
                cause = "the processes that it was given to have ended"
                raise RankFailed(f"nobody {_SIDES[side]} this ring: {cause}", cause=cause)

    def _as_item(self, item: Any) -> bytes | np.ndarray[Any, Any]:
        """Convert an item that is neither bytes nor exactly np.ndarray to one of these."""
        if isinstance(item, np.ma.MaskedArray):
            raise TypeError("a masked array is two arrays; put item.data and item.mask")
        if isinstance(item, np.ndarray):
            return np.asarray(item)
        if isinstance(item, (bytes, bytearray)):
            return bytes(item)
        if isinstance(item, memoryview) and item.format in ("B", "b", "c"):
            return bytes(item)
        if not isinstance(item, (np.generic, str)):
            if hasattr(item, "__array_interface__") or isinstance(item, memoryview):
                return np.asarray(item)
            if hasattr(item, "__dlpack__"):
                return np.from_dlpack(item)
            with contextlib.suppress(TypeError):
                return np.asarray(memoryview(item))
        raise TypeError(
            f"the item is of type {type(item).__name__}; a ring takes bytes-like objects and arrays "
            "(np.asarray(item)), and pickles nothing"
        )

    def _text_of(self, dtype: np.dtype[Any]) -> bytes:
        """Return a dtype as text for the other side. TypeError if it holds objects or has no text form."""
        if dtype.hasobject:
            raise TypeError(f"the array has dtype {dtype}, with objects, which a ring does not carry")
        if dtype.type.__module__ == _EXTENSION_TYPES:
            return f"{_EXTENSION_TYPES}.{dtype.name}".encode()
        described = dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)
        text = repr(described)
        if self._dtype_of(text.encode()) != dtype:
            raise TypeError(f"the array has dtype {dtype}, which has no text form; put a view of it")
        return text.encode()

    def _dtype_of(self, text: bytes) -> np.dtype[Any]:
        name = text.decode()
        if name.startswith(f"{_EXTENSION_TYPES}."):
            import ml_dtypes

            extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name.partition(".")[2]))
            return extension
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(ast.literal_eval(name))
        return dtype


def _myself() -> tuple[int, int]:
    return os.getpid(), procfs.start_time(os.getpid())


def _close_quietly(reference: weakref.ref[Ring]) -> None:
    ring = reference()
    if ring is not None:
        with contextlib.suppress(RuntimeError):
            ring.close()


@atexit.register
def _close_all() -> None:
    for ring in list(_open):
        _close_quietly(weakref.ref(ring))


def _forget_all_sides() -> None:
    for ring in list(_open):
        ring._forget_sides()


def _give_all_away() -> None:
    for ring in list(_open):
        ring._given_away = True


os.register_at_fork(after_in_child=_forget_all_sides, after_in_parent=_give_all_away)
