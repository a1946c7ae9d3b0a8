"""The kernels as tests and benchmarks see them: memory comes as contiguous buffers of bytes."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

_Bytes = NDArray[Any] | bytearray | memoryview

OPS: tuple[str, ...]  # all there are, in the order of their numbers

def isas() -> list[str]:
    """Names of the instruction sets that this machine supports, best first."""

def dtypes() -> dict[str, int]:
    """Bytes of an item by dtype name."""

def ops(dtype: str) -> list[str]:
    """Names of the ops that have a meaning for the dtype."""

def fold(
    dtype: str,
    op: str,
    srcs: Sequence[_Bytes],
    dsts: Sequence[_Bytes],
    isa: str = "",
    divisor: int = 1,
    stream: int = 0,
    loops: int = 1,
) -> float:
    """dsts[d] = srcs[0] op srcs[1] ... for every d; returns the seconds that `loops` of it took."""

def copy(
    dsts: Sequence[_Bytes], srcs: Sequence[_Bytes], isa: str = "", stream: int = 0, loops: int = 1
) -> float:
    """dsts[i] = srcs[i] for every i; returns the seconds that `loops` of it took."""

def copy_two(
    dsts: Sequence[_Bytes], srcs: Sequence[_Bytes], isa: str = "", streams: tuple[int, int] = (0, 0)
) -> None:
    """dsts[0] = srcs[0] and dsts[1] = srcs[1] in one loop."""

def wire_formats() -> list[str]:
    """What float32 may travel as between hosts."""

def encoded_nbytes(format: str, count: int) -> int:
    """Bytes of count float32 as they travel."""

def widen(dtype: str, dst: _Bytes, src: _Bytes, isa: str = "", loops: int = 1) -> float:
    """dst, of float32, = src, of a 16- or 8-bit float; returns the seconds that `loops` of it took."""

def decode(format: str, dst: _Bytes, src: _Bytes, isa: str = "", loops: int = 1) -> float:
    """dst, of float32, = src as it travels; returns the seconds that `loops` of it took."""

def narrow(dtype: str, dst: _Bytes, src: _Bytes, isa: str = "", loops: int = 1) -> float:
    """dst, of a 16- or 8-bit float, = src, of float32; returns the seconds that `loops` of it took."""

def encode(
    format: str, dst: _Bytes, src: _Bytes, residual: _Bytes | None = None, isa: str = "", loops: int = 1
) -> float:
    """dst = src, of float32, as it travels, with feedback if there is a residual; returns seconds as well."""
