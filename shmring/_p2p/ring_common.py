"""The common part of Ring and Broadcast: allocate memory, pickle the ring, convert dtypes to text, and close
the ring at the end of the process."""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import os
import secrets
import sys
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np

from .._arguments import integer
from .._arrays.buffers import masked
from .._config.settings import Settings
from .._system import file_descriptors, procfs, segments
from .._system.limits import usable_cpus
from ..errors import Aborted, Closed, Error, RankFailed
from .ring_ends import LEAST_NBYTES, ORIGIN_BEGIN, ORIGIN_NBYTES, RingEnds

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

# Measured with bench/engine/bench_ring.py: a smaller ring needs more switches between processes on shared
# CPUs, and its lines are rewritten while the other side's L2 cache (2 MiB) still holds them; with a larger
# ring long items no longer stay in the cache.
DEFAULT_NBYTES = 4 << 20
PAUSES = 500  # if each process has a CPU

_GONE = ("gone", "dead")
_EXTENSION_TYPES = "ml_dtypes"
_WHAT = "a ring"  # in messages
_COUNTED_NBYTES = 24
_LINGER_S = 60.0  # least time for which a closed ring can be loaded from a pickle, if its maker lives
_SEVERAL = 0xFFFFFFFF  # Origin.sender: more than one process
_open: weakref.WeakSet[RingBase] = weakref.WeakSet()


# The descriptors of closed rings, while pickles of them may be loaded: (number of pickles, end_s).
_lingering: dict[int, tuple[int, float]] = {}


class Origin(ctypes.Structure):
    """The processes that made and pickled a ring: at ORIGIN_BEGIN in its memory."""

    _fields_ = (
        ("nonce", ctypes.c_uint64),  # tells this ring from others. W creator; R processes that load a pickle
        ("creator_start_time", ctypes.c_uint64),  # W creator; R all, as creator_pid
        ("creator_pid", ctypes.c_uint32),
        # A process that has pickled the ring and is not the creator; 0: there is none. W that process; R all.
        ("sender", ctypes.c_uint32),
        # One bit for each of the creator's first pickles: 1 if it has been loaded. W the process that loads
        # it, under the lock; R creator.
        ("loaded", ctypes.c_uint8 * _COUNTED_NBYTES),
    )


assert ctypes.sizeof(Origin) <= ORIGIN_NBYTES


