"""Types of Collectives, the methods that a communicator inherits, and of Plan."""

from typing import Any, Literal, NoReturn, Protocol, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer, TypeVar

from .._arrays.operands import Memory
from .ops import Op
from .work import Work

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
_Scalar = TypeVar("_Scalar", bound=np.generic)
_Out = TypeVar("_Out", bound=_Array)
_Wire = Literal["native", "bf16", "fp16", "int8"]
_OpName = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor"]

_Kind = Literal[
    "all_reduce", "reduce", "reduce_scatter", "scan", "exscan",
    "broadcast", "scatter", "gather", "all_gather", "all_to_all", "barrier",
]  # fmt: skip

class Collectives:
    """The collectives of a communicator. `Comm` adds construction, shared arrays and closing."""
    @property
    def wire(self) -> _Wire:
        """The default of `wire` in `all_reduce` and `reduce`. All ranks must set the same."""
    @wire.setter
    def wire(self, name: _Wire) -> None: ...
    @property
    def linger_s(self) -> float:
        """The most seconds, 0 to 0.05, for which a call with async_op=True waits before it goes to the
        background.
        """
    @linger_s.setter
    def linger_s(self, seconds: float) -> None: ...
    @property
    def timeout_s(self) -> float:
        """The default of `timeout` in every call, in seconds. Calls under way keep theirs."""
    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None: ...
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
        """Combine x of all ranks elementwise. The result overwrites the array, or `out` if given."""
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
        """Combine x of all ranks elementwise. The result overwrites the array, or `out` if given."""
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
        """Combine x of all ranks elementwise. The result overwrites the array, or `out` if given."""
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
        """Combine x of all ranks elementwise. The result overwrites the array, or `out` if given."""
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
        async_op: bool,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[None] | None:
        """Combine x of all ranks elementwise. The result overwrites the array, or `out` if given."""
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
        """Combine x of all ranks elementwise. The result overwrites the root's array, or its `out` if
        given.
        """
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
        """Combine x of all ranks elementwise. The result overwrites the root's array, or its `out` if
        given.
        """
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
        """Combine x of all ranks elementwise. The result overwrites the root's array, or its `out` if
        given.
        """
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
        """Combine x of all ranks elementwise. The result overwrites the root's array, or its `out` if
        given.
        """
    @overload
    def reduce(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        root: SupportsIndex = 0,
        *,
        out: _Array | None = None,
        wire: _Wire | None = None,
        async_op: bool,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[None] | None:
        """Combine x of all ranks elementwise. The result overwrites the root's array, or its `out` if
        given.
        """
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
        """Combine x of ranks 0 to this rank elementwise. The result overwrites the array, or `out` if
        given.
        """
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
        """Combine x of ranks 0 to this rank elementwise. The result overwrites the array, or `out` if
        given.
        """
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
        """Combine x of ranks 0 to this rank elementwise. The result overwrites the array, or `out` if
        given.
        """
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
        """Combine x of ranks 0 to this rank elementwise. The result overwrites the array, or `out` if
        given.
        """
    @overload
    def scan(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Array | None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> Work[None] | None:
        """Combine x of ranks 0 to this rank elementwise. The result overwrites the array, or `out` if
        given.
        """
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
        """Combine x of the ranks below this one elementwise. The result overwrites the array, or `out` if
        given.
        """
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
        """Combine x of the ranks below this one elementwise. The result overwrites the array, or `out` if
        given.
        """
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
        """Combine x of the ranks below this one elementwise. The result overwrites the array, or `out` if
        given.
        """
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
        """Combine x of the ranks below this one elementwise. The result overwrites the array, or `out` if
        given.
        """
    @overload
    def exscan(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Array | None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> Work[None] | None:
        """Combine x of the ranks below this one elementwise. The result overwrites the array, or `out` if
        given.
        """
    @overload
    def reduce_scatter(
        self,
        x: NDArray[_Scalar],
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> NDArray[_Scalar]:
        """Combine x of all ranks elementwise and return this rank's part of the result."""
    @overload
    def reduce_scatter(
        self,
        x: NDArray[_Scalar],
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[NDArray[_Scalar]]:
        """Combine x of all ranks elementwise and return this rank's part of the result."""
    @overload
    def reduce_scatter(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> NDArray[Any]:
        """Combine x of all ranks elementwise and return this rank's part of the result."""
    @overload
    def reduce_scatter(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[NDArray[Any]]:
        """Combine x of all ranks elementwise and return this rank's part of the result."""
    @overload
    def reduce_scatter(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Out,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> _Out:
        """Combine x of all ranks elementwise and return this rank's part of the result."""
    @overload
    def reduce_scatter(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Out,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[_Out]:
        """Combine x of all ranks elementwise and return this rank's part of the result."""
    @overload
    def reduce_scatter(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: None = None,
        async_op: bool,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> NDArray[Any] | Work[NDArray[Any]]:
        """Combine x of all ranks elementwise and return this rank's part of the result."""
    @overload
    def reduce_scatter(
        self,
        x: _Array,
        op: Op | _OpName = "sum",
        *,
        out: _Out,
        async_op: bool,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> _Out | Work[_Out]:
        """Combine x of all ranks elementwise and return this rank's part of the result."""
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
        """Copy the root's x to every rank, into its x or into its `out`."""
    @overload
    def broadcast(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Array | None = None,
        async_op: bool,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[None] | None:
        """Copy the root's x to every rank, into its x or into its `out`."""
    @overload
    def scatter(
        self,
        x: NDArray[_Scalar] | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: NDArray[_Scalar] | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> NDArray[_Scalar]:
        """Return this rank's part of the root's x."""
    @overload
    def scatter(
        self,
        x: NDArray[_Scalar] | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: NDArray[_Scalar] | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[NDArray[_Scalar]]:
        """Return this rank's part of the root's x."""
    @overload
    def scatter(
        self,
        x: _Array | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: _Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> NDArray[Any]:
        """Return this rank's part of the root's x."""
    @overload
    def scatter(
        self,
        x: _Array | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: _Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[NDArray[Any]]:
        """Return this rank's part of the root's x."""
    @overload
    def scatter(
        self,
        x: _Array | None = None,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        like: _Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> _Out:
        """Return this rank's part of the root's x."""
    @overload
    def scatter(
        self,
        x: _Array | None = None,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        like: _Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[_Out]:
        """Return this rank's part of the root's x."""
    @overload
    def scatter(
        self,
        x: _Array | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: _Array | None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> NDArray[Any] | Work[NDArray[Any]]:
        """Return this rank's part of the root's x."""
    @overload
    def scatter(
        self,
        x: _Array | None = None,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        like: _Array | None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> _Out | Work[_Out]:
        """Return this rank's part of the root's x."""
    @overload
    def gather(
        self,
        x: NDArray[_Scalar],
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> NDArray[_Scalar] | None:
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other
        ranks.
        """
    @overload
    def gather(
        self,
        x: NDArray[_Scalar],
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[NDArray[_Scalar] | None]:
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other
        ranks.
        """
    @overload
    def gather(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> NDArray[Any] | None:
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other
        ranks.
        """
    @overload
    def gather(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[NDArray[Any] | None]:
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other
        ranks.
        """
    @overload
    def gather(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> _Out | None:
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other
        ranks.
        """
    @overload
    def gather(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[_Out | None]:
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other
        ranks.
        """
    @overload
    def gather(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> NDArray[Any] | Work[NDArray[Any] | None] | None:
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other
        ranks.
        """
    @overload
    def gather(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        async_op: bool,
        timeout: float | None = None,
    ) -> _Out | Work[_Out | None] | None:
        """Return every rank's x on the root, as an array of shape (size, *s); return None on the other
        ranks.
        """
    @overload
    def all_gather(
        self,
        x: NDArray[_Scalar],
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> NDArray[_Scalar]:
        """Return every rank's x on every rank, as an array of shape (size, *s)."""
    @overload
    def all_gather(
        self,
        x: NDArray[_Scalar],
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[NDArray[_Scalar]]:
        """Return every rank's x on every rank, as an array of shape (size, *s)."""
    @overload
    def all_gather(
        self,
        x: _Array,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> NDArray[Any]:
        """Return every rank's x on every rank, as an array of shape (size, *s)."""
    @overload
    def all_gather(
        self,
        x: _Array,
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[NDArray[Any]]:
        """Return every rank's x on every rank, as an array of shape (size, *s)."""
    @overload
    def all_gather(
        self,
        x: _Array,
        *,
        out: _Out,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> _Out:
        """Return every rank's x on every rank, as an array of shape (size, *s)."""
    @overload
    def all_gather(
        self,
        x: _Array,
        *,
        out: _Out,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[_Out]:
        """Return every rank's x on every rank, as an array of shape (size, *s)."""
    @overload
    def all_gather(
        self,
        x: _Array,
        *,
        out: None = None,
        async_op: bool,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> NDArray[Any] | Work[NDArray[Any]]:
        """Return every rank's x on every rank, as an array of shape (size, *s)."""
    @overload
    def all_gather(
        self,
        x: _Array,
        *,
        out: _Out,
        async_op: bool,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> _Out | Work[_Out]:
        """Return every rank's x on every rank, as an array of shape (size, *s)."""
    @overload
    def all_to_all(
        self,
        x: NDArray[_Scalar],
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> NDArray[_Scalar]:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""
    @overload
    def all_to_all(
        self, x: NDArray[_Scalar], *, out: None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Work[NDArray[_Scalar]]:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""
    @overload
    def all_to_all(
        self, x: _Array, *, out: None = None, async_op: Literal[False] = False, timeout: float | None = None
    ) -> NDArray[Any]:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""
    @overload
    def all_to_all(
        self, x: _Array, *, out: None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Work[NDArray[Any]]:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""
    @overload
    def all_to_all(
        self, x: _Array, *, out: _Out, async_op: Literal[False] = False, timeout: float | None = None
    ) -> _Out:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""
    @overload
    def all_to_all(
        self, x: _Array, *, out: _Out, async_op: Literal[True], timeout: float | None = None
    ) -> Work[_Out]:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""
    @overload
    def all_to_all(
        self, x: _Array, *, out: None = None, async_op: bool, timeout: float | None = None
    ) -> NDArray[Any] | Work[NDArray[Any]]:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""
    @overload
    def all_to_all(
        self, x: _Array, *, out: _Out, async_op: bool, timeout: float | None = None
    ) -> _Out | Work[_Out]:
        """Send block j of x to rank j, and return an array of x's shape whose block i comes from rank i."""
    @overload
    def barrier(self, *, async_op: Literal[False] = False, timeout: float | None = None) -> None:
        """Block until every rank has called it."""
    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = None) -> Work[None]:
        """Block until every rank has called it."""
    @overload
    def barrier(self, *, async_op: bool, timeout: float | None = None) -> Work[None] | None:
        """Block until every rank has called it."""
    def refuse(self, kind: _Kind) -> None:
        """Refuse the collective `kind`, in place of calling it, since an argument is wrong."""
    def plan(self, kind: _Kind, *arguments: Any, **keywords: Any) -> Plan:
        """Return a `Plan` of the collective `kind`, whose arguments are checked once and whose arrays are
        pinned.
        """

class Plan:
    """A collective whose arguments are checked and whose arrays are pinned. Each call runs the collective."""

    def __init__(
        self, comm: Collectives, kind: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    def __call__(self) -> Any:
        """Run the collective once, with the values that its arrays hold now."""
