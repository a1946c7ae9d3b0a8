"""Windows: one-sided operations, epochs, locks, atomicity, errors, and what becomes of the memory."""

import os
import textwrap

import pytest
from combinations import first
from injections import places_when_dropped
from running import run_code

from shmring.mpi4py import alloc_mem, private_memory

HEAD = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size

def code_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except MPI.Exception as error:
        found = error.Get_error_class()
        return next(name for name in dir(MPI) if name.startswith("ERR_") and getattr(MPI, name) == found)
    except Exception as error:
        return type(error).__name__
    return "no error"

def items(win, dtype, of=None):
    memory = win.tomemory() if of is None else win.Shared_query(of)[0]
    return np.frombuffer(memory, dtype)
"""


def run(tmp_path, code, nprocs, **environment):
    """Run the code in every rank; it prints "well" at the end of each."""
    done = run_code(
        tmp_path,
        HEAD + textwrap.dedent(code) + "\nprint('well')\n",
        "--no-prefix",
        nprocs=nprocs,
        **environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["well"] * nprocs, done.stdout + done.stderr


OPERATIONS = """
def check(found, expected):
    assert found.dtype == expected.dtype and (found == expected).all(), (found, expected)

for letter in "bBhHiIlLqQfdgFDG":
    dtype = np.dtype(letter)
    x, y, z = np.arange(1, 4).astype(dtype) + dtype.type(rank), np.zeros(3, dtype), np.zeros(3, dtype)
    win = MPI.Win.Allocate(10 * dtype.itemsize, dtype.itemsize, comm=comm)
    mine = items(win, dtype)

    # Displacements count the units of the target. A message may be shorter than its room.
    win.Fence()
    win.Put(x, right, 2)
    win.Put([x, 2], right, (6, 3))
    win.Fence()
    given = np.arange(1, 4).astype(dtype) + dtype.type(left)
    check(mine, np.concatenate([np.zeros(2, dtype), given, [dtype.type(0)], given[:2], np.zeros(2, dtype)]))
    win.Get([y, 3], right, [2, 2])
    assert (y[:2] == x[:2]).all() and y[2] == 0, y
    win.Get(y, right, 2)
    check(y, x)
    win.Fence()

    # All ranks add to rank 0; each result is a state in between.
    win.Accumulate(x, 0, 2)
    win.Get_accumulate(x, z, 0, (2, 3, MPI.Datatype.fromcode(letter)), MPI.SUM)
    win.Fence()
    if rank == 0:
        total = sum(2 * (np.arange(1, 4) + r) for r in range(size))
        check(mine[2:5], (np.arange(1, 4) + size - 1 + total).astype(dtype))
    assert (z.real >= x.real).all(), z
    win.Fence()

    mine[:] = 3
    win.Fence()
    ops = [(MPI.PROD, 15), (MPI.REPLACE, 5), (MPI.NO_OP, 3)]
    if letter not in "FDG":
        ops += [(MPI.MAX, 5), (MPI.MIN, 3)]
    if letter not in "fdgFDG":
        ops += [(MPI.BAND, 1), (MPI.BOR, 7), (MPI.BXOR, 6), (MPI.LAND, 1), (MPI.LOR, 1), (MPI.LXOR, 0)]
    for op, expected in ops:
        win.Lock(right)
        win.Put(np.full(1, 3, dtype), right, 1)
        win.Fetch_and_op(np.full(1, 5, dtype), [y, 1], right, 1, op)
        win.Get([z, 1], right, 1)
        win.Unlock(right)
        assert y[0] == 3 and z[0] == expected, (letter, op.handle, y, z)
    win.Fence()

    if letter not in "fdgFDG":
        win.Fence()
        win.Compare_and_swap(np.full(1, 9, dtype), np.full(1, 4, dtype), [y, 1], right, 9)
        assert y[0] == 3 and mine[9] == 3
        win.Fence()
        win.Compare_and_swap(np.full(1, 9, dtype), np.full(1, 3, dtype), [y, 1], right, 9)
        win.Fence()
        assert y[0] == 3 and mine[9] == 9
    win.Free()
    assert not win and win == MPI.WIN_NULL

# Pairs of a value and a place, and one byte-sized message from a typed one.
pair = MPI.DOUBLE_INT
win = MPI.Win.Allocate(pair.extent, comm=comm)
best = np.array([(5.0, 7)], pair._ref.dtype)
win.Fence()
win.Put([best, pair], right)
win.Fence()
win.Accumulate([np.array([(9.0, rank)], best.dtype), pair], 0, op=MPI.MAXLOC)
win.Fence()
if rank == 0:
    assert tuple(items(win, best.dtype)[0]) == (9.0, 0)
win.Fence()
win.Put(np.float32(1.5).reshape(1), right)
win.Fence()
assert items(win, "f4")[0] == 1.5
win.Fence()
for request in (win.Rput(b"abcd", right), win.Raccumulate([b"\\0\\0", MPI.BYTE], right, op=MPI.BOR)):
    assert request.Wait() and request == MPI.REQUEST_NULL
