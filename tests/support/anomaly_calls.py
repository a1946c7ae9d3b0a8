"""Cases of anomaly_case: the calls of communicators, rings and shared arrays."""

import contextlib
import functools
import mmap
import os
import pickle
import tempfile
import time
from fractions import Fraction

import new_ranks
import numpy as np
from anomaly_case import LARGE, LATE_S, SMALL, call, case, nothing, numbers, same, total

import shmring
from shmring._arrays import passing

# ---- collectives -------------------------------------------------------------------------------------------


def _reduced(place, x, **keywords):
    comm = place.comm
    yield call(comm.all_reduce, x, **keywords)
    same(x, total(x.size, comm.size))


@case
def all_reduce_small(place):
    yield from _reduced(place, numbers(SMALL, place.comm.rank))


@case
def all_reduce_late(place):
    place.be_late()
    yield from _reduced(place, numbers(SMALL, place.comm.rank))


@case(is_first=True)
def all_reduce_first(place):
    yield from _reduced(place, numbers(LARGE, place.comm.rank))


@case
def all_reduce_large(place):
    yield from _reduced(place, numbers(LARGE, place.comm.rank))


@case
def all_reduce_large_late(place):
    place.comm.barrier()
    place.be_late()
    yield from _reduced(place, numbers(LARGE, place.comm.rank))


@case
def all_reduce_priority(place):
    yield from _reduced(place, numbers(LARGE, place.comm.rank), priority=1)


@case(one_host=True)
def all_reduce_ring(place):
    yield from _reduced(place, numbers(LARGE, place.comm.rank), algorithm="ring")


@case
def all_reduce_zero_copy(place):
    x = place.comm.empty(LARGE, "f4")
    x[:] = numbers(LARGE, place.comm.rank)
    yield from _reduced(place, x)


@case
def all_reduce_behind(place):
    comm, x, y = place.comm, numbers(LARGE, place.comm.rank), numbers(SMALL, place.comm.rank)
    place.be_late()
    work = comm.all_reduce(x, async_op=True)
    yield call(comm.all_reduce, y)
    same(y, total(SMALL, comm.size))
    work.wait()
    same(x, total(LARGE, comm.size))


@case
def all_reduce_async(place):
    comm, x = place.comm, numbers(LARGE, place.comm.rank)
    work = yield call(comm.all_reduce, x, async_op=True)
    work.wait()
    same(x, total(LARGE, comm.size))


@case
def work_wait(place):
    comm, x = place.comm, numbers(LARGE, place.comm.rank)
    place.be_late()
    work = comm.all_reduce(x, async_op=True)
    yield call(work.wait)
    same(x, total(LARGE, comm.size))


@case
def all_reduce_many(place):
    comm = place.comm
    xs = [numbers(count, comm.rank) for count in (3, 1, 700, LARGE)]
    yield call(comm.all_reduce_many, xs)
    for x in xs:
        same(x, total(x.size, comm.size))


@case
def all_reduce_many_async(place):
    comm = place.comm
    xs = [numbers(count, comm.rank) for count in (3, 1, 700, LARGE)]
    work = yield call(comm.all_reduce_many, xs, async_op=True)
    work.wait()
    for x in xs:
        same(x, total(x.size, comm.size))


@case
def reduce(place):
    comm, x = place.comm, numbers(LARGE, place.comm.rank)
    yield call(comm.reduce, x, root=1)
    same(x, total(LARGE, comm.size) if comm.rank == 1 else numbers(LARGE, comm.rank))


@case
def broadcast_small(place):
    x = numbers(SMALL, place.comm.rank)
    yield call(place.comm.broadcast, x)
    same(x, numbers(SMALL, 0))


@case
def broadcast_large(place):
    x = numbers(LARGE, place.comm.rank)
    yield call(place.comm.broadcast, x)
    same(x, numbers(LARGE, 0))


@case
def scan(place):
    x = numbers(LARGE, place.comm.rank)
    yield call(place.comm.scan, x)
    same(x, total(LARGE, place.comm.rank + 1))


@case
def exscan(place):
    comm, x = place.comm, numbers(SMALL, place.comm.rank)
    yield call(comm.exscan, x)
    same(x, total(SMALL, comm.rank) if comm.rank else numbers(SMALL, 0))


