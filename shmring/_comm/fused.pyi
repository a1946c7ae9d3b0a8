"""Types of FusedCollectives, which reduces many small arrays as one."""

from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex, overload

from .ops import Op
from .vector import VectorCollectives
from .work import Work

class FusedCollectives(VectorCollectives):
    """The collective `all_reduce_many`, which reduces many arrays as one."""

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
        """Combine each array of a list elementwise with those of all ranks, many small arrays as one; return
        None.
        """

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
        """Combine each array of a list elementwise with those of all ranks, many small arrays as one; return
        None.
        """

    @overload
    def all_reduce_many(
        self,
        arrays: Iterable[Any],
        op: Op | str = "sum",
        *,
        out: Iterable[Any] | None = None,
        fuse_nbytes: SupportsIndex | None = None,
        async_op: bool,
        timeout: float | None = None,
        priority: SupportsIndex | None = None,
    ) -> Work[None] | None:
        """Combine each array of a list elementwise with those of all ranks, many small arrays as one; return
        None.
        """
