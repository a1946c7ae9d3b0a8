"""The example for PyTorch trains the same through gloo, through shmring, and alone."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shmring

pytest.importorskip("torch")

PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "torch_ddp.py")
FEW = ("--steps", "12", "--width", "4", "--repeats", "2")
LAUNCHED = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WATCHDOG_S = 100


@pytest.fixture
def installed(tmp_path):
    """Return a folder that makes torch find shmring as if it were installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    here = tmp_path / "installed"
    about = here / "shmring_of_the_test-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shmring-of-the-test\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    return here


def run(*command, path):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, PACKAGE_PARENT]))},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )


def figures(done, *, may_end_badly=False):
    """First and last loss, accuracy, and the checksum of the weights."""
    assert may_end_badly or done.returncode == 0, done.stdout + done.stderr
    found = re.search(
        r"loss first ([\d.]+), last ([\d.]+)\naccuracy ([\d.]+) .*\nstep [\d.]+ ms .*\n"
        r"communication -?[\d.]+% of a step\nchecksum of the weights ([\d.]+)",
        done.stdout,
    )
    assert found, done.stdout + done.stderr
    return [float(figure) for figure in found.groups()]


@pytest.mark.limit(240)
def test_gloo_shmring_and_one_rank_come_to_the_same(installed):
    pytest.importorskip("sklearn")
    # One in ten of gloo's processes is ended by its threads, at the interpreter's end: "terminate called
    # without an active exception".
    gloo = figures(run(*LAUNCHED, EXAMPLE, *FEW, "--backend", "gloo", path=[installed]), may_end_badly=True)
    shmring_too = figures(run(*LAUNCHED, EXAMPLE, *FEW, "--backend", "shmring", path=[installed]))
    shared = figures(run(*LAUNCHED, EXAMPLE, *FEW, "--share-buckets", path=[installed]))
    alone = figures(run(EXAMPLE, *FEW, path=[installed]))
    assert shared == pytest.approx(shmring_too, rel=1e-5)
    assert shmring_too == pytest.approx(gloo, rel=1e-5)
    assert alone == pytest.approx(gloo, rel=1e-4)


def test_a_batch_that_the_ranks_cannot_share_is_refused(installed):
    pytest.importorskip("sklearn")
    done = run(*LAUNCHED, EXAMPLE, *FEW, "--batch", "33", path=[installed])
    assert done.returncode != 0
    assert "--batch 33: a multiple of the ranks" in done.stderr


def test_plain_lines_without_tqdm(installed, tmp_path):
    pytest.importorskip("sklearn")
    (tmp_path / "tqdm.py").write_text("raise ImportError")
    done = run(EXAMPLE, *FEW, path=[tmp_path, installed])
    figures(done)
    assert "step 12/12" in done.stderr


def test_without_the_digits_it_says_what_is_missing(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError")
    done = run(EXAMPLE, path=[tmp_path])
    assert done.returncode != 0
    assert "pip install scikit-learn" in done.stderr
