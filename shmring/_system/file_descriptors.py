"""Shared memory that travels between processes as the number of a descriptor: `/proc/PID/fd/NUMBER`.

The pickle has the machine, the process, the number, and the identity of the file. The process that loads the
pickle opens the file while the sender has it open, and checks that it is the same file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import stat

from ..errors import Error
from . import procfs
from .limits import explain


@functools.cache
def machine() -> str:
    """Return what tells this machine, and this process's view of the others, from other machines."""
    procfs.check_shows_this_process()
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def check_machine(sender: str, pid: int, what: str) -> None:
    """Raise Error if the process that sent `what` ran on another machine than this one."""
    if sender != machine():
        raise Error(f"{what} of process {pid} of another machine or container cannot be opened here")


def are_scarce(fd: int) -> bool:
    """Return whether half of this process's descriptors were in use when it opened fd.

    The kernel gives out the lowest free number.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and 2 * fd >= limit


def identity_of(fd: int) -> list[int]:
    """Return what tells a file from others."""
    about = os.fstat(fd)
    return [about.st_dev, about.st_ino]


def open_there(pid: int, number: int, identity: list[int], what: str) -> int | None:
    """Return a descriptor of the file that another process has open; None if it is not open there."""
    path = f"/proc/{pid}/fd/{number}"
    try:
        there = os.stat(path)
        # The number may belong to another file by now, whose opening might have effects.
        if [there.st_dev, there.st_ino] != identity or not stat.S_ISREG(there.st_mode):
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        raise Error(
            f"this process may not open {what} of process {pid} ({error}): both must be of one "
            "user, and the kernel must let them see each other's /proc (hidepid, prctl PR_SET_DUMPABLE)"
        ) from error
    except OSError as error:
        raise explain(error, f"opening {what} of process {pid}") from error
    try:
        is_that = identity_of(fd) == identity  # or it was closed there in between
    except BaseException:
        os.close(fd)
        raise
    if is_that:
        return fd
    os.close(fd)
    return None


def may_have_open(pid: int, fd: int) -> bool:
    """Return whether a process has open what this process has open as fd. True if /proc does not show it."""
    if procfs.shows_this_process():
        with contextlib.suppress(OSError):
            return _has_open(pid, os.readlink(f"/proc/self/fd/{fd}"), identity_of(fd))
    return not procfs.has_ended(pid)


def processes_with(fd: int) -> set[int]:
    """Return the processes that have open what this process has open as fd, as far as /proc shows them."""
    found: set[int] = set()
    if not procfs.shows_this_process():
        return found
    try:
        link, names = os.readlink(f"/proc/self/fd/{fd}"), os.listdir("/proc")
    except OSError:
        return found
    identity = identity_of(fd)
    for name in names:
        try:
            if name.isdigit() and _has_open(int(name), link, identity):
                found.add(int(name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _has_open(pid: int, link: str, identity: list[int]) -> bool:
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        try:
            if os.readlink(path) == link:  # costs less than stat, and never waits for a file system
                there = os.stat(path)
                if [there.st_dev, there.st_ino] == identity:
                    return True
        except FileNotFoundError:  # closed in between
            continue
    return False
