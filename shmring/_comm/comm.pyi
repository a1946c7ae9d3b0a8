"""Types of Comm, the communicator."""

from collections.abc import Callable, Iterable
from os import PathLike
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex, TypeVar, overload

from .._bootstrap.fd_passing import LocalSockets
from .._bootstrap.host_map import Place
from .._bootstrap.world import World
from .._config.settings import Settings
from .._engine.engine import Engine
from .._engine.state import _Stats
from .._lifecycle.internode import InterNodeLinks
from .._system.segments import Mapping
from .allocation import Allocation
from .trace_file import Trace

_T = TypeVar("_T")

class _CommStats(_Stats):
    chosen_paths_of_messages: dict[int, dict[str, dict[int, str]]]

class Comm(Allocation):
    """A communicator: one rank's membership in a group of ranks, with the calls among them."""

    def __init__(
        self,
        engine: Engine | None = None,
        local_sockets: LocalSockets | None = None,
        segment: Mapping | None = None,
        fd: int = -1,
        settings: Settings | None = None,
        place: Place | LocalSockets | None = None,
        internode: InterNodeLinks | None = None,
        parent_ranks: tuple[int, ...] | None = None,
        epoch: int = 0,
    ) -> None: ...
    @property
    def epoch(self) -> int:
        """Number of calls of `shrink` and `grow` that led to this communicator."""

    @property
    def parent_ranks(self) -> tuple[int, ...] | None:
        """Each rank's number in the communicator that this group was made from; None for a world."""

    @property
    def rank(self) -> int:
        """This rank's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its host."""

    @property
    def local_size(self) -> int:
        """Number of ranks on this host, which share its memory."""

    @property
    def node(self) -> int:
        """This host's number, 0 to num_nodes - 1."""

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""

    def run_steps(
        self, function: Callable[..., _T], *arguments: Any, begun: bool = False, **keywords: Any
    ) -> _T:
        """Run function(*arguments, **keywords), which makes several calls of this communicator, as one
        call.
        """

    @overload
    def split(self, color: SupportsIndex, key: SupportsIndex = 0, *, timeout: float | None = None) -> Comm:
        """Collective: make a communicator for each color, and return the one of this rank's color."""
    @overload
    def split(self, color: None, key: SupportsIndex = 0, *, timeout: float | None = None) -> None:
        """Collective: make a communicator for each color, and return the one of this rank's color."""
    @overload
    def split(
        self, color: SupportsIndex | None, key: SupportsIndex = 0, *, timeout: float | None = None
    ) -> Comm | None:
        """Collective: make a communicator for each color, and return the one of this rank's color."""

    def group(self, ranks: Iterable[SupportsIndex], *, timeout: float | None = None) -> Comm | None:
        """Collective: make a communicator of the listed ranks, and return it on them; return None on other
        ranks.
        """

    def dup(self, *, timeout: float | None = None) -> Comm:
        """Collective: return another communicator of the same ranks, as `split(0)` does."""

    def stats(self) -> _CommStats:
        """Return counters of this rank since it joined, and properties of the machine, as a dict. Local."""

    def trace(self, path: str | PathLike[str]) -> Trace:
        """Record this rank's calls from now on, with their waits and their work, as one track for Perfetto.
        Local.
        """

    def _group_of_callers(self, ranks: tuple[int, ...], secret: bytes, share: Callable[[Any], Any]) -> Comm:
        """Return a communicator of some ranks, which alone call this. For libraries."""
    def _confirm_start(self, timeout_s: float, is_new: bool) -> None:
        """Collective over the ranks of a `grow`: by this barrier new ranks learn that old ranks use this
        communicator.
        """
    def _begin_own_trace(self) -> None:
        """Begin the trace that SHMRING_TRACE requests for this world, if it does."""
    def _begin_trace(self, path: str, is_automatic: bool = False) -> Trace:
        """Begin a trace. is_automatic: SHMRING_TRACE requests it, and a call of `trace` replaces it."""
    def abort(self, reason: str) -> None:
        """End the communicator: the current or next call of every rank raises `Aborted` with this reason.
        Local.
        """

    def shrink(self, *, timeout: float | None = None) -> Comm:
        """Collective over the surviving ranks: return a new communicator of them, in the order of their
        ranks.
        """

    def grow(
        self,
        count: SupportsIndex,
        invite: Callable[[World, int], object],
        *,
        address: str | None = None,
        timeout: float | None = None,
    ) -> Comm:
        """Collective: return a new communicator of these ranks and of `count` others, which join by
        `shmring.init`.
        """

    def close(self) -> None:
        """Leave the communicator. Local; ranks that still call it get RankFailed. A second close does
        nothing.
        """

    def _disown(self) -> None:
        """Close the descriptors in a forked child, without touching shared memory."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __del__(self) -> None: ...
    def __reduce__(self) -> NoReturn: ...
