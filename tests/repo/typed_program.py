"""A user's program that makes every public call, with the type that each has: for mypy --strict and pyright.

It runs, too, in two ranks.
"""

import asyncio
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import shmring
from shmring import ANY_SOURCE, ANY_TAG, Comm, SharedArray, Status, Transfer, Work, model
from shmring.methods.compression import ErrorFeedback, PowerSGD, Reduction
from shmring.methods.local import GradientAccumulation, LocalSGD
from shmring.methods.precision import LossScaler, MasterWeights
from shmring.methods.server import ParameterServer
from shmring.methods.sharded import SGD, Adam, ShardedOptimizer
from shmring.methods.sparse import SparseAllReduce, all_reduce_pairs
from shmring.methods.stepwise import Stepwise

Floats = NDArray[np.float64]


def reduce(comm: Comm, x: Floats) -> float:
    assert_type(comm.all_reduce(3.0), float)
    assert_type(comm.all_reduce(2, "max", timeout=30), int)
    assert_type(comm.all_reduce(np.float32(1), shmring.Op.PROD), np.float32)
    assert_type(comm.all_reduce(3.0, async_op=True, priority=1), Work[float])
    assert_type(comm.reduce(1j, root=0), complex | None)
    assert_type(comm.scan(1), int)
    assert_type(comm.exscan(1), int | None)
    assert_type(comm.all_reduce(x, async_op=True, algorithm="ring"), Work[None])
    comm.all_reduce(x, "avg", out=np.empty_like(x), wire="native")
    comm.reduce(x, "max")
    comm.scan(x)
    comm.exscan(x)
    comm.broadcast(x, root=comm.size - 1)
    comm.all_reduce_many([x, np.ones(3, np.int32)])
    assert_type(comm.all_reduce_many([x], async_op=True), Work[None])
    return comm.all_reduce(float(x.sum()), "max")


def move(comm: Comm, x: Floats, out: Floats) -> Floats:
    assert_type(comm.all_gather(x), Floats)
    assert_type(comm.all_gather(x, async_op=True), Work[Floats])
    assert_type(comm.all_gather(x, out=out), Floats)
    assert_type(comm.all_gather(b"two"), NDArray[Any])
    assert_type(comm.gather(x), Floats | None)
    assert_type(comm.gather(x, async_op=True).result(), Floats | None)
    assert_type(comm.reduce_scatter(x), Floats)
    assert_type(comm.all_to_all(x), Floats)
    assert_type(comm.scatter(x if comm.rank == 0 else None, like=np.empty(2)), Floats)
    comm.scatter(np.ones((comm.size, 2))) if comm.rank == 0 else comm.scatter(like=np.empty(2))
    lists: Sequence[Floats] = [x[: comm.rank], x]
    assert_type(comm.all_gather_v(x), list[Floats])
    assert_type(comm.gather_v(x), list[Floats] | None)
    assert_type(comm.scatter_v(lists if comm.rank == 0 else None, like=x), Floats)
    assert_type(comm.all_to_all_v(lists, async_op=True), Work[list[Floats]])
    comm.barrier()
    plan = comm.plan("all_gather", x)
    plan()
    return comm.all_gather(x)


def decide_later(comm: Comm, x: Floats, is_async: bool) -> None:
    works = [comm.all_reduce(x, async_op=is_async), comm.broadcast(x, async_op=is_async)]
    works += [comm.barrier(async_op=is_async), comm.all_reduce_many([x], async_op=is_async)]
    for work in works:
        if work is not None:
            work.wait()
    gathered = comm.all_gather(x, async_op=is_async)
    assert (gathered.result() if isinstance(gathered, Work) else gathered).shape == (comm.size, *x.shape)
    pieces = comm.gather_v(x, async_op=is_async)
    assert_type(pieces, list[NDArray[Any]] | Work[list[NDArray[Any]] | None] | None)
    if isinstance(pieces, Work):
        pieces.wait()
    assert_type(comm.all_to_all(x, out=np.empty_like(x), async_op=is_async), Floats | Work[Floats])


async def overlap(comm: Comm, x: Floats) -> Floats:
    work: Work[Floats] = comm.all_gather(x, async_op=True)
    assert_type(work.done(), bool)
    assert_type(work.fileno(), int)
    work.wait(30)
    return await work


def exchange(comm: Comm, x: Floats) -> int:
    other = 1 - comm.rank
    received: Transfer[Status] = comm.irecv(x, ANY_SOURCE, ANY_TAG)
    sent: Transfer[None] = comm.isend(x.copy(), other, tag=1)
    sent.wait()
    status = received.wait()
    assert_type(status, Status)
    assert_type(status.dtype, str | None)
    assert_type(comm.sendrecv(x, other, np.empty_like(x), other), Status)
    assert_type(comm.iprobe(tag=9), Status | None)
    if comm.rank == 0:
        comm.send(x, dest=1)
        comm.send_object({"of": comm.rank}, dest=1)
    else:
        assert_type(comm.probe(source=0).nbytes, int)
        assert_type(comm.recv(x, source=0), Status)
        assert_type(comm.recv_object(with_status=True), tuple[Any, Status])
    assert_type(comm.gather_object(x), list[Any] | None)
    names: list[str] = comm.all_gather_object(str(comm.rank))
    comm.broadcast_object(names)
    comm.scatter_object(names)
    return status.source + status.tag + status.count


