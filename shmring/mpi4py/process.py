"""This process in its job: how it joins the world, and how its end ends the job."""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType
from typing import Any

import shmring

from .._config.settings import Settings
from .comm import FOREVER_S
from .finder import check_alone


class _Job:
    """The world that this process has joined, and the exit code with which it is to abort the job at exit."""

    world: shmring.Comm | None = None
    pid: int = 0
    abort_code: int = 0
    reason: str = ""


def join() -> shmring.Comm:
    """Join the world of the launcher; collective over its ranks.

    A process that a rank has started has inherited the rank's environment. It gets a world of one rank.
    """
    check_alone()
    settings = Settings.from_environment(timeout_s=FOREVER_S)
    pid = os.getpid()
    if settings.joined in (None, pid):
        world = shmring.init(timeout=settings.timeout_s)
    else:
        world = shmring.init(shmring.world(1), 0, timeout=settings.timeout_s)
    os.environ["SHMRING_JOINED"] = str(pid)
    _Job.world, _Job.pid = world, pid
    _watch_for_exceptions()
    return world


def set_abort_status(code: int) -> None:
    """End the other ranks by `Aborted` when this process ends."""
    _Job.abort_code, _Job.reason = code, f"it called set_abort_status({code})"


def _watch_for_exceptions() -> None:
    """Let an uncaught exception abort the job when this process ends; another hook prints it."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> Any:
        if not hasattr(sys, "ps1"):  # an interactive interpreter goes on after an exception
            _Job.abort_code, _Job.reason = 1, f"uncaught {kind.__name__}"
        return previous(kind, value, traceback)

    sys.excepthook = hook


def abort_if_failed() -> bool:
    """End the other ranks if this process is ending by a failure, and return whether it is."""
    if _Job.abort_code and _Job.world is not None and _Job.pid == os.getpid():
        with contextlib.suppress(shmring.Error):  # the world has ended already
            _Job.world.abort(f"rank {_Job.world.rank} has ended: {_Job.reason}")
    return bool(_Job.abort_code)
