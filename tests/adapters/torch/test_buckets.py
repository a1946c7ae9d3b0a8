"""DistributedDataParallel whose buckets are shared: the same weights, and reduced where they lie."""

import importlib
import os
import signal

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from ranks import Died, Ranks
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import group_of

import shmring
from shmring.adapters import torch as adapter
from tests.adapters.torch.test_group import same

importlib.import_module("torch._dynamo")  # as the first model would: once, before there are ranks
STEPS = 4


def model_of(**how):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 300), torch.nn.Linear(300, 5)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.3, **how)


def train(model, rank):
    """Return the weights after some steps; every second step accumulates without a reduction, if torch can do
    that."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank + 2)
    for number in range(STEPS):
        if number % 2 == 0:
            optimizer.zero_grad(set_to_none=number == 0)
            if not model.static_graph:
                with model.no_sync():
                    model(torch.randn(8, 300)).square().mean().backward()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def with_and_without(comm, how):
    with group_of(comm) as group:
        plain = train(model_of(**how), comm.rank)
        before = group.comm.stats()["paths"]["zero_copy"]
        model = model_of(**how)
        adapter.share_buckets(model)
        shared = train(model, comm.rank)
        torch.testing.assert_close(shared, plain)  # DDP divides before it adds
        nreduced = group.comm.stats()["paths"]["zero_copy"] - before
        weights = [torch.zeros_like(shared[0]) for _ in range(comm.size)]
        dist.all_gather(weights, shared[0])
        for weight in weights:
            same(weight, shared[0])
        del model
    return nreduced


@pytest.mark.parametrize(
    "how",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=["plain", "views", "static", "unused"],
)
def test_the_same_weights_without_a_copy(three, how):
    for nreduced in three(with_and_without, how):
        assert nreduced >= STEPS


def uneven(comm):
    """A rank that has no more inputs stands in with buckets of its own; torch names memory as it likes."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    with group_of(comm):
        model = model_of()
        adapter.share_buckets(model)
        train(model, comm.rank)
        with model.join():
            for _ in range(3 + comm.rank):
                model(torch.ones(2, 300)).sum().backward()
        sparse = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
        adapter.share_buckets(sparse)
        sparse(torch.tensor([comm.rank, 5])).sum().backward()
        dense = sparse.module.weight.grad.to_dense()
        return [round(float(row.sum()), 5) for row in dense]


def test_uneven_inputs_and_sparse_gradients(three):
    third = round(4 / 3, 5)
    assert three(uneven) == [[third] * 3 + [0.0] * 2 + [4.0] + [0.0] * 4] * 3


def die_in_training(comm):
    with group_of(comm):
        model = model_of(gradient_as_bucket_view=True)
        adapter.share_buckets(model)
        train(model, comm.rank)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(model, comm.rank)
        except Exception as error:
            reported = type(error).__name__, "rank 1" in str(error)
        gradients = [parameter.grad + 1 for parameter in model.parameters()]
        os._exit(7 if reported[1] and len(gradients) == 6 else 8)


def test_those_that_are_left_keep_their_gradients(three):
    outcomes = three.outcomes(die_in_training)
    assert [outcome.exitcode for outcome in outcomes if isinstance(outcome, Died)] == [7, -signal.SIGKILL, 7]


def wrong_models(comm):
    with group_of(comm):
        with pytest.raises(TypeError, match="wrap it in DistributedDataParallel"):
            adapter.share_buckets(torch.nn.Linear(2, 2))
        model = model_of(process_group=dist.new_group(backend="gloo"))
        with pytest.raises(ValueError, match="init_process_group"):
            adapter.share_buckets(model)
        model = model_of()
        adapter.share_buckets(model)
        with pytest.raises(RuntimeError):
            adapter.share_buckets(model)  # torch's own: one hook for a model
    return "refused"


def test_wrong_models_are_refused(three):
    assert three(wrong_models) == ["refused"] * 3


def on_hosts(comm):
    with group_of(comm), pytest.raises(ValueError, match="on 2 hosts"):
        adapter.share_buckets(model_of())
    return shmring.host_id()


def test_several_hosts_are_refused():
    with Ranks(2, nodes=[0, 1]) as ranks:
        assert len(set(ranks.meet()(on_hosts))) == 2