def share(comm: Comm, x: Floats) -> SharedArray:
    assert_type(comm.empty(3), Floats)
    assert_type(comm.zeros((2, 3), np.float32), NDArray[np.float32])
    assert_type(comm.full(3, 7, "int8"), NDArray[Any])
    assert_type(comm.copy_of(x), Floats)
    with comm.arena(1 << 20, smallest_nbytes=4096) as arena:
        assert_type(arena, shmring.Arena)
        comm.all_reduce(x * 2)
    assert_type(arena.used_nbytes, int)
    memory = shmring.Memory.of(np.ones(3))
    if memory is not None:
        assert_type(memory.shape, tuple[int])
        comm.all_reduce(memory)
    array = comm.shared(4, "int64", locks=1)
    with array.lock(0):
        array[0] += 1
    array.fence()
    array.put([1], 1)
    array.accumulate([2], 1)
    array.get(out=array.get())
    array.fetch_and_add(3, 1)
    return array


def group(comm: Comm, color: int | None) -> None:
    assert_type(comm.split(color), Comm | None)
    assert_type(comm.split(None), None)
    with comm.split(0) as whole, comm.dup() as other:
        assert_type(whole, Comm)
        assert_type(whole.parent_ranks, tuple[int, ...] | None)
        other.wire, other.linger_s, other.timeout_s = "fp16", 1e-4, 10
        assert_type(other.stats()["calls"], int)
    first = comm.group([0])
    if first is not None:
        first.close()
    with comm.trace(Path(f"typed-{comm.size}.json")) as trace:
        assert_type(trace.is_running, bool)


def train(comm: Comm, x: Floats) -> None:
    bucketer = shmring.Bucketer(comm, op="avg")
    bucketer.add(x)
    bucketer.wait()
    assert_type(ErrorFeedback(PowerSGD()).all_reduce(comm, x, async_op=False), Reduction | None)
    optimizer = ShardedOptimizer(comm, [x], Adam(lr=0.1), stage=2)
    optimizer.add(x)
    optimizer.step()
    assert_type(LocalSGD(comm, [x], every=2).step(), bool)
    assert_type(GradientAccumulation(comm, [x], every=1).add([x]), bool)
    assert_type(LossScaler(comm).unscale([x]), bool)
    MasterWeights([x.astype(np.float16)]).store()
    SparseAllReduce(comm)(x)
    assert_type(all_reduce_pairs(comm, np.array([1]), x[:1], 4)[0], NDArray[np.int64])
    with ParameterServer(comm, x, SGD(0.1)) as server:
        server.step(x, x)
    with Stepwise(comm) as steps:
        steps.all_reduce(x, algorithm="tree")


def fail(comm: Comm) -> None:
    other = comm.dup()
    if comm.rank == 1:
        other.abort("enough")
    try:
        other.barrier()
    except shmring.Aborted as error:
        assert_type(error.reason, str | None)
        assert_type(error.where, tuple[str, ...])
    except (shmring.RankFailed, shmring.Timeout, shmring.Mismatch, shmring.Closed) as error:
        assert_type(error.rank, int | None)
    with other.shrink(timeout=30) as left:
        assert_type(left.epoch, int)


def program(comm: Comm) -> int:
    x = np.arange(4.0)
    reduce(comm, x)
    comm.run_steps(move, comm, x, np.empty((comm.size, 4)))
    decide_later(comm, x, comm.size > 1)
    decide_later(comm, x, False)
    asyncio.run(overlap(comm, x))
    exchange(comm, x)
    share(comm, x)
    group(comm, 0)
    train(comm, np.ones(4))
    fail(comm)
    return comm.size


def produce(ring: shmring.Ring) -> None:
    ring.put(np.ones(3), timeout=30)


if __name__ == "__main__":
    assert_type(shmring.spawn(program, 2, timeout=float(sys.argv[1])), list[int])
    assert_type(shmring.share(np.ones(3)), Floats)
    assert_type(shmring.share([1, 2], copy=None), NDArray[Any])
    assert_type(shmring.shared_empty(3), Floats)
    assert_type(shmring.shared_zeros((2, 3), np.int8, writable=True), NDArray[np.int8])
    with shmring.Ring(1 << 16) as ring:
        multiprocessing.Process(target=produce, args=[ring]).start()
        ring.get(timeout=30)
    with shmring.Broadcast(1 << 16, readers=1, drop=True) as one_to_many:
        one_to_many.put_object({"a": np.ones(3)}, timeout=30)
        one_to_many.get_object(timeout=30)
        assert_type((one_to_many.lost, one_to_many.readers, one_to_many.nbytes), tuple[int, int, int])
    with shmring.init(shmring.world(1), rank=0, timeout=30) as alone:
        assert_type(alone.size, int)
    assert_type(model.ring(1e6, 4).seconds(model.Link(1e-6, 1e9)), float)
    assert_type(shmring.host_id() + shmring.__version__, str)
