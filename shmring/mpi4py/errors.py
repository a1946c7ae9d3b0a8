"""Error classes and codes, and the exception that carries one."""

from __future__ import annotations

import builtins
import contextlib
import functools
import operator
import traceback
from collections.abc import Iterator
from typing import Any

from ..errors import Aborted, Closed, Error, OutOfMemory, RankFailed, Truncated

# The error classes in the order of their numbers, from 0, and what each means.
_CLASSES = {
    "SUCCESS": "no error",
    "ERR_BUFFER": "invalid buffer",
    "ERR_COUNT": "invalid count",
    "ERR_TYPE": "invalid datatype",
    "ERR_TAG": "invalid tag",
    "ERR_COMM": "invalid communicator",
    "ERR_RANK": "invalid rank",
    "ERR_ROOT": "invalid root",
    "ERR_GROUP": "invalid group",
    "ERR_OP": "invalid operation",
    "ERR_TOPOLOGY": "invalid topology",
    "ERR_DIMS": "invalid dimensions",
    "ERR_ARG": "invalid argument",
    "ERR_UNKNOWN": "unknown error",
    "ERR_TRUNCATE": "message truncated on receive",
    "ERR_OTHER": "other error",
    "ERR_INTERN": "internal error",
    "ERR_IN_STATUS": "error code is in the status",
    "ERR_PENDING": "pending request",
    "ERR_REQUEST": "invalid request",
    "ERR_ACCESS": "permission denied",
    "ERR_AMODE": "invalid access mode",
    "ERR_ASSERT": "invalid assertion",
    "ERR_BAD_FILE": "invalid file name",
    "ERR_BASE": "invalid base address",
    "ERR_CONVERSION": "data conversion failed",
    "ERR_DISP": "invalid displacement",
    "ERR_DUP_DATAREP": "data representation is defined already",
    "ERR_FILE_EXISTS": "file exists",
    "ERR_FILE_IN_USE": "file is in use",
    "ERR_FILE": "invalid file",
    "ERR_INFO": "invalid info",
    "ERR_INFO_KEY": "invalid key of an info",
    "ERR_INFO_NOKEY": "no such key in the info",
    "ERR_INFO_VALUE": "invalid value of an info",
    "ERR_IO": "input or output failed",
    "ERR_KEYVAL": "invalid attribute key",
    "ERR_LOCKTYPE": "invalid lock type",
    "ERR_NAME": "no such service name",
    "ERR_NOT_SAME": "arguments differ between ranks",
    "ERR_NO_MEM": "out of memory",
    "ERR_NO_SPACE": "not enough space",
    "ERR_NO_SUCH_FILE": "no such file",
    "ERR_PORT": "invalid port",
    "ERR_QUOTA": "quota exceeded",
    "ERR_READ_ONLY": "read-only file",
    "ERR_RMA_ATTACH": "memory cannot be attached",
    "ERR_RMA_CONFLICT": "conflicting accesses to a window",
    "ERR_RMA_FLAVOR": "wrong kind of window",
    "ERR_RMA_RANGE": "outside the memory of the window",
    "ERR_RMA_SHARED": "memory cannot be shared",
    "ERR_RMA_SYNC": "wrong synchronisation of a window",
    "ERR_SERVICE": "invalid service name",
    "ERR_SIZE": "invalid size",
    "ERR_SPAWN": "processes cannot be started",
    "ERR_UNSUPPORTED_DATAREP": "unsupported data representation",
    "ERR_UNSUPPORTED_OPERATION": "unsupported operation",
    "ERR_WIN": "invalid window",
    "ERR_SESSION": "invalid session",
    "ERR_PROC_ABORTED": "the communicator was aborted",
    "ERR_VALUE_TOO_LARGE": "value too large",
    "ERR_ERRHANDLER": "invalid error handler",
    "ERR_ABI": "the binary interface differs",
    "ERR_REVOKED": "the communicator was revoked",
    "ERR_PROC_FAILED": "a process has failed",
    "ERR_PROC_FAILED_PENDING": "a process has failed; the request is pending",
}
NUMBERS = {name: number for number, name in enumerate(_CLASSES)}
ERR_LASTCODE = 1000
ERR_ARG, ERR_COMM, ERR_COUNT, ERR_DIMS, ERR_GROUP, ERR_INFO, ERR_INFO_KEY, ERR_INFO_NOKEY = (
    NUMBERS["ERR_" + name]
    for name in ("ARG", "COMM", "COUNT", "DIMS", "GROUP", "INFO", "INFO_KEY", "INFO_NOKEY")
)
ERR_KEYVAL, ERR_OP, ERR_OTHER, ERR_RANK, ERR_REQUEST, ERR_ROOT, ERR_TAG, ERR_TOPOLOGY, ERR_TYPE = (
    NUMBERS["ERR_" + name]
    for name in ("KEYVAL", "OP", "OTHER", "RANK", "REQUEST", "ROOT", "TAG", "TOPOLOGY", "TYPE")
)
ERR_UNKNOWN, ERR_WIN, ERR_BUFFER, ERR_DISP, ERR_LOCKTYPE, ERR_SIZE, ERR_ERRHANDLER, ERR_SESSION, ERR_FILE = (
    NUMBERS["ERR_" + name]
    for name in ("UNKNOWN", "WIN", "BUFFER", "DISP", "LOCKTYPE", "SIZE", "ERRHANDLER", "SESSION", "FILE")
)
ERR_INFO_VALUE, ERR_RMA_RANGE, ERR_RMA_SYNC, ERR_TRUNCATE, ERR_IN_STATUS = (
    NUMBERS["ERR_" + name] for name in ("INFO_VALUE", "RMA_RANGE", "RMA_SYNC", "TRUNCATE", "IN_STATUS")
)

