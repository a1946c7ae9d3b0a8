"""Types of the functions of adapters that a framework calls often: for torch, and for XLA."""

from collections.abc import Callable
from typing import Any

import shmring

def prepare_torch(
    options: Any,
    profiler: dict[str, Any],
    ops: tuple[Any, ...],
    memory: Any,
    places: tuple[int, int, int] | None,
) -> None:
    """Set torch's class of options, its profiler's globals, the names of its ops, `Memory.of`, and the places
    of the options' fields.
    """

class CallLock:
    """A lock as threading.Lock, faster while no other thread waits for it, and taken in turn if others do."""

    def acquire(self, timeout: float = -1.0) -> bool:
        """Take the lock; wait without end, or for some seconds. Return whether this thread has it now."""

    def release(self) -> None:
        """Let the next thread have the lock."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

def allreduce(
    self: Any,
    tensors: Any = None,
    opts: Any = None,
    timeout: Any = None,
    *,
    tensor: Any = None,
    op: Any = None,
) -> Any:
    """Reduce tensors over all ranks. Return None if the call is complete, else its Work."""

class XlaCall:
    """A call in a compiled program: run(comm, arrays, outs) makes it; comm() is the communicator, None if it
    is gone.
    """

    def __init__(
        self,
        comm: Callable[[], shmring.Comm | None],
        run: Callable[[shmring.Comm, list[shmring.Memory], list[shmring.Memory]], None],
        op: str | None = None,
    ) -> None: ...

def prepare_xla(calls: dict[bytes, XlaCall], note_error: Callable[[BaseException], str]) -> Any:
    """Set the calls by their text, and the function that keeps an exception; return the handler."""

def take_own_end() -> bool:
    """Return whether a region has ended on this thread since the last call of this function."""

def await_end() -> bool:
    """Wait some milliseconds until a region ends on a thread of XLA, or a call of one fails. Return
    whether.
    """
