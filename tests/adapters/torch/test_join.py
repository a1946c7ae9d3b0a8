"""DistributedDataParallel's join, for ranks whose inputs differ in number."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_ranks import assert_same, of_backend, of_both

SCALE = 50.0


def gradients(rank, by_initial_size):
    """Return the gradients of each batch; the higher ranks have two batches more."""
    net = DDP(nn.Linear(5, 5, bias=False), bucket_cap_mb=1)
    x = torch.full((1, 5), SCALE)
    found = []
    with net.join(divide_by_initial_world_size=by_initial_size):
        for _ in range(3 if rank == 0 else 5):
            net(x).sum().backward()
            found.append(net.module.weight.grad.clone())
            net.zero_grad()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_divided_by_the_ranks_that_are_left(world_of, size):
    """A rank without inputs gives zeros. The others' average is the same as before it ended."""
    for found in of_both(world_of(size), gradients, False):
        assert [gradient[0, 0] for gradient in found] == pytest.approx([SCALE] * len(found))


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_divided_by_all_ranks(world_of, size):
    for found in of_both(world_of(size), gradients, True):
        wanted = [SCALE] * 3 + [SCALE * (size - 1) / size] * 2
        assert [gradient[0, 0] for gradient in found] == pytest.approx(wanted[: len(found)])


# ---- models -----------------------------------------------------------------------------------------------


class Unused(nn.Module):
    """On one rank a layer is left out."""

    def __init__(self, rank):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.leaves_out = rank == dist.get_rank()

    def forward(self, x):
        return self.second(x if self.leaves_out else self.first(x))


def normed():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def several_buckets():
    return nn.Sequential(nn.Linear(2, 600), nn.Linear(600, 600), nn.Linear(600, 2))


MODELS = {
    "batch norm": (normed, {}),
    "several buckets": (several_buckets, {}),
    "left out by who ends": (lambda: Unused(0), {"find_unused_parameters": True}),
    "left out by who goes on": (lambda: Unused(1), {"find_unused_parameters": True}),
}


def train(rank, name, numbers, sync_interval, by_initial_size, hook=None):
    """The weights of all ranks after training; numbers: of batches, by rank."""
    torch.manual_seed(3)
    make, how = MODELS[name]
    net = DDP(make(), bucket_cap_mb=1, **how)
    if hook is not None:
        HOOKS[hook](net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(rank)
    with net.join(divide_by_initial_world_size=by_initial_size):
        for step in range(numbers[rank]):
            with net.no_sync() if step % sync_interval else contextlib.nullcontext():
                net(torch.randn(4, 2, generator=batches)).square().sum().backward()
                if step % sync_interval == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    assert net._get_ddp_logging_data()["join_uneven_inputs"]
    return net._authoritative_rank, list(net.parameters())


@pytest.mark.parametrize("by_initial_size", [True, False], ids=["all", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_models(world_of, name, by_initial_size):
    ranks = world_of(2)
    for numbers, sync_interval in (((0, 2), 1), ((2, 5), 1), ((2, 6), 2)):
        found = of_both(ranks, train, name, numbers, sync_interval, by_initial_size, rtol=1e-4)
        assert_same(found[0], found[1])
        assert found[0][0] == 1


def test_ranks_that_end_one_after_the_other(world_of):
    found = of_both(world_of(3), train, "several buckets", (1, 3, 4), 1, False, rtol=1e-4)
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def power_sgd(net):
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, use_error_feedback=False, warm_start=False
    )
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS = {
    "allreduce": lambda net: net.register_comm_hook(None, default_hooks.allreduce_hook),
    "built-in": lambda net: net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "power sgd": power_sgd,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(world_of, hook):
    found = of_backend(world_of(2), "shmring", train, "several buckets", (2, 5), 1, False, hook)
    assert_same(found[0], found[1])


# ---- other cases ------------------------------------------------------------------------------------------


def as_alone(rank):
    """The weights of this process alone after the steps of all ranks, and those of joined ranks."""
    model, x = nn.Linear(10, 10, bias=False), torch.rand(3, 10)
    alone = nn.Linear(10, 10, bias=False)
    alone.load_state_dict(model.state_dict())
    size = dist.get_world_size()
    steps = [2 * (rank + 1) for rank in range(size)]
    for net, rate, number, joined in (
        (alone, 0.03, sum(steps), contextlib.nullcontext()),
        (DDP(model), 0.03 * size, steps[rank], None),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        with joined or net.join():
            for _ in range(number):
                optimizer.zero_grad()
                net(x).sum().backward()
                optimizer.step()
    return alone.weight, model.weight


def test_joined_training_comes_to_what_one_process_comes_to(world_of):
    for alone, joined in of_both(world_of(2), as_alone, rtol=1e-5):
        assert_same(joined, alone, 1e-5)


def ended_early(rank):
    net = DDP(nn.Linear(2, 2))
    number = 0
    try:
        with net.join(throw_on_early_termination=True):
            for _ in range(3 + 2 * rank):
                net(torch.ones(1, 2)).sum().backward()
                number += 1
    except RuntimeError as error:
        return number, str(error).partition(" exhausted")[0]
    return number, "nothing"


def test_all_end_with_the_first(world_of):
    found = of_both(world_of(2), ended_early)
    assert found == [(3, "Rank 0"), (3, "Detected at least one rank that")]


def without_join(rank):
    net = DDP(nn.Linear(1, 1))
    with net.join(enable=False):
        for _ in range(3):
            net.zero_grad()
            net(torch.full((1,), float(rank))).sum().backward()
    return net.module.weight.grad


def test_join_that_is_off(world_of):
    assert [gradient.item() for gradient in of_both(world_of(2), without_join)] == [0.5, 0.5]


def raised(rank):
    net = DDP(nn.Linear(1, 1))
    try:
        with net.join(divide_by_initial_world_size=False):
            raise ValueError("on purpose")
    except ValueError as error:
        return str(error)


def test_exceptions_inside_propagate(world_of):
    assert of_both(world_of(2), raised) == ["on purpose"] * 2


def with_sharded_optimizer(rank):
    torch.manual_seed(3)
    net = DDP(nn.Sequential(nn.Linear(2, 20), nn.Linear(20, 2)))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.01)
    with Join([net, optimizer], divide_by_initial_world_size=False):
        for _ in range(2 + 3 * rank):
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return list(net.parameters())


def test_a_sharded_optimizer_joins_too(world_of):
    found = of_both(world_of(2), with_sharded_optimizer, rtol=1e-5)
    assert_same(found[0], found[1])
