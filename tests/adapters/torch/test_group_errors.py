"""The process group of the torch backend where something goes wrong: on all ranks, or on one."""

import contextlib
import datetime
import functools
import os
import signal
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from ranks import Died, Ranks, until_there
from torch_ranks import NEWS_S, group_of
from waiting import counted_s

import shmring
from shmring.adapters._compiled import CallLock
from shmring.adapters._torch import work as work_module
from shmring.adapters._torch.tensors import WaitTimeout
from shmring.adapters._torch.work import Message, Operation


def wrong_arguments(comm):
    with group_of(comm) as group:
        x = torch.ones(6)
        for call, kind, match in (
            (lambda: group.reduce([torch.ones(1)] * 2), ValueError, "2 tensors"),
            (lambda: group.allreduce([torch.ones(1), torch.ones(2)]), ValueError, r"tensors\[1\]"),
            (lambda: group.allreduce([torch.ones(1)] * 2, dist.ReduceOp.AVG), RuntimeError, "pass one"),
            (lambda: group.broadcast(torch.ones(1)), TypeError, "root: rank"),
            (lambda: group.allgather([[torch.ones(1)]], [torch.ones(1)]), ValueError, "1 outputs"),
            (lambda: dist.all_reduce(x.to_sparse(), dist.ReduceOp.MAX), RuntimeError, "only sums"),
            (lambda: dist.all_reduce(torch.ones(1).expand(3)), ValueError, "expanded"),
            (lambda: group._get_backend("cuda"), RuntimeError, "CPU"),
            (lambda: dist.broadcast(torch.ones(1), 7), RuntimeError, "root is 7"),
            (lambda: dist.broadcast(torch.ones(1), -1), ValueError, "root is -1"),
            (lambda: dist.reduce(torch.ones(1), 7), RuntimeError, "root is 7"),
            (lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)), RuntimeError, "a count of 6"),
            (lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)), RuntimeError, "4 rows"),
            (lambda: dist.all_to_all_single(x, x, [1, 1, 3], [2, 2, 2]), RuntimeError, "split sizes of"),
            (lambda: dist.all_to_all_single(x, x, [2, 2, 2], [-1, 5, 2]), RuntimeError, "split sizes of"),
            (lambda: dist.all_to_all_single(x.view(2, 3), x.view(2, 3)), RuntimeError, "has 2 rows"),
            (lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND), RuntimeError, "band"),
            (lambda: dist.all_reduce(x, dist.ReduceOp.BOR, async_op=True), TypeError, "bor"),
            (lambda: dist.all_reduce(torch.ones(3, 3).to_sparse_csr()), RuntimeError, "not torch.sparse_csr"),
            (lambda: dist.broadcast(torch.ones(1).to_sparse(), 0), ValueError, "not torch.sparse_coo"),
            (lambda: dist.isend(torch.ones(1), 7), RuntimeError, "dest is 7"),
            (lambda: dist.isend(torch.ones(1), 1, tag=-1), RuntimeError, "tag is -1"),
            (lambda: dist.recv(torch.ones(1), 7), RuntimeError, "source is 7"),
            (lambda: dist.recv(torch.ones(1), comm.rank), RuntimeError, "from itself"),
            (lambda: dist.recv(torch.ones(1), 0, tag=-1), RuntimeError, "tag is -1"),
            (lambda: dist.recv(torch.ones(1), tag=-1), ValueError, "tag is -1"),
            (lambda: dist.recv(torch.ones(1), -1), RuntimeError, "srcRank is -1"),
        ):
            with pytest.raises(kind, match=match):
                call()
        with pytest.raises(RuntimeError, match="another shape"):
            dist.all_reduce(torch.ones(2 + comm.rank).to_sparse())
        with pytest.raises(RuntimeError, match="bytes, but"):
            dist.all_to_all_single(x, x, [2, 2, 2], [[1, 2, 3], [2, 3, 1], [3, 1, 2]][comm.rank])
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, x, comm.rank), dist.P2POp(dist.isend, torch.zeros(6), comm.rank)]
        ):
            work.wait()
        assert not x.any()
        assert group._get_sequence_number_for_group() >= 0
        x = torch.ones(1)
        dist.all_reduce(x)
        return float(x), dist.get_backend()


def test_wrong_arguments_harm_nothing(three):
    assert three(wrong_arguments) == [(3.0, "shmring")] * 3


def add_sparse_of_another_dtype(comm):
    with group_of(comm):
        entries, values = torch.tensor([[0, 1]]), torch.ones(2).to(torch.float8_e8m0fnu)
        for asynchronous in (False, True):
            x = torch.sparse_coo_tensor(entries, values, (4,), is_coalesced=True)
            with pytest.raises(TypeError, match=r"no torch\.float8_e8m0fnu"):
                dist.all_reduce(x, async_op=asynchronous)
            dist.all_reduce(total := torch.ones(1))
            assert total == comm.size


def test_sparse_tensors_of_another_dtype_harm_nothing(three):
    three(add_sparse_of_another_dtype)


