"""Point-to-point messages: what goes from one rank to one other, as Python sees it."""

from collections.abc import Generator
from typing import Any, Literal, SupportsIndex, final, overload

from .collectives import _Array
from .endpoint import Endpoint, PendingMessage

ANY_SOURCE: int
ANY_TAG: int

@final
class Status:
    """A received or waiting message: `source`, `tag`, `count` (elements), `nbytes`, `dtype`."""

    @property
    def source(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str | None: ...

@final
class Transfer(PendingMessage):
    """A message that has been begun by `isend` or `irecv`. It goes on in the background."""

    def __init__(self, *args: object, **keywords: object) -> None: ...
    def done(self) -> bool:
        """Whether it is complete; carries it on, and does not wait."""

    def wait(self, timeout: float | None = None) -> Status | None:
        """Wait until it is complete: None for a send, the `Status` for a receive, or the error of `recv`."""

    def result(self, timeout: float | None = None) -> Status | None:
        """What `wait` returns, as a `Work` has it."""

    def _wait_no_longer(self, waited_s: float) -> Status | None:
        """End a `wait` without a timeout that its caller has made in parts."""

    def __await__(self) -> Generator[Any, None, Status | None]:
        """For asyncio."""

class Messages(Endpoint):
    """What goes from one rank to one other."""

    def send(
        self, x: _Array, dest: SupportsIndex, tag: SupportsIndex = 0, *, timeout: float | None = None
    ) -> None:
        """Send x to rank `dest`; returns when x may be used again."""

    def recv(
        self,
        x: _Array,
        source: SupportsIndex = ...,
        tag: SupportsIndex = ...,
        *,
        timeout: float | None = None,
    ) -> Status:
        """Receive a message into x."""

    def sendrecv(
        self,
        x: _Array,
        dest: SupportsIndex,
        out: _Array,
        source: SupportsIndex = ...,
        sendtag: SupportsIndex = 0,
        recvtag: SupportsIndex = ...,
        *,
        timeout: float | None = None,
    ) -> Status:
        """Send x to `dest` and receive into `out` at once, in whatever order."""

    def isend(self, x: _Array, dest: SupportsIndex, tag: SupportsIndex = 0) -> Transfer:
        """Begin to send x, which must not change until the `Transfer` is complete."""

    def irecv(self, x: _Array, source: SupportsIndex = ..., tag: SupportsIndex = ...) -> Transfer:
        """Begin to receive into x."""

    def probe(
        self, source: SupportsIndex = ..., tag: SupportsIndex = ..., *, timeout: float | None = None
    ) -> Status:
        """The `Status` of the message that `recv` would receive, once there is one."""

    def iprobe(self, source: SupportsIndex = ..., tag: SupportsIndex = ...) -> Status | None:
        """`probe` that does not wait: None when there is no such message yet."""

    def send_object(
        self, item: Any, dest: SupportsIndex, tag: SupportsIndex = 0, *, timeout: float | None = None
    ) -> None:
        """Send anything that pickles; arrays inside travel beside the pickle."""

    @overload
    def recv_object(
        self,
        source: SupportsIndex = ...,
        tag: SupportsIndex = ...,
        *,
        with_status: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any:
        """Receive what `send_object` sent: a copy of it, or (copy, `Status`) with_status."""

    @overload
    def recv_object(
        self,
        source: SupportsIndex = ...,
        tag: SupportsIndex = ...,
        *,
        with_status: Literal[True],
        timeout: float | None = None,
    ) -> tuple[Any, Status]: ...
