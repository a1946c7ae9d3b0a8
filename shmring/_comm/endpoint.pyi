"""Types of the messages of a communicator: what came, and what is under way."""

from collections.abc import Generator
from types import GenericAlias
from typing import Any, Generic, final

from typing_extensions import TypeVar

_Received = TypeVar(
    "_Received", default=Status | None, covariant=True
)  # what waiting returns: None for a send

@final
class Status:
    """Properties of a received or waiting message. `recv` and `probe` return it."""

    @property
    def source(self) -> int:
        """The rank that sent it."""

    @property
    def tag(self) -> int:
        """The tag that it was sent with."""

    @property
    def count(self) -> int:
        """Number of elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""

    @property
    def dtype(self) -> str | None:
        """Name of the dtype; None for one that cannot be reduced, such as a structure."""

def new_status(source: int, tag: int, nbytes: int, kind: int) -> Status:
    """Return a status, as its pickle does."""

@final
class Transfer(Generic[_Received]):
    """A message that `isend` or `irecv` has begun. Calls that send or receive advance it, else the
    background does.
    """

    def __init__(self, *args: object, **keywords: object) -> None: ...
    def done(self) -> bool:
        """Advance the transfer without blocking, and return whether it is complete."""

    def wait(self, timeout: float | None = None) -> _Received:
        """Block until the transfer is complete."""

    def result(self, timeout: float | None = None) -> _Received:
        """Return what `wait` returns. `Work` has a method of the same name."""

    def cancel(self) -> bool:
        """Withdraw a receive that has not matched a message, and return whether it is withdrawn."""

    def _check_waited(self, waited_s: float) -> None:
        """Raise as `wait` does after the communicator's timeout, if `waited_s` has reached it."""

    def _wait_no_longer(self, waited_s: float) -> _Received:
        """Wait without a timeout, for a caller that has already waited `waited_s` seconds in parts."""

    def __await__(self) -> Generator[Any, None, _Received]: ...
    @classmethod
    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...

class Endpoint:
    """The posted messages of one communicator. They never wait for a collective."""
