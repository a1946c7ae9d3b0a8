"""The ends of rings that need no communicator."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from .._system.segments import Mapping

HEAD_NBYTES: int  # bytes before the data of a ring with one reader
LEAST_NBYTES: int  # minimum size of the ring's data
ORIGIN_BEGIN: int  # offset of what ring_common.py keeps in the ring's memory
ORIGIN_NBYTES: int

class RingEndsBase:
    """The ends of one ring in one process. Each end belongs to the process that first puts or gets there."""

    closed_because: str | None
    _fd: int

    def __init__(self, mapping: Mapping, pauses: int) -> None: ...
    def put(self, item: NDArray[Any] | Buffer, timeout: float | None = None, *, block: bool = True) -> None:
        """Put bytes or an array in, and wait until all of it is in the ring."""

    def get(
        self, timeout: float | None = None, *, block: bool = True, out: NDArray[Any] | None = None
    ) -> Any:
        """Return the next item: bytes as bytes, an array as a new array of its own, or in `out`."""

    def interrupt(self) -> None:
        """Have every call that waits on this ring in this process raise Closed, now and later."""

    def _damaged(self) -> Exception:
        """Return the error of a ring that holds data which no process puts in."""

    def _forget_sides(self) -> None:
        """Give up both sides in a forked child: they stay with the parent."""

    def _mark_aborted(self) -> None:
        """Have the processes that get raise Aborted in place of Closed, once this side closes."""

    def _close(self, because: str) -> None:
        """Close the sides that this process uses, once."""

    @property
    def nbytes(self) -> int:
        """Bytes of the ring's data."""

    def _closed_there(self, is_writer: bool) -> Exception: ...
    def _unwanted(self, is_object: bool, nbytes: int) -> Exception: ...
    def _come(self) -> tuple[int, int]: ...
    def _as_item(self, item: Any) -> bytes | np.ndarray[Any, Any]: ...
    def _text_of(self, dtype: np.dtype[Any]) -> bytes: ...
    def _dtype_of(self, text: bytes) -> np.dtype[Any]: ...

class RingEnds(RingEndsBase):
    """Both ends of a ring with one reader."""

    def __init__(self, mapping: Mapping, pauses: int) -> None: ...
    @staticmethod
    def _format(address: int, nbytes: int) -> None:
        """Format a ring of nbytes, a power of two, in zeroed memory."""

    def _liveness_of(self, side: int) -> tuple[int, int] | None:
        """Return (pid, start time) of the process at a side; None if no process uses it yet."""

    def _poll_peer(self, side: int) -> None: ...
