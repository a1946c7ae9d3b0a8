"""The objects that asynchronous collectives of the torch backend return.

An Operation is an issued call. A Work is torch's handle of an Operation, of one of three classes:

- Work, for torch.distributed's functions. Python may give it to C++ and drop it.
- UnknownWork, for a caller that may be Python or C++.
- LentWork, for torch's C++.

The thread that waits for an operation also progresses it, so no thread switch is needed. Only if C++ wants a
future of a call that is not complete (DDP's buckets), a separate thread completes the future.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import queue
import sys
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

import shmring

from .._compiled import CallLock
from .tensors import ArgumentError, as_in_gloo

_TURN_S, _LEAST_S = 0.01, 1e-6
# The code of torch's functions that wait for the Work of a message and do not return it.
_DROPPING = frozenset(inspect.unwrap(function).__code__ for function in (dist.send, dist.recv))


def abort_message(comm: Any, error: BaseException) -> None:
    """End the communicator because of an error after which a message goes on that nobody waits for."""
    with contextlib.suppress(shmring.Error):
        comm.abort(f"{type(error).__name__} in the middle of a message")


def _is_of_handler(error: BaseException) -> bool:
    """Return whether code in Python raised the error in a compiled call: the handler of a signal."""
    assert error.__traceback__ is not None
    below = error.__traceback__.tb_next  # the first frame is the caller's
    while below is not None:
        if not below.tb_frame.f_code.co_filename.endswith((".pyx", ".pxd")):
            return True
        below = below.tb_next
    return False


class Message:
    """A Transfer that several threads may wait for. shmring allows one caller of messages at a time.

    is_from_self: the message is from this rank, so a wait for one that is not sent yet would never end.
    comm: needed for `abandon`.
    """

    def __init__(
        self,
        transfer: Any,
        calling: CallLock,
        timeout_s: float,
        *,
        is_from_self: bool = False,
        comm: Any = None,
    ) -> None:
        self._comm = comm
        self._transfer = transfer
        self._is_from_self = is_from_self
        self._calling = calling
        self._timeout_s = timeout_s

    def wait(self, limit_s: float | None = None) -> Any:
        """Wait like Transfer.wait, taking turns with other waiting threads."""
        left_s = self._timeout_s if limit_s is None else limit_s
        until = time.monotonic() + left_s
        while True:
            with self._calling:
                if self._is_from_self and self._transfer.cancel():
                    raise ArgumentError(
                        "this rank waits for a message from itself that it has not sent; the receive is ended"
                    )
                try:
                    return self._transfer.wait(min(max(left_s, _LEAST_S), _TURN_S))
                except TimeoutError as error:
                    if isinstance(error, shmring.Timeout) or _is_of_handler(error):
                        raise  # the communicator has ended, or the wait is interrupted
                    left_s = until - time.monotonic()
                    if left_s <= 0 and limit_s is None:
                        return self._transfer._wait_no_longer(self._timeout_s)
                    if left_s <= 0:
                        raise TimeoutError(
                            f"the message is not complete within {limit_s:g} s; it continues"
                        ) from None

    def abandon(self, error: BaseException) -> None:
        """Withdraw the message, for which nobody waits after the error; else end the communicator.

        A posted receive would take the next message, and a send would read a tensor that the caller changes.
        The communicator also ends if a second exception of a signal handler comes before the end.
        """
        is_withdrawn = False
        try:
            with contextlib.suppress(shmring.Error), self._calling:
                is_withdrawn = self._transfer.cancel()
        finally:
            if not is_withdrawn:
                abort_message(self._comm, error)

    def done(self) -> bool:
        if self._calling.is_mine():  # in a signal handler, during this thread's own call
            return False
        with self._calling:
            return bool(self._transfer.done())


class Operation:
    """One collective or message, or several as one.

    parts: shmring Works, or Messages. tensors: the result. future_in_cpp: the future of the Work's C++ part.
    """

    __slots__ = ("completer", "future_in_cpp", "parts", "tensors")
    future_in_cpp: Any

    def __init__(self, parts: Sequence[Any], tensors: list[torch.Tensor], completer: Completer) -> None:
        self.parts = parts
        self.tensors = tensors
        self.completer = completer

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until complete; return True, or raise the error. A timeout of zero is none.

        After the timeout, raise WaitTimeout; the operation goes on.
        """
        if timeout and (limit_s := timeout.total_seconds()) > 0:
            until = time.monotonic() + limit_s
            try:
                for part in self.parts:
                    part.wait(max(until - time.monotonic(), 0.0))
            except TimeoutError as error:
                raise as_in_gloo(error) from None
        else:
            for part in self.parts:
                part.wait()
        return True

    @property
    def may_never_come(self) -> bool:
        """Return whether a part is a message. The completer must not wait: a late message ends the group."""
        return any(isinstance(part, Message) for part in self.parts)

    def is_completed(self) -> bool:
        """Return whether the operation has ended, successfully or not; the result is then in place."""
        try:
            return all(part.done() for part in self.parts)
        except Exception:
            return True

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has ended, else None."""
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
        """Return the rank that sent the received message; -1 if there is none."""
        statuses = [part.wait() for part in self.parts]
        return next((int(status.source) for status in reversed(statuses) if status is not None), -1)

    def end(self) -> None:
        """Block until the operation has ended; do not raise its error."""
        with contextlib.suppress(Exception):  # result() raises it again
            self.wait()

    def has_succeeded(self) -> bool:
        """Return whether the operation has ended successfully."""
        return self.is_completed() and self.exception() is None

    # -- futures --

    def wait_in_cpp(self, timeout: datetime.timedelta) -> bool:
        """Wait, for the C++ part of a Work, and set its future's result, which C++ would leave empty."""
        self.wait(timeout)
        if not self.future_in_cpp.done():
            with contextlib.suppress(RuntimeError):  # another thread has just set it
                self.future_in_cpp.set_result(self.tensors)
        return True

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait, and return a complete future of the result."""
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
        """Return a future of the result; if that takes long, the completer's thread completes it."""
        if are_any_halves(self.tensors):
            # DDP's built-in FP16 hook needs a list of tensors; a result set from Python is a generic object.
            self.end()
            if self.exception() is None:
                return torch._C.fork(self.result)  # calls it at once; torch.jit.fork does the same, and warns
        if self.is_completed() or self.may_never_come or self.completer.is_this_thread():
            return self.future()
        ready, future = self._future_of_later()
        self.completer.complete(self, functools.partial(ready.set_result, None))
        return future

    def _future_of_later(self) -> tuple[torch.futures.Future[None], torch.futures.Future[list[torch.Tensor]]]:
        """Return two futures; the second completes, or fails, as soon as the first is set."""
        ready: torch.futures.Future[None] = torch.futures.Future()
        # C++ treats an exception in a callback as a failure, but does not see `set_exception`.
        return ready, ready.then(lambda _: self.result())


