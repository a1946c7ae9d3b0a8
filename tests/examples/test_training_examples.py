"""Examples of methods other than plain data-parallel training."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from combinations import first
from engines import needs

import shmring

pytestmark = needs("sklearn")

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", first(1, [2, 1, 4]))
def test_a_pipeline_comes_to_the_weights_of_the_delayed_update(nprocs):
    done = shmrun(nprocs, "pipeline_digits.py", "--epochs", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to the last bit: yes" in done.stdout
    accuracies = re.search(r"accuracy ([\d.]+) as a pipeline, ([\d.]+) data-parallel", done.stdout)
    assert min(map(float, accuracies.groups())) >= 0.9


@pytest.mark.slow
def test_a_pipeline_that_has_learnt_nothing_has_failed():
    done = shmrun(2, "pipeline_digits.py", "--epochs", "0")
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_fewer_synchronisations_train_as_well_and_all_skip_together(nprocs):
    done = shmrun(nprocs, "fewer_synchronisations.py", "--epochs", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w.*?) +([\d.]+) +([\d,]+) +([\d,]+) +[\d.]+$", done.stdout, re.MULTILINE)
    assert [row[2] for row in rows] == ["640", "160", "80", "40", "321", "161", "159"]
    assert all(float(row[1]) >= 0.9 for row in rows)
    assert float(re.search(r"four times as large: ([\d.e+-]+)", done.stdout)[1]) <= 1e-9
    assert "skipped steps [5], the same on all ranks: yes" in done.stdout
    assert "bit-identical on all ranks: yes" in done.stdout
