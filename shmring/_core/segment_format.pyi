"""Sizes and first values of a segment, and the schedules of the named algorithms, for Python."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

class _Header(TypedDict):
    nranks: int
    ring_nbytes: int
    tuning: list[dict[str, int]]

def ring_schedule(size: int) -> list[tuple[int, int, int]]:
    """Return [(step, rank, slice sent to rank - 1), ...] of the reduce-scatter half of the ring."""

def tree_schedule(size: int) -> list[tuple[int, int, int]]:
    """Return [(step, sender, receiver), ...] on the way up; the way down is its mirror image."""

def double_tree(size: int) -> list[list[tuple[int, ...]]]:
    """Return for both trees, by rank: its children, in the order in which it folds their data."""

def slice_bounds(count: int, size: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each slice of the ring. The lengths differ by at most one element."""

KEY_NBYTES: int

def control_nbytes(nranks: int) -> int:
    """Return the bytes of the header and the lanes, which lie before the staging buffers."""

def message_ring_nbytes(nranks: int) -> int:
    """Return the default length of one message ring."""

def segment_nbytes(nranks: int, ring_nbytes: int, message_nbytes: int = 0) -> int:
    """Return the bytes of a whole segment."""

def format_segment(
    address: int,
    nranks: int,
    ring_nbytes: int,
    *,
    tuning: Sequence[Mapping[str, int]],
    forced_path: int = 0,
    first_seq: int = 0,
    message_nbytes: int = 0,
    key: bytes = ...,
) -> None:
    """Write the first values of a segment into zeroed memory, before another process maps it."""

def header_of(address: int) -> _Header:
    """Return what rank 0 wrote into the header of a segment."""
