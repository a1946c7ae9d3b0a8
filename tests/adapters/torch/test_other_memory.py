"""Tensors that get other memory, by `x.data = y`, while a call in the background uses their memory."""

import gc
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch_ranks import of_backend

COUNT = 2_000_000  # the allocator returns the memory of a freed tensor of this length to the kernel
HALF = COUNT // 2
LATER = {"async_op": True}


def coalesced(x, out):
    with c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
    return manager.works[0]


def message(x, out):
    return dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)


def message_of_comm(x, out):
    comm = dist.group.WORLD.comm
    return comm.isend(x, 1) if comm.rank == 0 else comm.irecv(x, 0)


def comm():
    return dist.group.WORLD.comm


# Each begins a call that reads x, and writes to x or to out.
CALLS = {
    "all_reduce": lambda x, out: dist.all_reduce(x, **LATER),
    "reduce": lambda x, out: dist.reduce(x, 1, **LATER),
    "broadcast": lambda x, out: dist.broadcast(x, 0, **LATER),
    "all_gather": lambda x, out: dist.all_gather_single(out, x, **LATER),
    "all_gather of adjacent tensors": lambda x, out: dist.all_gather([out[:COUNT], out[COUNT:]], x, **LATER),
    "all_to_all of pieces": lambda x, out: dist.all_to_all_single(
        out[:COUNT], x, [HALF, HALF], [HALF, HALF], **LATER
    ),
    "coalesced": coalesced,
    "message": message,
    "comm.all_reduce": lambda x, out: comm().all_reduce(x, **LATER),
    "comm.all_reduce, out": lambda x, out: comm().all_reduce(x, out=out[:COUNT], **LATER),
    "comm.all_reduce_many": lambda x, out: comm().all_reduce_many([x], **LATER),
    "comm.all_gather_v": lambda x, out: comm().all_gather_v(x, out=[out[:COUNT], out[COUNT:]], **LATER),
    "comm.message": message_of_comm,
}


def use_other_memory(rank, call):
    """Rank 0 replaces the memory of its tensors, and uses what is free, before rank 1 calls."""
    x, out = torch.ones(COUNT), torch.zeros(2 * COUNT)
    if rank == 1:
        time.sleep(0.2)
    work = CALLS[call](x, out)
    if rank == 0:
        x.data, out.data = torch.zeros(1), torch.zeros(1)
        gc.collect()
        others = [torch.full((COUNT,), 7.0) for _ in range(4)]
    work.wait()
    if rank == 0:
        return all(bool((other == 7).all()) for other in others)
    return sorted(set(x.tolist()) | set(out.tolist()))


@pytest.mark.parametrize("call", CALLS)
def test_a_call_goes_on_in_the_memory_that_it_was_given(world_of, call):
    wrote_elsewhere, values = of_backend(world_of(2), "shmring", use_other_memory, call)
    assert wrote_elsewhere
    assert set(values) <= {0.0, 1.0, 2.0}


def plan(rank):
    """A plan reads its tensor's memory in every call."""
    x, out = torch.ones(COUNT), torch.zeros(COUNT)
    total = comm().plan("all_reduce", x, out=out)
    x.data = torch.zeros(1)
    others = [torch.full((COUNT,), 7.0) for _ in range(4)]
    total()
    return sorted(set(out.tolist())), len(others)


def test_a_plan_goes_on_in_the_memory_that_it_was_given(world_of):
    assert of_backend(world_of(2), "shmring", plan) == [([2.0], 4)] * 2
