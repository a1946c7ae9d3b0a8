"""Datatypes that a program makes: which bytes a message has, and where a receive puts them."""

import pytest
from running import run_code

# Random datatypes of datatypes, against a model: a list of the places of an item's integers, and its bounds.
RANDOM = """
import numpy as np, random
from shmring import MPI
from shmring.mpi4py import layouts

INT, SIZE = MPI.INT32_T, 4
random.seed(5)

def blocks_of(base, displs, counts):
    places, lb, ub = base
    extent = ub - lb
    starts = [displ + i * extent for displ, count in zip(displs, counts) for i in range(count)]
    starts = starts if places or extent else []
    found = [start + place for start in starts for place in places]
    return found, min([s + lb for s in starts], default=0), max([s + ub for s in starts], default=0)

def some(depth):
    if depth == 0:
        return INT, ([0], 0, SIZE)
    datatype, model = some(depth - 1)
    extent, n = model[2] - model[1], random.randint(1, 3)
    length, step = random.randint(1, 3), random.randint(3, 5)
    lengths, steps = [random.randint(0, 3) for _ in range(n)], [i * step for i in range(n)]
    by_item, by_byte = [i * extent for i in steps], [i * extent + 8 * i for i in range(n)]
    match random.randrange(8):
        case 0:
            return datatype.Create_contiguous(n), blocks_of(model, [0], [n])
        case 1:
            return datatype.Create_vector(n, length, step), blocks_of(model, by_item, [length] * n)
        case 2:
            stride = 3 * extent + 12
            displs = [i * stride for i in range(n)]
            return datatype.Create_hvector(n, length, stride), blocks_of(model, displs, [length] * n)
        case 3:
            return datatype.Create_indexed(lengths, steps), blocks_of(model, by_item, lengths)
        case 4:
            return datatype.Create_hindexed_block(1, by_byte), blocks_of(model, by_byte, [1] * n)
        case 5:
            displs = [0, 4 * extent]
            made = MPI.Datatype.Create_struct([2, 1], displs, [datatype] * 2)
            return made, blocks_of(model, displs, [2, 1])
        case 6:
            order = random.choice([MPI.ORDER_C, MPI.ORDER_F])
            part = np.arange(12).reshape((3, 4), order="FC"[order == MPI.ORDER_C])[1:3, 1:4]
            numbers = part.ravel(order="FC"[order == MPI.ORDER_C])
            places, *_ = blocks_of(model, [extent * int(i) for i in numbers], [1] * 6)
            made = datatype.Create_subarray([3, 4], [2, 3], [1, 1], order)
            return made, (places, 0, 12 * extent)
        case 7:
            return datatype.Create_resized(model[1], extent + 8), (model[0], model[1], model[2] + 8)

comm = MPI.COMM_SELF
for _ in range(150):
    datatype, (places, lb, ub) = some(random.randint(1, 3))
    datatype.Commit()
    count = random.randint(0, 3)
    layouts._MOST_INDEXED_NBYTES = random.choice([0, 4096])
    assert (datatype.lb, datatype.ub, datatype.size) == (lb, ub, SIZE * len(places)), datatype.decode()
    every = [(place + item * (ub - lb)) // SIZE for item in range(count) for place in places]
    memory = np.arange(max(every, default=0) + 1, dtype="i4")
    room = np.full_like(memory, -1)
    expected = room.copy()
    expected[every] = every
    packed = np.empty(len(every), "i4")
    status = MPI.Status()
    comm.Sendrecv([memory, count, datatype], 0, 0, packed, 0, 0, status)
    assert packed.tolist() == every, datatype.decode()
    assert not datatype.size or status.Get_count(datatype) == count
    assert status.Get_elements(datatype) == len(every)
    request = comm.Irecv([room, count, datatype], 0)
    comm.Send(packed, 0)
    request.Wait()
    assert room.tolist() == expected.tolist(), datatype.decode()
"""

