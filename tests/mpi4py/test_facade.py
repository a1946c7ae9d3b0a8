"""Semantics of `from shmring import MPI`: specifications of messages, errors, requests, operations.

mpi4py's own tests, in upstream.py, cover the interface; these here are the ones that it has no test for.
"""

import pytest
from combinations import first
from running import ALARM, run_code

SELF = """
import numpy as np
from shmring import MPI

def exchanged(given, taken):
    MPI.COMM_SELF.Sendrecv(given, 0, 0, taken, 0, 0)

def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return type(error).__name__

x, y = np.arange(4.0), np.zeros(4)
exchanged([x, (2, 1)], [y, (2, 2), MPI.DOUBLE])
print(*y)
print(error_of(exchanged, [x, 5], y), error_of(exchanged, [x, (1, 4)], y), error_of(exchanged, [x, "@"], y))
print(error_of(exchanged, x, b"12345678"), error_of(exchanged, x[::2], y), error_of(exchanged, [1, 2], y))
send = MPI.COMM_SELF.Send
print(error_of(exchanged, x.astype(">f8"), y), error_of(send, x, 1), error_of(send, x, 0, -1))
try:
    MPI.COMM_SELF.Sendrecv(x, 0, 0, y[:2], 0, 0)
except MPI.Exception as error:
    print(error.Get_error_class() == MPI.ERR_TRUNCATE, type(error.__cause__).__name__)
"""


def test_specifications_are_checked_before_anything_is_sent(tmp_path):
    done = run_code(tmp_path, SELF, "--no-prefix", nprocs=1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "0.0 0.0 1.0 2.0",
        "ValueError ValueError KeyError",
        "BufferError ValueError TypeError",
        "BufferError Exception Exception",
        "True Truncated",
    ]


WORLD = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

# A function of the program is called in rank order: b = f(lower, higher).
def keep_digits(a, b, datatype):
    lower, higher = np.frombuffer(a, "i8"), np.frombuffer(b, "i8")
    higher[:] = 10 * lower + higher

digits = MPI.Op.Create(keep_digits)
x, y = np.array([rank + 1]), np.zeros(1, "i8")
comm.Allreduce(x, y, digits)
assert y[0] == (12 if size == 2 else 123), y

# Pairs of a value and a place; of equal values, the lower place.
pairs = np.array([(5, rank)], MPI.DOUBLE_INT._ref.dtype)
best = pairs.copy()
comm.Allreduce([pairs, MPI.DOUBLE_INT], [best, MPI.DOUBLE_INT], MPI.MAXLOC)
assert tuple(best[0]) == (5, 0), best

# A reduce_scatter of pieces of different lengths; long double, which shmring does not reduce itself.
counts = list(range(1, size + 1))
part = np.zeros(rank + 1, np.longdouble)
comm.Reduce_scatter(np.ones(sum(counts), np.longdouble), part, counts)
assert (part == size).all(), part

# Bytes are received as an object, and an object as bytes.
request = comm.Isend([MPI.pickle.dumps(("a", rank)), MPI.BYTE], (rank + 1) % size)
assert comm.recv(source=(rank - 1) % size) == ("a", (rank - 1) % size)
request.Wait()
assert request == MPI.REQUEST_NULL

# A persistent request is started many times, and stays.
total = comm.Allreduce_init(x, y)
for value in range(3):
    x[0] = value
    total.Start()
    total.Wait()
    assert y[0] == value * size
total.Free()

# A synchronous send is complete once it is received.
if rank == 0:
    request = comm.issend("late", 1, 7)
    assert not request.Test()
    comm.Barrier()
    request.Wait()
else:
    comm.Barrier()
    if rank == 1:
        assert comm.recv(source=0, tag=7) == "late"

# Only the members of a group make its communicator.
last = comm.Get_group().Incl([size - 1])
alone = comm.Create_group(last) if rank == size - 1 else MPI.COMM_NULL
assert (alone == MPI.COMM_NULL) == (rank < size - 1)
comm.Barrier()
print("well")
"""


@pytest.mark.parametrize("nprocs", first(1, [3, 2]))
def test_calls_among_ranks(tmp_path, nprocs):
    done = run_code(tmp_path, WORLD, "--no-prefix", nprocs=nprocs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["well"] * nprocs


PARTS = """
import threading
import numpy as np
from shmring import MPI

comm, alone = MPI.COMM_WORLD, MPI.COMM_SELF
rank, size = comm.rank, comm.size

def code_of(call, *arguments):
    try:
        call(*arguments)
    except MPI.Exception as error:
        return error.Get_error_class()

# A part of an array is combined where it lies; the rest stays.
for kind in (np.double, np.longdouble):
    x, y = np.arange(4, dtype=kind) + rank, np.zeros(4, kind)
    comm.Allreduce([x, (2, 2)], [y, (2, 1)])
    assert list(y) == [0, 5, 7, 0], y
    comm.Allreduce(MPI.IN_PLACE, [x, (2, 2)])
    assert list(x) == [rank, 1 + rank, 5, 7], x
    MPI.SUM.Reduce_local([x, (2, 2)], [y, (2, 0)])
    assert list(y) == [5, 12, 7, 0], y
