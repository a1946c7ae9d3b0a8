"""What a collective of the torch backend returns when it is not waited for.

An Operation is a call that was issued. A Work is torch's handle of it, of one of three classes:

- Work, for torch.distributed's functions. Python may give it to C++ and drop it.
- UnknownWork, for a caller that may be Python or C++.
- LentWork, for torch's C++.

The thread that waits for an operation also steps it, so that no thread hands anything to another. Only if C++
wants a future of a call that takes long (DDP's buckets), a thread completes it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined, unused-ignore]
    PythonCallbackWork,
    _create_work_from_future,
)

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


class Operation:
    """One collective or message, or several as one.

    parts: shmring's Works, or Messages. tensors: its result. future_in_cpp: of the C++ part of its Work.
    """

    __slots__ = ("completer", "future_in_cpp", "parts", "tensors")
    future_in_cpp: Any

    def __init__(self, parts: Sequence[Any], tensors: list[torch.Tensor], completer: Completer) -> None:
        self.parts = parts
        self.tensors = tensors
        self.completer = completer

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """True once it is done; raises what ended it. timeout: zero is none; after it TimeoutError."""
        if timeout and (limit_s := timeout.total_seconds()) > 0:
            until = time.monotonic() + limit_s
            for part in self.parts:
                part.wait(max(until - time.monotonic(), 0.0))
        else:
            for part in self.parts:
                part.wait()
        return True

    @property
    def may_never_come(self) -> bool:
        """Whether it needs a message. The completer must not wait for one: a late message ends the group."""
        return any(isinstance(part, Message) for part in self.parts)

    def is_completed(self) -> bool:
        """Whether it has come to its end, a good one or not; its result is there then."""
        try:
            return all(part.done() for part in self.parts)
        except Exception:
            return True

    def exception(self) -> BaseException | None:
        """What ended it, once it has ended."""
        if self.is_completed():
            try:
                self.wait()
            except Exception as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self.tensors

    def source_rank(self) -> int:
        """The rank that sent the message, if it was received from any."""
        statuses = [part.wait() for part in self.parts]
        return next((int(status.source) for status in reversed(statuses) if status is not None), -1)

    def end(self) -> None:
        """Wait until it is done, or over."""
        with contextlib.suppress(Exception):  # result() raises it again
            self.wait()

    def has_succeeded(self) -> bool:
        """Whether it has come to a good end already."""
        return self.is_completed() and self.exception() is None

    # -- futures --

    def wait_in_cpp(self, timeout: datetime.timedelta) -> bool:
        """As `wait`, for the C++ part of a Work, which would complete its future without a result."""
        self.wait(timeout)
        if not self.future_in_cpp.done():
            self.future_in_cpp.set_result(self.tensors)
        return True

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A complete future of the result: wait for it."""
        try:
            result = self.result()
        except Exception:
            ready, future = self._future_of_later()
            ready.set_result(None)
            return future
        future = torch.futures.Future()
        future.set_result(result)
        return future

    def future_of_later(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the result, completed by the completer's thread if it takes longer than this call."""
        if are_any_halves(self.tensors):
            # DDP's built-in FP16 hook takes a list of tensors, which from Python comes as some object.
            self.end()
            if self.exception() is None:
                return torch._C.fork(self.result)  # calls it at once; torch.jit.fork does the same, and warns
        if self.is_completed() or self.may_never_come:
            return self.future()
        ready, future = self._future_of_later()
        self.completer.complete(self, functools.partial(ready.set_result, None))
        return future

    def _future_of_later(self) -> tuple[torch.futures.Future[None], torch.futures.Future[list[torch.Tensor]]]:
        """Complete, or failed, as soon as the first is set."""
        ready: torch.futures.Future[None] = torch.futures.Future()
        # What a callback raises, C++ takes for a failure; of `set_exception` it hears nothing.
        return ready, ready.then(lambda _: self.result())


class StagedOperation(Operation):
    """One whose result is in place once the first thread that sees it complete has called `finish`."""

    __slots__ = ("_failure", "_finish", "_finishing")

    def __init__(
        self,
        parts: Sequence[Any],
        tensors: list[torch.Tensor],
        completer: Completer,
        finish: Callable[[], None],
    ) -> None:
        super().__init__(parts, tensors, completer)
        self._finish: Callable[[], None] | None = finish
        self._finishing = threading.RLock()
        self._failure: BaseException | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        super().wait(timeout)
        with self._finishing:
            self._finish_once()
        return True

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
        if not super().is_completed():
            return False
        self.end()
        return True


def operation_of(
    parts: Sequence[Any],
    tensors: list[torch.Tensor],
    completer: Completer,
    finish: Callable[[], None] | None,
) -> Operation:
    if finish is None:
        return Operation(parts, tensors, completer)
    return StagedOperation(parts, tensors, completer, finish)


def together(several: Sequence[Any], completer: Completer) -> Operation:
    """Several Operations, or Works, as one."""
    operations = [_operation_behind(one, completer) for one in several]

    def finish() -> None:
        for operation in operations:
            operation.wait()

    parts = [part for operation in operations for part in operation.parts]
    tensors = [tensor for operation in operations for tensor in operation.tensors]
    return StagedOperation(parts, tensors, completer, finish)


def _operation_behind(one: Any, completer: Completer) -> Operation:
    if isinstance(one, Operation):
        return one
    if isinstance(one, Handle):
        return one.operation
    return Operation((), one.get_future().value(), completer)  # from `finished`


class Handle:
    """What torch and its users ask of a Work: the operation answers."""

    __slots__ = ()
    operation: Operation

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """True once it is done; raises what ended it. timeout: zero is none; after it TimeoutError."""
        return self.operation.wait(timeout)

    def is_completed(self) -> bool:
        return self.operation.is_completed()

    def is_success(self) -> bool:
        return self.operation.has_succeeded()

    def exception(self) -> BaseException | None:
        return self.operation.exception()

    def result(self) -> list[torch.Tensor]:
        return self.operation.result()

    def synchronize(self) -> None:
        self.operation.wait()

    def source_rank(self) -> int:
        return self.operation.source_rank()

    _source_rank = source_rank


class Work(Handle, PythonCallbackWork):  # type: ignore[misc, unused-ignore]
    """For Python, which may give it to C++ and drop it.

    C++ that was given a Work keeps the C++ part of the object alive, and not the Python part. The C++ part of
    this class holds the operation, so `wait` works without the Python part. The operation must not refer to
    this object: that would be a cycle which Python's collector cannot see.
    """

    __slots__ = ("operation",)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A complete future of the result: callbacks that make calls make them in one order on all ranks."""
        return self.operation.future()

    def boxed(self) -> Any:
        # Unboxed without the Python part, it is polled, and asked for a future, in C++.
        self.complete_in_cpp()
        return PythonCallbackWork.boxed(self)

    def complete_in_cpp(self) -> None:
        """Complete the C++ part and its future when the operation ends: only `wait` asks the operation.

        Those of a message that has not come are complete when C++ waits for it.
        """
        if self.operation.is_completed():
            self._complete_in_cpp()
        elif not self.operation.may_never_come:
            self.operation.completer.complete(self.operation, self._complete_in_cpp)

    def _complete_in_cpp(self) -> None:
        with contextlib.suppress(Exception):  # the C++ part notes it
            PythonCallbackWork.wait(self)


class UnknownWork(Work):
    """For a caller that may be Python or C++. If it is C++, it asks the C++ part for the future."""

    __slots__ = ()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self.operation.future_of_later()


class LentWork(Handle, dist.Work):  # type: ignore[misc, unused-ignore]
    """For C++ that made the call: it keeps the Python part alive, and asks that for a future."""

    __slots__ = ("operation",)

    def __init__(self, operation: Operation) -> None:
        dist.Work.__init__(self)
        self.operation = operation

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self.operation.future_of_later()


_AnyWork = TypeVar("_AnyWork", bound=Work)


def work_of(operation: Operation) -> Work:
    return _made(Work, operation)


def unknown_work_of(operation: Operation) -> UnknownWork:
    work = _made(UnknownWork, operation)
    if operation.has_succeeded():
        operation.future_in_cpp.set_result(operation.tensors)
    else:
        work.complete_in_cpp()
    return work


def _made(kind: type[_AnyWork], operation: Operation) -> _AnyWork:
    # The classes have no __init__ of their own: it would take as long as making the operation.
    work = kind(operation.wait_in_cpp)
    work.operation = operation
    operation.future_in_cpp = PythonCallbackWork.get_future(work)
    return work


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
        self._queue: queue.SimpleQueue[tuple[Operation, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def complete(self, operation: Operation, then: Callable[[], None]) -> None:
        """Call `then` when the operation has come to its end."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put((operation, then))

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
            operation, then = given
            operation.end()
            then()
            del operation, then, given
