"""Collectives among the neighbours of a topology: which part goes where, and who sees the messages."""

import pytest
from combinations import first
from running import run_code

HALO = """
import numpy as np
from shmring import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size

# A ring of ranks: what a rank sends down arrives from above, also where both neighbours are one rank.
ring = world.Create_cart([size], periods=[True])
sent, taken = np.array([[rank, -1], [rank, 1]]), np.zeros((2, 2), "i8")
below, above = (rank - 1) % size, (rank + 1) % size
assert ring.inedges == ring.outedges == [below, above]
for exchange in (ring.Neighbor_alltoall, lambda a, b: ring.Ineighbor_alltoall(a, b).Wait()):
    taken[:] = 0
    exchange(sent, taken)
    assert taken.tolist() == [[below, 1], [above, -1]], taken
assert ring.neighbor_alltoall(["down", "up"]) == ["up", "down"]

# A persistent call is started many times.
halo = ring.Neighbor_alltoall_init(sent, taken)
for step in range(3):
    sent[:, 0] = step
    halo.Start()
    halo.Wait()
    assert taken.tolist() == [[step, 1], [step, -1]]

# Ranks may start several of them in any order.
rooms = np.zeros((2, 2, 2), "i8")
halos = [ring.Neighbor_alltoall_init(sent + 100 * i, rooms[i]) for i in range(2)]
for one in halos[::-1] if rank % 2 else halos:
    one.Start()
MPI.Request.Waitall(halos)
assert (rooms == [taken, taken + 100]).all(), rooms

# At the ends of a line there is no neighbour: its part of the message stays as it is.
line = world.Create_cart([size])
parts = np.full(2, -5.0)
line.Neighbor_allgather(np.array([float(rank)]), parts)
assert parts.tolist() == [rank - 1 if rank else -5.0, rank + 1 if rank < size - 1 else -5.0]
found = line.neighbor_allgather(("object", rank))
assert found[0] == (("object", rank - 1) if rank else None), found

# Two edges from one rank to another are told apart by their order; parts of different lengths and places.
graph = world.Create_dist_graph_adjacent([below, below], [above, above])
taken = np.full(5, -1)
graph.Neighbor_alltoallv([np.array([7, 8, 9]), [2, 1]], [taken, ([2, 1], [3, 0])])
assert taken.tolist() == [9, -1, -1, 7, 8], taken
types = [MPI.INT64_T] * 2
taken = np.full(3, -1)
graph.Neighbor_alltoallw([np.array([7, 8, 9]), ([2, 1], [0, 16]), types], [taken, ([2, 1], [8, 0]), types])
assert taken.tolist() == [9, 7, 8], taken

# Receives of the program with wildcards see none of these messages, and large ones do not block each other.
large = np.full((2, 1 << 20), rank)
rooms = np.zeros_like(large)
ring.Barrier()
request = ring.Ineighbor_alltoall(large, rooms)
for _ in range(100):
    assert not ring.Iprobe()
ring.Barrier()
ring.isend("of the program", above).wait()
assert ring.recv() == "of the program"
request.Wait()
assert (rooms[0] == below).all() and (rooms[1] == above).all()

# Two calls that are under way at the same time are held apart.
taken = [np.zeros(2, "i8") for _ in range(2)]
requests = [ring.Ineighbor_allgather(np.array([rank + 10 * i]), taken[i]) for i in range(2)]
MPI.Request.Waitall(requests)
assert [one.tolist() for one in taken] == [[below, above], [below + 10, above + 10]]

# A rank without edges takes part; a wrong number of objects is refused.
lone = world.Create_dist_graph_adjacent([], [])
lone.Neighbor_allgather(np.zeros(1), np.zeros(0))
lone.Neighbor_alltoallv([np.zeros(0), []], [np.zeros(0), []])
assert lone.neighbor_allgather(1) == []
try:
    ring.neighbor_alltoall([1])
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("nprocs", first(2, [3, 1, 2]))
def test_messages_among_neighbours(tmp_path, nprocs):
    done = run_code(tmp_path, HALO, "--no-prefix", nprocs=nprocs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 objects are given for 2 neighbours"] * nprocs


ARRAYS = """
import numpy as np
from shmring import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
below, above = (rank - 1) % size, (rank + 1) % size
array = np.array
none = np.zeros(0, int)