total = np.zeros(2)
comm.Reduce_scatter_block(np.ones((size, 2)), total)
assert list(total) == [size, size], total
shaped = np.zeros((2, 3))
MPI.SUM.Reduce_local(np.arange(6.0), shaped)
assert (shaped == np.arange(6.0).reshape(2, 3)).all()

# CHAR is an integer in reductions; CHARACTER has none.
letters, both = np.array([1, 2], "i1"), np.zeros(2, "i1")
for op, expected in ((MPI.SUM, [2, 4]), (MPI.MAX, [1, 2]), (MPI.BXOR, [0, 0]), (MPI.LAND, [1, 1])):
    comm.Allreduce([letters, MPI.CHAR], [both, MPI.CHAR], op)
    assert list(both) == expected, (op.name, both)
wrong = [letters, MPI.CHARACTER], [both, MPI.CHARACTER]
assert code_of(MPI.SUM.Reduce_local, *wrong) == code_of(MPI.MINLOC.Reduce_local, letters, both) == MPI.ERR_OP
logic, bits, order, sums = ["LAND", "LOR", "LXOR"], ["BAND", "BOR", "BXOR"], ["MIN", "MAX"], ["SUM", "PROD"]
for names, defined in {
    "INT UNSIGNED_CHAR AINT": logic + bits + order + sums,
    "INTEGER INTEGER8": bits + order + sums,
    "FLOAT LONG_DOUBLE REAL": order + sums,
    "C_COMPLEX C_LONG_DOUBLE_COMPLEX": sums,
    "C_BOOL CXX_BOOL LOGICAL": logic,
    "BYTE": bits,
    "INT_INT LONG_DOUBLE_INT": ["MINLOC", "MAXLOC"],
    "WCHAR PACKED CHARACTER": [],
}.items():
    for datatype in (getattr(MPI, name) for name in names.split()):
        x, y = ([np.zeros(datatype.extent, "u1"), 1, datatype] for _ in range(2))
        for name in [*logic, *bits, *order, *sums, "MINLOC", "MAXLOC", "REPLACE", "NO_OP"]:
            op = getattr(MPI, name)
            expected = 0 if name in defined else MPI.ERR_OP
            found = [code_of(call, *arguments) or 0 for call, *arguments in
                     ((op.Reduce_local, x, y), (alone.Allreduce, x, y, op), (alone.Exscan, x, y, op))]
            assert found == [expected] * 3, (datatype.name, name, found)
given, taken = np.array([b"a", b"b"]), np.zeros(2, "S1")
alone.Sendrecv(given, 0, 0, taken, 0, 0)
assert (given == taken).all()
pairs = np.array([(rank, 1), (5, rank)], "i,i")
best = np.zeros(1, "i,i")
comm.Reduce_scatter([pairs, MPI.INT_INT], [best, MPI.INT_INT], [1, 1], MPI.MAXLOC)
assert tuple(best[0]) == [(1, 1), (5, 0)][rank], best

# A group that begins empty has this process if it is added.
group = MPI.Group.Union(MPI.GROUP_EMPTY, comm.Get_group())
assert group.Get_rank() == rank and group.Incl([]) == MPI.GROUP_EMPTY

# None is a message only beside a count, and to PROC_NULL.
for call in (comm.Dup().Bcast, lambda none: alone.Send(none, 0), lambda none: alone.Recv(none, 0)):
    try:
        call(None)
        raise AssertionError
    except TypeError:
        pass
alone.Sendrecv([None, 0, MPI.INT], 0, 0, [None, 0, MPI.INT], 0, 0)
alone.Send(None, MPI.PROC_NULL)
alone.Sendrecv(None, MPI.PROC_NULL, 0, None, MPI.PROC_NULL)

# A message from PROC_NULL is received beside other threads.
over = threading.Event()
other = threading.Thread(target=over.wait, daemon=True)
other.start()
status = MPI.Status()
alone.Mprobe(MPI.PROC_NULL).Recv(np.zeros(1), status)
assert status.source == MPI.PROC_NULL
assert alone.mprobe(MPI.PROC_NULL).irecv().wait() is None
over.set()
other.join()

# Messages that are too long fail alone.
rooms = [np.zeros(1), np.zeros(1)]
requests = [alone.Irecv(room, 0, tag) for tag, room in enumerate(rooms)]
alone.Send(np.ones(2), 0, 0)
alone.Send(np.ones(1), 0, 1)
statuses = [MPI.Status(), MPI.Status()]
assert code_of(MPI.Request.Waitall, requests, statuses) == MPI.ERR_IN_STATUS
assert [status.error for status in statuses] == [MPI.ERR_TRUNCATE, 0] and rooms[1][0] == 1
print("well")
"""


def test_parts_and_kinds_of_messages(tmp_path):
    done = run_code(tmp_path, PARTS, "--no-prefix")
    assert done.stdout.splitlines() == ["well"] * 2, done.stderr


RECEIVES_AFTER_FREE = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
dup, room = comm.Dup(), np.zeros(1)
if comm.rank == 0:
    request = dup.Irecv(room, 1)
comm.Barrier()
if comm.rank == 1:
    request = dup.Isend(np.ones(1), 0)
dup.Free()
request.Wait()
print(*room)
"""


