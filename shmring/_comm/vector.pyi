"""Types of VectorCollectives, the collectives whose pieces may differ in the length of dimension 0."""

from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex, TypeVar, overload

from numpy.typing import NDArray

from .collectives import Collectives, _Array, _Out, _Scalar
from .work import Work

_Outs = TypeVar("_Outs", bound=Sequence[_Array])

class VectorCollectives(Collectives):
    """The collectives whose pieces may differ in the length of dimension 0."""
    @overload
    def all_gather_v(
        self,
        x: NDArray[_Scalar],
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[NDArray[_Scalar]]:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""
    @overload
    def all_gather_v(
        self, x: NDArray[_Scalar], *, out: None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Work[list[NDArray[_Scalar]]]:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""
    @overload
    def all_gather_v(
        self, x: _Array, *, out: None = None, async_op: Literal[False] = False, timeout: float | None = None
    ) -> list[NDArray[Any]]:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""
    @overload
    def all_gather_v(
        self, x: _Array, *, out: None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Work[list[NDArray[Any]]]:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""
    @overload
    def all_gather_v(
        self, x: _Array, *, out: _Outs, async_op: Literal[False] = False, timeout: float | None = None
    ) -> _Outs:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""
    @overload
    def all_gather_v(
        self, x: _Array, *, out: _Outs, async_op: Literal[True], timeout: float | None = None
    ) -> Work[_Outs]:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""
    @overload
    def all_gather_v(
        self,
        x: _Array,
        *,
        out: None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> list[NDArray[Any]] | Work[list[NDArray[Any]]]:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""
    @overload
    def all_gather_v(
        self, x: _Array, *, out: _Outs, async_op: bool, timeout: float | None = None
    ) -> _Outs | Work[_Outs]:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""
    @overload
    def gather_v(
        self,
        x: NDArray[_Scalar],
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[NDArray[_Scalar]] | None:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""
    @overload
    def gather_v(
        self,
        x: NDArray[_Scalar],
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[list[NDArray[_Scalar]] | None]:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""
    @overload
    def gather_v(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[NDArray[Any]] | None:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""
    @overload
    def gather_v(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[list[NDArray[Any]] | None]:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""
    @overload
    def gather_v(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Outs,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> _Outs | None:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""
    @overload
    def gather_v(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Outs,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[_Outs | None]:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""
    @overload
    def gather_v(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> list[NDArray[Any]] | Work[list[NDArray[Any]] | None] | None:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""
    @overload
    def gather_v(
        self,
        x: _Array,
        root: SupportsIndex = 0,
        *,
        out: _Outs,
        async_op: bool,
        timeout: float | None = None,
    ) -> _Outs | Work[_Outs | None] | None:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""
    @overload
    def scatter_v(
        self,
        xs: Sequence[NDArray[_Scalar]] | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: NDArray[_Scalar] | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> NDArray[_Scalar]:
        """Return the root's xs[rank]."""
    @overload
    def scatter_v(
        self,
        xs: Sequence[NDArray[_Scalar]] | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: NDArray[_Scalar] | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[NDArray[_Scalar]]:
        """Return the root's xs[rank]."""
    @overload
    def scatter_v(
        self,
        xs: Sequence[_Array] | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: _Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> NDArray[Any]:
        """Return the root's xs[rank]."""
    @overload
    def scatter_v(
        self,
        xs: Sequence[_Array] | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: _Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[NDArray[Any]]:
        """Return the root's xs[rank]."""
    @overload
    def scatter_v(
        self,
        xs: Sequence[_Array] | None = None,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        like: _Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> _Out:
        """Return the root's xs[rank]."""
    @overload
    def scatter_v(
        self,
        xs: Sequence[_Array] | None = None,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        like: _Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[_Out]:
        """Return the root's xs[rank]."""
    @overload
    def scatter_v(
        self,
        xs: Sequence[_Array] | None = None,
        root: SupportsIndex = 0,
        *,
        out: None = None,
        like: _Array | None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> NDArray[Any] | Work[NDArray[Any]]:
        """Return the root's xs[rank]."""
    @overload
    def scatter_v(
        self,
        xs: Sequence[_Array] | None = None,
        root: SupportsIndex = 0,
        *,
        out: _Out,
        like: _Array | None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> _Out | Work[_Out]:
        """Return the root's xs[rank]."""
    @overload
    def all_to_all_v(
        self,
        xs: Sequence[NDArray[_Scalar]],
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[NDArray[_Scalar]]:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
    @overload
    def all_to_all_v(
        self,
        xs: Sequence[NDArray[_Scalar]],
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[list[NDArray[_Scalar]]]:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
    @overload
    def all_to_all_v(
        self,
        xs: Sequence[_Array],
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[NDArray[Any]]:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
    @overload
    def all_to_all_v(
        self, xs: Sequence[_Array], *, out: None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Work[list[NDArray[Any]]]:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
    @overload
    def all_to_all_v(
        self,
        xs: Sequence[_Array],
        *,
        out: _Outs,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> _Outs:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
    @overload
    def all_to_all_v(
        self, xs: Sequence[_Array], *, out: _Outs, async_op: Literal[True], timeout: float | None = None
    ) -> Work[_Outs]:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
    @overload
    def all_to_all_v(
        self,
        xs: Sequence[_Array],
        *,
        out: None = None,
        async_op: bool,
        timeout: float | None = None,
    ) -> list[NDArray[Any]] | Work[list[NDArray[Any]]]:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
    @overload
    def all_to_all_v(
        self, xs: Sequence[_Array], *, out: _Outs, async_op: bool, timeout: float | None = None
    ) -> _Outs | Work[_Outs]:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
