"""A part of mpi4py's own tests, at 2 ranks: those files whose tests all pass in a few seconds."""

import fcntl
import subprocess

import pytest
from combinations import first

from tests.mpi4py import upstream

FILES = ["test_win", "test_msgzero", "test_status", "test_toplevel", "test_pickle"]
FILES += ["test_group", "test_cco_ngh_obj", "test_util_sync"]


@pytest.fixture(scope="session")
def tests(tmp_path_factory):
    """mpi4py's folder of tests; one worker of pytest downloads it for all of them."""
    folder = tmp_path_factory.getbasetemp().parent / "mpi4py-sdist"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "failed").exists():
            pytest.skip((folder / "failed").read_text())
        archive = folder / f"mpi4py-{upstream.VERSION}.tar.gz"
        if not archive.exists():
            try:
                upstream.download(folder)
            except (subprocess.SubprocessError, OSError) as error:
                reason = f"mpi4py {upstream.VERSION} cannot be downloaded by pip: {type(error).__name__}"
                (folder / "failed").write_text(reason)
                pytest.skip(reason)
        return upstream.unpack(archive, folder)


@pytest.mark.parametrize("file", first(5, FILES))
def test_a_file_of_mpi4pys_tests_passes(tests, file):
    table = upstream.run(tests, 2, [f"^{file}$"])
    assert not upstream.bad(table)
    assert list(table.values()).count((upstream.PASSED, "")) > 3


def test_every_exclusion_has_a_reason_and_stands_for_something(tests):
    for pattern, reason in upstream.exclusions():
        assert len(reason) > 10, pattern
        assert list(tests.glob(f"{pattern.partition('.')[0]}.py")), pattern


@pytest.mark.slow
def test_a_test_that_fails_on_one_rank_fails(tmp_path):
    """The table is not to say that a test passed if one rank failed, hung or died in it."""
    (tmp_path / "test_some.py").write_text(
        """
import os, time, unittest
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()

class Some(unittest.TestCase):
    def test_a(self):
        pass

    def test_b(self):
        self.assertNotEqual(rank, 1)

    def test_c(self):
        with self.subTest():
            self.assertNotEqual(rank, 0)

    def test_d(self):
        if rank == 1:
            os._exit(0)

    def test_e(self):
        self.skipTest("no")
"""
    )
    outcomes = {
        test.rpartition(".")[2]: outcome
        for test, (outcome, _) in upstream.run(tmp_path, 2, excluded=[]).items()
    }
    assert outcomes["test_a"] == "passed"
    assert outcomes["test_b"] == outcomes["test_c"] == "failed"
    assert outcomes["test_d"] == "hung"
    assert outcomes["test_e"] == "skipped"
