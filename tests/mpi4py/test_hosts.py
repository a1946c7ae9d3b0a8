"""`from shmring import MPI` over two hosts: here two on one machine, told apart by SHMRING_NODE."""

import os
import subprocess
import sys
import textwrap

import pytest
from rendezvous import free_port

LIMIT_S = 50
HEAD = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
left, right = (rank - 1) % size, (rank + 1) % size
"""
TAIL = """
print("well")
"""


@pytest.fixture
def run_on_hosts(tmp_path):
    """Return a function that runs code on hosts with these numbers of ranks, to its end: (code, output)."""
    running = []

    def run(code, counts=(2, 2)):
        script, address = tmp_path / "script.py", f"127.0.0.1:{free_port()}"
        script.write_text(HEAD + textwrap.dedent(code) + TAIL)
        for index in range(len(counts)):
            command = [sys.executable, "-m", "shmring.run", "--rdzv", address, "--node-rank", str(index)]
            command += ["--no-prefix", "-n", ",".join(map(str, counts)), str(script)]
            here = {"SHMRING_KEY": "0123456789abcdef" * 2, "OMP_NUM_THREADS": "1", "SHMRING_NODE": str(index)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            running.append(subprocess.Popen(command, env={**os.environ, **here}, **pipes))
        return [(*process.communicate(timeout=LIMIT_S), process.returncode) for process in running]

    yield run
    for process in running:
        process.kill()
        process.wait()


def check(done, counts=(2, 2)):
    for (out, err, code), count in zip(done, counts, strict=True):
        assert (code, out.splitlines()) == (0, ["well"] * count), out + err


COLLECTIVES = """
of_host = comm.Split_type(MPI.COMM_TYPE_SHARED)
assert of_host.size == 2
assert [each.Get_attr(MPI.WTIME_IS_GLOBAL) for each in (comm, of_host, MPI.COMM_SELF)] == [False, True, True]
for count in (1, 3, 100, 30000):
    x, total = np.arange(count) + float(rank), np.zeros(count)
    all_x = np.arange(count) + np.arange(size)[:, None]
    comm.Barrier()
    comm.Allreduce(x, total)
    assert (total == all_x.sum(0)).all()
    comm.Iallreduce(x, total, MPI.MAX).Wait()
    assert (total == all_x.max(0)).all()
    comm.Reduce(x, total if rank == 2 else None, MPI.MIN, root=2)
    assert rank != 2 or (total == all_x.min(0)).all()
    comm.Scan(x, total)
    assert (total == all_x[: rank + 1].sum(0)).all()
    y = x.copy()
    comm.Ibcast(y, root=3).Wait()
    assert (y == all_x[3]).all()
    every = np.zeros((size, count))
    comm.Allgather(x, every)
    assert (every == all_x).all()
    requests = [comm.Igather(x, every if rank == 1 else None, root=1), comm.Ibarrier()]
    MPI.Request.Waitall(requests)
    given = all_x[:, :1] * 10.0 + np.arange(size)
    taken = np.zeros(2 * size)
    comm.Alltoall(np.repeat(given[rank], 2), taken)
    assert (taken == np.repeat(given[:, rank], 2)).all()
    part = np.zeros(count)
    comm.Scatter(all_x.astype(float) if rank == 0 else None, part)
    assert (part == x).all()
    comm.Reduce_scatter_block(all_x.astype(float), part)
    assert (part == size * x).all()
    gathered = np.zeros(size * (size + 1) // 2)
    comm.Allgatherv(np.full(rank + 1, rank + 0.5), [gathered, list(range(1, size + 1))])
    assert (gathered == np.repeat(np.arange(size) + 0.5, np.arange(1, size + 1))).all()
once = comm.Allreduce_init(x, total)
for step in range(5):
    x[:] = step
    once.Start()
    once.Wait()
    assert (total == step * size).all()
pairs = np.array([(5, rank)], MPI.DOUBLE_INT._ref.dtype)
comm.Allreduce(MPI.IN_PLACE, [pairs, MPI.DOUBLE_INT], MPI.MAXLOC)
assert tuple(pairs[0]) == (5, 0)
"""


OBJECTS = """
for length in (1, 30, 1000, 100000):
    own = ["x" * length, rank]
    assert comm.bcast(own if rank == 3 else None, root=3) == ["x" * length, 3]
    assert comm.allgather(own) == [["x" * length, other] for other in range(size)]
    assert comm.gather(rank, root=2) == (list(range(size)) if rank == 2 else None)
    assert comm.scatter([own] * size if rank == 1 else None, root=1) == ["x" * length, 1]
    assert comm.alltoall([(rank, other) for other in range(size)]) == [(other, rank) for other in range(size)]
    assert comm.allreduce(own) == sum((["x" * length, other] for other in range(size)), [])
    assert comm.reduce(rank, MPI.MAX, root=3) == (size - 1 if rank == 3 else None)
    assert comm.scan(rank) == sum(range(rank + 1))
    assert comm.sendrecv(own, right, source=left) == ["x" * length, left]
"""


MESSAGES = """
status = MPI.Status()
for count in (1, 5000, 200000):
    x, y = np.full(count, float(rank)), np.zeros(count)
    requests = [comm.Irecv(y, left, 5), comm.Isend(x, right, 5)]
    MPI.Request.Waitall(requests)
    assert (y == left).all()
    comm.Sendrecv(x, left, 1, y, right, 1, status)
    assert (status.source, status.tag, status.Get_count(MPI.DOUBLE), y[0]) == (right, 1, count, right)
    sent = comm.Issend(x, right, 9)
    comm.Probe(MPI.ANY_SOURCE, 9, status)
    assert (status.source, status.count) == (left, x.nbytes)
    message = comm.Mprobe(left, 9)
    assert not comm.Iprobe(left, 9)
    message.Recv(y)
    sent.Wait()
    assert (y == left).all()
    many = [comm.isend((rank, number), other, number) for other in range(size) for number in range(3)]
    found = sorted(comm.recv(source=MPI.ANY_SOURCE) for _ in range(3 * size))
    assert found == [(other, number) for other in range(size) for number in range(3)]
    MPI.Request.waitall(many)
    comm.Barrier()
"""


COMMUNICATORS = """
pairs = comm.Split(rank % 2, -rank)  # each over both hosts, in reverse order
assert (pairs.size, pairs.rank) == (2, 1 - rank // 2), (pairs.size, pairs.rank)
assert pairs.allgather(rank) == [2 + rank % 2, rank % 2]
twin = pairs.Dup()
assert twin.allreduce(rank) == 2 + 2 * (rank % 2)
assert MPI.Comm.Compare(pairs, twin) == MPI.CONGRUENT
assert comm.Split(MPI.UNDEFINED if rank else 0) == MPI.COMM_NULL or rank == 0
ends = comm.Create(comm.Get_group().Incl([3, 0]))
assert (ends == MPI.COMM_NULL) == (rank in (1, 2))
assert ends == MPI.COMM_NULL or ends.allgather(rank) == [3, 0]
grid = comm.Create_cart([2, 2], [True, True])
column = grid.Sub([True, False])
source, target = column.Shift(0, 1)
assert column.sendrecv(rank, target, source=source) == (rank + 2) % 4
found = np.zeros(4)
grid.Neighbor_allgather(np.array([float(rank)]), found)
assert sorted(found) == sorted(2 * [rank ^ 1, rank ^ 2]), found
for one in (twin, column):
    one.Free()
"""


GROUPS = """
for ranks in ([0, 3], [3, 1, 2], [2, 3], [1], [3, 2, 1, 0]):
    for tag in (0, 1):
        if rank in ranks:
            made = comm.Create_group(comm.Get_group().Incl(ranks), tag)
            assert made.allgather(rank) == ranks, made.allgather(rank)
            again = made.Dup()
            assert again.allreduce(1) == len(ranks)
            inner = made.Create_group(made.Get_group().Incl([0]), 7) if made.rank == 0 else MPI.COMM_NULL
            assert inner == MPI.COMM_NULL or inner.size == 1
            made.Free()
    # A wildcard of the program does not receive the messages by which a group is made.
    assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
if rank < 3:
    world = comm.Get_group()
    made = MPI.Intracomm.Create_from_group(world.Incl([2, 0, 1]), "here")
    assert made.allgather(rank) == [2, 0, 1]
if rank == 1:
    try:
        made.Create_group(comm.Get_group(), 3)
        raise AssertionError
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_GROUP, error
comm.Barrier()
"""


PROGRAMS = {
    "collectives": COLLECTIVES,
    "objects": OBJECTS,
    "messages": MESSAGES,
    "communicators": COMMUNICATORS,
    "groups": GROUPS,
}


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_calls_over_hosts(run_on_hosts, code):
    check(run_on_hosts(code))


def test_a_group_is_made_beside_threads(run_on_hosts):
    code = """
    import threading
    room = np.zeros(1)
    other = threading.Thread(target=lambda: comm.Recv(room, left, 77))
    other.start()
    if rank in (1, 2, 3):
        made = comm.Create_group(comm.Get_group().Incl([3, 1, 2]))
        assert made.allgather(rank) == [3, 1, 2]
    comm.Send(np.array([5.0]), right, 77)
    other.join()
    assert room[0] == 5
    """
    check(run_on_hosts(code))


def test_a_rank_that_ends_keeps_no_member_of_its_group_waiting(run_on_hosts):
    code = """
    if rank == 3:
        raise ValueError("this rank ends")
    if rank in (0, 2):
        comm.Create_group(comm.Get_group().Incl([0, 2, 3]))
    """
    for out, err, exit_code in run_on_hosts(code):
        assert exit_code != 0
        assert "this rank ends" in err or "rank 3 has ended: uncaught ValueError" in err, out + err
