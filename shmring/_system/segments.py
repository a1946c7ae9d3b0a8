"""Shared memory without names: make segments, allocate their pages, map them.

Only this module makes segments, and allocates, maps and frees their pages for ranks; C and nogil code receive
addresses. No segment has a name in the file system, so nothing can be left behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import mmap
import os
import re
import secrets
from collections.abc import Callable

import numpy as np

from ..errors import Error, OutOfMemory
from . import procfs
from .limits import MIB, Headroom, MemoryLimits, explain, size_text

SHM_DIRECTORY = "/dev/shm"

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3; with sysctl vm.memfd_noexec=2 the kernel insists on it
_MADV_REMOVE = 9
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_FIXED = 0x10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

# Pages are allocated in pieces, with a check of the limits before each. So ranks that allocate concurrently
# exceed a limit by at most a piece each, which the limits' margin covers, and signals are handled in between.
_PIECE_NBYTES = 8 * MIB
_COPIED_NBYTES = 16 * MIB  # bytes made private at a time

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = getattr(_libc, "mmap64", _libc.mmap)  # its off_t always has 64 bits
_mmap.restype, _mmap.argtypes = _libc.mmap.restype, _libc.mmap.argtypes
_fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def create(nbytes: int, *, kind: str) -> int:
    """Return a descriptor of nameless shared memory of `nbytes`, without allocated pages.

    kind "memfd" is sealed against changes of its size, so that no holder can make another holder's
    access fail; "posix" is in /dev/shm and counts against its size. Both close on exec.
    Raises Error if a limit of the process forbids it.
    """
    if nbytes <= 0:
        raise ValueError(f"a segment of {nbytes} bytes cannot be made")
    openers: dict[str, Callable[[], int]] = {"memfd": _open_memfd, "posix": _open_posix}
    if kind not in openers:
        raise ValueError(f"segment kind {kind!r} is unknown; allowed: memfd, posix")
    try:
        fd = openers[kind]()
    except OSError as error:
        raise explain(error, f"making a {kind} segment") from error
    try:
        os.ftruncate(fd, nbytes)
        if kind == "memfd":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise explain(error, f"sizing a {kind} segment to {size_text(nbytes)}", nbytes) from error
        raise
    return fd


def allocate(fd: int, offset: int, nbytes: int, *, purpose: str) -> None:
    """Allocate the pages of a range of the segment before its first use, or raise OutOfMemory.

    Otherwise a later store would raise SIGBUS on a full tmpfs, or wake the OOM killer in a full memory
    cgroup. A failed call frees the pages of the range, so the range must hold no data yet.
    """
    limits = MemoryLimits()
    done = 0
    while done < nbytes:
        piece = min(_PIECE_NBYTES, nbytes - done)
        try:
            _check_room(fd, nbytes - done, nbytes, limits, purpose)
            os.posix_fallocate(fd, offset + done, piece)  # Python retries it after a signal
        except OSError as error:
            free(fd, offset, done + piece)
            raise _no_pages(error, fd, "allocating", nbytes, limits, purpose) from error
        except BaseException:  # no more room, or Ctrl-C
            free(fd, offset, done + piece)
            raise
        done += piece


def write(fd: int, offset: int, data: memoryview, *, purpose: str) -> None:
    """Store bytes in a range of the segment whose pages have not been allocated, or raise OutOfMemory."""
    limits = MemoryLimits()
    done = 0
    while done < data.nbytes:
        try:
            _check_room(fd, data.nbytes - done, data.nbytes, limits, purpose)
            done += os.pwrite(fd, data[done : done + _PIECE_NBYTES], offset + done)
        except OSError as error:
            raise _no_pages(error, fd, "writing", data.nbytes, limits, purpose) from error


class Mapping:
    """A segment mapped into this process: `address` and `nbytes`. The descriptor may be closed afterwards.

    The mmap module keeps a duplicate of a descriptor that it maps, so it only reserves the addresses here.
    Its deallocator unmaps them, which no exception of a signal handler can prevent. Views are not counted:
    the code that hands out the address closes the mapping after the last view.
    """

    address = 0  # also if __init__ raises first
    _addresses: mmap.mmap | None = None

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        self.nbytes = nbytes
        there = os.fstat(fd).st_size
        if there < nbytes:  # access beyond the end would raise SIGBUS
            raise Error(f"the segment has {there} bytes where {nbytes} were announced")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._addresses, address = _reserve(nbytes)
        how = mmap.MAP_SHARED | _MAP_FIXED
        self.address = _map(nbytes, how, fd, what="shared memory", at=address, access=access)

    def discard(self, offset: int, nbytes: int) -> None:
        """Free the whole pages inside the range for all processes; they then read as zeros."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if not self.address or offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not in a mapping of {self.nbytes}")
        if first < last and _libc.madvise(self.address + first, last - first, _MADV_REMOVE):
            error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            raise explain(error, f"freeing {size_text(nbytes)} of shared memory", nbytes) from error

    def make_private(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Replace the whole pages of the range by private copies at the same addresses.

        Other threads see each piece change atomically. Raises OutOfMemory when the rest would not fit; pieces
        already replaced stay private.
        """
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        limits = MemoryLimits()
        for done in range(0, nbytes, _COPIED_NBYTES):
            room = limits.headroom()  # each time, since other processes may copy, too
            if room.nbytes < nbytes - done:
                raise _out_of_memory(nbytes, room, "a private copy of a shared array")
            _make_private(self.address + offset + done, min(_COPIED_NBYTES, nbytes - done))

    def keep_only(self, offset: int, nbytes: int) -> None:
        """Unmap the memory outside the range; its addresses stay reserved until the mapping is closed."""
        how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        for begin, end in ((0, offset), (offset + nbytes, self.nbytes)):
            if begin < end:
                _map(end - begin, how, what="nothing", at=self.address + begin, access=0)

    def populate(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Map the pages of the range now instead of at first touch, on a best-effort basis."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        _libc.madvise(self.address + offset, nbytes, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap; a second call does nothing."""
        self.address = 0
        if self._addresses is not None:
            self._addresses.close()

    def __repr__(self) -> str:
        return f"<Mapping of {self.nbytes} bytes at {self.address:#x}>"


class Adopted(Mapping):
    """A segment's pages mapped over an array's memory, which the array's owner unmaps."""

    def __init__(self, segment: Mapping, offset: int, nbytes: int, address: int) -> None:
        """Replace the pages at `address`, which are a mapping of their own, by the segment's pages.

        Their data are copied first; no thread may write to them meanwhile. Raises ValueError unless the
        mapping is writable and has exactly this length, in whole pages.
        """
        check_own_mapping(address, nbytes)
        ctypes.memmove(segment.address + offset, address, nbytes)
        # With an old size of 0, mremap makes a second mapping of a shared mapping: see mremap(2).
        how = _MREMAP_MAYMOVE | _MREMAP_FIXED
        if _libc.mremap(segment.address + offset, 0, nbytes, how, address) == _FAILED:
            error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            what = f"mapping {size_text(nbytes)} of shared memory where an array is"
            raise explain(error, what, nbytes) from error
        self.address = address
        self.nbytes = nbytes


def check_own_mapping(address: int, nbytes: int) -> None:
    """Raise ValueError unless nbytes at address are exactly one or more adjacent writable mappings.

    Raises Error if the kernel does not list the mappings.
    """
    begin, end = address, address + nbytes
    try:
        # Unbuffered: without memory for its lock, a buffer would raise RuntimeError, not MemoryError.
        with open("/proc/self/maps", "rb", buffering=0) as maps:
            listed = maps.readall()
    except OSError as error:
        raise explain(error, "reading /proc/self/maps, to check that an array can be shared") from error
    while begin < end and (there := re.search(b"^%08x-([0-9a-f]+) rw" % begin, listed, re.MULTILINE)):
        begin = int(there[1], 16)
    if begin != end or nbytes == 0:
        raise ValueError(
            f"the {nbytes} bytes at {address:#x} are not a writable mapping of their own, whose pages could "
            "become shared: adopt memory made by mmap or tensor.share_memory_()"
        )


def _reserve(nbytes: int) -> tuple[mmap.mmap, int]:
    """Return addresses where nothing is mapped, and the first of them."""
    try:
        addresses = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    except OSError as error:
        raise explain(error, f"mapping {size_text(nbytes)} of shared memory", nbytes) from error
    return addresses, np.frombuffer(addresses, np.uint8).ctypes.data


def _map(
    nbytes: int, how: int, fd: int = -1, *, what: str, at: int | None = None, access: int = _READ_WRITE
) -> int:
    address = _mmap(at, nbytes, access, how, fd, 0)
    if address == _FAILED or address is None:
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        raise explain(error, f"mapping {size_text(nbytes)} of {what}", nbytes) from error
    return int(address)


def _make_private(address: int, nbytes: int) -> None:
    copy = _map(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, what="private memory")
    ctypes.memmove(copy, address, nbytes)
    if _libc.mremap(copy, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == _FAILED:
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _libc.munmap(copy, nbytes)
        raise explain(
            error, f"replacing {size_text(nbytes)} of shared memory by private ones", nbytes
        ) from error


def _open_memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("shmring", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel does not know the flag
            raise
        return os.memfd_create("shmring", flags)


def _open_posix() -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
    try:
        # O_EXCL: the file cannot be given a name later.
        return os.open(SHM_DIRECTORY, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    path = f"{SHM_DIRECTORY}/shmring-{secrets.token_hex(16)}"
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_room(fd: int, still_nbytes: int, wanted_nbytes: int, limits: MemoryLimits, purpose: str) -> None:
    room = _room(fd, limits)
    if room.nbytes < still_nbytes:
        raise _out_of_memory(wanted_nbytes, room, purpose)


def _room(fd: int, limits: MemoryLimits) -> Headroom:
    memory = limits.headroom()
    file_system = os.fstatvfs(fd)
    if file_system.f_blocks:  # 0: no limit, as for a memfd
        free = file_system.f_bavail * file_system.f_frsize
        if free < memory.nbytes:
            total = file_system.f_blocks * file_system.f_frsize
            return Headroom(free, f"{SHM_DIRECTORY} ({size_text(total)})")
    return memory


def _out_of_memory(wanted_nbytes: int, room: Headroom, purpose: str) -> OutOfMemory:
    if room.limit.startswith(SHM_DIRECTORY):
        way_out = (
            f"mount a larger {SHM_DIRECTORY} (docker run --shm-size=1g) or set SHMRING_SEGMENT=memfd, "
            "which it does not limit"
        )
    else:
        way_out = (
            "raise that limit, use fewer ranks or smaller arrays, "
            "or set a smaller SHMRING_CHUNK or SHMRING_DEPTH"
        )
    return OutOfMemory(
        f"{purpose} needs {size_text(wanted_nbytes)} of shared memory, but {room.limit} has only "
        f"{size_text(room.nbytes)} left: {way_out}",
        wanted_nbytes=wanted_nbytes,
        available_nbytes=room.nbytes,
    )


def _no_pages(error: OSError, fd: int, doing: str, nbytes: int, limits: MemoryLimits, purpose: str) -> Error:
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return _out_of_memory(nbytes, _room(fd, limits), purpose)
    return explain(error, f"{doing} {size_text(nbytes)} of shared memory for {purpose}", nbytes)


def free(fd: int, offset: int, nbytes: int) -> None:
    """Free the pages of a range for all processes, on a best-effort basis; they then read as zeros."""
    _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, nbytes)


def locked(fd: int, doing: str = "locking a shared array") -> io.FileIO:
    """Lock the segment against all other callers; `with` the result, or its `close`, unlocks it.

    The lock belongs to an open file of its own, so it ends with this object, whatever raises, and with the
    process.
    """
    try:
        file = io.FileIO(f"/proc/self/fd/{fd}", "r+")
    except OSError as error:
        procfs.check_shows_this_process()
        raise explain(error, doing) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        return file
    except BaseException as error:
        file.close()
        if isinstance(error, OSError):
            raise explain(error, doing) from error
        raise
