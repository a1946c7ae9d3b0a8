"""Arrays that travel between processes as descriptors: `share`, `shared_empty` and `shared_zeros`.

Each array is in a region of its own, nameless shared memory behind one page with counters. When
multiprocessing pickles an ndarray whose memory is in a region, the pickle has the number of this process's
descriptor, and the process that loads it opens `/proc/PID/fd/NUMBER`. Every process that has the region
keeps a descriptor as long as it has arrays on it, or pickles of it are under way: sent, and not yet
loaded. So the kernel frees the memory with the last process that can reach it, however that process ends.

A process looks for pickles that were loaded only when it shares, sends or receives the next array. To
free memory earlier, `Head.references` counts the processes with arrays on the region and the pickles under
way. The process that takes the last reference away frees the pages. A process that is killed leaves its
reference, which only delays this until the descriptors are closed.

Each pickle under way has a slot, in which the process that loads it says so. Slots are in the head, and if
these do not suffice, behind the array, where memory is allocated only for those in use.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import ctypes
import functools
import math
import os
import secrets
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from multiprocessing import parent_process, reduction, util
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._arguments import integer
from .._system import file_descriptors, segments
from .._system.limits import explain
from ..errors import Error
from . import keeper
from .allocator import Part, check_possible, check_shape_and_dtype
from .operands import FileDescriptor

_Array = np.ndarray[Any, Any]
_Shape = int | tuple[int, ...]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_MAGIC = 0x73686D72_61727261
_HEAD_NBYTES = 4096
_NSLOTS = 1984
_NFURTHER = 500_000  # slots behind the array, whose pages exist once they are used
_NTRIES = 8  # slots of the head that are tried for a pickle
_SWEEP_S = 0.001  # least time between two looks at all pickles under way
_EXIT_S = 0.02  # at the end of a process, for pickles to be loaded before it leaves a keeper
_WHAT = "a shared array"  # in messages
_SLOT = struct.Struct("=H")
_SENT, _LOADED = 0, 1  # lowest bit of a slot; the others are the number of its use


class Head(ctypes.Structure):
    """The first page of a region. Its fields change under the region's lock."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("nonce", ctypes.c_uint64),  # another one for each use of the region
        ("nbytes", ctypes.c_uint64),  # after this page
        ("references", ctypes.c_uint32),
        ("next_use", ctypes.c_uint32 * 2),  # the number of the next pickle in `slots`, and behind the array
        ("is_reusable", ctypes.c_uint8),  # its first process uses the region again: nobody frees the pages
        ("is_by_value", ctypes.c_uint8),  # a pool made it to send one array; see `reduce_copy`
        # A forked child has arrays that `references` lacks: nobody frees the pages or uses the region again.
        ("is_uncounted", ctypes.c_uint8),
        # One for each pickle: 0, or the number of the use, and _SENT or _LOADED.
        ("slots", ctypes.c_uint16 * _NSLOTS),
    )


assert ctypes.sizeof(Head) <= _HEAD_NBYTES


