"""The examples run as the README says and their own checks pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import needs

import shmring

pytestmark = needs("sklearn")

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIGITS = str(EXAMPLES / "train_digits.py")
WATCHDOG_S = 120


def run(*command, path=PACKAGE_PARENT):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )


def shmrun(nprocs, *command):
    return run("-m", "shmring.run", "-n", str(nprocs), *command)


def assert_trained(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.search(r"^(?:\d+\| )?accuracy ([\d.]+)", done.stdout, re.MULTILINE)[1]) >= 0.95
    assert "weights bit-identical on all ranks: yes" in done.stdout
    assert float(re.search(r"one-rank run: ([\d.e+-]+)", done.stdout)[1]) <= 1e-5


def test_two_ranks_train_what_one_would():
    done = shmrun(2, DIGITS)
    assert_trained(done)
    assert "2 rank(s)" in done.stdout
    assert "samples/s" in done.stdout
    assert "%|" not in done.stderr  # no progress bar, as this is no terminal


@pytest.mark.slow
def test_uneven_shards_train_what_one_would():
    # 3 ranks share batches of 50; the last one of an epoch has 37.
    assert_trained(shmrun(3, DIGITS, "--batch", "50", "--hidden", "32"))


def test_runs_alone():
    done = run(DIGITS, "--epochs", "30")
    assert_trained(done)
    assert "1 rank(s)" in done.stdout


@pytest.mark.slow
def test_plain_lines_without_tqdm(tmp_path):
    (tmp_path / "tqdm.py").write_text("raise ImportError")
    done = run(DIGITS, "--epochs", "30", path=f"{tmp_path}{os.pathsep}{PACKAGE_PARENT}")
    assert_trained(done)
    assert "epoch 30/30" in done.stderr


@pytest.mark.slow
def test_a_failed_check_is_a_failed_run():
    done = shmrun(2, DIGITS, "--epochs", "0")
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr


def test_the_table_has_every_example_and_their_flags_are_real():
    table = (EXAMPLES / "README.md").read_text()
    linked = {path for path in re.findall(r"\]\(([\w/.]+)\)", table) if not path.startswith("..")}
    suffixes = {".py", ".ipynb", ".yaml"}
    there = {path for path in EXAMPLES.rglob("*") if path.suffix in suffixes and "." not in path.parent.name}
    helpers = {"digits.py", "terminal.py"}
    assert linked == {path.relative_to(EXAMPLES).as_posix() for path in there} - helpers
    for script, flags in re.findall(r"`[^`\n]* examples/([\w/]+\.py)([^`\n]*)`", table):
        text = (EXAMPLES / script).read_text()
        assert all(f'"{flag}"' in text for flag in re.findall(r"--[\w-]+", flags)), (script, flags)


def test_without_the_digits_it_says_what_is_missing(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError")
    done = run(DIGITS, path=f"{tmp_path}{os.pathsep}{PACKAGE_PARENT}")
    assert done.returncode == 1
    assert done.stderr == "the digits come with scikit-learn: pip install scikit-learn\n"
