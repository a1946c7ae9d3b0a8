"""Every form in which torch binds the methods of a process group, on shmring and gloo in the same ranks."""

import datetime

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch_ranks import of_backend

LIMIT = datetime.timedelta(seconds=20)
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Given:
    """The tensors of one call on one rank, which begin with different values on each rank."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.x = torch.arange(4.0) + 10 * rank
        self.y = torch.arange(4.0) - rank
        self.z = torch.zeros(4)
        self.parts = [torch.full((2,), 10.0 * rank + r) for r in range(size)]
        self.outs = [torch.zeros(4) for _ in range(size)]
        self.more_outs = [torch.zeros(4) for _ in range(size)]
        self.wide = torch.zeros(4 * size)
        self.row = torch.arange(float(2 * size)) + 100 * rank
        self.came = torch.zeros(2)
        self.whole = torch.arange(4) + rank

    def values(self):
        return [value for value in vars(self).values() if isinstance(value, (torch.Tensor, list))]


def options(kind, **values):
    made = getattr(c10d, kind)()
    for name, value in values.items():
        setattr(made, name, value)
    return made


CALLS = {
    # all_reduce
    "allreduce(list)": lambda g, t: g.allreduce([t.x]),
    "allreduce(list, opts)": lambda g, t: g.allreduce([t.x], options("AllreduceOptions", reduceOp=MAX)),
    "allreduce(opts=)": lambda g, t: g.allreduce(tensors=[t.x], opts=c10d.AllreduceOptions()),
    "allreduce(list, op)": lambda g, t: g.allreduce([t.x], MAX),
    "allreduce(list, op, timeout)": lambda g, t: g.allreduce([t.x], MAX, LIMIT),
    "allreduce(list, op=)": lambda g, t: g.allreduce([t.x], op=MAX),
    "allreduce(list, timeout=)": lambda g, t: g.allreduce([t.x], timeout=LIMIT),
    "allreduce(tensor)": lambda g, t: g.allreduce(t.x),
    "allreduce(tensor, op)": lambda g, t: g.allreduce(t.x, MAX),
    "allreduce(tensor, enum)": lambda g, t: g.allreduce(t.x, dist.ReduceOp(MAX)),
    "allreduce(tensor, op, timeout)": lambda g, t: g.allreduce(t.x, MAX, LIMIT),
    "allreduce(tensor=)": lambda g, t: g.allreduce(tensor=t.x, op=MAX, timeout=LIMIT),
    "allreduce(tensor, None)": lambda g, t: g.allreduce(t.x, MAX, None),
    "allreduce(two)": lambda g, t: g.allreduce([t.x, t.y]),
    "allreduce(two, op)": lambda g, t: g.allreduce([t.x, t.y], MAX),
    "allreduce(tuple)": lambda g, t: g.allreduce((t.x,)),
    "allreduce(unlike)": lambda g, t: g.allreduce([t.x, t.came]),
    "allreduce(unlike dtypes)": lambda g, t: g.allreduce([t.x, t.whole]),
    "allreduce(empty list)": lambda g, t: g.allreduce([]),
    "allreduce(nothing)": lambda g, t: g.allreduce(),
    "allreduce(number)": lambda g, t: g.allreduce(3),
    "allreduce(tensor, opts)": lambda g, t: g.allreduce(t.x, c10d.AllreduceOptions()),
    "allreduce(tensor, number)": lambda g, t: g.allreduce(t.x, 3),
    "allreduce(tensor, op, number)": lambda g, t: g.allreduce(t.x, SUM, 3),
    "allreduce(wrong keyword)": lambda g, t: g.allreduce([t.x], root=1),
    "allreduce_coalesced(list)": lambda g, t: g.allreduce_coalesced([t.x, t.y]),
    "allreduce_coalesced(tensors=)": lambda g, t: g.allreduce_coalesced(
        tensors=[t.x, t.y], opts=c10d.AllreduceCoalescedOptions()
    ),
    # reduce
    "reduce(list)": lambda g, t: g.reduce([t.x]),
    "reduce(list, opts)": lambda g, t: g.reduce([t.x], options("ReduceOptions", rootRank=1, reduceOp=MAX)),
    "reduce(tensor, root)": lambda g, t: g.reduce(t.x, 1),
    "reduce(tensor, root, op)": lambda g, t: g.reduce(t.x, 1, MAX),
    "reduce(tensor, root, op, timeout)": lambda g, t: g.reduce(t.x, 1, MAX, LIMIT),
    "reduce(tensor=)": lambda g, t: g.reduce(tensor=t.x, root=1, op=MAX, timeout=LIMIT),
    "reduce(tensor, root=, op=)": lambda g, t: g.reduce(t.x, root=1, op=MAX),
    "reduce(tensor)": lambda g, t: g.reduce(t.x),
    "reduce(list, root)": lambda g, t: g.reduce([t.x], 1),
    "reduce(two)": lambda g, t: g.reduce([t.x, t.y]),
    # broadcast
    "broadcast(list)": lambda g, t: g.broadcast([t.x]),
    "broadcast(list, opts)": lambda g, t: g.broadcast([t.x], options("BroadcastOptions", rootRank=1)),
    "broadcast(tensor, root)": lambda g, t: g.broadcast(t.x, 1),
    "broadcast(tensor, root, timeout)": lambda g, t: g.broadcast(t.x, 1, LIMIT),
    "broadcast(tensor=)": lambda g, t: g.broadcast(tensor=t.x, root=1, timeout=LIMIT),
    "broadcast(tensor)": lambda g, t: g.broadcast(t.x),
    "broadcast(list, root)": lambda g, t: g.broadcast([t.x], 1),
    "broadcast(two)": lambda g, t: g.broadcast([t.x, t.y]),
    "broadcast(two, second)": lambda g, t: g.broadcast(
        [t.x, t.y], options("BroadcastOptions", rootRank=1, rootTensor=1)
    ),
    "broadcast(unlike)": lambda g, t: g.broadcast([t.x, t.came]),
    "broadcast(empty list)": lambda g, t: g.broadcast([]),
    # all_gather
    "allgather(lists)": lambda g, t: g.allgather([t.outs], [t.x]),
    "allgather(lists, opts)": lambda g, t: g.allgather([t.outs], [t.x], c10d.AllgatherOptions()),
    "allgather(output_tensors=)": lambda g, t: g.allgather(output_tensors=[t.outs], input_tensors=[t.x]),
    "allgather(list, tensor)": lambda g, t: g.allgather(t.outs, t.x),
    "allgather(list, tensor, timeout)": lambda g, t: g.allgather(t.outs, t.x, LIMIT),
    "allgather(input_tensor=)": lambda g, t: g.allgather(
        output_tensors=t.outs, input_tensor=t.x, timeout=LIMIT
    ),
    "allgather(list, list)": lambda g, t: g.allgather(t.outs, [t.x]),
    "allgather(two)": lambda g, t: g.allgather([t.outs, t.more_outs], [t.x, t.y]),
    "allgather(one for two)": lambda g, t: g.allgather([t.outs], [t.x, t.y]),
    "allgather_coalesced(input_list=)": lambda g, t: g.allgather_coalesced(
        output_lists=[[out] for out in t.outs], input_list=[t.x]
    ),
    "all_gather_single": lambda g, t: g.all_gather_single(t.wide, t.x),
    "all_gather_single(output=)": lambda g, t: g.all_gather_single(output=t.wide, input=t.x),
    "_allgather_base": lambda g, t: g._allgather_base(t.wide, t.x, c10d.AllgatherOptions()),
    # gather
    "gather(lists)": lambda g, t: g.gather([t.outs] if t.rank == 0 else [], [t.x]),
    "gather(lists, opts)": lambda g, t: g.gather(
        [t.outs] if t.rank == 1 else [], [t.x], options("GatherOptions", rootRank=1)
    ),
    "gather(list, tensor, root)": lambda g, t: g.gather(t.outs if t.rank == 1 else [], t.x, 1),
    "gather(list, tensor, root, timeout)": lambda g, t: g.gather(
        t.outs if t.rank == 1 else [], t.x, 1, LIMIT
    ),
    "gather(input_tensor=)": lambda g, t: g.gather(
        output_tensors=t.outs if t.rank == 1 else [], input_tensor=t.x, root=1, timeout=LIMIT
    ),
    "gather(list, tensor)": lambda g, t: g.gather(t.outs, t.x),
    # scatter
    "scatter(lists)": lambda g, t: g.scatter([t.came], [t.parts] if t.rank == 0 else []),
    "scatter(lists, opts)": lambda g, t: g.scatter(
        [t.came], [t.parts] if t.rank == 1 else [], options("ScatterOptions", rootRank=1)
    ),
    "scatter(tensor, list, root)": lambda g, t: g.scatter(t.came, t.parts if t.rank == 1 else [], 1),
    "scatter(tensor, list, root, timeout)": lambda g, t: g.scatter(
        t.came, t.parts if t.rank == 1 else [], 1, LIMIT
    ),
    "scatter(output_tensor=)": lambda g, t: g.scatter(
        output_tensor=t.came, input_tensors=t.parts if t.rank == 1 else [], root=1, timeout=LIMIT
    ),
    "scatter(tensor, list)": lambda g, t: g.scatter(t.came, t.parts),
    # reduce_scatter
    "reduce_scatter(lists)": lambda g, t: g.reduce_scatter([t.came], [t.parts]),
    "reduce_scatter(lists, opts)": lambda g, t: g.reduce_scatter(
        [t.came], [t.parts], options("ReduceScatterOptions", reduceOp=MAX)
    ),
    "reduce_scatter(tensor, list)": lambda g, t: g.reduce_scatter(t.came, t.parts),
    "reduce_scatter(tensor, list, op)": lambda g, t: g.reduce_scatter(t.came, t.parts, MAX),
    "reduce_scatter(tensor, list, op, timeout)": lambda g, t: g.reduce_scatter(t.came, t.parts, MAX, LIMIT),
    "reduce_scatter(output=)": lambda g, t: g.reduce_scatter(
        output=t.came, input=t.parts, op=MAX, timeout=LIMIT
    ),
    "reduce_scatter_single": lambda g, t: g.reduce_scatter_single(t.came, t.row),
    "_reduce_scatter_base(outputTensor=)": lambda g, t: g._reduce_scatter_base(
        outputTensor=t.came, inputTensor=t.row
    ),
    # all_to_all
    "alltoall_base(opts)": lambda g, t: g.alltoall_base(t.row * 0, t.row, [], [], c10d.AllToAllOptions()),
    "alltoall_base": lambda g, t: g.alltoall_base(t.wide[: len(t.row)], t.row, [], []),
    "alltoall_base(timeout)": lambda g, t: g.alltoall_base(t.wide[: len(t.row)], t.row, [], [], LIMIT),
    "alltoall_base(timeout=)": lambda g, t: g.alltoall_base(
        output=t.wide[: len(t.row)], input=t.row, output_split_sizes=[], input_split_sizes=[], timeout=LIMIT
    ),
    "all_to_all_single(timeout)": lambda g, t: g.all_to_all_single(
        t.wide[: len(t.row)], t.row, [2] * t.size, [2] * t.size, LIMIT
    ),
    "alltoall_base(no sizes)": lambda g, t: g.alltoall_base(t.wide[: len(t.row)], t.row),
    "alltoall": lambda g, t: g.alltoall(t.outs, [t.x] * t.size),
    "alltoall(opts)": lambda g, t: g.alltoall(t.outs, [t.x] * t.size, c10d.AllToAllOptions()),
    "alltoall(output_tensors=)": lambda g, t: g.alltoall(
        output_tensors=t.outs, input_tensors=[t.x] * t.size, opts=c10d.AllToAllOptions()
    ),
    "alltoall(timeout)": lambda g, t: g.alltoall(t.outs, [t.x] * t.size, LIMIT),
    "alltoall(tensor)": lambda g, t: g.alltoall(t.wide, t.wide),
    # barrier
    "barrier": lambda g, t: g.barrier(),
    "barrier(opts)": lambda g, t: g.barrier(c10d.BarrierOptions()),
    "barrier(opts=)": lambda g, t: g.barrier(opts=c10d.BarrierOptions()),
    "barrier(timeout)": lambda g, t: g.barrier(LIMIT),
    "barrier(timeout=)": lambda g, t: g.barrier(timeout=LIMIT),
    "barrier(number)": lambda g, t: g.barrier(3),
    # messages
    "send, recv": lambda g, t: (
        g.send([t.x], 1, 7) if t.rank == 0 else g.recv([t.y], 0, 7) if t.rank == 1 else g.barrier
    ),
    "send(tensors=)": lambda g, t: (
        g.send(tensors=[t.x], dstRank=1, tag=7)
        if t.rank == 0
        else g.recv(tensors=[t.y], srcRank=0, tag=7)
        if t.rank == 1
        else g.barrier
    ),
}


def backend_of(group):
    return group._get_backend(torch.device("cpu"))


READ = {
    "use_pg_for_symm_mem_rendezvous": lambda g: g.use_pg_for_symm_mem_rendezvous,
    "bound_device_id": lambda g: g.bound_device_id,
    "rank": lambda g: g.rank(),
    "size": lambda g: g.size(),
    "options._timeout": lambda g: backend_of(g).options._timeout.total_seconds(),
    "_has_hooks": lambda g: g._has_hooks(),
    "set_timeout(text)": lambda g: g.set_timeout("1 s"),
    "_set_group_name(number)": lambda g: g._set_group_name(3),
    "_set_group_desc(number)": lambda g: g._set_group_desc(3),
    "supports_shrinking": lambda g: backend_of(g).supports_shrinking,
    "supports_tensor_alloc": lambda g: backend_of(g).supports_tensor_alloc(torch.device("cpu")),
    "eager_connect_single_device": lambda g: backend_of(g).eager_connect_single_device(torch.device("cpu")),
    "memory_stats": lambda g: backend_of(g).memory_stats(),
    "suspend": lambda g: backend_of(g).suspend(),
    "resume": lambda g: backend_of(g).resume(),
}
READ_SINCE_2_14 = {
    "get_backend": lambda g: g.get_backend(torch.device("cpu")).size(),
    "supports_reconfigure": lambda g: g.supports_reconfigure,
    "supports_window": lambda g: g.supports_window,
    "new_window": lambda g: g.new_window(),
    "_add_ephemeral_timeout": lambda g: g._add_ephemeral_timeout(LIMIT),
    "_wait_for_pending_works": lambda g: g._wait_for_pending_works(),
    "register_abort_hook": lambda g: g.register_abort_hook(1, print),
}
if hasattr(dist.ProcessGroup, "supports_window"):
    READ |= READ_SINCE_2_14


def answers(rank):
    """Return, by call, the tensors after it or the class of its error. All ranks pass the same kinds."""
    group, found = dist.group.WORLD, {}
    for name, call in CALLS.items():
        given = Given(rank, group.size())
        try:
            work = call(group, given)
            if hasattr(work, "wait"):
                work.wait()
            if name.startswith("reduce(") and rank != (0 if name == "reduce(list)" else 1):
                given.x.zero_()  # gloo leaves partial results there
            found[name] = [
                [x.tolist() for x in v] if isinstance(v, list) else v.tolist() for v in given.values()
            ]
        except Exception as error:
            kinds = [kind.__name__ for kind in (TypeError, RuntimeError) if isinstance(error, kind)]
            found[name] = kinds or repr(error)
        group.barrier().wait()
    for name, read in READ.items():
        try:
            found[name] = read(group)
        except Exception as error:
            found[name] = type(error).__name__
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_form_is_answered_as_by_gloo(world_of, size):
    ours = of_backend(world_of(size), "shmring", answers)
    wanted = of_backend(world_of(size), "gloo", answers)
    for rank in range(size):
        unlike = {
            name: (ours[rank][name], want) for name, want in wanted[rank].items() if ours[rank][name] != want
        }
        assert not unlike, f"on rank {rank}: (ours, gloo's)"


def gather_to_one(rank):
    x = torch.arange(3.0) + rank
    for asynchronous in (False, True):
        out = torch.zeros(dist.get_world_size(), 3) if rank == 1 else None
        work = dist.gather_single(x, out, dst=1, async_op=asynchronous)
        if asynchronous:
            work.wait()
        if rank == 1:
            assert out.tolist() == [[r, r + 1, r + 2] for r in range(dist.get_world_size())]
    return rank


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch has gather_single from 2.14 on")
def test_gather_single(world_of):
    assert of_backend(world_of(3), "shmring", gather_to_one) == [0, 1, 2]
