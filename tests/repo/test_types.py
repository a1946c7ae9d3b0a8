"""A user's program passes strict type checkers with the package as a wheel installs it, and runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shmring

PACKAGE = Path(shmring.__file__).resolve().parent
PROGRAM = Path(__file__).with_name("typed_program.py")
TYPES = {".py", ".pyi", ".typed"}  # suffixes of what type checkers read
LIMIT_S = 150
WRONG = """
import numpy as np
import shmring

def wrong(comm: shmring.Comm) -> str:
    comm.all_reduce(np.ones(1), algorithm="rings")
    comm.gather(np.ones(1)).sum()
    comm.split(None).rank
    comm.all_reduce(1.0, async_op=True) + 1
    comm.isend(np.ones(1), 0).wait().source
    return comm.all_reduce(1.0)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a process that finds the package in a folder of its own, not in the checkout."""
    site = tmp_path_factory.mktemp("site")
    for path in PACKAGE.rglob("*"):
        if path.suffix in TYPES or path.name == "py.typed":
            copy = site / path.relative_to(PACKAGE.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return {**os.environ, "PYTHONPATH": str(site)}


def checked(command, folder, env):
    """Run a type checker; return its exit status and what it printed."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


def mypy(program, env, folder):
    pytest.importorskip("mypy")
    return checked([sys.executable, "-m", "mypy", "--strict", program.name], folder, env)


def pyright(program, env, folder):
    command = shutil.which("pyright")
    if command is None:
        pytest.skip("pyright is not installed")
    settings = {"include": [program.name], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    return checked([command, "--pythonpath", sys.executable, "--project", "."], folder, env)


@pytest.mark.slow
@pytest.mark.limit(2 * LIMIT_S)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_the_program_passes(checker, installed, tmp_path):
    program = shutil.copy(PROGRAM, tmp_path)
    status, printed = checker(Path(program), installed, tmp_path)
    assert status == 0, printed


@pytest.mark.slow
@pytest.mark.limit(2 * LIMIT_S)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_wrong_programs_do_not_pass(checker, installed, tmp_path):
    program = tmp_path / "wrong.py"
    program.write_text(WRONG)
    status, printed = checker(program, installed, tmp_path)
    assert status == 1, printed
    for line in range(6, 12):
        assert f"wrong.py:{line}:" in printed, f"line {line} passes: {printed}"


@pytest.mark.limit(2 * LIMIT_S)
def test_the_program_runs(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    status, printed = checked([sys.executable, PROGRAM, str(LIMIT_S - 30)], tmp_path, env)
    assert status == 0, printed
