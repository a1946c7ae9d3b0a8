"""Futures made of other futures: all of several, or one whose result or exception a function changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any


def collect(fs: Iterable[Future[Any]]) -> Future[list[Any]]:
    """Return a future of the results of `fs` as a list, or of the first exception.

    If it fails or is cancelled, those of `fs` that are left are cancelled.
    """
    given = list(fs)
    collected: Future[list[Any]] = Future()
    lock = threading.Lock()
    left, is_over = len(given), False

    def note(done: Future[Any]) -> None:
        nonlocal left, is_over
        is_failed = done.cancelled() or done.exception() is not None
        with lock:
            left -= 1
            if is_over or not (is_failed or left == 0):
                return
            is_over = True
        if is_failed:
            _copy_failure(done, collected)
        else:
            _complete(collected, lambda: [each.result() for each in given])

    if not given:
        collected.set_result([])
    for each in given:
        each.add_done_callback(note)
    collected.add_done_callback(partial(_cancel, given))
    return collected


def compose(
    future: Future[Any],
    resulthook: Callable[[Any], Any] | None = None,
    excepthook: Callable[[BaseException], Any] | None = None,
) -> Future[Any]:
    """Return a future of resulthook(result) or excepthook(exception); without a hook, of what `future` has.

    If `excepthook` returns an exception, the new future fails with it. Cancelling it cancels `future`.
    """
    composed: Future[Any] = Future()

    def note(done: Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or (error is not None and excepthook is None):
            _copy_failure(done, composed)
        elif error is not None:
            assert excepthook is not None
            _complete(composed, partial(excepthook, error), raises_returned=True)
        else:
            _complete(composed, done.result if resulthook is None else partial(resulthook, done.result()))

    future.add_done_callback(note)
    composed.add_done_callback(partial(_cancel, [future]))
    return composed


def _complete(future: Future[Any], function: Callable[[], Any], raises_returned: bool = False) -> None:
    """Set the future to what a function returns or raises. It may also raise an exception that it returns."""
    if not _begins(future):
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        if raises_returned and isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def _copy_failure(done: Future[Any], future: Future[Any]) -> None:
    if done.cancelled():
        future.cancel()
    elif _begins(future):
        future.set_exception(done.exception())


def _begins(future: Future[Any]) -> bool:
    return not future.cancelled() and future.set_running_or_notify_cancel()


def _cancel(others: list[Future[Any]], future: Future[Any]) -> None:
    """Cancel the others if a future has failed or was cancelled; `wait` then knows that it has ended."""
    if future.cancelled():
        future.set_running_or_notify_cancel()
    elif future.exception() is None:
        return
    for other in others:
        other.cancel()
