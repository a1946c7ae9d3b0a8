"""Arrays in memory that every rank of the host maps, so that collectives on them copy nothing.

A *block* is one collective allocation. It holds one part for each rank, in rank order, then a page in which
each rank owns one byte ("freed"). `Arrays` is constructed with an engine.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import mmap
import operator
import os
import threading
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arguments import integer
from .._system import segments
from .._system.deadline import Deadline
from .._system.limits import size_text
from ..errors import Error, OutOfMemory, RankFailed, Timeout
from . import buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .._bootstrap.fd_passing import LocalSockets
    from .._engine.engine import Engine

PAGE_NBYTES = mmap.PAGESIZE
MOST_NBYTES = 1 << 56  # keeps every sum of sizes inside 64 bits
_OF_ADOPTION = 1  # passed instead of a signature

_adopted: set[_Block] = set()  # all adopted blocks of this process
_nforks = 0  # of this process


def _count_fork() -> None:
    global _nforks
    _nforks += 1


os.register_at_fork(before=_count_fork)


class Part:
    """Base object of a NumPy array: this rank's part of a block, or a whole mapping."""

    def __init__(
        self, address: int, nbytes: int, mapping: segments.Mapping | None = None, is_writable: bool = True
    ) -> None:
        self.nbytes = nbytes
        self.mapping = mapping  # unmapped with the last reference; None for a block, whose owner unmaps it
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, not is_writable),
        }


class _PartRef(weakref.ref[Part]):
    """A reference to the part of an array. After the part's end it is in a list, until its block is freed.

    C code appends it there, so no exception of a signal handler in a destructor can prevent it.
    """

    __slots__ = ("block",)
    block: _Block


class Adoption:
    """An array of another library whose memory all ranks of the host map; returned by `Comm.adopt`.

    If this object is dropped without `release`, the array is released when the communicator next allocates or
    adopts an array, or is closed.
    """

    def __init__(self, arrays: Arrays, block: _Block) -> None:
        self._arrays = arrays
        self._block: _Block | None = block

    def release(self) -> None:
        """Make the array private to this rank again, and keep its contents. Local.

        Call this only after all ranks have returned from the calls that used the array.

        Raises
        ------
        RuntimeError
            While a call of this rank, such as `send` in another thread, or a `Transfer` of the array is under
            way.
        OutOfMemory
            If there is no memory for a private copy.
        """
        block = self._block
        if block is not None and block.is_of_this_process():
            self._arrays.release(block)
        self._block = None


class _Waiting:
    """An adopted block, and the owner of its memory, which has to live until the block is released."""

    __slots__ = ("block", "owner")

    def __init__(self, block: _Block, owner: object) -> None:
        self.block, self.owner = block, owner


class _AdoptionRef(weakref.ref[Adoption]):
    """As _Waiting, for an Adoption. Once that is dropped, C code appends this to `Arrays._to_release`.

    So no exception of a signal handler in a destructor can prevent it.
    """

    __slots__ = ("block", "owner")
    block: _Block
    owner: object


