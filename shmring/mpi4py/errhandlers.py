"""Error handlers, which run when a call fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import errors, handles
from .messages import Handle, handle, integer_of

_MOST_FUNCTIONS = 32
_functions: set[Any] = set()


class Handler:
    """An action on an error: one of MPI's, or a function of the program."""

    def __init__(self, constant: str | None, function: Callable[..., Any] | None = None) -> None:
        self.constant, self.function = constant, function


class Errhandler(handles.Named, Handle):
    """An error handler, which runs when a call fails."""

    _null_error = errors.ERR_ERRHANDLER

    def Free(self) -> None:
        """Free the error handler; those of MPI stay."""
        _functions.discard(self._handled())
        self._let_go()


_PREDEFINED = ("ERRORS_RETURN", "ERRORS_ABORT", "ERRORS_ARE_FATAL")
ERRHANDLERS: dict[str, Errhandler] = {
    "ERRHANDLER_NULL": Errhandler(),
    **{name: handle(Errhandler, Handler(name)) for name in _PREDEFINED},
}
handles.predefine(ERRHANDLERS)
_POLICIES = {
    "exception": "ERRORS_RETURN",
    "abort": "ERRORS_ABORT",
    "fatal": "ERRORS_ARE_FATAL",
    "default": "ERRORS_ARE_FATAL",  # that of MPI
}


class Policy:
    """The error handler of new communicators and windows, which `mpi4py.rc.errors` sets."""

    handler: Handler = ERRHANDLERS["ERRORS_RETURN"]._ref

    @classmethod
    def set(cls, name: str) -> None:
        """Set it by the name of a policy of mpi4py."""
        if name not in _POLICIES:
            raise ValueError(f"mpi4py.rc.errors is {name!r}; it is one of {', '.join(_POLICIES)}")
        cls.handler = ERRHANDLERS[_POLICIES[name]]._ref


class Handling:
    """Methods of what has an error handler: `_ref.errhandler` is a Handler."""

    __slots__ = ()
    _handled: Callable[[], Any]  # of `Named`

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[..., Any]) -> Errhandler:
        """Return the error handler that calls errhandler_fn(handle, code)."""
        handles.check_function(errhandler_fn)
        if len(_functions) >= _MOST_FUNCTIONS:
            raise RuntimeError(f"a program may have {_MOST_FUNCTIONS} error handlers at a time: free some")
        handler = Handler(None, errhandler_fn)
        _functions.add(handler)
        return handle(Errhandler, handler)

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler."""
        return handle(Errhandler, self._handled().errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler."""
        if not isinstance(errhandler, Errhandler):
            raise TypeError(f"an Errhandler is needed, not {type(errhandler).__name__}")
        if errhandler._ref is None:
            raise errors.Exception(errors.ERR_ARG, "ERRHANDLER_NULL")
        self._handled().errhandler = errhandler._ref

    def Call_errhandler(self, errorcode: int) -> None:
        """Call the error handler."""
        run(self._handled(), self, integer_of(errorcode))


def run(what: Any, its_handle: Any, code: int) -> None:
    """Do what the error handler does: nothing, a function's call, or the end of all ranks."""
    handler: Handler = what.errhandler
    if handler.function is not None:
        handler.function(its_handle, code)
    elif handler.constant != "ERRORS_RETURN":
        what.end_job(code)