def wrong_on_one(comm, call):
    with group_of(comm, seconds=30) as group:
        x, strided = torch.ones(6), torch.ones(6, 2)[:, 0]
        bad = comm.rank == 1
        begin = counted_s()
        try:
            if call == "all_reduce":
                dist.all_reduce(torch.ones(1).expand(6) if bad else strided)
            elif call == "scatter":
                parts = [torch.ones(6)] * (2 if bad else 3)
                group.scatter([x], [parts] if bad else [], _scatter_options(1)).wait()
            elif call == "several":
                outs = [torch.ones(2), torch.ones(3 if bad else 2)]
                group.reduce_scatter_single_coalesced(outs, [x, x], c10d.ReduceScatterOptions()).wait()
            else:
                lengths = [6, 6, 6] if bad else [2, 2, 2]
                dist.all_to_all_single(torch.empty(6), x, lengths, lengths)
        except (ValueError, shmring.Mismatch) as error:
            assert counted_s() - begin < NEWS_S
            return "ValueError" if isinstance(error, ValueError) else type(error).__name__
        return "nothing"


def _scatter_options(root):
    options = c10d.ScatterOptions()
    options.rootRank = root
    return options


@pytest.mark.parametrize("call", ["all_reduce", "scatter", "several", "all_to_all_single"])
def test_what_is_wrong_on_one_rank_is_a_mismatch_elsewhere(call):
    with Ranks(3) as ranks:
        assert ranks.meet()(wrong_on_one, call) == ["Mismatch", "ValueError", "Mismatch"]


def fail_and_forget(comm):
    """Return whether a group keeps nothing of the frames through which the error of a call has gone."""
    with group_of(comm):

        def fail(call, *tensors):
            held = torch.ones(1)
            with contextlib.suppress(ValueError):
                call(*tensors)
            return weakref.ref(held)

        strided = torch.ones(1).expand(3)
        calls = (dist.all_reduce, strided), (dist.all_gather_into_tensor, torch.ones(4), torch.ones(2))
        return [fail(call, *tensors)() is None for call, *tensors in calls]


def test_an_error_is_not_kept(three):
    assert three(fail_and_forget) == [[True, True]] * 3


def die(comm):
    with group_of(comm):
        if comm.rank == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = counted_s()
        try:
            dist.all_reduce(torch.ones(100_000), async_op=comm.rank == 2)
            dist.all_reduce(torch.ones(1))
        except shmring.RankFailed as error:
            found = error.rank, counted_s() - begin < NEWS_S
        os._exit(7 if found == (1, True) else 8)


def test_a_rank_that_dies():
    with Ranks(3) as ranks:
        outcomes = ranks.meet().outcomes(die)
    assert [outcome.exitcode for outcome in outcomes if isinstance(outcome, Died)] == [7, -signal.SIGKILL, 7]


def die_before_a_monitored_barrier(comm):
    """Rank 0 waits for rank 1, which is late, when rank 2 has died."""
    with group_of(comm) as group:
        dist.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3 * comm.rank)
        try:
            group.monitored_barrier()
        except RuntimeError as error:
            os._exit(7 if isinstance(error, shmring.RankFailed) and error.rank == 2 else 8)


def test_a_monitored_barrier_names_the_dead_rank():
    with Ranks(3) as ranks:
        outcomes = ranks.meet().outcomes(die_before_a_monitored_barrier)
    assert [outcome.exitcode for outcome in outcomes if isinstance(outcome, Died)] == [7, 7, -signal.SIGKILL]


def need_a_message_for_a_monitored_barrier(comm):
    """While rank 0 is in the barrier, its thread sends the message for which rank 1 waits before it."""
    with group_of(comm) as group:
        x = torch.full((1,), float(comm.rank))
        if comm.rank == 0:
            sender = threading.Timer(0.2, dist.send, (x, 1))
            sender.start()
        elif comm.rank == 1:
            dist.recv(x, 0)
        group.monitored_barrier(datetime.timedelta(seconds=5))
        if comm.rank == 0:
            sender.join()
        return x.item()


def test_messages_of_other_threads_beside_a_monitored_barrier(three):
    assert three(need_a_message_for_a_monitored_barrier) == [0.0, 0.0, 2.0]


def wait_in_vain(comm):
    with group_of(comm) as group:
        if comm.rank == 0:
            time.sleep(0.5)
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        if comm.rank == 1:
            with pytest.raises(WaitTimeout):
                work.wait(datetime.timedelta(milliseconds=50))
            with pytest.raises(WaitTimeout):
                dist.irecv(torch.ones(1), 0).wait(datetime.timedelta(milliseconds=50))
        work.wait()
        named = ""
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match="monitoredBarrier") as caught:
                group.monitored_barrier(datetime.timedelta(milliseconds=200), wait_all_ranks=True)
            named = str(caught.value)
            comm.barrier()
        else:
            comm.barrier()
            with pytest.raises(RuntimeError, match="waiting for send/recv from rank 0"):
                group.monitored_barrier()  # rank 0 has given up, and has said so
            with pytest.raises(RuntimeError, match="waiting for send/recv from rank 0"):
                group.monitored_barrier(datetime.timedelta(milliseconds=200))
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
                group.monitored_barrier(datetime.timedelta(0))
        comm.barrier()
        group.monitored_barrier(datetime.timedelta(seconds=10))
        return float(x), named.partition(" failed")[0]


