"""The two ends of a ring that needs no communicator."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from .._system.segments import Mapping

HEAD_NBYTES: int  # bytes before the ring's data
LEAST_NBYTES: int  # minimum size of the ring's data

class Ends:
    """Both ends of one ring. Each end belongs to the process that first puts or gets there."""

    closed_because: str | None

    def __init__(self, mapping: Mapping, pauses: int) -> None: ...
    @staticmethod
    def _format(address: int, nbytes: int, pid: int, start_time: int) -> None:
        """Format a ring of nbytes, a power of two, in zeroed memory, and record its creator."""

    def put(self, item: NDArray[Any] | Buffer, timeout: float | None = None, *, block: bool = True) -> None:
        """Put bytes or an array in, and wait until all of it is in the ring."""

    def put_nowait(self, item: NDArray[Any] | Buffer) -> None:
        """Put an item in as `put(item, block=False)` does."""

    def get(
        self, timeout: float | None = None, *, block: bool = True, out: NDArray[Any] | None = None
    ) -> Any:
        """Return the next item: bytes as bytes, an array as a new array of its own, or in `out`."""

    def get_nowait(self, *, out: NDArray[Any] | None = None) -> Any:
        """Return the next item as `get(block=False)` does."""

    def _liveness_of(self, side: int) -> tuple[int, int] | None:
        """Return (pid, start time) of the process at a side; None if no process uses it yet."""

    def _creator(self) -> tuple[int, int]:
        """Return (pid, start time) of the process that created the ring."""

    def _forget_sides(self) -> None:
        """Give up both sides in a forked child: they stay with the parent."""

    def _close(self, because: str) -> bool:
        """Close the sides that this process uses. Return True if the ring was open."""

    @property
    def nbytes(self) -> int:
        """Bytes of the ring's data."""

    def _poll_peer(self, side: int) -> None: ...
    def _come(self) -> tuple[int, int]: ...
    def _as_item(self, item: Any) -> bytes | np.ndarray[Any, Any]: ...
    def _text_of(self, dtype: np.dtype[Any]) -> bytes: ...
    def _dtype_of(self, text: bytes) -> np.dtype[Any]: ...
