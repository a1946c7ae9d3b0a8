"""The types of arguments, for annotations, as `mpi4py.typing` names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias, TypeVar

__all__ = [
    *("SupportsBuffer", "SupportsDLPack", "SupportsCAI", "Buffer", "Bottom", "InPlace"),
    *("Aint", "Count", "Displ", "Offset", "TypeSpec", "BufSpec", "BufSpecB", "BufSpecV", "BufSpecW"),
    "TargetSpec",
]


class SupportsBuffer(Protocol):
    """An object with the buffer protocol."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsDLPack(Protocol):
    """An array with DLPack's protocol."""

    def __dlpack__(self, /, *, stream: Any = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCAI(Protocol):
    """An array with `__cuda_array_interface__`."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


Buffer: TypeAlias = SupportsBuffer | SupportsDLPack | SupportsCAI
Bottom: TypeAlias = Any
InPlace: TypeAlias = Any
Aint: TypeAlias = SupportsIndex
Count: TypeAlias = SupportsIndex
Displ: TypeAlias = SupportsIndex
Offset: TypeAlias = SupportsIndex
TypeSpec: TypeAlias = Any
BufSpec: TypeAlias = Buffer | Sequence[Any]
BufSpecB: TypeAlias = Buffer | Sequence[Any]
BufSpecV: TypeAlias = Buffer | Sequence[Any]
BufSpecW: TypeAlias = Sequence[Any]
TargetSpec: TypeAlias = Displ | Sequence[Any]

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
