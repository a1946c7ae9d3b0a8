"""Process groups whose members change, from torch 2.14 on: what torch's own tests of it do, and deaths."""

import contextlib
import datetime
import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from ranks import Died, Ranks
from torch_ranks import die
from waiting import counted_s

import shmring
from shmring.adapters._compiled import CallLock
from shmring.adapters._torch.group import Group
from shmring.adapters._torch.reconfiguring import Reconfigurable
from shmring.adapters.torch import register_backend, replace_gloo

if not hasattr(dist, "_reconfigure"):
    pytest.skip("torch has no reconfigure before 2.14", allow_module_level=True)

LIMIT = datetime.timedelta(seconds=20)
SIZE = 3


class Member:
    """One process' part in a group that begins without members."""

    def __init__(self, rank, size, folder, backend="shmring"):
        register_backend()
        replace_gloo(backend == "gloo")
        torch.set_num_threads(1)
        self.number, self.size = rank, size
        self.store = dist.FileStore(str(folder / "store"), -1)
        prefix = dist.PrefixStore("group", self.store)
        dist.init_process_group(
            backend, rank=rank, world_size=size, store=prefix, timeout=LIMIT, enable_reconfigure=True
        )
        self.group = dist.group.WORLD
        self.handles = self.gather("handles")

    def gather(self, name):
        """Return what all processes set under this name: their handles."""
        self.store.set(f"{name} {self.number}", dist._get_reconfigure_handle())
        return [self.store.get(f"{name} {number}").decode() for number in range(self.size)]

    def meet(self, uuid, numbers, **how):
        dist._reconfigure(uuid, [self.handles[number] for number in numbers], **how).wait()
        assert dist.get_world_size() == len(numbers)
        assert dist.get_rank() == list(numbers).index(self.number)
        check_works(numbers)

    def wait_for_all(self, name):
        self.gather(name)