def test_a_receive_is_completed_after_its_communicator_is_freed(tmp_path):
    done = run_code(tmp_path, RECEIVES_AFTER_FREE, "--no-prefix")
    assert sorted(done.stdout.splitlines()) == ["0.0", "1.0"], done.stderr


NO_MEMORY_BEFORE_A_CHILD_IS_COUNTED = """
from shmring import MPI

comm = MPI.COMM_WORLD
kind = type(comm._comm())
next_child = kind.next_child

def fail(self, *what):
    kind.next_child = next_child
    raise MemoryError

if comm.rank == 1:
    kind.next_child = fail
try:
    call(comm)
except MemoryError:
    print("no memory")
try:
    comm.Create_group(comm.Get_group())
except MPI.Exception as error:
    print("over")
"""


@pytest.mark.parametrize("call", ["comm.Dup()", "comm.Split(0)", "comm.Create(comm.Get_group())"])
def test_ranks_never_count_different_numbers_of_children(tmp_path, call):
    code = NO_MEMORY_BEFORE_A_CHILD_IS_COUNTED.replace("call(comm)", call)
    done = run_code(tmp_path, code, "--no-prefix", nprocs=2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["no memory", "over", "over"]


REFUSED = """
import numpy as np
from shmring import MPI
from shmring.mpi4py.util import pkl5

comm = MPI.COMM_WORLD
is_right = comm.rank == 0
try:
    CALL
except (TypeError, ValueError):
    print("refused")
except MPI.Exception as error:
    print("told" if error.__cause__ else "refused", type(error.__cause__).__name__)
"""
REFUSED_CALLS = [
    "comm.Allreduce(np.zeros(2), np.zeros(3 - is_right))",
    "comm.Gatherv(*[np.zeros(2), np.zeros(4)][: 1 + is_right])",
    "comm.Gatherv(np.zeros(2), np.zeros(4), **{} if is_right else {'kind': 1})",
    "comm.bcast(1, 0 if is_right else 9)",
    "comm.gather(1, 0 if is_right else 9)",
    "comm.scatter([1, 2], 0 if is_right else 9)",
    "comm.Create(comm.Get_group() if is_right else None)",
    "comm.Split_type(MPI.COMM_TYPE_SHARED if is_right else 77)",
    "comm.Create_cart([2 if is_right else 9])",
    "comm.Create_graph([0] * (3 if is_right else 4), [])",
    "pkl5.Intracomm(comm).bcast(1 if is_right else (x for x in ()), root=1)",
    "pkl5.Intracomm(comm).alltoall([1, 1 if is_right else (x for x in ())])",
]


@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_a_wrong_argument_on_one_rank_keeps_no_other_waiting(tmp_path, call):
    done = run_code(tmp_path, REFUSED.replace("CALL", call), "--no-prefix")
    told, *refused = sorted(done.stdout.splitlines(), reverse=True)
    assert told == "told Mismatch", done.stderr
    assert refused[0].startswith("refused"), done.stderr


PERSISTENT = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
rooted = {"root": size - 1}

# Several persistent collectives are under way at the same time; each start takes the values of that moment.
x, total, prefix, part = np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2)
every, given = np.zeros((size, 2)), np.zeros((size, 2))
requests = [
    comm.Allreduce_init(x, total),
    comm.Scan_init(x, prefix, MPI.MAX),
    comm.Bcast_init(part, **rooted),
    comm.Allgather_init(x, every),
    comm.Barrier_init(),
    comm.Scatter_init(given if rank == size - 1 else None, part, **rooted),
    comm.Reduce_scatter_block_init(given, part),
]
for step in range(70):
    x[:] = rank + step, 1
    given[:] = np.arange(size)[:, None] + step
    MPI.Prequest.Startall(requests)
    assert MPI.Request.Waitall(requests)
    assert (total == [sum(range(size)) + size * step, size]).all(), (step, total)
    assert (prefix == [rank + step, 1]).all(), (step, prefix)
    assert (every == [[other + step, 1] for other in range(size)]).all(), (step, every)
    assert (part == size * (rank + step)).all(), (step, part)

# A start does not wait: rank 1 receives before it waits for the collective, rank 0 sends after that.
one = requests[0]
one.Start()
if rank == 0:
    one.Wait()
    comm.Send(x, 1)
else:
    if rank == 1:
        comm.Recv(x, 0)
    one.Wait()
