"""The features of torch that use process groups, on shmring: the same results as on gloo, or as in one
process.

DDP in all its modes, functional collectives, torch.compile, gradient scaling, subgroups, torchrun; and the
death of a peer.
"""

import datetime
import gc
import importlib.util
import os
import signal
import sys
import threading
import time

import pytest
from ranks import free_port

import shmring

if importlib.util.find_spec("torch") is None:
    pytest.skip("not installed: torch", allow_module_level=True)

import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from engines import output_of, start, write_script
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_ranks import LIMIT_S, assert_same, die, in_child, news_of_death, of_backend, of_both

from shmring.adapters._torch import meeting
from shmring.adapters.torch import meet

STEPS = 3
ROUNDED = 5e-3  # gradients that travelled with 8 or 11 bits


class Net(nn.Module):
    """A net whose batches use one branch or both."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.left = nn.Linear(16, 4)
        self.right = nn.Linear(16, 4)

    def forward(self, x, way):
        x = torch.relu(self.stem(x))
        if way == "both":
            return self.left(x) + self.right(x)
        return self.left(x) if way == "left" else self.right(x)


def new_net():
    torch.manual_seed(1)
    return Net()


def batch(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(net, rank, step, way):
    return net(batch(rank, step), way).square().mean()


def both(rank, step):
    return "both"


def left(rank, step):
    return "left"


def by_turns(rank, step):
    """No way is unused by all, but each is by some."""
    return ("left", "right")[(rank + step // 2) % 2]


def weights(net):
    return [parameter.detach() for parameter in net.parameters()]


@in_child
def train_alone(ways, size=2):
    """Return the weights after steps on the data of all ranks together."""
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(net, rank, step, ways(rank, step)) for rank in range(size)) / size).backward()
        optimizer.step()
    return [tensor.numpy() for tensor in weights(net)]


def new_ddp(net=None, **how):
    """With a bucket for each parameter, once the buckets are known to be that small."""
    return DDP(net or new_net(), bucket_cap_mb=1e-5, **how)


# ---- DDP --------------------------------------------------------------------------------------------------


def train(rank, ways, how, hook=None):
    net = new_ddp(**how)
    if hook is not None:
        hook(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, rank, step, ways(rank, step)).backward()
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize(
    ("ways", "how"),
    [
        (both, {}),
        (by_turns, {"find_unused_parameters": True}),
        (left, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        (left, {"static_graph": True}),
        (both, {"gradient_as_bucket_view": True}),
    ],
    ids=["plain", "unused", "unused-views", "static", "views"],
)
def test_ddp(world_of, ways, how):
    found = of_both(world_of(2), train, ways, how)
    expected = train_alone(ways)
    assert_same(found, [expected] * 2, 1e-5)


def accumulate(rank):
    """Accumulate two batches per step; the gradients of the first stay local."""
    net = new_ddp()
    apart = []
    for step in range(0, 2 * STEPS, 2):
        net.zero_grad()
        with net.no_sync():
            loss_of(net, rank, step, "both").backward()
        apart.append(net.module.stem.weight.grad.clone())
        loss_of(net, rank, step + 1, "both").backward()
    return apart, [parameter.grad for parameter in net.parameters()]


def test_no_sync(world_of):
    (apart, together), (other_apart, other_together) = of_both(world_of(2), accumulate)
    assert_same(together, other_together)
    assert all((one != other).any() for one, other in zip(apart, other_apart, strict=True))


def train_with_join(rank):
    """Rank 1 has two batches more than rank 0."""
    net = new_ddp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Join([net]):
        for step in range(STEPS + 2 * rank):
            optimizer.zero_grad()
            loss_of(net, rank, step, "both").backward()
            optimizer.step()
    return weights(net)


def test_join(world_of):
    found = of_both(world_of(2), train_with_join)
    assert_same(found[0], found[1])
    assert abs(found[0][0] - train_alone(both)[0]).max() > 1e-4  # rank 1's last batches counted


def builtin(kind):
    return lambda net: net._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))


def power_sgd(net):
    """Register a PowerSGD hook whose rank loses nothing: no matrix of this size has a greater rank."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=6, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def bf16_hook(state, bucket):
    """Under a name of its own: by its name torch lets torch's be used with accelerators only."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS = {
    "allreduce": lambda net: net.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda net: net.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda net: net.register_comm_hook(None, bf16_hook),
    "builtin": builtin("ALLREDUCE"),
    "builtin-fp16": builtin("FP16_COMPRESS"),
}


def train_with_hook(rank, name):
    return train(rank, both, {}, HOOKS[name])


@pytest.mark.parametrize("name", HOOKS)
def test_comm_hooks(world_of, name):
    found = of_both(world_of(2), train_with_hook, name)
    assert_same(found[0], found[1])
    expected = train_alone(both)
    assert_same(found[0], expected, 1e-5 if name in ("allreduce", "builtin") else ROUNDED)


def train_with_power_sgd(rank):
    return train(rank, both, {}, power_sgd)


def test_power_sgd(world_of):
    """Its callbacks wait for other collectives; gloo mixes these up if there are several buckets."""
    expected = train_alone(both)
    assert_same(of_backend(world_of(2), "shmring", train_with_power_sgd), [expected] * 2, 1e-4)


def average_by_hand(rank):
    """Average gradients in plain code, without DDP."""
    net = new_net()

    def average(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        return gradient

    for parameter in net.parameters():
        parameter.register_hook(average)
    loss_of(net, rank, 0, "both").backward()
    return [parameter.grad for parameter in net.parameters()]


@in_child
def gradients_alone():
    net = new_net()
    (sum(loss_of(net, rank, 0, "both") for rank in range(2)) / 2).backward()
    return [parameter.grad.numpy() for parameter in net.parameters()]


def test_hooks_of_parameters(world_of):
    assert_same(of_backend(world_of(2), "shmring", average_by_hand), [gradients_alone()] * 2)


# ---- scaled gradients -------------------------------------------------------------------------------------


def train_scaled(rank):
    """In step 1 rank 1 has an infinity: (scale, whether the weights moved) of each step."""
    net = new_ddp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    seen = []
    for step in range(STEPS):
        before = weights(net)[0].clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net, rank, step, "both")
        if (rank, step) == (1, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), bool((weights(net)[0] != before).any())))
    return seen, weights(net)


def test_an_infinity_on_one_rank_skips_the_step_on_all(world_of):
    found = of_both(world_of(2), train_scaled)
    assert_same(found[0], found[1])
    assert found[0][0] == [(8.0, True), (4.0, False), (4.0, True)]


# ---- objects ----------------------------------------------------------------------------------------------


def exchange_objects(rank):
    mine = {"rank": rank, "much": "x" * 10_000 * rank, "tensor": torch.arange(3) + rank}
    everyone, gathered, got, scattered = [None] * 2, [None] * 2, [None], [None]
    dist.all_gather_object(everyone, mine)
    dist.gather_object(mine, gathered if rank == 1 else None, dst=1)
    reported = [mine, "and", rank]
    dist.broadcast_object_list(reported, src=1)
    dist.scatter_object_list(scattered, [("for", 0), ("for", 1)] if rank == 0 else None, src=0)
    if rank == 0:
        dist.send_object_list([mine], dst=1)
    else:
        dist.recv_object_list(got, src=0)
    return everyone, gathered, reported, scattered, got


def test_objects(world_of):
    (everyone, nothing, reported, _, _), (_, gathered, _, scattered, got) = of_both(
        world_of(2), exchange_objects
    )
    assert nothing == [None] * 2
    assert [one["rank"] for one in everyone] == [one["rank"] for one in gathered] == [0, 1]
    assert len(everyone[1]["much"]) == 10_000
    assert reported[1:] == ["and", 1]
    assert scattered == [("for", 1)]
    assert list(got[0]["tensor"]) == [0, 1, 2]


# ---- subgroups --------------------------------------------------------------------------------------------


def use_groups_in_own_order(rank):
    """Three groups of the same ranks: each rank begins with another one, and waits in another order."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(3)]
    tensors = [torch.full((1000,), float(rank + 10 * number)) for number in range(3)]
    order = [(rank + turn) % 3 for turn in range(3)]
    works = {at: dist.all_reduce(tensors[at], group=groups[at], async_op=True) for at in order}
    for at in reversed(order):
        works[at].wait()
    return tensors


