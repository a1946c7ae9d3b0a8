"""Types of point-to-point messages: Messages, the methods that a communicator inherits, and Transfer."""

from collections.abc import Generator
from types import GenericAlias
from typing import Any, Final, Generic, Literal, SupportsIndex, final, overload

from typing_extensions import TypeVar

from .collectives import _Array
from .endpoint import PendingMessage
from .object_collectives import ObjectCollectives

ANY_SOURCE: Final = -1
ANY_TAG: Final = -1
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
class Transfer(PendingMessage, Generic[_Received]):
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

@final
class ProbedMessage:
    """A message that `mprobe` or `improbe` has taken. Only the methods of this object can receive it."""

    def __init__(self, *args: object, **keywords: object) -> None: ...
    @property
    def status(self) -> Status:
        """The `Status` of the message."""

    def recv(self, x: _Array, *, timeout: float | None = None) -> Status:
        """Receive the message into x and return its `Status`."""

    def irecv(self, x: _Array) -> Transfer[Status]:
        """Begin to receive the message into x and return a `Transfer`."""

    def recv_object(self, *, timeout: float | None = None) -> Any:
        """Receive an object that was sent by `send_object`, and return a copy of it."""

class Messages(ObjectCollectives):
    """Point-to-point messages of a communicator. Messages of one tag between two ranks are received in
    sending order.
    """

    def send(
        self,
        x: _Array,
        dest: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        matched: bool = False,
        context: Literal[0, 1] = 0,
        timeout: float | None = None,
    ) -> None:
        """Send x to rank `dest`. Return when x may be changed: it is then received, or in the ring to
        `dest`.
        """

    def recv(
        self,
        x: _Array,
        source: SupportsIndex = ANY_SOURCE,
        tag: SupportsIndex = ANY_TAG,
        *,
        context: Literal[0, 1] = 0,
        timeout: float | None = None,
    ) -> Status:
        """Receive a message into x and return its `Status`: `.source`, `.tag`, `.count` (elements),
        `.nbytes`.
        """

    def sendrecv(
        self,
        x: _Array,
        dest: SupportsIndex,
        out: _Array,
        source: SupportsIndex = ANY_SOURCE,
        sendtag: SupportsIndex = 0,
        recvtag: SupportsIndex = ANY_TAG,
        *,
        context: Literal[0, 1] = 0,
        timeout: float | None = None,
    ) -> Status:
        """Send x to `dest`, receive a message into `out` at the same time, and return the `Status` of the
        latter.
        """

    def isend(
        self,
        x: _Array,
        dest: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        matched: bool = False,
        context: Literal[0, 1] = 0,
    ) -> Transfer[None]:
        """Begin to send x and return a `Transfer`. Do not change x until it is complete."""

    def irecv(
        self,
        x: _Array,
        source: SupportsIndex = ANY_SOURCE,
        tag: SupportsIndex = ANY_TAG,
        *,
        context: Literal[0, 1] = 0,
    ) -> Transfer[Status]:
        """Begin to receive into x and return a `Transfer`. Do not touch x until it is complete."""

    def probe(
        self,
        source: SupportsIndex = ANY_SOURCE,
        tag: SupportsIndex = ANY_TAG,
        *,
        context: Literal[0, 1] = 0,
        timeout: float | None = None,
    ) -> Status:
        """Block until a message can be received, and return its `Status`. The message stays for `recv`."""

    def iprobe(
        self, source: SupportsIndex = ANY_SOURCE, tag: SupportsIndex = ANY_TAG, *, context: Literal[0, 1] = 0
    ) -> Status | None:
        """Return the `Status` of a message as `probe` does, or None if there is no such message yet."""

    def mprobe(
        self,
        source: SupportsIndex = ANY_SOURCE,
        tag: SupportsIndex = ANY_TAG,
        *,
        context: Literal[0, 1] = 0,
        timeout: float | None = None,
    ) -> ProbedMessage:
        """Block until a message can be received, take it, and return it as a `ProbedMessage`."""

    def improbe(
        self, source: SupportsIndex = ANY_SOURCE, tag: SupportsIndex = ANY_TAG, *, context: Literal[0, 1] = 0
    ) -> ProbedMessage | None:
        """Return a `ProbedMessage` as `mprobe` does, or None if there is no such message yet."""

    def send_object(
        self,
        item: Any,
        dest: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        matched: bool = False,
        context: Literal[0, 1] = 0,
        timeout: float | None = None,
    ) -> None:
        """Send any object that can be pickled. Arrays in it are sent outside the pickle."""

    @overload
    def recv_object(
        self,
        source: SupportsIndex = ANY_SOURCE,
        tag: SupportsIndex = ANY_TAG,
        *,
        with_status: Literal[False] = False,
        context: Literal[0, 1] = 0,
        timeout: float | None = None,
    ) -> Any:
        """Receive an object that was sent by `send_object`, and return a copy of it."""

    @overload
    def recv_object(
        self,
        source: SupportsIndex = ANY_SOURCE,
        tag: SupportsIndex = ANY_TAG,
        *,
        with_status: Literal[True],
        context: Literal[0, 1] = 0,
        timeout: float | None = None,
    ) -> tuple[Any, Status]:
        """Receive an object that was sent by `send_object`, and return a copy of it."""
