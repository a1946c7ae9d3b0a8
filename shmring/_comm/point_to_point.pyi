"""Types of the calls of point-to-point messages, which a communicator inherits."""

from typing import Any, Final, Literal, SupportsIndex, final, overload

from .collectives import _Array
from .endpoint import Status, Transfer
from .object_collectives import ObjectCollectives

ANY_SOURCE: Final = -1
ANY_TAG: Final = -1

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
