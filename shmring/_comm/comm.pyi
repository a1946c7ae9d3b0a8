"""Comm: the communicator as Python sees it."""

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._arrays.allocator import Adoption
from .._arrays.operands import Memory
from .._arrays.shared_array import SharedArray
from .._bootstrap.fd_passing import Links
from .._bootstrap.node_map import Place
from .._config.settings import Settings
from .._engine.engine import Engine
from .._engine.state import _Stats
from .._lifecycle.internode import InterNodeLinks
from .._system.segments import Mapping
from .point_to_point import Messages
from .trace_file import Trace

_T = TypeVar("_T")
_Scalar = TypeVar("_Scalar", bound=np.generic)
_Shape = SupportsIndex | Sequence[SupportsIndex]

class Comm(Messages):
    """One rank's place in a group of ranks, and the collectives between them."""

    def __init__(
        self,
        engine: Engine,
        links: Links,
        segment: Mapping,
        fd: int,
        settings: Settings,
        place: Place | Links,
        internode: InterNodeLinks | None = None,
        parent_ranks: tuple[int, ...] | None = None,
        epoch: int = 0,
    ) -> None: ...
    @property
    def epoch(self) -> int:
        """How often a communicator of these ranks has become one of fewer, by `shrink`."""

    @property
    def parent_ranks(self) -> tuple[int, ...] | None:
        """By rank, its number in the communicator that this group was made of; None for a world."""

    @property
    def rank(self) -> int:
        """This rank's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its host."""

    @property
    def local_size(self) -> int:
        """How many ranks share this host's memory."""

    @property
    def node(self) -> int:
        """This host's number, 0 to num_nodes - 1."""

    @property
    def num_nodes(self) -> int:
        """How many hosts there are."""

    def run_steps(
        self, function: Callable[..., _T], *arguments: Any, begun: bool = False, **keywords: Any
    ) -> _T:
        """Run function(...), which makes several calls of this communicator that are one to its caller."""

    def split(
        self, color: SupportsIndex | None, key: SupportsIndex = 0, *, timeout: float | None = None
    ) -> Comm | None:
        """Collective: a communicator for each color, its ranks ordered by key and then by rank."""

    def group(self, ranks: Iterable[SupportsIndex], *, timeout: float | None = None) -> Comm | None:
        """Collective: a communicator of the ranks in the list, which is the same on all; None elsewhere."""

    def dup(self, *, timeout: float | None = None) -> Comm:
        """Collective: another communicator of the same ranks."""

    @overload
    def empty(self, shape: _Shape, *, timeout: float | None = None) -> NDArray[np.float64]:
        """Collective: an array in memory that every rank of the host maps; collectives on it copy nothing."""

    @overload
    def empty(
        self, shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar], *, timeout: float | None = None
    ) -> NDArray[_Scalar]: ...
    @overload
    def empty(self, shape: _Shape, dtype: DTypeLike, *, timeout: float | None = None) -> NDArray[Any]: ...
    @overload
    def zeros(self, shape: _Shape, *, timeout: float | None = None) -> NDArray[np.float64]:
        """Collective: `empty`, with the promise that it holds zeros."""

    @overload
    def zeros(
        self, shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar], *, timeout: float | None = None
    ) -> NDArray[_Scalar]: ...
    @overload
    def zeros(self, shape: _Shape, dtype: DTypeLike, *, timeout: float | None = None) -> NDArray[Any]: ...
    @overload
    def full(
        self,
        shape: _Shape,
        fill_value: Any,
        dtype: type[_Scalar] | np.dtype[_Scalar],
        *,
        timeout: float | None = None,
    ) -> NDArray[_Scalar]:
        """Collective: `empty`, filled with `fill_value`; its dtype unless one is given."""

    @overload
    def full(
        self, shape: _Shape, fill_value: Any, dtype: DTypeLike | None = None, *, timeout: float | None = None
    ) -> NDArray[Any]: ...
    @overload
    def copy_of(self, a: NDArray[_Scalar], *, timeout: float | None = None) -> NDArray[_Scalar]:
        """Collective: an `empty` of a's shape and dtype that holds a copy of it."""

    @overload
    def copy_of(self, a: ArrayLike, *, timeout: float | None = None) -> NDArray[Any]: ...
    def adopt(self, x: Memory, *, timeout: float | None = None) -> Adoption:
        """Collective: an array of another library becomes one that all ranks map, where it lies."""

    def shared(
        self,
        shape: _Shape,
        dtype: DTypeLike = "float64",
        *,
        locks: SupportsIndex = 0,
        timeout: float | None = None,
    ) -> SharedArray:
        """Collective: one array, zeros at first, that all ranks of the host see."""

    def broadcast_object(
        self, item: Any = None, root: SupportsIndex = 0, *, timeout: float | None = None
    ) -> Any:
        """root's object, for every rank."""

    def all_gather_object(self, item: Any, *, timeout: float | None = None) -> list[Any]:
        """Every rank's object on every rank: a list by rank of copies."""

    def gather_object(
        self, item: Any, root: SupportsIndex = 0, *, timeout: float | None = None
    ) -> list[Any] | None:
        """Every rank's object on the root, which returns a list by rank; the others return None."""

    def scatter_object(
        self,
        items: Sequence[Any] | None = None,
        root: SupportsIndex = 0,
        *,
        timeout: float | None = None,
    ) -> Any:
        """One of the root's objects for each rank."""

    def stats(self) -> _Stats:
        """Counters of this rank since it joined, and what the engine knows of the machine."""

    def trace(self, path: str | PathLike[str]) -> Trace:
        """Note what this rank does from now on, for Perfetto: one track a rank."""

    def _trace_automatically(self, path: str) -> None: ...
    def abort(self, reason: str) -> None:
        """Give up: every rank's present or next call raises `Aborted` with this reason."""

    def shrink(self, *, timeout: float | None = None) -> Comm:
        """Collective over the ranks that are left when the communicator is over: a new one of them."""

    def close(self) -> None:
        """Leave. Local; messages that were sent still come, ranks that still call it get RankFailed."""

    def _disown(self) -> None:
        """In a forked child: descriptors go, shared memory stays untouched."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __del__(self) -> None: ...
    def __reduce__(self) -> NoReturn: ...
