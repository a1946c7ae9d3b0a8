"""Threads of a rank that call MPI at the same time."""

import pytest
from combinations import first
from running import run_code

THREADS = """
import threading
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
after, before = (rank + 1) % size, (rank - 1) % size
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
failures = []

def messages(tag):
    x, y = np.zeros(1, "i8"), np.zeros(1, "i8")
    for i in range(100):
        x[0] = 1000 * tag + i
        if tag % 2:
            comm.Send(x, after, tag)
            comm.Recv(y, before, tag)
        else:
            comm.Sendrecv(x, after, tag, y, before, tag)
        assert y[0] == x[0]
        request = comm.isend((i, tag), after, 100 + tag)
        assert comm.recv(source=before, tag=100 + tag) == (i, tag)
        request.wait()

def guarded(tag):
    try:
        messages(tag)
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=guarded, args=(tag,)) for tag in range(4)]
for thread in threads:
    thread.start()
for i in range(100):   # collectives beside the messages
    assert comm.allreduce(i) == i * size
    y = np.zeros(1)
    comm.Allreduce(np.ones(1), y)
    assert y[0] == size
for thread in threads:
    thread.join()
assert not failures, failures

# A message of this rank to itself ends the blocking receive of another thread.
def receive_probed():
    comm.Probe(rank, 5)
    return comm.recv(None, rank, 5)

for receive in (lambda: comm.recv(source=rank, tag=5), receive_probed):
    got = []
    thread = threading.Thread(target=lambda: got.append(receive()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    comm.send("woken", rank, 5)
    thread.join()
    assert got == ["woken"]

# Each message goes to one of several threads that receive with wildcards.
got = []
def collect():
    while (found := comm.recv(source=before, tag=6)) is not None:
        got.append(found)
threads = [threading.Thread(target=collect) for _ in range(3)]
for thread in threads:
    thread.start()
for number in range(200):
    comm.send(number, after, 6)
for _ in threads:
    comm.send(None, after, 6)
for thread in threads:
    thread.join()
assert sorted(got) == list(range(200))

# A large message, a buffered one and a cancelled receive, while another thread waits.
idle = threading.Thread(target=lambda: comm.recv(source=rank, tag=7))
idle.start()
large, room = np.full(1 << 20, rank), np.zeros(1 << 20, "i8")
comm.Sendrecv(large, after, 8, room, before, 8)
assert (room == before).all()
MPI.Attach_buffer(bytearray(1 << 16))
comm.bsend("kept", after, 9)
assert comm.recv(source=before, tag=9) == "kept"
MPI.Detach_buffer()
request = comm.Irecv(room, before, 10)
request.Cancel()
status = MPI.Status()
request.Wait(status)
assert status.Is_cancelled()
ring = comm.Create_cart([size], [True])
assert ring.neighbor_allgather(rank) == [before, after]
comm.send(None, rank, 7)
idle.join()
print("well")
"""


@pytest.mark.parametrize("nprocs", first(2, [3, 1, 2]))
def test_threads_send_and_receive_at_the_same_time(tmp_path, nprocs):
    done = run_code(tmp_path, THREADS, "--no-prefix", nprocs=nprocs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["well"] * nprocs


OWN_THREAD = """
import numpy as np
from shmring import MPI
from shmring.mpi4py.turns import Turns

def fail(*_):
    raise AssertionError("a rank with one thread takes no turns")

Turns.wait_for = Turns.__enter__ = fail
comm = MPI.COMM_WORLD
x, y = np.ones(1), np.zeros(1)
comm.Iallreduce(x, y).Wait()     # starts the progress thread
comm.send("one", (comm.rank + 1) % comm.size)
assert comm.recv() == "one"
comm.Sendrecv(x, (comm.rank + 1) % comm.size, 0, y)
print("direct")
"""


def test_the_progress_thread_is_no_other_thread_of_the_program(tmp_path):
    done = run_code(tmp_path, OWN_THREAD, "--no-prefix")
    assert done.stdout.splitlines() == ["direct"] * 2, done.stderr


DEATH = """
import os, threading, time
from shmring import MPI

comm = MPI.COMM_WORLD
beside = threading.Thread(target=time.sleep, args=(30,), daemon=True)
beside.start()
if comm.rank == 1:
    comm.recv(source=0)
    os._exit(0)
comm.send(None, 1)
for receive in (lambda: comm.recv(source=1), lambda: comm.Recv(bytearray(1), 1)):
    try:
        receive()
    except MPI.Exception as error:
        print(type(error.__cause__).__name__, flush=True)
os._exit(0)
"""


def test_a_thread_that_waits_for_a_dead_rank_raises(tmp_path):
    done = run_code(tmp_path, DEATH, "--no-prefix")
    assert done.stdout.splitlines() == ["RankFailed"] * 2, done.stderr
