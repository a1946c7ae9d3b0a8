"""Calls of the process group that a signal handler's exception ends on one rank: the others learn of it."""

import signal

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from injections import Interrupt
from ranks import Ranks, until_there
from torch_ranks import group_of

from shmring.adapters._torch import group as group_module
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
    except (Interrupt, RuntimeError, MemoryError, TimeoutError) as error:
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


# ---- messages ----------------------------------------------------------------------------------------------

BIG = 3_000_000
ERRORS = [Interrupt(), Stop(), TimeoutError("of a handler")]  # the last is like those of Transfer.wait


def error_of_interrupted(call, error):
    """Return error_of(call), during which the handler of a signal raises this error once, after some time."""

    def handle(*_):
        raise error

    def begin():
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        call()

    signal.signal(signal.SIGALRM, handle)
    return error_of(begin)


def interrupt_a_receive(comm, error, interrupted, source):
    """Return what rank 0 receives after an interrupted receive. Rank 1 sends after that."""
    with group_of(comm):
        if comm.rank == 1:
            until_there(interrupted)
            for value in 1, 2:
                dist.send(torch.full((BIG,), float(value)), 0)
            return None
        lost, x = torch.zeros(BIG), torch.zeros(BIG)
        assert error_of_interrupted(lambda: dist.recv(lost, source), error) == type(error).__name__
        interrupted.touch()
        received = []
        for _ in range(2):
            dist.recv(x, source)
            received.append(x.unique().tolist())
        return received, lost.unique().tolist()


@pytest.mark.parametrize("source", [1, None])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_interrupted_receive_takes_no_message(tmp_path, error, source):
    with Ranks(2) as ranks:
        found = ranks.meet()(interrupt_a_receive, error, tmp_path / "interrupted", source)
    assert found == [([[1.0], [2.0]], [0.0]), None]


def interrupt_a_send(comm, error, interrupted):
    with group_of(comm):
        if comm.rank == 1:
            until_there(interrupted)
            x = torch.zeros(BIG)
            return error_of(lambda: dist.recv(x, 0))
        x = torch.ones(BIG)
        first = error_of_interrupted(lambda: dist.send(x, 1), error)
        x.fill_(2)
        interrupted.touch()
        return first, error_of(lambda: dist.send(x, 1))


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_interrupted_send_ends_the_group(tmp_path, error):
    with Ranks(2) as ranks:
        found = ranks.meet()(interrupt_a_send, error, tmp_path / "interrupted")
    assert found == [(type(error).__name__, "Aborted"), "Aborted"]


class InterruptedAfter:
    """A communicator that raises when a message has begun, before the caller has its Transfer."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, *arguments):
        self._comm.isend(*arguments)
        raise Interrupt

    def irecv(self, *arguments):
        self._comm.irecv(*arguments)
        raise Interrupt


def interrupt_the_beginning(comm, begin, interrupted):
    with group_of(comm) as group:
        x = torch.zeros(BIG)
        if comm.rank == 1:
            until_there(interrupted)
            return error_of(lambda: dist.recv(x, 0))
        group.comm = InterruptedAfter(group.comm)
        outcome = outcome_of(lambda: begin(x, 1))
        interrupted.touch()
        return outcome


@pytest.mark.parametrize("begin", [dist.send, dist.isend, dist.recv, dist.irecv])
def test_an_interrupt_when_a_message_has_begun(tmp_path, begin):
    with Ranks(2) as ranks:
        found = ranks.meet()(interrupt_the_beginning, begin, tmp_path / "interrupted")
    assert found == [("Interrupt", "Aborted"), "Aborted"]


def fail_the_beginning(comm, begin, error, failed):
    def fail(*_, **__):
        raise error

    with group_of(comm), pytest.MonkeyPatch.context() as patch:
        x = torch.zeros(BIG)
        if comm.rank == 1:
            until_there(failed)
            return error_of(lambda: dist.recv(x, 0))
        patch.setattr(group_module, "Message", fail)
        outcome = outcome_of(lambda: begin(x, 1))
        failed.touch()
        return outcome


@pytest.mark.parametrize("begin", [dist.isend, dist.irecv])
def test_an_error_when_a_message_has_begun(tmp_path, begin):
    with Ranks(2) as ranks:
        for error, name in (
            (MemoryError(), "MemoryError"),
            (ValueError("of a handler"), "ArgumentError"),
            (TypeError("of a handler"), "DtypeError"),
        ):
            failed = tmp_path / name
            assert ranks.meet()(fail_the_beginning, begin, error, failed) == [(name, "Aborted"), "Aborted"]


class InterruptedTwice:
    """A communicator whose receives raise when they are waited for, and when they are withdrawn."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def irecv(self, *arguments):
        self._transfer = self._comm.irecv(*arguments)
        return self

    def done(self):
        return self._transfer.done()

    def wait(self, *_):
        raise Interrupt

    def cancel(self):
        raise Stop


def interrupt_twice(comm, interrupted):
    with group_of(comm) as group:
        x = torch.zeros(BIG)
        if comm.rank == 1:
            until_there(interrupted)
            return error_of(lambda: dist.send(x, 0))
        group.comm = InterruptedTwice(group.comm)
        outcome = outcome_of(lambda: dist.recv(x, 1))
        interrupted.touch()
        return outcome


def test_an_interrupt_while_an_interrupted_receive_is_withdrawn(tmp_path):
    with Ranks(2) as ranks:
        found = ranks.meet()(interrupt_twice, tmp_path / "interrupted")
    assert found == [("Stop", "Aborted"), "Aborted"]


def interrupt_a_wait(comm, interrupted):
    """Return what a receive gets whose first wait was interrupted."""
    with group_of(comm):
        x = torch.full((BIG,), float(comm.rank))
        if comm.rank == 1:
            until_there(interrupted)
            dist.send(x, 0)
            return None
        work = dist.irecv(x, 1)
        assert error_of_interrupted(work.wait, Interrupt()) == "Interrupt"
        interrupted.touch()
        work.wait()
        return x.unique().tolist()


def test_a_work_whose_wait_was_interrupted_goes_on(tmp_path):
    with Ranks(2) as ranks:
        assert ranks.meet()(interrupt_a_wait, tmp_path / "interrupted") == [[1.0], None]
