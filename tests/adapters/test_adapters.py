"""shmring.adapters: ranks in pools, joblib, Dask and Ray. Each engine really runs if it is installed."""

import concurrent.futures
import json
import sys
import textwrap
import threading

import pytest
from engines import assert_well, needs, output_of, start, write_script
from rendezvous import free_port

import shmring
from shmring._outcome import Failure
from shmring.adapters import _tasks

CALLS = """
    import os

    def total(comm, x):
        return sum(comm.all_gather_object(comm.rank + x))

    def fail(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.barrier()

    class Odd(Exception):
        def __init__(self, number, text):
            super().__init__(text)

    def fail_oddly(comm):
        if comm.rank == 1:
            raise Odd(5, "the cause")
        comm.barrier()

    def leave(comm):
        if comm.rank == 1:
            raise SystemExit(3)
        comm.barrier()

    def die(comm):
        if comm.rank == 1:
            os._exit(3)
        comm.barrier()
"""

# --- pools and joblib ---

POOLS = (
    CALLS
    + """
    import sys, time
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    from multiprocessing import get_context

    import shmring
    from shmring.adapters import pools

    def fail_before_a_collective(comm):
        try:
            if comm.rank == 2:
                raise KeyError("the cause")
            comm.all_reduce(1.0)
        finally:
            comm.gather_object(comm.rank)

    def give_up(comm):
        try:
            fail(comm)
        except shmring.Error:
            raise ValueError("giving up")

    class Unloadable:
        def __reduce__(self):
            return int, ("no number",)
        def __call__(self, comm):
            pass

    def failure_of(*arguments):
        try:
            pools.run(*arguments)
        except Exception as error:
            return error

    def run_within(comm):
        with ThreadPoolExecutor(1) as pool:
            return pools.run(pool, total, 1, comm.rank + 1)

    def run_at_the_same_time(pool):
        submit = pool.submit

        def submit_late(*task):
            time.sleep(0.02)  # the other threads submit meanwhile, if they may
            return submit(*task)

        pool.submit = submit_late
        with ThreadPoolExecutor(3) as callers:
            runs = [callers.submit(pools.run, pool, total, 2, x, timeout=20) for x in range(3)]
            assert [run.result() for run in runs] == [[1, 1], [3, 3], [5, 5]]
        del pool.submit

    def submit_in_vain(pool):
        # No worker waits any more for a rank that was never submitted.
        submit, left = pool.submit, [2]

        def submit_some(*call, **keywords):
            left[0] -= 1
            if left[0] < 0:
                raise BlockingIOError(11, "no process left")
            return submit(*call, **keywords)

        pool.submit = submit_some
        assert isinstance(failure_of(pool, total, 3), BlockingIOError)
        del pool.submit
        begin_s = time.monotonic()
        assert [pool.submit(abs, -1).result() for _ in range(6)] == [1] * 6
        assert pools.run(pool, total, 3, 10) == [33, 33, 33]  # on all workers
        assert time.monotonic() - begin_s < 15, "the workers waited for their timeout"

    def check(pool, can_die=True):
        assert pools.run(pool, total, 3, 10) == [33, 33, 33]
        submit_in_vain(pool)
        assert pools.run(pool, total, 2, 10) == [21, 21]  # fewer ranks than workers
        few = failure_of(pool, total, 4, 10)
        assert isinstance(few, ValueError) and "make it with max_workers=4" in str(few), few
        cause = failure_of(pool, fail, 3)
        assert isinstance(cause, KeyError) and cause.rank == 1, cause
        assert "Raised in rank 1 of 3" in cause.__notes__[0]
        cause = failure_of(pool, give_up, 3)
        assert isinstance(cause, KeyError) and cause.rank == 1, cause
        cause = failure_of(pool, fail_before_a_collective, 3)
        assert isinstance(cause, shmring.Mismatch), cause
        assert "Raised in rank 2 of 3" in cause.__notes__[-1], cause.__notes__
        odd = failure_of(pool, fail_oddly, 3)
        assert "the cause" in str(odd) and odd.rank == 1, odd
        run_at_the_same_time(pool)
        assert pools.run(pool, run_within, 2) == [[1], [2]]
        end = failure_of(pool, leave, 3)
        assert isinstance(end, shmring.RankFailed) and (end.rank, end.cause[:13]) == (1, "SystemExit: 3"), end
        assert "invalid literal" in str(failure_of(pool, Unloadable(), 3))
        assert isinstance(failure_of(pool, 5, 3), TypeError)
        assert "such as a ProcessPoolExecutor" in str(failure_of([], total, 3))
        if can_die:
            assert "ended with its process" in failure_of(pool, die, 3).__notes__[0]

    if __name__ == "__main__":
        {}
        print("well")
    """
)


