"""The segment and the schedules as Python sees them."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

class _Header(TypedDict):
    nranks: int
    ring_nbytes: int
    tuning: list[dict[str, int]]

def ring_schedule(size: int) -> list[tuple[int, int, int]]:
    """[(step, rank, slice sent to rank - 1), ...] of the reducing half of the ring."""

def tree_schedule(size: int) -> list[tuple[int, int, int]]:
    """[(step, sender, receiver), ...] on the way up; the way down is its mirror image."""

def double_tree(size: int) -> list[list[tuple[int, ...]]]:
    """Of each of both trees, by rank: its children, in the order in which it folds what they have."""

def slice_bounds(count: int, size: int) -> list[tuple[int, int]]:
    """Where each slice of the ring begins and ends: they differ by at most one element."""

KEY_NBYTES: int

def control_nbytes(nranks: int) -> int:
    """Bytes of a segment before its staging buffers."""

def message_ring_nbytes(nranks: int) -> int:
    """Of one message ring unless it is given."""

def segment_nbytes(nranks: int, ring_nbytes: int, message_nbytes: int = 0) -> int:
    """Bytes of a whole segment."""

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
    """Writes the header and every lane's first values into zeroed memory, before anyone else maps it."""

def header_of(address: int) -> _Header:
    """What rank 0 wrote into the header of a segment."""
