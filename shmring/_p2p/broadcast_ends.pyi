"""The ends of a ring with several readers."""

from typing import Any

from .._system.segments import Mapping
from .ring_ends import RingEndsBase

MOST_READERS: int  # maximum number of readers

class BroadcastEnds(RingEndsBase):
    """The writer's end and one reader's end of a ring with several readers."""

    _last_death: str | None

    def __init__(self, mapping: Mapping, pauses: int) -> None: ...
    @staticmethod
    def _format(address: int, nbytes: int, places: int, reserved: int, drops: bool) -> None:
        """Format a ring of nbytes, a power of two, in zeroed memory."""

    @staticmethod
    def _head_nbytes(places: int) -> int:
        """Return the bytes before the ring's data."""

    def put_object(self, obj: object, timeout: float | None = None, *, block: bool = True) -> None:
        """Pickle an object, and wait until all of it is in the ring. Its arrays are not copied before."""

    def get_object(self, timeout: float | None = None, *, block: bool = True) -> Any:
        """Return the next item: an object unpickled, bytes and arrays as `get` returns them."""

    @property
    def lost(self) -> int:
        """Number of items that this reader has lost, since the writer dropped them before they were got."""

    @property
    def readers(self) -> int:
        """Number of readers that have come and not left. Those that were killed may still count."""

    def _poll_writer(self, pid: int, start_time: int, readers: set[int]) -> None: ...
    def _cause_of_death(self, pid: int, start_time: int) -> str | None: ...
    def _why_none_comes(self, came: set[int]) -> str | None: ...
