"""What a collective of the torch backend returns when it is not waited for. May know: torch.

A Work is stepped by whoever waits for it, so that no thread hands anything to another. Only where torch's own
C++ (DDP's buckets) wants a future of a call that takes long, a thread completes it.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

_TURN_S, _LEAST_S = 0.01, 1e-6


class Message:
    """A Transfer that several threads may wait for: shmring's messages have one caller at a time."""

    def __init__(self, transfer: Any, calling: threading.Lock, timeout_s: float) -> None:
        self._transfer = transfer
        self._calling = calling
        self._timeout_s = timeout_s

    def wait(self, limit_s: float | None = None) -> Any:
        """As the Transfer's, in turns with other threads that wait."""
        left_s = self._timeout_s if limit_s is None else limit_s
        until = time.monotonic() + left_s
        while True:
            with self._calling:
                try:
                    return self._transfer.wait(min(max(left_s, _LEAST_S), _TURN_S))
                except TimeoutError as error:
                    if isinstance(error, RuntimeError):  # shmring.Timeout: it is over
                        raise
                    left_s = until - time.monotonic()
                    if left_s <= 0 and limit_s is None:
                        return self._transfer._wait_no_longer(self._timeout_s)
                    if left_s <= 0:
                        raise TimeoutError(
                            f"the message is not complete within {limit_s:g} s; it goes on"
                        ) from None
            time.sleep(0)  # another thread's turn

    def done(self) -> bool:
        with self._calling:
            return bool(self._transfer.done())


class Work(dist.Work):  # type: ignore[misc, unused-ignore]
    """One collective, or several as one.

    parts: shmring's Works, or Messages. tensors: its result. finish: called once when all parts are done, by
    whoever sees that first. completer: of futures that are asked for before; None: they wait until they are.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        tensors: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        completer: Completer | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.tensors = tensors
        self._finish = finish
        self._failure: BaseException | None = None
        self._completer = completer
        self._finishing = threading.RLock() if finish is not None else None
        self._source = -1

    @property
    def needs_finish(self) -> bool:
        """Whether its result is not in place before somebody has seen that it is done."""
        return self._finishing is not None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """True once it is done; raises what ended it. timeout: zero is none; after it TimeoutError."""
        limit_s = timeout.total_seconds() if timeout else None
        self._wait(limit_s if limit_s is not None and limit_s > 0 else None)
        return True

    def _wait(self, limit_s: float | None) -> None:
        until = None if limit_s is None else time.monotonic() + limit_s
        for part in self.parts:
            status = part.wait(None if until is None else max(until - time.monotonic(), 0.0))
            if status is not None:
                self._source = status.source
        if self._finishing is not None:
            with self._finishing:
                self._finish_once()

    def _finish_once(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                finish()
            except Exception as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure

    def is_completed(self) -> bool:
        """Whether it has come to its end, a good one or not; its result is there then."""
        try:
            if not all(part.done() for part in self.parts):
                return False
            if self._finishing is not None:
                self._wait(None)
        except Exception:
            return True
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What ended it, once it has ended."""
        if self.is_completed():
            try:
                self._wait(None)
            except Exception as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        self._wait(None)
        return self.tensors

    def synchronize(self) -> None:
        self._wait(None)

    def source_rank(self) -> int:
        """Whom a message came from that was received from anybody."""
        self._wait(None)
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the result; complete, unless torch's C++ asks."""
        completer = self._completer  # None where Python asks
        are_halves = are_any_halves(self.tensors)
        if completer is not None and not are_halves and not self.is_completed():
            ready, future = self._future_of_later()
            completer.complete(self, ready)
            return future
        try:
            result = self.result()
        except Exception:
            ready, future = self._future_of_later()
            ready.set_result(None)
            return future
        if completer is not None and are_halves:
            # DDP's built-in FP16 hook takes a list of tensors, which from Python comes as some object.
            return torch._C.fork(self.result)  # calls it at once; torch.jit.fork does the same, and warns
        future = torch.futures.Future()
        future.set_result(result)
        return future

    def _future_of_later(self) -> tuple[torch.futures.Future[None], torch.futures.Future[list[torch.Tensor]]]:
        """Complete, or failed, as soon as the first is set."""
        ready: torch.futures.Future[None] = torch.futures.Future()
        # What a callback raises, C++ takes for a failure; of `set_exception` it hears nothing.
        return ready, ready.then(lambda _: self.result())

    def end(self) -> None:
        """Waits until it is done, or over."""
        with contextlib.suppress(Exception):  # result() raises it again
            self._wait(None)


def has_succeeded(part: Any) -> bool:
    """Whether one of shmring's Works has come to a good end already."""
    if not part.done():
        return False
    try:
        part.wait()
    except Exception:
        return False  # raised again where somebody waits for it
    return True


def are_any_halves(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.dtype is torch.float16 for tensor in tensors)


def finished(tensors: list[torch.Tensor]) -> dist.Work:
    """For C++, which makes less of it than a Work takes: what is done, with this result."""
    future = torch._C.Future([])
    future.set_result(tensors)
    return _create_work_from_future(future)


class Completer:
    """Of one group: completes futures in the order of their calls, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Work, torch.futures.Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def complete(self, work: Work, ready: torch.futures.Future[None]) -> None:
        """Sets ready when work has come to its end."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put((work, ready))

    def close(self) -> None:
        """Ends the thread when it has completed what it was given."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            work, ready = given
            work.end()
            ready.set_result(None)
            del work, ready, given