class _Block:
    """One allocation as this process maps it."""

    adoption: _AdoptionRef | None = None  # if its own part is adopted, until it is released
    part: _PartRef | None = None  # of the own array

    def __init__(self, mapping: segments.Mapping, stride: int, rank: int, size: int) -> None:
        self.mapping = mapping
        self.stride = stride
        self.own_address = mapping.address + rank * stride
        self._adopted: segments.Adopted | None = None
        self._rank = rank
        flags = ctypes.c_uint8 * size
        self._freed = flags.from_address(mapping.address + stride * size)
        self._pid = os.getpid()
        self._nforks = _nforks
        self._own_part_is_free = False
        self._is_unused = False  # set once nothing in this class touches the mapping any more
        # Every page of the own part is shared; only shared pages can be discarded.
        self._is_shared = True
        # Every page of the own part is private; this process uses no other part any more.
        self._is_private = False
        # The communicator is closed; only this rank's arrays use the mapping.
        self._is_orphaned = False

    def free_own_part(self) -> None:
        """Free this rank's pages after its last array. The mapping stays until all ranks have freed.

        A child that was forked meanwhile may still read them. They are then freed with the last mapping.
        After an exception, call it again. Hold `_changing`.
        """
        if os.getpid() != self._pid:
            return  # a forked child drops its copy of the reference; the memory is the parent's
        if self._is_unused:
            return
        self._own_part_is_free = True
        try:
            if self._is_shared and self._nforks == _nforks:
                self.mapping.discard(self._rank * self.stride, self.stride)
        finally:  # no handler of a signal runs between these lines; one may have come here before
            if self._is_shared and not self._is_unused:
                self._freed[self._rank] = 1  # last: once all are set, another thread may unmap the block
            self._is_unused = True
        if self._is_orphaned:
            self.mapping.close()

    def adopt(self, address: int) -> None:
        """Map the own part at `address` too. From now on the own part is used there."""
        self._adopted = segments.Adopted(self.mapping, self._rank * self.stride, self.stride, address)
        self.own_address = address

    def overlaps(self, address: int, nbytes: int) -> bool:
        there = self._adopted
        return (
            there is not None and there.address < address + nbytes and address < there.address + self.stride
        )

    def release(self) -> None:
        """Make the adopted memory private again, and free the own part."""
        if not self._own_part_is_free:
            self.make_private()
            self.free_own_part()

    def is_of_this_process(self) -> bool:
        return os.getpid() == self._pid

    def forget_own_address(self) -> None:
        """Stop recognising the adopted address. Call this before the pages at that address change."""
        self.own_address = self.mapping.address + self._rank * self.stride

    def recall_own_address(self) -> None:
        """Recognise the adopted address again, if the pages there are still shared."""
        if self._adopted is not None and not self._own_part_is_free:
            self.own_address = self._adopted.address

    def is_free(self) -> bool:
        return all(self._freed)

    def make_private(self) -> None:
        """Make this rank's part private, so that no other rank can write to it."""
        if self._own_part_is_free or self._is_private:
            return
        if self._adopted is not None:
            self._adopted.make_private()  # the part in the block is not read again, so it stays shared
        else:
            self._is_shared = False
            self.mapping.make_private(self._rank * self.stride, self.stride)
        self._is_private = True

    def orphan(self) -> None:
        """Unmap, now or with the last array, what this rank's arrays do not need of a closed communicator."""
        if self._adopted is not None:  # the adopted memory has its own mapping of its pages
            # If the part is free, this may be a signal handler during `free_own_part`, which then unmaps.
            if not self._own_part_is_free:
                self._own_part_is_free = self._is_unused = True
        elif self._is_private and not self._own_part_is_free:
            with contextlib.suppress(Error):  # on failure the mapping stays until the last array is gone
                self.mapping.keep_only(self._rank * self.stride, self.stride)
        self._is_orphaned = True  # from now on, another thread that drops the last reference unmaps it
        if self._is_unused:
            self.mapping.close()


# Held while the memory of a block changes. One lock for all blocks: a destructor may run in the middle.
_changing = threading.RLock()


def _renew_lock() -> None:
    global _changing
    _changing = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock)


def _free_dropped(dropped: collections.deque[_PartRef], _: _Block | None = None) -> None:
    """Free the parts of arrays that are gone. After an exception, the next call completes it."""
    for ref in list(dropped):
        with _changing:
            ref.block.free_own_part()
            ref.block.part = None  # a cycle until here
            with contextlib.suppress(ValueError):  # another thread has done the same
                dropped.remove(ref)


class Arrays:
    """The shared blocks of one communicator on one rank."""

    def __init__(
        self,
        engine: Engine,
        local_sockets: LocalSockets,
        kind: str,
        is_in_transfer: Callable[[int, int], bool],
    ) -> None:
        self._engine = engine
        self._is_in_transfer = is_in_transfer  # is any of (address, nbytes) being sent or received?
        self._local_sockets = local_sockets
        self._kind = kind
        self._blocks: dict[int, _Block] = {}
        self._one_for_all: weakref.WeakSet[segments.Mapping] = weakref.WeakSet()
        self._last_id = 0
        self._to_release: collections.deque[_Waiting | _AdoptionRef] = collections.deque()
        self._dropped: collections.deque[_PartRef] = collections.deque()
        self._is_closed = False

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], timeout_s: float) -> NDArray[Any]:
        """Collective: return an array of zeros with the same shape and dtype on every rank."""
        nbytes = math.prod(shape) * dtype.itemsize
        self._engine.announce_allocation(min(nbytes, MOST_NBYTES), _signature(shape, dtype), timeout_s)
        if nbytes == 0:
            return np.zeros(shape, dtype)
        check_possible(nbytes)
        self._sweep()
        block = self._allocate(nbytes, timeout_s)
        self._keep(block)
        try:
            part = Part(block.mapping.address + self._engine.rank * block.stride, nbytes)
            # The finalizer keeps the block alive as long as the array, also after the communicator.
            weakref.finalize(part, _free_dropped, self._dropped, block).atexit = False
            block.part = _PartRef(part, self._dropped.append)  # called before the finalizer
            block.part.block = block
            return np.asarray(part).view(dtype).reshape(shape)
        except BaseException:
            with _changing:
                block.free_own_part()
            raise

    def adopt(self, address: int, nbytes: int, owner: object, timeout_s: float) -> Adoption:
        """Collective: share the `nbytes` at `address`, whole pages of one mapping, with all ranks."""
        self._engine.announce_allocation(nbytes, _OF_ADOPTION, timeout_s)
        self._sweep()
        block, failure = self._allocate(nbytes, timeout_s), None
        try:
            block.adopt(address)
        except (Error, ValueError) as error:
            failure = error
        if not self._engine.all_agree(failure is None, timeout_s):
            try:
                if failure is None:
                    block.make_private()
            except Error as error:  # the other ranks wait for this rank in the next call
                failure = error
            finally:
                block.mapping.close()
            raise self._failure_of_another(failure, "adopt its array", nbytes, timeout_s)
        try:
            _adopted.add(block)  # until it is released: a garbage collection must not unmap it before
            adoption = Adoption(self, block)
            self._keep(block)
            weakref.finalize(adoption, self._release_if_closed).atexit = False
            ref = _AdoptionRef(adoption, self._to_release.append)  # called before the finalizer
            ref.block, ref.owner, block.adoption = block, owner, ref
            return adoption
        except BaseException:
            self._to_release.append(_Waiting(block, owner))
            self._release_if_closed()
            raise

    def check_not_adopted(self, address: int, nbytes: int) -> None:
        """Raise ValueError if any of the bytes are already adopted by a communicator of this process."""
        self._release_waiting()
        if any(block.overlaps(address, nbytes) for block in _adopted):
            raise ValueError(
                f"the {nbytes} bytes at {address:#x} are adopted already; release that Adoption first"
            )

    def release(self, block: _Block) -> None:
        """Make the adopted memory private to this rank again. Local; call it between calls."""
        if block in self._blocks.values():
            if self._is_in_use(block):
                raise RuntimeError(
                    "a call or a transfer of this array is under way; wait for it, then release"
                )
            block.forget_own_address()
            try:
                self._update_block_table()
            except BaseException:
                block.recall_own_address()
                raise
        with _changing:
            block.release()
        _adopted.discard(block)
        block.adoption = None

    def _is_in_use(self, block: _Block) -> bool:
        # Another rank may still have to copy a message that lies in the block.
        return self._engine.has_pending() or self._is_in_transfer(block.own_address, block.stride)

    def _release_waiting(self) -> None:
        for waiting in list(self._to_release):
            if not self._is_in_use(waiting.block):
                self.release(waiting.block)
                with contextlib.suppress(ValueError):  # another thread has done the same
                    self._to_release.remove(waiting)

    def _release_if_closed(self) -> None:
        if self._is_closed:
            self._release_waiting()

    def one_for_all(self, nbytes: int, timeout_s: float) -> NDArray[np.uint8]:
        """Collective: return zeros in one memory that all ranks share. The last reference unmaps it."""
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        check_possible(nbytes)
        total = whole_pages(nbytes)
        mapping = self._map(total, 0, total, timeout_s)
        self._one_for_all.add(mapping)
        return np.asarray(Part(mapping.address, nbytes, mapping))

    def close(self) -> None:
        """Release the blocks when the communicator ends. Arrays still in use keep their mapping."""
        with _changing:  # another thread may be in Adoption.release
            for block in self._blocks.values():
                block.orphan()
        self._blocks.clear()
        self._is_closed = True
        with contextlib.suppress(Error):  # other ranks may still map the memory, but no longer use it
            self._release_waiting()
        self._one_for_all.clear()

    def make_private(self) -> str | None:
        """Make the arrays private to this rank after an abort, with the same contents and addresses.

        A rank that was stopped and continues later can then no longer write to them. Returns a message if
        some arrays are still shared because there is no memory for the copies, else None.
        """
        why = None
        with _changing:  # no thread raises before all arrays are private
            parts: list[_Block | segments.Mapping] = [*self._blocks.values(), *self._one_for_all]
            for part in parts:
                try:
                    part.make_private()
                    if isinstance(part, segments.Mapping):
                        self._one_for_all.discard(part)
                except Error as error:
                    why = f"a shared array can still be written to by ranks that have not ended: {error}"
        return why

    def _keep(self, block: _Block) -> None:
        self._last_id += 1
        self._blocks[self._last_id] = block
        self._update_block_table()

    def _allocate(self, nbytes: int, timeout_s: float) -> _Block:
        size = self._engine.size
        stride = whole_pages(nbytes)
        mapping = self._map(stride * size + whole_pages(size), self._engine.rank * stride, stride, timeout_s)
        return _Block(mapping, stride, self._engine.rank, size)

    def _map(self, total: int, begin: int, nbytes: int, timeout_s: float) -> segments.Mapping:
        """Map memory that rank 0 allocates on every rank, and populate the pages that this rank will use.

        If one rank fails, all ranks raise and nothing stays mapped.
        """
        mapping, failure = None, None
        try:
            fd = self._share(total, Deadline(timeout_s))
            try:
                mapping = segments.Mapping(fd, total)
                mapping.populate(begin, nbytes)
            finally:
                os.close(fd)
        except Error as error:
            failure = error
        except BaseException as error:  # for example Ctrl-C: the other ranks wait for this rank's vote
            self._engine.abort_outside_call(error)
            raise
        if not self._engine.all_agree(failure is None, timeout_s):
            if mapping is not None:
                mapping.close()
            what = f"map the {total} bytes of a shared array"
            raise self._failure_of_another(failure, what, nbytes, timeout_s)
        assert mapping is not None
        return mapping

    def _failure_of_another(
        self, failure: Exception | None, what: str, nbytes: int, timeout_s: float
    ) -> Exception:
        """Collective, after a rank has failed: return the error that this rank raises.

        It is OutOfMemory if every failure was OutOfMemory.
        """
        is_memory = self._engine.all_agree(failure is None or isinstance(failure, OutOfMemory), timeout_s)
        if failure is not None:
            return failure
        own = self._engine.world_rank(self._engine.rank)
        text = f"a rank other than {own} could not {what}: its own error says why and what to do"
        return OutOfMemory(text, wanted_nbytes=nbytes) if is_memory else Error(text)

    def _create(self, nbytes: int) -> int:
        fd = segments.create(nbytes, kind=self._kind)
        try:
            segments.allocate(fd, 0, nbytes, purpose="a block of shared arrays")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _share(self, total: int, deadline: Deadline) -> int:
        """Return on every rank a descriptor of memory that rank 0 allocates. If rank 0 raises, all raise.

        A rank that has no free descriptor raises alone. The others learn of it in `all_agree`.
        """
        fd = None
        if self._engine.rank == 0:
            try:
                fd = self._create(total)
            except BaseException as error:
                self._local_sockets.fail_fd(error)
                raise
        try:
            return self._local_sockets.broadcast_fd(fd, check=self._engine.check, deadline=deadline)
        except BaseException as error:
            if fd is not None:
                os.close(fd)
            if fd is not None or isinstance(error, (Timeout, RankFailed)):
                # A descriptor may still be in flight, so these sockets cannot be used again.
                self._engine.abort_outside_call(error)
            raise

    def _sweep(self) -> None:
        """Unmap blocks that every rank has freed. Call this between calls: call lines refer to blocks."""
        self._release_waiting()
        _free_dropped(self._dropped)
        # Not items(): without memory for its iterator, CPython 3.11 crashes.
        for number in [number for number in self._blocks if self._blocks[number].is_free()]:
            block = self._blocks.pop(number)
            self._update_block_table()
            block.mapping.close()

    def _update_block_table(self) -> None:
        is_set = False
        while not is_set:  # a release in another thread, or a signal handler, may set a newer table meanwhile
            version = self._engine.blocks_version
            blocks = self._blocks.copy()  # in one step: another thread may add a block
            table = [
                (number, block.mapping.address, block.own_address, block.stride)
                for number, block in blocks.items()
            ]
            is_set = self._engine.set_blocks(table, version)