assert one.Test() and one.wait() is None
for wrong in (lambda: MPI.Prequest.Start(MPI.Prequest()), lambda: (one.Start(), one.Start())):
    try:
        wrong()
        raise AssertionError
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_REQUEST
one.Wait()
if size == 2:
    other = comm.Dup()
    again = other.Allreduce_init(x, total)
    other.Free()
    try:
        again.Start()
        raise AssertionError
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_COMM, error
print("well")
"""


@pytest.mark.parametrize("nprocs", first(1, [3, 2]))
def test_persistent_collectives(tmp_path, nprocs):
    done = run_code(tmp_path, PERSISTENT, "--no-prefix", nprocs=nprocs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["well"] * nprocs


ORDERS = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
rank = comm.rank
given = [np.array([10.0 * i + rank]) for i in range(4)]
sums, parts = np.zeros((2, 1)), np.zeros((2, 2))
requests = [comm.Allreduce_init(given[i], sums[i]) for i in range(2)]
requests += [comm.Allgather_init(given[2 + i], parts[i]) for i in range(2)]

# Startall may have another order on each rank.
for _ in range(2):
    sums[:], parts[:] = 0, 0
    MPI.Prequest.Startall(requests[::-1] if rank else requests)
    MPI.Request.Waitall(requests)
    assert sums.tolist() == [[1], [21]] and parts.tolist() == [[20, 21], [30, 31]], (sums, parts)

# The items may have gaps on one rank alone.
column = MPI.INT64_T.Create_vector(2, 1, 2).Commit()
table = np.arange(4) * (1 - rank)
spread = comm.Bcast_init([table, 1, column] if rank else [table, 2, MPI.INT64_T])
for _ in range(2):
    spread.Start()
    spread.Wait()
    assert table.tolist() == ([0, 0, 1, 0] if rank else [0, 1, 2, 3]), table

# One by one, collectives of equal arguments do not meet in another order: this is an error, and no wrong sum.
try:
    for request in requests[1::-1] if rank else requests[:2]:
        request.Start()
    MPI.Request.Waitall(requests[:2])
except MPI.Exception as error:
    print("same order" in str(error), type(error.__cause__).__name__)
"""


def test_persistent_collectives_in_another_order_on_each_rank(tmp_path):
    done = run_code(tmp_path, ORDERS, "--no-prefix", nprocs=2)
    assert done.stdout.splitlines() == ["True Mismatch"] * 2, done.stderr


INTERRUPTED = """
from shmring import MPI
from shmring.mpi4py import objects

comm = MPI.COMM_WORLD

def interrupted(*arguments):
    raise KeyboardInterrupt

if comm.rank == 1:
    objects.{step} = interrupted
try:
    comm.{call}("long " * 100)
except (MPI.Exception, KeyboardInterrupt) as error:
    print(comm.rank, type(error).__name__, type(error.__cause__).__name__)
"""


@pytest.mark.parametrize(("call", "step"), [("bcast", "broadcast_rest"), ("allgather", "all_gather_rest")])
def test_an_exception_between_two_steps_keeps_no_other_waiting(tmp_path, call, step):
    done = run_code(tmp_path, INTERRUPTED.format(call=call, step=step), "--no-prefix")
    assert sorted(done.stdout.splitlines()) == [
        "0 Exception Aborted",
        "1 KeyboardInterrupt NoneType",
    ], done.stderr


FREED = """
import gc
import numpy as np
from shmring import MPI

def is_mapped(address):
    ranges = [line.split()[0].split("-") for line in open("/proc/self/maps")]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)

memory = MPI.Alloc_mem(1 << 22)
address = memory.address
x, part, view, alike = np.frombuffer(memory, "i8"), memory[8:16], memoryview(memory)[16:], memory.toreadonly()
MPI.Free_mem(memory)
assert len(memory) == 0 and memory.address == 0
x[:] = 7
assert (part[0], view[0], alike[-8], x.sum()) == (7, 7, 7, 7 * x.size)
del x, part, view
gc.collect()
assert is_mapped(address) and alike[0] == 7
del alike
gc.collect()
assert not is_mapped(address)
print("well")
"""


def test_memory_stays_while_arrays_use_it(tmp_path):
    done = run_code(tmp_path, FREED, "--no-prefix", nprocs=1)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


POLLS = """
import os, time
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
if comm.rank == 1:
    time.sleep(0.3)
    os._exit(1)
request = comm.Irecv(np.zeros(3), 1)
until = time.monotonic() + 10
try:
    while time.monotonic() < until and not request.Test():
        pass
except MPI.Exception as error:
    print(error.Get_error_class() == MPI.ERR_PROC_FAILED, error.__cause__.rank)
"""


def test_polls_of_a_request_notice_that_a_rank_has_died(tmp_path):
    done = run_code(tmp_path, POLLS, "--no-prefix", "--keep-going", nprocs=2)
    assert done.stdout.splitlines() == ["True 1"], done.stdout + done.stderr


