"""Requests: calls that were begun, and those that are kept to be begun again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import errors, handles
from .calls import BaseRequest, Call, Pending, wait_for_all
from .constants import INTEGERS
from .messages import Data, Status, handle
from .refused import refuse_methods

_UNDEFINED = INTEGERS["UNDEFINED"]
_MOST_PAUSE_S = 0.001  # between two polls of several requests


class Request(handles.Named, BaseRequest):
    """A call that was begun."""

    _null_error = errors.ERR_REQUEST

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether the call is complete. The request stays as it is."""
        if not self._is_complete():
            return False
        if status is not None:
            if self._ref is None or self._ref.is_idle:
                _clear(status)
            else:
                self._ref.report(status)
        return True

    get_status = Get_status

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """Block until one of the calls is complete, and return its index; UNDEFINED if none is active."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """As `Waitany`; return also the object of the call."""
        index, _, result = _wait_for(lambda: cls.testany(requests, status), lambda found: bool(found[1]))
        return index, result

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """Return the index of a complete call, or UNDEFINED, and whether there is one, or none is active."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """As `Testany`; return also the object of the call."""
        index, flag = cls.Get_status_any(requests)
        if index == _UNDEFINED:
            if flag and status is not None:
                _clear(status)
            return index, flag, None
        return index, True, requests[index]._complete(status)

    @classmethod
    def Get_status_any(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """As `Testany`. The requests stay as they are."""
        is_any_active = False
        for index, request in enumerate(requests):
            if request._ref is None or request._ref.is_idle:
                continue
            is_any_active = True
            if request.Get_status(status):
                return index, True
        if not is_any_active and status is not None:
            _clear(status)
        return _UNDEFINED, not is_any_active

    get_status_any = Get_status_any

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Block until all calls are complete, and return True."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[Any]:
        """Block until all calls are complete, and return their objects.

        If messages were too long, the others are complete, and ERR_IN_STATUS is raised.
        """
        wait_for_all(requests)  # first: an exception such as a KeyboardInterrupt loses no object
        found = _statuses_for(requests, statuses)
        results, truncated = [], {}
        for index, (request, status) in enumerate(zip(requests, found, strict=True)):
            try:
                results.append(request._complete(status))
            except errors.Exception as error:
                if error.Get_error_class() != errors.ERR_TRUNCATE:
                    raise
                truncated[index] = error
                if status is not None:
                    status.error = errors.ERR_TRUNCATE
        _store(statuses, found)
        if truncated:
            first = next(iter(truncated.values()))
            raise errors.Exception(
                errors.ERR_IN_STATUS, f"requests {list(truncated)} failed, the first one by: {first}"
            ) from first
        return results

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Return whether all calls are complete; if they are, this is the same as `Waitall`."""
        return cls.Get_status_all(requests) and cls.Waitall(requests, statuses)

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """As `Testall`; return also the objects of the calls."""
        return (True, cls.waitall(requests, statuses)) if cls.Get_status_all(requests) else (False, None)

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Return whether all calls are complete. The requests stay as they are."""
        found = _statuses_for(requests, statuses)
        complete = [request._is_complete() for request in requests]  # polls all of them
        if not all(complete):
            return False
        for request, status in zip(requests, found, strict=True):
            request.Get_status(status)
        _store(statuses, found)
        return True

    get_status_all = Get_status_all

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        """Block until some calls are complete, and return their indices; None if none is active."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """As `Waitsome`; return also the objects of the calls."""
        return _wait_for(
            lambda: cls.testsome(requests, statuses), lambda found: found[0] is None or bool(found[0])
        )

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        """Return the indices of the calls that are complete; None if none is active."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """As `Testsome`; return also the objects of the calls."""
        indices = cls.Get_status_some(requests)
        if indices is None:
            return None, None
        return indices, cls.waitall([requests[index] for index in indices], statuses)

    @classmethod
    def Get_status_some(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> list[int] | None:
        """As `Testsome`. The requests stay as they are."""
        active = [
            i for i, request in enumerate(requests) if request._ref is not None and not request._ref.is_idle
        ]
        if not active:
            return None
        indices = [index for index in active if requests[index]._is_complete()]
        if statuses is not None and indices:
            cls.Get_status_all([requests[index] for index in indices], statuses)
        return indices

    get_status_some = Get_status_some

    def Cancel(self) -> None:
        """Cancel the call, if it is a receive that no message has matched; else do nothing."""
        pending = self._handled()
        if not pending.is_idle:
            pending.cancel()

    cancel = Cancel

    def Free(self) -> None:
        """Give the request up. The call goes on.

        Raise an Exception if it receives items with gaps and is not complete: a request puts them in place.
        """
        pending = self._handled()
        if not pending.is_idle and _restores(pending.call) and not pending.poll():
            raise errors.Exception(
                errors.ERR_REQUEST, "a receive of items with gaps is under way: Wait for it before Free"
            )
        self._ref = None
        if isinstance(pending.call, _GeneralCall):
            pending.call.give_up()


class Prequest(Request):
    """A call that is kept, to be begun many times."""

    @classmethod
    def _check_ref(cls, ref: Any) -> None:
        if ref is not None and not ref.is_persistent:
            raise TypeError("the request is not persistent")

    def Start(self) -> None:
        """Begin the call."""
        self._start()

    @classmethod
    def Startall(cls, requests: list[Prequest]) -> None:
        """Begin several calls: the messages in this order, the collectives in which they were made.

        MPI lets each rank start collectives in another order, and shmring wants one order on all ranks.
        """
        for request in sorted(requests, key=_number_of):
            request.Start()


refuse_methods(
    Prequest,
    "Pready Pready_range Pready_list Parrived",
    "partitioned messages",
    "send each part as a message of its own",
)


class _Promise:
    """The work of a generalised request: it is done when the program says so."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        self.event.wait()


