"""mpi4py.futures on the ranks of a communicator."""

from concurrent.futures import Future, wait

import pytest
from combinations import first
from running import run_code

from shmring.mpi4py.futures.composed import collect, compose

HEAD = """
import time
from mpi4py import MPI, futures

def square(x):
    return x * x

def fail(x):
    raise ValueError(x)

"""


def run(tmp_path, code, *options, nprocs):
    indented = HEAD.replace("\n", "\n        ") + code
    done = run_code(tmp_path, indented, "--mpi4py", "--no-prefix", *options, nprocs=nprocs)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("nprocs", first(2, [4, 1, 2]))
def test_tasks_run_on_the_other_ranks(tmp_path, nprocs):
    code = """
        with futures.MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
            if executor is not None:
                assert executor.num_workers == max(1, MPI.COMM_WORLD.size - 1)
                expected = [x * x for x in range(50)]
                assert list(executor.map(square, range(50))) == expected
                assert list(executor.map(square, range(50), chunksize=7)) == expected
                assert list(executor.map(square, range(50), buffersize=3)) == expected
                assert sorted(executor.map(square, range(50), unordered=True)) == expected
                assert list(executor.starmap(pow, [(2, 3), (3, 2)])) == [8, 9]
                done = futures.as_completed([executor.submit(square, x) for x in range(10)])
                assert sorted(future.result() for future in done) == expected[:10]
                print("all right")
        MPI.COMM_WORLD.Barrier()
    """
    assert run(tmp_path, code, nprocs=nprocs) == ["all right"]


def test_every_rank_can_be_the_one_with_the_executor(tmp_path):
    code = """
        for root in range(MPI.COMM_WORLD.size):
            with futures.MPICommExecutor(MPI.COMM_WORLD, root) as executor:
                assert (executor is not None) == (rank == root)
                if executor is not None:
                    where = executor.submit(MPI.COMM_WORLD.Get_rank).result()
                    assert where != root
                    print(root)
    """
    assert run(tmp_path, code, nprocs=3) == ["0", "1", "2"]


def test_an_exception_comes_with_the_workers_traceback(tmp_path):
    code = """
        with futures.MPICommExecutor() as executor:
            if executor is not None:
                error = executor.submit(fail, 7).exception()
                print(repr(error), "in fail" in str(error.__cause__))
                unpicklable = executor.submit(square, lambda: 0).exception()
                print("pickle" in str(unpicklable))
                print(executor.submit(square, 3).result())
    """
    assert run(tmp_path, code, nprocs=2) == ["ValueError(7) True", "True", "9"]


def test_an_initializer_runs_on_each_worker_and_breaks_the_executor_if_it_fails(tmp_path):
    code = """
        def note(name):
            global noted
            noted = name

        def read(_):
            return noted

        with futures.MPICommExecutor(initializer=note, initargs=("a",)) as executor:
            if executor is not None:
                print(set(executor.map(read, range(20))))
        with futures.MPICommExecutor(initializer=fail, initargs=(1,)) as executor:
            if executor is not None:
                try:
                    while True:
                        executor.submit(square, 1)
                        time.sleep(0.01)
                except futures.BrokenExecutor as error:
                    print(repr(error.__cause__))
        with futures.MPICommExecutor(initializer=fail, initargs=(2,)) as executor:
            if executor is not None:
                try:
                    error = executor.submit(square, 1).exception()
                except futures.BrokenExecutor as raised:  # the failure is known already
                    error = raised
                print(repr(error))
    """
    broken = "BrokenExecutor('the initializer failed')"
    assert run(tmp_path, code, nprocs=3) == ["{'a'}", "ValueError(1)", broken]