class StagedOperation(Operation):
    """An Operation whose result is in place after the first thread that sees it complete calls `finish`."""

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
            except BaseException as error:
                kind = type(error).__name__
                self._failure = RuntimeError(f"an earlier wait ended by {kind}: the result is incomplete")
                raise
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
    """Combine several Operations, or Works, into one Operation."""
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
    return Operation((), one.get_future().value(), completer)  # a Work made by `finished`


class Handle:
    """The methods of a Work that torch and its users call, passed on to the operation."""

    __slots__ = ()
    operation: Operation

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until complete; return True, or raise the error. A timeout of zero is none.

        After the timeout, raise WaitTimeout; the operation goes on. It also goes on after an exception of a
        signal handler. After dist.send or dist.recv, which drop this Work, the message is withdrawn or the
        communicator ends.
        """
        try:
            return self.operation.wait(timeout)
        except (shmring.Error, ArgumentError):
            raise
        except BaseException as error:
            caller = sys._getframe().f_back
            if caller is not None and caller.f_code in _DROPPING:
                for part in self.operation.parts:
                    part.abandon(error)
            raise

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
    """A Work for Python, which may pass it to C++ and drop its own reference.

    C++ that holds a Work keeps the C++ part of the object alive, and not the Python part. The C++ part of
    this class holds the operation, so `wait` works without the Python part. The operation must not refer to
    this object: that would be a cycle which Python's collector cannot see.
    """

    __slots__ = ("operation",)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a complete future, so that calls made by callbacks have one order on all ranks."""
        return self.operation.future()

    def boxed(self) -> Any:
        # C++ may unbox it without the Python part and then polls, and asks for the future, in C++.
        self.complete_in_cpp()
        return PythonCallbackWork.boxed(self)

    def complete_in_cpp(self) -> None:
        """Complete the C++ part and its future when the operation ends: only `wait` asks the operation.

        For a message that has not arrived, they complete when C++ waits for it.
        """
        if self.operation.is_completed():
            self._complete_in_cpp()
        elif not self.operation.may_never_come:
            self.operation.completer.complete(self.operation, self._complete_in_cpp)

    def _complete_in_cpp(self) -> None:
        with contextlib.suppress(Exception):  # the C++ part records the error
            PythonCallbackWork.wait(self)


class UnknownWork(Work):
    """A Work for a caller that may be Python or C++. C++ asks the C++ part for the future."""

    __slots__ = ()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self.operation.future_of_later()


class LentWork(Handle, dist.Work):  # type: ignore[misc, unused-ignore]
    """A Work for C++ that made the call. C++ keeps the Python part alive and asks it for the future."""

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
    # The classes have no __init__: it would take as long as making the operation.
    work = kind(operation.wait_in_cpp)
    work.operation = operation
    operation.future_in_cpp = PythonCallbackWork.get_future(work)
    return work


def are_any_halves(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.dtype is torch.float16 for tensor in tensors)


def finished(tensors: list[torch.Tensor]) -> dist.Work:
    """Return a complete Work with this result for C++, made faster than a LentWork."""
    future = torch._C.Future([])
    future.set_result(tensors)
    return _create_work_from_future(future)


class Completer:
    """Complete the futures of one group in the order of their calls, in a thread of its own.

    The thread does not refer to this object, which ends it when nobody uses the group any more.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Operation, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def complete(self, operation: Operation, then: Callable[[], None]) -> None:
        """Call `then` when the operation has ended."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_complete_all, args=(self._queue,), name=self._name, daemon=True
                )
                self._thread.start()
        self._queue.put((operation, then))

    def is_this_thread(self) -> bool:
        """Return whether a future's callback makes the call. It must not wait for this thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread after it has completed the queued operations."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def __del__(self) -> None:
        self._queue.put(None)


def _complete_all(operations: queue.SimpleQueue[tuple[Operation, Callable[[], None]] | None]) -> None:
    while (given := operations.get()) is not None:
        operation, then = given
        operation.end()
        then()
        del operation, then, given
