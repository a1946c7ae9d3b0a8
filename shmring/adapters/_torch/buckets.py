"""Gradients of DistributedDataParallel in memory that all ranks of the host map: reduced where they lie.

Annotations are not put off here: torch looks whether a hook's are its own classes.
"""

import os
import weakref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import shmring

from .group import Group


class Buckets:
    """The buckets of one model that are shared, by number. A bucket that torch has made anew is adopted
    anew."""

    def __init__(self, model: DistributedDataParallel, group: Group) -> None:
        self._model = weakref.ref(model)
        self._group = group
        # With each the adoption, None where there was no room. Kept, so that no other comes to lie there.
        self._shared: dict[int, tuple[torch.Tensor, shmring.Adoption | None]] = {}
        self._averaging, self._adding, self._agreeing = (c10d.AllreduceOptions() for _ in range(3))
        self._averaging.reduceOp = dist.ReduceOp.AVG
        self._agreeing.reduceOp = dist.ReduceOp.MIN
        self._agreeing.asyncOp = False

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The average of the bucket over the ranks, in its own memory."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return self._reduce_sparse(buffer)
        self._share(bucket.index(), buffer)
        work = self._group.allreduce([buffer], self._averaging)
        assert work is not None  # as the options say nothing else
        return work.get_future().then(lambda future: future.value()[0])

    def _reduce_sparse(self, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        work = self._group.allreduce([gradient], self._adding)
        assert work is not None
        size = self._group.size()
        return work.get_future().then(lambda future: future.value()[0].div_(size))

    def _share(self, number: int, buffer: torch.Tensor) -> None:
        """Where it is not shared yet. All ranks come here for the same bucket, or none does."""
        shared, _ = self._shared.get(number, (None, None))
        is_known = shared is not None and shared.data_ptr() == buffer.data_ptr()
        if is_known or buffer.numel() == 0 or self._has_joined():
            return
        adoption = self._adopt(buffer) if self._have_room(buffer.nbytes) else None
        self._shared[number] = buffer, adoption

    def _has_joined(self) -> bool:
        """Whether ranks that have no more inputs stand in with buckets of their own; the same on all
        ranks."""
        model = self._model()
        return model is not None and bool(model._join_config.enable)

    def _have_room(self, nbytes: int) -> bool:
        """Whether torch's shared memory holds a bucket of each rank more: a touch beyond would be a
        SIGBUS."""
        file_system = os.statvfs("/dev/shm")
        room = torch.tensor([file_system.f_bavail * file_system.f_frsize > 2 * nbytes * self._group.size()])
        self._group.allreduce([room], self._agreeing)
        return bool(room)

    def _adopt(self, buffer: torch.Tensor) -> shmring.Adoption:
        # All that shares its storage goes along: the views that torch has of it. Not by `share_memory_`,
        # which may put something before the data.
        buffer.untyped_storage()._share_fd_cpu_()
        return self._group.adopt(buffer)


def share_buckets(model: DistributedDataParallel) -> None:
    """Collective: from the next backward pass on the model's gradients are reduced without being copied.

    model: on backend "shmring", its ranks on one host, without a communication hook. What it computes stays:
    averages that are folded in rank order. The memory of a bucket is shared when it is first reduced; what a
    rank that ends has shared stays the others' own. Raises TypeError or ValueError for another model, here
    and at once.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model is a {type(model).__name__}; wrap it in DistributedDataParallel before")
    group = model.process_group
    if not isinstance(group, Group):
        raise ValueError(f"the model's group is {group!r}; make it with init_process_group('shmring')")
    if group.comm.num_nodes > 1:
        raise ValueError(
            f"the model's ranks are on {group.comm.num_nodes} hosts; what crosses the wire is staged anyway"
        )
    model.register_comm_hook(Buckets(model, group), Buckets.reduce)