# Whatever a program gives as arrays comes back as integers of Python.
ends = array([below, above])
adjacent = world.Create_dist_graph_adjacent(ends, ends, array([3, 4]), array([5, 6]))
taken = np.zeros(2, int)
adjacent.Neighbor_alltoall(array([rank, rank]), taken)
assert sorted(taken) == sorted([below, above])
spread = world.Create_dist_graph(array([rank]), array([1]), array([above]), array([7]))
graph = world.Create_graph(np.arange(1, size + 1), np.roll(np.arange(size), -1))
grid = world.Create_cart(array([size, 1]), array([1, 0]))
print(
    adjacent.Get_dist_neighbors(),
    world.Create_dist_graph_adjacent(none, none).Get_dist_neighbors(),
    spread.Get_dist_neighbors(),
    graph.Get_topo(),
    (grid.Get_coords(np.int64(rank)), grid.Get_cart_rank(array([0, 0]))),
    grid.Shift(np.int64(0), np.int32(1)),
    MPI.Compute_dims(np.int64(12), array([0, 3])) + MPI.Compute_dims(12, np.int64(2)),
    sep="\\n",
)
"""


def test_integers_may_be_arrays(tmp_path):
    done = run_code(tmp_path, ARRAYS, "--no-prefix", nprocs=1)
    expected = [
        "([0, 0], [0, 0], ([3, 4], [5, 6]))",
        "([], [], None)",
        "([0], [0], ([7], [7]))",
        "([1], [0])",
        "([0, 0], 0)",
        "(0, 0)",
        "[4, 3, 4, 3]",
    ]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


BOTTOM = """
import numpy as np
from shmring import MPI

x, y = np.arange(4), np.zeros(4, "i8")
types = [MPI.INT64_T]
def whole(array, address=None):
    return [MPI.BOTTOM, ([4], [MPI.Get_address(array) if address is None else address]), types]

MPI.COMM_SELF.Alltoallw(whole(x), whole(y))
print(*y)
try:
    MPI.COMM_SELF.Alltoallw(whole(x, 8), whole(y))
except TypeError as error:
    print("TypeError")
"""


def test_bottom_stands_for_absolute_addresses(tmp_path):
    done = run_code(tmp_path, BOTTOM, "--no-prefix", nprocs=1)
    assert done.stdout.splitlines() == ["0 1 2 3", "TypeError"], done.stderr


REFUSED = """
from shmring import MPI

ring = MPI.COMM_WORLD.Create_cart([4], periods=[True])
rank, cannot_be_pickled = ring.rank, lambda: None

def outcome(call, wrong, right):
    try:
        return call(wrong if rank == 1 else right)
    except MPI.Exception as error:
        assert str(error) == "other error: rank 1 has called this with a wrong argument"
        return error.Get_error_class()
    except Exception as error:
        return type(error)

# A wrong argument is an error on its rank and the neighbours. Others, and later calls, have all objects.
for call, *objects in (
    (ring.neighbor_allgather, cannot_be_pickled, rank),
    (ring.neighbor_alltoall, [1, cannot_be_pickled], [rank, rank]),
    (ring.neighbor_alltoall, [1], [rank, rank]),
):
    found = outcome(call, *objects)
    if rank == 1:
        assert issubclass(found, Exception), found
    else:
        assert found == ([2, 0] if rank == 3 else MPI.ERR_OTHER), found
    assert ring.neighbor_allgather(rank) == ring.inedges
print("well")
"""


def test_a_wrong_object_keeps_no_neighbour_waiting(tmp_path):
    done = run_code(tmp_path, REFUSED, "--no-prefix", nprocs=4)
    assert done.stdout.splitlines() == ["well"] * 4, done.stderr
