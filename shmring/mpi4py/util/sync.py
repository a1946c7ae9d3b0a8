"""Sequential execution, counters, mutexes, condition variables and semaphores among ranks.

Each object has a communicator of its own, and an array that the ranks share, so it needs one host. A rank
that waits uses no CPU. It gets an error if the rank for which it waits dies.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from ...errors import Timeout
from .. import errors
from ..messages import handle
from ..window_state import reports

MPI: Any = import_module("shmring.mpi4py.MPI")
_AT_ONCE_S = 1e-9  # shmring's timeouts are positive
_NOTHING = (None, MPI.BYTE)  # a message without bytes
_HEAD, _LENGTH, _PLACES = 0, 1, 2  # elements of a condition's array: a circular queue
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="_Entered")

__all__ = ["Condition", "Counter", "Mutex", "Semaphore", "Sequential"]


class Sequential:
    """A context manager: the ranks run its block one after another, in their order."""

    def __init__(self, comm: Any, tag: int = 0) -> None:
        self.comm, self.tag = comm, int(tag)

    def __enter__(self) -> Sequential:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Wait until the previous rank has ended its part."""
        if self.comm.Get_rank() > 0:
            self.comm.Recv(_NOTHING, self.comm.Get_rank() - 1, self.tag)

    def end(self) -> None:
        """Let the next rank begin its part."""
        if self.comm.Get_rank() < self.comm.Get_size() - 1:
            self.comm.Send(_NOTHING, self.comm.Get_rank() + 1, self.tag)


class _Shared:
    """An array and locks that the ranks of a communicator share; collective."""

    def __init__(self, context: Any, count: int, dtype: Any, nlocks: int) -> None:
        if context.comm.num_nodes > 1:
            raise errors.refuse(
                "mpi4py.util.sync over several hosts", "use comm.Split_type(MPI.COMM_TYPE_SHARED)"
            )
        with errors.Translating(context):
            self._ref = context.child(lambda comm: comm.dup(), "sync")
            self._array = self._ref.comm.shared(count, dtype, locks=nlocks)

    def _channel(self) -> Any:
        """Return a handle of the object's own communicator."""
        return handle(MPI.Intracomm, self._ref)

    def _check_open(self) -> None:
        if self._ref is None:
            raise RuntimeError(f"this {type(self).__name__} has been freed")

    @reports
    def free(self) -> None:
        """Free the object; collective. A second call does nothing."""
        if self._ref is not None:
            context = self._ref
            context.comm.barrier()
            self._ref = self._array = None
            context.comm.close()


class _Entered:
    """An object that a block acquires at its begin, and releases at its end."""

    def __enter__(self: _Self) -> _Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire it."""
        raise NotImplementedError

    def release(self) -> None:
        """Release it."""
        raise NotImplementedError


class Counter(_Shared):
    """An iterator of values, each of which one rank of all gets."""

    def __init__(
        self,
        start: int = 0,
        step: int = 1,
        *,
        typecode: str = "i",
        comm: Any = MPI.COMM_SELF,
        info: Any = MPI.INFO_NULL,
        root: int = 0,
    ) -> None:
        root = comm._check_root(root)
        super().__init__(comm._comm(), 1, MPI.Datatype.fromcode(typecode)._ref.dtype, 0)
        self._step = step
        if comm.Get_rank() == root:
            self._array[0] = start
        self._ref.comm.barrier()

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> Any:
        return self.next()

    @reports
    def next(self, incr: int | None = None) -> Any:
        """Return the value, and add the increment, which is the step by default."""
        self._check_open()
        return self._array.fetch_and_add(0, self._step if incr is None else incr).item()


class Mutex(_Shared, _Entered):
    """A lock that one rank holds at a time."""

    def __init__(
        self, *, recursive: bool = False, comm: Any = MPI.COMM_SELF, info: Any = MPI.INFO_NULL
    ) -> None:
        super().__init__(comm._comm(), 0, np.uint8, 1)
        self._recursive, self._count = bool(recursive), 0

    @reports
    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the mutex, and return True. Without `blocking`, return False if another rank holds it."""
        self._check_open()
        if self._count and not self._recursive:
            raise RuntimeError("this rank holds the mutex already")
        if not self._count:
            try:
                self._array.lock(0, timeout=None if blocking else _AT_ONCE_S).__enter__()
            except Timeout:
                if blocking:
                    raise
                return False
        self._count += 1
        return True

    @reports
    def release(self) -> None:
        """Release the mutex."""
        self._check_held()
        self._count -= 1
        if not self._count:
            self._array.lock(0).__exit__(None, None, None)

    def locked(self) -> bool:
        """Return whether this rank holds the mutex."""
        return self.count() > 0

    def count(self) -> int:
        """Return how many times this rank has acquired the mutex."""
        self._check_open()
        return self._count

    def free(self) -> None:
        """Release the mutex, if this rank holds it, and free it; collective."""
        self._leave()
        super().free()

    def _leave(self) -> int:
        """Release the mutex as often as this rank has acquired it, and return how often that was."""
        count, self._count = self._count, min(self._count, 1)
        if count:
            self.release()
        return count

    def _come_back(self, count: int) -> None:
        """Acquire the mutex as often as `_leave` has released it."""
        self.acquire()
        self._count = count

    def _check_held(self) -> None:
        self._check_open()
        if not self._count:
            raise RuntimeError("this rank does not hold the mutex")


