"""The executors: on the other ranks of a communicator, or in a thread if there are none."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, Self

from .workers import MPI, Manager, Task, comm_workers, serve

_numbers = itertools.count(1)
_shared: list[Manager | None] = []  # the manager of `python -m mpi4py.futures`; None for one rank


class MPIPoolExecutor(Executor):
    """An executor whose tasks run on the workers of `python -m mpi4py.futures`."""

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        if max_workers is not None and max_workers <= 0:
            raise ValueError(f"max_workers is {max_workers}; it must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if not _shared:
            raise NotImplementedError(
                "shmring's MPI spawns no processes: run the program by `-m mpi4py.futures` on several ranks, "
                "as in shmrun --mpi4py -n 4 -m mpi4py.futures script.py, or use MPICommExecutor"
            )
        self._begin(_shared[-1], initializer, tuple(initargs))

    def _begin(
        self, manager: Manager | None, initializer: Callable[..., Any] | None, initargs: tuple[Any, ...]
    ) -> None:
        self._is_shut = False
        self._number = next(_numbers)
        self._manager = manager
        self._thread = None
        if manager is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(
                1, initializer=initializer, initargs=initargs
            )
        else:
            manager.begin(self._number, initializer, initargs)

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return 0 if self._is_shut else 1 if self._manager is None else self._manager.count

    def bootup(self, wait: bool = True) -> Self:
        """Return this executor: its workers run already."""
        if self._is_shut:
            raise RuntimeError("the executor has been shut down")
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Carry out `fn(*args, **kwargs)` on a worker, and return the future of its result."""
        if self._is_shut:
            raise RuntimeError("cannot submit a task: the executor has been shut down")
        if self._manager is None:
            assert self._thread is not None
            return self._thread.submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        self._manager.submit(Task(future, (fn, args, kwargs), self._number))
        return future

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        unordered: bool = False,
    ) -> Iterator[Any]:
        """Call `fn` with the items of the iterables on the workers, and yield the results."""
        calls = zip(*iterables, strict=False)
        return self.starmap(fn, calls, timeout, chunksize, buffersize, unordered)

    def starmap(
        self,
        fn: Callable[..., Any],
        iterable: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        unordered: bool = False,
    ) -> Iterator[Any]:
        """Call `fn(*arguments)` for the arguments of the iterable on the workers, and yield the results."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or >= 1.")
        chunks = iter(_chunks(iterable, chunksize))
        first = [self.submit(_call_each, fn, chunk) for chunk in itertools.islice(chunks, buffersize)]
        until = None if timeout is None else time.monotonic() + timeout
        results = _unordered if unordered else _ordered
        return results(
            first, lambda: [self.submit(_call_each, fn, c) for c in itertools.islice(chunks, 1)], until
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks, and wait for those that were submitted."""
        self._is_shut = True
        if self._thread is not None:
            self._thread.shutdown(wait, cancel_futures=cancel_futures)
        elif self._manager is not None:
            if cancel_futures:
                self._manager.cancel(self._number)
            if wait:
                self._manager.wait_for(self._number)


def _chunks(iterable: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    items = iter(iterable)
    while chunk := tuple(itertools.islice(items, size)):
        yield chunk


def _call_each(function: Callable[..., Any], chunk: tuple[Any, ...]) -> list[Any]:
    return [function(*arguments) for arguments in chunk]


def _left_s(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def _ordered(futures: list[Future[Any]], more: Callable[[], Any], until: float | None) -> Iterator[Any]:
    try:
        futures.reverse()
        while futures:
            results = futures[-1].result(_left_s(until))
            futures.pop()
            futures[:0] = more()
            yield from results
    finally:
        for future in futures:
            future.cancel()


def _unordered(futures: list[Future[Any]], more: Callable[[], Any], until: float | None) -> Iterator[Any]:
    left = set(futures)
    try:
        while left:
            kind = concurrent.futures.FIRST_COMPLETED
            done, left = concurrent.futures.wait(left, _left_s(until), kind)
            if not done:
                raise concurrent.futures.TimeoutError(f"{len(left)} tasks are unfinished")
            for future in done:
                left.update(more())
                yield from future.result()
    finally:
        for future in left:
            future.cancel()


class ProcessPoolExecutor(MPIPoolExecutor):
    """Another name of MPIPoolExecutor."""


class ThreadPoolExecutor(MPIPoolExecutor):
    """An executor with threads of this process."""

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        self._begin(None, None, ())
        self._thread = concurrent.futures.ThreadPoolExecutor(
            max_workers, initializer=initializer, initargs=tuple(initargs)
        )


class _CommExecutor(MPIPoolExecutor):
    """The executor of an MPICommExecutor."""

    def __init__(
        self,
        manager: Manager | None,
        initializer: Callable[..., Any] | None = None,
        initargs: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        self._begin(manager, initializer, tuple(initargs))


class MPICommExecutor:
    """A context: an executor on rank `root`; None on the other ranks, which carry out its tasks."""

    def __init__(self, comm: Any = None, root: int = 0, **options: Any) -> None:
        self._comm = MPI.COMM_WORLD if comm is None else comm
        if self._comm.Is_inter():
            raise ValueError("MPICommExecutor needs an intracommunicator")
        if not 0 <= root < self._comm.Get_size():
            raise ValueError(f"root is {root}; it must be a rank of the communicator")
        self._root, self._options = root, options
        self._executor: _CommExecutor | None = None
        self._manager: Manager | None = None
        self._is_entered = False

    def __enter__(self) -> MPIPoolExecutor | None:
        """Return the executor on rank `root`; on the others carry out tasks, and return None."""
        if self._is_entered:
            raise RuntimeError("the executor is in use already: __enter__")
        self._is_entered = True
        if self._comm.Get_rank() != self._root:
            serve(self._comm, self._root)
            return None
        if self._comm.Get_size() > 1:
            self._manager = Manager(self._comm, self._root)
        self._executor = _CommExecutor(self._manager, **self._options)
        return self._executor

    def __exit__(self, *error: object) -> None:
        """Wait for all tasks; the other ranks return from `__enter__`."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        self._is_entered = False


def share(manager: Manager | None) -> None:
    """Let MPIPoolExecutor use the workers of this manager, or a thread if it is None."""
    _shared.append(manager)


def get_comm_workers() -> Any:
    """Return the communicator of the workers, in a task."""
    if not comm_workers:
        if MPI.COMM_WORLD.Get_size() == 1 or threading.current_thread() is not threading.main_thread():
            return MPI.COMM_SELF
        raise RuntimeError("this process is not a worker: call get_comm_workers in a task")
    return comm_workers[-1]
