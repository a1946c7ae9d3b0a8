"""Types of ObjectCollectives, the collectives of Python objects."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from .fused import FusedCollectives

class Slots:
    """The slots of one communicator: this rank's own, and all ranks' that an all_gather collects."""

    @property
    def own(self) -> np.ndarray[Any, np.dtype[np.uint8]]: ...
    @property
    def every(self) -> np.ndarray[Any, np.dtype[np.uint8]]: ...

class ObjectCollectives(FusedCollectives):
    """The collectives of Python objects, which are pickled."""

    def broadcast_object(
        self, item: Any = None, root: SupportsIndex = 0, *, timeout: float | None = None
    ) -> Any:
        """Return the root's object on every rank: the object itself on the root, a copy on the other
        ranks.
        """

    def all_gather_object(self, item: Any, *, timeout: float | None = None) -> list[Any]:
        """Return a list, by rank, of copies of every rank's object, also of this rank's own."""

    def gather_object(
        self, item: Any, root: SupportsIndex = 0, *, timeout: float | None = None
    ) -> list[Any] | None:
        """Return a list, by rank, of copies of every rank's object on the root; return None on the other
        ranks.
        """

    def scatter_object(
        self,
        items: Sequence[Any] | None = None,
        root: SupportsIndex = 0,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return a copy of the root's items[rank]."""