RANKS = """
import pickle
import numpy as np
from shmring import MPI
from shmring.mpi4py.util import dtlib

comm = MPI.COMM_WORLD
size, below, above = comm.size, (rank - 1) % comm.size, (rank + 1) % comm.size
grid = np.arange(4.0 * size).reshape(4, size)   # a column of each rank
column = MPI.DOUBLE.Create_vector(4, 1, size).Create_resized(0, 8).Commit()
own, room = np.zeros(4), np.zeros((4, size))

comm.Scatter([grid, 1, column] if rank == 0 else None, own)
assert (own == grid[:, rank]).all()
comm.Gather(own, [room, 1, column] if rank == 0 else None)
assert (room == (grid if rank == 0 else 0)).all()
for gather in (
    lambda: comm.Allgather(own, [room, 1, column]),
    lambda: comm.Iallgather(own, [room, 1, column]).Wait(),
    lambda: comm.Allgatherv(own, [room, [1] * size, range(size), column]),
):
    room[:] = 0
    gather()
    assert (room == grid).all(), room

# A persistent call copies the items at each start.
edge = MPI.DOUBLE.Create_vector(4, 1, size).Commit()
requests = [comm.Send_init([grid, 1, edge], above), comm.Recv_init([room, 1, edge], below)]
requests.append(comm.Allgather_init([grid, 1, column], [room2 := np.zeros((4, size)), 1, column]))
for step in range(1, 3):
    grid[:, 0] = rank + 10 * step
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall(requests)
    assert (room[:, 0] == below + 10 * step).all() and (room2 == np.arange(size) + 10 * step).all()
    assert (room[:, 1:] == np.arange(4.0 * size).reshape(4, size)[:, 1:]).all()

# A column that begins in a part of an array, and ends outside of the part.
room[:] = -1
comm.Sendrecv([grid[0, size - 1 :], 1, edge], above, 0, [room[0, size - 1 :], 1, edge], below)
assert (room[:, -1] == grid[:, -1]).all() and (room[:, :-1] == -1).all()
comm.Sendrecv_replace([grid, 1, edge], above, 0, below)
assert (grid[:, 0] == below + 20).all()

# A transposition: rows of one array become columns of the other one.
rows = [MPI.DOUBLE.Create_subarray([size, 4], [1, 4], [i, 0]).Commit() for i in range(size)]
columns = [MPI.DOUBLE.Create_subarray([4, size], [4, 1], [0, i]).Commit() for i in range(size)]
given = np.arange(4.0 * size).reshape(size, 4) + 100 * rank
where = [1] * size, [0] * size
comm.Alltoallw([given, where, rows], [room, where, columns])
assert all((room[:, i] == np.arange(4 * rank, 4 * rank + 4) + 100 * i).all() for i in range(size))
ring = comm.Create_cart([size], periods=[True])
ring.Neighbor_alltoallw([given, ([1] * 2, [0] * 2), rows[:1] * 2], [room, ([1] * 2, [0] * 2), columns[:2]])
assert (room[:, 0] == np.arange(4) + 100 * below).all() and (room[:, 1] == np.arange(4) + 100 * above).all()

# A broadcast changes the items of a struct only; bytes between them stay. Addresses may be absolute.
record = np.dtype([("a", "i1"), ("b", "f8")], align=True)
struct = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.SIGNED_CHAR, MPI.DOUBLE]).Commit()
assert struct.extent == 16 and pickle.loads(pickle.dumps(struct)).decode()[1] == "STRUCT"
assert dtlib.to_numpy_dtype(dtlib.from_numpy_dtype(record)) == dtlib.to_numpy_dtype(struct)
records = np.zeros(3, record)
records["b"] = rank + 1
comm.Bcast([records, struct])
assert (records["b"] == 1).all()
there = MPI.DOUBLE.Create_hindexed([4], [MPI.Get_address(own)]).Commit()
own[:] = rank
comm.Bcast([MPI.BOTTOM, 1, there])
assert (own == 0).all()

four = MPI.DOUBLE.Create_contiguous(4).Commit()

# A call that does not work raises on each rank, before it changes anything.
for wrong, error in (
    (lambda: comm.Allreduce([grid, 1, column], [room, 1, column]), NotImplementedError),
    (lambda: comm.Send([own, 1, edge], MPI.PROC_NULL), None),
    (lambda: comm.Sendrecv_replace(None, MPI.PROC_NULL, 0, MPI.PROC_NULL), None),
    (lambda: comm.Sendrecv([np.zeros(3), 1, edge], above, 0, own, below), ValueError),
    (lambda: comm.Allreduce([own, 1, four], [room, 1, four]), MPI.Exception),
):
    try:
        wrong()
        assert error is None
    except Exception as caught:
        assert error is not None and isinstance(caught, error), caught
comm.Barrier()
"""