def test_groups_in_any_order(world_of):
    found = of_both(world_of(3), use_groups_in_own_order)
    assert [[float(tensor[0]) for tensor in tensors] for tensors in found] == [[3, 33, 63]] * 3


def use_pairs(rank):
    """Pairs that share ranks; each rank uses its own in the order of its pairs."""
    groups = {pair: dist.new_group(pair) for pair in ((0, 1), (1, 2), (0, 2))}
    sums = []
    for pair, group in groups.items():
        if rank in pair:
            tensor = torch.full((3,), 10.0**rank)
            dist.all_reduce(tensor, group=group)
            dist.broadcast(tensor, src=pair[1], group=group)
            sums.append(tensor)
    return sums


def test_groups_that_share_ranks(world_of):
    found = of_both(world_of(3), use_pairs)
    assert [[float(one[0]) for one in sums] for sums in found] == [[11, 101], [11, 110], [110, 101]]


# ---- functional collectives -------------------------------------------------------------------------------


def call_functions(rank):
    group, x = dist.group.WORLD, torch.arange(8.0).reshape(4, 2) + 100 * rank
    several = [x, x * 2]
    lazy = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_reduce(x, "max", group),
        funcol.broadcast(x, 1, group),
        funcol.all_gather_single(x, 0, group),
        funcol.all_gather_single(x, 1, group),
        funcol.reduce_scatter_single(x, "sum", 0, group),
        funcol.reduce_scatter_single(x, "sum", 1, group),
        funcol.all_to_all_single(x, None, None, group),
        funcol.all_to_all_single(x, [1, 1] if rank == 0 else [3, 3], [1, 3], group),
        funcol.permute_tensor(x.reshape(-1), [1, 0], group),
        *funcol.all_reduce_coalesced(several, "sum", group),
        *funcol.all_gather_single_coalesced(several, group),
        *funcol.reduce_scatter_single_coalesced(several, "sum", [0, 0], group),
    ]
    return type(lazy[0]).__name__, [tensor + 0 for tensor in lazy], funcol.wait_tensor(lazy[0])


