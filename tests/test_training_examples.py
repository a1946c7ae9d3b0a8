"""Examples of methods that train otherwise than plain data parallel. May know: examples/, command lines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmring

pytest.importorskip("sklearn")

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
WATCHDOG_S = 120


def shmrun(nprocs, script, *arguments):
    command = [sys.executable, "-m", "shmring.run", "-n", str(nprocs), "--no-prefix", str(EXAMPLES / script)]
    return subprocess.run(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )


@pytest.mark.limit(150)
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_a_pipeline_comes_to_the_weights_of_the_delayed_update(nprocs):
    done = shmrun(nprocs, "pipeline_digits.py", "--epochs", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to the last bit: yes" in done.stdout
    accuracies = re.search(r"accuracy ([\d.]+) as a pipeline, ([\d.]+) data-parallel", done.stdout)
    assert min(map(float, accuracies.groups())) >= 0.9


@pytest.mark.limit(150)
def test_a_pipeline_that_has_learnt_nothing_has_failed():
    done = shmrun(2, "pipeline_digits.py", "--epochs", "0")
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr
