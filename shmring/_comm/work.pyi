"""Work: a collective that runs in the background, as Python sees it."""

from collections.abc import Generator
from typing import Any, Generic, NoReturn, TypeVar

_Result = TypeVar("_Result")

class Work(Generic[_Result]):
    """A collective that runs in the background: what every collective returns with `async_op=True`."""

    def __init__(self, *args: object, **keywords: object) -> NoReturn: ...
    def wait(self, timeout: float | None = None) -> None:
        """Returns when the call is finished; TimeoutError, which harms nothing, after timeout seconds."""

    def done(self) -> bool:
        """Whether the call has come to its end, a good one or not."""

    def result(self, timeout: float | None = None) -> _Result:
        """What the call returns when it is not in the background; waits for it as `wait` does."""

    def fileno(self) -> int:
        """A descriptor that is readable from when the call is finished. It belongs to the Work."""

    def __await__(self) -> Generator[Any, None, _Result]: ...
    def __reduce__(self) -> NoReturn: ...
