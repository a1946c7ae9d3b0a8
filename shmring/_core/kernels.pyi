"""The kernels, for tests and benchmarks. Memory is passed as contiguous buffers of bytes."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

_Bytes = NDArray[Any] | bytearray | memoryview

OPS: tuple[str, ...]  # all ops, in the order of their numbers

def isas() -> list[str]:
    """Return the names of the instruction sets that this machine supports, best first."""

def dtypes() -> dict[str, int]:
    """Return the bytes of an item by dtype name."""

def ops(dtype: str) -> list[str]:
    """Return the names of the ops that have a meaning for the dtype."""

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
    """Run dsts[d] = srcs[0] op srcs[1] ... for every d, `loops` times. Return the seconds it took."""

def copy(
    dsts: Sequence[_Bytes], srcs: Sequence[_Bytes], isa: str = "", stream: int = 0, loops: int = 1
) -> float:
    """Run dsts[i] = srcs[i] for every i, `loops` times. Return the seconds it took."""

def copy_two(
    dsts: Sequence[_Bytes], srcs: Sequence[_Bytes], isa: str = "", streams: tuple[int, int] = (0, 0)
) -> None:
    """Run dsts[0] = srcs[0] and dsts[1] = srcs[1] in one loop."""

def wire_formats() -> list[str]:
    """Return the names of the formats in which float32 is sent between hosts."""

def encoded_nbytes(format: str, count: int) -> int:
    """Return the bytes of count float32 in a wire format."""

def widen(dtype: str, dst: _Bytes, src: _Bytes, isa: str = "", loops: int = 1) -> float:
    """Widen src, 16- or 8-bit floats, to dst, float32, `loops` times. Return the seconds it took."""

def decode(format: str, dst: _Bytes, src: _Bytes, isa: str = "", loops: int = 1) -> float:
    """Decode src, in a wire format, to dst, float32, `loops` times. Return the seconds it took."""

def narrow(dtype: str, dst: _Bytes, src: _Bytes, isa: str = "", loops: int = 1) -> float:
    """Narrow src, float32, to dst, 16- or 8-bit floats, `loops` times. Return the seconds it took."""

def encode(
    format: str, dst: _Bytes, src: _Bytes, residual: _Bytes | None = None, isa: str = "", loops: int = 1
) -> float:
    """Encode src, float32, to dst, `loops` times; with error feedback if residual. Return the seconds."""

def ring_schedule(size: int) -> list[tuple[int, int, int]]:
    """Return [(step, rank, slice sent to rank - 1), ...] of the reduce-scatter half of the ring."""

def tree_schedule(size: int) -> list[tuple[int, int, int]]:
    """Return [(step, sender, receiver), ...] on the way up; the way down is its mirror image."""

def double_tree(size: int) -> list[list[tuple[int, ...]]]:
    """Return for both trees, by rank: its children, in the order in which it folds their data."""

def slice_bounds(count: int, size: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each slice of the ring. The lengths differ by at most one element."""
