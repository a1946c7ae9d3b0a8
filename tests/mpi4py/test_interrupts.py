"""Exceptions such as KeyboardInterrupt in calls of `from shmring import MPI`.

After one, a call has not begun, or the communicator has ended on all ranks; requests can be waited for again.
"""

import pytest
from running import ALARM, run_code

from shmring.mpi4py.calls import HeldLocks

COLLECTIVES = """
import numpy as np
from shmring import MPI
from shmring.mpi4py.util import pkl5

world = MPI.COMM_WORLD
rank, other = world.rank, 1 - world.rank

def interrupt(*arguments):
    if rank == 1:
        raise KeyboardInterrupt
    return arguments[0] if arguments else None

class Loud:
    def __reduce__(self):
        return interrupt, ()

loud, x, y, pair = Loud(), np.ones(1), np.zeros(1), np.zeros(2)
loudly = MPI.Op.Create(interrupt)
spread = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
calls = {
    "bcast": lambda: comm.bcast(loud),
    "gather": lambda: comm.gather(loud, 1),
    "scatter": lambda: comm.scatter([loud] * 2),
    "allgather": lambda: comm.allgather(loud),
    "alltoall": lambda: comm.alltoall([loud] * 2),
    "reduce": lambda: comm.reduce(1, loudly, 1),
    "allreduce": lambda: comm.allreduce(1, loudly),
    "scan": lambda: comm.scan(1, loudly),
    "recv": lambda: comm.recv(source=0) if rank else comm.send(loud, 1),
    "sendrecv": lambda: comm.sendrecv(loud, other),
    "mrecv": lambda: comm.mprobe(0).recv() if rank else comm.send(loud, 1),
    "pkl5.bcast": lambda: pkl5.Intracomm(comm).bcast(loud),
    "pkl5.gather": lambda: pkl5.Intracomm(comm).gather(loud, 1),
    "pkl5.scatter": lambda: pkl5.Intracomm(comm).scatter([loud] * 2),
    "pkl5.allgather": lambda: pkl5.Intracomm(comm).allgather(loud),
    "pkl5.alltoall": lambda: pkl5.Intracomm(comm).alltoall([loud] * 2),
    "pkl5.recv": lambda: pkl5.Intracomm(comm).recv() if rank else pkl5.Intracomm(comm).send(loud, 1),
    "neighbor_allgather": lambda: ring.neighbor_allgather(loud),
    "neighbor_alltoall": lambda: ring.neighbor_alltoall([loud]),
    "Allreduce": lambda: comm.Allreduce(x, y, loudly),
    "Reduce": lambda: comm.Reduce(x, y, loudly, 1),
    "Scan": lambda: comm.Scan(x, y, loudly),
    "Reduce_scatter": lambda: comm.Reduce_scatter(pair, y, [1, 1], loudly),
    "Reduce_scatter_block": lambda: comm.Reduce_scatter_block(pair, y, loudly),
}
for name, call in calls.items():
    comm = world.Dup()
    ring = comm.Create_dist_graph_adjacent([other], [other])
    used = ring if name.startswith("neighbor") else comm
    try:
        call()
    except KeyboardInterrupt:
        assert rank == 1, name
    except MPI.Exception as error:   # the other rank has raised before this one is done
        assert rank == 0 and error.Get_error_class() == MPI.ERR_PROC_ABORTED, name
    else:
        assert rank == 0, name
    try:
        used.Barrier()
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_PROC_ABORTED, (name, error)
    else:
        raise AssertionError(f"{name}: the communicator goes on")

# An error of an object or an operation is the program's, and ends nothing.
def fail(*_):
    raise ZeroDivisionError

class Bad:
    def __reduce__(self):
        return fail, ()

comm, failing = world.Dup(), MPI.Op.Create(fail)
ring = comm.Create_dist_graph_adjacent([other], [other])
bad = Bad()
for call in (
    lambda: comm.alltoall([bad] * 2),
    lambda: comm.allreduce(1, failing),
    lambda: comm.Allreduce(x, y, failing),
    lambda: comm.sendrecv(bad, other),
    lambda: ring.neighbor_allgather(bad),
):
    try:
        call()
    except ZeroDivisionError:
        world.Barrier()
        assert comm.allreduce(1) == ring.allreduce(1) == 2
    else:
        raise AssertionError("no error")
print("well")
"""