REQUESTS = """
import pickle, signal, threading
import numpy as np
from shmring import MPI

comm, room = MPI.COMM_SELF, np.zeros(1)

def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return error

# An error of a request is raised by the call that completes the request, and by none before or after.
lists = [getattr(MPI.Request, name + kind) for name in ("Wait", "Test") for kind in ("any", "some", "all")]
for complete in (lambda requests: requests[0].Wait(), lambda requests: requests[0].Test(), *lists):
    request = comm.Irecv(room, 0)
    comm.Send(np.ones(2), 0)
    while not request.Get_status():
        pass
    assert request
    code = error_of(complete, [request]).Get_error_class()
    assert code in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS), code
    assert not request and request.Test()
request = comm.irecv(source=0)
comm.Send([b"no pickle", MPI.BYTE], 0)
while not request.Get_status():
    pass
assert isinstance(error_of(request.test), pickle.UnpicklingError) and not request

# An error handler may raise an exception of its own.
def handle(*_):
    raise ZeroDivisionError

handler = MPI.Comm.Create_errhandler(handle)
comm.Set_errhandler(handler)
request = comm.Irecv(room, 0)
comm.Send(np.ones(2), 0)
assert isinstance(error_of(request.Wait), ZeroDivisionError) and not request
comm.Set_errhandler(MPI.ERRORS_RETURN)

# After a Ctrl-C in Wait, the request is still there.
for make in (comm.Irecv, comm.Recv_init):
    request = make(room, 0)
    if make == comm.Recv_init:
        request.Start()
    assert interrupted(request.Wait) and request and not request.Test()
    comm.Send(np.full(1, 7.0), 0)
    request.Wait()
    assert room[0] == 7
    room[0] = 0

# A blocking call that is interrupted takes no later message, with and without another thread.
over = threading.Event()
other = threading.Thread(target=over.wait)
for begin in (lambda: None, other.start):
    begin()
    nothing = None, MPI.PROC_NULL, 1
    for call, *arguments in ((comm.Sendrecv, *nothing, np.zeros(1), 0, 2), (comm.Recv, np.zeros(1), 0, 2)):
        assert interrupted(call, *arguments)
        comm.Send(np.full(1, 7.0), 0, 2)
        comm.Recv(room, 0, 2)
        assert room[0] == 7
        room[0] = 0
over.set()
other.join()

# The status of a request that the program completes is that which its function sets.
request = MPI.Grequest.Start(lambda status: status.Set_cancelled(True), None, lambda is_complete: None)
request.Cancel()
request.Complete()
status = MPI.Status()
request.Wait(status)
assert status.Is_cancelled()
print("well")
"""


def test_errors_and_interrupts_of_requests(tmp_path):
    done = run_code(tmp_path, ALARM + REQUESTS, "--no-prefix", nprocs=1)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


AS_MPI4PY = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
size, above, below = comm.size, (rank + 1) % comm.size, (rank - 1) % comm.size

def code_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except MPI.Exception as error:
        return error.Get_error_class()
    except ValueError:
        return ValueError

# The root of a broadcast gets a copy. The result of MAXLOC is a tuple, whatever the pairs are.
given = ["a"]
assert comm.bcast(given) == given and comm.bcast(given) is not given
assert comm.allreduce(np.array([5, rank]), MPI.MAXLOC) == comm.allreduce([5, rank], MPI.MINLOC) == (5, 0)

# Without another group, ranks are those in COMM_WORLD. Constants stay.
last = comm.Get_group().Incl([size - 1])
assert last.Translate_ranks() == last.Translate_ranks([0]) == [size - 1]
assert last.Translate_ranks([MPI.PROC_NULL, 0], MPI.GROUP_EMPTY) == [MPI.PROC_NULL, MPI.UNDEFINED]
for constant in (MPI.GROUP_EMPTY, MPI.ERRORS_RETURN):
    constant.Free()
    assert constant and last.Excl([0]) == MPI.GROUP_EMPTY

# Without counts, the first ranks get one item more.
x, every = np.arange(2 * size + 1), np.zeros(2 * size + 1, int)
part = np.zeros(2 + (rank == 0), int)
comm.Scatterv(x, part)
comm.Allgatherv(part, every)
assert (every == x).all()

# The format of memory does not matter if a datatype is given.
record = np.dtype([("a", "i1"), ("b", "f8")], align=True)
struct = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.SIGNED_CHAR, MPI.DOUBLE]).Commit()
records, taken = np.zeros(size, record), np.zeros(size, record)
records["a"], records["b"] = range(size), rank
where = [1] * size, [16 * other for other in range(size)]
comm.Alltoallw([records, where, [struct] * size], [taken, where, [struct] * size])
assert (taken["a"] == rank).all() and (taken["b"] == range(size)).all()
packed, taken = bytearray(9 * size), np.zeros(size, record)
assert struct.Pack(records, packed, 0, comm) == struct.Unpack(packed, 0, taken, comm) == len(packed)
assert (taken == records).all()
dates, room = np.array([rank], "M8[D]"), np.zeros(1, "M8[D]")
comm.Sendrecv([dates, MPI.INT64_T], above, 0, [room, MPI.INT64_T], below)
assert room[0] == np.datetime64(below, "D")

