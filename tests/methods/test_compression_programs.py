"""The example of compressed gradients runs, and prints the right results."""

from pathlib import Path

import pytest
from engines import rows_of, run_ranks

import shmring

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 100

pytestmark = pytest.mark.limit(WATCHDOG_S + 20)


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [2, 1, 4])
def test_compressed_training_learns(nranks):
    pytest.importorskip("sklearn")
    done = run_ranks(
        nranks, ROOT / "examples/compressed_training.py", "--epochs", 6, "--hidden", 32, "--least", 0.8
    )
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
    done = run_ranks(1, ROOT / "examples/compressed_training.py", "--epochs", 0)
    assert done.returncode == 1
    assert "FAILED" in done.stderr