def test_an_exception_behind_a_call_ends_the_communicator(tmp_path):
    done = run_code(tmp_path, COLLECTIVES, "--no-prefix", nprocs=2)
    assert done.stdout.splitlines() == ["well"] * 2, done.stdout + done.stderr


REQUESTS = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_SELF
fuse = [0]

def interrupt(*_):
    fuse[0] -= 1
    if fuse[0] == 0:
        raise KeyboardInterrupt
    return "object"

def add(a, b, _):
    interrupt()
    b = np.frombuffer(b)
    b += np.frombuffer(a)

class Loud:
    def __reduce__(self):
        return interrupt, ()

def interrupted(call, *arguments):
    try:
        call(*arguments)
    except KeyboardInterrupt:
        return True

# A request is not complete before its object is there. Other requests keep their objects.
for call in (MPI.Request.waitall, MPI.Request.testall, MPI.Request.waitsome, MPI.Request.testsome):
    requests = [comm.irecv(source=0, tag=tag) for tag in range(3)]
    for tag in range(3):
        comm.send(Loud() if tag == 1 else tag, 0, tag)
    fuse[0] = 1
    assert interrupted(call, requests), call
    assert all(requests)
    found = call(requests)
    if isinstance(found, tuple):
        found = found[1]
    assert found == [0, "object", 2], (call, found)
for name in ("wait", "test", "waitany", "testany"):
    request = comm.irecv(source=0)
    comm.send(Loud(), 0)
    fuse[0] = 1
    call = getattr(request, name) if name in ("wait", "test") else lambda: getattr(request, name)([request])
    assert interrupted(call), name
    assert request
    found = call()
    assert "object" in (found if isinstance(found, tuple) else (found,)), (name, found)
    assert not request

# The operands of a reduction stay as they are until it is complete.
loudly, x, y = MPI.Op.Create(add), np.array([3.0]), np.zeros(1)
grid = MPI.COMM_WORLD.Dup()
request = grid.Iallreduce(x, y, loudly)
fuse[0] = 2
if grid.size == 3:
    assert interrupted(request.Wait)
    fuse[0] = 0
    request.Wait()
    assert y[0] == 9, y
grid.Free()
print("well")
"""


def test_a_request_can_be_waited_for_again(tmp_path):
    for nprocs in (1, 3):
        done = run_code(tmp_path, REQUESTS, "--no-prefix", nprocs=nprocs)
        assert done.stdout.splitlines() == ["well"] * nprocs, done.stdout + done.stderr


MESSAGES = """
import signal
import numpy as np
from shmring import MPI
from shmring.mpi4py import point_to_point

world = MPI.COMM_WORLD
rank, other = world.rank, 1 - world.rank

def is_over(comm):
    try:
        comm.Barrier()
    except MPI.Exception as error:
        return error.Get_error_class() == MPI.ERR_PROC_ABORTED

# A message that was sent is not sent again: the communicator ends.
x, y = np.ones(1), np.zeros(1)
for name in ("Sendrecv", "Sendrecv_replace", "sendrecv", "Neighbor_allgather"):
    comm = world.Dup()
    ring = comm.Create_dist_graph_adjacent([other], [other])
    used = ring if name == "Neighbor_allgather" else comm
    if rank == 1:
        call = getattr(used, name)
        known = {"Sendrecv": (x, 0, 0, y), "Sendrecv_replace": (x, 0), "sendrecv": (1, 0)}
        arguments = known.get(name, (x, y))
        assert interrupted(call, *arguments), name
    assert is_over(used), name

# A receive that has met no message has not begun.
if rank == 1:
    assert interrupted(world.Sendrecv, None, MPI.PROC_NULL, 0, y, 0)
    assert interrupted(world.sendrecv, None, MPI.PROC_NULL, 0, None, 0)
world.Barrier()

# A message that a probe took can be received after an exception.
if rank == 0:
    world.Send(np.full(3, 7.0), 1)
