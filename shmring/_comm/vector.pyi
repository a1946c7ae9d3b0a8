"""Types of VectorCollectives, the collectives whose pieces may differ in the length of dimension 0."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

from .collectives import Collectives

class VectorCollectives(Collectives):
    """The collectives whose pieces may differ in the length of dimension 0.

    With async_op=True they return a Work that holds the result.
    """

    def all_gather_v(
        self,
        x: Any,
        *,
        out: Sequence[Any] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return a list, by rank, of every rank's x. Each array has as many rows as that rank's x."""

    def gather_v(
        self,
        x: Any,
        root: SupportsIndex = 0,
        *,
        out: Sequence[Any] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return a list, by rank, of every rank's x on the root; return None on the other ranks."""

    def scatter_v(
        self,
        xs: Sequence[Any] | None = None,
        root: SupportsIndex = 0,
        *,
        out: Any = None,
        like: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return the root's xs[rank]."""

    def all_to_all_v(
        self,
        xs: Sequence[Any],
        *,
        out: Sequence[Any] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send xs[j] to rank j, and return a list whose array i comes from rank i."""