@pytest.mark.parametrize(
    "pool",
    [
        "with ProcessPoolExecutor(3) as pool: check(pool)",
        "with ProcessPoolExecutor(3, get_context('spawn')) as pool: check(pool)",
        "with ThreadPoolExecutor(3) as pool: check(pool, can_die=False)",
        pytest.param("import loky; check(loky.get_reusable_executor(3))", marks=needs("loky")),
    ],
    ids=["fork", "spawn", "threads", "loky"],
)
def test_pools(tmp_path, pool):
    assert_well(start(sys.executable, write_script(tmp_path, POOLS.replace("{}", pool))))


JOBLIB = (
    CALLS
    + """
    import time
    from concurrent.futures import ThreadPoolExecutor

    import joblib
    from joblib.externals.loky.reusable_executor import _ReusablePoolExecutor
    from shmring.adapters import joblib as adapter

    def run_at_the_same_time():
        submit = _ReusablePoolExecutor.submit

        def submit_late(*task, **how):
            time.sleep(0.02)  # the other threads submit meanwhile, if they may
            return submit(*task, **how)

        _ReusablePoolExecutor.submit = submit_late
        with ThreadPoolExecutor(4) as callers:
            runs = [callers.submit(adapter.run, total, 2, x, timeout=20) for x in range(3)]
            runs.append(callers.submit(adapter.run, total, 3, 3, timeout=20))
            assert [run.result() for run in runs] == [[1, 1], [3, 3], [5, 5], [12, 12, 12]]
        _ReusablePoolExecutor.submit = submit

    if __name__ == "__main__":
        run_at_the_same_time()
        for x in range(20):  # joblib would put quick tasks into one batch
            assert adapter.run(total, 3, x) == [3 + 3 * x] * 3
        with joblib.parallel_config("threading"):
            assert adapter.run(total, 2, 1) == [3, 3]
        try:
            adapter.run(fail, 3)
        except KeyError as error:
            assert error.rank == 1 and "Raised in rank 1" in error.__notes__[-1]
        for backend in "loky", "multiprocessing":
            for function, text in (fail_oddly, "Odd: the cause"), (leave, "SystemExit: 3"):
                try:
                    with joblib.parallel_config(backend):
                        adapter.run(function, 2)
                except RuntimeError as error:
                    assert error.rank == 1 and text in str(error), error
        with joblib.parallel_config("sequential"):
            try:
                adapter.run(total, 2, 1)
            except ValueError as error:
                assert "joblib would run 1 task(s)" in str(error)
        print("well")
    """
)


@needs("joblib")
def test_joblib(tmp_path):
    assert_well(start(sys.executable, write_script(tmp_path, JOBLIB)))


# --- the collection of results ---


class FutureOfDask(concurrent.futures.Future):
    """A future whose result is lost with its worker: `result` then waits until the task is cancelled."""

    def add_done_callback(self, function):
        super().add_done_callback(lambda _: threading.Thread(target=function, args=(self,)).start())

    def result(self, timeout=None):
        found = super().result()
        return found if self.is_there else self.cancelled_later.result()

    def cancel(self):
        self.cancelled_later.cancel()
        return super().cancel()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_lost_worker_is_the_failure_of_its_rank(monkeypatch, has_ended):
    """Its task may have ended or not; another rank runs on."""
    monkeypatch.setattr(_tasks, "_POLL_S", 0.01)
    futures = [FutureOfDask() for _ in range(3)]
    for rank, future in enumerate(futures):
        future.is_there, future.cancelled_later = rank != 1, concurrent.futures.Future()
    futures[0].set_result(0)
    if has_ended:
        futures[1].set_result(1)
    consequence = Failure.of(shmring.RankFailed("rank 1 is gone", rank=1), 2)
    threading.Timer(0.2, futures[2].set_result, [consequence]).start()
    with pytest.raises(shmring.RankFailed, match="rank 1 ended: worker b is gone") as caught:
        _tasks.collect(futures, ["worker a", "worker b", "worker c"], lambda: [1])
    assert caught.value.rank == 1