else:
    message = world.Mprobe()
    receive = point_to_point.Taking.perform
    point_to_point.Taking.perform = interrupt
    room = np.zeros(3)
    assert interrupted(message.Recv, room) and message
    point_to_point.Taking.perform = receive
    message.Recv(room)
    assert not message and room.tolist() == [7.0] * 3

# `Start` goes on where it was interrupted, also for other ranks in between.
win = MPI.Win.Allocate(8, comm=world)
group = world.Get_group()
if rank == 1:
    win.Post(group.Incl([1]))
    assert interrupted(win.Start, group.Incl([1, 0]))
    world.Send(x, 0)
    for posted in ([0], [1]):
        win.Start(group.Incl(posted))
        win.Complete()
    win.Wait()
else:
    world.Recv(y)
    win.Post(group.Incl([1]))
    win.Wait()
win.Free()
print("well")
"""


@pytest.mark.limit(60)
def test_an_interrupted_message_is_not_sent_twice_and_not_lost(tmp_path):
    done = run_code(tmp_path, ALARM + MESSAGES, "--no-prefix", nprocs=2)
    assert done.stdout.splitlines() == ["well"] * 2, done.stdout + done.stderr


PARTS = """
import numpy as np
from shmring import MPI
from shmring.mpi4py.util import pkl5

world = MPI.COMM_WORLD
rank = world.rank

def interrupt(*_):
    raise KeyboardInterrupt

large = np.zeros(100_000)
calls = {
    "Bcast": lambda comm: comm.bcast(large),
    "Gatherv": lambda comm: comm.gather(large),
    "Scatterv": lambda comm: comm.scatter([large] * 2),
    "Allgatherv": lambda comm: comm.allgather(large),
    "Alltoallv": lambda comm: comm.alltoall([large] * 2),
    "Irecv": lambda comm: comm.recv() if rank else comm.isend(large, 1),
}
for step, call in calls.items():
    comm = pkl5.Intracomm(world.Dup())
    original = getattr(MPI.Message if step == "Irecv" else MPI.Comm, step)
    if rank == 1:
        setattr(MPI.Message if step == "Irecv" else MPI.Comm, step, interrupt)
    try:
        call(comm)
    except KeyboardInterrupt:
        assert rank == 1, step
        setattr(MPI.Message if step == "Irecv" else MPI.Comm, step, original)
    except MPI.Exception:
        assert rank == 0, step
    try:
        comm.Barrier()
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_PROC_ABORTED, (step, error)
    else:
        raise AssertionError(step)
    world.Barrier()
print("well")
"""


def test_an_exception_between_the_parts_of_an_object_ends_the_communicator(tmp_path):
    done = run_code(tmp_path, PARTS, "--no-prefix", nprocs=2)
    assert done.stdout.splitlines() == ["well"] * 2, done.stdout + done.stderr


class _Lock:
    def __init__(self, held, *, raises=False):
        self.held, self.raises = held, raises

    def __enter__(self):
        if self.raises:
            raise KeyboardInterrupt
        self.held.append(self)

    def __exit__(self, *_):
        self.held.remove(self)


def test_locks_are_all_taken_or_none():
    held = []
    locks = [_Lock(held), _Lock(held)]
    taken = HeldLocks(locks)
    assert held == locks
    taken.release()
    assert held == []
    taken.release()
    with pytest.raises(KeyboardInterrupt):
        HeldLocks([*locks, _Lock(held, raises=True)])
    assert held == []
    HeldLocks(locks)  # nothing refers to it
    assert held == []


DROP = """
import ctypes, functools, operator, signal, sys
from shmring.mpi4py.calls import HeldLocks

class Lock:
    __enter__ = int

    def __exit__(self, *error):   # Python code, in which signal handlers run
        pass

signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
held = [HeldLocks([Lock()])]
both = functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGTERM)), held.clear
try:
    list(map(operator.call, both))  # no bytecode runs between the two
except SystemExit:
    print("raised")
"""


def test_a_signal_in_a_destructor_raises_after_it(tmp_path):
    """It ended the process at once, without running any finally clause."""
    done = run_code(tmp_path, DROP, "--no-prefix", nprocs=1)
    assert (done.returncode, done.stdout.split()) == (0, ["raised"]), done.stderr