def check_works(numbers):
    """Check calls of several kinds; numbers: those of the members' processes, by rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), numbers[rank] + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [sum(numbers) + size] * 4
    y = torch.full((100_000,), numbers[rank] + 1.0)
    dist.all_reduce(y, async_op=True).wait()
    assert (y == sum(numbers) + size).all()
    z = torch.full((3,), 42.0 if rank == 0 else 0.0)
    dist.broadcast(z, group_src=0)
    assert z.tolist() == [42.0] * 3
    if size > 1:
        got, group = torch.zeros(2), dist.group.WORLD
        sent = group.send([torch.full((2,), float(rank))], (rank + 1) % size, 5)
        group.recv([got], (rank - 1) % size, 5).wait()
        sent.wait()
        assert got.tolist() == [float((rank - 1) % size)] * 2
    dist.barrier()


def basic(member):
    member.meet(1, range(SIZE))


def without_last(member):
    member.meet(1, range(SIZE))
    if member.number < SIZE - 1:
        member.meet(2, range(SIZE - 1))
    member.wait_for_all("done")


def without_middle(member):
    member.meet(1, range(SIZE))
    if member.number != 1:
        member.meet(2, [0, 2])
    member.wait_for_all("done")


def down_and_up(member):
    member.meet(10 + member.number, [member.number])
    member.meet(1, range(SIZE))
    member.meet(20 + member.number, [member.number])
    member.wait_for_all("done")


def identity(member):
    member.meet(1, range(SIZE))
    member.meet(2, range(SIZE))


def in_another_order(member):
    member.meet(1, range(SIZE))
    member.meet(2, [2, 0, 1])


def late_join(member):
    if member.number < 1:
        member.meet(1, [0])
    member.meet(2, range(SIZE))


def merge_of_a_split(member):
    member.meet(1 + (member.number > 0), [0] if member.number == 0 else [1, 2])
    member.meet(3, range(SIZE))


def after_abort(member):
    from torch._C._distributed_c10d import ErrorType

    member.meet(1, range(SIZE))
    member.group.abort()
    assert member.group.get_error() == ErrorType.SUCCESS
    with pytest.raises(shmring.Aborted):
        dist.all_reduce(torch.ones(1))
    member.wait_for_all("aborted")
    member.meet(2, range(SIZE))


def set_of_handles(member):
    dist._reconfigure(1, set(member.handles)).wait()
    order = [member.handles.index(handle) for handle in sorted(member.handles)]
    assert dist.get_rank() == order.index(member.number)
    check_works(order)


def refusals(member):
    own = [member.handles[member.number]]
    with pytest.raises(RuntimeError, match="no members"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="no members"):
        dist.barrier()
    dist._reconfigure(100 + member.number, own).wait()
    for handles, match in (
        (member.handles[: member.number] + member.handles[member.number + 1 :], "own"),
        (own * 2, "twice"),
        ([*own, "gloo:0:-1:0:127.0.0.1:52605"], "is not a handle"),
    ):
        with pytest.raises(RuntimeError, match=match):
            dist._reconfigure(7, handles)
        check_works([member.number])
    with pytest.raises(RuntimeError, match="already used"):
        dist._reconfigure(100 + member.number, own)
    check_works([member.number])


def beside_a_call(member):
    """Another thread of rank 0 waits in a call in which the others do not take part."""
    member.meet(1, range(SIZE))
    caught = []

    def wait_in_vain():
        try:
            dist.all_reduce(torch.ones(1))
        except shmring.Error as error:
            caught.append(error)

    thread = threading.Thread(target=wait_in_vain)
    if member.number == 0:
        thread.start()
        time.sleep(0.2)
    member.meet(2, range(SIZE))
    if member.number == 0:
        thread.join()
        assert len(caught) == 1


def train(member):
    """Gradients are averaged over the members that there are."""
    member.meet(1, range(SIZE))
    for uuid, numbers in ((2, [0, 1]), (3, range(SIZE))):
        if member.number in numbers:
            member.meet(uuid, numbers)
            net = torch.nn.Linear(3, 1, bias=False)
            torch.nn.init.ones_(net.weight)
            ddp = torch.nn.parallel.DistributedDataParallel(net)
            ddp(torch.full((1, 3), 1.0 + member.number)).sum().backward()
            mean = sum(1.0 + number for number in numbers) / len(numbers)
            assert net.weight.grad.tolist() == [[pytest.approx(mean)] * 3]
    member.wait_for_all("done")


SCENARIOS = [
    *(basic, without_last, without_middle, down_and_up, identity, in_another_order, late_join),
    *(merge_of_a_split, after_abort, set_of_handles, refusals, beside_a_call, train),
]


def in_group(comm, scenario, folder, backend):
    member = Member(comm.rank, comm.size, folder, backend)
    try:
        assert dist.get_backend() == backend
        assert isinstance(member.group, Group)
        assert dist._supports_reconfigure()
        scenario(member)
    finally:
        dist.destroy_process_group()
        replace_gloo(False)
    return True


@pytest.mark.parametrize("backend", ["shmring", "gloo"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[one.__name__ for one in SCENARIOS])
def test_members_change(world_of, tmp_path, scenario, backend):
    assert world_of(SIZE)(in_group, scenario, tmp_path, backend) == [True] * SIZE


# ---- deaths, and ranks that do not come -------------------------------------------------------------------


def go_on_without(comm, folder):
    from torch._C._distributed_c10d import ErrorType

    member = Member(comm.rank, comm.size, folder)
    member.meet(1, range(SIZE))
    if member.number == 1:
        die(folder / "died")
    with pytest.raises(shmring.RankFailed) as caught:
        dist.all_reduce(torch.ones(1))
    assert caught.value.rank == 1
    assert member.group.get_error() == ErrorType.REMOTE_ERROR
    member.meet(2, [0, 2])
    took_s = counted_s() - float((folder / "died").read_text())
    dist.destroy_process_group()
    return took_s < 5


def test_the_others_go_on_without_a_dead_rank(tmp_path):
    with Ranks(SIZE) as ranks:
        outcomes = ranks.meet().outcomes(go_on_without, tmp_path)
    assert isinstance(outcomes[1], Died)
    assert [outcomes[0], outcomes[2]] == [True, True]


class InterruptedLock(CallLock):
    """A lock that a signal interrupts when this thread has just taken it."""

    def acquire(self, timeout=-1.0):
        assert super().acquire(timeout)
        raise KeyboardInterrupt


class LeftGroup(Reconfigurable):
    """A group whose communicator only notes that it is closed."""

    def __init__(self, calling, messaging):
        self._calling, self._messaging = calling, messaging
        self._timeout_s, self._unfinished = 1.0, []
        self.comm, self.is_closed = self, False

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_leaves_no_lock_taken(interrupted):
    locks = [InterruptedLock() if number == interrupted else CallLock() for number in range(2)]
    group = LeftGroup(*locks)
    with pytest.raises(KeyboardInterrupt):
        group._leave(0, 1)
    assert not group.is_closed
    assert not any(lock.is_mine() for lock in locks)
    group = LeftGroup(CallLock(), CallLock())
    group._leave(0, 1)
    assert group.comm is not group
    for lock in (group._calling, group._messaging):
        assert lock.acquire(0)
        with pytest.raises(RuntimeError, match="signal handler"):  # of a handler during a call
            group._leave(0, 1)
        assert lock.is_mine()
        lock.release()


def reconfigure_with_the_dead(comm, folder, victim):
    """A member dies before it comes to the meeting; the others learn of it long before the timeout."""
    member = Member(comm.rank, comm.size, folder)
    member.meet(1, range(SIZE))
    if member.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(shmring.RankFailed):
        dist.all_reduce(torch.ones(1))
    begin = counted_s()
    with pytest.raises(shmring.RankFailed) as caught:
        dist._reconfigure(2, member.handles)
    assert counted_s() - begin < LIMIT.total_seconds() / 2
    member.meet(3, [number for number in range(SIZE) if number != victim])
    dist.destroy_process_group()
    return caught.value.rank


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_dead_member_is_named(tmp_path, victim):
    with Ranks(SIZE) as ranks:
        outcomes = ranks.meet().outcomes(reconfigure_with_the_dead, tmp_path, victim)
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert isinstance(outcomes[victim], Died)
    assert left == [victim, victim]


def come_late(comm, folder):
    member = Member(comm.rank, comm.size, folder)
    if member.number == 2:
        member.wait_for_all("done")
        dist.destroy_process_group()
        return None
    with pytest.raises(shmring.Timeout) as caught:
        dist._reconfigure(1, member.handles, timeout=datetime.timedelta(seconds=1))
    member.meet(2, [0, 1])
    member.wait_for_all("done")
    dist.destroy_process_group()
    return caught.value.rank


def test_a_member_that_does_not_come_is_named(tmp_path):
    with Ranks(SIZE) as ranks:
        assert ranks.meet()(come_late, tmp_path) == [2, 2, None]