def check_possible(nbytes: int) -> None:
    """Raise OutOfMemory for an array that is larger than any memory."""
    if nbytes > MOST_NBYTES:
        raise OutOfMemory(
            f"a shared array of {size_text(nbytes)} is more than any machine has; give a smaller shape",
            wanted_nbytes=nbytes,
        )


def _signature(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return a 32-bit signature of shape and dtype that is the same in every process."""
    return zlib.crc32(repr(shape).encode(), buffers.items_of(dtype)[0])


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def check_shape_and_dtype(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a shared array as NumPy interprets them. TypeError or ValueError if invalid.

    The dimensions of a subarray dtype are appended to the shape.
    """
    try:
        dtype = np.dtype(dtype)
    except TypeError as error:
        if not str(dtype).startswith(("bfloat16", "float8")):
            raise
        try:
            import ml_dtypes  # noqa: F401  it tells NumPy these names
        except ModuleNotFoundError:
            raise TypeError(f"dtype {dtype!r} is of the package ml_dtypes: pip install ml_dtypes") from error
        dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(
            f"dtype {dtype} holds Python objects, which cannot live in shared memory; give a dtype of numbers"
        )
    lengths = tuple(map(operator.index, shape)) if np.iterable(shape) else (operator.index(shape),)
    if any(n < 0 for n in lengths):
        raise ValueError(f"shape is {lengths}; its lengths must be 0 or more")
    whole, items = lengths + dtype.shape, np.empty(0, dtype.base).dtype  # "S" alone makes items of one byte
    # Before a call begins: NumPy raises ValueError for too many dimensions, or too large lengths beside a 0.
    if math.prod(whole) * items.itemsize == 0:
        np.empty(whole, items)
    else:
        np.empty((1,) * len(whole), np.uint8)
    return whole, items


def check_nbytes(name: str, nbytes: Any) -> int:
    """Return nbytes as an int. TypeError or ValueError if it is none that memory can have."""
    number = integer(name, nbytes)
    if not 0 < number <= MOST_NBYTES:
        raise ValueError(f"{name} is {number}; it must be 1 to {MOST_NBYTES}")
    return number


def as_fill_value(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `value` as an array that broadcasts to that shape and dtype. NumPy's error if it cannot."""
    if isinstance(value, np.ma.MaskedArray):
        raise buffers.masked("fill_value")
    converted = np.empty(shape[max(len(shape) - np.ndim(value), 0) :], dtype)
    converted[...] = value
    return converted
