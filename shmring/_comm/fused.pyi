"""Many small arrays reduced as one."""

from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex, overload

from .collectives import Work
from .ops import Op
from .vector import VectorCollectives

class FusedCollectives(VectorCollectives):
    """`all_reduce_many`: many arrays reduced as one."""

    @overload
    def all_reduce_many(
        self,
        arrays: Iterable[Any],
        op: Op | str = "sum",
        *,
        out: Iterable[Any] | None = None,
        fuse_nbytes: SupportsIndex | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> None:
        """Combine each array of the list with those of all ranks, as `all_reduce` would, but together."""

    @overload
    def all_reduce_many(
        self,
        arrays: Iterable[Any],
        op: Op | str = "sum",
        *,
        out: Iterable[Any] | None = None,
        fuse_nbytes: SupportsIndex | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[None]:
        """The same in the background."""
