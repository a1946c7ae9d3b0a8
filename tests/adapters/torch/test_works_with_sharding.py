"""The features of torch that shard over ranks, on shmring: the same results as on gloo and as in one process.

FSDP of both kinds, ZeroRedundancyOptimizer, DTensor and tensor parallelism on meshes, pipelines, distributed
checkpoints.
"""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("not installed: torch", allow_module_level=True)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_ranks import assert_same, in_child, of_backend, of_both

STEPS = 3
CLOSE = 1e-5


def new_net():
    """Parameters that no two ranks can share evenly."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(net, optimizer, rank):
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(rank, step)).square().mean().backward()
        optimizer.step()


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.05)


def as_arrays(tensors):
    return [tensor.detach().numpy() for tensor in tensors]


@in_child
def train_alone(size=2):
    """Return the weights after steps on the data of all ranks together."""
    net = new_net()
    optimizer = adam(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(net(batch(rank, step)).square().mean() for rank in range(size)) / size).backward()
        optimizer.step()
    return as_arrays(net.parameters())


# ---- FSDP -------------------------------------------------------------------------------------------------


def train_fsdp1(rank, strategy, how):
    net = FullyShardedDataParallel(
        new_net(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
        **how,
    )
    train(net, adam(net), rank)
    norm = net.clip_grad_norm_(1e9)
    with FullyShardedDataParallel.summon_full_params(net):
        return norm, torch.cat([parameter.reshape(-1) for parameter in net.parameters()])


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        (ShardingStrategy.FULL_SHARD, {}),
        (ShardingStrategy.FULL_SHARD, {"use_orig_params": True, "limit_all_gathers": True}),
        (ShardingStrategy.SHARD_GRAD_OP, {"forward_prefetch": True}),
        (ShardingStrategy.NO_SHARD, {}),
    ],
    ids=["full", "original", "gradients", "none"],
)
def test_fsdp1(world_of, strategy, how):
    found = of_both(world_of(2), train_fsdp1, strategy, how)
    expected = np.concatenate([weights.reshape(-1) for weights in train_alone()])
    assert_same([weights for _, weights in found], [expected] * 2, CLOSE)


def train_fsdp2(rank, mesh_shape, how):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    net = new_net()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **how)
    fully_shard(net, mesh=mesh, **how)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    train(net, adam(net), rank)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1e9).full_tensor()
    return norm, [parameter.full_tensor() for parameter in net.parameters()]


@pytest.mark.parametrize("how", [{}, {"reshard_after_forward": False}], ids=["resharded", "kept"])
def test_fsdp2(world_of, how):
    expected = train_alone()
    for _, weights in of_both(world_of(2), train_fsdp2, (2,), how):
        assert_same(weights, expected, CLOSE)


def test_fsdp2_in_bf16(world_of):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (_, weights), (_, others) = of_both(world_of(2), train_fsdp2, (2,), {"mp_policy": policy})
    assert_same(weights, others)


def test_hybrid_sharding(world_of):
    """Shards within pairs, replicas across them."""
    expected = train_alone(4)
    for _, weights in of_both(world_of(4), train_fsdp2, (2, 2), {}, rtol=CLOSE):
        assert_same(weights, expected, CLOSE)


def scale_shards(rank):
    """In step 1 rank 1 has an infinity: the scales."""
    net = FullyShardedDataParallel(new_net(), device_id=torch.device("cpu"))
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(STEPS):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.zero_grad()
        loss = net(batch(rank, step)).square().mean()
        scaler.scale(loss * float("inf") if (rank, step) == (1, 1) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any((one != other).any() for one, other in zip(before, net.parameters(), strict=True))
        seen.append((scaler.get_scale(), bool(moved)))
    return seen


def test_an_infinity_in_one_shard_skips_the_step_on_all(world_of):
    assert of_both(world_of(2), scale_shards) == [[(8.0, True), (4.0, False), (4.0, True)]] * 2


# ---- ZeroRedundancyOptimizer ------------------------------------------------------------------------------


def train_zero(rank, as_view):
    net = DDP(new_net())
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, lr=0.05, parameters_as_bucket_view=as_view
    )
    train(net, optimizer, rank)
    optimizer.consolidate_state_dict(to=1)
    nstates = len(optimizer.state_dict()["state"]) if rank == 1 else None
    return nstates, len(optimizer.optim.state), list(net.parameters())


@pytest.mark.parametrize("as_view", [False, True])
def test_zero_redundancy_optimizer(world_of, as_view):
    found = of_both(world_of(2), train_zero, as_view)
    expected = train_alone()
    for _, _, weights in found:
        assert_same(weights, expected, CLOSE)
    assert found[1][0] == len(expected) == found[0][1] + found[1][1]


def train_zero_with_join(rank):
    """Rank 1 has two batches more than rank 0."""
    net = DDP(new_net())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.05)
    with Join([net, optimizer]):
        for step in range(STEPS + 2 * rank):
            optimizer.zero_grad()
            net(batch(rank, step)).square().mean().backward()
            optimizer.step()
    return list(net.parameters())


def test_zero_redundancy_optimizer_with_join(world_of):
    found = of_both(world_of(2), train_zero_with_join)
    assert_same(found[0], found[1])


# ---- pipelines --------------------------------------------------------------------------------------------


def train_in_stages(rank):
    """Train with a layer on each rank; return its gradients, and the losses on the last rank."""
    torch.manual_seed(4)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    losses = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=losses)
    found = [parameter.grad.clone() for parameter in layers[rank].parameters()]
    layers[rank].zero_grad()
    nn.functional.mse_loss(layers[1](layers[0](x)), target).backward()
    return found, losses, [parameter.grad for parameter in layers[rank].parameters()]


def test_pipelines(world_of):
    for found, _, expected in of_both(world_of(2), train_in_stages):
        assert_same(found, expected, CLOSE)


# ---- DTensor, tensor parallelism --------------------------------------------------------------------------


def redistribute(rank):
    """A tensor through all placements of a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("up", "across"))
    whole = torch.arange(35.0).reshape(7, 5)
    seen, local = [], []
    tensor = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    for placements in [
        [Shard(1), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ]:
        tensor = tensor.redistribute(mesh, placements)
        local.append(tensor.to_local())
        seen.append(tensor.full_tensor())
    square = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    product = (square.t() @ square).full_tensor()  # a partial sum in between
    ours = [mesh.get_group(name) for name in mesh.mesh_dim_names]
    return seen, local, product, square.sum().full_tensor(), [group.rank() for group in ours]


def test_dtensor(world_of):
    whole = torch.arange(35.0).reshape(7, 5)
    for rank, (seen, _, product, total, coordinates) in enumerate(of_both(world_of(4), redistribute)):
        assert_same(seen, [whole.numpy()] * 4)
        assert_same(product, (whole.t() @ whole).numpy())
        assert float(total) == float(whole.sum())
        assert coordinates == [rank // 2, rank % 2]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def new_block():
    torch.manual_seed(3)
    return Block()


def rows(number):
    """A batch of short sequences."""
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(number))


@in_child
def block_alone(numbers):
    net = new_block()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(net(rows(number)).square().mean() for number in numbers) / len(numbers)).backward()
        optimizer.step()
    return as_arrays(net.parameters())


