"""Types of a segment and of the state of a communicator. The module has the docstrings."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from .._diagnostics.flight_recorder import Flight

class _Segment(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class _Header(TypedDict):
    nranks: int
    staging_nbytes: int
    tuning: list[dict[str, int]]

class _Stats(TypedDict):
    calls: int
    bytes_sent: int
    bytes_over_wire: int
    steps: int
    messages_in_place: int
    paths: dict[str, int]
    path: str | None
    chosen_paths: dict[str, dict[int, str]]
    chosen_paths_of_shared: dict[str, dict[int, str]]
    distance: Literal["near", "far"]
    round_trip_ns: int
    isa: str

TAKEN: str  # text of the error of a second thread
MEANWHILE: str  # end of the text if a second thread ends or replaces the communicator
KEY_NBYTES: int

def control_nbytes(nranks: int) -> int: ...
def segment_nbytes(nranks: int, staging_nbytes: int, message_ring_nbytes: int) -> int: ...
def format_segment(
    address: int,
    nranks: int,
    staging_nbytes: int,
    message_ring_nbytes: int,
    *,
    tuning: Sequence[Mapping[str, int]],
    forced_path: int = 0,
    first_seq: int = 0,
    key: bytes = ...,
) -> None: ...
def header_of(address: int) -> _Header: ...

class State:
    """The state of one communicator on one rank, in a segment that `format_segment` has formatted."""

    def __init__(
        self,
        segment: _Segment,
        rank: int,
        size: int,
        *,
        isa: str,
        tuning: list[dict[str, int]],
        timeout_s: float,
    ) -> None: ...
    @property
    def flight(self) -> Flight: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def set_wait_policy(
        self,
        *,
        pauses: int,
        brief_pauses: int,
        brief_yields: int,
        yield_ns: int,
        sleep_ns: int,
        poll_ns: int,
        ping_interval_ns: int,
        zero_copy_nbytes: int,
        oversubscribed: int,
    ) -> None: ...
    def number_of(self, seq: int) -> int: ...
    def world_rank(self, rank: int) -> int: ...
    def name_of(self, rank: int | None) -> str: ...
    @property
    def world_size(self) -> int: ...
    def own_call(self, seq: int) -> dict[str, Any] | None: ...
    def last_seq_of(self, rank: int) -> int: ...
    def key(self) -> bytes: ...
    def publish_view(self, view: bytes) -> None: ...
    def view_of(self, rank: int) -> bytes | None: ...
    def has_gone(self, rank: int) -> bool: ...
    def find_unwatched_ranks(self) -> tuple[list[int], list[int]]: ...
    def message_rings(self) -> tuple[int, int]: ...
    def stats(self) -> _Stats: ...

class Stalls:
    """The long waits of one rank, and the times when their next warnings are due."""

    def warn_after(self, state: State, limit_s: float) -> None: ...

class LivenessThread:
    """The liveness thread of one rank."""
