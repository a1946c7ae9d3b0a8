"""Many small arrays reduced as one."""

from collections.abc import Iterable
from typing import Any, SupportsIndex

from .ops import Op
from .uneven import Uneven

class Fusion(Uneven):
    """`all_reduce_many`: many arrays reduced as one."""

    def all_reduce_many(
        self,
        arrays: Iterable[Any],
        op: Op | str = "sum",
        *,
        out: Iterable[Any] | None = None,
        fuse_nbytes: SupportsIndex | None = None,
        timeout: float | None = None,
    ) -> None:
        """Combine each array of the list with those of all ranks, as `all_reduce` would, but together."""
