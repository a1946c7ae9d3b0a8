"""Gradients of DistributedDataParallel in memory that all ranks of the host map: reduced without copies.

This file must not postpone annotations: torch checks that a hook's annotations are its own classes.
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
    """The shared buckets of one model, by number. A bucket that torch has reallocated is adopted again."""

    def __init__(self, model: DistributedDataParallel, group: Group) -> None:
        self._model = weakref.ref(model)
        self._group = group
        # Each buffer with its adoption, None if there was no room. Kept, so that its address is not reused.
        self._shared: dict[int, tuple[torch.Tensor, shmring.Adoption | None]] = {}
        self._averaging, self._adding, self._agreeing = (c10d.AllreduceOptions() for _ in range(3))
        self._averaging.reduceOp = dist.ReduceOp.AVG
        self._agreeing.reduceOp = dist.ReduceOp.MIN
        self._agreeing.asyncOp = False

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket over the ranks in place."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return self._reduce_sparse(buffer)
        self._share(bucket.index(), buffer)
        work = self._group.allreduce([buffer], self._averaging)
        assert work is not None  # the options ask for an asynchronous call
        return work.get_future().then(lambda future: future.value()[0])

    def _reduce_sparse(self, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        work = self._group.allreduce([gradient], self._adding)
        assert work is not None
        size = self._group.size()
        return work.get_future().then(lambda future: future.value()[0].div_(size))

    def _share(self, number: int, buffer: torch.Tensor) -> None:
        """Share the buffer unless it is shared. All ranks call this for the same bucket, or none does."""
        shared, _ = self._shared.get(number, (None, None))
        is_known = shared is not None and shared.data_ptr() == buffer.data_ptr()
        if is_known or buffer.numel() == 0 or self._has_joined():
            return
        adoption = self._adopt(buffer) if self._have_room(buffer.nbytes) else None
        self._shared[number] = buffer, adoption

    def _has_joined(self) -> bool:
        """Return whether DDP's join is on, in which ranks without inputs reduce buckets, too."""
        model = self._model()
        return model is not None and bool(model._join_config.enable)

    def _have_room(self, nbytes: int) -> bool:
        """Return whether /dev/shm has room for a bucket of each rank; without it a write raises SIGBUS."""
        file_system = os.statvfs("/dev/shm")
        room = torch.tensor([file_system.f_bavail * file_system.f_frsize > 2 * nbytes * self._group.size()])
        self._group.allreduce([room], self._agreeing)
        return bool(room)

    def _adopt(self, buffer: torch.Tensor) -> shmring.Adoption:
        # This moves the whole storage, so torch's views of it stay valid. `share_memory_` is not used: it may
        # place a header before the data.
        buffer.untyped_storage()._share_fd_cpu_()
        return self._group.adopt(buffer)


def group_of(model: DistributedDataParallel) -> Group:
    """Return the group of a model. TypeError for another object, ValueError for another backend."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model is a {type(model).__name__}; wrap it in DistributedDataParallel first")
    group = model.process_group
    if not isinstance(group, Group):
        raise ValueError(f"the model's group is {group!r}; make it with init_process_group('shmring')")
    return group


def share_buckets(model: DistributedDataParallel) -> None:
    """Reduce the model's gradients without copies, from the next backward pass on. Collective.

    model: on backend "shmring", with its ranks on one host and no communication hook. Results are the
    same: averages folded in rank order. A bucket's memory is shared when the bucket is first reduced. Memory
    shared by a rank that ends stays valid for the others. Another model raises TypeError or ValueError, on
    this rank, at once.
    """
    group = group_of(model)
    if group.comm.num_nodes > 1:
        raise ValueError(
            f"the model's ranks are on {group.comm.num_nodes} hosts; data between hosts are always copied"
        )
    model.register_comm_hook(Buckets(model, group), Buckets.reduce)
