"""A communicator under every way to start processes: fork, spawn, forkserver, pools, threads, plain
programs."""

import concurrent.futures
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

import shmring

PROGRAM = """
import pickle, sys
import numpy as np, shmring
world, rank = pickle.loads(bytes.fromhex(sys.argv[1])), int(sys.argv[2])
with shmring.init(world, rank=rank, timeout=30) as comm:
    x = comm.full(5000, rank + 1.0)
    comm.all_reduce(x)
    print(x[0], comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node, comm.num_nodes)
"""
FROM_ENVIRONMENT = """
import numpy as np, shmring
for _ in range(2):
    with shmring.init(timeout=30) as comm:
        x = np.full(5000, comm.rank + 1.0)
        comm.all_reduce(x)
        print(x[0], comm.rank, comm.size)
"""


def work(world, rank):
    """A rank's whole life: calls through every path, checked."""
    with shmring.init(world, rank=rank, timeout=30) as comm:
        for count in (1, 500, 50_000):
            x = np.full(count, rank + 1, "f4")
            comm.all_reduce(x)
            assert (x == sum(range(1, comm.size + 1))).all()
        shared = comm.copy_of(np.full(50_000, rank + 1, "f4"))
        comm.all_reduce(shared)
        comm.broadcast(x, comm.size - 1)
        comm.barrier()
    return float(shared.sum())


def put_work(world, rank, queue):
    queue.put((rank, work(world, rank)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_however_they_start(method):
    context, world = multiprocessing.get_context(method), shmring.world(3)
    queue = context.SimpleQueue()
    processes = [context.Process(target=put_work, args=(world, rank, queue)) for rank in range(3)]
    for process in processes:
        process.start()
    found = dict(queue.get() for _ in processes)
    for process in processes:
        process.join()
    assert found == dict.fromkeys(range(3), 300000.0)
    assert [process.exitcode for process in processes] == [0] * 3


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pool_of_processes_used_twice(method):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        for _ in range(2):
            assert list(pool.map(work, [shmring.world(2)] * 2, range(2))) == [150_000.0] * 2


def test_joblib_and_loky():
    joblib = pytest.importorskip("joblib")
    world = shmring.world(2)
    try:
        found = joblib.Parallel(2, backend="loky")(joblib.delayed(work)(world, rank) for rank in range(2))
    finally:
        joblib.externals.loky.get_reusable_executor().shutdown(wait=True)
    assert found == [150_000.0] * 2


def test_threads():
    world, found = shmring.world(4), [None] * 4

    def run(rank):
        found[rank] = work(world, rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [500_000.0] * 4


def run_programs(*commands):
    processes = [
        subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True, env=environ)
        for command, environ in commands
    ]
    return [process.communicate(timeout=40)[0] for process in processes]


def test_programs_that_got_the_world_in_a_pickle():
    world = pickle.dumps(shmring.world(2)).hex()
    outputs = run_programs(*(((PROGRAM, world, str(rank)), None) for rank in range(2)))
    assert outputs == [f"3.0 {rank} 2 {rank} 2 0 1\n" for rank in range(2)]


def test_programs_that_are_reported_by_the_environment():
    variables = {"SHMRING_SIZE": "2", "SHMRING_KEY": os.urandom(16).hex(), "SHMRING_ADDR": "127.0.0.1"}
    variables["SHMRING_PORT"] = str(20_000 + os.getpid() % 20_000)
    commands = [
        ((FROM_ENVIRONMENT,), os.environ | variables | {"SHMRING_RANK": str(rank)}) for rank in range(2)
    ]
    assert run_programs(*commands) == [f"3.0 {rank} 2\n" * 2 for rank in range(2)]


def test_without_a_launcher_it_is_a_world_of_one():
    with shmring.init() as comm:
        x = np.arange(10.0)
        comm.all_reduce(x, "avg")
        comm.broadcast(x)
        comm.barrier()
        assert (x == np.arange(10.0)).all()
        assert (comm.rank, comm.size, comm.num_nodes) == (0, 1, 1)


def test_a_world_is_used_up_by_its_first_meeting():
    world = shmring.world(1)
    shmring.init(world, rank=0).close()
    with pytest.raises(shmring.Error, match=r"join|used|once"):
        shmring.init(world, rank=0)


def test_init_says_which_argument_is_missing():
    with pytest.raises(ValueError, match="rank"):
        shmring.init(shmring.world(2))
    with pytest.raises(ValueError, match="world"):
        shmring.init(rank=1)


def test_several_communicators_in_one_process():
    comms = [shmring.init() for _ in range(5)]
    arrays = [comm.full(3000, 1.0) for comm in comms]
    for comm, array in zip(comms, arrays, strict=True):
        comm.all_reduce(array)
        comm.close()
    assert all((array == 1.0).all() for array in arrays)
