"""vLLM's own tests of its MessageQueue, with shmring's class in its place.

    python tests/adapters/torch/vllm_upstream.py PATH/tests/distributed/test_shm_broadcast.py [--own] [-k ...]

The file is vLLM's, of the version that is installed: its wheel has no tests, its source distribution has.
`--own` runs vLLM's own class. Needs vLLM, pytest and multiprocess.
"""

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Tests of the memory of vLLM's ring, which has another form here.
EXCLUDED = {
    "test_reader_rechecks_shm_after_idle_wait_timeout_without_notify": "reads the flags of vLLM's ring",
    "test_acquire_read_releases_slot_when_reader_raises": "reads the flags of vLLM's ring",
}

# At the start of every process of the tests, those that vLLM's tests spawn as well.
REPLACE = """
import sys
if "resource_tracker" not in " ".join(sys.orig_argv):
    from vllm.distributed.device_communicators import shm_broadcast
    from shmring.adapters.vllm import MessageQueue
    shm_broadcast.MessageQueue = MessageQueue
"""


class Fixtures:
    """Those of vLLM's conftest.py that the file needs."""

    @pytest.fixture
    def caplog_vllm(self, caplog):
        logger = logging.getLogger("vllm")
        logger.propagate = True
        with caplog.at_level(logging.INFO):
            yield caplog
        logger.propagate = False


def run(arguments):
    """Run pytest in this process."""
    from vllm.distributed.device_communicators import shm_broadcast

    print("the class is", shm_broadcast.MessageQueue, flush=True)
    return pytest.main(arguments, plugins=[Fixtures()])


def main():
    if sys.argv[1:2] == ["--run"]:
        return run(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("file", type=Path, help="vLLM's tests/distributed/test_shm_broadcast.py")
    add("--own", action="store_true", help="vLLM's own class, and all of the tests")
    add("-k", help="tests to run, as for pytest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(options.file, folder)  # away from vLLM's conftest.py, which needs more packages
        path = [os.environ.get("PYTHONPATH", "")]
        arguments = ["-q", "-rA", "-p", "no:cacheprovider", "--tb=short", options.file.name]
        if not options.own:
            (Path(folder) / "site").mkdir()
            (Path(folder) / "site" / "sitecustomize.py").write_text(REPLACE)
            path.insert(0, str(Path(folder) / "site"))
            arguments += [f"--deselect={options.file.name}::{name}" for name in EXCLUDED]
        if options.k:
            arguments += ["-k", options.k]
        command = [sys.executable, str(Path(__file__).resolve()), "--run", *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