PLACES = """
import numpy as np
from shmring import MPI

comm, most = MPI.COMM_SELF, 2**63 - 1
a, p = np.arange(12, dtype="i4"), np.zeros(12, "i4")
pairs = MPI.INT.Create_vector(2, 1, 2).Commit()
below = MPI.INT.Create_hindexed([1, 1], [-(2**62), 4]).Commit()

# No count and no displacement leads out of the memory, however large it is.
for wrong in (
    lambda: comm.Alltoallv([a, ([3], [2**61 - 1]), MPI.INT], [p, ([3], [0]), MPI.INT]),
    lambda: comm.Alltoallw([a, ([3], [most - 11]), [MPI.INT]], [p, ([3], [0]), [MPI.INT]]),
    lambda: comm.Alltoallw([a, ([1], [most - 11]), [pairs]], [p, ([3], [0]), [MPI.INT]]),
    lambda: comm.Alltoallv([a, ([-1], [2]), pairs], [p, ([3], [0]), MPI.INT]),
    lambda: comm.Send([a, (1, 2**60 + 1), pairs.Create_resized(0, 16)], 0),
    lambda: comm.Send([a, 2**62, pairs], 0),
    lambda: comm.Send([a, 1, below], 0),
    lambda: comm.Send([a[6:], 1, below], 0),
    lambda: comm.Send([p[5:5], 3, MPI.INT], 0),
    lambda: comm.Send([MPI.buffer.fromaddress(MPI.Get_address(a), 8), (3, 2), MPI.INT], 0),
    lambda: comm.Send([MPI.buffer.fromaddress(MPI.Get_address(a), 0), 2**62 + 3, MPI.INT], 0),
):
    try:
        wrong()
    except (ValueError, OverflowError):
        continue
    raise AssertionError("not refused")

# An address without a length is memory of any length.
for copy in (lambda memory: memory, MPI.buffer, MPI.buffer.toreadonly):
    address = copy(MPI.buffer.fromaddress(MPI.Get_address(a[1:]), 0))
    comm.Sendrecv([address, 3, MPI.INT], 0, 0, p, 0)
    assert p[:3].tolist() == [1, 2, 3]
    comm.Sendrecv([address, 1, pairs], 0, 0, p, 0)
    assert p[:2].tolist() == [1, 3]

# No items: nothing is sent, and nothing changes.
p[:] = -1
for count in (0, (0, 2)):
    comm.Sendrecv([a, count, pairs], 0, 0, [p, count, pairs], 0)
comm.Allgatherv([a, 0, pairs], [p, ([0], [1]), pairs])
comm.Alltoallv([a, ([0], [2]), pairs], [p, ([0], [0]), pairs])
for displ in (-5, 13, 2**40):  # that of a part without items does not matter
    for kind in (MPI.INT, pairs):
        comm.Alltoallv([a, ([0], [displ]), kind], [p, ([0], [displ]), kind])
        comm.Alltoallw([a, ([0], [displ]), [kind]], [p, ([0], [displ]), [kind]])
        comm.Gatherv([a, 0, kind], [p, ([0], [displ]), kind])
        comm.Scatterv([a, ([0], [displ]), kind], [p, 0, kind])
        comm.Allgatherv([a, 0, kind], [p, ([0], [displ]), kind])
assert (p == -1).all()

# Arguments of a persistent call are those at its making, whatever becomes of lists and datatypes.
pair = MPI.INT.Create_vector(2, 1, 2).Commit()
spec = [a, [1, 0], pair]
requests = []
for first in (0, 6):
    spec[1] = (1, first // 3)
    requests.append(comm.Send_init(spec, 0))
spec.clear()
pair.Free()
MPI.Prequest.Startall(requests)
for expected in ([0, 2], [6, 8]):
    comm.Recv(p, 0)
    assert p[:2].tolist() == expected, p
MPI.Request.Waitall(requests)

# A receive that puts items in their places needs its request until it is complete.
request = comm.Irecv([p, 1, pairs], 0)
try:
    request.Free()
    raise AssertionError("not refused")
except MPI.Exception as error:
    assert error.Get_error_class() == MPI.ERR_REQUEST and "Wait" in str(error)
comm.Send(a[3:5], 0)
while not request.Get_status():
    pass
request.Free()
assert p[0:3:2].tolist() == [3, 4] and not request
"""

