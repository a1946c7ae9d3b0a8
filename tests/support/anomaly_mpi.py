"""Cases of anomaly_case: the calls of the stand-in for mpi4py."""

import contextlib
import os

import numpy as np
from anomaly_calls import check_group, check_thing, thing
from anomaly_case import LARGE, case, nothing, numbers, same


def _mpi(comm):
    """A communicator of MPI on this one, and a function that makes a call of it with shmring's errors."""
    from shmring.mpi4py import rc

    rc.initialize = False
    from shmring import MPI
    from shmring.mpi4py.comm import Communicator
    from shmring.mpi4py.messages import handle

    def call_of(method, *arguments, **keywords):
        def run():
            try:
                return method(*arguments, **keywords)
            except MPI.Exception as error:
                raise error.__cause__ from None

        return run

    secret = comm.broadcast_object(os.urandom(16))
    return handle(MPI.Intracomm, Communicator(comm.rank, tuple(range(comm.size)), secret, comm)), call_of


@case
def mpi_broadcast(place):
    mpi, call_of = _mpi(place.comm)
    found = yield call_of(mpi.bcast, "short" if mpi.rank == 0 else None)
    assert found == "short", found


@case
def mpi_broadcast_long(place):
    mpi, call_of = _mpi(place.comm)
    found = yield call_of(mpi.bcast, "long" * 100 if mpi.rank == 0 else None)
    assert found == "long" * 100, found


@case
def mpi_all_gather_long(place):
    mpi, call_of = _mpi(place.comm)
    found = yield call_of(mpi.allgather, str(mpi.rank) * (1 if mpi.rank == 0 else 100))
    assert found == ["0", *(str(rank) * 100 for rank in range(1, mpi.size))], found


@case(ends_in_python=True)
def mpi_create_group(place):
    mpi, call_of = _mpi(place.comm)
    members = mpi.Get_group().Incl([1, 0])
    group = yield call_of(mpi.Create_group if mpi.rank < 2 else nothing, *[members] * (mpi.rank < 2))
    if group is not None:
        assert group.rank == 1 - mpi.rank
        check_group(group._ref.comm, 2)
        group.Free()


@case
def mpi_message(place):
    mpi, call_of = _mpi(place.comm)
    x = numbers(LARGE, mpi.rank)
    if mpi.rank == 0:
        yield call_of(mpi.Send, x, 1, 3)
    elif mpi.rank == 1:
        yield call_of(mpi.Recv, x, 0, 3)
        same(x, numbers(LARGE, 0))
    else:
        yield nothing


@case
def mpi_message_object(place):
    mpi, call_of = _mpi(place.comm)
    if mpi.rank == 0:
        yield call_of(mpi.send, thing(7), 1, 3)
    elif mpi.rank == 1:
        found = yield call_of(mpi.recv, source=0, tag=3)
        check_thing(found, 7)
    else:
        yield nothing


@case(ends_in_python=True)
def mpi_gather(place):
    mpi, call_of = _mpi(place.comm)
    found = yield call_of(mpi.gather, "x" * (1 + 100 * mpi.rank), 1)
    assert found == (["x" * (1 + 100 * rank) for rank in range(mpi.size)] if mpi.rank == 1 else None), found


@case(ends_in_python=True)
def mpi_all_to_all(place):
    mpi, call_of = _mpi(place.comm)
    found = yield call_of(mpi.alltoall, [(mpi.rank, rank) for rank in range(mpi.size)])
    assert found == [(rank, mpi.rank) for rank in range(mpi.size)], found


@case(ends_in_python=True)
def mpi_fold(place):
    mpi, call_of = _mpi(place.comm)
    from shmring import MPI

    x = np.zeros(1, MPI.DOUBLE_INT._ref.dtype)
    x["value"], x["place"] = mpi.rank % 2, mpi.rank
    y = np.zeros_like(x)
    yield call_of(mpi.Allreduce, [x, 1, MPI.DOUBLE_INT], [y, 1, MPI.DOUBLE_INT], MPI.MAXLOC)
    assert y[0].item() == (1.0, 1), y


@case(ends_in_python=True)
def mpi_exchange(place):
    mpi, call_of = _mpi(place.comm)
    after, before, y = (mpi.rank + 1) % mpi.size, (mpi.rank - 1) % mpi.size, np.zeros(LARGE, "f4")
    yield call_of(mpi.Sendrecv, numbers(LARGE, mpi.rank), after, 3, y, before, 3)
    same(y, numbers(LARGE, before))


@case
def mpi_exchange_objects(place):
    mpi, call_of = _mpi(place.comm)
    after, before = (mpi.rank + 1) % mpi.size, (mpi.rank - 1) % mpi.size
    found = yield call_of(mpi.sendrecv, thing(mpi.rank), after, 3, None, before, 3)
    check_thing(found, before)


@case(ends_in_python=True)
def mpi_neighbors(place):
    mpi, call_of = _mpi(place.comm)
    from shmring import MPI
    from shmring.mpi4py.intracomm import Cartesian
    from shmring.mpi4py.messages import handle

    mpi._ref.topology = Cartesian([mpi.size], [True], mpi.rank)
    y = np.zeros(2 * 5, "f4")
    yield call_of(handle(MPI.Cartcomm, mpi._ref).Neighbor_allgather, numbers(5, mpi.rank), y)
    around = (mpi.rank - 1) % mpi.size, (mpi.rank + 1) % mpi.size
    same(y, np.concatenate([numbers(5, rank) for rank in around]))


@case(one_host=True)
def mpi_window_lock(place):
    mpi, _ = _mpi(place.comm)
    from shmring import MPI

    win = MPI.Win.Allocate(8, 8, comm=mpi)

    def add():
        try:
            win.Lock(0)
            win.Accumulate(np.ones(1), 0)
            win.Unlock(0)
        except BaseException:
            with contextlib.suppress(MPI.Exception):
                win.Unlock(0)
            raise

    try:
        yield add if place.is_faulty else nothing
        win._ref.comm.barrier()
        win.Lock(0)
        win.Unlock(0)
        if mpi.rank == 0:
            assert np.frombuffer(win.tomemory())[0] >= 1
    finally:
        win.Free()
