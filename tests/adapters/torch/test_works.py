"""Works that C++ keeps after Python has dropped them, in every way in which C++ gets one."""

import _thread
import contextlib
import datetime
import gc
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from ranks import Ranks, until_there
from torch import nn
from torch._C._distributed_c10d import _register_work
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_ranks import die, group_of, news_of_death, of_backend, of_both
from waiting import wait_until

import shmring
from shmring.adapters._compiled import CallLock
from shmring.adapters._torch import work as _torch_work
from shmring.adapters.torch import replace_gloo

MANY = 50
LIMIT_S = 1  # of a group
BIG = 300_000  # longer than a call stays with its caller when another rank comes late


def issue(x):
    return dist.all_reduce(x, async_op=True)


def issue_directly(x):
    """As Python does that has the group, and not torch.distributed's functions."""
    return dist.group.WORLD.allreduce([x], dist.AllreduceOptions())


def issue_in_cpp(x):
    """Issue as C++ does: the returned Work is one of C++, which holds the group's."""
    return dist.ProcessGroup.allreduce(dist.group.WORLD, [x], dist.AllreduceOptions())


def issue_message(x):
    rank = dist.get_rank()
    return dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)


def issue_coalesced(x):
    with c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
    return manager.works[0]


ISSUES = [issue, issue_directly, issue_in_cpp, issue_message, issue_coalesced]
ids = [function.__name__ for function in ISSUES]


def late(rank):
    """Let rank 1 come after rank 0 has begun and dropped its Work."""
    if rank == 1:
        time.sleep(0.1)


def call_without_frames(method, *arguments):
    """Return what a method returns that a thread calls in which no other Python code runs, as C++ may."""
    results = []
    _thread.start_new_thread(results.extend, (map(method, *zip(arguments, strict=True)),))
    wait_until(lambda: results, f"{method.__name__} returns")
    return results[0]


def calls_without_frames(rank):
    group, x, y = dist.group.WORLD, torch.ones(3), torch.full((BIG,), 1.0 + rank)
    works = [call_without_frames(group.allreduce, [x], dist.AllreduceOptions())]
    if rank == 0:
        works.append(call_without_frames(group.send, [y], 1, 0))
        works.append(call_without_frames(group.recv_anysource, [y[:5]], 1))
    else:
        works.append(call_without_frames(group.recv, [y], 0, 0))
        works[-1].wait()
        works.append(call_without_frames(group.send, [y[5:10] + 2], 0, 1))
    for work in works:
        work.wait()
    return x.sum(), y.sum()


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_call_from_a_thread_without_frames(is_in_place):
    replace_gloo(is_in_place)
    try:
        with Ranks(2) as ranks:
            backend = "gloo" if is_in_place else "shmring"
            found = of_backend(ranks.meet(), backend, calls_without_frames)
    finally:
        replace_gloo(False)
    assert found == [(6, BIG + 10), (6, BIG)]


# ---- boxed and unboxed ------------------------------------------------------------------------------------


def box(issue, x, *, waits=False):
    work = issue(x)
    if waits:
        work.wait()
    return work.boxed()


def unboxed(rank, issue, waits):
    late(rank)
    x = torch.ones(BIG)
    boxed = box(issue, x, waits=waits)
    gc.collect()
    assert dist.Work.unbox(boxed).wait()
    return x


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("issue", ISSUES, ids=ids)
def test_an_unboxed_work_is_waited_for(world_of, issue, waits):
    if issue is issue_message and waits:  # gloo's can be waited for once
        found = of_backend(world_of(2), "shmring", unboxed, issue, waits)
    else:
        found = of_both(world_of(2), unboxed, issue, waits)
    assert all((x == (1 if issue is issue_message else 2)).all() for x in found)


def unboxed_with_limit(rank, waited):
    if rank == 1:
        until_there(waited)
    x = torch.ones(BIG)
    boxed = box(issue, x)
    if rank == 0:
        with pytest.raises(TimeoutError):
            dist.Work.unbox(boxed).wait(datetime.timedelta(milliseconds=5))
        waited.touch()
    dist.Work.unbox(boxed).wait(datetime.timedelta(seconds=20))
    return x


def test_an_unboxed_work_is_waited_for_with_a_limit(world_of, tmp_path):
    found = of_backend(world_of(2), "shmring", unboxed_with_limit, tmp_path / "waited")
    assert [x[-1] for x in found] == [2, 2]


