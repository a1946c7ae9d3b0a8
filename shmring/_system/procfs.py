"""What the kernel says of a process: whether it is still the one that joined, and how it ended."""

from __future__ import annotations

import os
import select
import signal
import time

_EXITING = 0x4  # PF_EXITING in the flags of /proc/PID/stat
_KILLED = 1 << signal.SIGKILL - 1  # among the pending signals there: it waits for a CPU to die on
_STAT_NBYTES = 4096
_PATIENCE_S = 0.05  # a dying process shows it in /proc within microseconds of its robust futexes

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
}


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat: with the pid it names one process for ever. 0: /proc does not show it."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state(pid: int, start: int) -> str:
    """One readable word on a process that is late."""
    fields = _stat(pid)
    if fields is None:  # /proc may not be mounted, or hide it (hidepid)
        return "gone" if _has_ended(pid) else "alive, and not shown by /proc"
    if start and int(fields[19]) != start:
        return "gone"
    if fields[0] == "Z" and int(fields[17]) > 1:  # of them all only the first one has ended, or has ended yet
        return "without its main thread"
    if int(fields[6]) & _EXITING or int(fields[28]) & _KILLED:
        return "dead"  # as good as: its memory may take long to go
    return _STATES.get(fields[0], fields[0])


def how_it_ended(pid: int, start: int) -> str:
    """Why the parked thread of a rank is gone: the process died, or became another program."""
    if pid == os.getpid():
        return "ended without closing the communicator (a thread of this process)"
    until = time.monotonic() + _PATIENCE_S
    while not _is_dead(pid, start):
        if time.monotonic() > until:
            return f"process {pid} lives, but without its communicator (execve?)"
        time.sleep(0.0002)
    return f"process {pid} died"


def _is_dead(pid: int, start: int) -> bool:
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return True
    return int(fields[19]) != start or bool(int(fields[6]) & _EXITING or int(fields[28]) & _KILLED)


def _has_ended(pid: int) -> bool:
    """Whether there is no such process any more, without a look at /proc."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # a kernel or a Python without pidfds, or no descriptor is left
        return not _answers(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))  # also of one that its parent has not waited for
    finally:
        os.close(fd)


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def _stat(pid: int) -> list[str] | None:
    """The fields after the command's name, which may hold anything."""
    # Not with open(): the moments until a death is told are counted, and that one reads with four objects.
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, _STAT_NBYTES).rpartition(b")")[2].decode().split()
    except OSError:  # it ended in between
        return None
    finally:
        os.close(fd)
