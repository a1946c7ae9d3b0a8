"""The example of compressed gradients runs, and prints the right results."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmring

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 100

pytestmark = pytest.mark.limit(WATCHDOG_S + 20)


def run(nranks, program, *options):
    """Run the program on this number of ranks."""
    command = ["-m", "shmring.run", "--no-prefix", "-n", nranks, ROOT / program, *options]
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )


def rows_of(table):
    """By its first cell, the other cells of each row."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*", table, re.M)
    ]
    return {name: cells for name, *cells in rows[2:]}


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [2, 1, 4])
def test_compressed_training_learns(nranks):
    pytest.importorskip("sklearn")
    done = run(nranks, "examples/compressed_training.py", "--epochs", 6, "--hidden", 32, "--least", 0.8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{nranks} rank(s), 6 epochs" in done.stdout
    assert "weights bit-identical on all ranks: yes" in done.stdout
    rows = rows_of(done.stdout)
    assert len(rows) == 9
    loss = {name: float(cells[0]) for name, cells in rows.items()}
    for name in ("top-k 1 %", "PowerSGD rank 2"):
        assert loss[f"{name} + feedback"] < loss[name]
    assert abs(loss["int8"] - loss["none"]) < 0.05 * loss["none"]
    assert float(rows["bf16"][-1]) == 2


@pytest.mark.slow
def test_an_accuracy_under_the_threshold_is_a_failed_run():
    pytest.importorskip("sklearn")
    done = run(1, "examples/compressed_training.py", "--epochs", 0)
    assert done.returncode == 1
    assert "FAILED" in done.stderr
