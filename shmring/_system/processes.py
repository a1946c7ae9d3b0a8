"""Ties between a launcher and its ranks: die together, and say how a process ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def parent_death_tie(parent_pid: int) -> Callable[[], None]:
    """A function for the child of `parent_pid` to call: the kernel then kills it when its parent is gone.

    The kernel means the thread that started the child, so that thread has to outlive it.
    """
    prctl = _libc.prctl  # looked up here: little is safe to do between fork and exec

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it went before the tie was there
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def die_with(pid: int, sentinel: int) -> None:
    """Kill this process when process `pid`, not its parent, is gone; `sentinel` turns readable then too.

    Two signs, as other children of `pid` may hold the sentinel's other end open by accident.
    """
    watched = [sentinel]
    # Gone already, which the sentinel knows, or a kernel or a Python without pidfds.
    with contextlib.suppress(OSError, AttributeError):
        watched.append(os.pidfd_open(pid))

    def watch() -> None:
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="shmring-launcher-watch", daemon=True).start()


def describe_exit(exit_code: int) -> str:
    """The words for an exit code as subprocess and multiprocessing give it: negative for a signal."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
