"""Settings of `mpi4py.rc` for errors and receives, waits that last, and ends of jobs."""

import time

import pytest
from running import run_code

LEFT = """
import sys, time
import numpy as np
from shmring import MPI

comm, how = MPI.COMM_WORLD, sys.argv[1]
if how == "free":
    comm = comm.Dup()
if comm.rank == 0:
    comm.Isend(np.arange(1 << 21), 1)   # larger than the ring; nobody waits for it
    if how == "finalize":
        comm.Barrier()
        MPI.Finalize()
    elif how == "free":
        comm.Free()
else:
    if how == "finalize":
        comm.Barrier()
    time.sleep(0.5)
    x = np.zeros(1 << 21, "i8")
    comm.Recv(x, 0)
    assert (x == np.arange(1 << 21)).all()
    print("received")
"""


@pytest.mark.parametrize("how", ["exit", "finalize", "free"])
def test_a_large_message_that_nobody_waits_for_arrives(tmp_path, how):
    done = run_code(tmp_path, LEFT.replace("sys.argv[1]", repr(how)), "--no-prefix")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "received\n"


BUFFERED = """
import numpy as np
from shmring import MPI

comm = MPI.COMM_WORLD
other = comm.Dup()
if comm.rank == 1:
    other.Free()   # and so receives nothing
    comm.Barrier()
    assert comm.recv(source=0) == "received"
else:
    comm.Barrier()
    memory = bytearray(1 << 25)
    MPI.Attach_buffer(memory)
    other.Bsend(np.zeros(1 << 21), 1)   # larger than the ring
    comm.bsend("received", 1)           # each buffered send drops those before it that are complete
    for end in (MPI.{end}, MPI.Detach_buffer):
        try:
            assert end() is memory
        except MPI.Exception as error:
            print(type(error.__cause__).__name__, error.Get_error_class() == MPI.ERR_PROC_FAILED)
    print("detached")
"""


@pytest.mark.parametrize("end", ["Flush_buffer", "Iflush_buffer", "Detach_buffer"])
def test_the_error_of_a_failed_buffered_send_is_raised_once(tmp_path, end):
    done = run_code(tmp_path, BUFFERED.format(end=end), "--no-prefix")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["RankFailed True", "detached"], done.stderr


POLICY = """
import mpi4py
mpi4py.rc(errors={policy!r}, irecv_bufsz=100)
from mpi4py import MPI

comm = MPI.COMM_WORLD
assert comm.Get_errhandler() == comm.Dup().Get_errhandler() == MPI.{handler}
try:
    request = MPI.COMM_SELF.irecv(source=0)
    MPI.COMM_SELF.send(bytes(1000), 0)
    request.wait()
except MPI.Exception as error:
    print(error.Get_error_class() == MPI.ERR_TRUNCATE)
"""


@pytest.mark.parametrize(
    ("policy", "handler", "code"),
    [("exception", "ERRORS_RETURN", 0), ("fatal", "ERRORS_ARE_FATAL", 14), ("abort", "ERRORS_ABORT", 14)],
)
def test_rc_sets_the_error_handler_and_the_room_of_irecv(tmp_path, policy, handler, code):
    program = POLICY.format(policy=policy, handler=handler)
    done = run_code(tmp_path, program, "--mpi4py", "--no-prefix", nprocs=1)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("True\n" if code == 0 else "")


def test_an_unknown_policy_is_refused(tmp_path):
    code = "import mpi4py; mpi4py.rc.errors = 'none'; from mpi4py import MPI"
    done = run_code(tmp_path, code, "--mpi4py", "--no-prefix", nprocs=1)
    assert done.returncode != 0
    assert "mpi4py.rc.errors is 'none'; it is one of exception, abort, fatal, default" in done.stderr


