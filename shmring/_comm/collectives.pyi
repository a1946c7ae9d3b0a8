"""Types of Collectives, the methods that a communicator inherits, and of Plan."""

from collections.abc import Generator
from typing import Any, Generic, Literal, NoReturn, Protocol, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from .._arrays.operands import Memory
from .ops import Op

_Result = TypeVar("_Result")
_Number = TypeVar("_Number", bound=int | float | complex | np.generic)

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
    """The collectives of a communicator. With async_op=True they run in the background and return a Work."""

    wire: _Wire
    """The default of `wire` in `all_reduce` and `reduce`. All ranks must set the same."""

    linger_s: float
    """Seconds, 0 to 0.05, for which a call with async_op=True waits before it goes to the background."""

    @overload
    def all_reduce(  # type: ignore[overload-overlap]
        self,
        x: _Number,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        algorithm: _Algorithm | None = None,
        wire: _Wire | None = None,
        group_size: SupportsIndex | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> _Number:
        """Reduce a number and return the result."""

    @overload
    def all_reduce(  # type: ignore[overload-overlap]
        self,
        x: _Number,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        algorithm: _Algorithm | None = None,
        wire: _Wire | None = None,
        group_size: SupportsIndex | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[_Number]:
        """Run in the background and return a Work."""

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
        """Combine x of all ranks elementwise and store the result on every rank, in x or in `out`."""

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
        """Run in the background and return a Work."""

    @overload
    def reduce(  # type: ignore[overload-overlap]
        self,
        x: _Number,
        op: Op | _OpName = "sum",
        root: SupportsIndex = 0,
        *,
        out: None = None,
        wire: _Wire | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> _Number | None:
        """Reduce a number and return the result."""

    @overload
    def reduce(  # type: ignore[overload-overlap]
        self,
        x: _Number,
        op: Op | _OpName = "sum",
        root: SupportsIndex = 0,
        *,
        out: None = None,
        wire: _Wire | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[_Number | None]:
        """Run in the background and return a Work."""

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
        """Combine x of all ranks elementwise and store the result on the root, in its x or `out`."""

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
        """Run in the background and return a Work."""

    @overload
    def scan(  # type: ignore[overload-overlap]
        self,
        x: _Number,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> _Number:
        """Reduce a number and return the result."""

    @overload
    def scan(  # type: ignore[overload-overlap]
        self,
        x: _Number,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[_Number]:
        """Run in the background and return a Work."""

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
        """Combine x of ranks 0 to this rank elementwise, in rank order, into x or `out`."""

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
        """Run in the background and return a Work."""

    @overload
    def exscan(  # type: ignore[overload-overlap]
        self,
        x: _Number,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> _Number | None:
        """Reduce a number and return the result."""

    @overload
    def exscan(  # type: ignore[overload-overlap]
        self,
        x: _Number,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[_Number | None]:
        """Run in the background and return a Work."""

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
        """Combine x of the ranks below this one elementwise, in rank order. Nothing is stored on rank 0."""

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
        """Run in the background and return a Work."""

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
        """Run in the background and return a Work."""

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
        """Copy the root's x to every rank, into its x or into its `out`."""

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
        """Run in the background and return a Work."""

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
        """Return this rank's part of the root's x."""

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
        """Run in the background and return a Work."""

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
        """Return every rank's x on the root, as an array of shape (size, *s); None on other ranks."""

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
        """Run in the background and return a Work."""

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
        """Return every rank's x on every rank, as an array of shape (size, *s)."""

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
        """Run in the background and return a Work."""

    @overload
    def all_to_all(
        self, x: _Array, *, out: Any = None, async_op: Literal[False] = False, timeout: float | None = None
    ) -> Any:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""

    @overload
    def all_to_all(
        self, x: _Array, *, out: Any = None, async_op: Literal[True], timeout: float | None = None
    ) -> Work[Any]:
        """Run in the background and return a Work."""

    @overload
    def barrier(self, *, async_op: Literal[False] = False, timeout: float | None = None) -> None:
        """Block until every rank has called it."""

    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = None) -> Work[None]:
        """Run in the background and return a Work."""

    def refuse(self, kind: _Kind) -> None:
        """Refuse the collective `kind`, in place of calling it, since an argument is wrong."""

    def plan(self, kind: _Kind, *arguments: Any, **keywords: Any) -> Plan:
        """Return a `Plan` of the collective `kind`: its arguments are checked and its arrays pinned."""

class Plan:
    """A collective whose arguments are checked and whose arrays are pinned. Each call runs the collective."""

    def __init__(
        self, comm: Collectives, kind: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    def __call__(self) -> Any:
        """Run the collective once and return its result, or a `Work` if it was made with async_op=True."""

class Work(Generic[_Result]):
    """A collective that runs in the background. Every collective returns one with async_op=True."""

    def __init__(self, *args: object, **keywords: object) -> NoReturn: ...
    def wait(self, timeout: float | None = None) -> None:
        """Block until the call is finished. Raise TimeoutError after timeout seconds; the call goes on."""

    def done(self) -> bool:
        """Return whether the call is finished, successfully or not."""

    def result(self, timeout: float | None = None) -> _Result:
        """Wait as `wait` does, and return what the call returns without async_op=True."""

    def fileno(self) -> int:
        """Return a file descriptor, owned by the Work, that becomes readable when the call is finished."""

    def __await__(self) -> Generator[Any, None, _Result]: ...
    def __reduce__(self) -> NoReturn: ...