@case
def reduce_scatter(place):
    comm = place.comm
    x = numbers(1000 * comm.size, comm.rank)
    part = yield call(comm.reduce_scatter, x)
    same(part, total(x.size, comm.size)[comm.rank * 1000 : (comm.rank + 1) * 1000])


@case
def scatter(place):
    comm = place.comm
    x = numbers(1000 * comm.size, 0) if comm.rank == 0 else None
    part = yield call(comm.scatter, x, like=np.empty(1000, "f4"))
    same(part, numbers(1000 * comm.size, 0)[comm.rank * 1000 : (comm.rank + 1) * 1000])


@case
def gather(place):
    comm = place.comm
    found = yield call(comm.gather, numbers(LARGE, comm.rank))
    if comm.rank == 0:
        same(found, np.stack([numbers(LARGE, rank) for rank in range(comm.size)]))


@case
def all_gather(place):
    comm = place.comm
    found = yield call(comm.all_gather, numbers(LARGE, comm.rank))
    same(found, np.stack([numbers(LARGE, rank) for rank in range(comm.size)]))


@case
def all_to_all(place):
    comm = place.comm
    x = np.stack([numbers(1000, comm.rank, other + 1) for other in range(comm.size)])
    found = yield call(comm.all_to_all, x)
    same(found, np.stack([numbers(1000, other, comm.rank + 1) for other in range(comm.size)]))


@case
def barrier(place):
    yield call(place.comm.barrier)


# ---- pieces that differ in length --------------------------------------------------------------------------


def _check_list(found, wanted):
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        same(got, want)


@case
def all_gather_v_small(place):
    comm = place.comm
    found = yield call(comm.all_gather_v, numbers(comm.rank + 1, comm.rank))
    _check_list(found, [numbers(rank + 1, rank) for rank in range(comm.size)])


@case
def all_gather_v(place):
    comm = place.comm
    found = yield call(comm.all_gather_v, numbers(5000 * (comm.rank + 1), comm.rank))
    _check_list(found, [numbers(5000 * (rank + 1), rank) for rank in range(comm.size)])


@case
def all_gather_v_async(place):
    comm = place.comm
    work = yield call(comm.all_gather_v, numbers(5000 * (comm.rank + 1), comm.rank), async_op=True)
    _check_list(work.result(), [numbers(5000 * (rank + 1), rank) for rank in range(comm.size)])


@case
def gather_v(place):
    comm = place.comm
    found = yield call(comm.gather_v, numbers(5000 * (comm.rank + 1), comm.rank))
    if comm.rank == 0:
        _check_list(found, [numbers(5000 * (rank + 1), rank) for rank in range(comm.size)])


@case
def scatter_v(place):
    comm = place.comm
    xs = [numbers(5000 * (rank + 1), rank) for rank in range(comm.size)] if comm.rank == 0 else None
    found = yield call(comm.scatter_v, xs, like=np.empty(0, "f4"))
    same(found, numbers(5000 * (comm.rank + 1), comm.rank))


@case
def all_to_all_v(place):
    comm = place.comm
    xs = [numbers(3000 + other, comm.rank, other + 1) for other in range(comm.size)]
    found = yield call(comm.all_to_all_v, xs)
    _check_list(found, [numbers(3000 + comm.rank, other, comm.rank + 1) for other in range(comm.size)])


# ---- objects -----------------------------------------------------------------------------------------------


class Blob:
    """Bytes beside the pickle. No array: NumPy's dtypes do not pickle correctly when memory runs out."""

    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return Blob, (pickle.PickleBuffer(self.data),)


def thing(rank):
    """Return an object that Python code of the standard library pickles and unpickles."""
    return {"rank": rank, "part": Fraction(rank, 7), "blob": Blob(bytes([rank]) * 9000)}


def check_thing(found, rank):
    assert found["rank"] == rank, found["rank"]
    assert found["part"] == Fraction(rank, 7), found["part"]
    assert bytes(found["blob"].data) == bytes([rank]) * 9000


@case
def broadcast_object(place):
    found = yield call(place.comm.broadcast_object, thing(place.comm.rank))
    check_thing(found, 0)


@case
def all_gather_object(place):
    found = yield call(place.comm.all_gather_object, thing(place.comm.rank))
    for rank, each in enumerate(found):
        check_thing(each, rank)
    assert len(found) == place.comm.size


