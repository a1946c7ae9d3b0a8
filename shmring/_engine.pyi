"""The engine of one communicator on one rank, and the tables that Python reads from C."""

from typing import Literal, Protocol, TypedDict

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
ALGORITHMS: tuple[str, ...]
PATHS: tuple[str, ...]
CAUSES: dict[str, int]  # why a communicator was given up, and its number in the abort word
TINY_NBYTES: int  # what fits into a call line
MAX_RANKS: int

def supported(dtype: str, op: str) -> bool:
    """Whether the op has a meaning for the dtype."""

def isas() -> list[str]:
    """Instruction sets that this machine supports, best first."""

class Engine:
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
    def closed_because(self) -> str | None:
        """None while open, else the text of the Closed error."""

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

    def take_after(self, parent: Engine) -> None:
        """Wait, and take the cores for near or far, as an engine does whose ranks include these."""

    def arrive(self, pid: int, start_time: int) -> None:
        """Makes this rank known to the others: from here on its death is noticed."""

    def measure_distance(self) -> None:
        """Collective: measures how near the ranks' cores are; near or far is then common knowledge."""

    def open_for_calls(self, timeout_s: float) -> None:
        """The start-up is over: calls are counted from here, and `timeout_s` is their default."""

    def close(self, because: str = "the communicator is closed") -> None:
        """Leaves: others that still wait for this rank are told. Local; closing twice is harmless."""

    def disown(self) -> None:
        """In a forked child: the communicator belongs to the parent; touches nothing that is shared."""

    def check(self) -> None:
        """Raises if the communicator is closed or a rank has given up; the cold paths ask while they wait."""

    def broadcast_word(self, word: int) -> int:
        """Collective: rank 0's word, on every rank."""

    def all_agree(self, yes: bool) -> bool:
        """Collective: whether every rank says yes."""

    def union(self, bits: bytes) -> int:
        """Collective: the bits that any rank has set."""

    def announce_allocation(self, nbytes: int, timeout_s: float) -> None:
        """Collective: every rank is about to allocate as much; Mismatch when they differ."""

    def own_ring(self) -> tuple[int, int]:
        """(offset in the segment, bytes) of this rank's staging ring."""

    def set_blocks(self, blocks: list[tuple[int, int, int]]) -> None:
        """Which shared arrays this process maps: (id, begin, stride) of each, begin of rank 0's part."""

    def number_of(self, seq: int) -> int:
        """Which of the user's calls a sequence number means: from 1 on; the engine's own are 0 or less."""

    def abort(self, reason: str) -> None:
        """Gives up on behalf of the caller: every rank raises Aborted."""

    def report(self, error: BaseException) -> None:
        """Gives up because of an error outside of any call; if it is shmring's, raises what all raise."""

    def abort_report(self) -> tuple[str, int, int, str] | None:
        """(cause, culprit, the reporter's sequence number, reason), or None while nobody has given up."""

    def record_of(self, rank: int, seq: int) -> _Record | None:
        """What a rank called as its seq-th call; None when it has not, or too long ago."""

    def last_seq_of(self, rank: int) -> int:
        """The highest sequence number that a rank has begun."""

    def life_of(self, rank: int) -> tuple[int, int]:
        """(pid, start time) of a rank, as it said when it joined."""

    def stats(self) -> _Stats:
        """Counters since the communicator began; see Comm.stats."""
