"""The all_reduce of one dense tensor, as a method of the process group."""

from typing import Any

def prepare(options: Any, profiler: dict[str, Any], ops: tuple[Any, ...], memory: Any) -> None:
    """Set torch's class of options, its profiler's globals, the names of its ops, and `Memory.of`."""

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
