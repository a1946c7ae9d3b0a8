"""The ranks that carry out tasks, and the rank that gives them out.

The manager sends each idle worker one task, and a thread of it receives the results. Tasks and results travel
on communicators of their own, so that each is used by one thread at a time. An idle rank waits in a receive.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from importlib import import_module
from typing import Any, NamedTuple

from ...errors import RankFailed

MPI: Any = import_module("shmring.mpi4py.MPI")
_TASK, _BEGIN, _END = 1, 2, 3  # tags from the manager
_RESULT, _ERROR, _BROKEN, _ENDED = 1, 2, 3, 4  # tags from a worker

comm_workers: list[Any] = []  # the communicator of the workers, in a worker that carries out tasks


class RemoteTraceback(Exception):
    """The traceback of a task, as the cause of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Task(NamedTuple):
    """A call to carry out, its future, and the number of the executor that it was submitted to."""

    future: Future[Any]
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    executor: int


class Manager:
    """The tasks and the workers of a communicator; on the rank that has the executors.

    Once a worker has died, all tasks that are left fail, and no others are taken.
    """

    def __init__(self, comm: Any, root: int) -> None:
        """Collective over comm; the other ranks call `serve`."""
        self._tasks, self._results = comm.Dup(), comm.Dup()
        comm.Split(MPI.UNDEFINED)
        self._workers = [rank for rank in range(comm.Get_size()) if rank != root]
        self.count = len(self._workers)
        self._idle = collections.deque(self._workers)
        self._running: dict[int, Task] = {}
        self._waiting: collections.deque[Task] = collections.deque()
        self._ending: list[Task] = []  # their futures get the results now
        self._broken: dict[int, BaseException] = {}  # errors of initializers, by executor
        self._death: BaseException | None = None  # the error by which this rank has noticed a worker's death
        # Reentrant: a callback of a future may submit another task.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._receive, name="mpi4py.futures", daemon=True)
        self._thread.start()

    def begin(self, executor: int, initializer: Callable[..., Any] | None, initargs: tuple[Any, ...]) -> None:
        """Let every worker call an initializer, before the tasks of this executor."""
        if initializer is not None:
            with self._lock:
                for worker in self._workers if self._death is None else []:
                    self._tasks.send((executor, initializer, initargs), worker, _BEGIN)

    def submit(self, task: Task) -> None:
        """Carry out a task once a worker is idle.

        BrokenExecutor if the executor's initializer has failed, or a worker has died.
        """
        with self._lock:
            error = self._error_of(task)
            if error is not None:
                raise error
            self._waiting.append(task)
            self._give_out()

    def wait_for(self, executor: int) -> None:
        """Block until no task of an executor is left."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a callback of a future would wait for its own end: call shutdown(wait=False) in callbacks"
            )
        with self._changed:
            self._changed.wait_for(lambda: not self._left(executor))

    def cancel(self, executor: int) -> None:
        """Cancel the tasks of an executor that no worker has got."""
        with self._changed:
            for task in [task for task in self._waiting if task.executor == executor]:
                self._waiting.remove(task)
                if task.future.cancel():
                    task.future.set_running_or_notify_cancel()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for all tasks, and let the workers return from `serve`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running)
            for worker in self._workers:
                with contextlib.suppress(MPI.Exception):  # the worker has died
                    self._tasks.send(None, worker, _END)
        self._thread.join()
        self._tasks.Free()
        self._results.Free()

    def _left(self, executor: int) -> bool:
        left = [*self._waiting, *self._running.values(), *self._ending]
        return any(task.executor == executor for task in left)

    def _error_of(self, task: Task) -> BrokenExecutor | None:
        """Return why a task cannot be carried out; None if it can."""
        broken = self._broken.get(task.executor)
        if self._death is None and broken is None:
            return None
        error = BrokenExecutor("the initializer failed" if self._death is None else "a worker has died")
        error.__cause__ = self._death or broken
        return error

    def _give_out(self) -> None:
        while self._idle and self._waiting:
            task = self._waiting.popleft()
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                data = MPI.pickle.dumps((task.executor, task.call))
            except BaseException as error:
                task.future.set_exception(error)
                continue
            try:
                self._tasks.Send([data, MPI.BYTE], self._idle[0], _TASK)
            except MPI.Exception as error:
                broken = BrokenExecutor("a worker cannot be reached")
                broken.__cause__ = error
                task.future.set_exception(broken)
                continue
            self._running[self._idle.popleft()] = task
        self._changed.notify_all()

    def _receive(self) -> None:
        """Receive results, until every worker has ended or one has died."""
        left, status = self.count, MPI.Status()
        while left:
            try:
                message = self._results.mprobe(status=status)
                data = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([data, MPI.BYTE])
            except MPI.Exception as error:
                self._lose_all(error)
                return
            worker, tag = status.source, status.tag
            try:
                value = MPI.pickle.loads(data)
            except BaseException as error:
                tag, value = _ERROR, (error, traceback.format_exc())
            if tag == _ENDED:
                left -= 1
            elif tag == _BROKEN:
                self._break(*value)
            else:
                self._finish(worker, tag, value)

    def _finish(self, worker: int, tag: int, value: Any) -> None:
        with self._lock:
            task = self._running.pop(worker)
            self._ending = [task]
            self._idle.append(worker)
            self._give_out()
        if tag == _RESULT:
            task.future.set_result(value)
        else:
            error, text = value
            error.__cause__ = RemoteTraceback(text)
            task.future.set_exception(error)
        self._end()

    def _break(self, executor: int, error: BaseException) -> None:
        """Note that an initializer failed, and let the tasks of its executor fail."""
        with self._lock:
            self._broken[executor] = error
            lost = [task for task in self._waiting if task.executor == executor]
            for task in lost:
                self._waiting.remove(task)
            self._ending = lost
        self._fail(lost)

    def _lose_all(self, error: BaseException) -> None:
        """Note that a worker has died, and let all tasks fail."""
        with self._lock:
            self._death = error
            lost = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
            self._ending = lost
        self._fail(lost)

    def _fail(self, lost: list[Task]) -> None:
        for task in lost:
            if task.future.running() or task.future.set_running_or_notify_cancel():
                task.future.set_exception(self._error_of(task))
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._ending = []
            self._changed.notify_all()


def serve(comm: Any, root: int) -> None:
    """Carry out tasks until the manager on rank `root` ends; collective, with the manager's start."""
    tasks, results = comm.Dup(), comm.Dup()
    comm_workers.append(comm.Split(0))
    broken: set[int] = set()
    status = MPI.Status()
    try:
        while True:
            message = tasks.mprobe(root, status=status)
            if status.tag == _END:
                message.recv()
                results.send(None, root, _ENDED)
                break
            if status.tag == _BEGIN:
                _initialize(message.recv(), results, root, broken)
            else:
                _carry_out(message, results, root, broken)
    except MPI.Exception as error:
        failed = error.__cause__
        if not isinstance(failed, RankFailed) or failed.rank == root:
            raise  # else another worker has died, and the tasks fail on rank `root`
    finally:
        comm_workers.pop().Free()
        tasks.Free()
        results.Free()


def _initialize(given: Any, results: Any, root: int, broken: set[int]) -> None:
    executor, initializer, initargs = given
    try:
        initializer(*initargs)
    except BaseException as error:
        broken.add(executor)
        results.send((executor, _sendable(error)), root, _BROKEN)


def _carry_out(message: Any, results: Any, root: int, broken: set[int]) -> None:
    try:
        executor, (function, arguments, keywords) = message.recv()
        if executor in broken:
            raise BrokenExecutor("the initializer failed")
        result = function(*arguments, **keywords)
        results.send(result, root, _RESULT)
    except BaseException as error:
        results.send((_sendable(error), traceback.format_exc()), root, _ERROR)


def _sendable(error: BaseException) -> BaseException:
    """Return the exception, or one that says what it was if it does not pickle."""
    try:
        MPI.pickle.loads(MPI.pickle.dumps(error))
    except BaseException:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
