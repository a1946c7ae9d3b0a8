"""Compressed gradients of DistributedDataParallel.

This file must not postpone annotations: torch checks that a hook's annotations are its own classes.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..._arguments import refusing
from ...methods.compression import Compressor
from .buckets import Buckets, group_of
from .group import Group


class CompressedBuckets:
    """The buckets of one model, reduced one after the other on a thread and a communicator of their own.

    A bucket takes several messages, during which the backward pass continues. The arrays over a bucket's
    gradients are kept, because a compressor identifies its residuals by the arrays.
    """

    def __init__(self, model: DistributedDataParallel, group: Group, compressor: Compressor) -> None:
        self._group = group
        self._compressor = compressor
        self._uncompressed = Buckets(model, group)
        self._gradients: dict[int, tuple[int, list[np.ndarray]]] = {}  # by number: address, arrays
        self._thread = ThreadPoolExecutor(1, "compressed buckets")

    def begin(self) -> None:
        """Make the communicator. Collective."""
        self._comm = self._group.comm.dup()

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket over the ranks in place, compressed; sparse gradients are not compressed."""
        if bucket.buffer().is_sparse:
            return self._uncompressed.reduce(bucket)
        future = torch.futures.Future()
        self._thread.submit(self._reduce_dense, bucket.buffer(), self._arrays_of(bucket), future)
        return future

    def _arrays_of(self, bucket: dist.GradBucket) -> list[np.ndarray]:
        place = bucket.buffer().data_ptr()
        known = self._gradients.get(bucket.index())
        if known is None or known[0] != place:
            known = place, [gradient.detach().numpy() for gradient in bucket.gradients()]
            self._gradients[bucket.index()] = known
        return known[1]

    def _reduce_dense(
        self, buffer: torch.Tensor, arrays: list[np.ndarray], future: torch.futures.Future[torch.Tensor]
    ) -> None:
        try:
            self._compressor.all_reduce_many(self._comm, arrays)
        except Exception as error:
            future.set_exception(error)  # raised by the backward pass
        else:
            future.set_result(buffer)


def compress_buckets(model: DistributedDataParallel, compressor: Compressor) -> None:
    """Compress the model's gradients with the compressor, from the next backward pass on. Collective.

    model: float32 or float64, on backend "shmring", without a communication hook. compressor: one of
    shmring.methods.compression, with the same arguments on all ranks, for this model only; usually wrapped
    in an ErrorFeedback. Another model or compressor raises TypeError or ValueError, and an existing hook
    torch's RuntimeError, on this rank at once, and Mismatch on ranks with valid arguments. A model on another
    backend raises on this rank alone.
    """
    group = group_of(model)
    with refusing(group.comm, "all_reduce"):  # the other ranks wait in `begin`
        if not isinstance(compressor, Compressor):
            raise TypeError(f"compressor is {compressor!r}; make one of shmring.methods.compression")
        _check_dtypes(model)
        buckets = CompressedBuckets(model, group, compressor)
        model.register_comm_hook(buckets, CompressedBuckets.reduce)
    buckets.begin()


def _check_dtypes(model: DistributedDataParallel) -> None:
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} is of {parameter.dtype}; only float32 and float64 can be compressed")