def test_futures_are_made_of_futures():
    one, other = Future(), Future()
    both = collect([one, other])
    length = compose(both, len)
    named = compose(one, excepthook=lambda error: "failed")
    raised = compose(other, lambda value: 1 // value, lambda error: OSError(7))
    one.set_result(3)
    assert not both.done()
    other.set_result(0)
    assert (both.result(), length.result(), named.result()) == ([3, 0], 2, 3)
    assert isinstance(raised.exception(), ZeroDivisionError)
    assert collect([]).result() == []
    failing, never = Future(), Future()
    both = collect([failing, never])
    named = compose(failing, excepthook=lambda error: "failed")
    other = compose(failing, excepthook=lambda error: OSError(7))
    failing.set_exception(ValueError(5))
    assert isinstance(both.exception(), ValueError)
    assert isinstance(other.exception(), OSError)
    assert named.result() == "failed"
    composed = compose(never)
    assert composed.cancel()
    assert never.cancelled()
    left = Future()
    failed, after = collect([failing, left]), collect([never])
    assert left.cancelled()
    assert wait([composed, failed, after], timeout=20).not_done == set()


def test_shutdown_waits_or_cancels(tmp_path):
    code = """
        with futures.MPICommExecutor() as executor:
            if executor is not None:
                given = [executor.submit(time.sleep, 0.2) for _ in range(5)]
                executor.shutdown(cancel_futures=True)
                print([future.cancelled() for future in given])
                try:
                    executor.submit(square, 1)
                except RuntimeError as error:
                    print(error)
    """
    lines = run(tmp_path, code, nprocs=2)
    assert lines == [
        "[False, True, True, True, True]",
        "cannot submit a task: the executor has been shut down",
    ]


@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_program_under_the_command_has_the_other_ranks_as_workers(tmp_path, nprocs):
    (tmp_path / "program.py").write_text(
        """
import sys
from mpi4py import futures

def total(n):
    comm = futures.get_comm_workers()
    comm.Barrier()
    return comm.allreduce(n)

if __name__ == "__main__":
    with futures.MPIPoolExecutor() as executor:
        each = [executor.submit(total, 5) for _ in range(executor.num_workers)]
        print([future.result() for future in each], sys.argv[1:])
    sys.exit()
"""
    )
    code = f"""
        import runpy
        sys.argv[1:] = [{str(tmp_path / "program.py")!r}, "-x"]
        runpy.run_module("mpi4py.futures", run_name="__main__", alter_sys=True)
    """
    workers = max(1, nprocs - 1)
    assert run(tmp_path, code, nprocs=nprocs) == [f"{[5 * workers] * workers} ['-x']"]


@pytest.mark.parametrize(
    ("last", "status", "tracebacks"), [("sys.exit(3)", 3, 0), ("raise KeyError(4)", 1, 1)]
)
def test_a_program_that_fails_leaves_no_tracebacks_of_workers(tmp_path, last, status, tracebacks):
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import sys
from mpi4py import futures

if __name__ == "__main__":
    with futures.MPIPoolExecutor() as executor:
        assert executor.submit(abs, -5).result() == 5
    {last}
"""
    )
    code = f"""
        import runpy
        sys.argv[1:] = [{str(program)!r}]
        runpy.run_module("mpi4py.futures", run_name="__main__", alter_sys=True)
    """
    done = run_code(tmp_path, HEAD.replace("\n", "\n        ") + code, "--mpi4py", nprocs=3)
    assert done.returncode == status, done.stderr
    assert done.stderr.count("Traceback") == tracebacks, done.stderr
    assert f"rank 0 of 3 failed first: exit status {status}" in done.stderr.splitlines()[-1]


def test_a_pool_that_would_spawn_is_refused(tmp_path):
    code = """
        try:
            futures.MPIPoolExecutor()
        except NotImplementedError as error:
            print(error)
    """
    (line,) = run(tmp_path, code, nprocs=1)
    assert line.startswith("shmring's MPI spawns no processes: run the program by `-m mpi4py.futures`")


def test_futures_are_done_after_a_shutdown(tmp_path):
    code = """
        from mpi4py.futures import pool

        class Slow(futures.Future):
            def set_result(self, result):
                time.sleep(0.3)
                super().set_result(result)

        with futures.MPICommExecutor() as executor:
            if executor is not None:
                pool.Future = Slow
                future = executor.submit(square, 3)
                executor.shutdown()
                print(future.done())
    """
    assert run(tmp_path, code, nprocs=2) == ["True"]


def test_a_callback_does_not_wait_for_itself(tmp_path):
    code = """
        with futures.MPICommExecutor() as executor:
            if executor is not None:
                def end(future):
                    try:
                        executor.shutdown()
                    except RuntimeError as error:
                        print("callback" in str(error))
                        executor.shutdown(wait=False)
                executor.submit(square, 3).add_done_callback(end)
    """
    assert run(tmp_path, code, nprocs=2) == ["True"]


@pytest.mark.parametrize("ntasks", [0, 3])
def test_the_death_of_a_worker_breaks_the_executor(tmp_path, ntasks):
    code = f"""
        def who():
            time.sleep(0.3)  # so that each worker gets one of these tasks
            return os.getpid()

        with futures.MPICommExecutor() as executor:
            if executor is not None:
                pids = [each.result() for each in [executor.submit(who) for _ in range(2)]]
                given = [executor.submit(time.sleep, 1) for _ in range({ntasks})]
                time.sleep(0.1)
                os.kill(pids[0], signal.SIGKILL)
                for _ in range(100):
                    try:
                        given.append(executor.submit(square, 3))
                    except futures.BrokenExecutor as error:
                        print(error, repr(error.__cause__.Get_error_class() == MPI.ERR_PROC_FAILED))
                        break
                    time.sleep(0.1)
                found = [each.exception(timeout=20) for each in given]
                print({{type(error) for error in found[:{ntasks}]}} <= {{futures.BrokenExecutor}})
        print("left")
    """
    lines = run(tmp_path, code, "--keep-going", nprocs=3)
    assert sorted(lines) == sorted(["a worker has died True", "True", "left", "left"])
