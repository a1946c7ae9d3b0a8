"""Packages written for mpi4py, unchanged; each where it is installed."""

import importlib.util
import re

import pytest
from running import run_code

PROGRAMS = {
    "schwimmbad": """
        import numpy as np
        from schwimmbad import MPIPool

        def square(x):
            return x * x

        with MPIPool() as pool:
            if not pool.is_master():
                pool.wait()
                sys.exit(0)
            print(sum(pool.map(square, range(100))))
    """,
    "emcee": """
        import numpy as np
        import emcee
        from schwimmbad import MPIPool

        def log_probability(x):
            return -0.5 * float(np.sum(x * x))

        with MPIPool() as pool:
            if not pool.is_master():
                pool.wait()
                sys.exit(0)
            np.random.seed(1)
            sampler = emcee.EnsembleSampler(8, 2, log_probability, pool=pool)
            sampler.run_mcmc(np.random.randn(8, 2), 30)
            print(sampler.get_chain().shape)
    """,
    "dlp_mpi": """
        import dlp_mpi

        total = 0
        for number in dlp_mpi.split_managed(list(range(100)), progress_bar=False):
            total += number * number
        totals = dlp_mpi.gather(total)
        if dlp_mpi.IS_MASTER:
            print(sum(totals))
        found = dlp_mpi.bcast("same" if dlp_mpi.IS_MASTER else None)
        assert found == "same"
    """,
    "mpi_list": """
        from mpi_list import Context

        context = Context()
        squares = context.iterates(100).map(lambda x: x * x)
        total = squares.reduce(lambda a, b: a + b, 0)
        if rank == 0:
            print(total)
    """,
    "mpipool": """
        from mpipool import MPIExecutor

        def square(x):
            return x * x

        with MPIExecutor() as pool:
            pool.workers_exit()
            print(sum(pool.map(square, range(100))))
    """,
    "pylops_mpi": """
        import numpy as np
        import pylops_mpi

        array = pylops_mpi.DistributedArray(global_shape=100)
        array[:] = float(array.rank + 1)
        squared = array.dot(array)
        expected = sum(float((part + 1) ** 2) * shape[0] for part, shape in enumerate(array.local_shapes))
        assert np.allclose(squared, expected), (squared, expected)
        assert np.allclose(array.norm(2), expected**0.5)
        assert array.asarray().shape == (100,)
        if rank == 0:
            print("norms agree")
    """,
    "pshmem": """
        import numpy as np
        from mpi4py import MPI
        from pshmem import MPILock, MPIShared

        with MPIShared((10,), np.float64, MPI.COMM_WORLD) as shared:
            shared.set(np.arange(10.0) if rank == 0 else None, fromrank=0)
            assert (shared[:] == np.arange(10.0)).all()
        with MPILock(MPI.COMM_WORLD) as lock:
            lock.lock()
            lock.unlock()
        if rank == 0:
            print("the same everywhere")
    """,
    "ultranest": """
        import numpy as np
        import ultranest

        def log_likelihood(theta):
            return -0.5 * float(np.sum(((theta - 0.5) / 0.1) ** 2))

        np.random.seed(1)
        sampler = ultranest.ReactiveNestedSampler(["a", "b"], log_likelihood)
        result = sampler.run(min_num_live_points=50, max_ncalls=2000, show_status=False, viz_callback=False)
        if rank == 0:
            print("evidence", bool(-6 < result["logz"] < 0))
    """,
    "cobaya": """
        from cobaya.run import run

        info = {
            "likelihood": {"one": {"external": lambda x: -0.5 * x * x, "input_params": ["x"]}},
            "params": {"x": {"prior": {"min": -3, "max": 3}, "proposal": 0.5, "ref": 0.1}},
            "sampler": {"mcmc": {"max_samples": 100, "seed": 1}},
        }
        updated, sampler = run(info)
        if rank == 0:
            print("samples", len(sampler.collection) > 20)
    """,
}
EXPECTED = {
    "schwimmbad": "328350",
    "emcee": r"\(30, 8, 2\)",
    "dlp_mpi": "328350",
    "mpi_list": "328350",
    "mpipool": "328350",
    "pylops_mpi": "norms agree",
    "pshmem": "the same everywhere",
    "ultranest": "evidence True",
    "cobaya": "samples True",
}


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("package", PROGRAMS)
def test_a_client_runs_unchanged(tmp_path, package, nprocs):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    # dlp_mpi insists on the second variable.
    options = {"nprocs": nprocs, "MKL_NUM_THREADS": "1"}
    done = run_code(tmp_path, PROGRAMS[package], "--mpi4py", "--no-prefix", **options)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{EXPECTED[package]}$", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("nprocs", [2, 4])
def test_parallel_tests_of_mpi_pytest_run_on_the_ranks(tmp_path, nprocs):
    if importlib.util.find_spec("pytest_mpi") is None:
        pytest.skip("mpi-pytest is not installed")
    (tmp_path / "test_on_ranks.py").write_text(
        f"""
import pytest
from mpi4py import MPI

@pytest.mark.parallel(nprocs={nprocs})
def test_sum():
    assert MPI.COMM_WORLD.allreduce(1) == {nprocs}
"""
    )
    code = f"""
        import pytest
        options = ["-q", "-p", "no:cacheprovider"]
        sys.exit(pytest.main([*options, {str(tmp_path / "test_on_ranks.py")!r}]))
    """
    done = run_code(tmp_path, code, "--mpi4py", "--no-prefix", nprocs=nprocs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") >= 1