# --- Dask ---

DASK = (
    CALLS
    + """
    import time
    from distributed import Client, LocalCluster, Nanny, SpecCluster, Scheduler
    import shmring
    from shmring.adapters import dask

    def total_at(comm, x):
        return total(comm, x), comm.num_nodes, os.environ.get("SHMRING_NODE")

    def die_later():
        time.sleep(1)
        os._exit(3)

    def workers_of_a(client):
        client.wait_for_workers(3)
        node = client.run(lambda: os.environ["SHMRING_NODE"])
        return [worker for worker in node if node[worker] == "a"]

    class Deadly:
        def __reduce__(self):
            os._exit(3)

    def return_deadly(comm):
        return Deadly() if comm.rank == 1 else comm.rank

    def failure_of(*arguments, **how):
        try:
            dask.run(*arguments, **how)
        except Exception as error:
            return error

    def nanny(node):
        host = {"a": "127.0.0.1", "b": "127.0.0.2"}[node]
        options = {"nthreads": 1, "host": host, "dashboard": False}
        return {"cls": Nanny, "options": {**options, "env": {"SHMRING_NODE": node}}}

    if __name__ == "__main__":
        scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard": False}}
        workers = {name: nanny(name[0]) for name in ("a0", "b0", "a1")}
        with SpecCluster(scheduler=scheduler, workers=workers) as cluster, Client(cluster) as client:
            own = workers_of_a(client)
            assert dask.run(client, total_at, 1, workers=own) == [(3, 1, "a")] * 2
            for how in {}, {"port": PORT}:
                assert sorted(dask.run(client, total_at, 1, **how)) == [(6, 2, "a"), (6, 2, "a"), (6, 2, "b")]
            later = client.submit(int, 5)
            assert dask.run(client, total_at, later, workers=own)[0][0] == 11

            nobody = failure_of(client, total_at, workers=["tcp://x:1"])
            assert "no worker has the address 'tcp://x:1'" in str(nobody)
            assert "named twice" in str(failure_of(client, total_at, workers=own[:1] * 2))
            cause = failure_of(client, fail)
            assert isinstance(cause, KeyError) and cause.rank == 1, cause
            odd = failure_of(client, fail_oddly)
            assert "Odd: the cause" in str(odd) and odd.rank == 1, odd
            gone = failure_of(client, die, workers=own)
            assert isinstance(gone, shmring.RankFailed) and gone.rank == 1, gone
            own = workers_of_a(client)  # Dask has started another
            lost = failure_of(client, return_deadly, workers=own)
            assert isinstance(lost, shmring.RankFailed) and lost.rank == 1, lost
            own = workers_of_a(client)
            ending = client.submit(die_later, workers=own[1:])
            gone = failure_of(client, total_at, 1, workers=own)
            assert isinstance(gone, shmring.RankFailed) and gone.rank == 1, gone
            assert len(dask.run(client, total_at, 1, workers=own[:1])) == 1  # it waits for rank 1 no longer
            ending.cancel()
            assert len(dask.run(client, total_at, 1, workers=workers_of_a(client))) == 2
        with LocalCluster(n_workers=2, processes=False, dashboard_address=None) as cluster:
            with Client(cluster) as client:  # ranks are threads
                assert dask.run(client, total_at, 1) == [(3, 1, None)] * 2
        print("well")
"""
)


@pytest.mark.slow
@needs("distributed")
def test_dask(tmp_path):
    assert_well(start(sys.executable, write_script(tmp_path, DASK.replace("PORT", str(free_port())))))