def test_a_wait_in_vain_names_the_late_rank(three):
    assert three(wait_in_vain) == [(3.0, "Ranks 1, 2"), (3.0, ""), (3.0, "")]


class Never:
    """A Transfer that is never complete, and adds up how long it was waited for."""

    def __init__(self):
        self.waited_s = 0.0
        self.told_s = None

    def wait(self, limit_s=None):
        assert limit_s is not None, "waits once more as long as the communicator's timeout"
        time.sleep(limit_s)
        self.waited_s += limit_s
        raise TimeoutError

    def _wait_no_longer(self, waited_s):
        self.told_s = waited_s
        raise shmring.Timeout("in vain")


@pytest.mark.parametrize("limit_s", [None, 0.05])
def test_a_message_waits_for_its_timeout_once(limit_s, monkeypatch):
    transfer = Never()
    monkeypatch.setattr(work_module, "_is_of_handler", lambda error: False)  # as if Never were compiled
    with pytest.raises(TimeoutError) as caught:
        Message(transfer, CallLock(), 0.1).wait(limit_s)
    assert transfer.waited_s <= (limit_s or 0.1) + 0.001
    assert isinstance(caught.value, shmring.Timeout) == (limit_s is None)
    assert transfer.told_s == (0.1 if limit_s is None else None)


def call_in_a_handler(comm, handled):
    """Return the error of a call that a signal handler makes while rank 0 waits, and the sum."""
    with group_of(comm) as group:
        x, errors = torch.ones(1), []

        def handle(*_):
            with pytest.raises(RuntimeError) as caught:
                dist.barrier()
            errors.append(str(caught.value))
            handled.touch()

        def signal_during_the_call():
            while group._calling.acquire(0):
                group._calling.release()
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, handle)
        dist.barrier()
        if comm.rank == 0:
            threading.Thread(target=signal_during_the_call).start()
        else:
            until_there(handled)
        dist.all_reduce(x)
        return errors, x.item()


def test_a_call_of_a_signal_handler_within_a_call_is_refused(tmp_path):
    with Ranks(2) as ranks:
        ([error], x), ([], _) = ranks.meet()(call_in_a_handler, tmp_path / "handled")
    assert "signal handler called" in error
    assert x == 2


def test_a_message_is_not_complete_during_its_thread_s_own_call():
    """As in a signal handler."""
    lock = CallLock()
    operation = Operation([Message(Never(), lock, 0.1)], [], None)
    with lock:
        assert not operation.is_completed()


def receive_in_vain(comm, is_sender):
    """A message that rank 1 does not send, or does not receive."""
    with group_of(comm, seconds=1):
        big = torch.zeros(3_000_000)
        message = functools.partial(dist.send if is_sender else dist.recv, big, 1)
        call = message if comm.rank == 0 else dist.barrier
        with pytest.raises(shmring.Timeout, match=r"within 1 s"):
            call()
        return True


@pytest.mark.parametrize("is_sender", [False, True])
def test_a_message_in_vain_is_a_timeout_on_all_ranks(is_sender):
    with Ranks(2) as ranks:
        assert ranks.meet()(receive_in_vain, is_sender) == [True, True]


def wait_for_the_options_timeout(comm, method):
    kind, tensors = {
        "allreduce": (c10d.AllreduceOptions, ([torch.ones(2)],)),
        "broadcast": (c10d.BroadcastOptions, ([torch.ones(2)],)),
        "all_gather_single": (c10d.AllgatherOptions, (torch.ones(4), torch.ones(2))),
        "reduce_scatter_single": (c10d.ReduceScatterOptions, (torch.ones(1), torch.ones(2))),
    }[method]
    with group_of(comm, seconds=60) as group:
        options = kind()
        options.asyncOp, options.timeout = False, datetime.timedelta(seconds=0.2)
        dist.barrier()
        begin = counted_s()
        if comm.rank == 0:
            time.sleep(1)
        with pytest.raises(shmring.Timeout):
            getattr(group, method)(*tensors, options)
        return counted_s() - begin < 20


@pytest.mark.parametrize("method", ["allreduce", "broadcast", "all_gather_single", "reduce_scatter_single"])
def test_the_timeout_in_the_options_of_a_call_counts(method):
    with Ranks(2) as ranks:
        assert ranks.meet()(wait_for_the_options_timeout, method) == [True] * 2


def come_last_as_rank_0(comm):
    with group_of(comm) as group:
        if comm.rank == 0:
            time.sleep(0.6)
        group.monitored_barrier(datetime.timedelta(milliseconds=300))


def test_the_timeout_of_a_monitored_barrier_begins_when_rank_0_comes(three):
    three(come_last_as_rank_0)
