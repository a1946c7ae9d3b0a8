"""The settings of `mpi4py.rc` that act on errors and receives, and messages that are under way at the end."""

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