# The root's part of a message that is scattered in place may be read-only.
x.flags.writeable = False
comm.Scatter([x, 2, MPI.INT64_T] if rank == 0 else None, part if rank else MPI.IN_PLACE)
assert rank == 0 or part.tolist() == [2 * rank, 2 * rank + 1]

# None attaches a buffer of any size. The buffer that was attached is returned.
for memory in (None, bytearray(100)):
    MPI.Attach_buffer(memory)
    comm.bsend(rank, above)
    assert comm.recv() == below
    assert MPI.Detach_buffer() is (memory or MPI.BUFFER_AUTOMATIC)

# A wrong argument is found before anything is sent.
assert code_of(comm.sendrecv, 1, above, source=size) == MPI.ERR_RANK
comm.Barrier()
assert not comm.Iprobe()

# Extents are as equal as they can be.
for arguments, expected in {(72, 2): [9, 8], (30, 3): [5, 3, 2], (12, (0, 2)): [6, 2], (7, 1): [7]}.items():
    assert MPI.Compute_dims(*arguments) == expected, arguments
wrong = (0, 2), (5, (2, 0)), (6, (2, 2)), (4, (-2, 0))
assert {code_of(MPI.Compute_dims, *arguments) for arguments in wrong} == {MPI.ERR_DIMS}

# A range of ranks leads from its first to its last.
group = comm.Get_group()
assert group.Range_incl([(1, 0, -1)]).Translate_ranks(group=group) == [1, 0]
for wrong in (1, 0, 1), (0, 1, -1), (0, 0, 0):
    assert code_of(group.Range_incl, [wrong]) == code_of(group.Range_excl, [wrong]) == MPI.ERR_ARG

# A single operand stays as it is.
for operation in MPI.LAND, MPI.LOR, MPI.LXOR:
    twos, taken = np.full(3, 2), np.zeros(3, int)
    MPI.COMM_SELF.Allreduce(twos, taken, operation)
    assert taken.tolist() == [2] * 3
    comm.Scan(twos, taken, operation)
    assert taken.tolist() == ([2] * 3 if rank == 0 else [int(operation != MPI.LXOR)] * 3)
    comm.Exscan(MPI.IN_PLACE, twos, operation)
    assert twos.tolist() == [2] * 3
assert code_of(MPI.COMM_SELF.Allreduce, twos, taken, MPI.OP_NULL) == MPI.ERR_OP

# An index with a 0 at the front has a node less.
index, edges = [*range(size + 1)], [*range(1, size), 0]
graph = comm.Create_graph(index, edges)
assert graph.neighbors == [above] and code_of(graph.Get_neighbors, -1) == MPI.ERR_RANK
assert comm.Graph_map(index[:size], edges[: size - 1]) == (rank if rank < size - 1 else MPI.UNDEFINED)
for wrong in ([1, 0], [0]), ([1], [5]), ([-1], []), ([2], [0]), ([1, 2, 3], [0, 1, 0]):
    assert code_of(MPI.COMM_SELF.Create_graph, *wrong) == MPI.ERR_ARG, wrong
for wrong in ([1], []), ([], [-1]):
    assert code_of(MPI.COMM_SELF.Create_dist_graph_adjacent, *wrong) == MPI.ERR_RANK
for wrong in ([0], [1], [1]), ([1], [1], [0]):
    assert code_of(MPI.COMM_SELF.Create_dist_graph, *wrong) == MPI.ERR_RANK
for wrong in ([0], [1], [0, 0]), ([0, 0], [2, -1], [0]):
    assert code_of(MPI.COMM_SELF.Create_dist_graph, *wrong) is ValueError, wrong
ring = comm.Create_dist_graph_adjacent([below], [above])
ring.inedges.append(rank)
assert ring.inedges == [below]
assert graph.neighbor_alltoall(None) == [None]

def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return type(error)

# An array of objects is no memory for a message, whatever datatype is given.
objects = np.array([[], {}], object)
for datatype in MPI.BYTE, MPI.DOUBLE:
    assert error_of(MPI.COMM_SELF.Irecv, [objects, 1, datatype], 0) is TypeError
    assert error_of(comm.Bcast, [objects, 1, datatype]) is TypeError

# Names may be bytes. Long ones are cut. Numbers that C does not have are errors.
info, status, kind = MPI.Info.Create({"a": "1"}), MPI.Status(), MPI.INT.Dup()
info.Set(b"b", b"2")
assert dict(info) == {"a": "1", "b": "2"} and info[b"a"] == info.pop(b"a") == "1" and b"b" in info
for wrong in None, 3:
    for call in info.Get, info.Delete, info.get, info.__contains__, kind.Set_name, graph.Set_name:
        assert error_of(call, wrong) is TypeError, call
    assert error_of(info.Set, "a", wrong) is TypeError
for some in kind, graph:
    some.Set_name(b"bytes")
    assert some.name == "bytes"
    some.name = "x" * 300
    assert some.name == "x" * (MPI.MAX_OBJECT_NAME - 1)
