"""The calls of ranks until one of them is killed, and the expected result of each.

It follows from the seed, the rank and the number of the step, so no rank has to ask another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

MIX = 0x9E3779B97F4A7C15
ITEM_NBYTES = 8
LINE = np.int64
TAGS = 1000
MORE = 4  # items that a call may have beyond those of its size


def shift_of(seed: int, rank: int, step: int) -> int:
    """Return the number that a rank adds in a step to the common pattern."""
    value = (seed * 1000003 + rank * 7919 + step * 104729 + 1) * MIX & (1 << 64) - 1
    return (value ^ value >> 29) & (1 << 40) - 1


class Wrong(Exception):
    """A call that reported success left a wrong result."""


class Calls:
    """One rank's arrays for one collective, as large as its larger side is to be, and the checks."""

    def __init__(self, comm: Any, nbytes: int, seed: int) -> None:
        self.comm, self.seed, self.size, self.rank = comm, seed, comm.size, comm.rank
        self.count = max(1, nbytes // ITEM_NBYTES)
        self.piece = max(1, self.count // self.size)  # of the data for each rank
        self.pattern = np.random.default_rng(seed).integers(0, 1 << 40, self.count + self.size + MORE, LINE)
        self.scratch = np.empty(self.pattern.size, LINE)
        self.prepare()

    # -- for subclasses --

    def prepare(self) -> None:
        """Make the arrays."""
        self.x = np.empty(self.count, LINE)

    def call(self, step: int) -> None:
        """Fill, call, check."""
        raise NotImplementedError

    # -- the arrays and the expected results --

    def shift(self, rank: int, step: int) -> int:
        return shift_of(self.seed, rank, step)

    def fill(self, x: np.ndarray, rank: int, step: int) -> np.ndarray:
        return np.add(self.pattern[: x.size], self.shift(rank, step), out=x)

    def check(self, out: np.ndarray, step: int, ranks: Any, begin: int = 0) -> None:
        """Check that `out` is the sum over `ranks` of their values from item `begin` on."""
        ranks = list(ranks)
        expected = self.scratch[: out.size]
        np.multiply(self.pattern[begin : begin + out.size], len(ranks), out=expected)
        expected += sum(self.shift(rank, step) for rank in ranks)
        if not np.array_equal(out.reshape(-1), expected):
            where = int(np.flatnonzero(out.reshape(-1) != expected)[0])
            raise Wrong(
                f"step {step}: item {where} of {out.size} is {out.reshape(-1)[where]}, not {expected[where]}"
            )

    def everyone(self) -> range:
        return range(self.size)

    def uneven(self, rank: int) -> int:
        """Return the number of a rank's items in calls with different lengths."""
        return max(1, self.piece - 1) + rank % 2


class AllReduce(Calls):
    how: ClassVar[dict[str, str]] = {}

    def call(self, step: int) -> None:
        self.fill(self.x, self.rank, step)
        self.comm.all_reduce(self.x, **self.how)
        self.check(self.x, step, self.everyone())


class Ring(AllReduce):
    how: ClassVar[dict[str, str]] = {"algorithm": "ring"}


class Tree(AllReduce):
    how: ClassVar[dict[str, str]] = {"algorithm": "tree"}


class TwoRings(AllReduce):
    how: ClassVar[dict[str, str]] = {"algorithm": "bidirectional_ring"}


class Halving(AllReduce):
    how: ClassVar[dict[str, str]] = {"algorithm": "halving_doubling"}


class DoubleTree(AllReduce):
    how: ClassVar[dict[str, str]] = {"algorithm": "double_tree"}


class Shared(AllReduce):
    """Zero-copy: all ranks read and write the arrays in place."""

    def prepare(self) -> None:
        self.x = self.comm.empty(self.count, LINE)


class Async(Calls):
    def call(self, step: int) -> None:
        self.fill(self.x, self.rank, step)
        self.comm.all_reduce(self.x, async_op=True).wait()
        self.check(self.x, step, self.everyone())


class Planned(Calls):
    def prepare(self) -> None:
        super().prepare()
        self.plan = self.comm.plan("all_reduce", self.x)

    def call(self, step: int) -> None:
        self.fill(self.x, self.rank, step)
        self.plan()
        self.check(self.x, step, self.everyone())


class Many(Calls):
    def prepare(self) -> None:
        half = max(1, self.count // 2)
        self.xs = [np.empty(n, LINE) for n in (half, 1, max(1, half // 2), 3)]

    def call(self, step: int) -> None:
        for x in self.xs:
            self.fill(x, self.rank, step)
        self.comm.all_reduce_many(self.xs)
        for x in self.xs:
            self.check(x, step, self.everyone())


class Reduce(Calls):
    def call(self, step: int) -> None:
        root = step % self.size
        self.fill(self.x, self.rank, step)
        self.comm.reduce(self.x, root=root)
        self.check(self.x, step, self.everyone() if self.rank == root else [self.rank])


class Broadcast(Calls):
    def call(self, step: int) -> None:
        root = step % self.size
        self.fill(self.x, self.rank, step)
        self.comm.broadcast(self.x, root)
        self.check(self.x, step, [root])


class Scan(Calls):
    def call(self, step: int) -> None:
        self.fill(self.x, self.rank, step)
        self.comm.scan(self.x)
        self.check(self.x, step, range(self.rank + 1))


class Exscan(Calls):
    def call(self, step: int) -> None:
        self.fill(self.x, self.rank, step)
        self.comm.exscan(self.x)
        self.check(self.x, step, range(self.rank) if self.rank else [0])


class ReduceScatter(Calls):
    def prepare(self) -> None:
        self.x = np.empty((self.size, self.piece), LINE)
        self.pattern = np.resize(self.pattern, self.x.size)
        self.scratch = np.empty(self.x.size, LINE)

    def call(self, step: int) -> None:
        self.fill(self.x.reshape(-1), self.rank, step)
        out = self.comm.reduce_scatter(self.x)
        self.check(out, step, self.everyone(), self.rank * self.piece)


class Scatter(ReduceScatter):
    def call(self, step: int) -> None:
        root = step % self.size
        out = np.empty(self.piece, LINE)
        if self.rank == root:
            self.fill(self.x.reshape(-1), root, step)
        self.comm.scatter(self.x if self.rank == root else None, root, out=out)
        self.check(out, step, [root], self.rank * self.piece)


class AllToAll(ReduceScatter):
    def call(self, step: int) -> None:
        self.fill(self.x.reshape(-1), self.rank, step)
        for rank, row in enumerate(self.comm.all_to_all(self.x)):
            self.check(row, step, [rank], self.rank * self.piece)


class AllGather(Calls):
    def prepare(self) -> None:
        self.x = np.empty(self.piece, LINE)

    def call(self, step: int) -> None:
        self.fill(self.x, self.rank, step)
        for rank, row in enumerate(self.comm.all_gather(self.x)):
            self.check(row, step, [rank])


class Gather(AllGather):
    def call(self, step: int) -> None:
        root = step % self.size
        self.fill(self.x, self.rank, step)
        out = self.comm.gather(self.x, root)
        for rank, row in enumerate(out if self.rank == root else ()):
            self.check(row, step, [rank])


class AllGatherV(Calls):
    def prepare(self) -> None:
        self.x = np.empty(self.uneven(self.rank), LINE)

    def call(self, step: int) -> None:
        self.fill(self.x, self.rank, step)
        for rank, row in enumerate(self.comm.all_gather_v(self.x)):
            self.check_row(row, rank, step)

    def check_row(self, row: np.ndarray, rank: int, step: int) -> None:
        if row.size != self.uneven(rank):
            raise Wrong(f"step {step}: {row.size} items of rank {rank}")
        self.check(row, step, [rank])


class GatherV(AllGatherV):
    def call(self, step: int) -> None:
        root = step % self.size
        self.fill(self.x, self.rank, step)
        out = self.comm.gather_v(self.x, root)
        for rank, row in enumerate(out if self.rank == root else ()):
            self.check_row(row, rank, step)


class ScatterV(Calls):
    def prepare(self) -> None:
        self.xs = [np.empty(self.uneven(rank), LINE) for rank in range(self.size)]

    def call(self, step: int) -> None:
        root = step % self.size
        out = np.empty(self.uneven(self.rank), LINE)
        if self.rank == root:
            for x in self.xs:
                self.fill(x, root, step)
        self.comm.scatter_v(self.xs if self.rank == root else None, root, out=out)
        self.check(out, step, [root])


class AllToAllV(Calls):
    def prepare(self) -> None:
        self.xs = [np.empty(self.uneven(rank), LINE) for rank in range(self.size)]

    def call(self, step: int) -> None:
        for x in self.xs:
            self.fill(x, self.rank, step)
        for rank, row in enumerate(self.comm.all_to_all_v(self.xs)):
            if row.size != self.uneven(self.rank):
                raise Wrong(f"step {step}: {row.size} items of rank {rank}")
            self.check(row, step, [rank])


class Barrier(Calls):
    def call(self, step: int) -> None:
        self.comm.barrier()


class SendRecv(Calls):
    def prepare(self) -> None:
        super().prepare()
        self.out = np.empty_like(self.x)

    def call(self, step: int) -> None:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.fill(self.x, self.rank, step)
        self.comm.sendrecv(self.x, after, self.out, before, step % TAGS, step % TAGS)
        self.check(self.out, step, [before])


CALLS: dict[str, Callable[[Any, int, int], Calls]] = {
    "all_reduce": AllReduce,
    "all_reduce ring": Ring,
    "all_reduce tree": Tree,
    "all_reduce bidirectional_ring": TwoRings,
    "all_reduce halving_doubling": Halving,
    "all_reduce double_tree": DoubleTree,
    "all_reduce shared": Shared,
    "all_reduce async": Async,
    "all_reduce plan": Planned,
    "all_reduce_many": Many,
    "reduce": Reduce,
    "broadcast": Broadcast,
    "scatter": Scatter,
    "gather": Gather,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_to_all": AllToAll,
    "scan": Scan,
    "exscan": Exscan,
    "all_gather_v": AllGatherV,
    "gather_v": GatherV,
    "scatter_v": ScatterV,
    "all_to_all_v": AllToAllV,
    "barrier": Barrier,
    "send recv": SendRecv,
}