class _GeneralCall(Call):
    """The functions of the program for a generalised request."""

    def __init__(self, query_fn: Any, free_fn: Any, cancel_fn: Any, args: Any, kwargs: Any) -> None:
        self.query_fn, self.free_fn, self.cancel_fn = query_fn, free_fn, cancel_fn
        self.once = threading.Lock()  # the thread that takes it calls free_fn
        self.args, self.kwargs = args or (), kwargs or {}
        self.promise, self.result = _Promise(), None
        self.is_given_up = False
        self.empty = Status()

    def begin(self) -> _Promise:
        return self.promise

    def cancel(self, work: Any) -> bool:
        if self.cancel_fn is not None:
            with errors.from_functions():
                self.cancel_fn(self.promise.done(), *self.args, **self.kwargs)
        return False

    def conclude(self) -> Any:
        if self.query_fn is not None:
            with errors.from_functions():
                self.query_fn(self.empty, *self.args, **self.kwargs)
        return self.result

    def release(self) -> None:
        """Call the function that frees what the request holds, unless it was called before."""
        if self.free_fn is not None and self.once.acquire(blocking=False):
            with errors.from_functions():
                self.free_fn(*self.args, **self.kwargs)

    def give_up(self) -> None:
        """Release the request, which was freed, as soon as it is complete."""
        self.is_given_up = True
        if self.promise.done():
            self.release()

    def complete(self, obj: Any) -> None:
        """Mark the request as complete, with the object that `wait` returns."""
        self.result = obj
        self.promise.event.set()
        if self.is_given_up:
            self.release()


class Grequest(Request):
    """A request that the program completes."""

    _freed: Any = None  # what the handle referred to before `Free`: MPI lets a program complete it then

    @classmethod
    def _check_ref(cls, ref: Any) -> None:
        if ref is not None and not isinstance(ref.call, _GeneralCall):
            raise TypeError("the request is not one that the program completes")

    @classmethod
    def Start(
        cls,
        query_fn: Callable[..., None] | None = None,
        free_fn: Callable[..., None] | None = None,
        cancel_fn: Callable[..., None] | None = None,
        args: Any = None,
        kwargs: Any = None,
    ) -> Grequest:
        """Return a new request.

        free_fn is called once the request is complete and was freed, or waited for.
        """
        pending = Pending()
        pending.call = _GeneralCall(query_fn, free_fn, cancel_fn, args, kwargs)
        pending.start()
        return handle(cls, pending)

    def Free(self) -> None:
        """Give the request up. `Complete` can still be called."""
        self._freed = self._ref
        super().Free()

    def Complete(self) -> None:
        """Mark the request as complete."""
        self.complete()

    def complete(self, obj: Any = None) -> None:
        """Mark the request as complete, with an object that `wait` returns."""
        pending = self._freed if self._ref is None else self._ref
        if pending is None:
            raise errors.Exception(errors.ERR_REQUEST)
        pending.call.complete(obj)


def _restores(call: Any) -> bool:
    """Return whether items with gaps are copied to their places when the call is complete."""
    return isinstance(getattr(call.finish, "__self__", None), Data)


def _number_of(request: Request) -> int:
    return 0 if request._ref is None else int(request._ref.number)


def _clear(status: Status) -> None:
    status.source, status.tag, status.error = INTEGERS["ANY_SOURCE"], INTEGERS["ANY_TAG"], 0
    status.count, status.cancelled = 0, False


def _statuses_for(requests: Sequence[Request], statuses: Any) -> list[Status | None]:
    if statuses is None:
        return [None] * len(requests)
    return [*statuses[: len(requests)], *(Status() for _ in range(len(requests) - len(statuses)))]


def _store(statuses: Any, found: Any) -> None:
    if isinstance(statuses, list):
        statuses[: len(found)] = found


def _wait_for(attempt: Callable[[], Any], is_over: Callable[[Any], bool]) -> Any:
    pause_s = 0.0
    while not is_over(found := attempt()):
        time.sleep(pause_s)
        pause_s = min(_MOST_PAUSE_S, 2 * pause_s + 1e-6)
    return found


REQUEST_NULL = Request()
handles.predefine({"REQUEST_NULL": REQUEST_NULL})
