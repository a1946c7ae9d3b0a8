"""Ranks that are killed or stopped at every moment: some by `pytest -m slow`, the rest by `pytest -m soak`.

The points at which they die cost an ordinary build nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks

import shmring
from tests.repo.faults import builds

ROOT = Path(__file__).resolve().parents[2]
FAR_TOO_LONG_S = 300  # for the bounded part, on a machine that is busy with other things
OPERATIONS, OPERATIONS_AT_ONCE, OVERSUBSCRIBED_RANKS, CPUS = 10**8, 10**6, 8, 2
TIMEOUT_S = 60.0


def report(path, *arguments, limit_s=FAR_TOO_LONG_S):
    """Return the findings of python -m tests.repo.faults.report, in a process that imports nothing else."""
    try:
        builds.build()
    except builds.NoBuild as missing:
        pytest.skip(f"there is no build with points to die at: {missing}")
    command = [sys.executable, "-m", "tests.repo.faults.report", "--json", str(path), *map(str, arguments)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHMRING_")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=limit_s)
    assert path.exists(), done.stderr
    return json.loads(path.read_text()), done


def assert_faultless(path, *arguments, limit_s=FAR_TOO_LONG_S):
    found, done = report(path, *arguments, limit_s=limit_s)
    assert not found["faults"], done.stderr[-6000:]
    assert done.returncode == 0
    return found


# ---- the bounded part -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.limit(2 * FAR_TOO_LONG_S)
def test_wherever_a_rank_dies_the_others_say_so_and_go_on(tmp_path):
    bounds = ("--kills", 150, "--seconds", 20, "--at-least", 20)
    found = assert_faultless(tmp_path / "found", *bounds, "--sizes", "8,65536")
    assert found["kills"] >= 20
    assert found["calls_checked"] > found["kills"]


@pytest.mark.slow
@pytest.mark.limit(2 * FAR_TOO_LONG_S)
def test_a_rank_that_was_stopped_is_reported_the_same_and_harms_nobody(tmp_path):
    calls = "all_reduce shared,gather"
    found = assert_faultless(tmp_path / "found", "--kills", 0, "--stops", 3, "--calls", calls)
    assert found["stops"] == 3


def test_an_ordinary_build_has_no_point_to_die_at():
    for path in Path(shmring.__file__).parent.rglob("*.so"):
        assert b"sr_fault" not in path.read_bytes(), path.name


# ---- the long part ----------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.limit(4 * 3600)
def test_ten_thousand_kills(tmp_path):
    found = assert_faultless(tmp_path / "found", "--kills", 10_000, "--stops", 66, limit_s=3.5 * 3600)
    assert found["kills"] >= 10_000


def call_again_and_again(comm, operations):
    x = np.array([float(comm.rank)])
    call = comm.plan("all_reduce", x, "max")
    for _ in range(operations):
        call()
    return float(x[0])


@pytest.fixture
def two_cpus():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:CPUS])
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.soak
@pytest.mark.limit(3 * 3600)
def test_no_false_alarm_in_a_hundred_million_calls_with_four_ranks_on_each_cpu(two_cpus):
    with Ranks(OVERSUBSCRIBED_RANKS) as ranks:
        ranks.meet(timeout_s=TIMEOUT_S)
        for _ in range(OPERATIONS // OPERATIONS_AT_ONCE):
            found = ranks(call_again_and_again, OPERATIONS_AT_ONCE)
            assert found == [OVERSUBSCRIBED_RANKS - 1.0] * OVERSUBSCRIBED_RANKS