def _file_nbytes(nbytes: int) -> int:
    """Return the size of the file of a region of nbytes: its head, the array, and further slots."""
    return _HEAD_NBYTES + -(-nbytes // _HEAD_NBYTES) * _HEAD_NBYTES + _NFURTHER * _SLOT.size


class _Part(Part):
    """Base object of all arrays of this process on a region; the reference of this process goes with it."""

    region: Region  # set once there is an array: NumPy loses its base object if it has no memory for it

    def __init__(self, region: Region) -> None:
        super().__init__(region.data.address + _HEAD_NBYTES, region.nbytes, is_writable=region.is_writable)


class _PartRef(weakref.ref[_Part]):
    """A reference to a part. After the part's end it is in `_dropped`, until its region has been dropped."""

    __slots__ = ("region",)
    region: Region


class Region(FileDescriptor):
    """The memory of one shared array, as this process has it. It closes its descriptor when it is dropped.

    It exists before its descriptor, so that no exception loses the descriptor: set `fd`, then call `map`.
    """

    of_head: segments.Mapping
    head: Head
    data: segments.Mapping

    def __init__(self, nbytes: int, is_writable: bool, for_receivers: bool, maker: int = 0) -> None:
        self.nbytes = nbytes
        self.is_writable = is_writable  # by this process
        self.for_receivers = for_receivers  # True if they may write
        self.maker = maker  # the process that made it, which alone uses it again
        self.under_way: dict[int, int] = {}  # slot -> its value, of pickles of this process
        self.part: _PartRef | None = None  # None: this process has no reference that is counted
        self.nonce = 0  # 0: not in use

    def map(self) -> None:
        """Map the memory of the descriptor."""
        self.of_head = segments.Mapping(self.fd, _HEAD_NBYTES)
        self.head = Head.from_address(self.of_head.address)
        self.data = segments.Mapping(self.fd, _HEAD_NBYTES + self.nbytes, writable=self.is_writable)

    def begin(self, for_receivers: bool, is_by_value: bool) -> None:
        """Begin a use of this region by its maker."""
        self.for_receivers = for_receivers
        with segments.locked(self.fd):
            head = self.head
            head.magic, head.nbytes, head.references = _MAGIC, self.nbytes, 1
            head.is_reusable, head.is_by_value = _reuse_limit_nbytes() > 0, is_by_value
            head.nonce = self.nonce = secrets.randbits(63) + 1

    def array(self) -> _Array:
        """Return an array of all bytes. The caller has counted the reference if there was no array yet."""
        part = self.part() if self.part is not None else None
        if part is None:
            part = _Part(self)
            whole = np.asarray(part)
            part.region = self
            weakref.finalize(part, _drop_all).atexit = False
            ref = _PartRef(part, _dropped.append)  # called before the finalizer, and never interrupted
            ref.region, self.part = self, ref
            return whole
        return np.asarray(part)

    def send(self) -> tuple[int, int]:
        """Count a pickle; return its slot and the slot's value."""
        with segments.locked(self.fd):
            slot, value = self.free_slot()
            self.set_slot(slot, value)  # first, so that an exception leaves a slot too few at worst
            self.head.references += 1
            self.under_way[slot] = value
            _sent.add(self)
        return slot, value

    def free_slot(self) -> tuple[int, int]:
        """Return a slot for a pickle, and its value. Most are found at once: the oldest pickle was loaded."""
        head, begin = self.head, 0
        for kind, (count, ntries) in enumerate([(_NSLOTS, _NTRIES), (_NFURTHER, _NFURTHER)]):
            for _ in range(ntries):
                use, index = divmod(head.next_use[kind], count)
                head.next_use[kind] += 1
                before = self.slot(begin + index)
                if not before or before & 1 == _LOADED:
                    return begin + index, (use % 0x7FFF + 1) << 1 | _SENT
            begin += count
        raise Error(
            f"{_NFURTHER} pickles of one shared array were sent and not loaded: load them, or send fewer "
            "and larger views of it"
        )

    def slot(self, number: int) -> int:
        """Return the value of a slot."""
        if number < _NSLOTS:
            return int(self.head.slots[number])
        (value,) = _SLOT.unpack(os.pread(self.fd, _SLOT.size, self.slot_file_offset(number)))
        return int(value)

    def set_slot(self, number: int, value: int) -> None:
        """Set the value of a slot."""
        if number < _NSLOTS:
            self.head.slots[number] = value
        else:
            try:
                os.pwrite(self.fd, _SLOT.pack(value), self.slot_file_offset(number))
            except OSError as error:
                raise explain(error, "counting the pickles of a shared array") from error

    def slot_file_offset(self, number: int) -> int:
        """Return the offset in the file of a slot behind the array."""
        return _file_nbytes(self.nbytes) - (_NSLOTS + _NFURTHER - number) * _SLOT.size

    def receive(self, nonce: int, slot: int, value: int) -> bool:
        """Take a pickle's reference, or one more if it was loaded before. False if the memory is gone."""
        is_counted = self.part is not None  # also if it is gone, and waits in `_dropped`
        with segments.locked(self.fd):
            head = self.head
            if head.nonce != nonce or (head.references == 0 and not head.is_uncounted):
                return False
            is_first = self.slot(slot) == value
            if is_first:  # first, so that an exception here leaves a reference too many, and not one too few
                self.set_slot(slot, value | _LOADED)
            head.references = max(head.references + (not is_counted) - is_first, 0)  # as in `drop`
        self.nonce = nonce
        return True

    def take_back(self, slot: int, value: int) -> None:
        """Give up a pickle of this process if it is under way; loading it later is an error."""
        if self.slot(slot) == value:
            with segments.locked(self.fd):
                if self.slot(slot) == value:
                    self.set_slot(slot, value | _LOADED)
                    self.head.references -= 1
            if self.part is None:
                self.drop()
        del self.under_way[slot]

    def forget_loaded(self) -> None:
        """Forget the pickles of this process that were loaded, up to the first one that is under way."""
        loaded = []
        for slot, value in self.under_way.items():
            if self.slot(slot) == value:
                break
            loaded.append(slot)
        for slot in loaded:
            del self.under_way[slot]

    def drop(self) -> None:
        """Give this process's reference back, as its last array is gone; the last one frees the pages.

        After an exception, call it again.
        """
        with segments.locked(self.fd):
            head = self.head
            if self.part is not None:
                head.references -= head.references > 0  # 0: a forked child, which is_uncounted, took this one
                self.part = None  # no handler of a signal runs between these two lines
            if head.references == 0 and not (head.is_reusable or head.is_uncounted):
                segments.free(self.fd, _HEAD_NBYTES, _file_nbytes(self.nbytes) - _HEAD_NBYTES)

    def close(self) -> None:
        """Unmap the region and close the descriptor. A second call completes what an exception cut short."""
        if _regions.get(self.nonce) is self:
            del _regions[self.nonce]
        if self.fd >= 0:
            self.data.close()
            self.close_fd()
            self.of_head.close()

    def close_fd(self) -> None:
        """Close the descriptor, which holds the pages.

        Call it if the region cannot be made or opened: a traceback may hold the region for long.
        """
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


# ---- the regions of this process ---------------------------------------------------------------------------

_regions: dict[int, Region] = {}  # by nonce, those with an array here or with pickles under way
_sent: set[Region] = set()  # those with pickles under way
_reusable: list[Region] = []  # to be used again, the oldest first
_dropped: collections.deque[_PartRef] = collections.deque()  # of regions whose last array here is gone
_guard = threading.Lock()  # of all of these, and of each region
# Taken with _guard: it can say whether this thread holds it. (For any thread: only from Python 3.14 on.)
_inside = threading.RLock()
_swept_s = 0.0
_own_limit_nbytes = 0  # most bytes of _reusable, as the program says
_reuse_limits: dict[object, int] = {}  # by open pool: the same, as the pool says; the largest number counts


def _is_inside() -> bool:
    """Return whether this code has interrupted a part of this thread that holds the guard."""
    return _inside._is_owned()  # type: ignore[attr-defined, no-any-return, unused-ignore]


def _check_outside() -> None:
    if _is_inside():
        raise RuntimeError(
            "a signal handler or destructor cannot share, pickle or load an array while its thread does so; "
            "let it set a flag, and share the array where the program reads the flag"
        )


def _drop_all() -> None:
    """Drop the regions whose last array is gone. Called after each use of the guard, and when an array goes.

    The garbage collector lets arrays go at any moment, also while this thread holds the guard.
    """
    while _dropped and not _guard.locked():  # if a thread holds the guard, it does so afterwards
        with _inside, _guard:
            _drop_all_guarded()


def _drop_all_guarded() -> None:
    while _dropped:
        ref = _dropped[0]  # it stays there until all is done: an exception may come at any line
        region = ref.region
        if region.fd >= 0 and (region.part is ref or region.part is None):
            with contextlib.suppress(Error, OSError):  # the kernel frees it with the last descriptor
                region.drop()
            region.part = None
            region.forget_loaded()
            _close_unused(region)
        _dropped.popleft()  # or the region came back by a pickle, whose reference remained


def _close_unused(region: Region) -> None:
    """Close or keep a region without arrays and pickles. After an exception, call it again."""
    if region.under_way:
        return
    if region.part is None and region.fd >= 0:
        if (
            _may_be_reused(region.head)
            and region.maker == os.getpid()
            and not file_descriptors.are_scarce(region.fd)
        ):
            if _regions.pop(region.nonce, None) is not None:
                _reusable.append(region)
            _trim_reusable()
        else:
            region.close()
    _sent.discard(region)  # last: after an exception, the next sweep finds the region


def _may_be_reused(head: Head) -> bool:
    return bool(head.is_reusable and not head.is_uncounted)


def _reuse_limit_nbytes() -> int:
    return max([_own_limit_nbytes, *_reuse_limits.values()])


def _trim_reusable() -> None:
    while sum(region.nbytes for region in _reusable) > _reuse_limit_nbytes():
        _reusable.pop(0).close()


def _sweep() -> None:
    """Close the regions without arrays here whose pickles were loaded. The caller holds the guard."""
    global _swept_s
    _drop_all_guarded()
    now_s = time.monotonic()
    if now_s < _swept_s + _SWEEP_S:
        return
    _swept_s = now_s
    for region in list(_sent):
        region.forget_loaded()
        _close_unused(region)


def _used_again(nbytes: int) -> Region | None:
    for index, region in enumerate(_reusable):
        head = region.head
        if nbytes <= region.nbytes <= 2 * nbytes and head.references == 0 and _may_be_reused(head):
            return _reusable.pop(index)
    return None


def _make_region(nbytes: int, data: _Array | None) -> Region:
    """Return a new region that begins with these bytes."""
    region = Region(nbytes, True, True, os.getpid())
    try:
        region.fd = segments.create(_file_nbytes(nbytes), kind="memfd")
        purpose = "a shared array"
        segments.allocate(region.fd, 0, _HEAD_NBYTES + (nbytes if data is None else 0), purpose=purpose)
        if data is not None:  # pages need not be cleared first, so this takes half of the time of a copy
            segments.write(region.fd, _HEAD_NBYTES, data.data, purpose=purpose)
        region.map()
    except BaseException:
        region.close_fd()
        raise
    return region


# ---- what users call ---------------------------------------------------------------------------------------


@overload
def share(
    array: NDArray[_Scalar], *, writable: bool = False, copy: bool | None = True
) -> NDArray[_Scalar]: ...
@overload
def share(array: ArrayLike, *, writable: bool = False, copy: bool | None = True) -> NDArray[Any]: ...
def share(array: ArrayLike, *, writable: bool = False, copy: bool | None = True) -> _Array:
    """Return a copy of an array in shared memory. It travels between processes as a descriptor, not as bytes.

    The result is an ordinary ndarray. Where multiprocessing pickles it, or a view of it, also within
    other objects, the process that loads the pickle maps the same memory: in a `Queue`, a `Pipe`, a
    `Pool`, a `ProcessPoolExecutor`, and as an argument of a `Process`, whatever the start method.
    `pickle.dumps` itself, and `copy`, take the bytes as for any array.

    The memory has no name. It is freed with the last array on it, in whichever process that is, also if
    processes are killed. If a process ends before its pickles are loaded, it leaves a process that keeps
    their memory until then, or until its parent ends. A process that is no child of multiprocessing has no
    such parent: its memory is kept for 5 s. The processes must be of one user, on one machine, and see each
    other in `/proc`.

    Parameters
    ----------
    array : array_like
        Any shape, and any dtype without Python objects. The result is in Fortran order if the array is, else
        in C order.
    writable : bool
        True if the processes that receive it may write to it. They get read-only arrays otherwise. The
        caller's array is writable in either case.
    copy : bool or None
        None: return an array, or a view of one, as it is if it is in such memory already; `writable` then has
        no effect. False: the same, and raise ValueError if it is not. An array that a pool has sent counts
        as an ordinary one.

    Returns
    -------
    numpy.ndarray
        In memory of its own.

    Raises
    ------
    TypeError
        For a dtype with Python objects, and for masked arrays.
    ValueError
        See `copy`.
    OutOfMemory
        If there is no memory for it.
    Error
        If the process has no descriptor left. Each array needs one in every process.
    RuntimeError
        If a signal handler or a destructor calls this while its thread shares, pickles or loads an array.
        Pickling and loading raise it, too.

    Examples
    --------
    >>> import multiprocessing
    >>> table = shmring.share(np.arange(6).reshape(2, 3))
    >>> queue = multiprocessing.SimpleQueue()
    >>> queue.put({"row": table[1]})
    >>> row = queue.get()["row"]
    >>> table[1, 0] = 10
    >>> row
    array([10,  4,  5])
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array is two arrays; share array.data and array.mask")
    given = np.asarray(array)
    if not copy and region_of(given) is not None:
        return given
    if copy is False:
        raise ValueError("the array is not one that `share` has made: copy=None copies it")
    return _copy(given, writable)


def _copy(given: _Array, writable: bool, is_by_value: bool = False) -> _Array:
    order = "F" if given.flags.f_contiguous and not given.flags.c_contiguous else "C"
    if given.nbytes == 0 or not given.flags.forc or given.dtype.hasobject:
        made = _shared(given.shape, given.dtype, writable, order, is_by_value=is_by_value)
        np.copyto(made, given)
        return made
    flat = (given.T if order == "F" else given).reshape(-1).view("u1")
    return _shared(given.shape, given.dtype, writable, order, flat, is_by_value=is_by_value)


@overload
def shared_empty(shape: _Shape, *, writable: bool = False) -> NDArray[np.float64]: ...
@overload
def shared_empty(
    shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar], *, writable: bool = False
) -> NDArray[_Scalar]: ...
@overload
def shared_empty(shape: _Shape, dtype: DTypeLike, *, writable: bool = False) -> NDArray[Any]: ...
def shared_empty(shape: _Shape, dtype: DTypeLike = float, *, writable: bool = False) -> _Array:
    """Return an array in shared memory, as `share` does, whose values are arbitrary.

    Parameters
    ----------
    shape : int or tuple of int
        As for `numpy.empty`.
    dtype : numpy.dtype
        Any without Python objects.
    writable : bool
        See `share`.

    Returns
    -------
    numpy.ndarray
        In C order.

    Raises
    ------
    TypeError, OutOfMemory, Error, RuntimeError
        As `share`.

    Examples
    --------
    >>> frame = shmring.shared_empty((480, 640, 3), "u1")
    >>> frame.shape
    (480, 640, 3)
    """
    return _shared(shape, dtype, writable, "C")


@overload
def shared_zeros(shape: _Shape, *, writable: bool = False) -> NDArray[np.float64]: ...
@overload
def shared_zeros(
    shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar], *, writable: bool = False
) -> NDArray[_Scalar]: ...
@overload
def shared_zeros(shape: _Shape, dtype: DTypeLike, *, writable: bool = False) -> NDArray[Any]: ...
def shared_zeros(shape: _Shape, dtype: DTypeLike = float, *, writable: bool = False) -> _Array:
    """Return an array of zeros in shared memory, as `share` does.

    Parameters
    ----------
    shape : int or tuple of int
        As for `numpy.zeros`.
    dtype : numpy.dtype
        Any without Python objects.
    writable : bool
        See `share`.

    Returns
    -------
    numpy.ndarray
        In C order.

    Raises
    ------
    TypeError, OutOfMemory, Error, RuntimeError
        As `share`.

    Examples
    --------
    >>> shmring.shared_zeros(3, "i8", writable=True)
    array([0, 0, 0])
    """
    return _shared(shape, dtype, writable, "C", is_cleared=True)


def keep_shared(nbytes: int) -> int:
    """Keep the memory of shared arrays that this process made for its next ones, instead of freeing it.

    It is used again once no process has an array there. Its pages need not be cleared, which takes most
    of the time of `share`. While a `shmring.adapters.pools.Executor` is open, this process keeps at least its
    `keep_nbytes`.

    Parameters
    ----------
    nbytes : int
        Keep at most so many bytes. 0, the value at the beginning: none.

    Returns
    -------
    int
        The number that the previous call set; 0 if there was none.

    Raises
    ------
    TypeError, ValueError
        For a number of bytes that is no integer, or negative. Nothing changes.

    Examples
    --------
    >>> before = shmring.keep_shared(256 << 20)
    >>> first = shmring.shared_zeros(1000)
    >>> del first
    >>> second = shmring.shared_zeros(900)  # in the same memory
    >>> shmring.keep_shared(before)
    268435456
    """
    global _own_limit_nbytes
    nbytes = _checked_limit(nbytes)
    if nbytes == _own_limit_nbytes:
        return nbytes
    _check_outside()
    with _inside, _guard:
        before, _own_limit_nbytes = _own_limit_nbytes, nbytes
        _trim_reusable()
    _drop_all()
    return before


def set_reuse_limit(pool: object, nbytes: int) -> None:
    """Keep memory while a pool is open, as `keep_shared` does. 0: the pool is not open any more."""
    nbytes = _checked_limit(nbytes)
    _check_outside()
    with _inside, _guard:
        _reuse_limits[pool] = nbytes
        for each in [each for each, most in _reuse_limits.items() if most == 0]:
            del _reuse_limits[each]
        _trim_reusable()
    _drop_all()


def forget_pool(pool: object) -> None:
    """Keep no more memory for a pool, from the next use on. A destructor may call it at any moment."""
    if pool in _reuse_limits:
        _reuse_limits[pool] = 0  # the number of entries stays, as another call may be going through them


def _checked_limit(nbytes: Any) -> int:
    if isinstance(nbytes, float) and nbytes.is_integer():  # such as 1e9
        nbytes = int(nbytes)
    found = integer("nbytes", nbytes)
    if found < 0:
        raise ValueError(f"nbytes is {nbytes}; it must be 0 or more, and 0 keeps nothing")
    return found


def _shared(
    shape: Any,
    dtype: DTypeLike,
    writable: bool,
    order: Any,
    data: _Array | None = None,
    is_cleared: bool = False,
    is_by_value: bool = False,
) -> _Array:
    lengths, items = check_shape_and_dtype(shape, dtype)
    nbytes = max(math.prod(lengths) * items.itemsize, 1)
    check_possible(nbytes)
    _check_outside()
    with _inside, _guard:
        _sweep()
        region = _used_again(nbytes)
    if region is None:
        region = _make_region(nbytes, data)
    elif data is not None or is_cleared:
        np.asarray(_Part(region))[:nbytes] = 0 if data is None else data
    with _inside, _guard:
        region.begin(writable, is_by_value)
        whole = region.array()
        _regions[region.nonce] = region
    _drop_all()
    return np.ndarray(lengths, items, whole, order=order)


# ---- pickles -----------------------------------------------------------------------------------------------


def region_of(array: _Array) -> Region | None:
    """Return the region in which an array's memory is. None for memory that is not passed by reference."""
    region = _region_below(array)
    return region if region is not None and not region.head.is_by_value else None


def _region_below(array: _Array) -> Region | None:
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base.region if isinstance(base, _Part) else None


def reduce_array(array: _Array) -> Any:
    """Return how an ndarray is pickled, as `object.__reduce_ex__`."""
    region = region_of(array)
    return reduce_plainly(array, _PROTOCOL) if region is None else _reduce(array, region)


def reduce_plainly(array: _Array, protocol: int) -> Any:
    """Return how an ndarray is pickled that is not shared: in the program's own way if it has set one."""
    own_way = copyreg.dispatch_table.get(np.ndarray)
    return own_way(array) if own_way else array.__reduce_ex__(protocol)


def reduce_copy(array: _Array) -> Any:
    """Return how a copy of an ndarray is pickled that only the receiver has, and may write to.

    It is an ordinary array to its receiver: where the receiver sends it, it is copied again. None: this
    process should save its descriptors.
    """
    copy = _copy(array, True, is_by_value=True)
    region = _region_below(copy)
    assert region is not None
    return None if file_descriptors.are_scarce(region.fd) else _reduce(copy, region)


def take_back(reduced: Iterable[Any]) -> None:
    """Give up pickles that `reduce_array` and `reduce_copy` described, unless they have been loaded."""
    _check_outside()
    with _inside, _guard:
        for _, (_, use, *_) in reduced:
            nonce, _, _, slot, value = use
            region = _regions.get(nonce)
            if region is not None and region.under_way.get(slot) == value:
                with contextlib.suppress(Error, OSError):
                    region.take_back(slot, value)
                    _close_unused(region)
    _drop_all()


def _reduce(array: _Array, region: Region) -> Any:
    _check_outside()
    with _inside, _guard:
        _sweep()
        sent = region.send()
    _drop_all()
    # A view without items may begin outside the region.
    offset = array.__array_interface__["data"][0] - region.data.address - _HEAD_NBYTES if array.size else 0
    place = (
        file_descriptors.machine(),
        _token(),
        os.getpid(),
        region.fd,
        *file_descriptors.identity_of(region.fd),
    )
    use = region.nonce, region.nbytes, region.for_receivers, *sent
    return _load, (place, use, offset, array.dtype, array.shape, array.strides, array.flags.writeable)


def _load(
    place: tuple[str, str, int, int, int, int],
    use: tuple[int, int, bool, int, int],
    offset: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writable: bool,
) -> _Array:
    """Return the array of a pickle."""
    machine, token, pid, number, *identity = place
    nonce, nbytes, for_receivers, slot, value = use
    file_descriptors.check_machine(machine, pid, _WHAT)
    _check_outside()
    with _inside, _guard:
        _sweep()
        region = _regions.get(nonce)
        if region is None:
            region = Region(nbytes, for_receivers, for_receivers)
            try:
                region.fd = _open(pid, number, identity, token, nonce)
                _map(region, pid, identity)
            except BaseException:
                region.close_fd()
                raise
        if not 0 <= slot < _NSLOTS + _NFURTHER or not region.receive(nonce, slot, value):
            raise _gone(pid)
        data = region.array()
        _regions[nonce] = region
    _drop_all()
    array: _Array = np.ndarray(shape, dtype, data, offset, strides)
    if not (writable and for_receivers):
        array.flags.writeable = False
    # Only this process has the array, so an ordinary copy is the same to it.
    return array.copy("K") if region.head.is_by_value and file_descriptors.are_scarce(region.fd) else array


def _open(pid: int, number: int, identity: list[int], token: str, nonce: int) -> int:
    """Return a descriptor of the region of another process, or of the keeper after its end."""
    fd = file_descriptors.open_there(pid, number, identity, _WHAT)
    if fd is None:
        fd = keeper.ask(token, nonce)
    if fd is None:
        raise _gone(pid)
    return fd


def _map(region: Region, pid: int, identity: list[int]) -> None:
    """Map a region of another process once its descriptor is proven to be of that memory."""
    about = os.fstat(region.fd)
    if [about.st_dev, about.st_ino, about.st_size] != [*identity, _file_nbytes(region.nbytes)]:
        raise _gone(pid)
    region.map()
    if (region.head.magic, region.head.nbytes) != (_MAGIC, region.nbytes):
        raise _gone(pid)


def _gone(pid: int) -> Error:
    return Error(
        f"a shared array of process {pid} is gone: the process was killed, or it is no child of "
        f"multiprocessing and ended more than {keeper.LONGEST_S:g} s ago, or this pickle was loaded before "
        "and the array was dropped since; keep the array until all have loaded it"
    )


_PROTOCOL = 4  # of pickles of multiprocessing; those of protocol 5 load this as well
reduction.ForkingPickler.register(np.ndarray, reduce_array)


# ---- the ends of processes ---------------------------------------------------------------------------------


@functools.cache
def _token() -> str:
    """Return the name of this process's keeper."""
    return secrets.token_hex(16)


def _prepare_end(*_: object) -> None:
    """Have this process call `_end` after the threads that write into pipes, which may send arrays."""
    util.Finalize(None, _end, exitpriority=-100)


def _end() -> None:
    """Leave a process that keeps the regions whose pickles have not been loaded when this process ends."""
    deadline_s = time.monotonic() + _EXIT_S
    while _are_under_way() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    if not _sent:
        return
    parent = parent_process()
    server = keeper.listen(_token())
    _in_keeper.append(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about threads: the child only uses what is here
            try:
                is_keeper = os.fork() == 0
            except RuntimeError:  # Python 3.12 refuses in an exit handler: the arrays end with this process
                is_keeper = False
        if is_keeper:
            keeper.serve(
                server,
                {region.nonce: region.fd for region in _sent},
                _are_under_way,
                parent.pid if parent is not None else None,
            )
    finally:
        _in_keeper.clear()
    server.close()


_in_keeper: list[bool] = []


def _are_under_way() -> bool:
    for region in list(_sent):
        region.forget_loaded()
        if not region.under_way:
            _sent.discard(region)
    return bool(_sent)


_counted_for_child: set[Region] = set()
_was_inside = False  # before the fork


def _before_fork() -> None:
    """Count the references of the child. If there will be no child, some memory is only freed later.

    Python goes on with the fork after any exception here. `_mark_uncounted` then makes up for it.
    """
    global _was_inside
    _counted_for_child.clear()
    _was_inside = _is_inside()
    _inside.acquire()
    if not _was_inside:
        _guard.acquire()
    for region in _regions.values():
        if region.part is not None:
            with contextlib.suppress(Error, OSError), segments.locked(region.fd):  # it needs a descriptor
                region.head.references += 1
                _counted_for_child.add(region)


def _mark_uncounted() -> None:
    """Leave the memory to the kernel where the child's reference could not be counted.

    The parent and the child both do so, before either drops an array.
    """
    for region in list(_regions.values()):  # another thread may change it if the guard could not be taken
        if region.part is not None and region not in _counted_for_child:
            region.head.is_uncounted = 1
    _counted_for_child.clear()


def _after_fork_in_parent() -> None:
    _mark_uncounted()
    if not _is_inside():  # an exception came before it was taken
        return
    if not _was_inside and _guard.locked():  # by this thread: all take _inside first
        _guard.release()
    _inside.release()


def _after_fork_in_child() -> None:
    global _guard, _inside
    _guard, _inside = threading.Lock(), threading.RLock()
    _mark_uncounted()
    if _in_keeper:
        return
    _token.cache_clear()
    _prepare_end()
    _sent.clear()  # its parent's pickles
    for region in [*_regions.values(), *_reusable]:
        region.under_way.clear()
        if region.part is None:
            region.close()
    _reusable.clear()
    _reuse_limits.clear()  # its parent's pools


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
_prepare_end()
util.register_after_fork(_prepare_end, _prepare_end)  # multiprocessing's children forget what was prepared