@case
def gather_object(place):
    found = yield call(place.comm.gather_object, thing(place.comm.rank))
    if place.comm.rank == 0:
        for rank, each in enumerate(found):
            check_thing(each, rank)


@case
def scatter_object(place):
    comm = place.comm
    found = yield call(
        comm.scatter_object, [thing(rank) for rank in range(comm.size)] if comm.rank == 0 else None
    )
    check_thing(found, comm.rank)


# ---- plans -------------------------------------------------------------------------------------------------


@case
def plan(place):
    comm, x = place.comm, numbers(LARGE, place.comm.rank)
    planned = yield call(comm.plan, "all_reduce", x)
    planned()
    same(x, total(LARGE, comm.size))


@case
def plan_called(place):
    comm, x = place.comm, numbers(LARGE, place.comm.rank)
    planned = comm.plan("all_reduce", x)
    planned()
    x[:] = numbers(LARGE, comm.rank)
    yield call(planned)
    same(x, total(LARGE, comm.size))


# ---- messages: from rank 0 to rank 1 -----------------------------------------------------------------------


def _message(place, count):
    comm = place.comm
    place.be_late()
    if comm.rank == 0:
        yield call(comm.send, numbers(count, 7), 1, 3)
    elif comm.rank == 1:
        x = np.zeros(count, "f4")
        yield call(comm.recv, x, 0, 3)
        same(x, numbers(count, 7))
    else:
        yield nothing


@case(is_first=True)
def message_first(place):
    yield from _message(place, SMALL)


@case
def message_small(place):
    yield from _message(place, SMALL)


@case
def message_large(place):
    yield from _message(place, 500_000)


@case
def sendrecv(place):
    comm = place.comm
    got = np.zeros(LARGE, "f4")
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    yield call(comm.sendrecv, numbers(LARGE, comm.rank), after, got, before)
    same(got, numbers(LARGE, before))


@case
def isend_irecv(place):
    comm = place.comm
    if comm.rank == 0:
        transfer = yield call(comm.isend, numbers(LARGE, 7), 1, 3)
        transfer.wait()
    elif comm.rank == 1:
        x = np.zeros(LARGE, "f4")
        transfer = yield call(comm.irecv, x, 0, 3)
        transfer.wait()
        same(x, numbers(LARGE, 7))
    else:
        yield nothing


@case
def transfer_wait(place):
    comm = place.comm
    place.be_late()
    x = numbers(LARGE, 7) if comm.rank == 0 else np.zeros(LARGE, "f4")
    if comm.rank < 2:
        transfer = comm.isend(x, 1, 3) if comm.rank == 0 else comm.irecv(x, 0, 3)
        yield call(transfer.wait)
        same(x, numbers(LARGE, 7))
    else:
        yield nothing


@case
def probe(place):
    comm = place.comm
    place.be_late()
    if comm.rank == 0:
        yield call(comm.send, numbers(SMALL, 7), 1, 3)
    elif comm.rank == 1:
        status = yield call(comm.probe, 0, 3)
        assert status.count == SMALL
        x = np.zeros(SMALL, "f4")
        comm.recv(x, 0, 3)
        same(x, numbers(SMALL, 7))
    else:
        yield nothing


@case
def message_object(place):
    comm = place.comm
    if comm.rank == 0:
        yield call(comm.send_object, thing(7), 1, 3)
    elif comm.rank == 1:
        found = yield call(comm.recv_object, 0, 3)
        check_thing(found, 7)
    else:
        yield nothing


# ---- groups ------------------------------------------------------------------------------------------------


def check_group(group, size):
    x = numbers(SMALL, group.rank)
    group.all_reduce(x)
    same(x, total(SMALL, size))
    y = numbers(LARGE, group.rank)
    group.all_reduce(y)
    same(y, total(LARGE, size))
    group.close()


@case
def split(place):
    comm = place.comm
    group = yield call(comm.split, 0, -comm.rank)
    assert group.rank == comm.size - 1 - comm.rank
    check_group(group, comm.size)


@case
def group(place):
    """Members that could not make the group do not repeat the call: the other ranks have their result."""
    comm = place.comm
    before = comm.stats()["calls"]

    def make():
        try:
            return comm.group([1, 0])
        except BaseException as error:
            comm.iprobe(tag=99)  # raises if the communicator is over
            if comm.stats()["calls"] == before:
                raise
            return error.with_traceback(None)

    found = yield make
    failed = comm.all_gather_object(isinstance(found, BaseException))
    assert failed[:2] in ([False] * 2, [True] * 2), failed
    if comm.rank >= 2:
        assert found is None
    elif not failed[0]:
        check_group(found, 2)