def polled(rank, issue):
    late(rank)
    x = torch.ones(BIG)
    work = dist.Work.unbox(box(issue, x))
    while not work.is_completed():
        time.sleep(0.001)
    assert work.is_success()
    return x


@pytest.mark.parametrize("issue", [issue, issue_directly])
def test_an_unboxed_work_is_polled(world_of, issue):
    of_both(world_of(2), polled, issue)


def future_of_unboxed(rank, issue):
    late(rank)
    x = torch.ones(BIG)
    return dist.Work.unbox(box(issue, x)).get_future().then(lambda future: future.value()[0] + 1).wait()


@pytest.mark.parametrize("issue", [issue, issue_directly])
def test_an_unboxed_work_has_a_future(world_of, issue):
    of_both(world_of(2), future_of_unboxed, issue)


def unboxed_while_kept(rank):
    work = issue(torch.ones(BIG))
    return dist.Work.unbox(work.boxed()) is work and work.wait()


def test_a_kept_work_is_unboxed_as_itself(world_of):
    assert of_backend(world_of(2), "shmring", unboxed_while_kept) == [True, True]


def in_vain(comm):
    """Post receives that no message matches and no thread waits for; futures of other calls are completed."""
    with group_of(comm, seconds=LIMIT_S) as group:
        left = (comm.rank - 1) % comm.size
        boxed = dist.irecv(torch.zeros(3), left, tag=1).boxed()
        work = group.recv([torch.zeros(3)], left, 2)
        x = torch.ones(BIG)
        time.sleep(0.1 * comm.rank)
        future = issue_directly(x).get_future().then(lambda future: future.value()[0][-1].item())
        found = future.wait()
        time.sleep(1.5 * LIMIT_S)
        dist.all_reduce(x)
        del boxed, work
        return found, x[-1].item()


def test_messages_that_do_not_come_end_nothing(three):
    assert three(in_vain) == [(3.0, 9.0)] * 3


# ---- held by torch's C++ ----------------------------------------------------------------------------------


def registered(rank, issue):
    late(rank)
    x = torch.ones(BIG)
    _register_work(x, issue(x))
    gc.collect()
    torch.ops._c10d_functional.wait_tensor(x)
    return x


@pytest.mark.parametrize("issue", ISSUES, ids=ids)
def test_a_registered_work_is_waited_for_by_its_tensor(world_of, issue):
    of_both(world_of(2), registered, issue)


def held_by_reducer(rank, issue, is_static, is_waited_for, is_kept):
    """DDP's reducer divides by the number that the Work brings, if not by the number of ranks."""
    net = DDP(nn.Linear(2, 2, bias=False))
    late(rank)
    work = issue(torch.tensor([2.0]))
    if is_waited_for:
        work.wait()
    net.reducer._set_forward_pass_work_handle(work, is_static)
    kept = work if is_kept else None
    del work
    gc.collect()
    net(torch.ones(1, 2)).sum().backward()
    del kept
    return net.module.weight.grad


@pytest.mark.parametrize("issue", [issue, issue_directly])
@pytest.mark.parametrize(
    "how",
    [(False, False, False), (False, True, False), (False, False, True), (True, False, False)],
    ids=["dropped", "waited for", "kept", "static"],
)
def test_the_reducer_waits_for_a_work_and_reads_it(world_of, issue, how):
    found = of_both(world_of(2), held_by_reducer, issue, *how)
    assert (found[0] == (1 if how[0] else 0.5)).all()


def future_of_dropped(rank, issue):
    late(rank)
    x = torch.ones(BIG)
    future = issue(x).get_future().then(lambda future: future.value()[0] * 2)
    gc.collect()
    return future.wait()


@pytest.mark.parametrize("issue", [issue, issue_directly, issue_in_cpp])
def test_the_future_of_a_dropped_work_is_completed(world_of, issue):
    of_both(world_of(2), future_of_dropped, issue)


def dropped_everywhere(rank):
    late(rank)
    group = dist.group.WORLD
    x = funcol.all_reduce(torch.ones(BIG), "sum", group)
    parts = funcol.all_gather_tensor(torch.ones(2), 0, group)
    many = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", group)
    y = torch.ones(3)
    dist.all_reduce(y, async_op=True)
    gc.collect()
    dist.barrier()
    return x + 0, parts + 0, [one + 0 for one in many], y


