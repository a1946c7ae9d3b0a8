"""The state of one communicator on one rank, and the tables that Python reads from C."""

from typing import Any, Literal, Protocol, TypedDict

class _Segment(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class _Record(TypedDict):
    seq: int
    kind: str
    count: int
    root: int
    dtype: str
    op: str
    algorithm: str
    invalid: bool
    order: Literal["C", "F"]

class _Stats(TypedDict):
    calls: int
    bytes_sent: int
    steps: int
    paths: dict[str, int]
    path: str | None
    distance: Literal["near", "far"]
    round_trip_ns: int
    isa: str

DTYPES: tuple[str, ...]
DTYPE_NBYTES: tuple[int, ...]  # in the order of DTYPES
OPS: tuple[str, ...]
KINDS: tuple[str, ...]
WIRES: tuple[str, ...]
ALGORITHMS: tuple[str, ...]
PATHS: tuple[str, ...]
CAUSES: dict[str, int]  # why a communicator was given up, and its number in the abort word
TINY_NBYTES: int  # what fits into a call line
MAX_RANKS: int

def described(fingerprint: int, count: int) -> dict[str, Any] | None:
    """What a fingerprint and a count say of a call, as `record_of` does; None for one that says nothing."""

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

    def be_patient(
        self,
        *,
        pauses: int,
        brief_pauses: int,
        brief_yields: int,
        yield_ns: int,
        sleep_ns: int,
        look_ns: int,
        ping_interval_ns: int,
        zero_copy_nbytes: int,
        crowded: int,
    ) -> None:
        """How to wait from now on: pauses, then yields, then sleep, with a look at all else now and then."""

    def number_of(self, seq: int) -> int:
        """Which of the user's calls a sequence number means: from 1 on; the engine's own are 0 or less."""

    def abort_report(self) -> tuple[str, int, int, str] | None:
        """(cause, culprit, the reporter's sequence number, reason), or None while nobody has given up."""

    def record_of(self, rank: int, seq: int) -> _Record | None:
        """What a rank called as its seq-th call; None when it has not, or too long ago."""

    def own_call(self, seq: int) -> dict[str, Any] | None:
        """As record_of, of this rank; of a call of several hosts also where no local step of it has begun."""

    def last_seq_of(self, rank: int) -> int:
        """The highest sequence number that a rank has begun."""

    def life_of(self, rank: int) -> tuple[int, int]:
        """(pid, start time) of a rank, as it said when it joined."""

    def message_rings(self) -> tuple[int, int]:
        """(bytes of each, first sequence number), as rank 0 of the host has laid them out."""

    def stats(self) -> _Stats:
        """Counters since the communicator began; see Comm.stats."""
