"""Types of the functions of adapters that a framework calls often: for torch, and for XLA."""

from collections.abc import Callable
from typing import Any

import shmring

class Options:
    """Reads the options of one kind of call of torch's.

    Parameters
    ----------
    kind : type
        torch's class of them.
    places : dict or None
        The places of the fields in memory, which `_torch/fields.py` finds. If None, properties are read.
    """

    def __init__(self, kind: type, places: dict[str, int] | None) -> None: ...

def prepare_torch(
    profiler: dict[str, Any],
    ops: tuple[Any, ...],
    memory: Any,
    all_reduce: Options,
    broadcast: Options,
    all_gather: Options,
    reduce_scatter: Options,
) -> None:
    """Set the globals of torch's profiler, the names of torch's ops, `Memory.of`, and the calls' options."""

class CallLock:
    """A lock as threading.Lock, faster while no other thread waits for it, and taken in turn if others do."""

    unfinished: list[Any]

    def acquire(self, timeout: float = -1.0) -> bool:
        """Take the lock; wait without end, or for some seconds. Return whether this thread has it now.

        RuntimeError if this thread has it or waits for it already, as in a signal handler, and so would wait
        without end.
        """

    def release(self) -> None:
        """Let the next thread have the lock."""

    def release_if_mine(self) -> None:
        """Let the next thread have the lock, if this thread has it."""

    def is_mine(self) -> bool:
        """Return whether this thread has the lock or waits for it, as in a handler during its own call."""

    def begin_steps(self) -> None:
        """Let this thread, which has the lock, take and release it again for each step of its call.

        This ends when the thread releases the lock outside of a step. Other threads do not get it before.
        """

    def check_not_mine(self) -> None:
        """Raise RuntimeError if this thread has the lock or waits for it: it would wait for itself."""

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

def broadcast(self: Any, *arguments: Any, **keywords: Any) -> Any:
    """Copy the root's tensor to all ranks. Return None if the call is complete, else its Work."""

def fits(given: shmring.Memory, out: shmring.Memory, rank: int) -> bool:
    """Return whether a call may read `given` while it writes `out`. The group's method copies others."""

def all_gather_single(self: Any, *arguments: Any, **keywords: Any) -> Any:
    """Gather all ranks' tensors in one tensor: output, input, options. Return as `broadcast`."""

def reduce_scatter_single(self: Any, *arguments: Any, **keywords: Any) -> Any:
    """Reduce tensors and keep this rank's part: output, input, options. Return as `broadcast`."""

class XlaCall:
    """A call in a compiled program: run(comm, arrays, outs) makes it; comm() is the communicator, None if it
    is gone.

    If op is given, the call is `comm.all_reduce(array, op)`, and several arrays are left to `run`.
    """

    def __init__(
        self,
        comm: Callable[[], shmring.Comm | None],
        run: Callable[[shmring.Comm, list[shmring.Memory], list[shmring.Memory]], None],
        op: str | None = None,
    ) -> None: ...

def prepare_xla(calls: dict[bytes, XlaCall], note_error: Callable[[BaseException], str]) -> Any:
    """Set the calls by their text, and the function that keeps an exception; return the handler."""

def function_of_region(
    region: Any,
    compiled: Callable[..., Any],
    plain: Callable[..., Any],
    context: Any,
    no_trace: Any,
    tokens: Any,
    nothing: type,
) -> Callable[..., Any]:
    """Return a function that calls a compiled region, and returns when its collectives are over.

    plain is called in its place while JAX traces: `context.trace` is then not no_trace. tokens.current_tokens
    are those of plain programs, which may be under way. nothing is the type of results without an array.
    """

def await_end() -> bool:
    """Wait some milliseconds until a region ends on a thread of XLA, or a call of one fails. Return
    whether.
    """
