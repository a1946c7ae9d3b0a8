"""What a segment says of its ranks, as the cold paths and the tools see it."""

from typing import Any, Literal, Protocol, Self, TypedDict, final

class _Memory(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class _Record(TypedDict):
    """A call."""

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
DTYPE_NBYTES: tuple[int, ...]  # in the order of DTYPES
KINDS: tuple[str, ...]
WIRES: tuple[str, ...]
ALGORITHMS: tuple[str, ...]
CAUSES: dict[int, str]  # why a communicator was given up, by its number in the abort word
OUTCOMES: tuple[str, ...]
WAITS: tuple[str, ...]
MAX_RANKS: int
STACKS_NBYTES: int

def described(fingerprint: int, count: int) -> dict[str, Any] | None:
    """What a fingerprint and a count say of a call, as `record_of` does; None for one that says nothing."""

def control_nbytes_of(head: bytes, nbytes: int) -> int:
    """Of a segment of `nbytes` that begins with `head`: bytes of header and lanes; 0: no communicator's.

    ValueError: it is damaged, or another version's.
    """

@final
class Sight:
    """What a rank was at, at one moment: kept as it was read, and put into words only if somebody asks."""

    presence: Literal["absent", "here", "closed", "dead"]
    waits: list[dict[str, Any]]
    at_ns: int
    @property
    def record(self) -> _Record | None:
        """The last call that it had begun; None: it had begun none."""

class Flight:
    """The header and the lanes of a segment in `memory`, which is kept alive. Ranks are local ones."""

    def __new__(cls, memory: _Memory) -> Self: ...
    @property
    def nranks(self) -> int:
        """How many ranks have a lane."""

    def liveness_of(self, rank: int) -> tuple[int, int]:
        """(pid, start time) of a rank, as it said when it joined."""

    def presence_of(self, rank: int) -> Literal["absent", "here", "closed", "dead"]:
        """Dead: it ended without closing."""

    def place_of(self, rank: int) -> tuple[int, int]:
        """(rank, size) of a local rank among those of all hosts."""

    @property
    def nonce(self) -> int:
        """A number that no other communicator's segment has."""

    def record_of(self, rank: int, seq: int) -> _Record | None:
        """What a rank called as its seq-th call; None when it has not, or too long ago."""

    def records_of(self, rank: int) -> list[_Record]:
        """The calls that a rank remembers, the oldest first."""

    def last_of(self, rank: int) -> _Record | None:
        """The last call that a rank has begun."""

    def sight_of(self, rank: int) -> Sight:
        """What a rank is at now."""

    def waits_of(self, rank: int) -> list[dict[str, Any]]:
        """What a rank waits for at length: `where`, `awaited`, `since_ns`, `until_ns`, `seq`."""

    def abort_report(self) -> tuple[str, int, int, str, int, str | None] | None:
        """What the rank that gave up first has said; None while nobody has.

        (cause, culprit, its sequence number, reason, which of the user's calls that was, its name or None)
        """

    def take_report_turn(self, now_ns: int, until_ns: int) -> bool:
        """Whether this rank is the one to warn of a late one, and nobody else before `until_ns`."""

    def stacks_version(self, rank: int) -> int:
        """How often a rank has begun or ended to write its stacks: odd while it does."""

    def ask(self, rank: int) -> bool:
        """Asks a rank for its stacks; False: the kernel does not do that."""

    def stacks_of(self, rank: int) -> str | None:
        """What a rank told last of its Python stacks; None while it writes."""