# Counts are in a list, as those of vectors of two ranks may be, and have zeros.
COUNTS = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
column = MPI.INT.Create_vector(2, 1, 3).Create_resized(0, 4).Commit()
grid, room = np.arange(6, dtype="i4").reshape(2, 3) + 10 * rank, np.full((2, 3), -1, "i4")
counts = [2, 0]
sends = [grid, 2 - 2 * rank, column]
request = comm.Allgatherv_init(sends, [room, counts, column])
counts[:] = [0, 0]
request.Start()
request.Wait()
assert room.tolist() == [[0, 1, -1], [3, 4, -1]], room
"""


# Messages of which the last item has come only in part. The numbers are those of MPICH 5.0 and Open MPI 5.0,
# except for pairs, whose messages contain their padding here.
ELEMENTS = """
import numpy as np
from shmring import MPI

comm, status = MPI.COMM_SELF, MPI.Status()
mixed = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Commit()
rows = mixed.Create_vector(2, 1, 2).Commit()
pairs = MPI.Datatype.Create_struct([1, 2], [0, 16], [MPI.DOUBLE_INT, MPI.CHAR]).Commit()
copies = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT.Dup(), mixed.Dup()]).Commit()
structs = (mixed, [4, 12]), (rows, [4, 12, 16, 24]), (pairs, [8, 16, 17, 18]), (copies, [4, 8, 16])
others = (MPI.DOUBLE_INT, [8, 16]), (MPI.DOUBLE_INT.Dup(), [8, 16]), (MPI.INT, [4]), (MPI.INT.Dup(), [4])
for datatype, ends in (*structs, *others):
    for nbytes in range(2 * ends[-1] + 1):
        request = comm.Isend([np.zeros(64, "u1"), nbytes, MPI.BYTE], 0)
        comm.Recv([np.zeros(256, "u1"), 3, datatype], 0, status=status)
        request.Wait()
        whole, rest = divmod(nbytes, ends[-1])
        is_end = rest == 0 or rest in ends
        elements = whole * len(ends) + (ends.index(rest) + 1 if rest in ends else 0)
        found = status.Get_elements(datatype)
        assert found == (elements if is_end else MPI.UNDEFINED), (nbytes, found)
        if is_end:
            status.Set_elements(datatype, elements)
            assert status.Get_count(MPI.BYTE) == nbytes, (nbytes, status.count)
"""


def test_elements_of_an_item_that_came_in_part(tmp_path):
    done = run_code(tmp_path, ELEMENTS, nprocs=1)
    assert done.returncode == 0, done.stderr


def test_random_datatypes_have_the_bytes_that_mpi_defines(tmp_path):
    done = run_code(tmp_path, RANDOM, nprocs=1)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("code", "nprocs"), [(PLACES, 1), (COUNTS, 2)])
def test_places_outside_of_memory_and_empty_messages(tmp_path, code, nprocs):
    done = run_code(tmp_path, code, nprocs=nprocs)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("nprocs", [2, 3])
def test_ranks_exchange_parts_of_arrays(tmp_path, nprocs):
    done = run_code(tmp_path, RANKS, nprocs=nprocs)
    assert done.returncode == 0, done.stderr


PROPERTIES = """
from shmring import MPI

# Codes are those of mpi4py. A date of NumPy is an integer of 64 bits.
for codes, code, datatype in (
    (MPI._typedict, "M", MPI.INT64_T),
    (MPI._typedict, "m8", MPI.INT64_T),
    (MPI._typedict_c, "f8", MPI.DOUBLE),
    (MPI._typedict_f, "z", MPI.DOUBLE_COMPLEX),
    (MPI._typedict_f, "r4", MPI.REAL4),
    (MPI._typedict_f, "l", MPI.LOGICAL),
):
    assert codes[code] == datatype, code

# The padding of a pair is not in its true extent. What the program makes has no name.
pairs = MPI.DOUBLE_INT, MPI.SHORT_INT, MPI.INT_INT
assert [(pair.true_extent, pair.extent) for pair in pairs] == [(12, 16), (8, 8), (8, 8)]
assert MPI.INT.Dup().name == MPI.INT.Create_contiguous(2).name == ""
try:
    MPI.Intercomm(MPI.COMM_WORLD)
except TypeError as error:
    print(error)
"""


def test_names_codes_and_extents_are_those_of_mpi4py(tmp_path):
    done = run_code(tmp_path, PROPERTIES, "--no-prefix", nprocs=1)
    assert done.stdout == "the communicator has one group\n", done.stderr
