"""Locks in shared memory, taken by ranks."""

from types import TracebackType
from typing import Self, SupportsIndex

from .._engine.engine import Engine

LOCK_NBYTES: int

class Locks:
    """`count` locks at an address that `memory` keeps mapped, zeros at first; kind: what errors call one."""

    def __new__(
        cls, engine: Engine, memory: object, address: int, count: int, kind: str = "lock"
    ) -> Self: ...
    @property
    def count(self) -> int:
        """How many there are."""

    def lock(self, number: SupportsIndex, timeout: float | None = None) -> Lock:
        """Lock `number` as a context manager; whoever waits longer than timeout seconds raises Timeout."""

class Lock:
    """One lock of a shared array: `with` takes it and lets it go; a forked child does not have it."""

    def __new__(cls, locks: Locks, index: int, timeout_s: float) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