@case
def dup(place):
    found = yield call(place.comm.dup)
    check_group(found, place.comm.size)


# ---- shared arrays -----------------------------------------------------------------------------------------


def _check_shared(comm, x):
    x[:] = numbers(x.size, comm.rank)
    comm.all_reduce(x)
    same(x, total(x.size, comm.size))


@case
def empty(place):
    x = yield call(place.comm.empty, LARGE, "f4")
    same(x, np.zeros(LARGE, "f4"))
    _check_shared(place.comm, x)


@case
def zeros(place):
    x = yield call(place.comm.zeros, LARGE, "f4")
    same(x, np.zeros(LARGE, "f4"))
    _check_shared(place.comm, x)


@case
def full(place):
    x = yield call(place.comm.full, LARGE, 3.0, "f4")
    same(x, np.full(LARGE, 3, "f4"))
    _check_shared(place.comm, x)


@case
def copy_of(place):
    x = yield call(place.comm.copy_of, numbers(LARGE, place.comm.rank))
    same(x, numbers(LARGE, place.comm.rank))
    _check_shared(place.comm, x)


@case
def arena(place):
    made = yield call(place.comm.arena, 1 << 20)
    with made:
        x = np.empty(LARGE, "f4")
    _check_shared(place.comm, x)


@case
def arena_array(place):
    made = place.comm.arena(1 << 20)
    before = np.empty(LARGE, "f4")

    def make():
        with made:
            return np.zeros(LARGE, "f4")

    x = yield make
    with made:
        before = before + 1  # in ordinary memory, if the call has left its hook
        assert made.used_nbytes == 2 * 40 * 4096, made
    _check_shared(place.comm, x)


@case
def empty_after_free(place):
    """The call unmaps blocks that all ranks have freed."""
    x = place.comm.empty(LARGE, "f4")
    y = place.comm.empty(LARGE, "f4")
    del x
    place.comm.barrier()
    z = yield call(place.comm.empty, LARGE, "f4")
    _check_shared(place.comm, y)
    _check_shared(place.comm, z)


def _own_array():
    nbytes = 10 * mmap.PAGESIZE
    fd = os.memfd_create("of another library")
    os.ftruncate(fd, nbytes)
    mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
    os.close(fd)
    return np.frombuffer(mapping, "f4")


def _memory_of(array):
    return shmring.Memory(array.ctypes.data, array.nbytes, "uint8", owner=array)


@case
def adopt(place):
    x = _own_array()
    x[:] = numbers(x.size, place.comm.rank)
    adoption = yield call(place.comm.adopt, _memory_of(x))
    same(x, numbers(x.size, place.comm.rank))
    _check_shared(place.comm, x)
    adoption.release()
    _check_shared(place.comm, x)


@case
def release(place):
    x = _own_array()
    adoption = place.comm.adopt(_memory_of(x))
    _check_shared(place.comm, x)
    yield call(adoption.release)
    same(x, total(x.size, place.comm.size))
    place.comm.barrier()
    _check_shared(place.comm, x)


@case(one_host=True)
def shared(place):
    comm = place.comm
    x = yield call(comm.shared, LARGE, "f4", locks=1)
    x[comm.rank] = comm.rank + 1
    x.fence()
    same(x[: comm.size], np.arange(comm.size) + 1)


@case(one_host=True, ends_in_python=True)
def fence(place):
    comm = place.comm
    x = comm.shared(LARGE, "f4")
    x[comm.rank] = comm.rank + 1
    yield call(x.fence)
    same(x[: comm.size], np.arange(comm.size) + 1)


@case(one_host=True)
def lock(place):
    comm = place.comm
    x = comm.shared(LARGE, "f4", locks=1)
    lock = x.lock(0)
    comm.barrier()
    if place.is_faulty:
        time.sleep(LATE_S / 3)
    else:
        with lock:
            time.sleep(LATE_S)
    yield call(lock.__enter__)
    x[0] += 1
    lock.__exit__(None, None, None)
    x.fence()
    same(x[0], comm.size)


