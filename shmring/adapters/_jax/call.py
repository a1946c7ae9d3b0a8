"""A collective in a program of JAX: its shapes, how it runs, and its gradient. JAX is not imported here."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import shmring

Shape = tuple[int, ...]

_groups: weakref.WeakKeyDictionary[shmring.Comm, Group] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


@dataclass(frozen=True)
class Group:
    """A communicator as programs refer to it. They do not keep it alive.

    The name has a number that no other communicator of this process gets. Processes that run the same code
    give the same names, so the next job can use the compilation cache that JAX keeps on disk.
    """

    name: str
    rank: int
    size: int
    comm: weakref.ref[shmring.Comm] = field(compare=False)


def group_of(comm: shmring.Comm) -> Group:
    """Return the communicator's group, the same object in each call."""
    group = _groups.get(comm)
    if group is None:
        name = f"communicator {next(_numbers)} of {comm.size} ranks"
        group = _groups[comm] = Group(name, comm.rank, comm.size, weakref.ref(comm))
    return group


@dataclass(frozen=True)
class Call:
    """A collective, or a message, in a program. Equal calls on equal arrays are compiled once."""

    group: Group
    kind: str
    how: tuple[Any, ...] = ()  # op; root; rank and tag, and for recv the results' shapes and dtypes

    @property
    def text(self) -> str:
        """Return the call's name in compiled programs. It is the same in every process, so has no address."""
        return " ".join([self.kind, *map(str, self.how), "on", self.group.name])

    def results(self, leaves: Sequence[tuple[Shape, Any]]) -> list[tuple[Shape, Any]]:
        """Return shapes and dtypes of the results from those of the leaves. Raise ValueError if they do not
        fit.
        """
        if self.kind in ("send", "barrier"):
            return []
        if self.kind == "recv":
            return list(self.how[2])
        return [(self._shape(shape), dtype) for shape, dtype in leaves]

    def _shape(self, shape: Shape) -> Shape:
        size = self.group.size
        if self.kind == "all_gather":
            return (size, *shape)
        if self.kind in ("reduce_scatter", "all_to_all") and (not shape or shape[0] % size):
            raise ValueError(f"a leaf of shape {shape} has no dimension 0 that {size} ranks can share")
        if self.kind == "reduce_scatter":
            return shape[1:] if shape[0] == size else (shape[0] // size, *shape[1:])
        return shape

    def run(self, comm: shmring.Comm, arrays: list[Any], outs: list[Any]) -> None:
        """Make the call on the group's communicator."""
        if self.kind == "all_reduce":
            comm.all_reduce_many(arrays, self.how[0], out=outs)
        elif self.kind == "barrier":
            comm.barrier()
        elif self.kind == "send":
            for array in arrays:
                comm.send(array, *self.how)
        elif self.kind == "recv":
            for out in outs:
                _receive(comm, out, *self.how[:2])
        else:
            for array, out in zip(arrays, outs, strict=True):
                getattr(comm, self.kind)(array, *self.how, out=out)

    def check_gradient(self) -> None:
        """Raise TypeError if the call has no gradient."""
        if self.kind in ("all_reduce", "reduce_scatter") and self.how[0] not in ("sum", "avg"):
            raise TypeError(f"{self.kind} with op={self.how[0]!r} has no gradient here; sum and avg have one")
        if self.kind in ("send", "recv"):
            raise TypeError(f"{self.kind} has no gradient here; use all_to_all or all_gather")

    def transposed(self, cotangents: list[Any], run: Callable[[Call, list[Any]], list[Any]]) -> list[Any]:
        """Return the cotangents of the leaves, up to their shapes.

        run: makes another call on arrays of the same library.
        """
        self.check_gradient()
        size = self.group.size
        if self.kind == "all_gather":
            return run(Call(self.group, "reduce_scatter", ("sum",)), cotangents)
        if self.kind == "broadcast":
            import jax

            sums = run(Call(self.group, "all_reduce", ("sum",)), cotangents)
            is_root = self.group.rank == self.how[0]
            # The result depends on the cotangents on all ranks: `vmap` batches the next call on all or none.
            return [jax.numpy.where(is_root, leaf, jax.numpy.zeros_like(leaf)) for leaf in sums]
        if self.kind in ("all_reduce", "all_to_all"):
            return run(self, cotangents)
        whole = run(Call(self.group, "all_gather"), cotangents)
        return [leaf / size for leaf in whole] if self.how[0] == "avg" else whole


def _receive(comm: shmring.Comm, out: shmring.Memory, source: int, tag: int) -> None:
    status, wanted = comm.recv(out, source, tag), math.prod(out.shape)
    if status.count != wanted:
        raise ValueError(f"rank {source} sent {status.count} elements, and the program expects {wanted}")
