"""Private memory of other processes of the host: a process reads and writes it through their /proc/PID/mem.

The kernel checks the permission when the file is opened. An open file stays with its process, so that a later
process with the same number is never written to.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple

import numpy as np

from .._arrays.operands import FileDescriptor
from ..errors import Error, RankFailed
from .messages import get_address

_MARK_NBYTES = 16


class ProcessPart(NamedTuple):
    """Address of an array in a process, and of random bytes by which other ranks recognise the process."""

    pid: int
    address: int
    nbytes: int
    mark_address: int
    mark: bytes


class _File(FileDescriptor):
    """The open /proc/PID/mem of a process."""

    def __init__(self, pid: int) -> None:
        self.fd = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)


_files: weakref.WeakValueDictionary[int, _File] = weakref.WeakValueDictionary()  # by pid, for all windows


class PrivateMemory:
    """Bytes of a rank's process. A slice is a copy of them, and assigning to a slice writes them."""

    def __init__(self, file: _File, rank: int, address: int, nbytes: int) -> None:
        self._file, self._rank, self._address = file, rank, address
        self.nbytes = nbytes

    def __getitem__(self, part: slice) -> Any:
        found = np.empty(part.stop - part.start, np.uint8)
        self.read_into(found, part.start)
        return found

    def read_into(self, out: Any, begin: int) -> None:
        """Fill an array of bytes with those from `begin` on."""
        self._move(os.preadv, out, begin)

    def __setitem__(self, part: slice, given: Any) -> None:
        self._move(os.pwritev, given, part.start)

    def _move(self, call: Any, array: Any, begin: int) -> None:
        """Move all bytes of an array; the kernel may move fewer in one call."""
        done = 0
        while done < array.nbytes:
            try:
                moved = call(self._file.fd, [array[done:]], self._address + begin + done)
            except OSError as error:  # the program has unmapped it
                why = f"the memory of rank {self._rank} cannot be accessed: {error.strerror}"
                raise Error(why, rank=self._rank) from error
            if moved == 0:
                raise RankFailed(f"rank {self._rank} has ended, and its memory with it", rank=self._rank)
            done += moved


def new_mark() -> Any:
    """Return bytes for `place_of`. The caller keeps them until all ranks have attached the memory."""
    return np.frombuffer(bytearray(os.urandom(_MARK_NBYTES)), np.uint8)


def place_of(memory: Any, mark: Any) -> ProcessPart:
    """Return where other ranks find an array."""
    return ProcessPart(os.getpid(), get_address(memory), memory.nbytes, get_address(mark), mark.tobytes())


def attach(place: ProcessPart, rank: int) -> PrivateMemory:
    """Return the memory of a rank's process, open to read and to write. OSError if the kernel refuses it."""
    file = _files.get(place.pid)
    if file is None or not _is_of(file, place):  # a process that has ended may have had this number
        file = _files[place.pid] = _File(place.pid)
        if not _is_of(file, place):
            raise FileNotFoundError(f"process {place.pid} is another one in this PID namespace")
    return PrivateMemory(file, rank, place.address, place.nbytes)


def _is_of(file: _File, place: ProcessPart) -> bool:
    found = bytearray(_MARK_NBYTES)
    try:
        return os.preadv(file.fd, [found], place.mark_address) > 0 and found == place.mark
    except OSError:  # the process has no memory at this address
        return False