@case(one_host=True)
def get(place):
    comm = place.comm
    x = comm.shared(LARGE, "f4")
    x.accumulate(0, 1.0)
    x.fence()
    found = yield call(x.get, 0)
    same(found, comm.size)


@case(one_host=True)
def put(place):
    comm = place.comm
    x = comm.shared(LARGE, "f4")
    yield call(x.put, comm.rank, comm.rank + 1.0)
    x.fence()
    found = x.get(slice(0, comm.size))
    same(found, np.arange(comm.size) + 1)


# ---- between processes without ranks -----------------------------------------------------------------------


@case(ends_in_python=True)
def share(place):
    x = numbers(LARGE, place.comm.rank)
    same((yield call(shmring.share, x)), x)
    shmring.shared_zeros(1)  # frees what an exception in a destructor has left


@functools.cache
def _sent(rank):
    """Return an array of this process that stays shared, and how it is pickled."""
    x = shmring.share(numbers(LARGE, rank))
    return x, passing.reduce_array(x)


@case(ends_in_python=True)
def load_shared(place):
    """Load an array of the next rank, not by a pickler: NumPy's dtypes crash it when memory runs out."""
    comm, following = place.comm, (place.comm.rank + 1) % place.comm.size
    load, arguments = comm.all_gather_object(_sent(comm.rank)[1])[following]
    same((yield call(load, *arguments)), numbers(LARGE, following))
    shmring.shared_zeros(1)  # as above


def _put_and_get(make, x):
    with make() as ring:
        ring.put(x)
        return ring.get()


@case(ends_in_python=True)
def ring(place):
    x = numbers(SMALL, place.comm.rank)
    same((yield call(_put_and_get, shmring.Ring, x)), x)


@case(ends_in_python=True)
def broadcast_ring(place):
    x = numbers(SMALL, place.comm.rank)
    same((yield call(_put_and_get, functools.partial(shmring.Broadcast, readers=1), x)), x)


# ---- calls of one rank alone -------------------------------------------------------------------------------


@case
def stats(place):
    found = yield call(place.comm.stats)
    assert found["calls"] >= 0


@case
def iprobe(place):
    found = yield call(place.comm.iprobe)
    assert found is None


@case
def trace(place):
    with tempfile.TemporaryDirectory() as folder:
        found = yield call(place.comm.trace, f"{folder}/trace.json")
        place.comm.barrier()
        found.stop()


@case
def trace_stop(place):
    with tempfile.TemporaryDirectory() as folder:
        found = place.comm.trace(f"{folder}/trace.json")
        place.comm.barrier()
        yield call(found.stop)


# ---- the end -----------------------------------------------------------------------------------------------


@case(is_last=True)
def close(place):
    yield call(place.comm.close)


@case(is_last=True)
def close_with_pending(place):
    x = numbers(LARGE, place.comm.rank)
    place.be_late()
    work = place.comm.all_reduce(x, async_op=True)
    yield call(place.comm.close)
    work.wait()
    same(x, total(LARGE, place.comm.size))


@case(is_last=True)
def shrink(place):
    """All ranks go on, or all but the faulty one."""
    comm = place.comm
    with contextlib.suppress(shmring.Error):
        comm.barrier()  # so that all ranks have reached this point
        if comm.rank == 0:
            comm.abort("for shrink")
        while True:
            comm.barrier()
    left = yield call(comm.shrink)
    assert left.size >= comm.size - 1
    x = numbers(SMALL, left.rank)
    left.all_reduce(x)
    same(x, total(SMALL, left.size))
    left.close()


@functools.cache
def _new_ranks(_pid):
    return new_ranks.NewRanks()


@case(is_last=True, may_end=True)
def grow(place):
    """All ranks and a new one go on, or the communicator ends on all ranks."""
    comm = place.comm
    size, joining = comm.size + 1, _new_ranks(os.getpid()) if comm.rank == 0 else None
    try:
        larger = yield call(comm.grow, 1, joining and joining.invite)
        assert larger.size == size
        x = new_ranks.values_of(larger.rank)
        larger.all_reduce(x)
        same(x, sum(map(new_ranks.values_of, range(size))))
        larger.close()
        assert joining is None or joining.end(wait_s=5.0) == new_ranks.RIGHT
    finally:
        if joining is not None:
            assert joining.end() != new_ranks.WRONG
