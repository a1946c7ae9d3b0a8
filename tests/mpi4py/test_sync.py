"""`mpi4py.util.sync`: what mpi4py's own tests do not cover."""

import pytest
from combinations import first
from running import run_code

HEAD = """
import numpy as np
from shmring import MPI
from shmring.mpi4py.util import sync

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
"""

USE = """
dup = comm.Dup()
counter = sync.Counter(10 if rank == size - 1 else 0, 5, typecode="d", comm=dup, root=size - 1)
mutex = sync.Mutex(comm=dup)
total = MPI.Win.Allocate_shared(8 if rank == 0 else 0, comm=dup)
dup.Free()   # the objects do not need it any more
value = np.frombuffer(total.Shared_query(0)[0], "i8")
given = []
for turn in range(200):
    given.append(next(counter))
    with mutex:
        now = int(value[0])
        if turn % 10 == 0:
            time.sleep(0)
        value[0] = now + 1
assert sorted(sum(comm.allgather(given), [])) == [10 + 5 * n for n in range(200 * size)]
assert value[0] == 200 * size
mutex.free()
counter.free()

# Rank 0 makes things one by one, and the others take them.
room, taken = sync.Condition(comm=comm), []
comm.Barrier()
with room:
    value[0] = 0
comm.Barrier()
for turn in range(60):
    if rank == 0:
        with room:
            value[0] += size - 1
            room.notify_all()
    else:
        with room:
            room.wait_for(lambda: value[0] > 0)
            value[0] -= 1
comm.Barrier()
assert value[0] == 0

# Ranks are notified in the order in which they waited.
order = sync.Counter(comm=comm)
if rank:
    with sync.Sequential(comm.Split(1)):
        room.acquire()
        waiting = next(order)
        assert waiting == rank - 1
    room.wait()
    assert next(order) == size - 1 + waiting
    room.release()
else:
    comm.Split(0)
    for told in range(size - 1):
        while order.next(0) < size - 1 + told:
            time.sleep(0.001)
        with room:
            assert room.notify() == 1
assert comm.bcast(rank) == 0
order.free()
room.free()

# At most two ranks are inside.
semaphore, inside = sync.Semaphore(2, comm=comm), sync.Counter(comm=comm)
for turn in range(30):
    with semaphore:
        assert inside.next(1) < 2
        time.sleep(0.001)
        inside.next(-1)
comm.Barrier()
try:
    semaphore.release()
except ValueError:
    pass
else:
    raise AssertionError
comm.Barrier()
semaphore.free()
inside.free()
total.Free()
print("well")
"""


@pytest.mark.parametrize("nprocs", first(2, [4, 1, 2]))
def test_objects_among_ranks(tmp_path, nprocs):
    done = run_code(tmp_path, HEAD + USE, "--no-prefix", nprocs=nprocs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["well"] * nprocs


DEATH = """
mutex = sync.Mutex(comm=comm)
if rank == 1:
    mutex.acquire()
comm.Barrier()
if rank == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    mutex.acquire()
except MPI.Exception as error:
    assert error.Get_error_class() == MPI.ERR_PROC_FAILED, error
    os.write(1, b"%d\\n" % error.__cause__.rank)
"""


def test_the_death_of_a_rank_with_a_mutex_is_an_error_of_those_who_wait(tmp_path):
    done = run_code(tmp_path, HEAD + DEATH, "--no-prefix", "--keep-going", nprocs=3)
    assert done.stdout.split() == ["1", "1"], done.stdout + done.stderr


WAITS = """
class Interrupted:
    # Interrupts the next receive, before or after a notification.
    def __init__(self, channel, is_notified):
        self.channel, self.is_notified, self.was = channel, is_notified, False

    def Recv(self, *arguments):
        if self.was:
            return self.channel.Recv(*arguments)
        self.was = True
        if self.is_notified:
            self.channel.Probe()
        raise KeyboardInterrupt

    def __getattr__(self, name):
        return getattr(self.channel, name)

condition = sync.Condition(comm=comm)
for is_notified in (False, True):
    if rank == 1:
        channel = Interrupted(condition._channel(), is_notified)
        condition._channel = lambda: channel
        with condition:
            if is_notified:
                comm.send(None, 2)
            try:
                condition.wait()
            except KeyboardInterrupt:
                assert condition.locked()
            else:
                raise AssertionError
    elif rank == 2:
        if is_notified:
            comm.recv(source=1)   # rank 1 is the first in the queue
        with condition:
            comm.send(None, 0)
            condition.wait()
    else:
        comm.recv(source=2)
        with condition:
            assert condition.notify() == 1
    comm.Barrier()
assert not condition._channel().Iprobe() and not condition._array[1]
condition.free()
print("well")
"""


def test_an_interrupted_wait_has_the_mutex_and_leaves_the_queue(tmp_path):
    done = run_code(tmp_path, HEAD + WAITS, "--no-prefix", nprocs=3)
    assert done.stdout.split() == ["well"] * 3, done.stdout + done.stderr
