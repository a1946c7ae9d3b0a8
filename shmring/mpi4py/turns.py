"""Threads that send and receive on one communicator: they take turns.

A communicator of shmring takes one thread at a time for messages, and another one for collectives. While the
process has several threads, a call on messages is therefore begun in a turn of its thread, and waits in short
turns. While the process has one thread, calls run directly: no other thread can start during such a call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

from ..errors import Error

_LONG_TURN_S, _SHORT_TURN_S = 0.005, 0.0003
_CONTENDED_S = 0.5  # how long turns stay short after a thread had to wait for its turn
_BRIEF_S = 0.02  # a longer wait consists of polls and pauses, which need less CPU time than turns
_CHECK_S, _ONE_POLL_S = 0.1, 1e-9
_MOST_PAUSE_S, _LEAST_PAUSE_S = 0.005, 0.00005  # the kernel has no shorter pause than the latter


class Turns:
    """The turns of the threads that send and receive on one communicator."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting = 0  # threads that wait for a turn
        self._contended_s = -_CONTENDED_S  # when a thread last had to wait for its turn

    def __enter__(self) -> Self:
        if not self._lock.acquire(blocking=False):
            self._contended_s = time.monotonic()
            self._waiting += 1
            try:
                self._lock.acquire()
            finally:
                self._waiting -= 1
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def take(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that does not block, in a turn of this thread."""
        with self:
            return function(*arguments)

    def begin(self, call: Any) -> Any:
        """Begin a call in a turn of this thread."""
        with self:
            return call.begin()

    def wait_for(self, work: Any) -> Any:
        """Wait for a Transfer, or for something with the same methods, and return its result."""
        began_s = checked_s = now_s = time.monotonic()
        while True:
            is_brief, is_due = now_s - began_s < _BRIEF_S, now_s - checked_s > _CHECK_S
            with self:
                if is_brief or is_due or work.done():
                    try:
                        return work.wait(self._turn_s(now_s) if is_brief else _ONE_POLL_S)
                    except Error:
                        raise
                    except TimeoutError:
                        checked_s = now_s
            # Without the pause this thread takes the lock again before a waiting one has woken.
            if not is_brief or self._waiting:
                _pause(now_s - began_s)
            now_s = time.monotonic()

    def _turn_s(self, now_s: float) -> float:
        return _SHORT_TURN_S if now_s - self._contended_s < _CONTENDED_S else _LONG_TURN_S

    def repeat(self, attempt: Callable[[], Any], check: Callable[[], None]) -> Any:
        """Call a function that does not block until it returns something, and return that.

        `check` raises if no more messages can come.
        """
        began_s = checked_s = now_s = time.monotonic()
        while True:
            with self:
                found = attempt()
            if found is not None:
                return found
            if now_s - checked_s > _CHECK_S:
                try:
                    check()
                except Error:
                    raise
                except RuntimeError:
                    pass  # another thread is inside a collective, which notices the end of a rank itself
                checked_s = now_s
            _pause(now_s - began_s)
            now_s = time.monotonic()


def _pause(waited_s: float) -> None:
    """Let other threads and processes run, for a small part of the time waited so far."""
    pause_s = min(_MOST_PAUSE_S, waited_s / 32)
    time.sleep(pause_s if pause_s > _LEAST_PAUSE_S else 0)
