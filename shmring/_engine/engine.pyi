"""Types of the engine of one communicator on one rank, for cold paths."""

from collections.abc import Callable
from typing import Any, TypeVar

from .._arrays.allocator import Arrays
from .._diagnostics.flight_recorder import TraceBuffer
from .._internode.context import InterNodeConns
from .._transport.notifications import Notifications
from ..errors import Error
from .state import Stalls, State

_T = TypeVar("_T")

class Engine(State):
    """The engine of one communicator on one rank."""

    @property
    def closed_because(self) -> str | None:
        """None while open, else the text of the Closed error."""

    @property
    def stalls(self) -> Stalls:
        """Logs warnings about calls that take long."""

    def take_after(self, parent: Engine) -> None:
        """Adopt the wait policy and the core distance of an engine whose ranks include these ranks."""

    def arrive(self, pid: int, start_time: int) -> None:
        """Make this rank known to the others. From now on they detect its death."""

    def measure_distance(self) -> None:
        """Collective: measure the core distance. All ranks get the result."""

    def probe_single_copy(self, wanted: bool) -> None:
        """Collective: use single copy if every rank wants it and can read the memory of all others."""

    def open_for_calls(self, timeout_s: float) -> None:
        """End the start-up: count calls from now on, with `timeout_s` as their default timeout."""

    def attach_hosts(self, conns: InterNodeConns, notifications: Notifications) -> None:
        """Run all later calls over several hosts."""

    def notify_others(self, error: Error) -> None:
        """Notify the ranks of other hosts that the communicator has ended."""

    def remote_error(self) -> Error | None:
        """Return the error that a rank of another host has sent to all; None if it does not arrive here."""

    def enter_call(self) -> None:
        """Begin a call of several steps. Until `leave_call`, calls of other threads raise RuntimeError."""

    def leave_call(self) -> None:
        """End a call of several steps."""

    def run_steps(
        self, function: Callable[..., _T], *arguments: Any, begun: bool = False, **keywords: Any
    ) -> _T:
        """Run function(*arguments, **keywords), which makes several calls, as one call.

        An exception after its first step ends the communicator, unless all ranks raise the same one.
        """

    def run_own_steps(self, function: Callable[..., _T], *arguments: Any, may_be_step: bool = False) -> _T:
        """As run_steps, for shmring's own calls. Another one between its steps raises RuntimeError."""

    def check_idle(self) -> None:
        """Raise if the communicator is closed, or another thread is inside a call of it."""

    def share(self, arrays: Arrays | None) -> None:
        """Set the arrays that become private when the communicator ends."""

    def end_sharing(self, beside: bool = False) -> str | None:
        """Make this rank's shared arrays private after the end. Return a text if that failed, else None."""

    def host_of(self, rank: int) -> str | None:
        """Return the address of a rank's host; None for a local rank. Numbers as in `world_rank`."""

    def close(self, because: str = "the communicator is closed") -> None:
        """Finish the issued calls, then leave. Ranks that still wait for this rank are notified. Local."""

    def disown(self) -> None:
        """Mark the communicator as the parent's, in a forked child. Shared memory is not touched."""

    def remote_call(self, rank: int) -> tuple[int, dict[str, Any] | None] | None:
        """Return (number, call) of the last known call of a rank of another host, or None."""

    def check(self) -> None:
        """Raise if the communicator is closed or has ended. Cold paths call this while they wait."""

    def poll(self) -> None:
        """As `check`, and raise if a rank has died. For waits outside of any call."""

    def broadcast_word(self, word: int) -> int:
        """Collective: return rank 0's word on every rank."""

    def all_agree(self, yes: bool, timeout_s: float) -> bool:
        """Collective: return whether `yes` is true on every rank."""

    def union(self, bits: bytes) -> int:
        """Collective: return the bits that any rank has set."""

    def announce_allocation(self, nbytes: int, signature: int, timeout_s: float) -> None:
        """Collective: compare the size of an allocation on all ranks. Raise Mismatch if they differ."""

    def own_ring(self) -> tuple[int, int]:
        """Return (offset in the segment, bytes) of this rank's staging buffer."""

    def has_pending(self) -> bool: ...
    def trace_into(self, buffer: TraceBuffer) -> None:
        """Record calls and messages in the buffer from now on. Raise RuntimeError during another trace."""

    def stop_trace(self, buffer: TraceBuffer) -> None:
        """Stop recording in the buffer, if it is the current one."""

    def set_blocks(self, blocks: list[tuple[int, int, int, int]]) -> None:
        """Set the shared arrays that this process maps: (id, begin of rank 0's part, own begin, stride)."""

    def abort(self, reason: str) -> None:
        """End the communicator for the caller: every rank raises Aborted with this reason."""

    def report(self, error: BaseException) -> None:
        """End the communicator because of an error outside any call. Raise it if it is shmring's."""