LEVEL = """
from mpi4py import MPI
names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
print([name for name in names if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread()])
"""


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({}, "MULTIPLE"),
        ({"MPI4PY_RC_THREAD_LEVEL": "Funneled"}, "FUNNELED"),
        ({"MPI4PY_RC_THREAD_LEVEL": "serialized", "MPI4PY_RC_THREADS": "0"}, "SINGLE"),
    ],
)
def test_settings_give_the_support_for_threads(tmp_path, settings, level):
    done = run_code(tmp_path, LEVEL, "--no-prefix", "--mpi4py", nprocs=1, **settings)
    assert done.stdout.splitlines() == [f"['{level}']"], done.stderr


def test_another_support_for_threads_is_refused(tmp_path):
    done = run_code(tmp_path, LEVEL, "--no-prefix", "--mpi4py", nprocs=1, MPI4PY_RC_THREAD_LEVEL="some")
    assert done.returncode == 1
    assert "mpi4py.rc.thread_level is 'some'; it is one of single, funneled, serialized" in done.stderr


# A thread that does not call MPI changes how a receive waits, unless the program says that one thread calls.
IDLE_THREAD = """
import threading
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from shmring.mpi4py.turns import Turns

turns = []
wait_for, repeat = Turns.wait_for, Turns.repeat
Turns.wait_for = lambda self, work: turns.append(1) or wait_for(self, work)
Turns.repeat = lambda self, *arguments: turns.append(1) or repeat(self, *arguments)
assert MPI.Init_thread(getattr(MPI, f"THREAD_{sys.argv[1]}")) == MPI.Query_thread()
event = threading.Event()
threading.Thread(target=event.wait).start()
MPI.COMM_WORLD.send(5, 0)
assert MPI.COMM_WORLD.recv() == 5
event.set()
print(len(turns))
MPI.Finalize()
"""


@pytest.mark.parametrize(("level", "count"), [("MULTIPLE", 3), ("SERIALIZED", 0), ("FUNNELED", 0)])
def test_threads_take_turns_only_if_several_call(tmp_path, level, count):
    done = run_code(tmp_path, IDLE_THREAD, "--no-prefix", "--mpi4py", nprocs=1, arguments=[level])
    assert done.stdout.splitlines() == [str(count)], done.stderr


FINALIZED = """
import atexit
from mpi4py import rc
rc({settings})
atexit.register(lambda: print(MPI.Is_finalized()))  # runs after the functions that are registered later
from mpi4py import MPI
if not MPI.Is_initialized():
    MPI.Init()
"""


@pytest.mark.parametrize(
    ("settings", "is_finalized"),
    [
        ("", True),
        ("finalize=False", False),
        ("initialize=False", False),
        ("initialize=False, finalize=True", True),
    ],
)
def test_settings_say_whether_the_end_finalizes(tmp_path, settings, is_finalized):
    code = FINALIZED.format(settings=settings)
    done = run_code(tmp_path, code, "--no-prefix", "--mpi4py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(is_finalized)] * 2, done.stderr


ATTRIBUTES = """
from mpi4py import MPI
key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: print(value, MPI.Is_finalized()))
MPI.COMM_SELF.Set_attr(key, "deleted")
"""


@pytest.mark.parametrize("end", ["MPI.Finalize()", ""])
def test_attributes_of_comm_self_are_deleted_before_the_end(tmp_path, end):
    done = run_code(tmp_path, ATTRIBUTES + end, "--no-prefix", "--mpi4py", nprocs=1)
    assert done.stdout.splitlines() == ["deleted False"], done.stderr


def test_variables_give_the_protocol_and_the_threshold_of_pickles(tmp_path):
    code = """
    import pickletools
    from mpi4py import MPI

    def protocol(data):
        return next(argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "PROTO")

    assert MPI.pickle.PROTOCOL == MPI.Pickle().PROTOCOL == protocol(MPI.pickle.dumps([1])) == 3
    assert MPI.Pickle(protocol=4).PROTOCOL == 4
    MPI.pickle.PROTOCOL = MPI.pickle.THRESHOLD = None
    assert (MPI.pickle.PROTOCOL, MPI.pickle.THRESHOLD) == (3, 1000)
    small, large = bytearray(999), bytearray(1000)
    import pickle
    data, left_out = MPI.pickle.dumps_oob([pickle.PickleBuffer(small), pickle.PickleBuffer(large)])
    assert [len(part) for part in left_out] == [1000]
    """
    variables = {"MPI4PY_PICKLE_PROTOCOL": "3", "MPI4PY_PICKLE_THRESHOLD": "1000"}
    done = run_code(tmp_path, code, "--no-prefix", "--mpi4py", nprocs=1, **variables)
    assert done.returncode == 0, done.stderr
    done = run_code(tmp_path, code, "--mpi4py", nprocs=1, MPI4PY_PICKLE_PROTOCOL="new")
    assert "MPI4PY_PICKLE_PROTOCOL is 'new'; it must be an integer" in done.stderr


WAITING = """
import sys, time
from mpi4py import MPI

comm = MPI.COMM_WORLD
comm.Barrier()
comm.sendrecv(0, 1 - comm.rank, source=1 - comm.rank)
begin_s = time.process_time()
if comm.rank == 0:
    time.sleep({seconds})
{call}
used_s = time.process_time() - begin_s
if comm.rank == 1:
    print(used_s < 0.05 * {seconds})  # 0.5 % on a quiet machine; a rank of MPI uses all of it
"""


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "call", ["comm.Barrier()", "comm.send(0, 1) if comm.rank == 0 else comm.recv()", "comm.allreduce(1)"]
)
def test_a_rank_that_waits_uses_hardly_any_cpu(tmp_path, call, seconds):
    done = run_code(tmp_path, WAITING.format(call=call, seconds=seconds), "--mpi4py", "--no-prefix")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