win.Fence()
taken, old = bytearray(4), bytearray(4)
win.Rget(taken, right).Wait()
MPI.Request.Waitall([win.Rget_accumulate(b"....", old, right, op=MPI.NO_OP)])
assert taken == old == b"abcd", (taken, old)
win.Fence()
win.Free()
"""


@pytest.mark.parametrize("nprocs", first(2, [3, 1, 2]))
def test_operations_on_every_number(tmp_path, nprocs):
    run(tmp_path, OPERATIONS, nprocs)


GAPS = """
numbers = np.arange(20.0).reshape(4, 5)
column = MPI.DOUBLE.Create_vector(4, 1, 5).Commit()
upward = MPI.DOUBLE.Create_vector(4, 1, -5).Commit()
four = MPI.DOUBLE.Create_contiguous(4).Commit()
part = MPI.DOUBLE.Create_subarray([4, 5], [2, 3], [1, 2]).Commit()
mixed = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Commit()
win = MPI.Win.Allocate(8 * 20, 8, comm=comm)
mine = items(win, "d").reshape(4, 5)
mine[:] = numbers + 100 * rank
there = numbers + 100 * right

def room():
    return np.full((4, 5), -1.0)

def check(found, **expected):
    whole = room()
    whole[expected.get("rows", slice(None)), expected["columns"]] = expected["values"]
    assert (found == whole).all(), found

# Items with gaps may be at either side, or at both; without a target, they have the gaps of the origin there.
win.Fence()
x, y = np.zeros(4), np.zeros(4)
win.Get(x, right, [1, 1, column])
win.Get(y, right, [16, 1, upward])
a, b, c = room(), room(), room()
win.Get([a, 1, column], right, [5, 1, four])
win.Get([b, 1, column], right)
win.Get([c, 1, part], right, [0, 1, part])
win.Fence()
assert (x == there[:, 1]).all() and (y == there[::-1, 1]).all(), (x, y)
check(a, columns=0, values=[*there[1, :4]])
check(b, columns=0, values=there[:, 0])
check(c, rows=slice(1, 3), columns=slice(2, 5), values=there[1:3, 2:])
comm.Barrier()

# Gaps keep their values, and so does room that a shorter message leaves.
mine[:] = -1
win.Fence()
win.Put(np.arange(3.0), right, [1, 1, column])
win.Put([numbers, 1, part], right, [0, 1, part])
win.Fence()
expected = room()
expected[:3, 1], expected[1:3, 2:] = np.arange(3.0), numbers[1:3, 2:]
assert (mine == expected).all(), mine

# One item and a part of the next one.
win.Fence()
win.Put(np.full(3, 8.0), right, [0, 2, MPI.DOUBLE.Create_vector(2, 1, 5).Create_resized(0, 80)])
win.Fence()
expected[:3, 0] = 8
assert (mine == expected).all(), mine