def test_functional_collectives(world_of):
    for rank, (kind, results, _) in enumerate(of_both(world_of(2), call_functions)):
        assert kind == "AsyncCollectiveTensor"
        assert results[0][0].tolist() == [100, 102]
        assert results[5][0].tolist() == ([100, 102] if rank == 0 else [108, 110])


def exchange_in_one_call(rank):
    given, taken, peer = torch.arange(4.0) + 10 * rank, torch.zeros(4), 1 - rank
    ways, group = ["isend", "irecv"], dist.group.WORLD
    results = funcol.batch_p2p_ops_inplace(ways, [peer, peer], [0, 0], [given, taken], group)
    return [tensor + 0 for tensor in results], taken.tolist()


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="Python makes no Backend before torch 2.14")
def test_functional_messages(world_of):
    """torch.compile converts batch_isend_irecv to them."""
    found = of_both(world_of(2), exchange_in_one_call)
    assert [taken for _, taken in found] == [[10, 11, 12, 13], [0, 1, 2, 3]]


def differentiate(rank):
    """Gradients that go back through collectives."""
    group, x = dist.group.WORLD, (torch.arange(4.0) + rank + 1).requires_grad_()
    gathered = funcol.all_gather_single_autograd(x, 0, group)
    scattered = funcol.reduce_scatter_single_autograd(x * 2, "sum", 0, group)
    swapped = funcol.all_to_all_single_autograd(x * x, [2, 2], [2, 2], group)
    loss = gathered.square().sum() + scattered.square().sum() + (swapped * (rank + 1)).sum()
    loss.backward()
    return x.grad


def test_gradients_of_functional_collectives(world_of):
    found = of_both(world_of(2), differentiate)
    assert (found[0] != found[1]).any()


# ---- torch.compile ----------------------------------------------------------------------------------------


def compiled_function(rank):
    torch._dynamo.reset()
    group = dist.group.WORLD

    def work(x):
        summed = funcol.all_reduce(x * 2, "sum", group)
        parts = funcol.reduce_scatter_single(summed, "sum", 0, group)
        dist.all_reduce(x)  # in place: becomes a functional one
        return funcol.all_gather_single(parts, 0, group) + x

    x = torch.arange(4.0) + rank
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found = [torch.compile(work, backend=graphs, fullgraph=True)(x.clone()) for _ in range(2)]
    torch._dynamo.reset()
    return graphs.frame_count, found, work(x.clone())


@pytest.mark.limit(180)  # the first to import the compiler
def test_compiled_collectives(world_of):
    for count, found, expected in of_both(world_of(2), compiled_function):
        assert count == 1
        assert_same(found, [expected] * 2)


def compiled_ddp(rank):
    torch._dynamo.reset()
    net = DDP(new_net())
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(compiled, rank, step, "both").backward()
        optimizer.step()
    torch._dynamo.reset()
    return weights(net)


@pytest.mark.limit(180)
def test_compiled_ddp(world_of):
    expected = train_alone(both)
    assert_same(of_both(world_of(2), compiled_ddp), [expected] * 2, 1e-5)


# ---- torchrun ---------------------------------------------------------------------------------------------

DIES_ONCE = """
    import os, signal
    import torch
    import torch.distributed as dist
    from shmring.adapters.torch import register_backend

    register_backend()
    dist.init_process_group("shmring")
    x = torch.ones(3)
    dist.all_reduce(x)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    print(f"rank {dist.get_rank()} in life {life}: {x.tolist()}", flush=True)
    dist.destroy_process_group()
"""