DASK_SHARING = """
    import numpy as np, os, shmring
    from distributed import Client, LocalCluster
    from shmring.adapters import dask

    def look(x):
        return float(x.sum()), hasattr(x.base.base, "region"), x.flags.writeable

    def change(x):
        x[0] = 7

    def double(x):
        return shmring.share(2 * x)

    if __name__ == "__main__":
        array = np.arange(1000.0)
        how = {"threads_per_worker": 1, "dashboard_address": None}
        with LocalCluster(2, **how) as cluster, Client(cluster) as client:
            first, second = client.scheduler_info()["workers"]
            dask.register_sharing(client)
            x = shmring.share(array, writable=True)
            given = client.scatter(x, workers=[first], hash=False)
            assert client.submit(look, given, workers=[first]).result() == (array.sum(), True, True)
            client.submit(change, given, workers=[first]).result()
            assert x[0] == 7  # the same memory
            x[0] = 0
            made = client.submit(double, given, workers=[first])
            assert client.submit(look, made, workers=[second]).result() == (2 * array.sum(), True, False)
            assert (made.result() == 2 * array).all()
            part = client.scatter(x[10:20], workers=[second], hash=False)
            assert client.submit(look, part, workers=[second]).result() == (array[10:20].sum(), True, True)
            sent = client.scatter(array, workers=[first], hash=False)  # ordinary arrays as before
            assert client.submit(look, sent, workers=[first]).result()[:2] == (array.sum(), False)
            cluster.scale(3)
            client.wait_for_workers(3)
            (third,) = set(client.scheduler_info()["workers"]) - {first, second}
            found = client.submit(look, made, workers=[third], pure=False).result()
            assert found == (2 * array.sum(), True, False)
        print("well")
    """


@needs("distributed")
def test_dask_passes_shared_arrays_as_descriptors(tmp_path):
    assert_well(start(sys.executable, write_script(tmp_path, DASK_SHARING)))


# --- Ray ---

RAY = """
    import os
    import numpy as np, ray, shmring
    from ray.util import collective
    from ray.util.collective.types import ReduceOp
    from shmring.adapters import ray as adapter

    try:
        import torch
    except ImportError:
        torch = None

    KINDS = [lambda values: np.array(values, "f4")]
    if torch:
        KINDS.append(lambda values: torch.tensor(values, dtype=torch.float64))
        KINDS.append(lambda values: torch.tensor(values, dtype=torch.bfloat16))

    @ray.remote(num_cpus=1)
    class Actor:
        def total(self, x):
            return sum(self.comm.all_gather_object(self.comm.rank + x)), self.comm.num_nodes

        def die(self):
            os._exit(3)

        def die_when_joining(self):
            shmring.init = lambda *_, **__: os._exit(3)

        def collectives(self, rank, group):
            for make in KINDS:
                self.check(rank, make, group)
            assert collective.get_rank(group) == rank
            collective.destroy_collective_group(group)
            return len(KINDS)

        def check(self, rank, make, group):
            def same(x, *values):
                assert [float(y) for y in x] == [float(value) for value in values], (rank, x, values)

            def others():
                return [make([0, 0]) for _ in range(3)]

            x = make([rank + 1, 2])
            collective.allreduce(x, group)
            same(x, 6, 6)
            x = make([rank + 1, 2])
            collective.allreduce(x, group, ReduceOp.PRODUCT)
            same(x, 6, 8)
            x = make([rank + 1, 2])
            collective.reduce(x, 1, group, ReduceOp.MAX)
            same(x, 3 if rank == 1 else rank + 1, 2)
            x = make([rank + 1, rank])
            collective.broadcast(x, 2, group)
            same(x, 3, 2)
            parts = others()
            collective.allgather(parts, make([rank, 5]), group)
            for other, part in enumerate(parts):
                same(part, other, 5)
            x = make([0, 0])
            collective.reducescatter(x, [make([part, rank]) for part in range(3)], group, ReduceOp.SUM)
            same(x, 3 * rank, 3)
            collective.barrier(group)
            for sender in range(3):  # to every other, of its host or not
                for receiver in {0, 1, 2} - {sender}:
                    if rank == sender:
                        collective.send(make([sender, receiver]), receiver, group)
                    elif rank == receiver:
                        x = make([7, 8])
                        collective.recv(x, sender, group)
                        same(x, sender, receiver)

    if __name__ == "__main__":
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        def actor(node=None):
            env = {"env_vars": {"SHMRING_NODE": node}} if node else {}
            return Actor.options(runtime_env=env).remote()

        actors, doomed = [actor() for _ in range(3)], Actor.options(num_cpus=0).remote()
        adapter.join(actors)
        assert ray.get([actor.total.remote(1) for actor in actors]) == [(6, 1)] * 3

        def check_collectives(group):
            adapter.register_backend(actors)
            adapter.register_backend(actors)
            collective.create_collective_group(actors, 3, [0, 1, 2], "SHMRING", group)
            done = [actor.collectives.remote(rank, group) for rank, actor in enumerate(actors)]
            assert ray.get(done) == [len(KINDS)] * 3

        check_collectives("one_host")
        try:
            adapter.join([*actors, actor(), actor()], timeout=2)
        except shmring.Timeout as error:
            assert "did not answer within 2 s" in str(error) and error.rank in (3, 4), error

        ray.get(doomed.die_when_joining.remote())
        try:
            adapter.join([*actors[:2], doomed])
            raise AssertionError("nothing was raised")
        except ray.exceptions.RayActorError:
            adapter.join(actors)  # which wait for the dead one no longer

        waiting = [actor.total.remote(1) for actor in actors[:2]]
        actors[2].die.remote()
        for call in waiting:
            try:
                ray.get(call)
                raise AssertionError("nothing was raised")
            except shmring.RankFailed as error:
                assert error.rank == 2
        for left in actors:
            ray.kill(left)
        actors = [actor("a"), actor("b"), actor("a")]
        for _ in range(2):  # what is there already is left
            adapter.join(actors, port=PORT)
            assert ray.get([actor.total.remote(1) for actor in actors]) == [(6, 2)] * 3
        check_collectives("two_hosts")
        ray.shutdown()
        print("well")
    """