ENDING = """
import time
from mpi4py import MPI

comm = MPI.COMM_WORLD
comm.Barrier()
if comm.rank == 1:
    print("at", time.monotonic(), flush=True)
    {end}
comm.recv(source=1)
"""


@pytest.mark.parametrize(
    ("end", "code", "shown"),
    [
        ('raise ValueError("no such case")', 1, "ValueError: no such case"),
        ("comm.Abort(7)", 7, "Abort(7) on rank 1"),
        ("raise SystemExit(3)", 3, ""),
    ],
)
def test_a_rank_that_ends_early_ends_the_job(tmp_path, end, code, shown):
    done = run_code(tmp_path, ENDING.format(end=end), "--mpi4py", "--no-prefix", nprocs=3)
    ended_s = time.monotonic()
    assert done.returncode == code, done.stderr
    assert shown in done.stderr
    assert ended_s - float(done.stdout.split()[1]) < 30  # MPI would wait for ever


def test_an_exit_code_of_more_than_eight_bits_is_a_failure(tmp_path):
    code = "from mpi4py import MPI; MPI.COMM_WORLD.Abort(256)"
    assert run_code(tmp_path, code, "--mpi4py", "--no-prefix", nprocs=1).returncode == 1


BEGIN_AND_END = """
import threading
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
from mpi4py.bench import pingpong, ringtest

def begin():
    MPI.Init()
    assert MPI.Is_thread_main()

thread = threading.Thread(target=begin)
thread.start()
thread.join()
assert not MPI.Is_thread_main()
assert ringtest(MPI.COMM_WORLD, ["-l", "0"], verbose=False) < 10
found = pingpong(MPI.COMM_WORLD, ["-m", "0", "-n", "2", "-l", "1"], verbose=False)
assert [nbytes for nbytes, *_ in found] == [0, 1, 2]
if MPI.COMM_WORLD.rank == 0:
    MPI.COMM_WORLD._ref.comm.abort("enough")
try:
    MPI.Finalize()
except MPI.Exception as error:
    assert "enough" in str(error), error
    print("told")
"""


def test_the_thread_that_begins_and_an_error_at_the_end(tmp_path):
    done = run_code(tmp_path, BEGIN_AND_END, "--no-prefix", "--mpi4py")
    assert (done.returncode, done.stdout) == (0, "told\ntold\n"), done.stderr
