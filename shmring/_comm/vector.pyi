"""Collectives whose pieces differ in length of dimension 0: they take and return lists of arrays by rank."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

from .collectives import Collectives

class VectorCollectives(Collectives):
    """The collectives whose pieces may have another length of dimension 0 on every rank.

    With async_op=True they return a Work that has the result.
    """

    def all_gather_v(
        self,
        x: Any,
        *,
        out: Sequence[Any] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's x on every rank: returns a list of arrays by rank, of as many rows as each gave."""

    def gather_v(
        self,
        x: Any,
        root: SupportsIndex = 0,
        *,
        out: Sequence[Any] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's x on the root, which returns a list of arrays by rank; the others return None."""

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
        """One of the root's arrays for each rank: returns xs[rank]."""

    def all_to_all_v(
        self,
        xs: Sequence[Any],
        *,
        out: Sequence[Any] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """xs[j] of rank i becomes result[i] of rank j: returns a list of arrays by rank."""
