"""The ends of a ring that needs no communicator."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from .._system.segments import Mapping

MOST_READERS: int  # maximum number of readers
LEAST_NBYTES: int  # minimum size of the ring's data
ORIGIN_BEGIN: int  # offset of what ring_common.py keeps in the ring's memory
ORIGIN_NBYTES: int

class RingEnds:
    """The writer's end and one reader's end of a ring, in one process."""

    closed_because: str | None
    _fd: int
    _nlost: int
    _last_death: str | None

    def __init__(self, mapping: Mapping, pauses: int) -> None: ...
    @staticmethod
    def _format(address: int, nbytes: int, places: int, reserved: int, drops: bool, single_use: bool) -> None:
        """Format a ring of nbytes, a power of two, in zeroed memory."""

    @staticmethod
    def _head_nbytes(places: int) -> int:
        """Return the bytes before the ring's data."""

    def put(self, item: NDArray[Any] | Buffer, timeout: float | None = None, *, block: bool = True) -> None:
        """Put bytes or an array in, and wait until all of it is in the ring."""

    def get(
        self, timeout: float | None = None, *, block: bool = True, out: NDArray[Any] | None = None
    ) -> Any:
        """Return the next item: bytes as bytes, an array as a new array of its own, or in `out`."""

    def _put_object(self, obj: object, timeout: float | None, block: bool) -> None:
        """Pickle an object, and put it in."""

    def _get_object(self, timeout: float | None, block: bool) -> Any:
        """Return the next item, unpickled if it is an object."""

    def interrupt(self) -> None:
        """Have every call that waits on this ring in this process raise Closed, now and later."""

    def _pids_of_readers(self) -> list[int]:
        """Return the processes that have places as readers."""

    def _damaged(self) -> Exception:
        """Return the error of a ring that holds data which no process puts in."""

    def _forget_sides(self) -> None:
        """Give up both sides in a forked child: they stay with the parent."""

    def _mark_aborted(self) -> None:
        """Have the processes that get raise Aborted in place of Closed, once this side closes."""

    def _is_aborted(self) -> bool:
        """Return whether an exception left the `with` block of the writer."""

    def _close(self, because: str) -> None:
        """Close the sides that this process uses, once."""

    @property
    def nbytes(self) -> int:
        """Bytes of the ring's data."""

    def _error_of_close(self, is_writer: bool) -> Exception: ...
    def _unwanted(self, is_object: bool, nbytes: int) -> Exception: ...
    def _use_side(self) -> tuple[int, int]: ...
    def _cause_of_death(self, pid: int, start_time: int) -> str | None: ...
    def _why_none_comes(self, came: set[int]) -> str | None: ...
    def _poll_writer(self, pid: int, start_time: int, readers: set[int]) -> None: ...
    def _as_item(self, item: Any) -> bytes | np.ndarray[Any, Any]: ...
    def _text_of(self, dtype: np.dtype[Any]) -> bytes: ...
    def _dtype_of(self, text: bytes) -> np.dtype[Any]: ...
