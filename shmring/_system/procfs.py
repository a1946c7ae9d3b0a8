"""Read /proc: whether a process is still the one that joined, and how it ended."""

from __future__ import annotations

import io
import os
import select
import signal
import time

from ..errors import Error

_EXITING = 0x4  # PF_EXITING in the flags of /proc/PID/stat
_KILLED = 1 << signal.SIGKILL - 1  # in the pending signals: the process dies when it gets a CPU
_STAT_NBYTES = 4096
_PATIENCE_S = 0.05  # /proc shows a death within microseconds of the robust futexes

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
}


def shows_this_process() -> bool:
    """Return whether /proc is mounted, and numbers processes as the kernel does for this one.

    A sandbox with a PID namespace of its own may keep the /proc of the outer one, where a number belongs to
    another process.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def check_shows_this_process() -> None:
    """Raise Error unless /proc shows this process, so that others can open its descriptors there."""
    if not shows_this_process():
        raise Error(
            "shared arrays and rings need /proc, which does not show this process here: it is not mounted or "
            "belongs to another PID namespace; mount it (unshare --mount-proc, bwrap --proc /proc)"
        )


def start_time(pid: int) -> int:
    """Return field 22 of /proc/PID/stat, which with the pid identifies a process; 0 if /proc hides it."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def name_and_parent(pid: int) -> tuple[str, int]:
    """Return the name of a process, and the pid of its parent; ("", 0) if /proc hides it."""
    name, _, fields = _stat_text(pid).partition(b"(")[2].rpartition(b")")
    return name.decode("utf-8", "replace"), int(fields.split()[1]) if fields else 0


def state(pid: int, start: int) -> str:
    """Return a short description of the state of a late process."""
    fields = _stat(pid)
    if fields is None:  # /proc may not be mounted, or may hide the process (hidepid)
        return "gone" if has_ended(pid) else "alive, and not shown by /proc"
    if start and int(fields[19]) != start:
        return "gone"
    if fields[0] == "Z" and int(fields[17]) > 1:  # only the main thread has ended so far
        return "without its main thread"
    if int(fields[6]) & _EXITING or int(fields[28]) & _KILLED:
        return "dead"  # it will not run again, although freeing its memory may take long
    return _STATES.get(fields[0], fields[0])


def how_it_ended(pid: int, start: int) -> str:
    """Return why a rank's liveness thread has ended: the process died, or became another program."""
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
    if fields is None:
        return shows_this_process() or has_ended(pid)
    if fields[0] in "ZX":
        return True
    return int(fields[19]) != start or bool(int(fields[6]) & _EXITING or int(fields[28]) & _KILLED)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, without /proc."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # no pidfds in the kernel or in Python, or no descriptor left
        return not _answers(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))  # also True for a zombie
    finally:
        os.close(fd)


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process is another user's
        return True
    return True


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the command's name. The name may contain any character."""
    text = _stat_text(pid)
    return text.rpartition(b")")[2].decode().split() if text else None


def _stat_text(pid: int) -> bytes:
    """Return the text of /proc/PID/stat; empty if /proc hides the process, or it has ended."""
    if not shows_this_process():
        return b""
    try:
        with io.FileIO(f"/proc/{pid}/stat") as file:  # a third of the objects of open()
            return file.read(_STAT_NBYTES) or b""
    except OSError:
        return b""
