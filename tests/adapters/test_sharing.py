"""Pools whose large arrays travel in shared memory: `pools.Executor`, and joblib's backend."""

import concurrent.futures
import gc
import multiprocessing
import os
import pickle
import resource
import tempfile
import threading
import time

import numpy as np
import pytest
from ranks import until_there

import shmring
from shmring._arrays import passing
from shmring.adapters.pools import Executor

LARGE = 1 << 18  # items of 8 bytes, twice the least size
NO_PICKLE = AttributeError, pickle.PicklingError  # of a function in a function; the latter from 3.14 on


class Holder:
    """An object with an array."""

    def __init__(self, array):
        self.array = array


def change(holder):
    """Write to the argument, which no other process may see, and return what a pool has to pickle."""
    holder["deep"][0].array += 1
    return {"same": holder["deep"][0], "sum": float(holder["deep"][0].array.sum()), "is": is_shared(holder)}


def is_shared(holder):
    base = holder["deep"][0].array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return hasattr(base, "region")


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(("count", "shared"), [(10, False), (LARGE, True)])
def test_arguments_and_results_are_as_in_any_pool(method, count, shared):
    x = np.full(count, 2.0)
    with Executor(2, mp_context=multiprocessing.get_context(method)) as pool:
        futures = [pool.submit(change, {"deep": [Holder(x)]}) for _ in range(4)]
        x[:] = 7  # after submit, so without effect
        for future in futures:
            found = future.result()
            assert found["sum"] == 3 * count
            assert found["is"] == shared
            assert (found["same"].array == 3).all()
            found["same"].array[:] = 0  # as writable as any result


def add(x, y):
    return x + y