for call in status.Set_source, status.Set_tag, status.Set_error:
    assert error_of(call, 2**31) is error_of(call, -(2**31) - 1) is OverflowError
    call(2**31 - 1)

# A communicator with a topology exchanges messages as any other.
pair, taken = np.array([rank]), np.zeros(1, int)
for each in comm.Create_cart([size], [True]), graph, ring:
    each.Sendrecv(pair, above, 0, taken, below)
    each.Sendrecv_replace(pair, above, 0, below)
    assert taken[0] == pair[0] == below and each.sendrecv(rank, above, 0, None, below) == below
    pair[0] = rank

# An argument of a wrong kind is an error at once.
for wrong in None, 3, MPI.SUM:
    for call in MPI.Request.Waitall, comm.Set_errhandler:
        assert error_of(call, [wrong] if call == MPI.Request.Waitall else wrong) is TypeError
for wrong in None, MPI.INT, "a":
    for call in comm.Call_errhandler, MPI.Add_error_code, MPI.Get_error_string:
        assert error_of(call, wrong) is TypeError, (call, wrong)
    for call in MPI.Op.Create, MPI.Comm.Create_errhandler:
        assert error_of(call, wrong) is TypeError, (call, wrong)
print("well")
"""


def test_results_and_arguments_are_those_of_mpi4py(tmp_path):
    done = run_code(tmp_path, AS_MPI4PY, "--no-prefix", nprocs=2)
    assert done.stdout.splitlines() == ["well"] * 2, done.stderr


GENERAL = """
import threading
from shmring import MPI

calls = []
def start(query=True):
    calls.clear()
    def query_fn(status, name):
        calls.append("query")
        if not query:
            raise MPI.Exception(MPI.ERR_ARG)
    return MPI.Grequest.Start(query_fn, lambda name: calls.append(name), args=("free",))

# A request that was waited for, or tested, is freed once; one that was only looked at is not.
for end in (lambda one: one.Wait(), lambda one: one.Test(), lambda one: MPI.Request.Waitall([one])):
    request = start()
    copy = MPI.Request(request)
    assert not request.Test() and not request.Get_status()
    request.complete("object")
    assert request.Get_status() and calls == ["query"], calls
    end(request)
    assert calls == ["query", "free"] and not request, calls
    copy.Free()
    assert calls == ["query", "free"]

# A request that is given up is freed when it is complete as well, whichever comes first.
for kind in (MPI.Grequest, MPI.Request):
    request = start()
    request.Complete()
    assert calls == []
    kind(request).Free()
    assert calls == ["free"]
    request = start()
    given_up = request if kind is MPI.Grequest else kind(request)
    given_up.Free()
    assert calls == [] and not given_up
    other = threading.Thread(target=request.Complete)
    other.start()
    other.join()
    assert calls == ["free"]

# It is freed also if the other function has failed.
request = start(False)
request.Complete()
try:
    request.Wait()
except MPI.Exception as error:
    assert error == MPI.ERR_ARG
assert calls == ["query", "free"]
try:
    request.Complete()
except MPI.Exception as error:
    print(error == MPI.ERR_REQUEST)
"""


def test_the_function_that_frees_a_request_is_called_once(tmp_path):
    done = run_code(tmp_path, GENERAL, "--no-prefix", nprocs=1)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


DIMS = """
import itertools
import math
from shmring import MPI

# The largest extent is as small as it can be, and then the next one.
for count in range(1, 97):
    divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
    for number in range(1, 5):
        grids = itertools.combinations_with_replacement(divisors, number)
        expected = min(sorted(grid, reverse=True) for grid in grids if math.prod(grid) == count)
        assert MPI.Compute_dims(count, number) == expected, (count, number)

prime, most_divisors = 2**31 - 1, 2095133040
assert MPI.Compute_dims(prime, 3) == [prime, 1, 1]
assert MPI.Compute_dims(2 * 1073741789, [0, 2, 0]) == [1073741789, 2, 1]
assert MPI.Compute_dims(2**30, 30) == [2] * 30
for number in (3, 7, 20):
    assert math.prod(MPI.Compute_dims(most_divisors, number)) == most_divisors
try:
    MPI.Compute_dims(2**61 - 1, 2)
except OverflowError as error:
    print(error)
"""


def test_extents_of_grids_are_found_at_once(tmp_path):
    done = run_code(tmp_path, DIMS, "--no-prefix", nprocs=1)
    expected = "nnodes is 2305843009213693951; it must be at most 2147483647\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


PKL5_REQUESTS = """
import numpy as np
from shmring import MPI
from shmring.mpi4py.util import pkl5

comm = pkl5.Intracomm(MPI.COMM_WORLD)
other = 1 - comm.rank
sends = [comm.isend(np.full(count, count), other, count) for count in (1, 100_000)]
receives = [comm.mprobe(other, count).irecv() for count in (1, 100_000)]
both, none = pkl5.Request(sends), pkl5.Request([MPI.REQUEST_NULL])
statuses = []
_, first, second, _ = MPI.Request.waitall([both, *receives, none], statuses)
assert (first == 1).all() and (second == 100_000).all() and second.shape == (100_000,)
assert [status.tag for status in statuses[1:3]] == [1, 100_000], statuses
assert not any([both, none, *sends, *receives])