@needs("ray")
@pytest.mark.limit(240)
def test_ray(tmp_path):
    assert_well(start(sys.executable, write_script(tmp_path, RAY.replace("PORT", str(free_port())))))


# --- the adapters themselves ---


def test_adapters_import_their_package_only_when_used():
    code = """
        import json, sys
        from shmring.adapters import dask, jax, joblib, keras, pools, ray, sklearn, vllm
        packages = "distributed", "jax", "joblib", "keras", "loky", "ray", "sklearn", "tensorflow", "torch"
        print(json.dumps([name for name in packages if name in sys.modules]))
        """
    assert json.loads(output_of(start(sys.executable, "-c", textwrap.dedent(code)))) == []


def test_the_class_that_needs_vllm_is_imported_only_when_used():
    code = """
        import sys
        sys.modules["torch"] = sys.modules["vllm"] = None
        from shmring.adapters import vllm
        for name in "MessageQueue", "no_such_name":
            try:
                getattr(vllm, name)
            except (ImportError, AttributeError) as error:
                print(type(error).__name__)
        """
    printed = output_of(start(sys.executable, "-c", textwrap.dedent(code)))
    assert printed.split() == ["ModuleNotFoundError", "AttributeError"]


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("distributed", "dask", "dask.run(None, print)"),
        ("jax", "jax", "jax.all_reduce(1, None)"),
        ("tensorflow", "keras", "keras.all_reduce_grads([], None)"),
        ("keras", "keras", "keras.average_metrics(None)"),
        ("joblib", "joblib", "joblib.run(print, 2)"),
        ("ray", "ray", "ray.world([])"),
    ],
)
def test_a_missing_package_is_an_error_that_says_how_to_get_it(package, extra, call):
    code = f"""
        import sys
        sys.modules["{package}"] = None
        from shmring.adapters import {extra}
        try:
            {call}
        except ModuleNotFoundError as error:
            print(error)
        """
    expected = output_of(start(sys.executable, "-c", textwrap.dedent(code)))
    assert expected == (
        f"shmring.adapters.{extra} needs the package '{package}', which is not installed here: "
        f"pip install 'shmring[{extra}]'\n"
    )