def test_light_arguments_are_those_of_submit_as_well():
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    with Executor(1) as pool:
        futures = [pool.submit(add, x, y) for y in (1, np.float32(2), x)]
        x[:] = 7  # after submit, so without effect
        results = [future.result() for future in futures]
        assert [float(result[1, 2]) for result in results] == [6, 7, 10]
        assert results[0].flags.f_contiguous
        assert results[0].flags.writeable
        assert pool.submit(add, "a", "b").result() == "ab"
        assert pool.submit(add, [1], [2]).result() == [1, 2]
        large = pool.submit(add, np.zeros(LARGE // 2 - 1), np.ones((3, LARGE // 2 - 1))).result()
        assert large.shape == (3, LARGE // 2 - 1)
        with pytest.raises(TypeError, match="unsupported operand"):
            pool.submit(add, 1, None).result()


def seen(*args):
    """Describe arrays as a worker sees them, also those in lists."""
    arrays = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
    return [
        (array is arrays[0], array.flags.writeable, array.flags.c_contiguous, array.tolist())
        for array in arrays
    ]


@pytest.mark.parametrize("least_nbytes", [100, 1 << 20])
def test_arrays_arrive_as_in_any_pool_whatever_their_size(least_nbytes):
    x = np.arange(60.0).reshape(3, 20)
    x.flags.writeable = False
    tasks = [(x, x), ([x, x],), (x[:, :2], [x[:, :2]]), (x.T[::2], x.T[::2])]
    context = multiprocessing.get_context("fork")
    with Executor(1, least_nbytes=least_nbytes, mp_context=context) as pool:
        found = [pool.submit(seen, *task).result() for task in tasks]
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert found == [pool.submit(seen, *task).result() for task in tasks]


def fill(array):
    array[:] = 5


def first_of(row):
    return int(row["a"])


def test_short_arrays_from_the_least_size_on_are_shared_too():
    shared = shmring.share(np.zeros(1000), writable=True)
    with Executor(1, least_nbytes=100) as pool:
        pool.submit(fill, shared).result()
        assert (shared == 5).all()
        table = np.zeros(3, [("a", "i8")])
        future = pool.submit(first_of, table[0])  # a view
        table["a"] = 7
        assert future.result() == 0


def test_an_initializer_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="callable"):
        Executor(1, initializer=5)


def note_start(notes, value):
    notes.append(value)


NOTES = []


def noted(array):
    return NOTES[-1], np.concatenate([array, array])


def test_initializers_are_called_and_results_are_shared():
    with Executor(1, initializer=note_start, initargs=(NOTES, 5), least_nbytes=100) as pool:
        assert pool.submit(noted, np.ones(5)).result()[0] == 5
        assert is_shared({"deep": [Holder(pool.submit(noted, np.ones(50)).result()[1])]})
        assert not is_shared({"deep": [Holder(pool.submit(noted, np.ones(5)).result()[1])]})


def test_map_chunks_errors_and_keywords():
    with Executor(2, least_nbytes=100) as pool:
        results = list(
            pool.map(np.add, [np.full(100, i) for i in range(10)], [np.ones(100)] * 10, chunksize=3)
        )
        assert [int(result[5]) for result in results] == list(range(1, 11))
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result()
        assert pool.submit(sorted, [2, 1], reverse=False).result() == [1, 2]
        with pytest.raises(NO_PICKLE, match=r"pickle|local object"):
            pool.submit(lambda: None)


@pytest.mark.parametrize("count", [3, LARGE])
def test_shared_arrays_are_not_copied_again(count):
    array = shmring.share(np.zeros(count), writable=True)
    with Executor(1) as pool:
        pool.submit(np.copyto, array, 4).result()
    assert (array == 4).all()


STATE = []


def keep(array):
    STATE[:] = [array]


def step():
    STATE[0][:] += 1
    return STATE[0]


def submit_behind(pool, path, large):
    """Submit tasks behind one that ends its worker once there is a file."""
    return [pool.submit(end_when_there, path), *(pool.submit(np.sum, large) for _ in range(9))]


def cancel(pool, large):
    with tempfile.TemporaryDirectory() as folder:
        futures = submit_behind(pool, os.path.join(folder, "go"), large)
        waiting = threading.Thread(target=let_go_once_cancelled, args=(folder, futures[-1]))
        waiting.start()
        pool.shutdown(cancel_futures=True)
        waiting.join()
        assert futures[-1].cancelled()


def break_pool(pool, large):
    with tempfile.TemporaryDirectory() as folder:
        futures = submit_behind(pool, os.path.join(folder, "go"), large)
        let_go(folder)
        with pytest.raises(concurrent.futures.BrokenExecutor):
            futures[-1].result()


def let_go_once_cancelled(folder, future):
    while not future.cancelled():
        time.sleep(0.005)
    let_go(folder)


def let_go(folder):
    open(os.path.join(folder, "go"), "w").close()


def end_when_there(path):
    until_there(path)
    os._exit(1)


def send_what_cannot_be_pickled(pool, large):
    with pytest.raises(NO_PICKLE, match=r"pickle|local object"):
        pool.submit(np.sum, large, lambda: None)


def submit_after_the_end(pool, large):
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(np.sum, large)


def fail_before_all_is_loaded(pool, large):
    with pytest.raises(ZeroDivisionError):
        pool.submit(np.sum, [FailsLoaded(), large]).result()


class FailsLoaded:
    def __reduce__(self):
        return divmod, (1, 0)


@pytest.mark.parametrize(
    "lose", [cancel, break_pool, send_what_cannot_be_pickled, submit_after_the_end, fail_before_all_is_loaded]
)
def test_what_no_worker_loads_is_freed(lose):
    before = memory_of(os.getpid())
    large = np.zeros(LARGE)
    shared = shmring.share(large)
    with Executor(1, keep_nbytes=0) as pool:
        lose(pool, [large, shared])
    del pool
    gc.collect()
    assert memory_of(os.getpid()) - before < 2 * large.nbytes  # of `shared`
    assert not shared.any()
    del shared
    time.sleep(0.01)
    shmring.share(0)  # looks for pickles that were loaded
    assert memory_of(os.getpid()) <= before


def test_what_came_from_a_pool_is_copied_when_it_is_sent():
    with Executor(1, least_nbytes=100) as executor:
        x = executor.submit(np.zeros, 1000).result()
        executor.submit(np.copyto, x, 5).result()
        assert not x.any()
        future = executor.submit(np.add, x, 0)
        x += 7
        assert not future.result().any()
        executor.submit(keep, x).result()
        states = [executor.submit(step).result() for _ in range(3)]
        assert [int(state[0]) for state in states] == [8, 9, 10]
        assert all(is_shared({"deep": [Holder(state)]}) for state in states)
        queue = multiprocessing.SimpleQueue()
        queue.put(x[:3])
        assert not np.shares_memory(queue.get(), x)
        with pytest.raises(ValueError, match="not one that"):
            shmring.share(x, copy=False)


def test_results_arrive_from_workers_that_end_after_each_task():
    context = multiprocessing.get_context("spawn")
    with Executor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for value in range(3):
            assert (pool.submit(np.full, LARGE, value).result() == value).all()


def test_there_may_be_more_arrays_than_descriptors():
    """Both among the results that the caller keeps and among the arguments that no worker has loaded yet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
    count, args = 100, {"least_nbytes": 1000, "mp_context": multiprocessing.get_context("fork")}
    try:
        with Executor(1, **args) as pool:
            arrays = [np.full((20, 10), n, order="F") for n in range(count)]
            results = list(pool.map(np.negative, arrays))
            taken = list(pool.map(len, [np.full(200, n) for n in range(count)], chunksize=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(array[3, 4]) for array in results] == [-n for n in range(count)]
    assert all(array.flags.f_contiguous and array.flags.writeable for array in results)
    assert taken == [200] * count


def test_kept_memory_stays_within_its_bound_and_goes_with_the_pool():
    gc.collect()
    before = memory_of(os.getpid())
    with Executor(1, keep_nbytes=LARGE * 8 + 4096) as pool:
        for value in range(20):
            assert (pool.submit(np.positive, np.full(LARGE, value)).result() == value).all()
        gc.collect()
        assert memory_of(os.getpid()) - before <= 2 * (LARGE * 8 + 8192)
    assert memory_of(os.getpid()) <= before


def test_what_an_executor_keeps_ends_with_it():
    gc.collect()  # Executors of other tests
    before, context = shmring.keep_shared(4096), multiprocessing.get_context("fork")
    first, second = Executor(1, keep_nbytes=1 << 20), Executor(1, keep_nbytes=1 << 16)
    assert passing._reuse_limit_nbytes() == 1 << 20
    first.shutdown()
    assert passing._reuse_limit_nbytes() == 1 << 16
    assert shmring.keep_shared(8192) == 4096
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(passing._reuse_limit_nbytes()))
    child.start()
    assert receiver.poll(20)
    assert receiver.recv() == 8192  # the pool is its parent's
    child.join()
    second.shutdown()
    second.shutdown()
    assert passing._reuse_limit_nbytes() == 8192
    Executor(1)  # dropped
    gc.collect()
    assert passing._reuse_limit_nbytes() == 8192
    with pytest.raises(TypeError, match="None"):
        Executor(1, keep_nbytes=None)
    assert shmring.keep_shared(before) == 8192


def memory_of(pid):
    """Return the bytes of the shared memory that a process has descriptors of."""
    total = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:shmring"):
            total += os.stat(path).st_blocks * 512
    return total


def test_joblib_shares_both_ways():
    joblib = pytest.importorskip("joblib")
    from shmring.adapters.joblib import register_joblib

    register_joblib(least_nbytes=1000)
    signals = [np.full(1000, float(i)) for i in range(6)]
    parallel = joblib.Parallel(2, backend="shmring")
    results = parallel(joblib.delayed(lambda x: (x + 1, shared_here(x)))(x) for x in signals)
    parallel([joblib.delayed(np.copyto)(results[0][0], 5)])  # a result is copied when it is sent
    for value, (result, shared) in enumerate(results):
        assert shared
        assert shared_here(result)
        assert (result == value + 1).all()
    with pytest.raises(ZeroDivisionError):
        parallel(joblib.delayed(divmod)(1, 0) for _ in range(2))
    with joblib.parallel_config("shmring", n_jobs=2):
        assert joblib.Parallel()(joblib.delayed(abs)(-i) for i in range(4)) == [0, 1, 2, 3]
    del result, results
    assert shmring.keep_shared(0) > 0


def shared_here(x):
    return is_shared({"deep": [Holder(x)]})
