"""Types of a segment's format, of the state of one communicator on one rank, and of the tables of C."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from .._diagnostics.flight_recorder import ALGORITHMS as ALGORITHMS
from .._diagnostics.flight_recorder import DTYPE_NBYTES as DTYPE_NBYTES
from .._diagnostics.flight_recorder import DTYPES as DTYPES
from .._diagnostics.flight_recorder import KINDS as KINDS
from .._diagnostics.flight_recorder import PATHS as PATHS
from .._diagnostics.flight_recorder import WIRES as WIRES
from .._diagnostics.flight_recorder import Flight, _Record
from .._diagnostics.flight_recorder import described as described

OPS: tuple[str, ...]

class _Segment(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class _Header(TypedDict):
    nranks: int
    ring_nbytes: int
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
    distance: Literal["near", "far"]
    round_trip_ns: int
    isa: str

TAKEN: str  # text of the error of a second thread
KEY_NBYTES: int

def supported(dtype: str, op: str) -> bool:
    """Return whether the op has a meaning for the dtype."""

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
    def flight(self) -> Flight:
        """Reader of the records of all ranks, for errors."""

    @property
    def timeout_s(self) -> float:
        """Default timeout of every call, in seconds."""

    @property
    def rank(self) -> int:
        """This rank's local number."""

    @property
    def size(self) -> int:
        """Number of ranks of this host."""

    @property
    def seq(self) -> int:
        """Sequence number of the last call begun on this rank."""

    @property
    def isa(self) -> str:
        """Instruction set of the kernels."""

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
    ) -> None:
        """Set the wait policy: pauses, yields, longest sleep, and the interval of polls."""

    def number_of(self, seq: int) -> int:
        """Return the number of the user's call with this sequence number, from 1; the engine's: 0 or less."""

    def world_rank(self, rank: int) -> int:
        """Return a rank's number over all hosts. rank: local, or size + r for rank r of another host."""

    def name_of(self, rank: int | None) -> str:
        """Return the name of a rank, as in errors. Numbers as in `world_rank`; None means any rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""

    def abort_report(self) -> tuple[str, int, int, str, int, str | None] | None:
        """Return the report of the rank that aborted first, as `Flight.abort_report`; None if no rank has."""

    def record_of(self, rank: int, seq: int) -> _Record | None:
        """Return the call `seq` of a rank; None if it has not made it or the record is overwritten."""

    def own_call(self, seq: int) -> dict[str, Any] | None:
        """As record_of, for this rank; also for a call over several hosts that has no local step yet."""

    def last_seq_of(self, rank: int) -> int:
        """Return the highest sequence number that a rank has begun."""

    def key(self) -> bytes:
        """Return the secret that only processes which map the segment know."""

    def notify_view(self, view: bytes) -> None:
        """Publish this rank's view, the ranks that it goes on with. See membership."""

    def view_of(self, rank: int) -> bytes | None:
        """Return the last view of a rank; None if it has published none."""

    def has_gone(self, rank: int) -> bool:
        """Return whether a rank has ended or left."""

    def check_liveness(self) -> tuple[list[int], list[int]]:
        """Poll ranks that the kernel does not watch from now on. Return (these ranks, the hidden ones)."""

    def liveness_of(self, rank: int) -> tuple[int, int]:
        """Return (pid, start time) of a rank, as the rank wrote them when it joined."""

    def message_rings(self) -> tuple[int, int]:
        """Return (bytes of a message ring, first sequence number), as rank 0 of the host has set them."""

    def stats(self) -> _Stats:
        """Return counters since the communicator began. See Comm.stats."""

class Stalls:
    """The long waits of one rank, and the times when their next warnings are due."""

    def warn_after(self, state: State, limit_s: float) -> None:
        """Log a warning about waits longer than limit_s seconds from now on; 0 disables it."""

class ParkedThread:
    """The parked thread of one rank."""
