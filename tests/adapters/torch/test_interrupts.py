"""Calls of the process group that a signal handler's exception ends on one rank: the others learn of it."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from injections import Interrupt
from ranks import Ranks
from torch_ranks import group_of

from shmring.adapters._torch import sparse, tensors
from shmring.adapters.vllm import TensorGroup


class Stop(RuntimeError):
    """An exception of a handler that is not a KeyboardInterrupt."""


class InterruptedBefore:
    """A communicator that raises in the place of its n-th call of a kind."""

    def __init__(self, comm, kind, n, error):
        self._comm, self._kind, self._left, self._error = comm, kind, n, error

    def __getattr__(self, name):
        if name == self._kind:
            self._left -= 1
            if self._left == 0:
                raise self._error
        return getattr(self._comm, name)


def error_of(call):
    """Return the name of the class of the error that the call raises; "" for none."""
    try:
        call()
    except (Interrupt, RuntimeError) as error:
        return type(error).__name__
    return ""


def outcome_of(call):
    """Return the names of the errors of this call and of the next one."""
    return error_of(call), error_of(lambda: dist.all_reduce(torch.ones(1)))


# ---- several calls as one ----------------------------------------------------------------------------------


def reduce_scatter_several():
    with c10d._coalescing_manager():
        for _ in range(3):
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))


def reduce_scatter_several_in_the_background():
    with c10d._coalescing_manager(async_ops=True) as manager:
        for _ in range(3):
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
    manager.wait()


def all_gather_several():
    dist.all_gather_coalesced([[torch.empty(2) for _ in range(3)] for _ in range(2)], [torch.ones(2)] * 3)


SEVERAL = {
    reduce_scatter_several: "reduce_scatter",
    reduce_scatter_several_in_the_background: "reduce_scatter",
    all_gather_several: "all_gather",
}


def interrupt_between(comm, call, n, error):
    with group_of(comm) as group:
        if comm.rank == 0:
            group.comm = InterruptedBefore(group.comm, SEVERAL[call], n, error)
            if n == 1:
                assert error_of(call) == type(error).__name__
        return outcome_of(call)


@pytest.mark.parametrize("call", SEVERAL, ids=lambda call: call.__name__)
def test_an_interrupt_between_calls_that_are_made_as_one(call):
    with Ranks(2) as ranks:
        ranks.meet()
        assert ranks(interrupt_between, call, 1, Interrupt()) == [("", ""), ("", "")]
        for error in Interrupt(), Stop():
            expected = [(type(error).__name__, "Aborted"), ("Aborted", "Aborted")]
            assert ranks(interrupt_between, call, 3, error) == expected


# ---- results that are copied to their tensors, or divided, after the call ----------------------------------


def strided(count, dtype=torch.float32):
    return torch.ones(count, 2, dtype=dtype)[:, 0]


COPIED = {
    "all_reduce": lambda group: dist.all_reduce(strided(3)),
    "all_reduce, an average": lambda group: dist.all_reduce(torch.ones(3, dtype=int), dist.ReduceOp.AVG),
    "all_reduce, multiplied": lambda group: dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(0.5)),
    "all_gather": lambda group: dist.all_gather([strided(3), strided(3)], torch.ones(3)),
    "scatter": lambda group: dist.scatter(strided(3), None if group.rank() else [torch.ones(3)] * 2),
    "sparse": lambda group: dist.all_reduce(torch.ones(3).to_sparse()),
    "in vLLM, all_reduce": lambda group: TensorGroup(group.comm).all_reduce(strided(3)),
    "in vLLM, broadcast": lambda group: TensorGroup(group.comm).broadcast(strided(3), 1),
}


def interrupt_the_copy(comm, name, error):
    def fail(*_):
        raise error

    with group_of(comm) as group, pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(tensors.Taken, "_finish", fail)
            patch.setattr(sparse, "_joined", fail)
        return outcome_of(lambda: COPIED[name](group))


@pytest.mark.parametrize("name", COPIED)
def test_an_interrupt_while_a_result_is_copied(name):
    with Ranks(2) as ranks:
        ranks.meet()
        for error in Interrupt(), Stop():
            interrupted, (_, error_of_the_next) = ranks(interrupt_the_copy, name, error)
            assert interrupted == (type(error).__name__, "Aborted")
            assert error_of_the_next == "Aborted"
