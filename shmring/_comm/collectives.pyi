"""Collectives and Plan: what a communicator can call, as Python sees it."""

from collections.abc import Generator
from typing import Any, Generic, Literal, NoReturn, Protocol, SupportsIndex, TypeVar, overload

from numpy.typing import NDArray
from typing_extensions import Buffer

from .._arrays.operands import Memory
from .ops import Op

_Result = TypeVar("_Result")

class _ArrayInterface(Protocol):  # ml_dtypes' arrays
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class _DLPack(Protocol):  # torch, JAX; on the CPU
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

_Array = NDArray[Any] | Memory | Buffer | _ArrayInterface | _DLPack  # contiguous
_Algorithm = Literal[
    "auto",
    "direct",
    "ring",
    "bidirectional_ring",
    "halving_doubling",
    "tree",
    "double_tree",
    "master",
]
_Wire = Literal["native", "bf16", "fp16", "int8"]
_OpName = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor"]

_Kind = Literal[
    "all_reduce", "reduce", "reduce_scatter", "scan", "exscan",
    "broadcast", "scatter", "gather", "all_gather", "all_to_all", "barrier",
]  # fmt: skip

class Collectives:
    """What a communicator can call; with async_op=True in the background, as a Work."""

    wire: _Wire
    """How sums of `all_reduce` and `reduce` travel between hosts unless a call says otherwise."""

    linger_s: float
    """Seconds, 0 to 0.05, for which a call with async_op=True stays with its caller if others are late."""

    @overload
    def all_reduce(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Array | None = None,
        algorithm: _Algorithm | None = None,
        wire: _Wire | None = None,
        group_size: SupportsIndex | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> None:
        """Combine x of all ranks elementwise, for every rank: in place, or into `out`."""

    @overload
    def all_reduce(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Array | None = None,
        algorithm: _Algorithm | None = None,
        wire: _Wire | None = None,
        group_size: SupportsIndex | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[None]:
        """The same in the background."""

    @overload
    def reduce(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        root: SupportsIndex = 0,
        *,
        out: _Array | None = None,
        wire: _Wire | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> None:
        """Combine x of all ranks elementwise on the root: in its x, or into its `out`; others keep x."""

    @overload
    def reduce(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        root: SupportsIndex = 0,
        *,
        out: _Array | None = None,
        wire: _Wire | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[None]:
        """The same in the background."""

    @overload
    def scan(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> None:
        """Combine x of the ranks up to and with this one, in rank order."""

    @overload
    def scan(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[None]:
        """The same in the background."""

    @overload
    def exscan(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> None:
        """Combine x of the ranks before this one, in rank order; rank 0's stays as it is."""

    @overload
    def exscan(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[None]:
        """The same in the background."""

    @overload
    def reduce_scatter(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: Any = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Any:
        """Combine x of all ranks elementwise and return this rank's part of the result."""

    @overload
    def reduce_scatter(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: Any = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[Any]:
        """The same in the background."""

    @overload
    def broadcast(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> None:
        """root's x for every rank: in place, or into `out`."""

    @overload
    def broadcast(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[None]:
        """The same in the background."""

    @overload
    def scatter(
        self,
        x: _Array | None,
        root: SupportsIndex = 0,
        *,
        out: Any = None,
        like: _Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any:
        """Each rank's part of the root's x; returns it."""

    @overload
    def scatter(
        self,
        x: _Array | None,
        root: SupportsIndex = 0,
        *,
        out: Any = None,
        like: _Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[Any]:
        """The same in the background."""

    @overload
    def gather(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: Any = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's x on the root, which returns them as (size, *s); the others return None."""

    @overload
    def gather(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: Any = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[Any]:
        """The same in the background."""

    @overload
    def all_gather(
        self,
        x: _Array,
        *,
        out: Any = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Any:
        """Every rank's x on every rank: returns (size, *s) for x of shape s."""

    @overload
    def all_gather(
        self,
        x: _Array,
        *,
        out: Any = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[Any]:
        """The same in the background."""

    @overload
    def all_to_all(
        self, x: _Array, *, out: Any = None, async_op: Literal[False] = False, timeout: float | None = None
    ) -> Any:
        """Block j of rank i becomes block i of rank j: returns an array of x's shape."""

    @overload
    def all_to_all(
        self, x: _Array, *, out: Any = None, async_op: Literal[True], timeout: float | None = None
    ) -> Work[Any]:
        """The same in the background."""

    @overload
    def barrier(self, *, async_op: Literal[False] = False, timeout: float | None = None) -> None:
        """Return when every rank has called it."""

    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = None) -> Work[None]:
        """The same in the background."""

    def refuse(self, kind: _Kind) -> None:
        """For who wraps a communicator and finds an argument wrong before a collective is called."""

    def plan(self, kind: _Kind, *arguments: Any, **keywords: Any) -> Plan:
        """The call `kind` with its arguments checked once and its arrays pinned: a callable that runs it."""

class Plan:
    """A collective with its arguments checked and its arrays pinned; each call is the bare collective."""

    def __init__(
        self, comm: Collectives, kind: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    def __call__(self) -> Any:
        """Run the collective once; returns what the method would."""

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