# A request that is known to be complete can be cancelled, to no effect.
request = comm.isend("item", other)
assert comm.recv(source=other) == "item"
while not request.get_status():
    pass
request.cancel()
request.wait()
print("well")
"""


def test_requests_of_pkl5_are_those_of_mpi(tmp_path):
    done = run_code(tmp_path, PKL5_REQUESTS, "--no-prefix", nprocs=2)
    assert done.stdout.splitlines() == ["well"] * 2, done.stdout + done.stderr


# Numbers that are arguments of their own are converted as mpi4py does: a float loses its fraction. Those in
# lists, and the counts of messages, are integers. All of this was tried with mpi4py 4.1 and MPICH 5.0.
FLOATS = """
import numpy as np
from shmring import MPI
from shmring.mpi4py.util import pkl5
from shmring.mpi4py.util.sync import Counter

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
half, other, root = rank / 2 + 0.25, float(size - 1 - rank), np.float64(1.5)
x, y, status = np.array([rank], "i4"), np.zeros(1, "i4"), MPI.Status()

# Messages of buffers and of objects, and their probes.
comm.Sendrecv(x, other, 1.5, y, other, 1.9, status)
assert y[0] == status.source == other and status.tag == 1
request = comm.Isend(x, other, np.array(2.0))
while not comm.Iprobe(other, 2.0):
    pass
comm.Recv(y, other, 2.5)
request.Wait()
request = comm.isend(rank, other, 3.0)
while not (message := comm.improbe(other, 3.0)):
    pass
assert message.recv() == other
request.wait()
comm.send(rank, other, 4.0) if rank else None
assert rank or comm.recv(source=other, tag=4.0) == 1

# Roots.
assert comm.bcast(rank, root) == comm.scatter([1, 1], root) == 1
assert comm.gather(rank, root) == ([0, 1] if rank else None)
y[0] = rank
comm.Bcast(y, root)
assert y[0] == 1
comm.Gatherv(x, [np.zeros(2, "i4"), [1, 1]], root)
comm.Scatterv([np.zeros(2, "i4"), [1, 1]], y, root)
comm.Reduce(x, y, root=root)
assert y[0] == rank

whole = pkl5.Intracomm(comm)
assert whole.bcast(rank, root) == 1 and whole.scatter([0, 1], root) == rank
counter = Counter(5, comm=comm, root=root)
assert sorted(comm.allgather(counter.next())) == [5, 6]
counter.free()

# Communicators, grids, groups, datatypes, windows.
pair = comm.Split(half, -float(rank))
assert pair.size == size and pair.rank == other
assert comm.Split(rank, 0.5).size == 1 and comm.Split_type(MPI.COMM_TYPE_SHARED, 0.0).size == size
assert comm.Create_group(comm.Get_group(), rank / 4).size == size
ring = comm.Create_cart([size], [True])
assert ring.Shift(0.0, 1.0) == (other, other) and ring.Get_coords(1.0) == [1]
assert comm.Get_group().Range_incl([(0.0, 1.0, 1.0)]).size == size
vector = MPI.INT.Create_vector(2.0, 1.5, 3.0)
assert (vector.size, vector.extent) == (8, 16) and MPI.INT.Create_resized(0.0, 8.0).extent == 8
assert vector.Get_envelope()[1] == 0 and MPI.INT.Create_contiguous(2.0).Get_contents()[0] == [2]
window = MPI.Win.Allocate(16, 4, comm=comm)
window.Lock(other)
window.Fetch_and_op(x, y, other, 1.0, MPI.REPLACE)
window.Unlock(other)
comm.Barrier()
assert np.frombuffer(window, "i4")[1] == other
status.source = 1.5
assert status.source == 1 and str(MPI.INT.Pack_size(1.5, comm)) == "4"
window.Free()

# Integers in lists; no texts.
for wrong in (
    lambda: comm.Bcast([y, 1.0, MPI.INT]),
    lambda: comm.Allgatherv(x, [np.zeros(2, "i4"), [1.0, 1.0], MPI.INT]),
    lambda: comm.Reduce_scatter(np.zeros(2, "i4"), y, [1.0, 1.0]),
    lambda: comm.Create_cart([2.0]),
    lambda: comm.Get_group().Incl([0.0]),
    lambda: comm.Send(x, "0"),
    lambda: comm.bcast(1, None),
    lambda: comm.Split("0"),
):
    comm = MPI.COMM_WORLD.Dup()
    try:
        wrong()
    except TypeError:
        continue
    raise AssertionError("not refused")
print("well")
"""


def test_numbers_that_are_floats(tmp_path):
    done = run_code(tmp_path, FLOATS, "--no-prefix")
    assert done.stdout.splitlines() == ["well"] * 2, done.stderr
