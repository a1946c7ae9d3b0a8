"""The state of one communicator on one rank, and the tables that Python reads from C."""

from typing import Any, Literal, Protocol, TypedDict

from .._diagnostics.flight_recorder import ALGORITHMS as ALGORITHMS
from .._diagnostics.flight_recorder import DTYPE_NBYTES as DTYPE_NBYTES
from .._diagnostics.flight_recorder import DTYPES as DTYPES
from .._diagnostics.flight_recorder import KINDS as KINDS
from .._diagnostics.flight_recorder import MAX_RANKS as MAX_RANKS
from .._diagnostics.flight_recorder import WIRES as WIRES
from .._diagnostics.flight_recorder import Flight, _Record
from .._diagnostics.flight_recorder import described as described

OPS: tuple[str, ...]

class _Segment(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class _Stats(TypedDict):
    calls: int
    bytes_sent: int
    steps: int
    paths: dict[str, int]
    path: str | None
    distance: Literal["near", "far"]
    round_trip_ns: int
    isa: str

PATHS: tuple[str, ...]
TAKEN: str  # what a second thread is told
TINY_NBYTES: int  # what fits into a call line

def supported(dtype: str, op: str) -> bool:
    """Whether the op has a meaning for the dtype."""

class State:
    """One communicator's state on one rank, over a segment that `format_segment` has begun."""

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
        """What errors say of the others is read through it."""

    @property
    def timeout_s(self) -> float:
        """The default of every call."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def seq(self) -> int:
        """The sequence number of the last call that was issued here."""

    @property
    def isa(self) -> str:
        """The instruction set of the reduction loops."""

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
        """How to wait from now on: pauses, then yields, then sleep, with a look at all else now and then."""

    def number_of(self, seq: int) -> int:
        """Which of the user's calls a sequence number means: from 1 on; the engine's own are 0 or less."""

    def world_rank(self, rank: int) -> int:
        """The number, among all hosts' ranks, of a local one, or of one elsewhere where a wait told of it."""

    def name_of(self, rank: int | None) -> str:
        """A rank in words. Numbers as in `world_rank`; None: any."""

    @property
    def world_size(self) -> int:
        """How many ranks there are on all hosts."""

    def abort_report(self) -> tuple[str, int, int, str, int, str | None] | None:
        """What the rank that gave up first has said, as `Flight.abort_report`; None while nobody has."""

    def record_of(self, rank: int, seq: int) -> _Record | None:
        """What a rank called as its seq-th call; None when it has not, or too long ago."""

    def own_call(self, seq: int) -> dict[str, Any] | None:
        """As record_of, of this rank; of a call of several hosts also where no local step of it has begun."""

    def last_seq_of(self, rank: int) -> int:
        """The highest sequence number that a rank has begun."""

    def key(self) -> bytes:
        """A secret of those who map the segment."""

    def notify_view(self, view: bytes) -> None:
        """Says to all others which of them this rank goes on with. See membership."""

    def view_of(self, rank: int) -> bytes | None:
        """What a rank has said so last; None: nothing."""

    def has_gone(self, rank: int) -> bool:
        """Whether a rank has ended, or left."""

    def check_liveness(self) -> tuple[list[int], list[int]]:
        """From here on ranks that the kernel does not watch are looked for: (these, the hidden ones)."""

    def liveness_of(self, rank: int) -> tuple[int, int]:
        """(pid, start time) of a rank, as it said when it joined."""

    def message_rings(self) -> tuple[int, int]:
        """(bytes of each, first sequence number), as rank 0 of the host has laid them out."""

    def stats(self) -> _Stats:
        """Counters since the communicator began; see Comm.stats."""
