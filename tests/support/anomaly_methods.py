"""Cases of anomaly_case: the methods of the literature, and objects that make calls when they are made."""

import numpy as np
from anomaly_case import LARGE, SMALL, call, case, same

from shmring.methods import compression, sparse
from shmring.methods.local import LocalSGD
from shmring.methods.pipeline import Pipeline
from shmring.methods.reducers import ReductionServers
from shmring.methods.rules import SGD
from shmring.methods.server import ParameterServer
from shmring.methods.sharded import ShardedOptimizer


def _compressed(place, compressor):
    comm = place.comm
    x = np.full(LARGE, comm.rank + 1, "f4")
    yield call(compressor.all_reduce, comm, x, "sum")
    assert np.allclose(x, sum(range(1, comm.size + 1)), rtol=0.1), x[:5]


@case
def compressed_fp16(place):
    yield from _compressed(place, compression.FP16())


@case
def compressed_int8(place):
    yield from _compressed(place, compression.Int8())


@case
def compressed_topk(place):
    comm, compressor = place.comm, compression.TopK(0.01)
    x = np.zeros(LARGE, "f4")
    x[7] = comm.rank + 1
    yield call(compressor.all_reduce, comm, x, "sum")
    assert np.allclose(x[7], sum(range(1, comm.size + 1))), x[:8]


@case
def compressed_powersgd(place):
    comm, compressor = place.comm, compression.PowerSGD(1)
    x = np.full((200, 200), comm.rank + 1, "f4")
    yield call(compressor.all_reduce, comm, x, "sum")
    assert np.allclose(x, sum(range(1, comm.size + 1)), rtol=0.01), x[:2]


@case(ends_in_python=True)
def sparse_all_reduce(place):
    comm = place.comm
    reduce = sparse.SparseAllReduce(comm)
    x = np.zeros(LARGE, "f4")
    x[1000:1010] = comm.rank + 1
    yield call(reduce, x)
    same(x[995:1015], [0] * 5 + [sum(range(1, comm.size + 1))] * 10 + [0] * 5)


@case(ends_in_python=True)
def sparse_pairs(place):
    comm = place.comm
    indices = np.array([comm.rank, 100])
    found, sums = yield call(sparse.all_reduce_pairs, comm, indices, np.ones(2, "f4"), LARGE)
    same(found, [*range(comm.size), 100])
    same(sums, [1] * comm.size + [comm.size])


# ---- objects that make calls when they are made ------------------------------------------------------------


@case(ends_in_python=True)
def sharded_optimizer(place):
    optimizer = yield call(ShardedOptimizer, place.comm, [np.ones(8, "f4")], SGD(lr=0.5), stage=2)
    optimizer.add(np.ones(8, "f4"))
    optimizer.step()
    same(optimizer.params[0], np.full(8, 0.5 if optimizer.steps else 1))


@case(ends_in_python=True)
def local_sgd(place):
    local = yield call(LocalSGD, place.comm, [np.full(8, place.comm.rank, "f4")], 1)
    assert local.step()
    same(local.params[0], np.zeros(8))


@case(ends_in_python=True)
def parameter_server(place):
    server = yield call(ParameterServer, place.comm, np.ones(8, "f4"), SGD(lr=0.5))
    out = np.empty(8, "f4")
    server.step(np.ones(8, "f4"), out)
    server.close()
    assert (out < 1).all()


@case(ends_in_python=True)
def reduction_servers(place):
    servers = yield call(ReductionServers, place.comm, [place.comm.size - 1])
    if servers.is_reducer:
        assert servers.serve() == 1
    else:
        x = np.ones(SMALL, "f4")
        servers.all_reduce(x)
        same(x, np.full(SMALL, place.comm.size - 1))
    servers.close()


@case(ends_in_python=True)
def pipeline_run(place):
    comm = place.comm
    receives = ((2,), "f4") if comm.rank else None
    pipeline = Pipeline(
        comm,
        lambda weights, x: (weights[0] * x, x),
        lambda weights, x, gradient: (weights[0] * gradient, [x * gradient]),
        [np.ones(2, "f4")],
        SGD(lr=0.25),
        micro_batches=4,
        receives=receives,
    )
    yield call(
        pipeline.run, 1, inputs=lambda i: np.ones(2, "f4"), loss_gradient=lambda i, y: np.ones(2, "f4")
    )
    same(pipeline.batches, 1)