def test_dropped_functional_and_plain_calls_are_done(world_of):
    of_both(world_of(2), dropped_everywhere)


def with_dropped_group(rank):
    group = dist.new_group([0, 1])
    net = DDP(nn.Linear(2, 2, bias=False), process_group=group)
    net.process_group = None
    for known in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
        known.pop(group, None)
    del group
    gc.collect()
    net(torch.ones(1, 2)).sum().backward()
    return net.module.weight.grad


def test_the_reducer_holds_a_dropped_group(world_of):
    of_both(world_of(2), with_dropped_group)


# ---- memory, and errors -----------------------------------------------------------------------------------


def operations_left(rank, issue):
    """Return the number of operations left over by many calls whose Works C++ had."""
    net = DDP(nn.Linear(2, 2, bias=False))

    def call():
        x = torch.ones(3)
        _register_work(x, issue(x))
        torch.ops._c10d_functional.wait_tensor(x)
        dist.Work.unbox(box(issue, x)).wait()
        net.reducer._set_forward_pass_work_handle(issue(torch.ones(1)), False)
        net(torch.ones(1, 2)).sum().backward()
        issue(x).get_future().wait()
        issue(x).wait()

    def count():
        dist.barrier()
        gc.collect()
        return sum(isinstance(found, _torch_work.Operation) for found in gc.get_objects())

    call()
    before = count()
    for _ in range(MANY):
        call()
    return count() - before


@pytest.mark.parametrize("issue", [issue, issue_directly])
def test_nothing_is_kept_of_works_that_are_over(world_of, issue):
    for more in of_backend(world_of(2), "shmring", operations_left, issue):
        assert more < MANY // 10


def test_the_thread_of_a_forgotten_group_ends():
    completer = _torch_work.Completer("forgotten")
    has_run = threading.Event()
    completer.complete(_torch_work.Operation((), [], completer), has_run.set)
    assert has_run.wait(LIMIT_S)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "forgotten"]
    del completer
    thread.join(LIMIT_S)
    assert not thread.is_alive()


class SetByAnother(torch.futures.Future):
    """A future that another thread completes just after it was asked."""

    def done(self):
        self.set_result("of another")
        return False


class NotArrived:
    """A transfer whose message does not come."""

    def done(self):
        return False


def test_an_interrupted_poll_of_a_message_leaves_the_group_to_the_next_call():
    lock = CallLock()
    message = _torch_work.Message(NotArrived(), lock, LIMIT_S)

    def interrupt(number, frame):
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(300):
            with contextlib.suppress(InterruptedError):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + turn % 30))
                while not message.done():
                    pass
            assert lock.acquire(0)
            lock.release()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_result_that_an_interrupt_left_incomplete_is_not_given():
    def finish():
        raise KeyboardInterrupt

    operation = _torch_work.StagedOperation((), [torch.ones(1)], _torch_work.Completer("unused"), finish)
    with pytest.raises(KeyboardInterrupt):
        operation.wait()
    with pytest.raises(RuntimeError, match="ended by KeyboardInterrupt: the result is incomplete"):
        operation.result()
    assert not operation.has_succeeded()


def test_two_threads_complete_a_work_at_once():
    operation = _torch_work.Operation((), [], _torch_work.Completer("two"))
    operation.future_in_cpp = SetByAnother()
    assert operation.wait_in_cpp(datetime.timedelta(0))
    assert operation.future_in_cpp.value() == "of another"


def wait_for_the_dead(rank, path, issue):
    x = torch.ones(BIG)
    if rank == 2:
        die(path)
    boxed = box(issue, x)
    with pytest.raises(shmring.RankFailed, match="rank 2"):
        dist.Work.unbox(boxed).wait()
    with pytest.raises(RuntimeError, match="rank 2"):
        dist.Work.unbox(boxed).get_future().wait()
    dist.Work.unbox(boxed).wait()


@pytest.mark.parametrize("issue", [issue, issue_directly])
def test_an_unboxed_work_raises_what_ended_it(three, tmp_path, issue):
    for error in news_of_death(three, tmp_path / "died", wait_for_the_dead, issue):
        assert error.startswith("RankFailed: ")
