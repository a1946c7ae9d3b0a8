"""The engine of one communicator on one rank, as the cold paths see it."""

from collections.abc import Callable
from typing import Any, TypeVar

from .._arrays.allocator import Arrays
from .._internode.context import InterNodeConns
from .._transport.notifications import Notifications
from ..errors import Error
from .blame import Stalls
from .state import State

_T = TypeVar("_T")

class Engine(State):
    """What one communicator does on one rank."""

    @property
    def closed_because(self) -> str | None:
        """None while open, else the text of the Closed error."""

    @property
    def stalls(self) -> Stalls:
        """Warns of calls that take long."""

    def take_after(self, parent: Engine) -> None:
        """Wait, and take the cores for near or far, as an engine does whose ranks include these."""

    def arrive(self, pid: int, start_time: int) -> None:
        """Makes this rank known to the others: from here on its death is noticed."""

    def measure_distance(self) -> None:
        """Collective: measures how near the ranks' cores are; near or far is then common knowledge."""

    def probe_single_copy(self, wanted: bool) -> None:
        """Collective: whether every rank wants to read, and can, the private memory of all others."""

    def open_for_calls(self, timeout_s: float) -> None:
        """The start-up is over: calls are counted from here, and `timeout_s` is their default."""

    def cross(self, conns: InterNodeConns, notifications: Notifications) -> None:
        """From here on calls are of the ranks of several hosts."""

    def notify_others(self, error: Error) -> None:
        """The ranks of other hosts learn that it is over."""

    def remote_error(self) -> Error | None:
        """The error that a rank of another host has told everyone of; None if nothing comes of it here."""

    def enter_call(self) -> None:
        """A call of several steps begins: until `leave_call` other threads are refused theirs."""

    def leave_call(self) -> None:
        """All its steps are done."""

    def run_steps(
        self, function: Callable[..., _T], *arguments: Any, begun: bool = False, **keywords: Any
    ) -> _T:
        """Run function(...), which is one call to its caller and makes several.

        What it raises after its first step ends the communicator, unless all ranks raise the same.
        """

    def run_own_steps(self, function: Callable[..., _T], *arguments: Any, may_be_step: bool = False) -> _T:
        """As run_steps, for a call of shmring's own, between whose steps another such call is refused."""

    def check_idle(self) -> None:
        """Raises if the communicator is closed, or another thread is inside a call of it."""

    def share(self, arrays: Arrays | None) -> None:
        """What is to become private when it is over."""

    def end_sharing(self, beside: bool = False) -> str | None:
        """It is over: no rank that goes on later writes into what this one has; or why that is not so."""

    def host_of(self, rank: int) -> str | None:
        """Where a rank of another host runs; None for local ones. Numbers as in `world_rank`."""

    def close(self, because: str = "the communicator is closed") -> None:
        """Leaves: others that still wait for this rank are told. Local; closing twice is harmless."""

    def disown(self) -> None:
        """In a forked child: the communicator belongs to the parent; touches nothing that is shared."""

    def remote_call(self, rank: int) -> tuple[int, dict[str, Any] | None] | None:
        """By what a rank of another host told last: (which of the user's calls, what it was)."""

    def check(self) -> None:
        """Raises if the communicator is closed or a rank has given up; the cold paths ask while they wait."""

    def poll(self) -> None:
        """As check, and raises if some rank has ended meanwhile: for waits outside of any call."""

    def broadcast_word(self, word: int) -> int:
        """Collective: rank 0's word, on every rank."""

    def all_agree(self, yes: bool, timeout_s: float) -> bool:
        """Collective: whether every rank says yes."""

    def union(self, bits: bytes) -> int:
        """Collective: the bits that any rank has set."""

    def announce_allocation(self, nbytes: int, signature: int, timeout_s: float) -> None:
        """Collective: every rank is about to allocate as much; Mismatch when they differ."""

    def own_ring(self) -> tuple[int, int]:
        """(offset in the segment, bytes) of this rank's staging buffer."""

    def has_pending(self) -> bool: ...
    def set_blocks(self, blocks: list[tuple[int, int, int, int]]) -> None:
        """Which shared arrays this process maps: (id, begin, stride) of each, begin of rank 0's part."""

    def abort(self, reason: str) -> None:
        """Gives up on behalf of the caller: every rank raises Aborted."""

    def report(self, error: BaseException) -> None:
        """Gives up because of an error outside of any call; if it is shmring's, raises what all raise."""
