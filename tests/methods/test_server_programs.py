"""The parameter server's example, on small settings."""

import re
from pathlib import Path

import pytest
from combinations import first
from engines import run_ranks

import shmring

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_PARENT = Path(shmring.__file__).resolve().parent.parent
WATCHDOG_S = 100

pytestmark = pytest.mark.limit(WATCHDOG_S + 20)


def train(nranks, *options):
    pytest.importorskip("sklearn")
    return run_ranks(nranks, ROOT / "examples" / "parameter_server.py", *options)


@pytest.mark.slow
@pytest.mark.parametrize(("nranks", "dedicated"), first(1, [(4, 1), (2, 0), (1, 0)]))
def test_every_way_trains_the_digits(nranks, dedicated):
    options = ("--steps", 300, "--lr", 0.2, "--slow-ms", 0.2, "--hidden", 32, "--staleness", 3)
    done = train(nranks, *options, "--dedicated", dedicated)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{nranks} rank(s), {dedicated} of which" in done.stdout
    found = re.findall(r"^\| ([^|]*) \| ([\d.]+) \| (\d+) \|", done.stdout, re.M)
    sharded = [] if dedicated else ["synchronous, sharded"]
    assert [way for way, _, _ in found] == ["all_reduce", "synchronous", *sharded, "asynchronous"]
    assert all(float(accuracy) >= 0.9 for _, accuracy, _ in found)
    assert all(int(ahead) <= (3 if way == "asynchronous" else 0) for way, _, ahead in found)
    assert "bit-identical to those by all_reduce: yes" in done.stdout


def test_too_little_training_is_a_failed_run():
    done = train(1, "--steps", 1)
    assert done.returncode == 1
    assert "FAILED" in done.stderr


def test_somebody_has_to_work():
    done = train(2, "--dedicated", 2)
    assert done.returncode == 1
    assert "leaves nobody to work" in done.stderr