TENSOR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def train_parallel(rank, shape, in_sequence):
    """Tensor parallel in the mesh's last dimension; FSDP in the first if it has two."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    net = new_block()
    parallelize_module(net, mesh["tensor"] if len(shape) > 1 else mesh, SEQUENCE if in_sequence else TENSOR)
    if len(shape) > 1:
        fully_shard(net, mesh=mesh["data"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    number = mesh.get_local_rank("data") if len(shape) > 1 else 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = rows(number)
        if in_sequence:
            x = distribute_tensor(x, mesh["tensor"], [Shard(1)])
        loss = net(x).square().mean()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        optimizer.step()
    return [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for parameter in net.parameters()
    ]


@pytest.mark.parametrize("in_sequence", [False, True], ids=["tensor", "sequence"])
def test_tensor_parallel(world_of, in_sequence):
    found = of_both(world_of(2), train_parallel, (2,), in_sequence)
    assert_same(found, [block_alone([0])] * 2, CLOSE)


def test_tensor_parallel_and_sharded(world_of):
    found = of_both(world_of(4), train_parallel, (2, 2), False, rtol=CLOSE)
    assert_same(found, [block_alone([0, 1])] * 4, CLOSE)


# ---- checkpoints ------------------------------------------------------------------------------------------


def sharded(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(net, mesh=mesh)


def save_and_load(rank, folder, asynchronous):
    """Saved, trained on, loaded into another model: its weights and its optimizer's are those of the save."""
    net = sharded(new_net())
    optimizer = adam(net)
    train(net, optimizer, rank)
    saved = [parameter.full_tensor().clone() for parameter in net.parameters()]
    weights, moments = get_state_dict(net, optimizer)
    state = {"net": weights, "optimizer": moments, "step": STEPS}
    if asynchronous:
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
        train(net, optimizer, rank)  # meanwhile
        saving.result()
    else:
        dcp.save(state, checkpoint_id=folder)
        train(net, optimizer, rank)
    return saved, [parameter.full_tensor() for parameter in load(folder).parameters()]


def load(folder):
    net = sharded(new_net())
    optimizer = adam(net)
    weights, moments = get_state_dict(net, optimizer)
    state = {"net": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == STEPS
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert all(float(values["step"]) == STEPS for values in optimizer.state.values())
    return net


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_checkpoints(world_of, tmp_path, asynchronous):
    found = of_backend(world_of(2), "shmring", save_and_load, str(tmp_path), asynchronous)
    for saved, loaded in found:
        assert_same(saved, train_alone(), CLOSE)
        assert_same(loaded, saved)


def load_elsewhere(rank, folder):
    return [parameter.full_tensor() for parameter in load(folder).parameters()]


def test_a_checkpoint_of_two_ranks_for_three(world_of, tmp_path):
    of_backend(world_of(2), "shmring", save_and_load, str(tmp_path), False)
    found = of_backend(world_of(3), "shmring", load_elsewhere, str(tmp_path))
    assert_same(found, [train_alone()] * 3, CLOSE)
