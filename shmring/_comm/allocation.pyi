"""Types of Allocation, the arrays in memory that every rank of the host maps."""

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._arrays.allocator import Adoption
from .._arrays.operands import Arena, Memory
from .._arrays.shared_array import SharedArray
from .point_to_point import Messages

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Shape = SupportsIndex | Sequence[SupportsIndex]

class Allocation(Messages):
    """The arrays of a communicator, in memory that every rank of the host maps."""

    @overload
    def empty(self, shape: _Shape, *, timeout: float | None = None) -> NDArray[np.float64]:
        """Collective: return an array in memory that every rank of the host maps, so collectives need not
        copy it.
        """

    @overload
    def empty(
        self, shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar], *, timeout: float | None = None
    ) -> NDArray[_Scalar]:
        """Collective: return an array in memory that every rank of the host maps, so collectives need not
        copy it.
        """
    @overload
    def empty(self, shape: _Shape, dtype: DTypeLike, *, timeout: float | None = None) -> NDArray[Any]:
        """Collective: return an array in memory that every rank of the host maps, so collectives need not
        copy it.
        """
    @overload
    def zeros(self, shape: _Shape, *, timeout: float | None = None) -> NDArray[np.float64]:
        """Collective: return an array as `empty` does. It is guaranteed to hold zeros."""

    @overload
    def zeros(
        self, shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar], *, timeout: float | None = None
    ) -> NDArray[_Scalar]:
        """Collective: return an array as `empty` does. It is guaranteed to hold zeros."""
    @overload
    def zeros(self, shape: _Shape, dtype: DTypeLike, *, timeout: float | None = None) -> NDArray[Any]:
        """Collective: return an array as `empty` does. It is guaranteed to hold zeros."""
    @overload
    def full(
        self,
        shape: _Shape,
        fill_value: Any,
        dtype: type[_Scalar] | np.dtype[_Scalar],
        *,
        timeout: float | None = None,
    ) -> NDArray[_Scalar]:
        """Collective: return an array as `empty` does, filled with `fill_value`."""

    @overload
    def full(
        self, shape: _Shape, fill_value: Any, dtype: DTypeLike | None = None, *, timeout: float | None = None
    ) -> NDArray[Any]:
        """Collective: return an array as `empty` does, filled with `fill_value`."""
    @overload
    def copy_of(self, a: NDArray[_Scalar], *, timeout: float | None = None) -> NDArray[_Scalar]:
        """Collective: return a copy of `a` in an array as `empty` returns."""

    @overload
    def copy_of(self, a: ArrayLike, *, timeout: float | None = None) -> NDArray[Any]:
        """Collective: return a copy of `a` in an array as `empty` returns."""
    def adopt(self, x: Memory, *, timeout: float | None = None) -> Adoption:
        """Collective: map an array of another library in every rank of the host, at its present address."""

    def arena(
        self,
        nbytes: SupportsIndex = 67108864,
        *,
        smallest_nbytes: SupportsIndex = 65536,
        timeout: float | None = None,
    ) -> Arena:
        """Collective: return shared memory for the arrays that NumPy makes in a `with` statement."""

    def shared(
        self,
        shape: _Shape,
        dtype: DTypeLike = "float64",
        *,
        locks: SupportsIndex = 0,
        timeout: float | None = None,
    ) -> SharedArray:
        """Collective: return one array, filled with zeros, whose memory all ranks of the host share."""