class Condition(_Shared, _Entered):
    """A condition variable: ranks wait until another one notifies them.

    The array is a circular queue of the ranks that wait, which the mutex protects. `notify` sends messages.
    """

    def __init__(
        self,
        mutex: Mutex | None = None,
        *,
        recursive: bool = True,
        comm: Any = MPI.COMM_SELF,
        info: Any = MPI.INFO_NULL,
    ) -> None:
        self._has_own_mutex = mutex is None
        self._mutex = Mutex(recursive=recursive, comm=comm) if mutex is None else mutex
        self._mutex._check_open()
        context = self._mutex._ref
        super().__init__(context, _PLACES + context.size, np.int64, 0)

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the mutex, and return True. Without `blocking`, return False if another rank holds it."""
        self._check_open()
        return self._mutex.acquire(blocking)

    def release(self) -> None:
        """Release the mutex."""
        self._check_open()
        self._mutex.release()

    def locked(self) -> bool:
        """Return whether this rank holds the mutex."""
        self._check_open()
        return self._mutex.locked()

    @reports
    def wait(self) -> bool:
        """Release the mutex, wait until another rank calls `notify`, acquire the mutex, and return True."""
        self._check_held()
        queue, places = self._array, self._array[_PLACES:]
        places[(queue[_HEAD] + queue[_LENGTH]) % len(places)] = self._ref.rank
        queue[_LENGTH] += 1
        count = self._mutex._leave()
        try:
            self._channel().Recv(_NOTHING)
        except MPI.Exception:  # the communicator has ended
            raise
        except BaseException:
            self._mutex._come_back(count)
            self._leave_queue()
            raise
        self._mutex._come_back(count)
        return True

    def _leave_queue(self) -> None:
        """Let this rank wait no longer. If it was notified already, notify another rank in its place."""
        queue, places = self._array, self._array[_PLACES:]
        order = (int(queue[_HEAD]) + np.arange(int(queue[_LENGTH]))) % len(places)
        left = places[order][places[order] != self._ref.rank]
        if len(left) < len(order):
            places[order[: len(left)]] = left
            queue[_LENGTH] = len(left)
        else:
            self._channel().Recv(_NOTHING)
            self.notify()

    def wait_for(self, predicate: Callable[[], _Result]) -> _Result:
        """Wait until the predicate is true, and return its value."""
        self._check_held()
        result = predicate()
        while not result:
            self.wait()
            result = predicate()
        return result

    @reports
    def notify(self, n: int = 1) -> int:
        """Notify at most `n` ranks that wait, and return their number."""
        self._check_held()
        queue, places = self._array, self._array[_PLACES:]
        number = min(max(n, 0), int(queue[_LENGTH]))
        for _ in range(number):
            rank = int(places[queue[_HEAD]])
            queue[_HEAD] = (queue[_HEAD] + 1) % len(places)
            queue[_LENGTH] -= 1
            self._channel().Send(_NOTHING, rank)
        return number

    def notify_all(self) -> int:
        """Notify all ranks that wait, and return their number."""
        self._check_held()
        return self.notify(len(self._array))

    def free(self) -> None:
        """Release the mutex, if this rank holds it, and free the condition, and its own mutex; collective."""
        self._mutex._leave()
        if self._has_own_mutex:
            self._mutex.free()
        super().free()

    def _check_held(self) -> None:
        self._check_open()
        self._mutex._check_held()


class Semaphore(_Entered):
    """A counter of what can be acquired. A rank waits while it is 0."""

    def __init__(
        self, value: int = 1, *, bounded: bool = True, comm: Any = MPI.COMM_SELF, info: Any = MPI.INFO_NULL
    ) -> None:
        if value < 0:
            raise ValueError(f"the value of a semaphore is {value}; it must not be negative")
        self._bounded, self._bound = bool(bounded), value
        self._counter = Counter(value, comm=comm)
        self._condition = Condition(recursive=False, comm=comm)

    def acquire(self, blocking: bool = True) -> bool:
        """Subtract 1 and return True; if the value is 0, wait, or return False if it is not blocking."""
        with self._condition:
            while self._counter.next(0) == 0:
                if not blocking:
                    return False
                self._condition.wait()
            self._counter.next(-1)
            return True

    def release(self, n: int = 1) -> None:
        """Add `n`, and notify as many ranks that wait."""
        if n < 1:
            raise ValueError(f"{n} is added to a semaphore; it must be 1 or more")
        with self._condition:
            if self._bounded and self._counter.next(0) + n > self._bound:
                raise ValueError(f"the value of this semaphore is {self._bound} at most")
            self._counter.next(n)
            self._condition.notify(n)

    def free(self) -> None:
        """Free the semaphore; collective."""
        self._condition.free()
        self._counter.free()