def test_torchrun_begins_again_when_a_rank_dies(tmp_path):
    script = write_script(tmp_path, DIES_ONCE)
    how = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    text = output_of(start(sys.executable, "-m", "torch.distributed.run", *how, script))
    for rank in range(2):
        assert f"rank {rank} in life 1: [4.0, 4.0, 4.0]" in text
        assert f"rank {rank} in life 0" not in text


def meet_twice_in_a_store(comm, port):
    """Join as ranks do that torchrun restarts: the store is as their predecessors left it."""
    store = dist.TCPStore("127.0.0.1", port, comm.size, comm.rank == 0, wait_for_workers=False)
    seen = []
    for life in range(2):
        if comm.rank == 0 and life == 1:
            time.sleep(0.2)  # the others are already there, and see the leftovers
        with meet(store, comm.rank, comm.size, datetime.timedelta(seconds=LIMIT_S)) as met:
            seen.append(met.all_gather_object(life))
    comm.barrier()  # the store ends with rank 0
    return seen


def test_a_store_that_was_used_before(world_of):
    assert world_of(3)(meet_twice_in_a_store, free_port()) == [[[0, 0, 0], [1, 1, 1]]] * 3


def test_rank_0_does_not_come():
    with pytest.raises(shmring.Timeout, match=r"rank 0 did not tell rank 1 of 2 .* within 0.1 s"):
        meet(dist.HashStore(), 1, 2, datetime.timedelta(seconds=0.1))


@pytest.mark.parametrize("kind", ["file", "TCP"])
def test_other_ranks_do_not_come(tmp_path, kind):
    """Rank 0 waits for the timeout of the group, not for that of the store."""
    if kind == "file":
        store = dist.FileStore(str(tmp_path / "store"), 3)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(datetime.timedelta(seconds=5))
    with pytest.raises(shmring.Timeout, match=r"rank\(s\) 1, 2 .* start all ranks") as failure:
        meet(dist.PrefixStore("group", store), 0, 3, datetime.timedelta(seconds=0.1))
    assert failure.value.rank == 1
    del store, failure
    gc.collect()  # a forked rank that collected the store would join its thread, and abort


# ---- deaths -----------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """Raised by the handler of a signal."""


def interrupt(*_):
    raise Interrupted


def test_a_signal_is_handled_while_ranks_are_awaited():
    """A wait in C++ would delay the handler until the timeout, which is longer than this test's limit."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    former = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))

    def meet_in_vain(store):
        timer.start()
        meet(store, 0, 2, datetime.timedelta(hours=1))

    try:
        with pytest.raises(Interrupted):
            meet_in_vain(store)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, former)
        del store
        gc.collect()  # as above


def die_in_backward(rank, path, hook=None):
    """Kill the last rank after it has sent some of its gradients."""
    net, last = new_ddp(), dist.get_world_size() - 1
    if hook is not None:
        HOOKS[hook](net)
    loss_of(net, rank, 0, "both").backward()
    if rank == last:
        net.module.stem.bias.register_hook(lambda gradient: die(path))
    loss_of(net, rank, 1, "both").backward()


def die_in_wait(rank, path):
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        die(path)
    dist.all_reduce(torch.ones(10), async_op=True).wait()


def die_in_function(rank, path):
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        die(path)
    x = funcol.all_reduce(torch.ones(10), "sum", dist.group.WORLD)
    assert x.sum() == 0  # waits


@pytest.mark.parametrize("function", [die_in_backward, die_in_wait, die_in_function])
def test_survivors_learn_of_a_death(world_of, tmp_path, function):
    for error in news_of_death(world_of(3), tmp_path / "died", function):
        assert "rank 2" in error


def die_in_new_group(rank, path, has_answered):
    """Kill the last rank before it has answered rank 0, or when it is about to connect."""
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        if not has_answered:
            die(path)
        meeting._init = lambda *_: die(path)
    dist.new_group()  # its timeout is 30 minutes


@pytest.mark.parametrize("has_answered", [False, True])
def test_survivors_learn_of_a_death_while_a_group_is_made(world_of, tmp_path, has_answered):
    for error in news_of_death(world_of(3), tmp_path / "died", die_in_new_group, has_answered):
        assert error.startswith("RankFailed: rank 2 of the new group has ended"), error


@pytest.mark.parametrize("hook", ["builtin-fp16", "bf16"])
def test_survivors_learn_of_a_death_through_hooks(world_of, tmp_path, hook):
    for error in news_of_death(world_of(3), tmp_path / "died", die_in_backward, hook):
        assert "rank 2" in error
