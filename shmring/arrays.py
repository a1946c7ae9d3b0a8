"""Arrays in memory that every rank of the host maps, so that collectives on them copy nothing.

A *block* is one collective allocation: a part for each rank, in rank order, then a page of which each rank
owns one byte ("freed"). May know: errors, memory; it is handed an engine.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import memory
from .errors import Error, OutOfMemory, RankFailed, Timeout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._engine import Engine
    from .links import Links

PAGE_NBYTES = 4096
MOST_NBYTES = 1 << 56  # keeps every sum of sizes inside 64 bits


class _Part:
    """What NumPy's arrays keep alive as their base: this rank's part of a block, or a whole mapping."""

    def __init__(self, address: int, nbytes: int, mapping: memory.Mapping | None = None) -> None:
        self.mapping = mapping  # which goes with the last reference; a block goes when no rank needs it
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }


class _Block:
    """One allocation as this process maps it."""

    def __init__(self, mapping: memory.Mapping, stride: int, rank: int, size: int) -> None:
        self.mapping = mapping
        self.stride = stride
        self._rank = rank
        flags = ctypes.c_uint8 * size
        self._freed = flags.from_address(mapping.address + stride * size)
        self._pid = os.getpid()
        self.orphaned = False  # the communicator is closed: nobody but the own arrays needs the mapping

    def free_own_part(self) -> None:
        """The last array of this rank is gone: its pages go now, the addresses when no rank needs them."""
        if os.getpid() != self._pid:
            return  # a forked child drops its copy of the reference; the memory is the parent's
        self._freed[self._rank] = 1
        self.mapping.discard(self._rank * self.stride, self.stride)
        if self.orphaned:
            self.mapping.close()

    def is_free(self) -> bool:
        return all(self._freed)

    def own_part_is_free(self) -> bool:
        return bool(self._freed[self._rank])


class Arrays:
    """The shared blocks of one communicator on one rank."""

    def __init__(self, engine: Engine, links: Links, kind: str) -> None:
        self._engine = engine
        self._links = links
        self._kind = kind
        self._blocks: dict[int, _Block] = {}
        self._last_id = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], timeout_s: float) -> NDArray[Any]:
        """Collective: an array of zeros of the same shape and dtype on every rank."""
        nbytes = math.prod(shape) * dtype.itemsize
        self._engine.announce_allocation(min(nbytes, MOST_NBYTES), timeout_s)
        if nbytes == 0:
            return np.zeros(shape, dtype)
        _check_possible(nbytes)
        self._sweep()
        block = self._allocate(nbytes, timeout_s)
        self._last_id += 1
        self._blocks[self._last_id] = block
        self._tell_engine()
        part = _Part(block.mapping.address + self._engine.rank * block.stride, nbytes)
        weakref.finalize(part, block.free_own_part).atexit = False
        return np.asarray(part).view(dtype).reshape(shape)

    def one_for_all(self, nbytes: int, timeout_s: float) -> NDArray[np.uint8]:
        """Collective: zeros in memory that is the same for all ranks; unmapped with the last reference."""
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        _check_possible(nbytes)
        total = _whole_pages(nbytes)
        mapping = self._map(total, 0, total, timeout_s)
        return np.asarray(_Part(mapping.address, nbytes, mapping))

    def close(self) -> None:
        """The communicator ends; arrays that are still used keep their own mapping."""
        for block in self._blocks.values():
            block.orphaned = True
            if block.own_part_is_free():
                block.mapping.close()
        self._blocks.clear()

    def _allocate(self, nbytes: int, timeout_s: float) -> _Block:
        size = self._engine.size
        stride = _whole_pages(nbytes)
        mapping = self._map(stride * size + _whole_pages(size), self._engine.rank * stride, stride, timeout_s)
        return _Block(mapping, stride, self._engine.rank, size)

    def _map(self, total: int, begin: int, nbytes: int, timeout_s: float) -> memory.Mapping:
        """Rank 0 makes the memory, everyone maps it, with the pages that this rank will use at once.

        When one cannot, all raise and nothing is left.
        """
        fd = self._share_alike(total, timeout_s)
        mapping, failure = None, None
        try:
            mapping = memory.Mapping(fd, total)
            mapping.populate(begin, nbytes)
        except Error as error:
            failure = error
        finally:
            os.close(fd)
        if not self._engine.all_agree(failure is None, timeout_s):
            if mapping is not None:
                mapping.close()
            raise failure or Error(
                f"a rank other than {self._engine.rank} could not map the {total} bytes of a shared array: "
                "its own error says why and what to do"
            )
        assert mapping is not None
        return mapping

    def _share_alike(self, total: int, timeout_s: float) -> int:
        """The memory's descriptor; where this host has none, the others hear of it in the agreement."""
        try:
            return self._share(lambda: self._create(total), time.monotonic() + timeout_s)
        except (Timeout, RankFailed):
            raise
        except Error:
            if self._engine.world_size > self._engine.size:
                self._engine.all_agree(False, timeout_s)
            raise

    def _create(self, nbytes: int) -> int:
        fd = memory.create(nbytes, kind=self._kind)
        try:
            memory.allocate(fd, 0, nbytes, purpose="shared arrays")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _share(self, create: Callable[[], int], deadline: float) -> int:
        """A descriptor that rank 0 creates, on every rank; what it raises instead, all raise."""
        fd = None
        if self._engine.rank == 0:
            try:
                fd = create()
            except BaseException as error:
                self._links.fail_descriptor(error)
                raise
        try:
            return self._links.broadcast_descriptor(fd, check=self._engine.check, deadline=deadline)
        except (Timeout, RankFailed, KeyboardInterrupt) as error:
            # Not everybody's: a descriptor may still be under way, so nothing may follow on these links.
            self._engine.report(error)
            raise

    def _sweep(self) -> None:
        """Unmap blocks that every rank has freed. Only here, between calls: a line may name any other."""
        for number in [number for number, block in self._blocks.items() if block.is_free()]:
            block = self._blocks.pop(number)
            self._tell_engine()
            block.mapping.close()

    def _tell_engine(self) -> None:
        table = [(number, block.mapping.address, block.stride) for number, block in self._blocks.items()]
        self._engine.set_blocks(table)


def _check_possible(nbytes: int) -> None:
    if nbytes > MOST_NBYTES:
        raise OutOfMemory(
            f"a shared array of {nbytes} bytes is more than any machine has; give a smaller shape",
            wanted_nbytes=nbytes,
        )


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def check(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """shape and dtype of a shared array as NumPy means them; TypeError or ValueError if there is none."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(
            f"dtype {dtype} holds Python objects, which cannot live in shared memory; give a dtype of numbers"
        )
    lengths = tuple(map(operator.index, shape)) if np.iterable(shape) else (operator.index(shape),)
    if any(n < 0 for n in lengths):
        raise ValueError(f"shape is {lengths}; its lengths must be 0 or more")
    return lengths, dtype