# Structs are replaced as a whole.
comm.Barrier()
record = MPI.Datatype.Create_struct([2, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Commit()
old = np.zeros(2)
win.Lock(right)
win.Get_accumulate([np.full(2, 5.0), 1, record], [old, 1, record], right, [0, 1, record], MPI.REPLACE)
win.Unlock(right)
assert old.tolist() == expected[0, :2].tolist()
win.Fence()
assert mine[0, :2].tolist() == [5, 5], mine

# Accumulates combine the numbers that the datatypes are made of.
mine[:] = 1
win.Fence()
win.Accumulate(np.full(4, 2.0), 0, [3, 1, column])
win.Fence()
assert mine[:, 3].tolist() == [1 + 2 * size if rank == 0 else 1] * 4, mine
assert (mine[:, :3] == 1).all() and (mine[:, 4] == 1).all(), mine
win.Fence()
win.Lock(right)
old, now = room(), np.zeros(4)
win.Get_accumulate([np.full((4, 5), 3.0), 1, column], [old, 1, column], right, [4, 1, column], MPI.PROD)
win.Get_accumulate([now, 0], now, right, [4, 4, MPI.DOUBLE.Create_resized(0, 40)], MPI.NO_OP)
win.Accumulate([np.full(4, 7.0), 1, four], right, [0, 4, MPI.DOUBLE], MPI.MAX)
win.Unlock(right)
check(old, columns=0, values=1)
assert (now == 3).all(), now
win.Fence()
assert mine[0, :3].tolist() == [7] * 3 and mine[1:, 0].tolist() == [1] * 3, mine

# Items that are in the target several times are combined once for each time.
mine[:] = 10
win.Fence()
pairs = MPI.DOUBLE.Create_hvector(2, 2, 8)
near = MPI.DOUBLE.Create_vector(2, 1, 2).Create_resized(0, 8)
old = np.zeros(4)
win.Get_accumulate(np.array([1.0, 2, 4, 8]), old, right, [0, 1, pairs])
win.Accumulate(np.full(6, 2.0), right, [5, 3, near], MPI.PROD)
win.Accumulate(np.full(4, 2.0), right, [12, 2, near], MPI.PROD)
win.Fence()
assert old.tolist() == [10] * 4, old
assert mine.reshape(-1)[:10].tolist() == [11, 16, 18, 10, 10, 20, 20, 40, 20, 20], mine
assert mine.reshape(-1)[10:16].tolist() == [10, 10, 20, 20, 20, 20], mine
assert code_of(win.Accumulate, np.zeros(1), right, 0, MPI.NO_OP) == "ERR_OP"

# A Get of less than there is room for writes to no other memory: it may have changed since the call began.
from shmring.mpi4py.messages import simple_with_gaps

a = room()
data = simple_with_gaps([a, 3, near], True)
a[:] = 5
data.bytes[:24] = np.arange(3.0).view("u1")
data.restore(24)
assert a.reshape(-1)[:6].tolist() == [0, 2, 1, 5, 5, 5], a

assert code_of(win.Put, x, right, [18, 1, column]) == "ERR_RMA_RANGE"
assert code_of(win.Get, x, right, [10, 1, upward]) == "ERR_RMA_RANGE"
assert code_of(win.Get, np.zeros(3), right, [0, 1, column]) == "ERR_TRUNCATE"
assert code_of(win.Accumulate, np.zeros(3), right, [0, 1, column]) == "ERR_COUNT"
assert code_of(win.Accumulate, [np.zeros(2), 1, mixed], right) == "ERR_TYPE"
win.Fence()
win.Free()
"""


@pytest.mark.parametrize("nprocs", first(1, [2, 3, 1]))
def test_items_with_gaps(tmp_path, nprocs):
    run(tmp_path, GAPS, nprocs)


EDGES = """
# Each rank has its own size and unit; without the hint, memory is contiguous in rank order.
win = MPI.Win.Allocate_shared(8 * rank, rank + 1, comm=comm)
assert win.flavor == MPI.WIN_FLAVOR_SHARED and win.model == MPI.WIN_UNIFIED
addresses = []
for other in range(size):
    memory, unit = win.Shared_query(other)
    assert len(memory) == 8 * other and unit == other + 1
    addresses.append(memory.address if other else None)
assert all(b - a == 8 * r for r, (a, b) in enumerate(zip(addresses[1:], addresses[2:]), 1))
first = win.Shared_query(MPI.PROC_NULL)
assert len(first[0]) == (8 if size > 1 else 0) and first[1] == (2 if size > 1 else 1)
assert win.attrs[1:] == (8 * rank, rank + 1) and win.Get_attr(MPI.WIN_SIZE) == 8 * rank
assert win.Get_attr(MPI.WIN_DISP_UNIT) == rank + 1
assert rank == 0 or win.Get_attr(MPI.WIN_BASE) == win.tomemory().address

# A window exports the memory of this rank.
assert memoryview(win).nbytes == 8 * rank and not memoryview(win).readonly
np.frombuffer(win, "u1")[:] = rank
assert win.tomemory().tobytes() == bytes([rank]) * 8 * rank and code_of(memoryview, MPI.WIN_NULL) == "ERR_WIN"
np.frombuffer(win, "u1")[:] = 0
comm.Barrier()

# Memory is set to zero, and plain stores are seen after a barrier.
if size > 1:
    assert not items(win, "u1", 1).any()
    comm.Barrier()
    if rank == 0:
        items(win, "u1", 1)[:] = 7
    comm.Barrier()
    assert (items(win, "u1", 1) == 7).all()

# Nothing is moved to PROC_NULL, and no items to anywhere.
win.Fence()
byte = bytearray(1)
win.Put(b"abc", MPI.PROC_NULL, 1000)
win.Get(bytearray(b"abc"), MPI.PROC_NULL)
win.Accumulate([None, MPI.INT], MPI.PROC_NULL)
win.Get_accumulate(b"abc", bytearray(3), MPI.PROC_NULL)
win.Fetch_and_op(None, None, MPI.PROC_NULL)
win.Compare_and_swap(None, None, None, MPI.PROC_NULL)
win.Put([None, MPI.INT], 0)
win.Put(None, MPI.PROC_NULL)
win.Get(bytearray(0), 0, 0)
win.Accumulate(np.zeros(0), size - 1)
win.Fence()
for call in (win.Lock, win.Unlock, win.Flush, win.Flush_local):
    call(MPI.PROC_NULL)
win.Free()

# A part begins at a cache line, if it need not follow the one before.
info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
win = MPI.Win.Allocate_shared(3, info=info, comm=comm)
assert all(win.Shared_query(other)[0].address % 64 == 0 for other in range(size))
assert win.info["alloc_shared_noncontig"] == "true"
win.Free()

# Items need not be aligned.
win = MPI.Win.Allocate_shared(13, comm=comm)
win.Fence()
win.Put(np.array([1.5]), right, 5)
win.Accumulate(np.array([2.5]), right, 5)
win.Fence()
assert np.frombuffer(win.tomemory(), "d", 1, 5) == 4
win.Free()

# Nobody has memory.
win = MPI.Win.Allocate(0, comm=comm)
win.Fence()
assert len(win.tomemory()) == 0 and win.Shared_query(MPI.PROC_NULL)[1] == 1
assert code_of(win.Put, b"a", 0) == "ERR_RMA_RANGE"
win.Fence()
win.Free()

# The window outlives its communicator; views of its memory outlive the window.
dup = comm.Dup()
win = MPI.Win.Allocate(8, comm=dup)
dup.Free()
win.Fence()
win.Put(np.array([rank]), right)
win.Fence()
mine, copy = items(win, "i8"), MPI.Win(win)
win.Free()
assert mine[0] == left and win == MPI.WIN_NULL
assert code_of(copy.Put, b"a", 0) == "ERR_WIN"
comm.Barrier()

# The program's own messages do not meet those of the window; the whole memory of a rank is an origin, too.
win = MPI.Win.Allocate(8, comm=comm)
request = comm.Irecv(bytearray(8), MPI.ANY_SOURCE)
win.Post(win.group.Incl([left]))
win.Start(win.group.Incl([right]))
win.Put(win.tomemory(), right)
win.Complete()
win.Wait()
assert not request.Test()
comm.Barrier()
comm.Send(b"a", right)
request.Wait()
win.Free()
"""


@pytest.mark.parametrize("nprocs", first(2, [3, 1, 2]))
def test_edges(tmp_path, nprocs):
    run(tmp_path, EDGES, nprocs)


CREATED = """
# Memory of Alloc_mem, whole or a part of it, of another size on each rank; the last rank may have none.
def descriptors():
    return len(os.listdir("/proc/self/fd"))

before = descriptors()
memory = MPI.Alloc_mem(20000 + 8 * rank)
assert not any(memory)
whole = np.frombuffer(memory, "i8")
mine = whole[1000:1002] if rank % 2 == 0 else whole
win = MPI.Win.Create(mine if rank < 2 else None, 8, comm=comm)
assert win.flavor == MPI.WIN_FLAVOR_CREATE
assert win.attrs[1:] == ([16, 20008][rank] if rank < 2 else 0, 8)
assert rank > 1 or win.attrs[0] == mine.ctypes.data
win.Fence()
for other in range(min(size, 2)):
    win.Accumulate(np.array([1, rank]), other, 0)
win.Fence()
if rank < 2:
    assert list(mine[:2]) == [size, sum(range(size))] and not whole[998:1000].any(), mine[:2]
found = np.zeros(1, "i8")
for other in range(min(size, 2)):
    win.Get(found, other, 1)
    assert found[0] == sum(range(size))
    assert np.frombuffer(win.Shared_query(other)[0], "i8")[0] == size
assert code_of(win.Put, found, 0, 2) == "ERR_RMA_RANGE"
assert size < 3 or code_of(win.Put, found, 2) == "ERR_RMA_RANGE"
win.Fence()
win.Free()
assert rank > 1 or mine[0] == size
del mine, whole
MPI.Free_mem(memory)
comm.Barrier()
assert descriptors() <= before + 2, (descriptors(), before)

# Memory may be freed before the window: it stays until the window is freed.
memory = MPI.Alloc_mem(8)
win = MPI.Win.Create(memory, comm=comm)
MPI.Free_mem(memory)
win.Fence()
win.Put(np.array([rank]), right)
win.Fence()
assert items(win, "i8")[0] == left
win.Free()

# Memory for which there was no file is private.
create, os.memfd_create = os.memfd_create, lambda name: os.open("/does/not/exist", 0)
memory = MPI.Alloc_mem(8)
os.memfd_create = create
win = MPI.Win.Create(memory if rank == 0 else None, comm=comm)
win.Fence()
win.Accumulate(np.ones(1, "i8"), 0)
win.Fence()
assert rank or np.frombuffer(memory, "i8")[0] == size
win.Free()
assert code_of(MPI.Win.Create, bytes(8)) == "BufferError"
assert code_of(MPI.Win.Create, 8) == "TypeError"

# A rank in another PID namespace finds another file, or none.
from shmring.mpi4py import alloc_mem
attach = alloc_mem.attach
alloc_mem.attach = lambda place: attach(place._replace(inode=place.inode + 1))
memory = MPI.Alloc_mem(8)
assert code_of(MPI.Win.Create, memory, comm=comm) == ("ERR_BASE" if size > 1 else "no error")
alloc_mem.attach = attach
comm.Barrier()
"""


@pytest.mark.parametrize("nprocs", first(2, [3, 1, 2]))
def test_windows_over_memory_of_alloc_mem(tmp_path, nprocs):
    run(tmp_path, CREATED, nprocs)


PRIVATE = """
import gc
from shmring.mpi4py import private_memory

def over_private_memory(nbytes, unit=1, info=MPI.INFO_NULL, comm=MPI.COMM_SELF):
    return MPI.Win.Create(bytearray(nbytes), unit, info, comm)
"""


@pytest.mark.parametrize(("code", "nprocs"), first(2, [("ATOMIC", 3), ("GAPS", 2), ("OPERATIONS", 2)]))
def test_private_memory_is_accessed_as_memory_of_windows_is(tmp_path, code, nprocs):
    code = textwrap.dedent(globals()[code])
    run(tmp_path, PRIVATE + code.replace("MPI.Win.Allocate(", "over_private_memory("), nprocs)


@pytest.mark.parametrize("kind", ["memory of Alloc_mem", "private memory"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor
def test_an_exception_while_memory_goes_loses_no_descriptor(kind):
    before, n = os.listdir("/proc/self/fd"), 0
    while True:
        n += 1
        made = [private_memory._File(os.getpid()) if kind == "private memory" else alloc_mem._new_block(8)]
        places = places_when_dropped(made, n)
        assert os.listdir("/proc/self/fd") == before, places
        if not places:
            break


ANY_MEMORY = """
def descriptors():
    return len(os.listdir("/proc/self/fd"))

# Rank 0 has part of an array, rank 1 memory of Alloc_mem, rank 2 none.
whole = np.zeros((4, 1000))
given = [whole[1:3], MPI.Alloc_mem(16000), None][rank]
win = MPI.Win.Create(given, 8, comm=comm)
assert win.flavor == MPI.WIN_FLAVOR_CREATE and win.attrs[1:] == (16000 if rank < 2 else 0, 8)
assert rank or win.attrs[0] == whole[1:].ctypes.data == win.tomemory().address
memory, unit = win.Shared_query(0)
assert (len(memory), unit) == ((0, 0) if rank else (16000, 8))
assert all(len(win.Shared_query(other)[0]) == 16000 for other in (1, MPI.PROC_NULL))

# Bytes beside the array, and gaps of any size, keep their values.
column = MPI.DOUBLE.Create_vector(2, 1, 1900).Commit()
whole[:] = 1
for target in (0, 1):
    win.Fence()
    if rank == 2:
        win.Put(np.full(2000, 3.0), target)
        win.Put(np.array([4.0, 5.0]), target, (2, 1, column))
    win.Fence()
    win.Accumulate(np.ones(2), target, (99, 1, column))
    win.Fence()
    found, pair = np.zeros(2000), np.zeros(2)
    win.Get(found, target)
    win.Get(pair, target, (2, 1, column))
    expected = np.full(2000, 3.0)
    expected[[2, 1902]], expected[[99, 1999]] = [4, 5], 3 + size
    assert (found == expected).all() and pair.tolist() == [4, 5], (found, pair)
    assert rank or target or ((whole[1:3].ravel() == expected).all() and (whole[[0, 3]] == 1).all())
    assert code_of(win.Put, b"a", target, 2000) == "ERR_RMA_RANGE"
assert code_of(win.Put, b"a", 2) == "ERR_RMA_RANGE"
win.Fence()
win.Free()

# A window keeps its memory. Many windows of the same ranks need no more descriptors than one.
before = descriptors()
wins = [MPI.Win.Create(np.full(1 << 20, 7, "u1"), comm=comm) for _ in range(5)]
between = descriptors()
gc.collect()
kept = bytearray(8)
wins.append(MPI.Win.Create(kept, comm=comm))
assert code_of(kept.append, 1) == "BufferError"
for number, win in enumerate(wins):
    win.Lock(right)
    win.Put(b"ab", right, 6)
    win.Unlock(right)
    comm.Barrier()
    assert win.tomemory().tobytes() == ([0, 7][number < 5] * np.ones(6, "u1")).tobytes() + b"ab" + b"\7" * (
        (1 << 20) - 8 if number < 5 else 0)
    win.Free()
kept.append(1)
del wins, win
comm.Barrier()
assert descriptors() < between, (before, between, descriptors())

# If the kernel refuses the memory of a rank, or shows another process, all ranks say so.
def refuse(*_):
    raise PermissionError(13, "Permission denied")

def of_another_process(memory, mark):
    return place_of(memory, mark)._replace(mark=b"0" * 16)

attach, place_of = private_memory.attach, private_memory.place_of
for cause, culprit in (("ptrace_scope", 0), ("another one in this PID namespace", 2)):
    if cause == "ptrace_scope" and rank == 1:
        private_memory.attach = refuse
    elif cause != "ptrace_scope" and rank == 2:
        private_memory.place_of = of_another_process
    text = ""
    try:
        MPI.Win.Create(bytearray(8), comm=comm)
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_BASE, error
        text = str(error)
    assert cause in text and f"the memory of rank {culprit}" in text, text
    assert comm.allgather(text) == [text] * size
    private_memory.attach, private_memory.place_of = attach, place_of
MPI.Win.Create(bytearray(8), comm=comm).Free()
"""


def test_windows_over_memory_of_any_kind(tmp_path):
    run(tmp_path, PRIVATE + ANY_MEMORY, 3)


GONE = """
win = MPI.Win.Create(np.zeros(8), comm=comm)
win.Lock_all()
comm.Barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while (name := code_of(win.Put, b"a", 1)) == "no error":
    time.sleep(0.001)
os.write(1, name.encode())
"""


def test_private_memory_of_a_rank_that_has_died(tmp_path):
    done = run_code(tmp_path, HEAD + GONE, "--no-prefix", "--keep-going", nprocs=2)
    assert done.stdout.split() == ["ERR_PROC_FAILED"], done.stdout + done.stderr


WRONG = """
win = MPI.Win.Allocate(16, 8, comm=comm)
x, i, b = np.zeros(2), np.zeros(1, "i8"), bytearray(8)
null = MPI.WIN_NULL
custom = MPI.Op.Create(lambda a, b, t: None)
expected = {
    "ERR_RMA_SYNC": [
        (win.Put, x, 0), (win.Get, x, 0), (win.Accumulate, x, 0), (win.Fetch_and_op, i, i.copy(), 0),
        (win.Unlock, 0), (win.Unlock_all,), (win.Complete,), (win.Wait,), (win.Test,),
        (win.Flush, 0), (win.Flush_all,), (win.Flush_local, 0), (win.Flush_local_all,),
    ],
    "ERR_RANK": [(win.Lock, size), (win.Lock, -5), (win.Shared_query, size), (win.Put, x, size),
                 (win.Unlock, size)],
    "ERR_LOCKTYPE": [(win.Lock, 0, 12345)],
    "ERR_ASSERT": [(win.Lock, 0, MPI.LOCK_SHARED, MPI.MODE_NOPUT), (win.Lock_all, MPI.MODE_NOSTORE)],
    "ERR_WIN": [(null.Put, x, 0), (null.Free,), (null.Fence,), (null.Get_attr, MPI.WIN_SIZE), (null.Lock, 0),
                (null.Set_errhandler, MPI.ERRORS_RETURN), (null.Get_group,)],
    "NotImplementedError": [
        (MPI.Win.Create_dynamic,), (win.Attach, b), (win.Detach, b)
    ],
    "TypeError": [(MPI.Win.Allocate, "8"), (MPI.Win.Allocate, 8, 1.5)],
}
for name, calls in expected.items():
    for call, *arguments in calls:
        assert code_of(call, *arguments) == name, (name, call, arguments, code_of(call, *arguments))

win.Fence()
in_epoch = {
    "ERR_RMA_RANGE": [(win.Put, x, 0, 1), (win.Get, x, 0, (0, 3)), (win.Accumulate, x, 0, 2),
                      (win.Put, b"a", 0, 2),
                      (win.Fetch_and_op, i, i.copy(), 0, 2), (win.Compare_and_swap, i, i, i.copy(), 0, 2)],
    "ERR_DISP": [(win.Put, x, 0, -1)],
    "ERR_COUNT": [(win.Put, x, 0, (0, -1)), (win.Accumulate, x, 0, (0, 1)),
                  (win.Get_accumulate, x, np.zeros(1), 0)],
    "ERR_TRUNCATE": [(win.Put, x, 0, (0, 1)), (win.Get, np.zeros(1), 0, (0, 2))],
    "ERR_TYPE": [(win.Accumulate, x, 0, (0, 2, MPI.INT64_T)), (win.Get_accumulate, x, np.zeros(2, "i8"), 0),
                 (win.Compare_and_swap, x[:1], x[:1], np.zeros(1), 0)],
    "ERR_OP": [(win.Accumulate, x, 0, None, MPI.OP_NULL), (win.Accumulate, x, 0, 0, custom),
               (win.Accumulate, x, 0, 0, MPI.BAND), (win.Accumulate, x, 0, 0, MPI.MAXLOC),
               (win.Accumulate, [x, MPI.BYTE], 0, (0, 16, MPI.BYTE), MPI.MINLOC)],
    "ValueError": [(win.Put, x, 0, (0, 1, MPI.DOUBLE, 0)), (win.Put, x, 0, "0"), (win.Put, [x, 3], 0),
                   (win.Fetch_and_op, x, i.copy(), 0), (win.Fetch_and_op, i, np.zeros(1), 0),
                   (win.Compare_and_swap, i, i, bytearray(1), 0), (win.Put, np.zeros(4)[::2], 0)],
    "TypeError": [(win.Put, x, 0, (0.0, 1)), (win.Get, x, 0, (0, 1.0))],
    "BufferError": [(win.Get, b"12345678", 0), (win.Fetch_and_op, i, bytes(8), 0)],
    "KeyError": [(win.Put, x, 0, (0, 1, "@"))],
}
for name, calls in in_epoch.items():
    for call, *arguments in calls:
        assert code_of(call, *arguments) == name, (name, call, arguments, code_of(call, *arguments))
assert not items(win, "d").any()
win.Fence(MPI.MODE_NOSUCCEED)
assert code_of(win.Put, x, 0) == "ERR_RMA_SYNC"

# Epochs that are open.
win.Lock(rank, MPI.LOCK_SHARED)
assert code_of(win.Lock, rank) == code_of(win.Lock_all) == code_of(win.Start, win.group) == "ERR_RMA_SYNC"
assert size == 1 or code_of(win.Put, x, right) == "ERR_RMA_SYNC"
win.Put(x, rank)
win.Unlock(rank)
win.Lock_all()
assert code_of(win.Lock, rank) == code_of(win.Lock_all) == code_of(win.Unlock, rank) == "ERR_RMA_SYNC"
win.Put(x, right)
win.Unlock_all()
win.Post(MPI.GROUP_EMPTY)
assert code_of(win.Post, MPI.GROUP_EMPTY) == "ERR_RMA_SYNC"
assert win.Test() is True
win.Start(MPI.GROUP_EMPTY)
assert code_of(win.Lock, rank) == "ERR_RMA_SYNC"
win.Complete()
assert code_of(win.Start, MPI.GROUP_NULL) == "ERR_GROUP"

# The handler of the window hears of its errors; attributes end with the window.
heard = []
handler = MPI.Win.Create_errhandler(lambda handle, code: heard.append((handle == win, code)))
win.Set_errhandler(handler)
assert code_of(win.Unlock, 0) == "ERR_RMA_SYNC" and heard == [(True, MPI.ERR_RMA_SYNC)]
handler.Free()
keyval = MPI.Win.Create_keyval(delete_fn=lambda handle, key, value: heard.append(value))
win.Set_attr(keyval, "kept")
assert win.Get_attr(keyval) == "kept"
win.Free()
assert heard[-1] == "kept"
MPI.Win.Free_keyval(keyval)
"""


@pytest.mark.parametrize("nprocs", [1, 2])
def test_wrong_arguments(tmp_path, nprocs):
    run(tmp_path, WRONG, nprocs)


ONE_SIDED_ERRORS = """
if {case} == "size":
    call = lambda: MPI.Win.Allocate(8 if rank else -1, comm=comm)
elif {case} == "memory":
    call = lambda: MPI.Win.Create(MPI.Alloc_mem(8) if rank else bytes(8), comm=comm)
elif {case} == "unit":
    call = lambda: MPI.Win.Allocate_shared(8, rank, comm=comm)
else:
    win = MPI.Win.Allocate(8, comm=comm)
    if rank == 0:
        win.Lock(0)
    call = win.Fence if {case} == "fence" else win.Free
names = comm.allgather(code_of(call)) if {case} in ("fence", "free") else [code_of(call)]
if len(names) == 2:
    assert names == ["ERR_RMA_SYNC", "ERR_OTHER"], names
else:
    own = {{"size": "ERR_SIZE", "unit": "ERR_DISP", "memory": "BufferError"}}[{case}]
    assert names == [own if rank == 0 else "ERR_OTHER"], names
"""


@pytest.mark.parametrize("case", ["size", "unit", "memory", "fence", "free"])
def test_an_error_of_one_rank_keeps_no_other_waiting(tmp_path, case):
    run(tmp_path, ONE_SIDED_ERRORS.format(case=repr(case)), 2)


ATOMIC = """
TURNS = 300
win = MPI.Win.Allocate(4096 if rank == 0 else 0, 8, comm=comm)
comm.Barrier()

# Every ticket is given once; complex sums lose nothing; a value that is compared and swapped counts well.
tickets, got, one = [], np.zeros(1, "i8"), np.ones(1, "i8")
pairs, seen = np.full(100, 1 - 1j), np.zeros(100, "c16")
win.Lock_all()
for turn in range(TURNS):
    win.Fetch_and_op(one, got, 0, 0)
    tickets.append(int(got[0]))
    win.Accumulate(pairs, 0, 10)
    win.Get(seen, 0, 10)
    assert (seen.real == -seen.imag).all() and seen[0].real >= turn + 1, seen
    while True:
        win.Get(got, 0, 1)
        known = got.copy()
        win.Compare_and_swap(known + 1, known, got, 0, 1)
        if got[0] == known[0]:
            break
win.Unlock_all()
everything = comm.allgather(tickets)
assert sorted(sum(everything, [])) == list(range(size * TURNS))
assert all(mine == sorted(mine) for mine in everything)
comm.Barrier()
if rank == 0:
    assert items(win, "i8")[1] == size * TURNS
    assert (items(win, "c16")[5:105] == size * TURNS * (1 - 1j)).all()

# One rank at a time, with an exclusive lock; with shared ones, no rank sees what a writer has half done.
values = np.zeros(2, "i8")
for turn in range(TURNS):
    win.Lock(0, MPI.LOCK_SHARED if turn % 3 else MPI.LOCK_EXCLUSIVE)
    win.Get([values, 1], 0, 300)
    win.Get([values, (1, 1)], 0, 301)
    assert values[0] == values[1], values
    if turn % 3 == 0:
        values += 1
        win.Put([values, 1], 0, 300)
        win.Put([values, (1, 1)], 0, 301)
    win.Unlock(0)
comm.Barrier()
if rank == 0:
    assert items(win, "i8")[300] == size * len(range(0, TURNS, 3))
win.Free()
"""


@pytest.mark.parametrize("nprocs", [2, 5])
def test_atomicity(tmp_path, nprocs):
    run(tmp_path, ATOMIC, nprocs)


EPOCHS = """
win = MPI.Win.Allocate(8 * size, 8, comm=comm)
mine = items(win, "i8")

# Rank 0 is accessed by the others after its Post, and sees their values after Wait.
group = win.Get_group()
others, first = group.Excl([0]), group.Incl([0])
for turn in range(50):
    if rank == 0:
        mine[:] = turn
        win.Post(others)
        while turn % 2 and not win.Test():
            pass
        if turn % 2 == 0:
            win.Wait()
        assert list(mine[1:]) == [1000 * other + turn for other in range(1, size)], mine
    else:
        found = np.zeros(1, "i8")
        win.Start(first)
        win.Get(found, 0, 0)
        assert found[0] == turn
        win.Put(np.array([1000 * rank + turn]), 0, rank)
        win.Complete()

# Without checks, the program itself sees to the order.
if rank == 0:
    win.Post(others, MPI.MODE_NOCHECK)
comm.Barrier()
if rank:
    win.Start(first, MPI.MODE_NOCHECK)
    win.Put(np.array([-rank]), 0, rank)
    win.Complete()
else:
    win.Wait()
    assert list(mine[1:]) == [-other for other in range(1, size)]
comm.Barrier()
if rank == 0:
    win.Lock(0, assertion=MPI.MODE_NOCHECK)
    win.Put(np.array([5]), 0)
    win.Flush(0)
    win.Unlock(0)
comm.Barrier()

# A shared lock keeps out an exclusive one, until it is given back.
if rank:
    win.Lock(0, MPI.LOCK_SHARED)
    comm.Barrier()
    time.sleep(0.05)
    assert items(win, "i8", 0)[0] == 5
    win.Unlock(0)
else:
    comm.Barrier()
    win.Lock(0)
    win.Put(np.array([6]), 0)
    win.Unlock(0)
comm.Barrier()
win.Sync()
assert items(win, "i8", 0)[0] == 6
comm.Barrier()
win.Free()
"""


@pytest.mark.parametrize("nprocs", first(1, [3, 2]))
def test_epochs(tmp_path, nprocs):
    run(tmp_path, EPOCHS, nprocs)


THREADS = """
import threading

win = MPI.Win.Allocate(8 * size, 8, comm=comm)
tickets = []

def draw():
    got = np.zeros(1, "i8")
    for _ in range(200):
        win.Fetch_and_op(np.ones(1, "i8"), got, 0)
        tickets.append(int(got[0]))

win.Lock_all()
threads = [threading.Thread(target=draw) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
win.Unlock_all()
assert sorted(sum(comm.allgather(tickets), [])) == list(range(600 * size))

# One thread waits for the ranks that access this one, while another thread accesses a rank.
group = win.Get_group()
for turn in range(20):
    win.Post(group.Incl([left]))
    waiting = threading.Thread(target=win.Wait)
    waiting.start()
    win.Start(group.Incl([right]))
    win.Put(np.array([turn + rank]), right, 0)
    win.Complete()
    waiting.join()
    assert items(win, "i8")[0] == turn + left
win.Free()
"""


@pytest.mark.parametrize("nprocs", first(1, [3, 2]))
def test_several_threads(tmp_path, nprocs):
    run(tmp_path, THREADS, nprocs)


DEATH = """
win = MPI.Win.Allocate(8, comm=comm)
if rank == 1:
    win.Lock(0, {kind})
comm.Barrier()
if rank == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    win.Lock(0)
except MPI.Exception as error:
    assert error.Get_error_class() == MPI.ERR_PROC_FAILED, error
    os.write(1, b"%d %s\\n" % (error.__cause__.rank, type(error.__cause__).__name__.encode()))
"""


@pytest.mark.parametrize("kind", ["MPI.LOCK_EXCLUSIVE", "MPI.LOCK_SHARED"])
def test_a_rank_that_dies_with_a_lock_is_an_error_of_those_who_wait(tmp_path, kind):
    done = run_code(tmp_path, HEAD + DEATH.format(kind=kind), "--no-prefix", "--keep-going", nprocs=3)
    assert done.stdout.splitlines() == ["1 RankFailed"] * 2, done.stdout + done.stderr
    assert "killed by SIGKILL" in done.stderr


MEMORY = """
NBYTES = 8 << 20

def touched():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem:"))

def descriptors():
    return len(os.listdir("/proc/self/fd"))

MPI.Win.Allocate(NBYTES, comm=comm).Free()
before, open_before = touched(), descriptors()
for turn in range(20):
    win = MPI.Win.Allocate(NBYTES, comm=comm)
    items(win, "u1")[:] = 1
    assert touched() >= before + NBYTES
    win.Free()
comm.Barrier()
assert touched() < before + NBYTES // 2, (touched(), before)
assert descriptors() <= open_before + 2, (descriptors(), open_before)
"""


def test_free_frees_the_memory(tmp_path):
    run(tmp_path, MEMORY, 2)


LARGE = """
# Longer messages than those that exclude accumulates; the memory beside them stays.
x = np.arange(1 << 18, dtype="i4") + rank
win = MPI.Win.Allocate(x.nbytes + 8, 4, comm=comm)
win.Fence()
win.Put(x, right, 1)
win.Fence()
mine = items(win, "i4")
assert (mine[1:-1] == np.arange(1 << 18) + left).all() and mine[0] == mine[-1] == 0
y = np.zeros_like(x)
win.Get(y, right, 1)
assert (y == x).all()
win.Fence()
win.Accumulate(x, 0, 1)
win.Fence()
total = sum(np.arange(1 << 18) + r for r in range(size))
assert rank or (mine[1:-1] == np.arange(1 << 18) + size - 1 + total).all()
win.Free()
"""


@pytest.mark.parametrize("nprocs", [1, 3])
def test_long_messages(tmp_path, nprocs):
    run(tmp_path, LARGE, nprocs)
