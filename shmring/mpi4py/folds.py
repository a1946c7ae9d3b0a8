"""Reductions that shmring has no operation for: the ranks' arrays are gathered, and combined in rank order.

They need the memory of all ranks' arrays on each rank that gets a result. All ranks get the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .calls import Call, Kind
from .messages import Data, handle
from .types import Datatype


class FoldCall(Call):
    """A reduction by a gather and a fold."""

    def __init__(
        self, op: Any, context: Any, kind: int, root: int, given: Data, taken: Data | None, blocks: int
    ) -> None:
        self.op, self.kind, self.root, self.blocks = op, kind, root, blocks
        self.context = context
        self.given, self.taken = given, taken
        self.datatype = handle(Datatype, given.type)
        self.gathered: Any = None

    def perform(self) -> Any:
        return self._gather(False)

    def begin(self) -> Any:
        return self._gather(True)

    def _gather(self, async_op: bool) -> Any:
        comm, x = self.context.comm, self.given.bytes
        gets_result = self.kind != Kind.reduce or self.context.rank == self.root
        self.gathered = np.empty(self.context.size * x.nbytes, np.uint8) if gets_result else None
        if self.kind == Kind.reduce:
            return comm.gather(x, self.root, out=self.gathered, async_op=async_op)
        return comm.all_gather(x, out=self.gathered, async_op=async_op)

    def conclude(self) -> None:
        if self.gathered is None or self.taken is None:
            return
        arrays = self.gathered.view(self.given.type.dtype).reshape(self.context.size, -1)
        first, last = {Kind.scan: (0, self.context.rank + 1), Kind.exscan: (0, self.context.rank)}.get(
            self.kind, (0, self.context.size)
        )
        if first == last:
            return
        result = arrays[first].copy()
        for higher in arrays[first + 1 : last]:  # these stay as they are: an exception may repeat this
            lower, result = result, higher.copy()
            self.op.fold(lower, result, self.datatype)
        if self.kind == Kind.reduce_scatter:
            result = result.reshape(self.blocks, -1)[self.context.rank]
        self.taken.items[: result.size] = result
        super().conclude()
