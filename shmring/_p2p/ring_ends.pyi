"""The two ends of a ring that lives alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from .._system.segments import Mapping

HEAD_NBYTES: int  # of the memory, before the ring's own bytes
LEAST_NBYTES: int  # of the ring's own bytes

class Ends:
    """Both ends of one ring; each is used by one process only, the one that first puts or gets."""

    closed_because: str | None

    def __init__(self, mapping: Mapping, pauses: int) -> None: ...
    @staticmethod
    def _format(address: int, nbytes: int, pid: int, start_time: int) -> None:
        """Begins a ring of nbytes, a power of two, in fresh memory; the process is its creator."""

    def put(self, item: NDArray[Any] | Buffer, timeout: float | None = None, *, block: bool = True) -> None:
        """Put bytes or an array in, and wait until all of it is in the ring."""

    def put_nowait(self, item: NDArray[Any] | Buffer) -> None:
        """`put(item, block=False)`"""

    def get(
        self, timeout: float | None = None, *, block: bool = True, out: NDArray[Any] | None = None
    ) -> Any:
        """Get the next item: bytes as bytes, an array as a new array of its own, or in `out`."""

    def get_nowait(self, *, out: NDArray[Any] | None = None) -> Any:
        """`get(block=False)`"""

    def _liveness_of(self, side: int) -> tuple[int, int] | None:
        """(pid, start time) of the process at a side; None while nobody has come."""

    def _creator(self) -> tuple[int, int]:
        """(pid, start time) of the process that made the ring."""

    def _forget_sides(self) -> None:
        """In a forked child: what the parent puts or gets is its own affair."""

    def _close(self, because: str) -> bool:
        """Leaves the sides that this process is at; True when it was open."""

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""

    def _poll_peer(self, side: int) -> None: ...
    def _come(self) -> tuple[int, int]: ...
    def _as_item(self, item: Any) -> bytes | np.ndarray[Any, Any]: ...
    def _text_of(self, dtype: np.dtype[Any]) -> bytes: ...
    def _dtype_of(self, text: bytes) -> np.dtype[Any]: ...
