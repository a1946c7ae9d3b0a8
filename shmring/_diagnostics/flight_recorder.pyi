"""Read what a segment records about its ranks: the Python interface, for cold paths and tools."""

from typing import Any, Literal, Protocol, Self, TypedDict, final

class _Memory(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class _Record(TypedDict):
    """One recorded call."""

    seq: int
    number: int
    kind: str
    count: int
    root: int
    dtype: str
    op: str
    algorithm: str
    order: Literal["C", "F"]
    invalid: bool
    wire: str
    group_size: int
    outcome: Literal["under way", "complete", "raised"]

DTYPES: tuple[str, ...]
OPAQUE_DTYPE: str
RECORD_DTYPES: tuple[str, ...]  # by number of the dtype in a record
DTYPE_NBYTES: tuple[int, ...]  # in the order of DTYPES
KINDS: tuple[str, ...]
WIRES: tuple[str, ...]
ALGORITHMS: tuple[str, ...]
PATHS: tuple[str, ...]
CAUSES: dict[int, str]  # cause of an abort, by its number in the abort word
OUTCOMES: tuple[str, ...]
WAITS: tuple[str, ...]
TRACED: tuple[str, ...]

def call_of_fingerprint(fingerprint: int, count: int) -> dict[str, Any] | None:
    """Return the call that fingerprint and count describe, as `record_of`; None if the kind is unknown."""

def control_nbytes_of(head: bytes, nbytes: int) -> int:
    """Return the bytes of header and lanes of a segment of `nbytes` that begins with `head`, one page.

    0: it is not a communicator's. ValueError: it is damaged, or belongs to another version.
    """

@final
class Sight:
    """Snapshot of what a rank did at one moment; decoded on request."""

    presence: Literal["absent", "here", "closed", "dead"]
    waits: list[dict[str, Any]]
    at_ns: int
    @property
    def record(self) -> _Record | None:
        """The last call that the rank had begun; None if none."""

class Flight:
    """Reader of the header and lanes of a segment in `memory`, which it keeps alive. Ranks are local."""

    def __new__(cls, memory: _Memory) -> Self: ...
    @property
    def nranks(self) -> int:
        """Number of ranks that have a lane."""

    def liveness_of(self, rank: int) -> tuple[int, int]:
        """Return (pid, start time) of a rank, as the rank wrote them when it joined."""

    def presence_of(self, rank: int) -> Literal["absent", "here", "closed", "dead"]:
        """Return the presence of a rank. "dead": it ended without closing."""

    def world_rank_and_size(self, rank: int) -> tuple[int, int]:
        """Return (rank, size) of a local rank among the ranks of all hosts."""

    @property
    def nonce(self) -> int:
        """A number that is unique to this communicator's segment."""

    def record_of(self, rank: int, seq: int) -> _Record | None:
        """Return the call number `seq` of a rank; None if it has not made it or the record is overwritten."""

    def records_of(self, rank: int) -> list[_Record]:
        """Return the recorded calls of a rank, the oldest first."""

    def last_of(self, rank: int) -> _Record | None:
        """Return the last call that a rank has begun."""

    def sight_of(self, rank: int) -> Sight:
        """Return a snapshot of what a rank does now."""

    def waits_of(self, rank: int) -> list[dict[str, Any]]:
        """Return the long waits of a rank: `where`, `awaited`, `since_ns`, `until_ns`, `seq`, `is_over`."""

    def abort_report(self) -> tuple[str, int, int, str, int, str | None] | None:
        """Return the report of the rank that aborted first; None if no rank has.

        (cause, culprit, its sequence number, reason, number of the user's call, its name or None)
        """

    def take_warning_turn(self, now_ns: int, until_ns: int) -> bool:
        """Return whether this rank is to log the warning. If so, no other rank warns before `until_ns`."""

    def stacks_version(self, rank: int) -> int:
        """Return how often a rank has begun or finished writing its stacks: odd while it writes."""

    def ask(self, rank: int) -> bool:
        """Ask a rank for its stacks. Return False if the kernel does not support that."""

    def stacks_of(self, rank: int) -> str | None:
        """Return the Python stacks that a rank wrote last; None while it writes."""

@final
class TraceBuffer:
    """Room for the last `capacity` time slices of an engine's calls, and for as many of its messages."""

    def __new__(cls, capacity: int) -> Self: ...
    def slices(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int, int]:
        """Return (slices of calls, slices of messages, number of lost slices of calls, of messages)."""
