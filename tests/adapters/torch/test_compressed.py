"""DistributedDataParallel with compressed gradients: it learns, ranks stay alike, failures are raised."""

import os
import signal

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from ranks import Died
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import group_of

import shmring
from shmring.adapters import torch as adapter
from shmring.methods.compression import BF16, ErrorFeedback, Int8, PowerSGD, TopK
from tests.adapters.torch.test_buckets import model_of, train

FORMATS = {
    "bf16": BF16,
    "int8": lambda: ErrorFeedback(Int8()),
    "top-k": lambda: ErrorFeedback(TopK(0.2)),
    "PowerSGD": lambda: ErrorFeedback(PowerSGD(4)),
}


def losses_of(comm, name, how):
    """First and last loss of both ways, whether ranks agree to the last bit, and how much shorter it went."""
    with group_of(comm) as group:
        torch.manual_seed(comm.rank)
        images = torch.randn(64, 300)
        labels = images[:, :5].argmax(1)
        found, compressor = [], None
        for compressed in (False, True):
            model = model_of(**how)
            if compressed:
                compressor = FORMATS[name]()
                adapter.compress_buckets(model, compressor)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for step in range(30):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad(set_to_none=step == 0)
                loss.backward()
                optimizer.step()
                found.append(float(loss)) if step in (0, 29) else None
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        everyones = [torch.zeros_like(weights) for _ in range(comm.size)]
        dist.all_gather(everyones, weights)
        agree = all(torch.equal(weights.view(torch.int32), other.view(torch.int32)) for other in everyones)
        del model
        assert group.size() == comm.size
    return found, agree, compressor.ratio


VIEWS = {"gradient_as_bucket_view": True}


@pytest.mark.parametrize(
    ("name", "how"), [("bf16", {}), ("int8", VIEWS), ("top-k", {}), ("PowerSGD", {}), ("PowerSGD", VIEWS)]
)
def test_it_learns_and_ranks_stay_alike(three, name, how):
    for (first, plain, also_first, compressed), agree, ratio in three(losses_of, name, how):
        assert first == also_first
        assert plain < 0.3 * first
        assert compressed < 0.5 * first
        assert agree
        assert ratio > 1.9


def other_gradients(comm):
    """Sparse ones go as they are; a failure of one rank is raised in the backward pass of the others."""
    with group_of(comm):
        sparse = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
        adapter.compress_buckets(sparse, BF16())
        sparse(torch.tensor([comm.rank, 5])).sum().backward()
        rows = [round(float(row.sum()), 4) for row in sparse.module.weight.grad.to_dense()]
        model = model_of()
        adapter.compress_buckets(model, Int8())
        train(model, comm.rank)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(model, comm.rank)
        except Exception as error:
            os._exit(7 if "rank 1" in str(error) and rows[5] == 4 and rows[0] == 1.3333 else 8)


def test_sparse_gradients_and_a_death(three):
    outcomes = three.outcomes(other_gradients)
    assert [outcome.exitcode for outcome in outcomes if isinstance(outcome, Died)] == [7, -signal.SIGKILL, 7]


def uneven(comm):
    """A rank that has no more inputs stands in with zeros, which travel as the others' gradients do."""
    with group_of(comm):
        model = model_of()
        adapter.compress_buckets(model, ErrorFeedback(Int8()))
        train(model, comm.rank)
        with model.join():
            for _ in range(3 + comm.rank):
                model(torch.ones(2, 300)).sum().backward()
        return "joined"


def test_uneven_inputs(three):
    assert three(uneven) == ["joined"] * 3


def wrong_models(comm):
    with group_of(comm):
        with pytest.raises(TypeError, match="wrap it in DistributedDataParallel"):
            adapter.compress_buckets(torch.nn.Linear(2, 2), BF16())
        with pytest.raises(TypeError, match="make one of"):
            adapter.compress_buckets(model_of(), "bf16")
        with pytest.raises(ValueError, match="init_process_group"):
            adapter.compress_buckets(model_of(process_group=dist.new_group(backend="gloo")), BF16())
        for wrong, kind, words in (
            (DistributedDataParallel(torch.nn.Linear(2, 2).bfloat16()), TypeError, "is of torch.bfloat16"),
            (hooked(), RuntimeError, "hook"),
        ):
            with pytest.raises(kind, match=words):
                adapter.compress_buckets(wrong, BF16())
        train(model_of(), comm.rank)  # nothing has happened
    return "refused"


def hooked():
    model = model_of()
    adapter.compress_buckets(model, BF16())
    return model


def wrong_on_one_rank(comm, what):
    with group_of(comm):
        model, compressor = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False)), BF16()
        if comm.rank == 1 and what == "dtype":
            model.module.weight.data = model.module.weight.data.half()
        elif comm.rank == 1:
            compressor = "bf16"
        adapter.compress_buckets(model, compressor)


@pytest.mark.parametrize("what", ["dtype", "compressor"])
def test_a_wrong_argument_on_one_rank_is_a_mismatch_on_the_others(three, what):
    first, wrong, last = three.outcomes(wrong_on_one_rank, what)
    assert isinstance(wrong, TypeError), wrong
    assert isinstance(first, shmring.Mismatch), first
    assert isinstance(last, shmring.Mismatch), last


def test_wrong_models_are_refused(three):
    assert three(wrong_models) == ["refused"] * 3
