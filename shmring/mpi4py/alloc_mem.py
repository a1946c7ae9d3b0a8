"""Memory of `Alloc_mem`: each block is a file without a name, so that other ranks of the host can map it.

A block belongs to its process, which closes the file when nothing refers to the memory any more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any, NamedTuple

import numpy as np

from .._arrays.operands import FileDescriptor
from .messages import buffer, get_address


class _Block(mmap.mmap):
    """Memory, and the descriptor of its file, which is closed with it."""

    file: FileDescriptor
    address: int


_blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()  # by descriptor


class FilePart(NamedTuple):
    """Part of a file that a process has open, where other ranks find an array."""

    pid: int
    descriptor: int
    device: int
    inode: int
    offset: int
    nbytes: int


def allocate(nbytes: int) -> buffer:
    """Return new memory, set to zero. A forked child shares it."""
    memory = None
    if nbytes > 0:
        with contextlib.suppress(OSError):  # no descriptor is left; then no other rank can map the memory
            memory = _new_block(nbytes)
    return buffer.allocate(nbytes, clear=True) if memory is None else buffer.frombuffer(memory)


def _new_block(nbytes: int) -> _Block:
    file = FileDescriptor()
    file.fd = os.memfd_create("shmring-alloc-mem")
    os.ftruncate(file.fd, nbytes)
    block = _Block(file.fd, nbytes)
    block.file, block.address = file, get_address(block)
    _blocks[file.fd] = block
    return block


def _block_of(memory: Any) -> tuple[_Block, int] | None:
    """Return the block in which an array is, and the array's first byte in it."""
    begin = get_address(memory)
    for reference in _blocks.valuerefs():  # a list: other threads may add blocks
        block = reference()
        if block is not None and 0 <= begin - block.address <= len(block) - memory.nbytes:
            return block, begin - block.address
    return None


def place_of(memory: Any) -> FilePart | None:
    """Return where other ranks find an array; None if it is not in a block."""
    if memory.nbytes == 0:
        return FilePart(os.getpid(), 0, 0, 0, 0, 0)
    found = _block_of(memory)
    if found is None:
        return None
    block, offset = found
    file = os.fstat(block.file.fd)
    return FilePart(os.getpid(), block.file.fd, file.st_dev, file.st_ino, offset, memory.nbytes)


def attach(place: FilePart) -> Any:
    """Map the memory of another process of this host, and return it as bytes. OSError if that fails."""
    if place.nbytes == 0:
        return np.empty(0, np.uint8)
    file = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if (found.st_dev, found.st_ino) != (place.device, place.inode):
            raise FileNotFoundError(f"process {place.pid} is another one in this PID namespace")
        first = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
        memory = mmap.mmap(file, place.offset - first + place.nbytes, offset=first)
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint8)[place.offset - first :]
