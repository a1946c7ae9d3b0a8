"""End a rank with its launcher, describe how a process ended, and open missing standard streams."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def parent_death_tie(parent_pid: int) -> Callable[[], None]:
    """Return a function that makes the kernel kill its caller, a child of `parent_pid`, when the parent dies.

    The parent in this sense is the thread that started the child, so that thread must outlive the child.
    """
    prctl = _libc.prctl  # looked up here: few operations are safe between fork and exec

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the tie was set
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def die_with(pid: int, sentinel: int) -> None:
    """Kill this process when process `pid`, which is not its parent, ends or `sentinel` becomes readable.

    Both are watched, since other children of `pid` may hold the sentinel's other end open by accident.
    """
    watched = [sentinel]
    # Fails if the process has ended, which the sentinel shows, or without pidfds in the kernel or in Python.
    with contextlib.suppress(OSError, AttributeError):
        watched.append(os.pidfd_open(pid))

    def watch() -> None:
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="shmring-launcher-watch", daemon=True).start()


def open_standard_streams() -> None:
    """Open /dev/null for a missing stdin, stdout or stderr, so that no other file gets its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # returns the lowest free number: fd
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python found none when it started
            setattr(sys, name, open(os.devnull, "w" if fd else "r"))  # noqa: SIM115


def describe_exit(exit_code: int) -> str:
    """Describe an exit code of subprocess or multiprocessing, which is negative for a signal."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
