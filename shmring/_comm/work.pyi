"""Types of Work, a collective in the background."""

from collections.abc import Generator
from types import GenericAlias
from typing import Any, Generic, NoReturn

from typing_extensions import TypeVar

_Result = TypeVar("_Result", default=Any, covariant=True)

class Work(Generic[_Result]):
    """A collective that runs in the background. Every collective returns one with async_op=True."""

    def __init__(self, *args: object, **keywords: object) -> None: ...
    def wait(self, timeout: float | None = None) -> None:
        """Block until the call is finished."""

    def done(self) -> bool:
        """Return whether the call is finished, successfully or not."""

    def result(self, timeout: float | None = None) -> _Result:
        """Wait as `wait` does, and return what the call returns without async_op=True."""

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the call is finished, as for `select`."""

    def __await__(self) -> Generator[Any, None, _Result]: ...
    def __reduce__(self) -> NoReturn: ...
    @classmethod
    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