class RingBase(RingEnds):
    """The part of Ring and Broadcast that is written in Python; see there."""

    _origin: Origin  # valid as long as this object, which keeps the memory mapped
    _given_away: bool  # to children
    _has_sent: bool  # a pickle of this process may be under way
    _npickles = 0  # of the creator's
    _other_items = ", and pickles nothing"  # the end of an error message

    def _make(
        self,
        nbytes: SupportsIndex,
        *,
        places: int,
        reserved: int,
        drops: bool = False,
        single_use: bool = False,
    ) -> None:
        """Begin with new memory, for at least nbytes of data and for `places` readers; see sr_broadcast."""
        size = _rounded(nbytes)
        head_nbytes = self._head_nbytes(places)
        try:
            self._fd = segments.create(head_nbytes + size, kind=Settings.from_environment().segment)
            segments.allocate(self._fd, 0, head_nbytes + size, purpose=_WHAT)
            mapping = segments.Mapping(self._fd, head_nbytes + size)
            mapping.populate()
            self._format(mapping.address, size, places, reserved, drops, single_use)
            origin = Origin.from_address(mapping.address + ORIGIN_BEGIN)
            origin.nonce = secrets.randbits(63) + 1
            origin.creator_pid, origin.creator_start_time = myself()
            self._begin(mapping)
        except BaseException:
            self.close()
            raise

    @classmethod
    def _attach(cls, wrapped: Any) -> Self:
        """Return the ring of the parent, from the descriptor that this child was started with."""
        ring = cls.__new__(cls)
        ring._fd = wrapped.detach()
        ring._open()
        return ring

    @classmethod
    def _load(
        cls, machine: str, pid: int, number: int, identity: list[int], nonce: int, pickle_number: int
    ) -> Self:
        """Return the ring of another process, which a pickle describes. pickle_number -1 is not counted."""
        file_descriptors.check_machine(machine, pid, _WHAT)
        ring = cls.__new__(cls)
        fd = file_descriptors.open_there(pid, number, identity, _WHAT)
        if fd is None:
            raise _gone(pid)
        ring._fd = fd
        ring._open()
        if ring._origin.nonce != nonce:
            ring.close()
            raise _gone(pid)
        if 0 <= pickle_number < 8 * _COUNTED_NBYTES:
            with segments.locked(fd, "locking a ring"):
                ring._origin.loaded[pickle_number // 8] |= 1 << pickle_number % 8
        return ring

    def _open(self) -> None:
        """Begin with the memory of the descriptor, which another process has made."""
        try:
            self._begin(segments.Mapping(self._fd, os.fstat(self._fd).st_size))
        except BaseException:
            self.close()
            raise

    def _begin(self, mapping: segments.Mapping) -> None:
        super().__init__(mapping, PAUSES if usable_cpus(len(os.sched_getaffinity(0))) > 1 else 0)
        self._origin = Origin.from_address(mapping.address + ORIGIN_BEGIN)
        self._given_away = self._has_sent = False
        _open.add(self)
        _close_loaded()

    def put_nowait(self, item: NDArray[Any] | Buffer) -> None:
        """Put an item in as `put(item, block=False)` does.

        Parameters
        ----------
        item : bytes or array
            As in `put`.

        Raises
        ------
        queue.Full, Closed, RankFailed, TypeError
            As `put`.
        """
        self.put(item, block=False)

    def get_nowait(self, *, out: NDArray[Any] | None = None) -> Any:
        """Return the next item as `get(block=False)` does.

        Parameters
        ----------
        out : numpy.ndarray, optional
            As in `get`.

        Returns
        -------
        bytes or numpy.ndarray
            The item.

        Raises
        ------
        queue.Empty, TypeError, ValueError, Closed, Aborted, RankFailed
            As `get`.
        """
        return self.get(block=False, out=out)

    def close(self) -> None:
        """Close this side. The other gets the remaining items, then Closed. Another call does nothing.

        Raises
        ------
        RuntimeError
            While another thread is inside a call of this ring.
        """
        if self.closed_because is None:
            self._close("this ring is closed here")
        end_s = time.monotonic() + _LINGER_S
        if self._fd >= 0:  # also after an exception in a call of close
            _lingering[self._fd] = self._npickles, end_s
            self._fd = -1  # no handler of a signal runs between these two lines
            _open.discard(self)
            _close_loaded()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._mark_aborted()
        self.close()

    def __del__(self) -> None:
        # close() raises if another thread is in a call, or if the ring was never opened.
        with contextlib.suppress(Exception):
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import context, reduction

        if self.closed_because is not None:
            raise ValueError("this ring is closed; make another one")
        if context.get_spawning_popen() is not None:
            self._given_away = True
            return type(self)._attach, (reduction.DupFd(self._fd),)
        pid, origin, pickle_number = os.getpid(), self._origin, -1
        self._has_sent = True
        if self._creator() == myself():
            pickle_number, self._npickles = self._npickles, self._npickles + 1
        else:
            origin.sender = pid if origin.sender in (0, pid) else _SEVERAL
        place = file_descriptors.machine(), pid, self._fd, file_descriptors.identity_of(self._fd)
        return type(self)._load, (*place, origin.nonce, pickle_number)

    # -- methods that RingEnds calls --

    def _use_side(self) -> tuple[int, int]:
        """Register this process as the user of a side: it closes the ring when it ends. Return `myself()`."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # children of multiprocessing do not run atexit handlers
            util.Finalize(self, _close_quietly, args=(weakref.ref(self),), exitpriority=0)
        return myself()

    def _why_none_comes(self, came: set[int]) -> str | None:
        """Return why no other process will use a side that none uses yet; None if one may still come.

        The processes in `came` use the ring already, and do not count. A process that has the ring may come,
        and so may one that loads a pickle from a process that has the ring.
        """
        if self._has_sent:  # to a process that this one does not know
            return None
        creator = self._creator()
        if creator != myself():
            if procfs.state(*creator) not in _GONE:
                return None
            cause = f"process {creator[0]}, which made the ring, died"
        else:
            from multiprocessing import active_children

            if not self._given_away:
                return None
            pids = {child.pid for child in active_children()} - came
            if any(file_descriptors.may_have_open(pid, self._fd) for pid in pids if pid is not None):
                return None
            cause = "the processes that it was given to have ended, or closed it"
        sender = self._origin.sender  # if it lives, a process may load its pickle
        others = file_descriptors.processes_with(self._fd) - {os.getpid()}
        return None if others - (set() if sender == _SEVERAL else came - {sender}) else cause

    def _creator(self) -> tuple[int, int]:
        """Return (pid, start time) of the process that made the ring."""
        return self._origin.creator_pid, self._origin.creator_start_time

    def _error_of_close(self, is_writer: bool) -> Exception:
        """Return the error of the writer after all readers have left, or of a reader after the writer has."""
        if is_writer:
            if cause := self._last_death:
                return RankFailed(f"no process gets from this ring any more: {cause}", cause=cause)
            return Closed("no process gets from this ring any more: the last one has closed it")
        if self._is_aborted():
            return Aborted("the process that puts into this ring gave up: an exception left its `with` block")
        return Closed("the process that puts into this ring has closed it")

    def _poll_writer(self, pid: int, start_time: int, readers: set[int]) -> None:
        """Raise RankFailed if the writer is gone, or can never come. pid 0: it has not come yet."""
        if pid:
            if cause := self._cause_of_death(pid, start_time):
                raise RankFailed(f"the process that puts into this ring is gone: {cause}", cause=cause)
        elif cause := self._why_none_comes(readers):
            raise RankFailed(f"nobody puts into this ring: {cause}", cause=cause)

    def _cause_of_death(self, pid: int, start_time: int) -> str | None:
        """Return how a process of the ring died; None if it lives."""
        if procfs.state(pid, start_time) not in _GONE:
            return None
        return f"process {pid} died without closing the ring"

    def _unwanted(self, is_object: bool, nbytes: int) -> Exception:
        """Return the error of a get that asks for another kind of item than the next one."""
        if is_object:
            return ValueError("the next item is an object; get it with get_object()")
        return ValueError(f"the next item is {nbytes} bytes and no array; get it without out=")

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
            f"(np.asarray(item)){self._other_items}"
        )

    def _check_class(self, out: Any) -> None:
        """Raise TypeError for an `out` that cannot be filled."""
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out is a {type(out).__name__}; it must be a NumPy array")
        if isinstance(out, np.ma.MaskedArray):
            raise masked("out")

    def _text_of(self, dtype: np.dtype[Any]) -> bytes:
        """Return a dtype as text for the other side. TypeError if it holds objects or has no text form."""
        if dtype.hasobject:
            raise TypeError(f"the array has dtype {dtype}, with Python objects, which a ring cannot take")
        text = repr(_description(dtype)).encode()
        try:
            is_kept = self._dtype_of(text) == dtype
        except (SyntaxError, TypeError, ValueError):  # for example a title that is no string
            is_kept = False
        if not is_kept:
            raise TypeError(f"the array has dtype {dtype}, which has no text form; put a view of it")
        return text

    def _dtype_of(self, text: bytes) -> np.dtype[Any]:
        return _described(ast.literal_eval(text.decode()))


def _description(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as a literal of Python: a name, (dtype, shape) of a subarray, or a dict of fields."""
    if dtype.subdtype is not None:
        return _description(dtype.subdtype[0]), dtype.shape
    if dtype.type.__module__ == _EXTENSION_TYPES:
        return f"{_EXTENSION_TYPES}.{dtype.name}"
    if dtype.names is None:
        return dtype.str
    fields = [(*dtype.fields[name], None)[:3] for name in dtype.names]  # type: ignore[index]
    return {
        "names": list(dtype.names),
        "formats": [_description(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def _described(description: Any) -> np.dtype[Any]:
    """Return the dtype of a description."""
    given: Any = description
    if isinstance(description, tuple):
        given = _described(description[0]), description[1]
    elif isinstance(description, dict):
        given = {**description, "formats": list(map(_described, description["formats"]))}
    elif description.startswith(f"{_EXTENSION_TYPES}."):
        import ml_dtypes

        given = getattr(ml_dtypes, description.partition(".")[2])
    made: np.dtype[Any] = np.dtype(given)
    return made


def myself() -> tuple[int, int]:
    return os.getpid(), procfs.start_time(os.getpid())


def _gone(pid: int) -> Error:
    return Error(
        f"the ring of process {pid} is gone: the process had ended, or closed the ring, before this pickle "
        "was loaded; keep the ring open until all have loaded it"
    )


def _close_loaded() -> None:
    """Close the descriptors of closed rings whose pickles have been loaded, or were made long ago."""
    now_s = time.monotonic()
    for fd, (npickles, end_s) in list(_lingering.items()):
        with contextlib.suppress(KeyError, OSError):  # another thread has closed it
            if now_s >= end_s or _are_loaded(fd, npickles):
                del _lingering[fd]  # no handler of a signal runs between these two lines
                os.close(fd)


def _are_loaded(fd: int, npickles: int) -> bool:
    wanted = (1 << min(npickles, 8 * _COUNTED_NBYTES)) - 1
    if wanted == 0:
        return True
    origin = Origin.from_buffer_copy(os.pread(fd, ctypes.sizeof(Origin), ORIGIN_BEGIN))
    return int.from_bytes(bytes(origin.loaded), "little") & wanted == wanted


def _rounded(nbytes: SupportsIndex) -> int:
    """Return the size of a ring of at least nbytes: a power of two. Raises TypeError or ValueError."""
    nbytes = integer("nbytes", nbytes)
    if not 0 < nbytes <= 1 << 40:
        raise ValueError(f"nbytes is {nbytes}; it must be more than 0, and at most 1 TiB")
    return max(LEAST_NBYTES, 1 << (nbytes - 1).bit_length())


def _close_quietly(reference: weakref.ref[RingBase]) -> None:
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
        ring._has_sent, ring._npickles = False, 0
    for fd in _lingering:  # its parent's
        os.close(fd)
    _lingering.clear()


def _give_all_away() -> None:
    for ring in list(_open):
        ring._given_away = True


os.register_at_fork(after_in_child=_forget_all_sides, after_in_parent=_give_all_away)
