"""Locks in shared memory, taken by ranks."""

from types import TracebackType
from typing import Self, SupportsIndex

from .._engine.engine import Engine

LOCK_NBYTES: int

class Locks:
    """`count` locks at `address`, zeros at first; `memory` keeps them mapped. kind: their name in errors."""

    def __new__(
        cls, engine: Engine, memory: object, address: int, count: int, kind: str = "lock"
    ) -> Self: ...
    @property
    def count(self) -> int:
        """Number of locks."""

    def lock(self, number: SupportsIndex, timeout: float | None = None) -> Lock:
        """Return lock `number` as a context manager. Entering raises Timeout after `timeout` seconds."""

class Lock:
    """One lock of a shared array. `with` takes and releases it. A forked child does not hold it."""

    def __new__(cls, locks: Locks, index: int, timeout_s: float) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