_texts = dict(enumerate(_CLASSES.values()))
_class_of: dict[int, int] = {}  # of the codes and classes that the program added
_next_code = ERR_LASTCODE


@functools.total_ordering
class Exception(RuntimeError):  # mpi4py's name
    """An error of MPI. It is comparable to the integers that are error codes."""

    def __init__(self, ierr: int = 0, /, reason: str | None = None) -> None:
        if ierr < 0:
            ierr = ERR_UNKNOWN
        super().__init__(ierr)
        self._code = int(ierr)
        self._reason = reason

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, int | Exception) and self._code == int(other))

    def __hash__(self) -> int:
        return hash(self._code)

    def __lt__(self, other: Any) -> bool:
        return self._code < int(other)

    def __bool__(self) -> bool:
        return self._code != 0

    def __int__(self) -> int:
        return self._code

    def __repr__(self) -> str:
        return f"MPI.Exception({self._code})"

    def __str__(self) -> str:
        return self.Get_error_string()

    def Get_error_code(self) -> int:
        """Return the error code."""
        return self._code

    def Get_error_class(self) -> int:
        """Return the error class."""
        return Get_error_class(self._code)

    def Get_error_string(self) -> str:
        """Return what happened, as a text."""
        if self._reason is None:
            return Get_error_string(self._code)
        return f"{Get_error_string(self._code)}: {self._reason}"

    error_code = property(Get_error_code)
    error_class = property(Get_error_class)
    error_string = property(Get_error_string)


Exception.__module__ = "shmring.mpi4py.MPI"


@contextlib.contextmanager
def from_functions() -> Iterator[None]:
    """Print the traceback of an exception in a function of the program, and raise its error class."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        raise Exception(error.Get_error_code()) from error
    except builtins.Exception as error:
        traceback.print_exc()
        raise Exception(ERR_OTHER) from error


class Translating:
    """A context manager: an error of shmring in its block becomes one of MPI, of a communicator or window."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Error):
            raise self.context.failure(None, error) from error


def code_of(error: Error) -> int:
    """Return the error class for an error of shmring."""
    classes: dict[type[Error], str] = {
        Truncated: "ERR_TRUNCATE",
        RankFailed: "ERR_PROC_FAILED",
        OutOfMemory: "ERR_NO_MEM",
        Aborted: "ERR_PROC_ABORTED",
        Closed: "ERR_COMM",
    }
    return next((NUMBERS[name] for kind, name in classes.items() if isinstance(error, kind)), ERR_OTHER)


def Get_error_class(errorcode: int) -> int:
    """Return the class of an error code."""
    if errorcode in _class_of:
        return _class_of[errorcode]
    return errorcode if 0 <= errorcode <= ERR_LASTCODE else ERR_UNKNOWN


def Get_error_string(errorcode: int) -> str:
    """Return the text of an error code."""
    return _texts.get(operator.index(errorcode), _texts[ERR_UNKNOWN])


def Add_error_class() -> int:
    """Return a new error class."""
    return _add(None)


def Add_error_code(errorclass: int) -> int:
    """Return a new error code of a class."""
    return _add(operator.index(errorclass))


def _add(errorclass: int | None) -> int:
    global _next_code
    _next_code += 1
    _class_of[_next_code] = _next_code if errorclass is None else errorclass
    _texts[_next_code] = ""
    return _next_code


def last_used_code() -> int:
    """Return the highest error code in use."""
    return max(_class_of, default=ERR_LASTCODE)


def Add_error_string(errorcode: int, string: str) -> None:
    """Give an added error code a text."""
    _check_added(errorcode)
    _texts[errorcode] = string


def Remove_error_string(errorcode: int) -> None:
    """Take the text from an added error code."""
    _check_added(errorcode)
    _texts[errorcode] = ""


def Remove_error_code(errorcode: int) -> None:
    """Remove an added error code, which must have no text."""
    _check_added(errorcode)
    if _texts[errorcode]:
        raise Exception(ERR_OTHER, f"error code {errorcode} has a text")
    del _class_of[errorcode], _texts[errorcode]


def Remove_error_class(errorclass: int) -> None:
    """Remove an added error class, which must have neither a code nor a text."""
    if any(found == errorclass and code != errorclass for code, found in _class_of.items()):
        raise Exception(ERR_OTHER, f"error class {errorclass} has codes")
    Remove_error_code(errorclass)


def _check_added(errorcode: int) -> None:
    if errorcode not in _class_of:
        raise Exception(ERR_OTHER, f"error code {errorcode} was not added by the program")


def refuse(what: str, instead: str) -> NotImplementedError:
    """Return the error for a feature that shmring does not have."""
    return NotImplementedError(f"shmring's MPI has no {what}: {instead}")
